"""Plain attention of any shape: heads of any width, with or without key/value groups and biases."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.zoo import randomise


@dataclass(frozen=True)
class Shape:
    """Of one attention layer: ``kv`` key/value heads, each read by ``per_group`` query heads."""

    kv: int
    per_group: int
    head_dim: int
    bias: bool

    @property
    def heads(self) -> int:
        return self.kv * self.per_group

    def parameters(self, width: int, heads: int, kv: int) -> int:
        """How many numbers the four projections have with so many heads; W_O's bias has no head."""
        per_input = (heads + 2 * kv) * self.head_dim
        return per_input * (width + self.bias) + width * heads * self.head_dim + width * self.bias


class GroupedAttention(nn.Module):
    """Attention as Llama has it, without rotations."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = shape.heads, shape.kv, shape.head_dim
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, shape.bias)
        self.k_proj, self.v_proj = (nn.Linear(width, shape.kv * shape.head_dim, shape.bias) for _ in range(2))
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, width, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in self.projections())
        k, v = (t.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=1) for t in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def projections(self) -> tuple[nn.Linear, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class Stack(nn.Module):
    """Attention layers with residuals and norms, and a head for three classes."""

    def __init__(self, shapes: list[Shape], width: int) -> None:
        super().__init__()
        self.shapes, self.width = shapes, width
        self.layers = nn.ModuleList(GroupedAttention(shape, width) for shape in shapes)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in shapes)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + attention(x))
        return self.head(x.mean(dim=1))

    def without(self, drop: dict[str, list[int]]) -> nn.Module:
        """A copy in which W_O reads nothing of some heads: what a pruned model must compute, without any gate or hook."""
        other = copy.deepcopy(self)
        with torch.no_grad():
            for name, heads in drop.items():
                attention = other.get_submodule(name)
                for h in heads:
                    attention.o_proj.weight[:, h * attention.head_dim : (h + 1) * attention.head_dim] = 0
        return other


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Stack, Tensor]:
    """A model of one to three layers, and an example; in float64."""
    shape = st.builds(Shape, st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 3, 4]), st.booleans())
    shapes = draw(st.lists(shape.filter(lambda s: s.heads > 1), min_size=1, max_size=3))
    model = randomise(Stack(shapes, draw(st.sampled_from([5, 12]))), seed=draw(st.integers(0, 99))).double()
    x = torch.randn(2, 6, model.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model, x  # type: ignore[return-value]


@st.composite
def drops(draw: st.DrawFn, shapes: list[Shape]) -> dict[str, list[int]]:
    """Heads that may go: whole groups, and as many heads of every group that stays; whole layers too."""
    found = {}
    for i, shape in enumerate(shapes):
        kept_groups = draw(st.sets(st.integers(0, shape.kv - 1)))
        count = draw(st.integers(1, shape.per_group))
        kept = set()
        for group in kept_groups:
            first = group * shape.per_group
            kept |= draw(st.sets(st.integers(first, first + shape.per_group - 1), min_size=count, max_size=count))
        if gone := sorted(set(range(shape.heads)) - kept):
            found[f"layers.{i}"] = gone
    return found
