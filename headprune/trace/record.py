"""What a traced forward records of each module, linear layer and attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headprune.trace.features import merge, nonzero, overlap


@dataclass(frozen=True)
class HeadSlices:
    """Where the heads are in a tensor: ``indices[h]`` of dimension ``dim``.

    Four-dimensional attention has the heads in dimension 1; three-dimensional attention
    (batch * heads, tokens, …), as OPT's time and D2L wrote it, mixes them with the batch in dimension 0.
    """

    dim: int
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def along(cls, dim: int, count: int) -> HeadSlices:
        """One head for each index of a dimension."""
        return cls(dim, tuple((h,) for h in range(count)))

    def repeated(self, size: int) -> HeadSlices:
        """The same heads in a tensor that has ``size`` of them, each shared by several (grouped keys and values)."""
        repeat = max(1, len(self) // size) if self.dim == 1 else 1
        return HeadSlices(self.dim, tuple(tuple(i // repeat for i in index) for index in self.indices))

    def take(self, tensor: Tensor, head: int) -> Tensor:
        """The part of a tensor that belongs to one head."""
        return tensor.index_select(self.dim, torch.tensor(self.indices[head], device=tensor.device))

    def put(self, tensor: Tensor, head: int, values: Tensor) -> None:
        """Write one head's part of a tensor."""
        tensor.index_copy_(self.dim, torch.tensor(self.indices[head], device=tensor.device), values)

    def __len__(self) -> int:
        return len(self.indices)


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
            for name, rows in its.items():
                known = mine.get(name, rows)
                both = [old | new for old, new in zip(known, rows, strict=True)]
                if overlap(known) or not overlap(both):
                    mine[name] = both
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
