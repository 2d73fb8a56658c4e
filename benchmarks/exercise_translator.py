"""A Transformer out of the parts of *Dive into Deep Learning*, trained to translate numbers from English to French.

The classes have the names, the arguments and the computation of the book's PyTorch code in "Multi-Head Attention" and "The Transformer
Architecture", in our words; `nn.Linear` stands for `nn.LazyLinear`. The data is made by rule, so nothing is downloaded: all numbers from
1 to 9,999, "three hundred ninety two" and "trois cent quatre vingt douze". A batch holds examples of equal lengths, so there is no padding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 9999
TRAINED, SCORED, CHOSEN = 6000, 1000, 1000  # of 9,999 numbers; the others are reported on
START, END = "<bos>", "<eos>"

# -- the book's classes --------------------------------------------------------------------------


def masked_softmax(scores: Tensor, valid_lens: Tensor | None) -> Tensor:
    """A softmax over the keys, of which each query sees the first ``valid_lens``."""
    if valid_lens is None:
        return F.softmax(scores, dim=-1)
    lens = valid_lens.repeat_interleave(scores.shape[1]) if valid_lens.dim() == 1 else valid_lens.reshape(-1)
    seen = torch.arange(scores.shape[-1], device=scores.device)[None, :] < lens[:, None]
    return F.softmax(scores.masked_fill(~seen.reshape(scores.shape), -1e6), dim=-1)


class DotProductAttention(nn.Module):
    """Scaled dot-product attention; it keeps the weights of the last call."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class MultiHeadAttention(nn.Module):
    """Heads side by side in the batch dimension: ``[batch * heads, tokens, num_hiddens / heads]``."""

    def __init__(self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_k = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_v = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        queries = self.transpose_qkv(self.W_q(queries))
        keys = self.transpose_qkv(self.W_k(keys))
        values = self.transpose_qkv(self.W_v(values))
        if valid_lens is not None:  # once for every head
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        output = self.attention(queries, keys, values, valid_lens)
        return self.W_o(self.transpose_output(output))

    def transpose_qkv(self, x: Tensor) -> Tensor:
        """``[batch, tokens, num_hiddens]`` to ``[batch * heads, tokens, num_hiddens / heads]``."""
        x = x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def transpose_output(self, x: Tensor) -> Tensor:
        """And back."""
        x = x.reshape(-1, self.num_heads, x.shape[1], x.shape[2]).permute(0, 2, 1, 3)
        return x.reshape(x.shape[0], x.shape[1], -1)


class PositionalEncoding(nn.Module):
    """Sines in the even features, cosines in the odd ones."""

    def __init__(self, num_hiddens: int, dropout: float, max_len: int = 64) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        powers = torch.arange(0, num_hiddens, 2) / num_hiddens
        angles = torch.arange(max_len)[:, None] / torch.pow(10000, powers)
        self.register_buffer("P", torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(1, max_len, num_hiddens))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.P[:, : x.shape[1]])


class AddNorm(nn.Module):
    """A residual connection, then a layer norm."""

    def __init__(self, norm_shape: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.ln = nn.LayerNorm(norm_shape)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ln(self.dropout(y) + x)


class PositionWiseFFN(nn.Module):
    """Two linear layers, the same for every token."""

    def __init__(self, ffn_num_hiddens: int, num_hiddens: int) -> None:
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(num_hiddens, ffn_num_hiddens), nn.Linear(ffn_num_hiddens, num_hiddens)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense2(F.relu(self.dense1(x)))


class TransformerEncoderBlock(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(self, num_hiddens: int, ffn_num_hiddens: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(num_hiddens, num_heads, dropout)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(ffn_num_hiddens, num_hiddens)
        self.addnorm2 = AddNorm(num_hiddens, dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.addnorm1(x, self.attention(x, x, x))
        return self.addnorm2(y, self.ffn(y))


class TransformerDecoderBlock(nn.Module):
    """Self-attention to earlier tokens, attention to the encoder's output, feed-forward."""

    def __init__(self, num_hiddens: int, ffn_num_hiddens: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention1 = MultiHeadAttention(num_hiddens, num_heads, dropout)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.attention2 = MultiHeadAttention(num_hiddens, num_heads, dropout)
        self.addnorm2 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(ffn_num_hiddens, num_hiddens)
        self.addnorm3 = AddNorm(num_hiddens, dropout)

    def forward(self, x: Tensor, enc_outputs: Tensor) -> Tensor:
        dec_valid_lens = torch.arange(1, x.shape[1] + 1, device=x.device).repeat(x.shape[0], 1)
        y = self.addnorm1(x, self.attention1(x, x, x, dec_valid_lens))
        z = self.addnorm2(y, self.attention2(y, enc_outputs, enc_outputs))
        return self.addnorm3(z, self.ffn(z))


class Translator(nn.Module):
    """The book's Transformer, with the sizes of its experiment: 32 hidden units, 2 blocks, 4 heads."""

    def __init__(
        self, words: int, num_hiddens: int = 32, ffn_num_hiddens: int = 64, num_heads: int = 4, num_blks: int = 2,
        dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = num_hiddens, ffn_num_hiddens, num_heads, dropout
        self.num_hiddens = num_hiddens
        self.source_embedding, self.target_embedding = (
            nn.Embedding(words, num_hiddens),
            nn.Embedding(words, num_hiddens),
        )
        self.pos_encoding = PositionalEncoding(num_hiddens, dropout)
        self.encoder = nn.ModuleList([TransformerEncoderBlock(*sizes) for _ in range(num_blks)])
        self.decoder = nn.ModuleList([TransformerDecoderBlock(*sizes) for _ in range(num_blks)])
        self.dense = nn.Linear(num_hiddens, words)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits of the next word after each of ``target`` ``[batch, words]``; with ``labels`` the mean loss as well."""
        x = self.pos_encoding(self.source_embedding(source) * math.sqrt(self.num_hiddens))
        for block in self.encoder:
            x = block(x)
        y = self.pos_encoding(self.target_embedding(target) * math.sqrt(self.num_hiddens))
        for block in self.decoder:
            y = block(y, x)
        logits = self.dense(y)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


# -- the data ------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


_ENGLISH = _words(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_FRENCH = _words("un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize")
_FRENCH_TENS = _words("vingt trente quarante cinquante soixante")


def english(n: int) -> list[str]:
    """A number below 10,000 in words."""
    if n >= 1000:
        return [*english(n // 1000), "thousand", *(english(n % 1000) if n % 1000 else [])]
    if n >= 100:
        return [*english(n // 100), "hundred", *(english(n % 100) if n % 100 else [])]
    if n >= 20:
        return [_ENGLISH_TENS[n // 10 - 2], *(english(n % 10) if n % 10 else [])]
    return [_ENGLISH[n - 1]]


def french(n: int) -> list[str]:
    """The same in French, without hyphens and without the plural's s."""
    if n >= 1000:
        return [*(french(n // 1000) if n >= 2000 else []), "mille", *(french(n % 1000) if n % 1000 else [])]
    if n >= 100:
        return [*(french(n // 100) if n >= 200 else []), "cent", *(french(n % 100) if n % 100 else [])]
    if n >= 80:
        return ["quatre", "vingt", *(french(n - 80) if n > 80 else [])]
    if n >= 20:
        tens = min(n // 10, 6)  # 71 is 60 and 11
        rest = n - 10 * tens
        return [_FRENCH_TENS[tens - 2], *(["et"] if rest in (1, 11) else []), *(french(rest) if rest else [])]
    return ["dix", _FRENCH[n - 11]] if n > 16 else [_FRENCH[n - 1]]


WORDS = sorted(
    {START, END, "cent", "mille", "et", "hundred", "thousand", *_ENGLISH, *_ENGLISH_TENS, *_FRENCH, *_FRENCH_TENS}
)
Batch = dict[str, Tensor]


def example(n: int) -> Batch:
    """A batch of one number: what the encoder reads, what the decoder reads, and the words to be predicted."""
    source, target = _ids(english(n)), _ids([START, *french(n), END])
    return {"source": source[None], "target": target[None, :-1], "labels": target[None, 1:]}


def _ids(words: Sequence[str]) -> Tensor:
    return torch.tensor([WORDS.index(word) for word in words])


def batches(numbers: Sequence[int], size: int = 128) -> list[Batch]:
    """Batches of numbers whose names are equally long in both languages."""

    def lengths(n: int) -> tuple[int, int]:
        return len(english(n)), len(french(n))

    found = []
    for _, group in groupby(sorted(numbers, key=lengths), key=lengths):
        every = [example(n) for n in group]
        for start in range(0, len(every), size):
            rows = every[start : start + size]
            found.append({name: torch.cat([row[name] for row in rows]) for name in rows[0]})
    return found


def parts() -> dict[str, list[int]]:
    """The numbers to train on, and three more parts; no number is in two of them."""
    numbers = list(range(1, LARGEST + 1))
    random.Random(0).shuffle(numbers)
    ends = [0, TRAINED, TRAINED + SCORED, TRAINED + SCORED + CHOSEN, LARGEST]
    return dict(zip(("train", "score", "choose", "report"), (numbers[a:b] for a, b in pairwise(ends)), strict=True))


def trained(
    epochs: int = 8, rate: float = 5e-3, size: int = 128, progress: Callable[[int, int], None] | None = None
) -> Translator:  # fmt: skip
    """The model, trained on 6,000 numbers with Adam; the learning rate rises to the book's, and then falls to 0.

    On one thread, so that it does not depend on how many there are. Eight epochs leave it some mistakes to make.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Translator(len(WORDS)).train()
    groups = batches(parts()["train"], size=TRAINED)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    done, total = 0, epochs * sum(-(-len(group["source"]) // size) for group in groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=total)
    for _ in range(epochs):
        mixed = [(group, rows) for group in groups for rows in torch.randperm(len(group["source"])).split(size)]
        for i in torch.randperm(len(mixed)).tolist():
            group, rows = mixed[i]
            loss = model(**{name: value[rows] for name, value in group.items()})["loss"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            done += 1
            if progress:
                progress(done, total)
    torch.set_num_threads(threads)
    model.eval()
    with torch.no_grad():  # `attention_weights` would hold the graph of the last step, and such a model can't be copied
        model(**example(94))
    return model
