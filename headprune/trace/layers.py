"""From a traced forward to the attention layers: which features belong to which head, and what can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from headprune.attention import AttentionLayer, HeadArgument, HeadFeatures, HeadGate, HeadTable, ghosts
from headprune.modules import MultiheadAttention
from headprune.trace.graphs import is_matrix, leaves_of, nodes_of, overlap
from headprune.trace.record import Attention
from headprune.trace.tracer import Tracer


def read_layers(trace: Tracer) -> list[AttentionLayer]:
    """One per attention module; several, where one module computes attention from several projections."""
    unique: dict[str, list[Attention]] = {}
    for attention in trace.found:
        if attention.returned and (
            not attention.columns or overlap(attention.columns) or attention.bypass or trace.reader.adds_more(attention)
        ):
            attention.output, attention.columns = attention.module, attention.returned
            attention.concatenated, attention.output_dim, attention.reason = True, -1, ""
        elif around := _around(attention):
            attention.around, attention.columns = around, []
            attention.reason = f"its output projection {around} is made of several layers: merge them (LoRA) first"
        elif attention.output and not attention.reason and _elsewhere(trace, attention):
            attention.reason = f"its output projection {attention.output} is also called on other data"
            attention.columns, attention.passed = [], []
        elif attention.bypass and not attention.reason and not overlap(attention.columns):
            attention.reason = f"its heads reach {attention.bypass} past the output projection {attention.output}"
            attention.columns, attention.passed = [], []
        if not attention.fused and not attention.output and not attention.rows:
            continue  # a softmax that is no attention, such as a router's
        apart = attention.columns and all(attention.columns) and not overlap(attention.columns)
        others = any(a.pairwise and a.module == attention.module for a in trace.found)
        if not attention.pairwise and (others or not apart):
            continue  # over channels, streams or a convolution's taps
        known = unique.setdefault(attention.module, [])
        same = next((a for a in known if a.rows == attention.rows), None)
        if same is None:
            known.append(attention)
        elif (same.output, same.columns) != (attention.output, attention.columns):
            same.reason = f"its result goes through two output projections, {same.output} and {attention.output}"
            same.columns, same.passed = [], []
    made: list[AttentionLayer] = []
    for calls in unique.values():
        for number, attention in enumerate(calls, 1):
            made.append(_layer(trace, len(made), attention, "" if number == 1 else f"#{number}"))
    return made


def _layer(trace: Tracer, index: int, attention: Attention, suffix: str) -> AttentionLayer:
    heads = len(attention.heads)
    kind = "cross" if attention.cross else "decoder" if attention.causal else "encoder"
    reason = attention.reason or _separable(attention)
    attention.columns = _filled(attention.columns, trace.sizes.get((attention.output, "in"), 0))
    output = None
    if attention.output and attention.columns and all(attention.columns) and not overlap(attention.columns):
        output = HeadFeatures(attention.output, _sorted(attention.columns))
    projections, tables, groups = _projections(trace, attention), _tables(trace, attention), _groups(attention)
    owners = tuple(t.name.rpartition(".")[0] for t in tables)
    counting = _counting(trace, attention)
    inner = dict.fromkeys((*owners, *(n for n in attention.running if n in counting)))
    gate = _gate(trace, attention) if output is None and attention.output and not suffix else None
    mixer = gate.module if gate and not attention.concatenated and _keeps_zeros(trace, attention, gate) else ""
    if gate and mixer:
        place = sorted(f for features in gate.features for f in features)
        output = HeadFeatures(attention.output, tuple(tuple(place.index(f) for f in own) for own in gate.features))
        reason = attention.reason
    if output is not None and attention.output_dim != -1:
        gate = HeadGate(output.module, attention.output_dim, output.features)
    if suffix and not reason:
        reason = f"{attention.module} computes several attentions, and their head counts cannot be told apart"
    if gate and output is None and not _is_plain(trace.modules[gate.module]):
        reason = f"{gate.module} ({type(trace.modules[gate.module]).__name__}) has no plain weight matrix to slice (quantised?)"
    if attention.module in ghosts(trace.model):
        reason, output = "all of its heads were pruned; one stays with zero output, for the cache", None
    matrices = [t for t in tables if len(trace.shape[t.name]) > 1]
    if not reason and not (projections or matrices or attention.selections):
        reason = f"no weights of {attention.module} were found that belong to single heads (quantised?)"
    if not reason:
        reason = _unsliceable(trace, attention, output, projections) or _asleep(trace, attention, output, projections)
    return AttentionLayer(
        name=attention.module + suffix, index=index, kind=kind, num_heads=heads, num_kv_heads=_kv_heads(attention, groups), groups=groups,
        head_dim=len(attention.columns[0]) if output else 0, prunable=not reason, reason=reason,
        output_projection=output, gate=gate, mixer=mixer, projections=projections, values=_values(trace, attention), tables=tables,
        selections=tuple(HeadFeatures(n, _sorted(rows)) for n, rows in attention.selections.items()),
        arguments=_head_arguments(trace, attention), inner_modules=tuple(inner), side_modules=tuple(n for n in counting if n not in inner),
        bypass=_bypass(trace, attention, kind), output_arity=trace.results.get(attention.module) or 0,
        output_inside=_output_inside(attention), concatenates=attention.concatenated,
    )  # fmt: skip


def _projections(trace: Tracer, attention: Attention) -> tuple[HeadFeatures, ...]:
    """Every projection but W_O that holds features of single heads."""
    heads, found = len(attention.heads), []
    for module, rows in attention.rows.items():
        rows = _filled(rows, trace.sizes.get((module, "out"), 0))
        outside = not f"{module}.".startswith(f"{attention.module}." if attention.module else "")
        if outside and any(module in a.rows and a.module != attention.module for a in trace.found):
            continue  # something that several layers take their heads of, such as a position bias: it stays whole
        shared = set.intersection(*rows) if heads > 1 else set()
        own = [r - shared for r in rows]  # features that all heads use stay (MQA, latent attention)
        if any(own):
            found.append(HeadFeatures(module, _sorted(own)))
    return tuple(found)


def _values(trace: Tracer, attention: Attention) -> HeadFeatures | None:
    """The one value projection, if there is one in which every head has features."""
    if len(attention.value_rows) != 1:
        return None
    ((module, rows),) = attention.value_rows.items()
    rows = _filled(rows, trace.sizes.get((module, "out"), 0))
    return HeadFeatures(module, _sorted(rows)) if all(rows) else None


def _kv_heads(attention: Attention, groups: tuple[tuple[int, ...], ...]) -> int:
    """Key/value heads: one a group; one in all, where all heads read the same values (MQA)."""
    heads = len(attention.heads)
    alike = any(all(r == rows[0] != set() for r in rows) for rows in attention.value_rows.values())
    return len(groups) or (1 if heads > 1 and alike else heads)


def _tables(trace: Tracer, attention: Attention) -> tuple[HeadTable, ...]:
    """Parameters and buffers of the attention module with entries of their own for each head."""
    return tuple(
        HeadTable(name, dim, _sorted(_filled(indices, trace.shape[name][dim])))
        for (name, dim), indices in attention.tables.items()
        # One that other layers read too must stay whole.
        if f"{name}.".startswith(f"{attention.module}.")
        and sum((name, dim) in a.tables for a in trace.found) == 1
        and name.rpartition(".")[0] not in attention.selections
    )


def _bypass(trace: Tracer, attention: Attention, kind: str) -> str:
    """How the layer is taken out when all of its heads go (`AttentionLayer.bypass`)."""
    if isinstance(trace.modules[attention.module], MultiheadAttention):
        return "slice"
    if (
        kind == "encoder"
        and attention.output_dim == -1
        and not attention.concatenated
        and (not _output_inside(attention) or trace.returned.get(attention.module) == attention.output)
        and attention.tokens > 1
        and trace.results.get(attention.module) is not None
        and attention.module not in trace.cached
        and not _has_other_weights(trace.modules, attention)
    ):
        return "stub"
    return "ghost"


def _output_inside(attention: Attention) -> bool:
    """Whether W_O is called inside the attention module."""
    return f"{attention.output}.".startswith(f"{attention.module}.") if attention.module else True


def _sorted(rows: list[set[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(own)) for own in rows)


def _counting(trace: Tracer, attention: Attention) -> list[str]:
    """Modules that may count the heads: the attention module and those inside, but no layers with weights of their own."""
    inside = f"{attention.module}." if attention.module else ""
    below = [n for n in trace.modules if n == attention.module or n.startswith(inside)]
    if not attention.module or any(a.module != attention.module and a.module in below for a in trace.found):
        below = [n for n in attention.running if n in below]
    return [
        n for n in below
        if n == attention.module or not any(p.ndim > 1 for p in trace.modules[n].parameters(recurse=False))
    ]  # fmt: skip


def _unsliceable(
    trace: Tracer, attention: Attention, output: HeadFeatures | None, projections: Sequence[HeadFeatures]
) -> str:
    for part in (output, *projections):
        if part is None:
            continue
        if part is output and attention.concatenated:
            continue
        module = trace.modules[part.module]
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or not is_matrix(weight):
            return f"{part.module} ({type(module).__name__}) has no plain weight matrix to slice (quantised?)"
        if hasattr(weight, "placements"):
            return f"the weight of {part.module} is spread over devices (tensor parallel): prune before distributing it"
    return ""


def _asleep(
    trace: Tracer, attention: Attention, output: HeadFeatures | None, projections: Sequence[HeadFeatures]
) -> str:
    """What did not run, but stands beside a projection and is as wide: it would no longer fit once it does run."""
    for part in (output, *projections):
        if part is None or (part is output and attention.concatenated):
            continue
        side = "in" if part is output else "out"
        beside, _, _ = part.module.rpartition(".")
        wrapper = beside and not f"{attention.module}.".startswith(
            f"{beside}."
        )  # LoRA's, not the attention module itself
        for name, module in trace.modules.items():
            own = name.startswith((f"{part.module}.", *((f"{beside}.",) if wrapper else ())))
            idle = own and name not in trace.entered and not any(t.startswith(f"{name}.") for t, _ in attention.tables)
            if idle and _as_wide(module, trace.sizes.get((part.module, side), 0), side):
                return f"{name} does not run, but would no longer fit (an adapter that is not active: merge or delete it first)"
    return ""


def _as_wide(module: nn.Module, width: int, side: str) -> bool:
    """Whether a module has weights for as many inputs or outputs, as far as it can be told."""
    linear = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    for parameter in module.parameters(recurse=False):
        shape = parameter.shape[:2]
        if linear and parameter.ndim > 1:
            shape = shape[:1] if side == "out" else shape[1:]
        if width in shape:
            return True
    return False


def _elsewhere(trace: Tracer, attention: Attention) -> bool:
    """Whether W_O is called more often than this attention module computes attention."""
    own = [a for a in trace.found if a.module == attention.module and a.output == attention.output]
    return trace.entered.get(attention.output, 0) > len(own)


def _around(attention: Attention) -> str:
    """The module that holds both W_O and what the heads reach past it; "" if there is none."""
    if not attention.bypass or attention.reason:
        return ""
    parts = (attention.output, attention.bypass)
    return next((name for name, _ in attention.passed if name and all(p.startswith(f"{name}.") for p in parts)), "")


def _gate(trace: Tracer, attention: Attention) -> HeadGate | None:
    """The first module between the attention and W_O that still has the heads apart."""
    if len(attention.heads) < 2:
        return None
    calls = sum(a.module == attention.module for a in trace.found)
    way = nodes_of(attention.source)
    for name, tensor in attention.passed:
        # One that is called on other data too, such as a dropout, would gate that as well; one beside the way, nothing.
        off = attention.around != name and (name not in trace.outputs or trace.outputs[name].grad_fn not in way)
        if off or trace.entered[name] > calls or not any(leaf is attention.result for leaf in leaves_of(tensor)):
            continue
        for dim in (-1, *((1,) if tensor.ndim > 3 else ())):
            columns = trace.reader.columns_of(attention, tensor, dim)
            if all(columns) and not overlap(columns):
                return HeadGate(name, dim, tuple(tuple(sorted(c)) for c in columns))
    return None


def _keeps_zeros(trace: Tracer, attention: Attention, gate: HeadGate) -> bool:
    """Whether the module of a gate, a norm over all heads before W_O, makes nothing of heads that give nothing."""
    module, width = trace.modules[gate.module], dict(attention.passed)[gate.module].shape[-1]
    entries = sum(map(len, gate.features))
    if gate.dim != -1 or entries != trace.sizes.get((attention.output, "in")) or gate.module == attention.output:
        return False
    held = next(module.parameters(), None)
    if held is not None and held.is_meta:
        return True  # nothing can be tried here, nor pruned
    try:
        with torch.no_grad():
            probe = torch.linspace(-1, 2, width).repeat(2, 1)
            probe[:, list(gate.features[0])] = 0.0
            given = probe if held is None else probe.to(held.device, held.dtype)
            out = module.forward(given)  # itself: an earlier prune left hooks that place and select
            return bool(out.shape == given.shape and ((out == 0) == (given == 0)).all())
    except Exception:  # it takes something else
        return False


def _head_arguments(trace: Tracer, attention: Attention) -> tuple[HeadArgument, ...]:
    """Arguments of the attention module with something for each head."""
    heads = len(attention.heads)
    hidden = {id(call.source) for call in trace.calls.values()}  # what is projected is no bias
    found = []
    for key, tensor in trace.given.get(attention.module, {}).items():
        read = attention.arguments.get(key, [set[int]()])
        if all(read) and any(own != read[0] for own in read) and set().union(*read) == set(range(tensor.shape[-1])):
            found.append(HeadArgument(key, -1, False, tuple(tuple(sorted(own)) for own in read)))
            continue
        dim = 1 if tensor.ndim == 4 else 0
        if heads < 2 or tensor.ndim > 4 or id(tensor) in hidden:
            continue
        batch = attention.result.shape[0] // (1 if attention.heads.dim else heads)
        if tensor.shape[dim] == heads:
            found.append(HeadArgument(key, dim, False))
        elif dim == 0 and tensor.shape[0] == batch * heads:
            found.append(HeadArgument(key, dim, True))
    return tuple(found)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has no packed numbers, as quantised layers have."""
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not any(t.dtype in (torch.int8, torch.uint8, torch.int32) and t.numel() > 1 for t in held)


def _separable(attention: Attention) -> str:
    """Why the heads of this layer cannot be told apart, or ""."""
    if not attention.output:
        return "no output projection follows the attention"
    if not attention.columns or not all(attention.columns):
        return f"a head does not reach the output projection {attention.output}"
    if overlap(attention.columns):
        return f"the heads are mixed before the output projection {attention.output}"
    if len(attention.heads) > 1:
        queries = [*attention.query_rows.values(), *attention.selections.values()]
        if queries and not attention.tables and all(r == rows[0] for rows in queries for r in rows):
            return "its heads are computed from the same query features (something mixes them)"
        groups = _groups(attention)
        members = [h for group in groups for h in group]
        if groups and (sorted(members) != list(range(len(attention.heads))) or len({len(g) for g in groups}) > 1):
            return "its heads share features of the projections in a way that is no grouping"
    return ""


def _filled(rows: list[set[int]], size: int) -> list[set[int]]:
    """Rows with the gaps closed that an activation left: features that were zero for every token of the example.

    A feature of no head belongs to the heads on both sides of it, if those are the same; and where every head has its own
    block of ``size / heads`` features, to the head of that block. If that is not so, the proof will say.
    """
    if len(set().union(*rows)) in (0, size):
        return rows
    users: dict[int, frozenset[int]] = {}
    for h, features in enumerate(rows):
        for feature in features:
            users[feature] = users.get(feature, frozenset()) | {h}
    filled = [set(r) for r in rows]
    block, rest = divmod(size, len(rows))
    if block and not rest and len(users) > size // 2 and all(u == {f // block} for f, u in users.items()):
        return [set(range(h * block, (h + 1) * block)) for h in range(len(rows))]
    known = sorted(users)
    for before, after in pairwise(known):
        if users[before] == users[after]:
            for h in users[before]:
                filled[h].update(range(before + 1, after))
    return filled


def _groups(attention: Attention) -> tuple[tuple[int, ...], ...]:
    """The heads that share features with some others but not with all: key/value groups. () where none do."""
    heads = len(attention.heads)
    group = {h: frozenset({h}) for h in range(heads)}
    for rows in (*attention.rows.values(), *attention.selections.values()):
        if not overlap(rows):
            continue
        users: dict[int, set[int]] = {}
        for h, features in enumerate(rows):
            for feature in features:
                users.setdefault(feature, set()).add(h)
        for together in {frozenset(u) for u in users.values() if len(u) < heads}:
            whole = frozenset().union(*(group[h] for h in together))
            group.update(dict.fromkeys(whole, whole))
    groups = sorted({tuple(sorted(g)) for g in group.values()})
    return tuple(groups) if any(len(g) > 1 for g in groups) else ()


def _has_other_weights(modules: dict[str, nn.Module], attention: Attention) -> bool:
    """Whether a stub would remove more than attention: parameters besides the projections."""
    below = set(attention.rows) | {attention.output}
    root = modules[attention.module]
    for name, module in root.named_modules(prefix=attention.module):
        if name not in below and any(True for _ in module.parameters(recurse=False)):
            return True
    return False
