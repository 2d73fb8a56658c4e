"""Find what each head depends on, by derivatives in the small autograd graphs between linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from headprune.trace.features import Uses, alike, disjoint, empty_sets, leaves_of, merge, nodes_of, nonzero
from headprune.trace.record import AttentionCall, HeadSlices, LinearCall, Rows

Source = TypeVar("Source")
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
                return next((others for others in few if self._have_own_rows(tensor, others)), heads)
            return heads
        if tensor.ndim != 3 or not tensor.requires_grad or tensor.shape[0] > _MOST_SLICES:
            return None
        # In (batch * heads, …), slices that read the same features of the projections belong to one head.
        each = HeadSlices(0, tuple((i,) for i in range(tensor.shape[0])))
        rows = self.rows(tensor, each)
        groups: dict[frozenset[tuple[str, int]], list[int]] = {}
        for i in range(len(each)):
            features = frozenset((module, feature) for module, slices in rows.items() for feature in slices[i])
            groups.setdefault(features, []).append(i)
        if len(groups) < 2 or len({len(g) for g in groups.values()}) > 1:
            return None  # a softmax over classes or experts, or one head
        return HeadSlices(0, tuple(tuple(g) for g in groups.values()))

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

    def _have_own_rows(self, tensor: Tensor, heads: HeadSlices) -> bool:
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
                rows.setdefault(call.module, empty_sets(len(heads)))[h] |= call.features(gradient)
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
        nodes, projections = nodes_of(tensor), {call.module for call in self.calls.values()}
        mixed = (mixers or {}) if any(map(alike, rows.values())) else {}
        sources: list[tuple[tuple[str, str | int], Tensor]] = [
            *((("table", self.names[id(t)]), t) for t in leaves_of(tensor) if id(t) in self.names and t.ndim),
            *((("norm", n), t) for n, t in mixed.items() if n.startswith(attention.prefix) and n not in projections),
            *(
                (("argument", key), t)
                for key, t in (given or {}).items()  # a projection's output is cut in that projection
                if t.grad_fn in nodes and not any(id(leaf) in self.calls for leaf in leaves_of(t))
            ),
        ]
        uses, features = Uses(len(heads)), dict[tuple[str, str | int], list[set[int]]]()
        for h, (kind, key), gradient in self._gradients(tensor, heads, sources):
            if kind == "table":
                uses.add(h, str(key), gradient)
            else:
                features.setdefault((kind, key), empty_sets(len(heads)))[h] |= nonzero(gradient)
        uses.merge_into(attention.tables)
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

    def note_values(
        self, attention: AttentionCall, columns: list[set[int]], source: Tensor, leaves: list[Tensor]
    ) -> None:
        """Record what else the heads' features in ``source`` depend on: values of eager attention, gates and scales."""
        leaves = [leaf for leaf in leaves if leaf is not attention.result and leaf.ndim]
        if not leaves or not disjoint(columns):
            return
        if not attention.fused:
            attention.same_values = self.same_values(attention, columns, source)
        uses = Uses(len(columns))
        for h, own in enumerate(columns):
            seed = torch.zeros_like(source)
            index = sorted(own)
            seed[..., index] = self._noise(seed[..., index])
            gradients = torch.autograd.grad(source, leaves, seed, retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is None:
                    continue
                if name := self.names.get(id(leaf)):
                    uses.add(h, name, gradient)
                if call := self.calls.get(id(leaf)):
                    for rows in (attention.rows, *(() if attention.fused else (attention.value_rows,))):
                        rows.setdefault(call.module, empty_sets(len(columns)))[h] |= call.features(gradient)
        uses.merge_into(attention.tables)

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


def is_causal_mask(mask: Tensor | None) -> bool:
    """Whether a boolean or additive mask blocks every key after its query."""
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return False
    return _is_causal(~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2)


def are_causal(probabilities: Tensor) -> bool:
    """Whether every query gives probability 0 to all keys after it; an attention sink adds one key."""
    queries, keys = probabilities.shape[-2:]
    return keys in (queries, queries + 1) and _is_causal(probabilities == 0)
