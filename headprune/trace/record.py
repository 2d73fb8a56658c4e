"""Records of a traced forward pass: modules, calls of linear layers, and attentions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadSlices:
    """Where the heads are in a tensor: head h has ``indices[h]`` of dimension ``dim``.

    Four-dimensional attention mostly has the heads in dimension 1. Three-dimensional attention (batch * heads, tokens, …),
    as in older code (OPT, D2L), has them in dimension 0, together with the batch.
    """

    dim: int
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def along(cls, dim: int, count: int) -> HeadSlices:
        """One head for each index of a dimension."""
        return cls(dim, tuple((h,) for h in range(count)))

    def repeated(self, size: int) -> HeadSlices:
        """The same heads in a tensor of ``size`` grouped key/value heads, each of which several heads share."""
        repeat = max(1, len(self) // size)
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
    """A module in the traced forward pass; attributes describe its last call unless they say otherwise.

    Attributes:
        calls: Number of calls.
        inputs: Every tensor in its arguments.
        biases: Arguments that may be a bias or mask, by key or position.
        cached: Whether any call was given a cache.
        arity: Length of the tuple that it returns, 0 for a tensor; None if a stub cannot return the same.
        returned: The linear layer whose output it returned, perhaps reshaped; "" if none.
        output: Its output, if it was called between an attention and W_O.
        mixed: Its output, if it has one-dimensional parameters: it may be a norm that mixes the heads.
        size_in, size_out: A linear layer's number of input and output features.
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
        leaf: Its output, as the leaf of a new autograd graph.
        dim: The dimension of the features: 1 for a convolution.
    """

    module: str
    source: Tensor
    leaf: Tensor
    dim: int = -1


@dataclass
class AttentionCall:
    """One computation of softmax attention.

    Attributes:
        module: The attention module.
        running: Modules that run at the time of the call, outermost first.
        result: The leaf of a new autograd graph: the attended values (fused), or the probabilities.
        heads: Where the heads are in ``result``.
        causal: Whether every token attends only to earlier tokens and itself.
        fused: Whether it is `scaled_dot_product_attention`, not a softmax.
        tokens: Number of queries; a single one does not show whether attention is causal.
        rows: Features of all projections that each head depends on.
        query_rows, value_rows: The same, only through queries, and only through values.
        same_values: For each head, the first head that reads the same values.
        selections: Each head's output features of modules over all heads, such as a norm of the queries.
        tables: (tensor, dim) -> head -> entries.
        arguments: Argument of the module -> head -> features.
        cross: Whether keys are computed from another input than queries.
        output: The module that is, or is taken for, W_O.
        concatenated: Whether there is no W_O: ``output`` is the attention module itself.
        columns: Features of W_O's input that depend on each head, along ``output_dim``.
        source: W_O's input.
        wrapper: A module that holds W_O and the ``leak``, such as LoRA's.
        leak: A module past W_O that the result also reaches.
        between: Modules called between the attention and W_O, with their inputs.
        pairwise: Whether scores compare tokens with each other, unlike a softmax over channels, streams or points.
        returned: Features of the module's output that depend on each head, if they are separate.
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

    def mix(self, mixed: Tensor, dim: int) -> None:
        """Record that a linear layer mixes all heads' probabilities into new ones, which then weigh the values (talking heads).

        Args:
            mixed: The new probabilities, as the leaf of a new autograd graph, with the heads along ``dim``.
        """
        self.result, self.heads = mixed, HeadSlices.along(dim % mixed.ndim, mixed.shape[dim])
        for rows in (self.rows, self.query_rows):  # every new head depends on all queries and keys
            for module, own in rows.items():
                rows[module] = [set().union(*own) for _ in range(len(self.heads))]
        self.selections, self.tables, self.arguments, self.between = {}, {}, {}, []

    def refuse(self, reason: str) -> None:
        """Record why the heads can be neither removed nor masked at W_O's input."""
        self.reason, self.columns, self.between = reason, [], []
