"""Plain attention modules, without transformers, and modules that make their heads in ways of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.input_specs import record
from tests.support.zoo import randomise

WIDTH, HEADS = 32, 4
SIZE = WIDTH // HEADS


class Attention(nn.Module):
    """Ordinary attention. ``silent`` is the brute force: these heads' results are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.silent: tuple[int, ...] = ()
        self.build()

    def build(self) -> None:
        """What a kind has besides, or in the place of these."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values ``[batch, heads, tokens, width of a head]``."""
        return tuple(t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        return self.joined(F.scaled_dot_product_attention(*self.split(x), **mask))

    def joined(self, result: Tensor) -> Tensor:
        if self.silent:
            result = result.index_fill(1, torch.tensor(self.silent), 0.0)
        return result.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attend(x))


class Bare(Attention):
    """Without an output projection."""

    def build(self) -> None:
        self.o = None

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class Normed(Attention):
    """As BitNet: a norm over all heads before W_O, which so cannot be refitted."""

    norm_class: type[nn.Module] = nn.RMSNorm

    def build(self) -> None:
        self.norm = self.norm_class(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.norm(self.attend(x)))


def model_of(attention: type[Attention]) -> nn.Module:
    return randomise(nn.Sequential(attention(), nn.LayerNorm(WIDTH), attention(), nn.Linear(WIDTH, 3)))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    """Two attention modules with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.tie()

    def tie(self) -> None:
        for name in ("qkv", "o"):
            for key in ("weight", "bias"):
                setattr(getattr(self.second, name), key, getattr(getattr(self.first, name), key))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(x + self.first(x))


class Summed(nn.Module):
    """A model whose graph takes no time to make."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.inner(x).relu()
        return {"summed": self.outer(hidden).sum(1), "x": hidden if scale is None else hidden * scale}


def summed(kind: type[nn.Module] = Summed, rows: int = 2, **more: Tensor) -> nn.Module:
    model = randomise(kind())
    record(model, {"x": torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(0)), **more})
    return model
