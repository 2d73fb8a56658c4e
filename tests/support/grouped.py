"""Plain attention of any shape: heads of any width, with or without key/value groups and biases."""

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

    def parameters(self, width: int, gone: set[int]) -> int:
        """How many numbers the four projections have without some heads; W_O's bias has no head."""
        stay = [h for h in range(self.heads) if h not in gone]
        per_input = (len(stay) + 2 * len({h // self.per_group for h in stay})) * self.head_dim
        return per_input * (width + self.bias) + width * len(stay) * self.head_dim + width * self.bias


class GroupedAttention(nn.Module):
    """Attention as Llama has it, without rotations."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = shape.heads, shape.kv, shape.head_dim
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, shape.bias)
        self.k_proj, self.v_proj = (nn.Linear(width, shape.kv * shape.head_dim, shape.bias) for _ in range(2))
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, width, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        k, v = (t.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=1) for t in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Attention layers with residuals and norms."""

    def __init__(self, shapes: list[Shape], width: int) -> None:
        super().__init__()
        self.shapes, self.width = shapes, width
        self.layers = nn.ModuleList(GroupedAttention(shape, width) for shape in shapes)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + attention(x))
        return x


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Stack, Tensor, dict[str, list[int]]]:
    """A model of one to three layers in float64, an example, and heads that may go: as many of every group that stays."""
    shape = st.builds(Shape, st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 3, 4]), st.booleans())
    shapes = draw(st.lists(shape.filter(lambda s: s.heads > 1), min_size=1, max_size=3))
    model = randomise(Stack(shapes, draw(st.sampled_from([5, 12]))), seed=draw(st.integers(0, 99))).double()
    drop = {}
    for i, each in enumerate(shapes):
        count, stay = draw(st.integers(1, each.per_group)), set[int]()
        for group in draw(st.sets(st.integers(0, each.kv - 1))):
            heads = st.integers(group * each.per_group, (group + 1) * each.per_group - 1)
            stay |= draw(st.sets(heads, min_size=count, max_size=count))
        drop[f"layers.{i}"] = sorted(set(range(each.heads)) - stay)
    return model, torch.randn(2, 6, model.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), drop  # type: ignore[return-value]
