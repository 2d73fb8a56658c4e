"""What a traced forward leaves behind: calls of linear layers, and computations of attention."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from headprune.trace.graphs import Heads, used


@dataclass
class LinearCall:
    """One call of a linear layer."""

    module: str
    as_module: bool  # called through nn.Module.__call__, so that a hook on it runs
    source: Tensor  # its input
    leaf: Tensor  # its output, as the start of a new graph
    dim: int = -1  # the dimension of its features: 1 for a convolution

    def used(self, gradient: Tensor) -> set[int]:
        """The features that a gradient with respect to ``leaf`` says are used."""
        return used(gradient.movedim(self.dim, -1))


@dataclass
class Attention:
    """One computation of softmax attention."""

    module: str
    running: tuple[str, ...]  # modules running at the call, outermost first
    result: Tensor  # leaf: the attended values (SDPA) or the probabilities (softmax)
    heads: Heads
    causal: bool
    fused: bool  # scaled_dot_product_attention, not softmax
    tokens: int  # queries; with one alone no direction can be seen
    rows: dict[str, list[set[int]]] = field(default_factory=dict)  # projection -> head -> features
    query_rows: dict[str, list[set[int]]] = field(default_factory=dict)
    value_rows: dict[str, list[set[int]]] = field(default_factory=dict)
    tables: dict[tuple[str, int], list[set[int]]] = field(default_factory=dict)  # (tensor, dim) -> head -> indices
    cross: bool = False
    output: str = ""
    concatenated: bool = False  # no W_O: ``output`` is the attention module itself
    columns: list[set[int]] = field(default_factory=list)
    output_dim: int = -1  # the dimension of W_O's input that its columns lie along
    source: Tensor | None = None  # the input of W_O, or of what was taken for it
    around: str = ""  # a module that W_O and what else its result reaches are parts of, such as LoRA's
    bypass: str = ""  # what else its result reaches, past W_O
    passed: list[tuple[str, Tensor]] = field(default_factory=list)  # modules called on the way to W_O, with their input
    pairwise: bool = True  # scores of one token with another; not so: a softmax over channels, streams, points
    returned: list[set[int]] = field(default_factory=list)  # head -> features of the module's output, if apart
    selections: dict[str, list[set[int]]] = field(default_factory=dict)  # module over all heads -> head -> features
    arguments: dict[str | int, list[set[int]]] = field(
        default_factory=dict
    )  # argument of the module -> head -> features
    reason: str = ""
