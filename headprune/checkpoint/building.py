"""Builds models: a folder's dense architecture without weights, and a pruned model as an instance of its stock class, proved equal."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.checkpoint.probe import config_edits, difference, module_outputs, run
from headprune.checkpoint.remote_code import own_class, read_config
from headprune.checkpoint.stock_config import NotStockError, StockConfig, configs_in, stock_configs
from headprune.errors import HeadPruneError, first_line
from headprune.input_specs import build, of_config, record_specs, recorded, with_own_dtype
from headprune.inputs import model_device
from headprune.offload import Offloaded, copied, is_dispatched, is_elsewhere, put
from headprune.pruned import add_record, record_of, structure_of
from headprune.surgery.proof import COARSEST, LAYERS, tolerance_of


def check_attention(source: str | Path, config: Any) -> None:
    """Refuse a config that names an attention kernel from the Hub, since loading it runs code."""
    names = {getattr(c, "_attn_implementation", None) for c in configs_in(config)}
    if kernels := sorted(n for n in names if isinstance(n, str) and "/" in n):
        message = f"{source} asks for the attention kernel {kernels[0]} from the Hub: code that would run here."
        hint = "Look at it first; --trust-remote-code allows it for a dense model. Or take it out of the folder's JSON files."
        raise HeadPruneError(message, hint)


def skeleton(path: Path, sidecar: Mapping[str, Any], trusted: bool) -> Any:
    """The dense architecture without its weights, which are on the meta device."""
    import transformers
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    qualified, attention = str(sidecar.get("class")), sidecar.get("attention")
    own = not qualified.startswith("transformers.models.")  # whatever else a folder names is not imported
    cls, file = _class_in(path, qualified, trusted) if own else _stock_class(qualified), path / "config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=own and trusted)
    except Exception as error:
        raise HeadPruneError(f"{file} does not load: {first_line(error)}.", "Save the model again.") from error
    config._attn_implementation = attention = attention or getattr(config, "_attn_implementation", None)
    check_attention(path, config)
    try:
        with no_init_weights(), init_empty_weights():
            model = _from_config(cls, config, attention)
        model.tie_weights()
    except Exception as error:
        message = f"{qualified} cannot be built from {file}: {first_line(error)}{config_edits(path)}."
        hint = "Put config.json back as it was, or use the transformers version that saved the model."
        raise HeadPruneError(message, hint) from error
    return model


def _stock_class(qualified: str) -> Any:
    """A model class of transformers, by its module: not every one is exported at the top."""
    import transformers

    module, _, name = qualified.rpartition(".")
    with suppress(ImportError):
        cls = getattr(importlib.import_module(module), name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    version = transformers.__version__
    raise HeadPruneError(f"This transformers ({version}) has no {qualified}.", "Use the version that saved the model.")


def _class_in(path: Path, qualified: str, trusted: bool) -> Any:
    """The class that came with the dense model, from the code that its config names.

    Raises:
        HeadPruneError: The config names none, or the code may not or does not run.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = qualified.rpartition(".")[2]
    instance = "Pass a fresh dense instance: headprune.load(path, model=YourModel(...))."
    if (reference := own_class(read_config(path), name)) is None:
        raise HeadPruneError(f"{path} holds a {qualified}, which headprune cannot build.", instance)
    if not trusted:
        hint = "Read that code; if you trust it, add --trust-remote-code (in Python trust_remote_code=True)."
        message = f"{path} holds a {name}, a class that comes with the model, as code that was not run."
        raise HeadPruneError(message, f"{hint} Or: {instance}")
    try:
        return get_class_from_dynamic_module(reference, str(path))
    except Exception as error:  # code of any kind
        why = f"{type(error).__name__}: {first_line(error)}"
        hint = "Put back the files that were saved with it, or install what it imports."
        raise HeadPruneError(f"The code that comes with {path} does not run: {why}.", hint) from error


def to_stock(model: nn.Module) -> Any:
    """The pruned model as one of its stock class: what `from_pretrained` would make of its folder.

    It shares the model's weights, so it takes hardly any memory; the model stays as it is.

    Raises:
        NotStockError: The class cannot represent it, or does not give its answers.
    """
    why = None
    for candidate in stock_configs(model):
        try:
            stock = _filled(model, candidate)
            prove_same_answers(model, stock)
        except NotStockError as error:
            why = why or error
        except Exception as error:
            cls, fields = candidate.cls.__name__, candidate.fields
            why = why or NotStockError(f"{cls} with {fields} does not run: {first_line(error)}.")
        else:
            add_record(stock, record_of(model))
            record_specs(stock, recorded(model))
            return stock
    assert why is not None
    raise why


def _from_config(cls: Any, config: Any, attention: str | None) -> Any:
    """A model of a class, with an implementation of attention where its parts have that; no random number is used up."""
    with torch.random.fork_rng(devices=[]):
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
            with module_outputs(model, names) as model_outputs:
                expected = run(model, build(spec))
        except Exception:
            continue
        with module_outputs(stock, names) as stock_outputs:
            answers = run(stock, build(with_own_dtype(stock, [spec])[-1 if coarser else 0]))
        theirs, ours = (list(chain.from_iterable(outputs.values())) for outputs in (stock_outputs, model_outputs))
        off, within = difference(answers, expected), difference(theirs, ours)
        if off > tolerance or within > min(LAYERS * tolerance, COARSEST):
            by = f"by {max(off, within):.2g} of the largest"
            raise NotStockError(f"{type(stock).__name__} has the model's weights and gives other answers, {by}.")
        return off
    raise NotStockError("It is not known what the model takes, so it cannot be compared with its stock class.")


def _filled(model: Any, target: StockConfig) -> Any:
    """A model of the stock class with the pruned model's own tensors."""
    state, stored = model.state_dict(), Offloaded(model)
    other: dict[str, Tensor] = {}
    for name, (dim, kept) in target.cuts.items():
        whole = stored[name]
        other[name] = whole.index_select(dim, torch.tensor(kept, device=whole.device))
    for name, shape in target.zeros.items():
        other[name] = stored[f"{name.rpartition('.')[0]}.weight"].new_zeros(shape)
    computed = {name: state.pop(name) for name in target.computed}
    if not is_dispatched(model):
        return _with_state(model, target, {**state, **other}, computed).to(model_device(model))

    # The instance is dispatched as the model is; `state` has placeholders for what is kept elsewhere.
    from accelerate import init_empty_weights
    from accelerate.hooks import add_hook_to_module

    with init_empty_weights():
        stock = _with_state(model, target, {**state, **other}, computed)
    for name, module in copied(model).named_modules():
        if (hook := vars(module).get("_hf_hook")) is not None:  # it finds the weights by their names
            add_hook_to_module(stock.get_submodule(name), hook)
    for name, value in other.items():
        owner, _, own = name.rpartition(".")
        if is_elsewhere(stock.get_submodule(owner), own):
            put(stock.get_submodule(owner), own, value)
    return stock


def _with_state(model: Any, target: StockConfig, state: dict[str, Tensor], computed: Mapping[str, Tensor]) -> Any:
    """A model of a stock class with these tensors, which it shares; in everything else like a model.

    Args:
        computed: What some of its buffers have to be.

    Raises:
        NotStockError: It computes other buffers than the model has.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        stock = _from_config(target.cls, target.config, getattr(target.config, "_attn_implementation", None))
    own, tolerance = dict(stock.named_buffers()), tolerance_of(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    for name, buffer in {**buffers, **computed}.items():
        if name in own and difference([own[name].cpu().double()], [buffer.cpu().double()]) > tolerance:
            raise NotStockError(f"{target.cls.__name__} computes another {name}.")
    stock.load_state_dict(state, assign=True)
    stock.tie_weights()
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(trained.get(name, True) and parameter.is_floating_point())
    stock.train(model.training)
    if getattr(model, "generation_config", None) is not None:
        stock.generation_config = model.generation_config
    return stock
