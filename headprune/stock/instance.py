"""A pruned model as a model of its stock class: it shares the weights, and is proved to answer alike."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.errors import first_line
from headprune.forms import as_stored, guesses, made, remember_forms, remembered
from headprune.inputs import model_device, move
from headprune.offload import Offloaded, copied, is_dispatched, is_elsewhere, put
from headprune.probe import answered
from headprune.pruned import (
    heads_before,
    note_heads,
    note_removed,
    note_was_repaired,
    removed,
    structure_of,
    was_repaired,
)
from headprune.stock.statement import CannotStateError, Statement, statements
from headprune.surgery.proof import COARSEST, LAYERS, tolerance_of
from headprune.surgery.watch import gap, largest


def stock_instance(model: nn.Module) -> Any:
    """The pruned model as one of its stock class: what `from_pretrained` would make of its folder.

    It shares the model's weights, so it takes hardly any memory; the model stays as it is.

    Raises:
        CannotStateError: The class cannot state it, or does not give its answers.
    """
    why = None
    for statement in statements(model):
        try:
            stock = _filled(model, statement)
            prove(model, stock)
        except CannotStateError as error:
            why = why or error
        except Exception as error:
            why = why or CannotStateError(
                f"{statement.cls.__name__} with {statement.fields} does not run: {first_line(error)}."
            )
        else:
            note_removed(stock, removed(model))
            note_heads(stock, heads_before(model))
            if was_repaired(model):
                note_was_repaired(stock)
            remember_forms(stock, remembered(model))
            return stock
    assert why is not None
    raise why


def built(cls: Any, config: Any, attention: str | None) -> Any:
    """A model of a class, with an implementation of attention where its parts have that."""
    try:
        return cls._from_config(copy.deepcopy(config), attn_implementation=attention)
    except ValueError:  # a part has another, such as a convolutional backbone: each takes its own
        config._attn_implementation = None
        return cls._from_config(config)


def _filled(model: Any, statement: Statement) -> Any:
    """A model of the stock class with the pruned model's own tensors."""
    state, stored = model.state_dict(), Offloaded(model)
    other: dict[str, Tensor] = {}
    for name, (dim, kept) in statement.cuts.items():
        whole = stored[name]
        other[name] = whole.index_select(dim, torch.tensor(kept, device=whole.device))
    for name in statement.zeros:
        weight = stored[f"{name.rpartition('.')[0]}.weight"]
        other[name] = weight.new_zeros(statement.shapes[name])
    computed = {name: state.pop(name) for name in statement.computed}
    if not is_dispatched(model):
        return with_state(model, statement, {**state, **other}, computed)
    return _dispatched(model, statement, state, other, computed)


def _dispatched(
    model: Any,
    statement: Statement,
    state: dict[str, Tensor],
    other: Mapping[str, Tensor],
    computed: Mapping[str, Tensor],
) -> Any:
    """As `with_state`, of a model that Accelerate has dispatched: the instance is dispatched in the same way.

    Args:
        other: Tensors that are not the model's own; of those that are kept elsewhere ``state`` has placeholders.
    """
    from accelerate import init_empty_weights
    from accelerate.hooks import add_hook_to_module

    with init_empty_weights():
        stock = with_state(model, statement, {**state, **other}, computed)
    for name, module in copied(model).named_modules():
        if (hook := vars(module).get("_hf_hook")) is not None:  # it finds the weights by their names
            add_hook_to_module(stock.get_submodule(name), hook)
    for name, value in other.items():
        owner, _, own = name.rpartition(".")
        if is_elsewhere(stock.get_submodule(owner), own):
            put(stock.get_submodule(owner), own, value)
    return stock


def with_state(
    model: Any, statement: Statement, state: dict[str, Tensor], computed: Mapping[str, Tensor] | None = None
) -> Any:
    """A model of a stock class with these tensors, which it shares; in everything else like a model.

    Args:
        computed: What some of its buffers have to be.

    Raises:
        CannotStateError: It computes other buffers than the model has.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        stock = built(statement.cls, statement.config, getattr(statement.config, "_attn_implementation", None))
    own, tolerance = dict(stock.named_buffers()), tolerance_of(model)
    for name, buffer in {**dict(model.named_buffers()), **(computed or {})}.items():
        if name in own and (name not in state or name in (computed or {})) and not _close(own[name], buffer, tolerance):
            raise CannotStateError(f"{statement.cls.__name__} computes another {name}.")
    stock.load_state_dict(state, assign=True)
    stock.tie_weights()
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(trained.get(name, True) and parameter.is_floating_point())
    if not is_dispatched(model):
        stock.to(model_device(model))
    stock.train(model.training)
    if getattr(model, "generation_config", None) is not None:
        stock.generation_config = model.generation_config
    return stock


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    return torch.allclose(a.cpu().double(), b.cpu().double(), rtol=tolerance, atol=tolerance * largest(b))


def prove(model: nn.Module, stock: nn.Module) -> float:
    """Compare two models' answers to a made-up input, and what goes into and comes out of every layer that was cut.

    Returns:
        The largest difference of their answers, as a share of that answer's largest value.

    Raises:
        CannotStateError: They differ, or no input is known on which they could be compared.
    """
    names = [n for n, e in structure_of(model).get("modules", {}).items() if "tensors" in e]
    tolerance = max(map(tolerance_of, (model, stock)))
    coarser = tolerance_of(stock) > tolerance_of(model)  # in half precision it takes pixels as such
    for form in as_stored(model, [*remembered(model), *guesses(model)]):
        example = move(made(form), model_device(model))
        try:
            with _watching(model, names) as seen:
                expected = answered(model, example, 0)
        except Exception:
            continue
        with _watching(stock, names) as mine:
            got = answered(stock, move(made(as_stored(stock, [form])[-1 if coarser else 0]), model_device(stock)), 0)
        off, within = _off(got, expected), _off(mine, seen)
        if off > tolerance or within > min(LAYERS * tolerance, COARSEST):
            raise CannotStateError(
                f"{type(stock).__name__} has the model's weights and gives other answers, by {max(off, within):.2g} of the largest."
            )
        return off
    raise CannotStateError("It is not known what the model takes, so it cannot be compared with its stock class.")


@contextmanager
def _watching(model: nn.Module, names: list[str]) -> Iterator[list[Tensor]]:
    """What goes into and comes out of modules, as they run, while the context lasts."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen.extend(t.detach().cpu() for t in (*args, output) if isinstance(t, Tensor) and t.is_floating_point())

    handles = [model.get_submodule(name).register_forward_hook(look) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _off(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, as a share of a tensor's largest value; infinite for other numbers or shapes of tensors."""
    if [t.shape for t in got] != [t.shape for t in expected]:
        return float("inf")
    return max(
        (gap(a.double(), b.double()) / max(largest(b), 1e-30) for a, b in zip(got, expected, strict=True)), default=0.0
    )
