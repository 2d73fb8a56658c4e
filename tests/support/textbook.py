"""Attention as textbooks write it: classes that headprune has no rule for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import randomise


class LinearNames(nn.Module):
    """q_linear, k_linear, v_linear, out_linear; head_dim; a final view to d_model."""

    def __init__(self, d_model: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.d_model, self.num_heads, self.head_dim = d_model, heads, d_model // heads
        self.q_linear, self.k_linear, self.v_linear, self.out_linear = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        rows = q.size(0)
        q = self.q_linear(q).view(rows, -1, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_linear(k).view(rows, -1, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_linear(v).view(rows, -1, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        out = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.out_linear(out.transpose(1, 2).contiguous().view(rows, -1, self.d_model))


def sequence_mask(x: Tensor, valid: Tensor, value: float) -> Tensor:
    x[~(torch.arange(x.size(1), device=x.device)[None, :] < valid[:, None])] = value
    return x


def masked_softmax(x: Tensor, valid_lens: Tensor | None) -> Tensor:
    """D2L 11.3."""
    if valid_lens is None:
        return F.softmax(x, dim=-1)
    shape = x.shape
    lens = torch.repeat_interleave(valid_lens, shape[1]) if valid_lens.dim() == 1 else valid_lens.reshape(-1)
    x = sequence_mask(x.reshape(-1, shape[-1]), lens, -1e6)
    return F.softmax(x.reshape(shape), dim=-1)


class D2LDotProduct(nn.Module):
    """D2L 11.3's DotProductAttention."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), v)


class D2LMultiHead(nn.Module):
    """D2L 11.5's MultiHeadAttention: heads in the batch dimension, valid_lens repeated by heads."""

    def __init__(self, num_hiddens: int = 32, num_heads: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = D2LDotProduct()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(num_hiddens, num_hiddens, bias=bias) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        queries = self.transpose_qkv(self.W_q(queries))
        keys = self.transpose_qkv(self.W_k(keys))
        values = self.transpose_qkv(self.W_v(values))
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        return self.W_o(self.transpose_output(self.attention(queries, keys, values, valid_lens)))

    def transpose_qkv(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def transpose_output(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, self.num_heads, x.shape[1], x.shape[2]).permute(0, 2, 1, 3)
        return x.reshape(x.shape[0], x.shape[1], -1)


class HeadsFirst(D2LMultiHead):
    """(heads * batch, …) instead of (batch * heads, …)."""

    def transpose_qkv(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(2, 0, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def transpose_output(self, x: Tensor) -> Tensor:
        x = x.reshape(self.num_heads, -1, x.shape[1], x.shape[2]).permute(1, 2, 0, 3)
        return x.reshape(x.shape[0], x.shape[1], -1)


class Classifier(nn.Module):
    """Two attention layers with residuals behind a linear head."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([first, second])
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)]), nn.Linear(32, 3)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x, x, x, extra))
        return self.head(x.mean(dim=1))


class TransformerBlock(nn.Module):
    """Post-norm block; with ``cross`` a decoder's."""

    def __init__(self, cross: bool, width: int = 32) -> None:
        super().__init__()
        self.self_attention = LinearNames(width)
        self.cross_attention = LinearNames(width) if cross else None
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.feed_forward = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, width))

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        x = self.norms[0](x + self.self_attention(x, x, x, mask))
        if self.cross_attention is not None and memory is not None:
            x = self.norms[1](x + self.cross_attention(x, memory, memory, memory_mask))
        return self.norms[2](x + self.feed_forward(x))


class EncoderDecoder(nn.Module):
    """The Transformer with self-, masked and cross-attention, padding and future masks."""

    def __init__(self, vocabulary: int = 30, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList([TransformerBlock(False) for _ in range(2)])
        self.decoder = nn.ModuleList([TransformerBlock(True) for _ in range(2)])
        self.out = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = (source != 0)[:, None, None]
        future = (target != 0)[:, None, None] & torch.ones(target.size(1), target.size(1)).tril().bool().to(
            target.device
        )
        memory, hidden = self.source(source), self.target(target)
        for block in self.encoder:
            memory = block(memory, padding)
        for block in self.decoder:
            hidden = block(hidden, future, memory, padding)
        return self.out(hidden)


class MinGPTAttention(nn.Module):
    """Fused QKV, a causal ``bias`` buffer, ``C // n_head``; the heads go straight into the residual stream."""

    def __init__(self, n_embd: int = 32, n_head: int = 4, block_size: int = 16) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.attn_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))
        self.n_head = n_head
        self.n_embd = n_embd

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return (att @ v).transpose(1, 2).contiguous().view(B, T, C)


class MinGPT(nn.Module):
    """Two blocks of `MinGPTAttention` and a token at a time to predict."""

    def __init__(self, n_embd: int = 32, vocabulary: int = 30) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, n_embd)
        self.wpe = nn.Embedding(16, n_embd)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(n_embd), "attn": MinGPTAttention(n_embd), "ln_2": nn.LayerNorm(n_embd),
                    "mlp": nn.Sequential(nn.Linear(n_embd, 48), nn.GELU(), nn.Linear(48, n_embd)),
                }
            )
            for _ in range(2)
        )  # fmt: skip
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocabulary, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def hidden(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(seed))


def tokens(length: int, seed: int) -> torch.Tensor:
    ids = torch.randint(1, 30, (3, length), generator=torch.Generator().manual_seed(seed))
    ids[1, -2:] = 0
    return ids


CLASSES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "linear names": lambda: (Classifier(LinearNames(), LinearNames()), hidden()),
    "d2l": lambda: (Classifier(D2LMultiHead(), D2LMultiHead(bias=True)), (hidden(), torch.tensor([4, 6, 2]))),
    "d2l without lengths": lambda: (Classifier(D2LMultiHead(), D2LMultiHead()), hidden()),
    "heads first": lambda: (Classifier(HeadsFirst(), HeadsFirst()), hidden()),
    "mingpt": lambda: (MinGPT(), tokens(8, 3)),
    "encoder-decoder": lambda: (EncoderDecoder(), (tokens(7, 0), tokens(5, 1))),
}


def made(name: str) -> tuple[nn.Module, Any]:
    model, example = CLASSES[name]()
    return randomise(model), example
