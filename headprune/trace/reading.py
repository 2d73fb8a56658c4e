"""What heads depend on: derivatives in the small graphs between linear layers, read off one head at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headprune.trace.graphs import Heads, Uses, leaves_of, nodes_of, overlap, used
from headprune.trace.record import Attention, LinearCall

_MOST_SLICES = 2048  # of (batch * heads, …), each of which is differentiated


class Reader:
    """Asks graphs which features, tables and arguments each head reads.

    Args:
        calls: Calls of linear layers so far, by the id of the leaf that stands for their output; it may grow.
        names: Names of parameters and buffers, by id.
    """

    def __init__(self, calls: Mapping[int, LinearCall], names: dict[int, str]) -> None:
        self.calls, self.names = calls, names
        self.generator = torch.Generator().manual_seed(0)
        self.read: list[tuple[Tensor, Heads, dict[str, list[set[int]]]]] = []  # what `rows` found in this attention

    def forget(self) -> None:
        """What was read of the attention before: the next one begins."""
        self.read = []

    def heads_in(self, tensor: Tensor) -> Heads | None:
        """Where the heads of queries or scores are; None where there are none to be told apart."""
        if tensor.ndim >= 4:
            if not tensor.shape[1]:
                return None
            heads = Heads.along(1, tensor.shape[1])
            # (batch, tokens, heads, …), as sliding windows and deformable attention have it: tokens all read alike.
            if len(heads) == 1 or self._alike(tensor, heads):
                for dim in range(2, tensor.ndim - 1):
                    others = Heads.along(dim, tensor.shape[dim])
                    if 1 < len(others) <= 256 and not self._alike(tensor, others):
                        return others
            return heads
        if tensor.ndim != 3 or not tensor.requires_grad or tensor.shape[0] > _MOST_SLICES:
            return None
        # (batch * heads, …): slices that read the same features of the projections are one head.
        each = Heads(0, tuple((i,) for i in range(tensor.shape[0])))
        rows = self.rows(tensor, each)
        groups: dict[frozenset[tuple[str, int]], list[int]] = {}
        for i in range(len(each)):
            used = frozenset((module, feature) for module, heads in rows.items() for feature in heads[i])
            groups.setdefault(used, []).append(i)
        if len(groups) < 2 or len({len(g) for g in groups.values()}) > 1:
            return None  # a softmax over classes or experts, or one head
        return Heads(0, tuple(tuple(g) for g in groups.values()))

    def compares_tokens(self, row: Tensor) -> bool:
        """Whether a query's scores ``[keys]`` depend on several tokens, as a softmax of queries with keys does."""
        leaves = [leaf for leaf in leaves_of(row) if id(leaf) in self.calls and leaf.ndim > 1]
        if not leaves or len(row) < 2:
            return True  # nothing says that they do not
        gradients = torch.autograd.grad(row, leaves, self._noise(row), retain_graph=True, allow_unused=True)
        along = [self.calls[id(leaf)].dim for leaf in leaves]
        moved = [g.movedim(dim, -1) for g, dim in zip(gradients, along, strict=True) if g is not None]
        tokens = [int((g.flatten(0, -2) != 0).any(-1).sum()) for g in moved]
        return max(tokens, default=2) > 1

    def _alike(self, tensor: Tensor, heads: Heads) -> bool:
        """Whether all heads read the same features of every projection, and of some."""
        rows = self.rows(tensor, heads)
        return bool(rows) and all(r == features[0] for features in rows.values() for r in features)

    def rows(self, tensor: Tensor, heads: Heads) -> dict[str, list[set[int]]]:
        """Which features of which projection each head of ``tensor`` depends on.

        Several ask the same of one attention's queries and keys: a backward pass for every head is made once.
        """
        rows = next((r for known, those, r in self.read if known is tensor and those == heads), None)
        if rows is None:
            rows = self._read_rows(tensor, heads)
            self.read.append((tensor, heads, rows))
        return {module: [set(own) for own in features] for module, features in rows.items()}

    def _read_rows(self, tensor: Tensor, heads: Heads) -> dict[str, list[set[int]]]:
        leaves = [leaf for leaf in leaves_of(tensor) if id(leaf) in self.calls]
        rows: dict[str, list[set[int]]] = {}
        if not leaves:
            return rows
        for h in range(len(heads)):
            part = heads.take(tensor, h)
            gradients = torch.autograd.grad(part, leaves, self._noise(part), retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    call_ = self.calls[id(leaf)]
                    rows.setdefault(call_.module, [set() for _ in heads.indices])[h] |= call_.used(gradient)
        return rows

    def note_selections(self, attention: Attention, tensor: Tensor, heads: Heads, mixers: Mapping[str, Tensor]) -> None:
        """Modules inside the attention whose output has the heads apart, though what they read has not: norms over all heads."""
        if len(heads) < 2 or not tensor.requires_grad:
            return
        inside = f"{attention.module}." if attention.module else ""
        projections = {call.module for call in self.calls.values()}
        mixers = {n: t for n, t in mixers.items() if n.startswith(inside) and n not in projections}
        if not mixers or not any(all(r == rows[0] for r in rows) for rows in self.rows(tensor, heads).values()):
            return
        features: dict[str, list[set[int]]] = {}
        for h in range(len(heads)):
            part = heads.take(tensor, h)
            gradients = torch.autograd.grad(
                part, list(mixers.values()), self._noise(part), retain_graph=True, allow_unused=True
            )
            for name, gradient in zip(mixers, gradients, strict=True):
                if gradient is not None:
                    features.setdefault(name, [set() for _ in range(len(heads))])[h] |= used(gradient)
        for name, rows in features.items():
            if all(rows) and any(r != rows[0] for r in rows):
                attention.selections[name] = rows

    def note_tables(self, attention: Attention, tensor: Tensor, heads: Heads) -> None:
        """Parameters and buffers in which each head of ``tensor`` has entries of its own."""
        leaves = [leaf for leaf in leaves_of(tensor) if id(leaf) in self.names and leaf.ndim]
        if not leaves or len(heads) < 2:
            return
        used = Uses(self.names, len(heads))
        for h in range(len(heads)):
            part = heads.take(tensor, h)
            used.add(
                h, leaves, torch.autograd.grad(part, leaves, self._noise(part), retain_graph=True, allow_unused=True)
            )
        used.merge_into(attention.tables)

    def note_arguments(
        self, attention: Attention, tensor: Tensor, heads: Heads, given: Mapping[str | int, Tensor]
    ) -> None:
        """Arguments of the attention module that each head of ``tensor`` reads in features of its own, by no projection."""
        given = {k: t for k, t in given.items() if t.grad_fn is not None}
        if len(heads) < 2 or not given or not tensor.requires_grad:
            return
        way = nodes_of(tensor)
        # What a projection made is cut there.
        given = {
            k: t
            for k, t in given.items()
            if t.grad_fn in way and not any(id(leaf) in self.calls for leaf in leaves_of(t))
        }
        for h in range(len(heads) if given else 0):
            part = heads.take(tensor, h)
            gradients = torch.autograd.grad(
                part, list(given.values()), self._noise(part), retain_graph=True, allow_unused=True
            )
            for key, gradient in zip(given, gradients, strict=True):
                if gradient is not None:
                    attention.arguments.setdefault(key, [set() for _ in heads.indices])[h] |= used(gradient)

    def columns_of(self, attention: Attention, source: Tensor, dim: int = -1) -> list[set[int]]:
        """The features of ``source`` along ``dim`` that each head's result reaches."""
        cotangent = torch.zeros_like(source, requires_grad=True)
        (back,) = torch.autograd.grad(source, attention.result, cotangent, create_graph=True)
        heads, columns = attention.heads, []
        for h, indices in enumerate(heads.indices):
            tangent = torch.zeros_like(attention.result)
            where = torch.tensor(indices, device=tangent.device)
            tangent.index_copy_(heads.dim, where, self._noise(heads.take(tangent, h)))
            (forward,) = torch.autograd.grad(back, cotangent, tangent, retain_graph=True)
            columns.append(used(forward.movedim(dim, -1)))
        return columns

    def adds_more(self, attention: Attention) -> bool:
        """Whether something is added to the heads before what was taken for their W_O reads them, such as a residual.

        Only asked where the module returns its heads side by side: nothing but weights and gates should come in between.
        """
        source = attention.source
        if source is None or not source.requires_grad:
            return False
        cotangent = torch.zeros_like(source, requires_grad=True)
        (back,) = torch.autograd.grad(source, attention.result, cotangent, create_graph=True)
        (made,) = torch.autograd.grad(back, cotangent, attention.result.detach(), retain_graph=True)
        rest = (source.detach() - made).movedim(attention.output_dim, -1)
        index = sorted(set().union(*attention.columns))
        size = source.detach().abs().max().clamp(min=1e-30)
        return bool(rest[..., index].abs().max() > 1e-3 * size) if index else False

    def note_values(self, attention: Attention, columns: list[set[int]], source: Tensor, leaves: list[Tensor]) -> None:
        """What else enters the heads' features of ``source``: values of eager attention, gates and scales on the output."""
        leaves = [leaf for leaf in leaves if leaf is not attention.result and leaf.ndim]
        if not leaves or not all(columns) or overlap(columns):
            return
        used = Uses(self.names, len(attention.heads))
        for h, own in enumerate(columns):
            seed = torch.zeros_like(source)
            index = sorted(own)
            seed[..., index] = self._noise(seed[..., index])
            gradients = torch.autograd.grad(source, leaves, seed, retain_graph=True, allow_unused=True)
            used.add(h, leaves, gradients)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None and id(leaf) in self.calls:
                    call_ = self.calls[id(leaf)]
                    for rows in (attention.rows, *(() if attention.fused else (attention.value_rows,))):
                        rows.setdefault(call_.module, [set() for _ in columns])[h] |= call_.used(gradient)
        used.merge_into(attention.tables)

    def _noise(self, like: Tensor) -> Tensor:
        # Random, since a constant would vanish in a layer norm; away from zero, since zero means "unused".
        noise = torch.rand(like.shape, generator=self.generator) + 0.5
        return noise.to(like.device, like.dtype)
