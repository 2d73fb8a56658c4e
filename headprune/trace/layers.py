"""Build the attention layers from a traced forward pass: which features belong to which head, and what can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, HeadFeatures, HeadTable, is_inside
from headprune.inputs import is_transposed
from headprune.offload import hook_of
from headprune.pruned import HeadArgument, MultiheadAttention, ghosts, is_ours
from headprune.trace.reading import alike, disjoint, filled, is_matrix, leaves_of, merge, nodes_of, overlap, sharing
from headprune.trace.record import AttentionCall
from headprune.trace.tracer import Tracer


def read_layers(trace: Tracer) -> list[AttentionLayer]:
    """One layer per attention module, or several if a module computes several attentions from different projections."""
    unique: dict[str, list[AttentionCall]] = {}
    for attention in trace.attentions:
        _settle_output(trace, attention)
        if not attention.fused and not attention.output and not attention.rows:
            continue  # a softmax without attention, such as a router's
        others = any(a.pairwise and a.module == attention.module for a in trace.attentions)
        if not attention.pairwise and (others or not disjoint(attention.columns)):
            continue  # a softmax over channels, streams or a convolution's taps
        known = unique.setdefault(attention.module, [])
        if same := next((a for a in known if a.rows == attention.rows), None):
            if (same.output, same.columns) != (attention.output, attention.columns):
                same.refuse(f"its result goes through two output projections, {same.output} and {attention.output}")
        elif twin := next((a for a in known if _reach_the_same(a, attention)), None):
            _absorb(twin, attention)
        else:
            known.append(attention)
    named = [(a, f"#{n}" if n > 1 else "") for calls in unique.values() for n, a in enumerate(calls, 1)]
    return [_layer(trace, index, attention, suffix) for index, (attention, suffix) in enumerate(named)]


def _reach_the_same(one: AttentionCall, other: AttentionCall) -> bool:
    """Whether the heads of two attentions in one module reach the same columns of W_O, as in differential attention."""
    places = [(a.output, a.output_dim, a.columns) for a in (one, other)]
    return bool(one.output) and not one.reason + other.reason and places[0] == places[1] and disjoint(one.columns)


def _absorb(attention: AttentionCall, other: AttentionCall) -> None:
    """Merge the features that another attention call shows for the same heads."""
    for mine, its in (
        (attention.rows, other.rows), (attention.query_rows, other.query_rows), (attention.value_rows, other.value_rows),
        (attention.selections, other.selections),
    ):  # fmt: skip
        # If heads are separate in one call but would share features with the other's, they are no key/value group: the other may
        # look up positions in the features of all heads (ProphetNet's second stream).
        for name, rows in its.items():
            known = mine.get(name, rows)
            both = [old | new for old, new in zip(known, rows, strict=True)]
            if overlap(known) or not overlap(both):
                mine[name] = both
    merge(attention.tables, other.tables)
    merge(attention.arguments, other.arguments)
    attention.causal, attention.leak = attention.causal and other.causal, attention.leak or other.leak


def _settle_output(trace: Tracer, attention: AttentionCall) -> None:
    """Decide which module is an attention's output projection, or why there is none whose input columns can be cut."""
    own_calls = sum(a.module == attention.module and a.output == attention.output for a in trace.attentions)
    if attention.returned and (not disjoint(attention.columns) or attention.leak or trace.reader.adds_more(attention)):
        attention.output, attention.columns = attention.module, attention.returned
        attention.concatenated, attention.output_dim, attention.reason = True, -1, ""
    elif wrapper := _wrapper(trace, attention):
        attention.wrapper, attention.columns = wrapper, []
        attention.reason = f"its output projection {wrapper} is made of several layers: merge them (LoRA) first"
    elif attention.output and not attention.reason and trace.records[attention.output].calls > own_calls:
        attention.refuse(f"its output projection {attention.output} is also called on other data")
    elif attention.leak and not attention.reason and not overlap(attention.columns):
        attention.refuse(f"its heads reach {attention.leak} past the output projection {attention.output}")


def _layer(trace: Tracer, index: int, attention: AttentionCall, suffix: str) -> AttentionLayer:
    heads = len(attention.heads)
    kind = "cross" if attention.cross else "decoder" if attention.causal else "encoder"
    reason = attention.reason or _separable(attention)
    attention.columns = filled(attention.columns, trace.records[attention.output].size_in)
    reaches = bool(attention.output) and disjoint(attention.columns)
    output = HeadFeatures(attention.output, _sorted(attention.columns)) if reaches else None
    projections, groups = _projections(trace, attention), _groups(attention)
    tables = _tables(trace, attention, {part.module for part in projections})
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
        reason = (
            f"{attention.module or 'the model'} computes several attentions, and their head counts cannot be told apart"
        )
    if gate and output is None and not _is_plain(trace.modules[gate.module]):
        reason = _unsliceable(gate.module, trace.modules[gate.module])
    if attention.module in ghosts(trace.model):
        reason, output, gate = (
            "all of its heads were pruned; one stays with zero output, which the cache or the module's code needs",
            None,
            None,
        )
    cut = [(part, "out") for part in projections]
    if output and not attention.concatenated:  # a module that returns its heads side by side has no W_O to cut
        cut.insert(0, (output, "in"))
    reason = reason or _uncuttable(trace, attention, cut, tables)
    inside = [module for name, module in trace.modules.items() if is_inside(name, attention.module)]
    if not attention.output and not all(map(_is_plain, inside)):
        reason += " (its weights are quantised: prune first, then quantise)"
    return AttentionLayer(
        name=attention.module + suffix, index=index, kind=kind, num_heads=heads, num_kv_heads=_kv_heads(attention, groups), groups=groups,
        head_dim=len(output.features[0]) if output else 0, prunable=not reason, reason=reason,
        output_projection=output, gate=gate, mixer=mixer, projections=projections, values=_values(trace, attention), tables=tables,
        selections=tuple(HeadFeatures(n, _sorted(rows)) for n, rows in attention.selections.items()),
        arguments=_head_arguments(trace, attention), inner_modules=tuple(inner), side_modules=tuple(n for n in counting if n not in inner),
        bypass=_bypass(trace, attention, kind), output_arity=trace.records[attention.module].arity or 0,
        heads_dim=attention.heads.dim,
    )  # fmt: skip


def _projections(trace: Tracer, attention: AttentionCall) -> tuple[HeadFeatures, ...]:
    """Every projection but W_O in which single heads have their own features."""
    # A projection that several layers read, such as a position bias, stays whole.
    others = {module for a in trace.attentions if a.module != attention.module for module in a.rows}
    own: dict[str, list[set[int]]] = {}
    for module, rows in attention.rows.items():
        if module not in others or is_inside(module, attention.module):
            rows = filled(rows, trace.records[module].size_out)
            # Features of all heads (MQA, latent attention) stay.
            shared = set.intersection(*rows) if len(rows) > 1 else set()
            own[module] = [features - shared for features in rows]
    return tuple(HeadFeatures(module, _sorted(rows)) for module, rows in own.items() if any(rows))


def _values(trace: Tracer, attention: AttentionCall) -> HeadFeatures | None:
    """The value projection, if there is exactly one and every head has features in it; otherwise None."""
    if len(attention.value_rows) != 1:
        return None
    ((module, rows),) = attention.value_rows.items()
    rows = filled(rows, trace.records[module].size_out)
    return HeadFeatures(module, _sorted(rows)) if all(rows) else None


def _kv_heads(attention: AttentionCall, groups: tuple[tuple[int, ...], ...]) -> int:
    """Number of key/value heads: one per group; one in all if all heads read the same values (MQA).

    Shared features alone do not show shared values: all heads also read the same features of a gate over all heads, or of a
    convolution of the values.
    """
    heads, same = len(attention.heads), attention.same_values or [0] * len(attention.heads)
    if groups:
        return len(groups) if all(len({same[h] for h in group}) == 1 for group in groups) else heads
    shared = any(rows[0] and alike(rows) for rows in attention.value_rows.values())
    return 1 if shared and not any(same) else heads


def _tables(trace: Tracer, attention: AttentionCall, cut: set[str]) -> tuple[HeadTable, ...]:
    """Parameters and buffers of the attention module that have separate entries for each head.

    Args:
        cut: Projections, which are cut with all that they hold: a bias that their class adds by itself (Falcon's) is no table.
    """
    # A layer that runs several times reads its tables each time. A table that other layers read too must stay whole.
    others = [a for a in trace.attentions if a.module != attention.module or a.output != attention.output]
    return tuple(
        HeadTable(name, dim, _sorted(filled(indices, trace.shape[name][dim])))
        for (name, dim), indices in attention.tables.items()
        if is_inside(name, attention.module)
        and not any((name, dim) in a.tables for a in others)
        and name.rpartition(".")[0] not in (*attention.selections, *cut)
    )


def _bypass(trace: Tracer, attention: AttentionCall, kind: str) -> str:
    """How to remove the layer when all of its heads are pruned (`AttentionLayer.bypass`)."""
    if is_ours(trace.modules[attention.module], MultiheadAttention):
        return "slice"
    seen = trace.records[attention.module]
    last = not is_inside(attention.output, attention.module) or seen.returned == attention.output != ""
    whole = len(set().union(*attention.columns)) == trace.records[attention.output].size_in  # W_O reads nothing else
    plain = last and whole and attention.output_dim == -1 and not attention.concatenated
    alone = seen.arity is not None and not seen.cached and not _has_other_weights(trace.modules, attention)
    return "stub" if kind == "encoder" and attention.tokens > 1 and plain and alone else "ghost"


def _sorted(rows: Sequence[set[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(own)) for own in rows)


def _counting(trace: Tracer, attention: AttentionCall) -> list[str]:
    """Modules whose integers may count the heads: the attention module and those inside it that hold no weight matrices."""
    inside = [n for n in trace.modules if is_inside(n, attention.module)]
    if not attention.module or any(a.module != attention.module and a.module in inside for a in trace.attentions):
        inside = [n for n in attention.running if n in inside]
    matrices = {n for n in inside if any(p.ndim > 1 for p in trace.modules[n].parameters(recurse=False))}
    return [n for n in inside if n == attention.module or n not in matrices]


def _uncuttable(
    trace: Tracer, attention: AttentionCall, cut: Sequence[tuple[HeadFeatures, str]], tables: Sequence[HeadTable]
) -> str:
    """Why the weights of this layer cannot be cut, or "".

    Args:
        cut: The linear layers to cut, each with the side that loses features, ``"in"`` (W_O) or ``"out"``.
    """
    matrices = any(len(trace.shape[t.name]) > 1 for t in tables)
    if not (any(side == "out" for _, side in cut) or matrices or attention.selections):
        return f"no weights of {attention.module or 'the model'} were found that belong to single heads (quantised?)"
    weights = [(part.module, getattr(trace.modules[part.module], "weight", None)) for part, _ in cut]
    for module, weight in weights:
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or not is_matrix(weight):
            return _unsliceable(module, trace.modules[module])
        if hasattr(weight, "placements"):
            return f"the weight of {module} is spread over devices (tensor parallel): prune before distributing it"
    of_model: dict[str, Any] = dict([*trace.model.named_parameters(), *trace.model.named_buffers()])
    named = [(f"{module}.weight", weight) for module, weight in weights]
    for name, tensor in (*named, *((t.name, of_model[t.name]) for t in tables)):
        if not _can_be_cut(tensor):
            plain = type(tensor) in (Tensor, nn.Parameter)
            kind = str(tensor.dtype).removeprefix("torch.") if plain else type(tensor).__name__
            return f"{name} is quantised ({kind}): prune first, then quantise"
    for part, side in cut:
        if idle := _idle(trace, attention, part, side):
            return f"{idle} does not run, but would no longer fit (an adapter that is not active: merge or delete it first)"
    return ""


def _can_be_cut(weight: Tensor) -> bool:
    """Whether rows can be selected from a weight; most quantised tensors, which hold scales beside their numbers, do not allow it."""
    with suppress(RuntimeError):
        weight.detach().index_select(0, torch.zeros(1, dtype=torch.long, device=weight.device))
        return not _is_byte_float(weight)
    return False


def _is_byte_float(weight: Tensor) -> bool:
    """Whether a weight is of an 8-bit float type, which is for storage only."""
    return weight.is_floating_point() and weight.element_size() == 1


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has only plain weights, no packed integers or 8-bit floats as in quantised layers."""
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    packed = (torch.int8, torch.uint8, torch.int32)
    return not any(t.numel() > 1 and (t.dtype in packed or _is_byte_float(t)) for t in held)


def _unsliceable(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__}) has no plain weight matrix to slice (quantised?)"


def _idle(trace: Tracer, attention: AttentionCall, part: HeadFeatures, side: str) -> str:
    """A module beside a projection that did not run and has its width, such as an inactive adapter; "" if there is none."""
    record = trace.records[part.module]
    beside, _, _ = part.module.rpartition(".")
    wrapper = beside and not is_inside(attention.module, beside)  # LoRA's, not the attention module itself
    for name, module in trace.modules.items():
        own = name.startswith((f"{part.module}.", *((f"{beside}.",) if wrapper else ())))
        idle = own and not trace.records[name].calls and not any(t.startswith(f"{name}.") for t, _ in attention.tables)
        if idle and _as_wide(module, record.size_in if side == "in" else record.size_out, side):
            return name
    return ""


def _as_wide(module: nn.Module, width: int, side: str) -> bool:
    """Whether a module seems to have ``width`` inputs or outputs, by the shapes of its weights."""
    shapes = [parameter.shape[:2] for parameter in module.parameters(recurse=False)]
    if not is_transposed(module):
        shapes = [shape if len(shape) < 2 else shape[:1] if side == "out" else shape[1:] for shape in shapes]
    return any(width in shape for shape in shapes)


def _wrapper(trace: Tracer, attention: AttentionCall) -> str:
    """The module that holds both W_O and another module that the heads reach past it, as LoRA's does; "" if there is none."""
    if not attention.leak or attention.reason:
        return ""
    parts = (attention.output, attention.leak)
    around = (name for name, _ in attention.between if name and all(p.startswith(f"{name}.") for p in parts))
    # One with an attention of its own is the next layer.
    return next((name for name in around if not any(is_inside(a.module, name) for a in trace.attentions)), "")


def _gate(trace: Tracer, attention: AttentionCall) -> HeadFeatures | None:
    """The first module between the attention and W_O whose input still keeps the heads separate."""
    if len(attention.heads) < 2:
        return None
    calls = sum(a.module == attention.module for a in trace.attentions)
    nodes = nodes_of(attention.source)
    for name, tensor in attention.between:
        # A gate at a module that is also called on other data, such as a dropout, would change that data too; one at a
        # module that W_O does not depend on would have no effect.
        record = trace.records[name]
        off = attention.wrapper != name and (record.output is None or record.output.grad_fn not in nodes)
        if off or record.calls > calls or not any(leaf is attention.result for leaf in leaves_of(tensor)):
            continue
        for dim in (-1, *((1,) if tensor.ndim > 3 else ())):
            columns = trace.reader.columns_of(attention, tensor, dim)
            if disjoint(columns):
                return HeadFeatures(name, _sorted(columns), dim)
    return None


def _keeps_zeros(trace: Tracer, attention: AttentionCall, gate: HeadFeatures) -> bool:
    """Whether the gate's module, a norm over all heads before W_O, maps the zeros of masked heads to zeros."""
    module, width = trace.modules[gate.module], dict(attention.between)[gate.module].shape[-1]
    entries = sum(map(len, gate.features))
    if gate.dim != -1 or entries != trace.records[attention.output].size_in or gate.module == attention.output:
        return False
    held = next(module.parameters(), None)
    loads = held is not None and held.is_meta and hook_of(module) is not None
    if held is not None and held.is_meta and not loads:
        return True  # a meta model can be neither tested nor pruned
    with suppress(Exception), torch.no_grad():  # the module may take another input
        probe = torch.linspace(-1, 2, width).repeat(2, 1)
        probe[:, list(gate.features[0])] = 0.0
        given = probe if held is None else probe.to("cpu" if loads else held.device, held.dtype)
        out = module.forward(given)  # without hooks: an earlier prune's would change the width
        return bool(out.shape == given.shape and ((out == 0) == (given == 0).to(out.device)).all())
    return False


def _head_arguments(trace: Tracer, attention: AttentionCall) -> tuple[HeadArgument, ...]:
    """Arguments of the attention module that hold separate entries for each head."""
    heads = len(attention.heads)
    hidden = {id(call.source) for call in trace.calls.values()}  # a projection's input is no bias
    arguments = []
    for key, tensor in trace.records[attention.module].biases.items():
        read = attention.arguments.get(key, [set[int]()])
        if all(read) and not alike(read) and set().union(*read) == set(range(tensor.shape[-1])):
            arguments.append(HeadArgument(key, -1, False, _sorted(read)))
            continue
        dim = 1 if tensor.ndim == 4 else 0
        if heads < 2 or tensor.ndim > 4 or id(tensor) in hidden:
            continue
        batch = attention.result.shape[0] // (1 if attention.heads.dim else heads)
        if tensor.shape[dim] == heads:
            arguments.append(HeadArgument(key, dim, False))
        elif dim == 0 and tensor.shape[0] == batch * heads:
            arguments.append(HeadArgument(key, dim, True))
    return tuple(arguments)


def _separable(attention: AttentionCall) -> str:
    """Why the heads of this layer cannot be told apart, or ""."""
    if not attention.output:
        return "no output projection follows the attention"
    if not attention.columns or not all(attention.columns):
        return f"a head does not reach the output projection {attention.output}"
    if overlap(attention.columns):
        return f"the heads are mixed before they reach {attention.output}"
    if len(attention.heads) > 1:
        queries = [*attention.query_rows.values(), *attention.selections.values()]
        if queries and not attention.tables and all(map(alike, queries)):
            return "its heads are computed from the same query features (something mixes them)"
        groups = _groups(attention)
        members = [h for group in groups for h in group]
        if groups and (sorted(members) != list(range(len(attention.heads))) or len({len(g) for g in groups}) > 1):
            return "its heads share features of the projections in a way that is no grouping"
    return ""


def _groups(attention: AttentionCall) -> tuple[tuple[int, ...], ...]:
    """Key/value groups: heads that share features with each other but not with all heads; () if there are none."""
    rows = [*attention.rows.values(), *attention.selections.values()]
    return sharing([own for own in rows if overlap(own)], len(attention.heads))


def _has_other_weights(modules: dict[str, nn.Module], attention: AttentionCall) -> bool:
    """Whether the attention module has parameters besides the projections, which a stub would lose."""
    below = set(attention.rows) | {attention.output}
    inside = modules[attention.module].named_modules(prefix=attention.module)
    return any(n not in below and any(True for _ in module.parameters(recurse=False)) for n, module in inside)
