"""From a traced forward to the attention layers: which features belong to which head, and what can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, HeadFeatures, HeadTable, is_inside
from headprune.offload import hook_of
from headprune.pruned import HeadArgument, MultiheadAttention, ghosts, is_ours
from headprune.trace.graphs import apart, is_matrix, leaves_of, nodes_of, overlap
from headprune.trace.record import Attention
from headprune.trace.tracer import Tracer


def read_layers(trace: Tracer) -> list[AttentionLayer]:
    """One layer for each attention module; several, where one module computes attention from several projections."""
    unique: dict[str, list[Attention]] = {}
    for attention in trace.found:
        _settle_output(trace, attention)
        if not attention.fused and not attention.output and not attention.rows:
            continue  # a softmax that is no attention, such as a router's
        others = any(a.pairwise and a.module == attention.module for a in trace.found)
        if not attention.pairwise and (others or not apart(attention.columns)):
            continue  # over channels, streams or a convolution's taps
        known = unique.setdefault(attention.module, [])
        same = next((a for a in known if a.rows == attention.rows), None)
        if same is None:
            if twin := next((a for a in known if _gives_the_same_heads(a, attention)), None):
                twin.absorb(attention)
            else:
                known.append(attention)
        elif (same.output, same.columns) != (attention.output, attention.columns):
            same.refuse(f"its result goes through two output projections, {same.output} and {attention.output}")
    made: list[AttentionLayer] = []
    for calls in unique.values():
        for number, attention in enumerate(calls, 1):
            made.append(_layer(trace, len(made), attention, "" if number == 1 else f"#{number}"))
    return made


def _gives_the_same_heads(one: Attention, other: Attention) -> bool:
    """Whether two computations in one module reach the same columns of W_O, head by head: two parts of the same heads, such as
    the two softmaxes of differential attention."""
    reasons = one.reason or other.reason
    places = [(a.output, a.output_dim, a.columns) for a in (one, other)]
    return not reasons and bool(one.output) and places[0] == places[1] and apart(one.columns)


def _settle_output(trace: Tracer, attention: Attention) -> None:
    """Decide what the output projection of an attention is, or why it has none whose inputs can be cut."""
    if attention.returned and (not apart(attention.columns) or attention.bypass or trace.reader.adds_more(attention)):
        attention.output, attention.columns = attention.module, attention.returned
        attention.concatenated, attention.output_dim, attention.reason = True, -1, ""
    elif around := _around(attention):
        attention.around, attention.columns = around, []
        attention.reason = f"its output projection {around} is made of several layers: merge them (LoRA) first"
    elif attention.output and not attention.reason and _elsewhere(trace, attention):
        attention.refuse(f"its output projection {attention.output} is also called on other data")
    elif attention.bypass and not attention.reason and not overlap(attention.columns):
        attention.refuse(f"its heads reach {attention.bypass} past the output projection {attention.output}")


def _layer(trace: Tracer, index: int, attention: Attention, suffix: str) -> AttentionLayer:
    heads = len(attention.heads)
    kind = "cross" if attention.cross else "decoder" if attention.causal else "encoder"
    reason = attention.reason or _separable(attention)
    attention.columns = _filled(attention.columns, trace.seen[attention.output].size_in)
    output = None
    if attention.output and apart(attention.columns):
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
        gate = HeadFeatures(output.module, output.features, attention.output_dim)
    if suffix and not reason:
        reason = f"{attention.module} computes several attentions, and their head counts cannot be told apart"
    if gate and output is None and not _is_plain(trace.modules[gate.module]):
        reason = _unsliceable(gate.module, trace.modules[gate.module])
    if attention.module in ghosts(trace.model):
        reason, output = "all of its heads were pruned; one stays with zero output, for the cache", None
    cut = [part for part in (output, *projections) if part and not (part is output and attention.concatenated)]
    reason = reason or _uncuttable(trace, attention, cut, output, tables)
    if not attention.output and _is_quantised(trace, attention):
        reason += " (its weights are quantised: prune first, then quantise)"
    return AttentionLayer(
        name=attention.module + suffix, index=index, kind=kind, num_heads=heads, num_kv_heads=_kv_heads(attention, groups), groups=groups,
        head_dim=len(output.features[0]) if output else 0, prunable=not reason, reason=reason,
        output_projection=output, gate=gate, mixer=mixer, projections=projections, values=_values(trace, attention), tables=tables,
        selections=tuple(HeadFeatures(n, _sorted(rows)) for n, rows in attention.selections.items()),
        arguments=_head_arguments(trace, attention), inner_modules=tuple(inner), side_modules=tuple(n for n in counting if n not in inner),
        bypass=_bypass(trace, attention, kind), output_arity=trace.seen[attention.module].arity or 0,
    )  # fmt: skip


def _projections(trace: Tracer, attention: Attention) -> tuple[HeadFeatures, ...]:
    """Every projection but W_O that holds features of single heads."""
    heads, found = len(attention.heads), []
    for module, rows in attention.rows.items():
        rows = _filled(rows, trace.seen[module].size_out)
        if not is_inside(module, attention.module) and any(
            module in a.rows and a.module != attention.module for a in trace.found
        ):
            continue  # something that several layers read, such as a position bias: it stays whole
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
    rows = _filled(rows, trace.seen[module].size_out)
    return HeadFeatures(module, _sorted(rows)) if all(rows) else None


def _kv_heads(attention: Attention, groups: tuple[tuple[int, ...], ...]) -> int:
    """Key/value heads: one a group; one in all, where all heads read the same values (MQA).

    Features alone do not say it: of a gate over all heads, or of values through a convolution, all heads read the same too.
    """
    heads, same = len(attention.heads), attention.same_values or [0] * len(attention.heads)
    if groups:
        return len(groups) if all(len({same[h] for h in group}) == 1 for group in groups) else heads
    alike = any(all(r == rows[0] != set() for r in rows) for rows in attention.value_rows.values())
    return 1 if alike and not any(same) else heads


def _tables(trace: Tracer, attention: Attention) -> tuple[HeadTable, ...]:
    """Parameters and buffers of the attention module with entries of their own for each head."""
    # A layer that runs several times reads its tables each time; one that other layers read too must stay whole.
    others = [a for a in trace.found if a.module != attention.module or a.output != attention.output]
    return tuple(
        HeadTable(name, dim, _sorted(_filled(indices, trace.shape[name][dim])))
        for (name, dim), indices in attention.tables.items()
        if f"{name}.".startswith(f"{attention.module}.")
        and not any((name, dim) in a.tables for a in others)
        and name.rpartition(".")[0] not in attention.selections
    )


def _bypass(trace: Tracer, attention: Attention, kind: str) -> str:
    """How the layer is taken out when all of its heads go (`AttentionLayer.bypass`)."""
    if is_ours(trace.modules[attention.module], MultiheadAttention):
        return "slice"
    seen = trace.seen[attention.module]
    if (
        kind == "encoder"
        and attention.output_dim == -1
        and not attention.concatenated
        and (not is_inside(attention.output, attention.module) or seen.returned == attention.output != "")
        and attention.tokens > 1
        and seen.arity is not None
        and not seen.cached
        and not _has_other_weights(trace.modules, attention)
    ):
        return "stub"
    return "ghost"


def _sorted(rows: Sequence[set[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(own)) for own in rows)


def _counting(trace: Tracer, attention: Attention) -> list[str]:
    """Modules that may count the heads: the attention module and those inside, but no layers with weights of their own."""
    below = [n for n in trace.modules if is_inside(n, attention.module)]
    if not attention.module or any(a.module != attention.module and a.module in below for a in trace.found):
        below = [n for n in attention.running if n in below]
    return [
        n for n in below
        if n == attention.module or not any(p.ndim > 1 for p in trace.modules[n].parameters(recurse=False))
    ]  # fmt: skip


def _uncuttable(
    trace: Tracer,
    attention: Attention,
    cut: Sequence[HeadFeatures],
    output: HeadFeatures | None,
    tables: Sequence[HeadTable],
) -> str:
    """Why the weights of this layer cannot be cut, or "".

    Args:
        cut: The parts whose weights would be: projections, and ``output`` unless the heads are returned side by side.
    """
    matrices = any(len(trace.shape[t.name]) > 1 for t in tables)
    if not (any(part is not output for part in cut) or matrices or attention.selections):
        return f"no weights of {attention.module} were found that belong to single heads (quantised?)"
    for part in cut:
        weight = getattr(trace.modules[part.module], "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or not is_matrix(weight):
            return _unsliceable(part.module, trace.modules[part.module])
        if hasattr(weight, "placements"):
            return f"the weight of {part.module} is spread over devices (tensor parallel): prune before distributing it"
        if not _can_be_cut(weight):
            return f"{part.module}.weight is quantised ({_kind(weight)}): prune first, then quantise"
    for table in tables:
        owner, _, own = table.name.rpartition(".")
        if not _can_be_cut(held := getattr(trace.modules[owner], own)):
            return f"{table.name} is quantised ({_kind(held)}): prune first, then quantise"
    for part in cut:
        if idle := _idle(trace, attention, part, "in" if part is output else "out"):
            return f"{idle} does not run, but would no longer fit (an adapter that is not active: merge or delete it first)"
    return ""


def _can_be_cut(weight: Tensor) -> bool:
    """Whether rows can be taken out of a weight: not out of most that hold scales beside their numbers."""
    if _is_byte_float(weight):
        return False
    try:
        weight.detach().index_select(0, torch.zeros(1, dtype=torch.long, device=weight.device))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _is_byte_float(weight: Tensor) -> bool:
    """Whether numbers are of 8 bits, a type to store and not to compute in."""
    return weight.is_floating_point() and weight.element_size() == 1


def _kind(weight: Tensor) -> str:
    """What a weight is, for an error's text."""
    return str(weight.dtype).removeprefix("torch.") if type(weight) in (Tensor, nn.Parameter) else type(weight).__name__


def _is_quantised(trace: Tracer, attention: Attention) -> bool:
    """Whether a module within an attention module holds packed numbers."""
    return any(is_inside(n, attention.module) and not _is_plain(m) for n, m in trace.modules.items())


def _unsliceable(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__}) has no plain weight matrix to slice (quantised?)"


def _idle(trace: Tracer, attention: Attention, part: HeadFeatures, side: str) -> str:
    """A module that did not run, but stands beside a projection and is as wide; "" if there is none."""
    seen = trace.seen[part.module]
    beside, _, _ = part.module.rpartition(".")
    wrapper = beside and not f"{attention.module}.".startswith(f"{beside}.")  # LoRA's, not the attention module itself
    for name, module in trace.modules.items():
        own = name.startswith((f"{part.module}.", *((f"{beside}.",) if wrapper else ())))
        idle = own and not trace.seen[name].calls and not any(t.startswith(f"{name}.") for t, _ in attention.tables)
        if idle and _as_wide(module, seen.size_in if side == "in" else seen.size_out, side):
            return name
    return ""


def _as_wide(module: nn.Module, width: int, side: str) -> bool:
    """Whether a module seems to have weights for as many inputs or outputs."""
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
    return trace.seen[attention.output].calls > len(own)


def _around(attention: Attention) -> str:
    """The module that holds both W_O and what the heads reach past it; "" if there is none."""
    if not attention.bypass or attention.reason:
        return ""
    parts = (attention.output, attention.bypass)
    return next((name for name, _ in attention.passed if name and all(p.startswith(f"{name}.") for p in parts)), "")


def _gate(trace: Tracer, attention: Attention) -> HeadFeatures | None:
    """The first module between the attention and W_O that still has the heads apart."""
    if len(attention.heads) < 2:
        return None
    calls = sum(a.module == attention.module for a in trace.found)
    way = nodes_of(attention.source)
    for name, tensor in attention.passed:
        # A module that is called on other data too, such as a dropout, would gate that as well; one that W_O does not
        # depend on would gate nothing.
        seen = trace.seen[name]
        off = attention.around != name and (seen.output is None or seen.output.grad_fn not in way)
        if off or seen.calls > calls or not any(leaf is attention.result for leaf in leaves_of(tensor)):
            continue
        for dim in (-1, *((1,) if tensor.ndim > 3 else ())):
            columns = trace.reader.columns_of(attention, tensor, dim)
            if apart(columns):
                return HeadFeatures(name, _sorted(columns), dim)
    return None


def _keeps_zeros(trace: Tracer, attention: Attention, gate: HeadFeatures) -> bool:
    """Whether the module of a gate, a norm over all heads before W_O, maps the zeros of masked heads to zeros."""
    module, width = trace.modules[gate.module], dict(attention.passed)[gate.module].shape[-1]
    entries = sum(map(len, gate.features))
    if gate.dim != -1 or entries != trace.seen[attention.output].size_in or gate.module == attention.output:
        return False
    held = next(module.parameters(), None)
    loads = held is not None and held.is_meta and hook_of(module) is not None
    if held is not None and held.is_meta and not loads:
        return True  # nothing can be tried here, nor pruned
    try:
        with torch.no_grad():
            probe = torch.linspace(-1, 2, width).repeat(2, 1)
            probe[:, list(gate.features[0])] = 0.0
            given = probe if held is None else probe.to("cpu" if loads else held.device, held.dtype)
            out = module.forward(given)  # itself: an earlier prune left hooks that place and select
            return bool(out.shape == given.shape and ((out == 0) == (given == 0).to(out.device)).all())
    except Exception:  # it takes something else
        return False


def _head_arguments(trace: Tracer, attention: Attention) -> tuple[HeadArgument, ...]:
    """Arguments of the attention module with something for each head."""
    heads = len(attention.heads)
    hidden = {id(call.source) for call in trace.calls.values()}  # what is projected is no bias
    found = []
    for key, tensor in trace.seen[attention.module].biases.items():
        read = attention.arguments.get(key, [set[int]()])
        if all(read) and any(own != read[0] for own in read) and set().union(*read) == set(range(tensor.shape[-1])):
            found.append(HeadArgument(key, -1, False, _sorted(read)))
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
    return not any(
        t.numel() > 1 and (t.dtype in (torch.int8, torch.uint8, torch.int32) or _is_byte_float(t)) for t in held
    )


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
    """Rows with their gaps filled: features that an activation made zero for every token of the example.

    A feature that no head seems to use belongs to the heads on both sides of it, if those are the same; and where every head
    has its own block of ``size / heads`` features, to the head of that block. If this guess is wrong, the proof fails.
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
    inside = modules[attention.module].named_modules(prefix=attention.module)
    return any(n not in below and any(True for _ in module.parameters(recurse=False)) for n, module in inside)
