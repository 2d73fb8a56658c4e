"""What a traced forward records: modules, calls of linear layers, and computations of attention."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from headprune.trace.graphs import HeadSlices, merge, nonzero, overlap

Rows = dict[str, list[set[int]]]
"""Module -> head -> features of its output."""


@dataclass
class ModuleRecord:
    """What a traced forward shows of one module; of its last call, where nothing else is said.

    Attributes:
        inputs: Every tensor in its arguments.
        biases: Arguments that may be a bias or mask, by key or position.
        cached: Whether it was given a cache, in any call.
        arity: Length of the tuple that it returns, 0 for a tensor; None if a stub cannot return the same.
        returned: The linear layer whose output it returned, unchanged but for its shape.
        output: What it returned on the way from an attention to W_O.
        mixed: What it returned, if it has one-dimensional parameters: a norm may mix the heads.
        size_in, size_out: Of a linear layer, its input's and its output's features.
    """

    calls: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    biases: dict[str | int, Tensor] = field(default_factory=dict)
    cached: bool = False
    arity: int | None = None
    returned: str = ""
    output: Tensor | None = None
    mixed: Tensor | None = None
    size_in: int = 0
    size_out: int = 0


@dataclass
class LinearCall:
    """One call of a linear layer.

    Attributes:
        module: The layer.
        source: Its input.
        leaf: Its output, as the start of a new graph.
        dim: The dimension of its features: 1 for a convolution.
    """

    module: str
    source: Tensor
    leaf: Tensor
    dim: int = -1

    def features(self, gradient: Tensor) -> set[int]:
        """The features of its output for which a gradient is not zero."""
        return nonzero(gradient.movedim(self.dim, -1))


@dataclass
class AttentionCall:
    """One computation of softmax attention.

    Attributes:
        module: The attention module.
        running: Modules that run at the call, outermost first.
        result: The start of a new graph: the attended values (fused), or the probabilities.
        heads: Where the heads are in ``result``.
        causal: Whether every token sees only those before it.
        fused: Whether it is `scaled_dot_product_attention`, not a softmax.
        tokens: Queries; with one, no direction can be seen.
        rows: What each head depends on: features of all projections.
        query_rows, value_rows: The same for queries, and for values.
        same_values: For each head, the first that reads the same values.
        selections: Features of modules over all heads, such as a norm of the queries.
        tables: (tensor, dim) -> head -> entries.
        arguments: Argument of the module -> head -> features.
        cross: Whether keys come from elsewhere than queries.
        output: W_O, or what was taken for it.
        concatenated: Whether there is no W_O: ``output`` is the attention module itself.
        columns: Features of W_O's input that each head reaches, along ``output_dim``.
        source: W_O's input.
        wrapper: A module that holds W_O and what else the result reaches, such as LoRA's.
        leak: What else the result reaches, past W_O.
        between: Modules that are called on the way to W_O, with their input.
        pairwise: Whether scores compare one token with another; not so in a softmax over channels, streams or points.
        returned: Features of the module's output that each head reaches, if they are separate.
        reason: Why heads cannot be removed.
    """

    module: str
    running: tuple[str, ...]
    result: Tensor
    heads: HeadSlices
    causal: bool = False
    fused: bool = True
    tokens: int = 1
    rows: Rows = field(default_factory=dict)
    query_rows: Rows = field(default_factory=dict)
    value_rows: Rows = field(default_factory=dict)
    same_values: list[int] = field(default_factory=list)
    selections: Rows = field(default_factory=dict)
    tables: dict[tuple[str, int], list[set[int]]] = field(default_factory=dict)
    arguments: dict[str | int, list[set[int]]] = field(default_factory=dict)
    cross: bool = False
    output: str = ""
    concatenated: bool = False
    columns: list[set[int]] = field(default_factory=list)
    output_dim: int = -1
    source: Tensor | None = None
    wrapper: str = ""
    leak: str = ""
    between: list[tuple[str, Tensor]] = field(default_factory=list)
    pairwise: bool = True
    returned: list[set[int]] = field(default_factory=list)
    reason: str = ""

    @property
    def prefix(self) -> str:
        """How the names of the modules inside the attention module begin."""
        return f"{self.module}." if self.module else ""

    def absorb(self, other: AttentionCall) -> None:
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
        self.causal, self.leak = self.causal and other.causal, self.leak or other.leak

    def mix(self, mixed: Tensor, dim: int) -> None:
        """Record that all heads' probabilities are mixed into others, as by talking heads: these are what weighs the values.

        Args:
            mixed: The others, as the start of a new graph, with the heads along ``dim``.
        """
        self.result, self.heads = mixed, HeadSlices.along(dim % mixed.ndim, mixed.shape[dim])
        for rows in (self.rows, self.query_rows):  # each of them depends on all queries and keys
            for module, own in rows.items():
                rows[module] = [set().union(*own) for _ in range(len(self.heads))]
        self.selections, self.tables, self.arguments, self.between = {}, {}, {}, []

    def refuse(self, reason: str) -> None:
        """Record why the heads cannot be removed, nor masked at W_O's input."""
        self.reason, self.columns, self.between = reason, [], []


def _both(known: Rows, name: str, rows: list[set[int]]) -> list[set[int]]:
    """A module's features of each head, with those that are known."""
    return [old | new for old, new in zip(known.get(name, rows), rows, strict=True)]
