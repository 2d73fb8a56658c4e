"""Find what each head depends on, by derivatives in the small autograd graphs between linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from headprune.attention import is_inside
from headprune.trace.record import AttentionCall, HeadSlices, LinearCall, Rows

Source = TypeVar("Source")
Key = TypeVar("Key", str, tuple[str, int], str | int)
_BLOCKED = -1e3  # a mask that adds so much to a score leaves it no probability, in any type of float
_MOST_SLICES = 2048  # of (batch * heads, …): each needs a backward pass


class Reader:
    """Finds which features, tables and arguments each head reads.

    Args:
        calls: Calls of linear layers so far, by the id of the leaf tensor that replaces their output; it may grow.
        names: Names of parameters and buffers, by id.
    """

    def __init__(self, calls: Mapping[int, LinearCall], names: dict[int, str]) -> None:
        self.calls, self.names = calls, names
        self.generator = torch.Generator().manual_seed(0)
        self.known: list[tuple[Tensor, HeadSlices, Rows]] = []  # cache of `rows` for the current attention

    def forget(self) -> None:
        """Clear the cache of `rows`, before the next attention."""
        self.known = []

    def heads_in(self, tensor: Tensor) -> HeadSlices | None:
        """Find the heads in a tensor of queries or scores; None if they cannot be told apart."""
        if tensor.ndim >= 4:
            if not tensor.shape[1]:
                return None
            heads = HeadSlices.along(1, tensor.shape[1])
            # In (batch, tokens, heads, …), as in sliding windows and deformable attention, dimension 1 reads the same features.
            rows = self.rows(tensor, heads) if len(heads) > 1 else {}
            if len(heads) == 1 or (rows and all(map(alike, rows.values()))):
                few = (HeadSlices.along(d, n) for d, n in enumerate(tensor.shape[:-1]) if d > 1 and 1 < n <= 256)
                found = next((others for others in few if self.have_own_rows(tensor, others)), None)
                return found or self._heads_first(tensor) or heads
            return heads
        return self._heads_first(tensor) if tensor.ndim == 3 else None

    def _heads_first(self, tensor: Tensor) -> HeadSlices | None:
        """The heads in (batch * heads, …) or (heads, batch, …): slices that read the same features of the projections belong to one."""
        if not tensor.requires_grad or tensor.shape[0] > _MOST_SLICES:
            return None
        each = HeadSlices(0, tuple((i,) for i in range(tensor.shape[0])))
        rows = self.rows(tensor, each)
        groups: dict[frozenset[tuple[str, int]], list[int]] = {}
        for i in range(len(each)):
            features = frozenset((module, feature) for module, slices in rows.items() for feature in slices[i])
            groups.setdefault(features, []).append(i)
        if len(groups) < 2 or len({len(g) for g in groups.values()}) > 1:
            return None  # a softmax over classes or experts, or one head
        heads = HeadSlices(0, tuple(tuple(g) for g in groups.values()))
        return heads if self.have_own_rows(tensor, heads) else None  # examples do not, behind a ReLU

    def are_grouped(self, *parts: Tensor) -> bool:
        """Whether dimensions 1 and 2 of queries and keys, or of scores, are key/value groups and the heads in each, in either order."""
        shape = parts[0].shape
        if len(shape) != 5 or min(shape[1:3]) < 2 or shape[1] * shape[2] > 256:
            return False
        if any(n not in (1, m) for part in parts for n, m in zip(part.shape[-4:-2], shape[1:3], strict=False)):
            return False
        heads = HeadSlices.along(1, shape[1] * shape[2])
        own: list[set[Any]] = [set() for _ in range(len(heads))]
        for part in parts:
            for module, features in self.rows(joined(part, shape), heads).items():
                for mine, read in zip(own, features, strict=True):
                    mine |= {(module, feature) for feature in read}
        alone = {users for users in users_of(own).values() if len(users) == 1}
        places = torch.arange(len(heads)).view(shape[1:3])
        return len(alone) == len(heads) and any(
            sharing([own], len(heads)) == tuple(map(tuple, order.tolist())) for order in (places, places.T)
        )

    def compares_tokens(self, row: Tensor) -> bool:
        """Whether one query's scores ``[keys]`` depend on several tokens, as those of query-key attention do."""
        leaves = [leaf for leaf in leaves_of(row) if id(leaf) in self.calls and leaf.ndim > 1]
        if not leaves or len(row) < 2:
            return True  # no evidence against it
        gradients = torch.autograd.grad(row, leaves, self._noise(row), retain_graph=True, allow_unused=True)
        along = [self.calls[id(leaf)].dim for leaf in leaves]
        moved = [g.movedim(dim, -1) for g, dim in zip(gradients, along, strict=True) if g is not None]
        tokens = [int((g.flatten(0, -2) != 0).any(-1).sum()) for g in moved]
        return max(tokens, default=2) > 1

    def have_own_rows(self, tensor: Tensor, heads: HeadSlices) -> bool:
        """Whether heads, or key/value groups, read disjoint features of some projection. Tokens do not, even if a router or a ReLU
        makes them read different features."""
        each = [{frozenset(r) for r in features} for features in self.rows(tensor, heads).values()]
        return any(len(sets) > 1 and disjoint([set(s) for s in sets]) for sets in each)

    def rows(self, tensor: Tensor, heads: HeadSlices) -> Rows:
        """The features of each projection that each head of ``tensor`` depends on; cached until `forget`."""
        if (rows := next((r for t, h, r in self.known if t is tensor and h == heads), None)) is None:
            rows = {}
            sources = [(self.calls[id(leaf)], leaf) for leaf in leaves_of(tensor) if id(leaf) in self.calls]
            for h, call, gradient in self._gradients(tensor, heads, sources):
                rows.setdefault(call.module, empty_sets(len(heads)))[h] |= _features(call, gradient)
            self.known.append((tensor, heads, rows))
        return {module: [set(own) for own in features] for module, features in rows.items()}

    def read(
        self,
        attention: AttentionCall,
        tensor: Tensor,
        heads: HeadSlices,
        mixers: Mapping[str, Tensor] | None = None,
        given: Mapping[str | int, Tensor] | None = None,
    ) -> Rows:
        """Record in ``attention`` what each head of its queries, keys, values or scores reads; returns the features of projections.

        Also records parameters and buffers with separate entries for each head; norms over all heads (modules in the attention whose
        output keeps the heads separate, although their input does not); and features of the attention module's arguments that heads
        read other than through a projection.

        Args:
            mixers: Outputs of modules that may be such norms.
            given: The attention module's arguments.
        """
        rows = self.rows(tensor, heads)
        merge(attention.rows, rows)
        if len(heads) < 2 or not tensor.requires_grad:
            return rows
        nodes, others = nodes_of(tensor), {attention.module, *(call.module for call in self.calls.values())}
        mixed = (mixers or {}) if any(map(alike, rows.values())) else {}
        sources: list[tuple[tuple[str, str | int], Tensor]] = [
            *((("table", self.names[id(t)]), t) for t in leaves_of(tensor) if id(t) in self.names and t.ndim),
            *((("norm", n), t) for n, t in mixed.items() if is_inside(n, attention.module) and n not in others),
            *(
                (("argument", key), t)
                for key, t in (given or {}).items()  # a projection's output is cut in that projection
                if t.grad_fn in nodes and not any(id(leaf) in self.calls for leaf in leaves_of(t))
            ),
        ]
        entries, features = Entries(), dict[tuple[str, str | int], list[set[int]]]()
        for h, (kind, key), gradient in self._gradients(tensor, heads, sources):
            if kind == "table":
                add_entries(entries, str(key), gradient, h, len(heads))
            else:
                features.setdefault((kind, key), empty_sets(len(heads)))[h] |= nonzero(gradient)
        merge(attention.tables, own_entries(entries))
        for (kind, key), own in features.items():
            if kind == "argument":
                merge(attention.arguments, {key: own})
            elif all(own) and not alike(own):
                attention.selections[str(key)] = own
        return rows

    def _gradients(
        self, tensor: Tensor, heads: HeadSlices, sources: Sequence[tuple[Source, Tensor]]
    ) -> Iterator[tuple[int, Source, Tensor]]:
        """Differentiate each head's part of ``tensor``; yields (head, source, gradient) for every source that it depends on."""
        by = [t for _, t in sources]
        for h in range(len(heads) if sources else 0):
            part = heads.take(tensor, h)
            gradients = torch.autograd.grad(part, by, self._noise(part), retain_graph=True, allow_unused=True)
            for (source, _), gradient in zip(sources, gradients, strict=True):
                if gradient is not None:
                    yield h, source, gradient

    def columns_of(self, attention: AttentionCall, source: Tensor, dim: int = -1) -> list[set[int]]:
        """The features of ``source`` along ``dim`` that depend on each head's result."""
        forward, heads, columns = _derivative(source, attention.result), attention.heads, []
        for h in range(len(heads)):
            tangent = torch.zeros_like(attention.result)
            heads.put(tangent, h, self._noise(heads.take(tangent, h)))
            columns.append(nonzero(forward(tangent).movedim(dim, -1)))
        return columns

    def same_values(self, attention: AttentionCall, columns: list[set[int]], source: Tensor) -> list[int]:
        """For each head of eager attention, the first head that reads the same values, up to a gate.

        All heads get the same random attention weights, twice. Heads with the same values give the same outputs in ``columns`` of
        ``source``; in the ratio of the two outputs, a later multiplication such as a gate cancels.
        """
        forward, heads = _derivative(source, attention.result), attention.heads
        outputs = []
        for _ in range(2):
            drawn, tangent = self._noise(heads.take(attention.result, 0)), torch.zeros_like(attention.result)
            for h in range(len(heads)):
                heads.put(tangent, h, drawn)
            outputs.append(forward(tangent).double().nan_to_num())
        parts = [tuple(out[..., sorted(own)] for out in outputs) for own in columns]
        close = 64 * torch.finfo(source.dtype).eps

        def equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
            if one[0].shape != other[0].shape:
                return False
            left, right = one[0] * other[1], one[1] * other[0]
            return bool((left - right).abs().max() <= close * left.abs().max())

        return [next(i for i, first in enumerate(parts) if first is part or equal(first, part)) for part in parts]

    def adds_more(self, attention: AttentionCall) -> bool:
        """Whether something, such as a residual, is added to the heads before the module that was taken for W_O.

        Only used if the attention module returns its heads side by side: then only weights and gates may come in between.
        """
        source = attention.source
        if source is None or not source.requires_grad:
            return False
        of_heads = _derivative(source, attention.result)(attention.result.detach())
        rest = (source.detach() - of_heads).movedim(attention.output_dim, -1)
        index = sorted(set().union(*attention.columns))
        size = source.detach().abs().max().clamp(min=1e-30)
        return bool(rest[..., index].abs().max() > 1e-3 * size) if index else False

    def note_values(self, attention: AttentionCall, columns: list[set[int]], source: Tensor) -> None:
        """Record what else the heads' features in ``source`` depend on: values of eager attention, gates and scales."""
        leaves = [leaf for leaf in leaves_of(source) if leaf is not attention.result and leaf.ndim]
        if not leaves or not disjoint(columns):
            return
        if not attention.fused:
            attention.same_values = self.same_values(attention, columns, source)
        entries, heads = Entries(), HeadSlices(source.ndim - 1, tuple(tuple(sorted(own)) for own in columns))
        for h, leaf, gradient in self._gradients(source, heads, [(leaf, leaf) for leaf in leaves]):
            if name := self.names.get(id(leaf)):
                add_entries(entries, name, gradient, h, len(heads))
            if call := self.calls.get(id(leaf)):
                for rows in (attention.rows, *(() if attention.fused else (attention.value_rows,))):
                    rows.setdefault(call.module, empty_sets(len(columns)))[h] |= _features(call, gradient)
        merge(attention.tables, own_entries(entries))

    def _noise(self, like: Tensor) -> Tensor:
        # Random, since a layer norm removes constants; away from zero, since zero means "unused".
        noise = torch.rand(like.shape, generator=self.generator) + 0.5
        return noise.to(like.device, like.dtype)


def _derivative(of: Tensor, by: Tensor) -> Callable[[Tensor], Tensor]:
    """The forward derivative (Jacobian-vector product) of ``of`` with respect to ``by``, by differentiating twice."""
    cotangent = torch.zeros_like(of, requires_grad=True)
    (back,) = torch.autograd.grad(of, by, cotangent, create_graph=True)
    return lambda tangent: torch.autograd.grad(back, cotangent, tangent, retain_graph=True)[0]


def _is_causal(blocked: Tensor) -> bool:
    """Whether ``blocked`` ``[..., queries, keys]`` blocks all keys after their query, but not all keys before it."""
    tokens = blocked.shape[-2]
    blocked = blocked[..., :tokens]
    behind = torch.ones(tokens, tokens, dtype=torch.bool, device=blocked.device).triu(1)
    return tokens > 1 and bool(blocked[..., behind].all()) and not bool(blocked[..., behind.T].all())


def joined(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor with its dimensions 1 and 2, those of ``shape``, as one."""
    return tensor[(None,) * (5 - tensor.ndim)].expand(-1, *shape[1:3], -1, -1).flatten(1, 2)


def is_causal_mask(mask: Tensor | None) -> bool:
    """Whether a boolean or additive mask blocks every key after its query."""
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return False
    return _is_causal(~mask if mask.dtype == torch.bool else mask <= _BLOCKED)


def are_causal(probabilities: Tensor) -> bool:
    """Whether every query gives probability 0 to all keys after it; an attention sink adds one key."""
    queries, keys = probabilities.shape[-2:]
    return keys in (queries, queries + 1) and _is_causal(probabilities == 0)


# -- sets of features for each head, and helpers that read them from small autograd graphs ----------------


Entries = dict[tuple[str, int], list[set[int]]]
"""(parameter or buffer, dimension) -> head -> the entries that it reads."""


def add_entries(entries: Entries, name: str, gradient: Tensor, head: int, heads: int) -> None:
    """Add the entries of a tensor that one of so many heads reads: those where the gradient is not zero.

    Of a number for each head, the head's own one counts even if its gradient is zero, as of Swin V2's scales at their clamp.
    """
    for dim in range(gradient.ndim):
        read = nonzero(gradient.movedim(dim, -1))
        if not read and gradient.numel() == gradient.shape[dim] == heads:
            read = {head}
        entries.setdefault((name, dim), empty_sets(heads))[head] |= read


def own_entries(entries: Entries) -> Entries:
    """The dimensions along which every head reads entries that are not common to all heads; without the common ones."""
    shared = {key: set.intersection(*each) for key, each in entries.items()}
    own = {key: [read - shared[key] for read in each] for key, each in entries.items()}
    return {key: each for key, each in own.items() if len(each) > 1 and all(each)}


def empty_sets(heads: int) -> list[set[int]]:
    """An empty set of features for each head."""
    return [set() for _ in range(heads)]


def is_matrix(weight: Tensor) -> bool:
    """Whether a weight is a matrix ``[out, in]``, or a convolution's with kernel size 1."""
    return weight.ndim >= 2 and set(weight.shape[2:]) <= {1}


def overlap(features: Sequence[set[int]]) -> bool:
    """Whether some heads share features."""
    return sum(map(len, features)) != len(set().union(*features))


def disjoint(features: Sequence[set[int]]) -> bool:
    """Whether every head has features, and no two heads share one."""
    return bool(features) and all(features) and not overlap(features)


def alike(features: Sequence[set[int]]) -> bool:
    """Whether all heads have the same features."""
    return all(own == features[0] for own in features)


def users_of(features: Sequence[set[int]]) -> dict[int, frozenset[int]]:
    """The heads that have each feature."""
    every = set().union(*features)
    return {feature: frozenset(h for h, own in enumerate(features) if feature in own) for feature in every}


def sharing(rows: Sequence[Sequence[set[int]]], heads: int) -> tuple[tuple[int, ...], ...]:
    """The groups of heads that share features within the group, but not with all heads; () if there are none."""
    group = {h: frozenset({h}) for h in range(heads)}
    for features in rows:
        for together in {users for users in users_of(features).values() if len(users) < heads}:
            whole = frozenset().union(*(group[h] for h in together))
            group.update(dict.fromkeys(whole, whole))
    groups = sorted({tuple(sorted(g)) for g in group.values()})
    return tuple(groups) if any(len(g) > 1 for g in groups) else ()


def filled(features: list[set[int]], size: int) -> list[set[int]]:
    """Each head's features with gaps filled, which arise if an activation is zero for every token of the example.

    If every head has its own block of ``size / heads`` features, an unused feature belongs to the head of its block. Otherwise
    it belongs to the heads on both sides of it, if they are the same. If this guess is wrong, the proof fails.
    """
    users = users_of(features)
    if len(users) in (0, size):
        return features
    block, rest = divmod(size, len(features))
    if block and not rest and len(users) > size // 2 and all(u == {f // block} for f, u in users.items()):
        return [set(range(h * block, (h + 1) * block)) for h in range(len(features))]
    result = [set(own) for own in features]
    for before, after in pairwise(sorted(users)):
        if users[before] == users[after]:
            for h in users[before]:
                result[h].update(range(before + 1, after))
    return result


def merge(into: dict[Key, list[set[int]]], rows: Mapping[Key, list[set[int]]]) -> None:
    """Add each head's features in ``rows`` to those in ``into``."""
    for key, heads in rows.items():
        known = into.get(key, empty_sets(len(heads)))
        into[key] = [old | new for old, new in zip(known, heads, strict=True)]


def nonzero(gradient: Tensor) -> set[int]:
    """The indices of the last dimension at which ``gradient`` has a non-zero entry."""
    gradient = gradient.detach() if gradient.element_size() > 1 else gradient.detach().float()  # float8 is for storage
    flat = gradient.nan_to_num().reshape(-1, gradient.shape[-1])
    return set((flat != 0).any(dim=0).nonzero().flatten().tolist())


def _features(call: LinearCall, gradient: Tensor) -> set[int]:
    """The output features of a linear layer at which a gradient is not zero."""
    return nonzero(gradient.movedim(call.dim, -1))


def memory(tensor: Tensor) -> int:
    """A tensor's memory address; for a meta tensor, which has no memory, the object's id."""
    return id(tensor) if tensor.device.type == "meta" else tensor.data_ptr()


def nodes_of(tensor: Tensor | None) -> dict[Any, None]:
    """Every node of a tensor's autograd graph, in a fixed order."""
    nodes: dict[Any, None] = {}
    stack = [tensor.grad_fn if tensor is not None else None]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            stack.extend(parent for parent, _ in node.next_functions)
    return nodes


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The leaf tensors of a tensor's autograd graph."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    return [node.variable for node in nodes_of(tensor) if hasattr(node, "variable")]
