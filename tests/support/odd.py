"""Modules that make, mix or join their heads in ways of their own; each once fooled the trace, a mask or the proof."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.plain import HEADS, SIZE, WIDTH, Attention, Bare, Normed

# -- heads that can be pruned ---------------------------------------------------------------------


class HeadsLast(Attention):
    """Scores ``[batch, query, key, head]``, a softmax over the third dimension."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        weights = (torch.einsum("bihd,bjhd->bijh", q, k) / 3).softmax(2)
        return self.o(self.joined(torch.einsum("bijh,bjhd->bhid", weights, v)))


class HeadsThird(Attention):
    """Weights ``[batch, query, head, key]``: with as many tokens as heads, these were exchanged; with fewer, it crashed."""

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        q, k, v = self.split(x)
        weights = (torch.einsum("bhid,bhjd->bihj", q, k) / 3).softmax(-1)
        return self.joined(torch.einsum("bihj,bhjd->bhid", weights, v))


class AsManyWindows(Attention):
    """``[batch, window, head, token, features]``, and as many windows as heads, for which they were taken."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in super().split(x))

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        result = F.scaled_dot_product_attention(*self.split(F.pad(x, (0, 0, 0, -x.shape[1] % HEADS))))
        return self.joined(result.transpose(1, 2).flatten(2, 3))[:, : x.shape[1]]


class HeadsFirst(Attention):
    """``[heads, batch, tokens, features]``: two examples were taken for two heads."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(0, 1) for t in super().split(x))

    def joined(self, result: Tensor) -> Tensor:
        return super().joined(result.transpose(0, 1))


class EagerHeadsFirst(HeadsFirst):
    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        q, k, v = self.split(x)
        return self.joined((q @ k.mT / 3).softmax(-1) @ v)


class Folded(Attention):
    """``[batch * heads, 1, tokens, features]``, for kernels that want four dimensions: all heads were taken for one."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.flatten(0, 1)[:, None] for t in super().split(x))

    def joined(self, result: Tensor) -> Tensor:
        return super().joined(result.unflatten(0, (-1, self.num_heads)).flatten(2, 3))


class Parallel(Attention):
    """W_O reads hidden features of an MLP, too: they went with the last head."""

    def build(self) -> None:
        self.up, self.o = nn.Linear(WIDTH, 48), nn.Linear(WIDTH + 48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat([self.attend(x), self.up(x).relu()], -1))


class Convolutions(Attention):
    """Projections are convolutions one wide, as in diffusion models."""

    def build(self) -> None:
        self.qkv, self.o = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(1, (self.num_heads, -1)).mT for t in self.qkv(x.mT).chunk(3, 1))
        return self.o(self.joined(F.scaled_dot_product_attention(q, k, v)).mT).mT


class Differential(Attention):
    """Each head is the difference of two fused attentions."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        first, second = (
            F.scaled_dot_product_attention(*halves, v) for halves in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return self.o(self.joined(first - 0.4 * second))


class Tables(Attention):
    """Projections are parameters ``[heads, width, features]``."""

    def build(self) -> None:
        self.weights = nn.ParameterList(torch.randn(HEADS, WIDTH, SIZE) for _ in range(3))
        del self.qkv

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.einsum("btw,hwd->bhtd", x, weight) for weight in self.weights)


class QueryGroups(Attention):
    """As LitGPT: queries, keys and values of a group side by side, and ``n_query_groups`` groups."""

    groups = 2

    def build(self) -> None:
        self.n_head, self.n_query_groups = HEADS, self.groups
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * self.groups) * SIZE)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        each = self.n_head // self.n_query_groups
        qkv = self.qkv(x).view(*x.shape[:2], self.n_query_groups, each + 2, SIZE).permute(0, 2, 3, 1, 4)
        q, k, v = (t.flatten(1, 2) for t in qkv.split((each, 1, 1), 2))
        return q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)


class QueryGroupsOfOne(QueryGroups):
    groups = HEADS


class KeyValueGroups(Attention):
    """As "Build a Large Language Model (From Scratch)": ``num_kv_groups`` counts the groups, ``group_size`` a group's heads."""

    def build(self) -> None:
        self.num_kv_groups, self.group_size = 2, HEADS // 2
        self.qkv, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * SIZE), nn.Linear(WIDTH, 2 * SIZE)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q = self.qkv(x).view(*x.shape[:2], self.num_heads, SIZE).transpose(1, 2)
        k, v = (p(x).view(*x.shape[:2], self.num_kv_groups, SIZE).transpose(1, 2) for p in (self.k, self.v))
        return q, k.repeat_interleave(self.group_size, 1), v.repeat_interleave(self.group_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.o(self.joined((q @ k.mT / 3).softmax(-1) @ v))


class Interleaved(KeyValueGroups):
    """Keys repeated as (0, 1, 0, 1), not (0, 0, 1, 1)."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().split(x)
        order = torch.arange(self.num_heads).view(self.num_kv_groups, -1).T.flatten()
        return q, k[:, order], v[:, order]


class GroupsApart(KeyValueGroups):
    """``[batch, group, head, token, features]``: a group was taken for a head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (self.qkv, self.k, self.v))
        q = q.unflatten(1, (self.num_kv_groups, -1))
        return self.o(self.joined(((q @ k[:, :, None].mT / 3).softmax(-1) @ v[:, :, None]).flatten(1, 2)))


class GroupsLast(KeyValueGroups):
    """``[batch, head, group, token, features]``, in a fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (self.qkv, self.k, self.v))
        q = q.unflatten(1, (-1, self.num_kv_groups))
        k, v = (t[:, None].expand(-1, q.shape[1], -1, -1, -1) for t in (k, v))
        return self.o(self.joined(F.scaled_dot_product_attention(q, k, v).flatten(1, 2)))


class NormOfEach(Attention):
    """A group norm over single heads before W_O, as in RetNet."""

    def build(self) -> None:
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def joined(self, result: Tensor) -> Tensor:
        normed = self.norm(result.transpose(1, 2).flatten(0, 1).flatten(1))
        return super().joined(normed.view(len(result), -1, *result.shape[1::2]).transpose(1, 2))


class RMSNormBefore(Normed):
    """A norm over all heads before W_O that leaves zeros zero."""


class Biased(Attention):
    """A bias of each head by distance."""

    def build(self) -> None:
        self.table = nn.Embedding(15, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        bias = self.table((place - place[:, None]).clamp(-7, 7) + 7).permute(2, 0, 1)[None]
        return self.o(self.attend(x, attn_mask=bias))


class Twice(nn.Module):
    """One attention module that runs in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Biased(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(self.attention(x)))


class BareInResidual(nn.Module):
    """Linear layers that read the residual stream behind an attention without W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.head = Bare(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return self.head(x + self.mlp(x).relu())


class Windowed(Attention):
    """nanoGPT's split by the width, and a window that happens to be as long as the model is wide."""

    def build(self) -> None:
        self.n_embd, self.window = WIDTH, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).split(self.n_embd, 2))
        i = torch.arange(x.shape[1])
        near = (i[:, None] - i[None, :]).abs() < self.window
        return self.o(self.joined(F.scaled_dot_product_attention(q, k, v, attn_mask=near)))


class Unseen(Attention):
    """Queries, keys and values of all heads by one parameter, behind a ReLU that leaves every token other features."""

    def build(self) -> None:
        self.qkv, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(3, HEADS, WIDTH, SIZE))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.einsum("btc,nhcd->nbhtd", self.qkv(x).relu(), self.weight))


# -- heads that can only be masked ----------------------------------------------------------------


class NormBefore(Normed):
    """A mean over all heads, which gives something to those that are removed."""

    norm_class = nn.LayerNorm


class SharedDropout(NormBefore):
    """One dropout for the attention and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.o(self.norm(self.drop(self.attend(x)))))


class Watched(NormBefore):
    """A module that looks at the probabilities, beside the way to W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = nn.Identity()

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT / 3).softmax(-1)
        self.watch(weights)
        return self.joined(weights @ v)


class LowRank(nn.Module):
    """A low-rank addition to a linear layer, as PEFT's LoRA is; on or off."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.on = base, True
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x)) if self.on else self.base_layer(x)


class Adapted(Attention):
    def build(self) -> None:
        self.o = LowRank(self.o)


class Talking(Attention):
    """Talking heads: each head's weights are a mixture of all heads' probabilities."""

    def __init__(self, mix: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.mix: nn.Module = nn.Linear(HEADS, HEADS, bias=False) if mix is nn.Linear else nn.Conv2d(HEADS, HEADS, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT / 3).softmax(-1)
        by_linear = isinstance(self.mix, nn.Linear)
        weights = self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if by_linear else self.mix(weights)
        return self.o(self.joined(weights @ v))


class TalkingByConvolution(Talking):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d)


# -- heads that are not even masked ---------------------------------------------------------------


class OwnWeight(Attention):
    """W_O is a parameter of the attention module itself."""

    def build(self) -> None:
        self.o, self.weight = None, nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.attend(x), self.weight)


class OutputTwice(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attend(x)) + self.o(x)


class TwoOutputs(Attention):
    def build(self) -> None:
        self.o2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attend(x)
        return self.o(attended) + self.o2(attended)


class OutputEach(TwoOutputs):
    """The same attention computed twice, each time for another W_O."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attend(x)) + self.o2(self.attend(x))


class Summed(Attention):
    """No W_O: the heads are added up."""

    def joined(self, result: Tensor) -> Tensor:
        return result.sum(1).repeat(1, 1, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x)


class Pooling(Attention):
    """One query for each head, and so no dimension of queries."""

    def build(self) -> None:
        self.query = nn.Parameter(torch.randn(HEADS, SIZE))

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        _, k, v = self.split(x)
        weights = torch.einsum("hd,bhtd->bht", self.query, k).softmax(-1)
        return self.joined(torch.einsum("bht,bhtd->bhd", weights, v)[:, :, None])


class Hidden(Attention):
    """Attention inside torch's own function."""

    def forward(self, x: Tensor) -> Tensor:
        x, parts = (
            x.transpose(0, 1),
            (self.qkv.weight, self.qkv.bias, None, None, False, 0.0, self.o.weight, self.o.bias),
        )
        return F.multi_head_attention_forward(x, x, x, WIDTH, HEADS, *parts)[0].transpose(0, 1)


# -- values of a number of heads of their own -----------------------------------------------------


class Valued(Attention):
    """Values of ``kv`` heads, perhaps through a convolution of ``groups``; what is attended perhaps times a gate."""

    def __init__(self, kv: int, groups: int, gate: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.v = nn.Linear(WIDTH, kv * SIZE)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups) if groups else None
        self.gate = nn.Linear(WIDTH, gate) if gate else None

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        q, k, _ = self.split(x)
        v = self.v(x) if self.conv is None else self.conv(self.v(x).mT).mT
        v = v.unflatten(-1, (-1, SIZE)).transpose(1, 2).expand(-1, self.num_heads, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v
        if self.gate is not None:
            gate = self.gate(x).sigmoid()
            out = out * gate.unflatten(-1, (-1, 1) if gate.shape[-1] == HEADS else (1, -1)).transpose(1, 2)
        return self.joined(out)
