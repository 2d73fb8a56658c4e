"""A folder's probe: a made-up input, the model's answers to it, and its buffers, to prove that a loaded model is the saved one.

A model's answers depend on more than its weights: on its config, its class, its non-persistent buffers and the library's
version. So `save` stores the answers, and `load` compares them. It also stores a few numbers of every module's output, so
that an error can name the module where the difference begins.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.checkpoint.remote_code import NotStockError, read_config
from headprune.errors import HeadPruneError, first_line
from headprune.files import digest
from headprune.fingerprint import tensor_bytes
from headprune.input_specs import build, of_config, pack, record_specs, recorded, unpack, with_own_dtype
from headprune.inputs import call, model_device, move, seeded, tensors
from headprune.pruned import structure_of
from headprune.running import attributes_kept, evaluating, full_precision, uncompiled
from headprune.surgery import answers
from headprune.surgery.evidence import gap, largest
from headprune.surgery.proof import COARSEST, LAYERS, tolerance_of

FILE = "headprune.safetensors"
ANSWER, OUTPUT = 4096, 16  # how many numbers of each answer, and of each module's output, are stored
OTHER_DEVICE = 10  # factor on the tolerance for another kind of device, which sums in another order
# Entries of config.json that do not change a model's answers.
_HARMLESS = re.compile(r"label|name_or_path|architectures|version|token_id|problem_type|output_|use_cache|task|dtype")


def write_probe(model: nn.Module, folder: Path) -> None:
    """Write a model's buffers, and its answers to a made-up input, into a folder that holds its config.

    The input has the form of an input that the model was pruned with or, failing that, the form that its config implies.
    """
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    about: dict[str, Any] = {"versions": _versions(), "device": model_device(model).type, "config": read_config(folder)}
    about["buffers"] = _store_buffers(model, stored)
    about["form"], about["why"] = None, "the model was never pruned, nor does its config say what it takes"
    for spec in with_own_dtype(model, [*recorded(model), *of_config(model)]):
        try:
            first = run(model, build(spec))
            with module_outputs(model, [name for name, _ in model.named_modules()], OUTPUT) as outputs:
                again = run(model, build(spec), seed=1)
        except Exception as error:
            about["why"] = f"it did not run on a made-up input ({type(error).__name__}: {first_line(error)})"
            continue
        # Some models draw noise even in evaluation mode: such answers cannot be compared.
        steady = [difference([b], [a]) <= tolerance_of(model) for a, b in zip(first, again, strict=True)]
        about["form"], about["why"] = pack(spec, stored), ""
        about["answers"] = [list(a.shape) if sure else None for a, sure in zip(first, steady, strict=True)]
        about["scales"] = [largest(a) for a in first]
        about["outputs"] = {name: type(model.get_submodule(name)).__name__ for name in outputs}
        stored |= {f"answer.{i}": _sample(a, ANSWER) for i, a in enumerate(first) if steady[i]}
        stored["outputs"] = torch.stack([_row(values) for values in outputs.values()])
        break
    save_file({k: v.contiguous() for k, v in stored.items()}, str(folder / FILE), metadata={"probe": json.dumps(about)})


def restore_buffers(model: nn.Module, folder: Path) -> None:
    """Restore a model's non-persistent buffers, such as rotary frequencies."""
    with _readable(folder):
        about, stored = _read(folder)
        shared, modules = dict[int, Tensor](), dict(model.named_modules(remove_duplicate=False))
        for name, (key, number) in about.get("buffers", {}).items():
            owner, _, own = name.rpartition(".")
            held = modules[owner]._buffers if owner in modules else {}  # `check_answers` shows whether it matters
            if own in held:
                held[own] = shared.setdefault(number, stored[key].clone())


def check_answers(model: nn.Module, folder: Path) -> None:
    """Compare a loaded model's answers with the saved ones.

    Warns if the folder holds no answers, or if the config was edited without changing the answers.

    Raises:
        HeadPruneError: The answers differ by more than rounding; the error says by how much, from which module on, and what was edited.
    """
    with _readable(folder):
        about, stored = _read(folder)
        if not about:
            return _warn(f"{folder} was saved without a probe, so its answers are not checked: save it again")
        edits = _edits(about["config"], read_config(folder))
        notable = [edit for edit in edits if not _HARMLESS.search(edit.split(" ", 1)[0])]
        if about["form"] is None:
            hint = notable[0] if notable else "pass example= to headprune.save"
            return _warn(f"{folder} holds no answers to compare with: {about['why']}; {hint}")
        spec = unpack(about["form"], stored)
        record_specs(model, [spec])
        try:
            actual, problem = run(model, build(spec)), ""
        except Exception as error:
            if "not implemented for" in str(error):
                return _warn(f"{folder}: whether the model answers as it did is not checked ({first_line(error)})")
            problem = f"does not run as the saved one did: {type(error).__name__}: {first_line(error)}"
        else:
            problem = _problem(model, spec, actual, about, stored)
        if problem:
            why = "; ".join((notable or edits)[:3]) or f"saved with {about['versions']}, loaded with {_versions()}"
            versions = "Load it with the same library versions, or pass model= built as the saved one was."
            hint = "Put it back as it was, or save the model again." if edits else versions
            raise HeadPruneError(f"The model from {folder} {problem} ({why}).", hint)
        if notable:
            _warn(f"{folder}: not as it was saved, though the model answers as it did: {'; '.join(notable[:3])}")
    return None


def _problem(
    model: nn.Module, spec: Any, actual: Sequence[Tensor], about: Mapping[str, Any], stored: Mapping[str, Tensor]
) -> str:
    """By how much a model's answers differ from the saved ones, and from which module on; "" if they agree."""
    tolerance = tolerance_of(model) * (OTHER_DEVICE if model_device(model).type != about["device"] else 1)
    kept = [i for i, shape in enumerate(about["answers"]) if shape is not None]
    off = math.inf
    if len(actual) == len(about["answers"]) and all(list(actual[i].shape) == about["answers"][i] for i in kept):
        mine, scales = [_sample(actual[i], ANSWER) for i in kept], [about["scales"][i] for i in kept]
        off = difference(mine, [stored[f"answer.{i}"] for i in kept], scales)
    if off <= min(tolerance, COARSEST):
        return ""
    saved, own = about.get("outputs", {}), dict(model.named_modules())  # folders of older versions have no outputs
    with module_outputs(model, [name for name in saved if name in own], OUTPUT) as outputs:
        run(model, build(spec), seed=1)
    first = ""
    for (name, was), row in zip(saved.items(), stored.get("outputs", ()), strict=False):
        if difference([_row(outputs.get(name, []))], [row]) > LAYERS * tolerance:
            kind = type(own[name]).__name__ if name in own else "which is not there"
            first = f", first at {name or 'its own output'} ({kind}{f', saved {was}' if was != kind else ''})"
            break
    return f"does not answer as the saved one did: by {off:.2g} of the largest value{first}"


@torch.no_grad()
def run(model: nn.Module, example: Any, seed: int = 0) -> list[Tensor]:
    """A model's answers in evaluation mode and full float32 precision, moved to the CPU; the model does not change."""
    with full_precision(), seeded(model, seed), uncompiled(), attributes_kept(model), evaluating(model):
        return [t.cpu() for t in answers(call(model, move(example, model_device(model))))]


@contextmanager
def module_outputs(
    model: nn.Module, names: Iterable[str], numbers: int | None = None
) -> Iterator[dict[str, list[Tensor]]]:
    """Record the inputs and outputs of modules while the context lasts, by name, in the order in which they return.

    Args:
        numbers: The most numbers to keep of each tensor; by default all.
    """
    outputs: dict[str, list[Tensor]] = {}

    def keep(_: nn.Module, given: Any, output: Any, name: str) -> None:
        floats = [t.detach() for t in tensors((given, output)) if t.is_floating_point() and not t.is_nested]
        if floats:
            outputs.setdefault(name, []).extend(_sample(t, numbers).cpu() for t in floats)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(model.get_submodule(name).register_forward_hook(partial(keep, name=name)))
        yield outputs


def difference(actual: Sequence[Tensor], expected: Sequence[Tensor], scales: Sequence[float] = ()) -> float:
    """The largest difference between tensors, relative to each expected tensor's largest value; infinite if counts or shapes differ.

    Args:
        scales: The expected tensors' largest values, if known.
    """
    if [t.shape for t in actual] != [t.shape for t in expected]:
        return math.inf
    # Integers must be equal.
    scales = scales or [largest(t) if t.is_floating_point() else 0.0 for t in expected]
    pairs = zip(actual, expected, scales, strict=True)
    return max((gap(a.double(), b.double()) / max(scale, 1e-30) for a, b, scale in pairs), default=0.0)


def prove_same_answers(model: nn.Module, stock: nn.Module) -> float:
    """Compare two models' answers to a made-up input, and the inputs and outputs of every pruned module.

    Returns:
        The largest difference of their answers, relative to that answer's largest value.

    Raises:
        NotStockError: They differ, or no input is known to compare them on.
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


def config_edits(folder: Path) -> str:
    """The edits of a folder's config.json since it was saved, to append to an error's text; "" if unknown."""
    edits: list[str] = []
    with suppress(Exception):
        edits = _edits(_read(folder)[0]["config"], read_config(folder))
    return f" ({'; '.join(edits[:3])})" if edits else ""


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn any error in the block into a HeadPruneError that says that the probe file is damaged."""
    try:
        yield
    except HeadPruneError:
        raise
    except Exception as error:  # the file may contain anything
        message = f"{folder / FILE} is damaged: {type(error).__name__}: {first_line(error)}."
        raise HeadPruneError(message, "Save the model again.") from error


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the probe that `write_probe` wrote: (description, tensors); both empty for a folder of version 0.1."""
    from safetensors import safe_open

    if not (folder / FILE).is_file():
        return {}, {}
    with safe_open(str(folder / FILE), framework="pt") as file:
        return json.loads(file.metadata()["probe"]), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118


def _store_buffers(model: nn.Module, stored: dict[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Add the non-persistent buffers to ``stored``; returns name -> (key in ``stored``, number that identifies the tensor object)."""
    persistent, numbers, places = set(model.state_dict()), dict[int, int](), dict[str, tuple[str, int]]()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent or buffer.is_meta or buffer.layout != torch.strided:
            continue
        # Layers often have equal masks: one copy is enough in the file.
        key = f"buffer.{digest([f'{tuple(buffer.shape)}:{buffer.dtype};', tensor_bytes(buffer)])}"
        stored.setdefault(key, buffer.detach().cpu().contiguous().clone())
        places[name] = (key, numbers.setdefault(id(buffer), len(numbers)))
    return places


def _edits(saved: Any, now: Any, where: str = "") -> list[str]:
    """The entries of config.json that differ from the saved ones, in words."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        keys = dict.fromkeys((*saved, *now))
        return [edit for key in keys for edit in _edits(saved.get(key), now.get(key), f"{where}.{key}".lstrip("."))]
    return [] if saved == now else [f"{where} in config.json is {now!r:.60}, saved {saved!r:.60}"]


def _sample(t: Tensor, most: int | None) -> Tensor:
    """At most ``most`` numbers from all over a tensor, at irregular steps, so that they do not miss whole rows or columns."""
    flat = t.reshape(-1)
    if most is not None and len(flat) > most:
        flat = flat[(torch.arange(most) * 2654435761 % 2**32) * len(flat) >> 32]
    return flat.clone()


def _row(outputs: Sequence[Tensor]) -> Tensor:
    """Numbers from a module's last recorded tensor, ``[OUTPUT]``, padded with NaN."""
    last = outputs[-1].float() if outputs else torch.zeros(0)
    return nn.functional.pad(last, (0, OUTPUT - len(last)), value=math.nan)


def _versions() -> str:
    """The versions of torch and transformers, on which a model's answers depend."""
    transformers = sys.modules.get("transformers")
    return f"torch {torch.__version__}" + (f", transformers {transformers.__version__}" if transformers else "")


def _warn(text: str) -> None:
    warnings.warn(f"headprune: {text}.", stacklevel=6)
