"""Uneven models padded with heads of zeros, up to numbers of heads that their stock class can state.

The cut says where the weights belong: a model whose weights are the numbers of their places is cut as the pruned model was, and
what is left of it says which place in the stock class each weight of the pruned model came from. All other places are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, Heads
from headprune.forms import remember_forms, remembered
from headprune.inputs import Example
from headprune.pruned import add_biases, note_was_repaired, removed, structure_of, was_repaired
from headprune.stock.counts import Counts, alike
from headprune.stock.instance import built, prove, with_state
from headprune.stock.statement import CannotStateError, Statement, dense_class, on_meta, plain
from headprune.surgery import remove
from headprune.surgery.removal import ways
from headprune.trace import example_for, find_attention

Sizes = tuple[int, int]
"""Groups, and heads in each; single heads are groups of one."""


def padded(model: Any) -> tuple[Any, dict[str, Any]]:
    """A model of the stock class that answers as a pruned one does: in the place of heads that are gone it has heads of zeros.

    Returns:
        The model, and how many heads there are: ``"kept"``, ``"stored"`` (with those of zeros) and ``"dense"``.

    Raises:
        CannotStateError: The class cannot have the model's tensors, such as a bias that a repair added.
    """
    cls, structure = dense_class(model), structure_of(model)
    dense, example = on_meta(cls, plain(model)), example_for(model)
    layers = find_attention(built(cls, plain(model), None), example)
    add_biases(dense, structure["biases"])
    kept = _kept(model, layers)
    why: CannotStateError | None = None
    for statement in _targets(dense, layers, kept):
        try:
            state, stored = _placed(model, statement, layers, kept, example)
            stock = with_state(model, statement, state)
            prove(model, stock, padded=True)
        except CannotStateError as error:
            why = why or error
        else:
            remember_forms(stock, remembered(model))
            if was_repaired(model):
                note_was_repaired(stock)
            return stock, {
                "kept": sum(map(len, kept.values())), "stored": stored, "dense": sum(a.num_heads for a in layers),
            }  # fmt: skip
    if why is None and structure["biases"]:
        why = CannotStateError(
            f"A repair gave {structure['biases'][0]} a bias, and no flag of its config gives {cls.__name__} one."
        )
    raise why or CannotStateError(f"{cls.__name__} cannot be built as its config says.")


def _kept(model: nn.Module, layers: Sequence[AttentionLayer]) -> Heads:
    """The heads that each layer kept, numbered as the model's config counts them.

    A model may have been pruned, saved as a stock one and pruned again: then its config has only the heads of the last part of the
    way.
    """
    history, first = removed(model), next(iter(layers)).name
    for start in range(len(history) + 1):
        kept = {layer.name: list(range(layer.num_heads)) for layer in layers}
        try:
            for prune in history[start:]:
                for name, heads in prune.items():
                    for h in sorted(heads, reverse=True):
                        del kept[name][h]
        except (IndexError, KeyError):
            continue
        return kept
    raise CannotStateError(f"It is not known which heads {first} lost.")


def _targets(dense: nn.Module, layers: Sequence[AttentionLayer], kept: Heads) -> Iterator[Statement]:
    """What the class can state that has room for the kept heads, the smallest first and the dense model last."""
    counts, options = Counts(dense, layers), []
    for same in alike(layers):
        own = [layers[i] for i in same]
        sizes = [s for s in _sizes(own, kept) if _fits(counts, own, s)]
        options.append((own, sizes))
    for step in range(max(len(sizes) for _, sizes in options) + 1):
        chosen = [(own, sizes[min(step, len(sizes) - 1)] if sizes else None) for own, sizes in options]
        drop: Heads = {}
        if step < max(len(sizes) for _, sizes in options):
            for own, size in chosen:
                drop |= _beyond(own, size) if size else {}
        if statement := counts.statement(drop):
            yield statement


def _fits(counts: Counts, layers: Sequence[AttentionLayer], size: Sizes) -> bool:
    return bool(counts.statement(_beyond(layers, size)))


def _sizes(layers: Sequence[AttentionLayer], kept: Heads) -> list[Sizes]:
    """Numbers of groups and of heads in each that hold what every layer kept, the smallest first; not the dense ones."""
    units = layers[0].units
    parts = [[sum(h in set(kept[a.name]) for h in unit) for unit in a.units] for a in layers]
    groups = max(sum(map(bool, counts)) for counts in parts) or 1
    each = max(max(counts, default=0) for counts in parts) or 1
    if each == len(units[0]):
        return [(n, each) for n in range(groups, len(units))]
    return [(len(units), n) for n in range(each, len(units[0]))]


def _beyond(layers: Sequence[AttentionLayer], size: Sizes) -> Heads:
    """The heads that are not among so many groups of so many heads."""
    groups, each = size
    return {
        a.name: sorted(h for g, unit in enumerate(a.units) for n, h in enumerate(unit) if g >= groups or n >= each)
        for a in layers
    }


def _placed(
    model: nn.Module, statement: Statement, layers: Sequence[AttentionLayer], kept: Heads, example: Example
) -> tuple[dict[str, Tensor], int]:
    """The tensors of the stock class, and how many heads it has in all."""
    target = on_meta(statement.cls, statement.config)
    theirs = find_attention(built(statement.cls, statement.config, None), example)
    drop = {}
    for old, new in zip(layers, theirs, strict=True):
        places = set(_places(old, new, kept[old.name]))
        drop[new.name] = [h for h in range(new.num_heads) if h not in places]
    given, sizes = model.state_dict(), statement.shapes
    moved = [name for name, size in sizes.items() if name not in given or given[name].shape != size]
    starts = dict(zip(moved, accumulate((sizes[n].numel() for n in moved), initial=1), strict=False))
    for name in moved:
        owner, _, own = name.rpartition(".")
        module = target.get_submodule(owner)
        numbers = torch.arange(sizes[name].numel()).reshape(sizes[name]) + starts[name]
        if own in module._parameters:
            module._parameters[own] = nn.Parameter(numbers, requires_grad=False)
        else:
            module._buffers[own] = numbers
    touched = [layer for layer in theirs if drop[layer.name]]
    remove(target, ways(touched, {layer.name: drop[layer.name] for layer in touched})[0])
    origin = target.state_dict()
    like = next(t for t in given.values() if t.is_floating_point())
    state = {name: like.new_zeros(sizes[name]) for name in moved}
    for name, value in given.items():
        if name in sizes and name not in starts:
            state[name] = value
        elif value.numel():
            _scatter(name, value, origin.get(name), starts, state)
    return state, sum(layer.num_heads for layer in theirs)


def _places(old: AttentionLayer, new: AttentionLayer, kept: Sequence[int]) -> list[int]:
    """Where the kept heads of a layer go: where they were if that has all heads, else one after the other."""
    if old.num_heads == new.num_heads:
        return list(kept)
    rows = [[h for h in unit if h in kept] for unit in old.units]
    if not new.groups:
        return list(range(len(kept)))
    return [new.groups[g][n] for g, row in enumerate(row for row in rows if row) for n in range(len(row))]


def _scatter(name: str, value: Tensor, origin: Tensor | None, starts: dict[str, int], state: dict[str, Tensor]) -> None:
    """Write a tensor of the pruned model to where it came from."""
    if origin is None or origin.is_meta or origin.shape != value.shape:
        raise CannotStateError(f"{name} has no place in the stock class")
    where, values = origin.reshape(-1), value.reshape(-1)
    for owner, start in starts.items():
        here = (where >= start) & (where < start + state[owner].numel())
        if bool(here.any()):
            state[owner].view(-1)[where[here] - start] = values[here].to(state[owner].dtype)
