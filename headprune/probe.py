"""Check that a loaded model is the one that was saved, by its answers to made-up inputs.

A model's answers depend on more than its weights: on its config, on the class of the instance, on buffers that are not in the
file of weights, and on the library's version. So the answers are saved with the model, and compared when it is loaded. The
buffers are saved too, and facts about the modules, so that an error can name what differs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError, first_line
from headprune.facts import compared_config, differences, facts, telling, versions
from headprune.forms import as_stored, guesses, made, packed, remember, remember_forms, remembered, unpacked
from headprune.inputs import call, model_device, move, seeded
from headprune.running import attributes_kept, evaluating, full_precision, uncompiled
from headprune.surgery import answers
from headprune.surgery.proof import tolerance_of
from headprune.surgery.watch import gap, largest

__all__ = ["FILE", "answered", "check", "config_of", "edits", "keep", "restore_buffers"]

FILE = "headprune.safetensors"
SAMPLE = 4096  # numbers that are kept of each answer
ELSEWHERE = 10  # times the tolerance, on another kind of device, which sums in another order


def keep(model: nn.Module, folder: Path, example: Any = None) -> None:
    """Write a model's buffers, facts about its modules, and its answers to a made-up input into a folder.

    Args:
        example: The made-up input gets its form; by default the form of the input that the model was pruned with or, if there
            is none, of the input that its config names. The contents are not stored.
    """
    from safetensors.torch import save_file

    if example is not None:
        remember(model, example)
    stored: dict[str, Tensor] = {}
    about: dict[str, Any] = {"versions": versions(), "facts": facts(model), "device": model_device(model).type}
    about["buffers"] = _pack_buffers(model, stored)
    about["config"] = config_of(folder)
    about["form"], about["why"] = None, "the model was never pruned, nor does its config say what it takes"
    for form in as_stored(model, [*remembered(model), *guesses(model)]):
        try:
            first, again = (answered(model, made(form), seed) for seed in (0, 1))
        except Exception as error:
            about["why"] = f"it did not run on a made-up input ({type(error).__name__}: {first_line(error)})"
            continue
        # Some models draw noise even in evaluation mode: such answers cannot be compared.
        steady = [_same(a, b) for a, b in zip(first, again, strict=True)]
        about["form"], about["why"] = packed(form, stored), ""
        about["answers"] = [list(a.shape) if sure else None for a, sure in zip(first, steady, strict=True)]
        stored |= {f"answer.{i}": _sampled(a) for i, a in enumerate(first) if steady[i]}
        about["scales"] = [largest(a) for a in first]
        break
    save_file({k: v.contiguous() for k, v in stored.items()}, str(folder / FILE), metadata={"probe": json.dumps(about)})


def restore_buffers(model: nn.Module, folder: Path) -> None:
    """Give a model the saved buffers that are not in the file of weights, such as rotary frequencies."""
    with _readable(folder):
        _restore(model, *_read(folder))


def _restore(model: nn.Module, about: dict[str, Any] | None, stored: dict[str, Tensor]) -> None:
    if about is None:
        return
    shared: dict[int, Tensor] = {}
    for name, (key, number) in about["buffers"].items():
        owner, _, own = name.rpartition(".")
        try:
            held = model.get_submodule(owner)._buffers
        except AttributeError:
            continue  # `check` compares the answers: that shows whether it matters
        if own in held:
            held[own] = shared.setdefault(number, stored[key].clone())


def check(model: nn.Module, folder: Path) -> float | None:
    """Compare a loaded model's answers with those that were saved.

    Warns if there is nothing to compare with, or if something differs that does not change the answers.

    Returns:
        The largest difference, as a share of that answer's largest value; None where nothing could be compared.

    Raises:
        HeadPruneError: The answers differ by more than rounding; the error names what else differs.
    """
    with _readable(folder):
        return _check(model, folder, *_read(folder))


def _check(model: nn.Module, folder: Path, about: dict[str, Any] | None, stored: dict[str, Tensor]) -> float | None:
    if about is None:
        _warn(
            f"{folder} was saved without a probe, so whether the model answers as it did is not checked: save it again"
        )
        return None
    edited = compared_config(about["config"], config_of(folder))
    changed = telling(edited) or differences(about["facts"], facts(model)) or edited
    if about["form"] is None:
        missing = f"{folder} holds no answers to compare with: {about['why']}"
        _warn(f"{missing}; {changed[0] if changed else 'pass example= to headprune.save'}")
        return None
    form = unpacked(about["form"], stored)
    remember_forms(model, [form])
    named = "; ".join(changed[:3]) or f"saved with {about['versions']}, loaded with {versions()}"
    hint = (
        "Put it back as it was, or save the model again." if edited
        else "Load it with the same library versions, or pass model= built as the saved one was."
    )  # fmt: skip
    try:
        got = answered(model, made(form), 0)
    except Exception as error:
        if "not implemented for" in str(error):
            _warn(f"{folder}: whether the model answers as it did is not checked ({first_line(error)})")
            return None
        raise HeadPruneError(
            f"The model from {folder} does not run as the saved one did: {type(error).__name__}: {first_line(error)} ({named}).",
            hint,
        ) from error
    off = _difference(got, about, stored)
    coarse = ELSEWHERE if model_device(model).type != about["device"] else 1
    if off > min(coarse * tolerance_of(model), 0.2):
        raise HeadPruneError(
            f"The model from {folder} does not answer as the saved one did: by {off:.2g} of the largest value ({named}).",
            hint,
        )
    same = about["versions"] == versions()
    if quiet := telling(edited) or (differences(about["facts"], facts(model), plain=False) if same else []):
        _warn(f"{folder}: not as it was saved, though the model answers as it did: {'; '.join(quiet[:3])}")
    return off


def edits(folder: Path) -> str:
    """What was changed in a folder's config.json, to be appended to an error's text; "" if that is not known."""
    try:
        about, _ = _read(folder)
        found = compared_config(about["config"], config_of(folder)) if about else []
    except HeadPruneError:
        found = []
    return f" ({'; '.join(found[:3])})" if found else ""


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """What is done with a folder's probe, which somebody may have edited."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError) as error:
        raise HeadPruneError(
            f"{folder / FILE} is damaged: {type(error).__name__}: {first_line(error)}.", "Save the model again."
        ) from error


def _read(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """What `keep` wrote; None for a folder that an earlier version saved."""
    from safetensors import safe_open

    if not (folder / FILE).is_file():
        return None, {}
    try:
        with safe_open(str(folder / FILE), framework="pt") as file:
            return json.loads(file.metadata()["probe"]), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise HeadPruneError(f"{folder / FILE} is damaged: {first_line(error)}.", "Save the model again.") from error


def config_of(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json; empty if there is none, or if it cannot be read."""
    path = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def _pack_buffers(model: nn.Module, stored: dict[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Buffers that are not in the file of weights: name -> (key of its content in ``stored``, number of its tensor)."""
    persistent, numbers, found = set(model.state_dict()), dict[int, int](), dict[str, tuple[str, int]]()
    contents: list[tuple[str, Tensor]] = []
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent or buffer.is_meta or buffer.layout != torch.strided:
            continue
        value = buffer.detach().cpu().contiguous()
        # Layers often have equal masks: one copy is enough in the file.
        key = next(
            (k for k, t in contents if t.dtype == value.dtype and t.shape == value.shape and _same(t, value)), ""
        )
        if not key:
            key = f"buffer.{len(contents)}"
            contents.append((key, value))
            stored[key] = value.clone()
        found[name] = (key, numbers.setdefault(id(buffer), len(numbers)))
    return found


def answered(model: nn.Module, example: Any, seed: int) -> list[Tensor]:
    """A model's answers in evaluation mode, by full float32 arithmetic; the model stays as it was."""
    with (
        full_precision(),
        seeded(model, seed),
        uncompiled(),
        attributes_kept(model),
        evaluating(model),
        torch.no_grad(),
    ):
        return [t.cpu() for t in answers(call(model, move(example, model_device(model))))]


def _difference(got: list[Tensor], about: dict[str, Any], stored: dict[str, Tensor]) -> float:
    """The largest difference between answers, as a share of that answer's largest value; infinite for another shape."""
    if len(got) != len(about["answers"]):
        return float("inf")
    worst = 0.0
    for i, (mine, shape) in enumerate(zip(got, about["answers"], strict=True)):
        if shape is None:
            continue
        if list(mine.shape) != shape:
            return float("inf")
        off = gap(_sampled(mine).double(), stored[f"answer.{i}"].double())
        worst = max(worst, off / max(about["scales"][i], 1e-30))
    return worst


def _sampled(t: Tensor) -> Tensor:
    """Numbers from all over an answer, at irregular steps, so that no row or column is left out."""
    flat = t.reshape(-1)
    if len(flat) > SAMPLE:
        flat = flat[(torch.arange(SAMPLE) * 2654435761 % 2**32) * len(flat) >> 32]
    return flat.clone()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _warn(text: str) -> None:
    warnings.warn(f"headprune: {text}.", stacklevel=6)
