"""What a traced forward shows: modules, calls of linear layers, and computations of attention."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from headprune.trace.graphs import Heads, merge, overlap, used


@dataclass
class ModuleSeen:
    """What a traced forward shows of one module; of its last call, where nothing else is said."""

    calls: int = 0
    inputs: list[Tensor] = field(default_factory=list)  # every tensor in its arguments
    biases: dict[str | int, Tensor] = field(
        default_factory=dict
    )  # arguments that may be a bias or mask, by key or position
    cached: bool = False  # whether it was given a cache, in any call
    arity: int | None = (
        None  # length of the tuple that it returns, 0 for a tensor; None if a stub cannot return the same
    )
    returned: str = ""  # the linear layer whose output it returned, unchanged but for its shape
    output: Tensor | None = None  # what it returned on the way from an attention to W_O
    mixed: Tensor | None = None  # what it returned, if it has one-dimensional parameters: a norm may mix the heads
    size_in: int = 0  # of a linear layer: its input's features
    size_out: int = 0


@dataclass
class LinearCall:
    """One call of a linear layer."""

    module: str
    as_module: bool  # called through nn.Module.__call__, so that a hook on it runs
    source: Tensor  # its input
    leaf: Tensor  # its output, as the start of a new graph
    dim: int = -1  # the dimension of its features: 1 for a convolution

    def used(self, gradient: Tensor) -> set[int]:
        """The features for which a gradient with respect to ``leaf`` is not zero."""
        return used(gradient.movedim(self.dim, -1))


Rows = dict[str, list[set[int]]]
"""Module -> head -> features of its output."""


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
    rows: Rows = field(default_factory=dict)  # of all projections
    query_rows: Rows = field(default_factory=dict)
    value_rows: Rows = field(default_factory=dict)
    same_values: list[int] = field(default_factory=list)  # for each head, the first that reads the same values
    selections: Rows = field(default_factory=dict)  # of modules over all heads
    tables: dict[tuple[str, int], list[set[int]]] = field(default_factory=dict)  # (tensor, dim) -> head -> indices
    arguments: dict[str | int, list[set[int]]] = field(default_factory=dict)  # of the module -> head -> features
    cross: bool = False
    output: str = ""
    concatenated: bool = False  # no W_O: ``output`` is the attention module itself
    columns: list[set[int]] = field(default_factory=list)
    output_dim: int = -1  # the dimension of W_O's input that its columns lie along
    source: Tensor | None = None  # the input of W_O, or of what was taken for it
    around: str = ""  # a module that holds W_O and what else its result reaches, such as LoRA's
    bypass: str = ""  # what else its result reaches, past W_O
    passed: list[tuple[str, Tensor]] = field(default_factory=list)  # modules called on the way to W_O, with their input
    pairwise: bool = True  # scores of one token with another; not so: a softmax over channels, streams, points
    returned: list[set[int]] = field(default_factory=list)  # head -> features of the module's output, if apart
    reason: str = ""

    @property
    def prefix(self) -> str:
        """How the names of the modules inside the attention module begin."""
        return f"{self.module}." if self.module else ""

    def absorb(self, other: Attention) -> None:
        """Add what another computation shows of the same heads."""
        for mine, its in (
            (self.rows, other.rows), (self.query_rows, other.query_rows), (self.value_rows, other.value_rows),
            (self.selections, other.selections),
        ):  # fmt: skip
            # What separate heads of one would share by the other tells of no key/value group: positions may be looked up in the
            # features of all heads (ProphetNet's second stream).
            fits = {
                n: rows for n, rows in its.items() if overlap(mine.get(n, rows)) or not overlap(_both(mine, n, rows))
            }
            merge(mine, fits)
        merge(self.tables, other.tables)
        merge(self.arguments, other.arguments)
        self.causal, self.bypass = self.causal and other.causal, self.bypass or other.bypass

    def mix(self, mixed: Tensor, dim: int) -> None:
        """Note that the probabilities of all heads are mixed into others, as by talking heads: these are what weighs the values.

        Args:
            mixed: The others, as the start of a new graph, with the heads along ``dim``.
        """
        self.result, self.heads = mixed, Heads.along(dim % mixed.ndim, mixed.shape[dim])
        for rows in (self.rows, self.query_rows):  # each of them depends on all queries and keys
            for module, own in rows.items():
                rows[module] = [set().union(*own) for _ in range(len(self.heads))]
        self.selections, self.tables, self.arguments, self.passed = {}, {}, {}, []

    def refuse(self, reason: str) -> None:
        """Note why the heads cannot be removed, nor masked at W_O's input."""
        self.reason, self.columns, self.passed = reason, [], []


def _both(known: Rows, name: str, rows: list[set[int]]) -> list[set[int]]:
    """A module's features of each head, with those that are known."""
    return [old | new for old, new in zip(known.get(name, rows), rows, strict=True)]
