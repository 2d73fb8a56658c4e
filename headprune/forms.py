"""Made-up inputs of the form that a model takes. They contain nothing of anyone's data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.inputs import config_fields, is_encoder_decoder
from headprune.pruned import home

_FORMS = "_headprune_forms"
ROWS, TOKENS = 2, 16  # of a probe
STORED = 65536  # numbers of ids and masks that are stored, at most

Form = dict[str, Any]
"""A tree with one key a node, its kind: ``dict``, ``list`` or ``tuple`` (of trees), ``noise`` (a shape, with ``mean``, ``std``
and ``dtype`` beside it), ``tensor`` (ids, masks) or ``value``."""


class _UnknownError(Exception):
    """A value that cannot be stored."""


def remember(model: nn.Module, example: Any) -> None:
    """Note on a model what form its inputs have: that of an example with few rows and tokens, and that of the example."""
    forms = []
    for cut in (True, False):
        try:
            forms.append(_form(_cut(example) if cut else example, "", _special(model)))
        except (_UnknownError, RuntimeError, NotImplementedError):  # nested or sparse tensors, for instance
            continue
    remember_forms(model, forms)


def remember_forms(model: nn.Module, forms: list[Form]) -> None:
    """Note on a model what forms its inputs have, if any are known."""
    if forms:
        vars(home(model)[0])[_FORMS] = forms


def remembered(model: nn.Module) -> list[Form]:
    """The forms that were noted, the smallest first."""
    found: list[Form] = vars(home(model)[0]).get(_FORMS, [])
    return found


def guesses(model: nn.Module) -> list[Form]:
    """Forms of what a transformers model takes, by its config; [] for other models."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "main_input_name"):
        return []
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    seen = getattr(config, "vision_config", config)
    vocabulary = getattr(text, "vocab_size", 0) or 0
    size = getattr(seen, "image_size", 32)
    height, width = (
        (size, size) if isinstance(size, int) else tuple(size)[-2:] if isinstance(size, tuple | list) else (32, 32)
    )
    channels = getattr(seen, "num_channels", 3)
    ids = (_drawn(torch.full((ROWS, 8), vocabulary - 1), _special(model))) if vocabulary > 6 else None
    asked: dict[str, list[dict[str, Any]]] = {
        "input_ids": [{"input_ids": ids, "attention_mask": torch.ones(ROWS, 8, dtype=torch.long)}, {"input_ids": ids}],
        "pixel_values": [{"pixel_values": torch.empty(1, channels, height, width)}],
        **{
            name: [{name: torch.empty(1, *shape)} for shape in sound_shapes(config, name, 4000)]
            for name in ("input_values", "input_features")
        },
    }
    if ids is not None and hasattr(config, "vision_config"):  # CLIP and its like ask for both
        asked["input_ids"].append({"input_ids": ids, "pixel_values": torch.empty(ROWS, channels, height, width)})
    found = []
    for example in asked.get(str(model.main_input_name), []):
        if any(v is None for v in example.values()):
            continue
        own = dict(example)
        if "pixel_values" in own and hasattr(config, "text_config") and ids is not None:
            own["input_ids"] = ids[:1]
        if is_encoder_decoder(model) and ids is not None:
            own["decoder_input_ids"] = ids[: len(next(iter(own.values()))), :4]
        found.append(_form(own, "", _special(model), plain=True))
    return found


def sound_shapes(config: Any, name: str, samples: int) -> list[tuple[int, ...]]:
    """Shapes of one sound that a model may take under the name ``input_values`` or ``input_features``, by its config."""
    bands, frames = (getattr(config, key, None) for key in ("num_mel_bins", "max_length"))
    if name == "input_values":
        if isinstance(bands, int) and isinstance(frames, int):  # AST; most others hear the samples themselves
            return [(frames, bands), (samples,)]
        return [(samples,)]
    if width := getattr(config, "feature_projection_input_dim", None):  # Wav2Vec2Bert
        return [(64, width)]
    return [(bands or 80, 2 * (getattr(config, "max_source_positions", 0) or 32)), (64, bands or 80)]


def as_stored(model: nn.Module, forms: Sequence[Form]) -> list[Form]:
    """Forms, and behind each the same in the type of the model's weights, which many ask for once they are converted."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def cast(form: Form) -> Form:
        if "noise" in form:
            return {**form, "dtype": str(own).removeprefix("torch.")}
        if "tensor" in form:
            return {"tensor": form["tensor"].to(own) if form["tensor"].is_floating_point() else form["tensor"]}
        ((kind, what),) = form.items()
        if kind == "dict":
            return {kind: {k: cast(v) for k, v in what.items()}}
        return {kind: [cast(v) for v in what]} if kind in ("list", "tuple") else form

    return [each for form in forms for each in (form, cast(form))]


def made(form: Form) -> Any:
    """An input of this form. Noise is computed from whole numbers, so it is the same on every machine."""
    ((kind, what),) = ((k, v) for k, v in form.items() if k not in ("mean", "std", "dtype"))
    if kind == "dict":
        return {k: made(v) for k, v in what.items()}
    if kind in ("list", "tuple"):
        return [made(v) for v in what] if kind == "list" else tuple(made(v) for v in what)
    if kind == "noise":
        values = _arbitrary(math.prod(what)).double() / 65521 - 0.5
        return (form["mean"] + 12**0.5 * form["std"] * values).reshape(what).to(getattr(torch, form["dtype"]))
    return what


def packed(form: Form, stored: dict[str, Tensor]) -> Form:
    """The form as JSON, its tensors moved to ``stored``."""
    return _mapped(form, lambda t: _store(t, stored))


def unpacked(form: Form, stored: dict[str, Tensor]) -> Form:
    """The form that `packed` was given."""
    return _mapped(form, lambda key: stored[key])


def _store(t: Tensor, stored: dict[str, Tensor]) -> str:
    key = f"input.{sum(k.startswith('input.') for k in stored)}"
    stored[key] = t.clone()
    return key


def _mapped(form: Form, change: Any) -> Form:
    for kind, what in form.items():
        if kind == "dict":
            return {kind: {k: _mapped(v, change) for k, v in what.items()}}
        if kind in ("list", "tuple"):
            return {kind: [_mapped(v, change) for v in what]}
        if kind == "tensor":
            return {kind: change(what)}
    return form


def _form(value: Any, name: str, special: set[int], *, plain: bool = False) -> Form:
    """The form of a value.

    Args:
        name: Its key in the example.
        special: Token ids that are not to be replaced.
        plain: Whether the value is made up already: then ids stay, and noise has mean 0 and standard deviation 1.

    Raises:
        _UnknownError: A value that cannot be stored.
    """
    if isinstance(value, Mapping):
        found = {}
        for key, each in value.items():
            try:
                found[str(key)] = _form(each, str(key), special, plain=plain)
            except _UnknownError:
                continue  # such as a cache, without which the model may run
        return {"dict": found}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_form(v, "", special, plain=plain) for v in value]}
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return {"value": value}
        raise _UnknownError
    t = value.detach().cpu()
    if t.is_floating_point() and (plain or len(set(t.flatten()[:4096].tolist())) > 8):  # not a mask
        known = t.float()[torch.isfinite(t.float())] if not plain else torch.zeros(0)
        mean, std = (known.mean().item(), known.std().item()) if len(known) > 1 else (0.0, 1.0)
        return {"noise": list(t.shape), "mean": mean, "std": std, "dtype": str(t.dtype).removeprefix("torch.")}
    if t.numel() > STORED or t.is_complex():
        raise _UnknownError
    content = t.ndim > 1 and t.dtype in (torch.long, torch.int) and not re.search("mask|type|position|bbox", name)
    return {"tensor": _drawn(t, special) if content and not plain else t.clone()}


def _cut(value: Any) -> Any:
    """An example with few rows and tokens."""
    ids = value.get("input_ids") if isinstance(value, Mapping) else None
    length = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else 0

    def few(name: str, t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.ndim:
            return t
        t = t[:ROWS] if ids is None or len(t) == len(ids) else t
        own = length > TOKENS and t.ndim > 1 and t.shape[1] == length and not t.is_floating_point()
        return t[:, :TOKENS] if own else t

    if isinstance(value, Mapping):
        return {k: few(k, v) for k, v in value.items()}
    if isinstance(value, Tensor):
        return value[:ROWS]
    return value


def _drawn(ids: Tensor, special: set[int]) -> Tensor:
    """Other ids, up to the largest one. Ids that control a model, such as padding or the place of an image, stay."""
    high = int(ids.max()) if ids.numel() else 0
    pool = [
        i for i in dict.fromkeys(5 + n * max(high - 5, 0) // 63 for n in range(64)) if i not in special and i <= high
    ]
    if not pool:
        return ids.clone()
    other = torch.tensor(pool)[_arbitrary(ids.numel()) % len(pool)].reshape(ids.shape).to(ids.dtype)
    stay = (ids < 5) | torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype))
    return torch.where(stay, ids, other)


def _special(model: nn.Module) -> set[int]:
    """Token ids that a config names."""
    return {v for k, v in config_fields(model) if re.search(r"token_(id|index)$", k) and type(v) is int and v >= 0}


def _arbitrary(count: int) -> Tensor:
    """Whole numbers below 65,521 that look random (squares modulo a prime), the same on every machine."""
    n = torch.arange(count) % 10_000_019
    return (n * (n * 7919 % 65521 + 104729)) % 65521
