"""A pruned model as a model of its stock class: it shares the weights, and is proved to answer alike."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headprune.checkpoint.probe import difference, module_outputs, run
from headprune.checkpoint.stock_config import NotStockError, StockConfig, stock_configs
from headprune.errors import first_line
from headprune.input_specs import build, of_config, record_specs, recorded, with_own_dtype
from headprune.inputs import model_device
from headprune.offload import Offloaded, copied, is_dispatched, is_elsewhere, put
from headprune.pruned import (
    heads_before,
    note_heads,
    note_removed,
    note_was_repaired,
    removed,
    structure_of,
    was_repaired,
)
from headprune.surgery.proof import COARSEST, LAYERS, tolerance_of
from headprune.surgery.watch import largest


def to_stock(model: nn.Module) -> Any:
    """The pruned model as one of its stock class: what `from_pretrained` would make of its folder.

    It shares the model's weights, so it takes hardly any memory; the model stays as it is.

    Raises:
        NotStockError: The class cannot represent it, or does not give its answers.
    """
    why = None
    for found in stock_configs(model):
        try:
            stock = _filled(model, found)
            prove_same_answers(model, stock)
        except NotStockError as error:
            why = why or error
        except Exception as error:
            why = why or NotStockError(f"{found.cls.__name__} with {found.fields} does not run: {first_line(error)}.")
        else:
            copy_records(model, stock)
            return stock
    assert why is not None
    raise why


def copy_records(model: nn.Module, other: nn.Module) -> None:
    """Let another model of the same weights know what was done to a model, and what it takes."""
    note_removed(other, removed(model))
    note_heads(other, heads_before(model))
    if was_repaired(model):
        note_was_repaired(other)
    record_specs(other, recorded(model))


def from_config(cls: Any, config: Any, attention: str | None) -> Any:
    """A model of a class, with an implementation of attention where its parts have that."""
    try:
        return cls._from_config(copy.deepcopy(config), attn_implementation=attention)
    except ValueError:  # a part has another, such as a convolutional backbone: each takes its own
        config._attn_implementation = None
        return cls._from_config(config)


def prove_same_answers(model: nn.Module, stock: nn.Module) -> float:
    """Compare two models' answers to a made-up input, and what goes into and comes out of every layer that was cut.

    Returns:
        The largest difference of their answers, as a share of that answer's largest value.

    Raises:
        NotStockError: They differ, or no input is known on which they could be compared.
    """
    names = [n for n, e in structure_of(model).get("modules", {}).items() if "tensors" in e]
    tolerance = max(map(tolerance_of, (model, stock)))
    coarser = tolerance_of(stock) > tolerance_of(model)  # in half precision it takes pixels as such
    for spec in with_own_dtype(model, [*recorded(model), *of_config(model)]):
        try:
            with module_outputs(model, names) as inner:
                expected = run(model, build(spec))
        except Exception:
            continue
        with module_outputs(stock, names) as inner_of_stock:
            answers = run(stock, build(with_own_dtype(stock, [spec])[-1 if coarser else 0]))
        found, wanted = ([t for values in seen.values() for t in values] for seen in (inner_of_stock, inner))
        off, within = difference(answers, expected), difference(found, wanted)
        if off > tolerance or within > min(LAYERS * tolerance, COARSEST):
            raise NotStockError(
                f"{type(stock).__name__} has the model's weights and gives other answers, by {max(off, within):.2g} of the largest."
            )
        return off
    raise NotStockError("It is not known what the model takes, so it cannot be compared with its stock class.")


def _filled(model: Any, found: StockConfig) -> Any:
    """A model of the stock class with the pruned model's own tensors."""
    state, stored = model.state_dict(), Offloaded(model)
    other: dict[str, Tensor] = {}
    for name, (dim, kept) in found.cuts.items():
        whole = stored[name]
        other[name] = whole.index_select(dim, torch.tensor(kept, device=whole.device))
    for name in found.zeros:
        weight = stored[f"{name.rpartition('.')[0]}.weight"]
        other[name] = weight.new_zeros(found.shapes[name])
    computed = {name: state.pop(name) for name in found.computed}
    if not is_dispatched(model):
        return _with_state(model, found, {**state, **other}, computed).to(model_device(model))

    # The instance is dispatched as the model is; `state` has placeholders for what is kept elsewhere.
    from accelerate import init_empty_weights
    from accelerate.hooks import add_hook_to_module

    with init_empty_weights():
        stock = _with_state(model, found, {**state, **other}, computed)
    for name, module in copied(model).named_modules():
        if (hook := vars(module).get("_hf_hook")) is not None:  # it finds the weights by their names
            add_hook_to_module(stock.get_submodule(name), hook)
    for name, value in other.items():
        owner, _, own = name.rpartition(".")
        if is_elsewhere(stock.get_submodule(owner), own):
            put(stock.get_submodule(owner), own, value)
    return stock


def _with_state(model: Any, found: StockConfig, state: dict[str, Tensor], computed: Mapping[str, Tensor]) -> Any:
    """A model of a stock class with these tensors, which it shares; in everything else like a model.

    Args:
        computed: What some of its buffers have to be.

    Raises:
        NotStockError: It computes other buffers than the model has.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        stock = from_config(found.cls, found.config, getattr(found.config, "_attn_implementation", None))
    own, tolerance = dict(stock.named_buffers()), tolerance_of(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    for name, buffer in {**buffers, **computed}.items():
        if name in own and not _close(own[name], buffer, tolerance):
            raise NotStockError(f"{found.cls.__name__} computes another {name}.")
    stock.load_state_dict(state, assign=True)
    stock.tie_weights()
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(trained.get(name, True) and parameter.is_floating_point())
    stock.train(model.training)
    if getattr(model, "generation_config", None) is not None:
        stock.generation_config = model.generation_config
    return stock


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = a.cpu().double(), b.cpu().double()
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest(b))
