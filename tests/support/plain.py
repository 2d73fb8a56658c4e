"""Plain attention modules, without transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.forms import remember
from tests.support.zoo import randomise

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Ordinary attention. ``kill`` is the brute force: this head's result is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kill: int | None = None

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.joined(F.scaled_dot_product_attention(q, k, v, **mask))

    def joined(self, result: Tensor) -> Tensor:
        if self.kill is not None:
            result = result.clone()
            result[:, self.kill] = 0
        return result.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attend(x))


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
    remember(model, {"x": torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(0)), **more})
    return model
