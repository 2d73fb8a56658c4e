"""Made-up inputs in the form that a model takes, without the user's data.

A spec is an input (a tensor, or dicts, lists and tuples of tensors and plain values) with `Noise` in place of its
floating-point tensors, and with other token ids than the user's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headprune.inputs import config_fields, first_rows, first_tokens, is_encoder_decoder, map_leaves
from headprune.pruned import home

_SPECS = "_headprune_input_specs"  # the attribute of a model
ROWS, TOKENS = 2, 16  # of the smaller input
STORED = 65536  # the largest tensor of ids or masks to store, in elements

Spec = Any


@dataclass(frozen=True)
class Noise:
    """Pseudorandom numbers with this mean and standard deviation, the same on every machine."""

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 1.0
    dtype: str = "float32"

    def values(self) -> Tensor:
        uniform = _arbitrary(math.prod(self.shape)).double() / 65521 - 0.5
        return (self.mean + 12**0.5 * self.std * uniform).reshape(self.shape).to(getattr(torch, self.dtype))


class _NoSpecError(Exception):
    """A value that no spec describes."""


def record(model: nn.Module, example: Any) -> None:
    """Store two specs of an example on a model: of its first rows and tokens, and of the whole example."""
    specs, special = [], _special_ids(model)
    for smaller in (True, False):
        # Nested or sparse tensors, for instance, raise one of the last three.
        with suppress(_NoSpecError, RuntimeError, NotImplementedError, TypeError):
            given = first_tokens(first_rows(example, ROWS), TOKENS) if smaller else example
            specs.append(_spec_of(given, "", special))
    record_specs(model, specs)


def record_specs(model: nn.Module, specs: list[Spec]) -> None:
    """Store specs of a model's inputs on the model, if there are any."""
    if specs:
        vars(home(model)[0])[_SPECS] = specs


def recorded(model: nn.Module) -> list[Spec]:
    """The specs stored on a model, the smallest first."""
    return list(vars(home(model)[0]).get(_SPECS, ()))


def of_config(
    model: nn.Module,
    rows: int | None = None,
    tokens: int = 8,
    target_tokens: int = 4,
    samples: int = 4000,
    side: int = 32,
) -> list[Spec]:
    """Specs of a transformers model's inputs, from its config; [] for other models.

    Args:
        rows: Batch size; by default `ROWS` texts, or one image or sound.
        tokens, target_tokens: Length of a text, and of the decoder input of an encoder-decoder.
        samples: Length of a sound.
        side: An image's side in pixels, if the config names none.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "main_input_name"):
        return []
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vision, name = getattr(config, "vision_config", config), str(model.main_input_name)
    size, vocabulary = getattr(vision, "image_size", None) or side, getattr(text, "vocab_size", 0) or 0
    sides = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    pixels = (getattr(vision, "num_channels", 3), *sides)
    others, longest = rows or 1, max(tokens, target_tokens)
    rows = rows or ROWS
    every = _other_ids(torch.full((rows, longest), vocabulary - 1), _special_ids(model)) if vocabulary > 6 else None
    specs: list[dict[str, Any]] = []
    if name == "input_ids" and every is not None:
        ids, end = every[:, :tokens].clone(), getattr(config, "eos_token_id", None)
        if is_encoder_decoder(model) and isinstance(end, int) and end < vocabulary:
            ids[:, -1] = end  # classifiers such as BART's and T5's read their answer there
        specs = [{name: ids, "attention_mask": torch.ones_like(ids)}, {name: ids}]
        if hasattr(config, "vision_config"):  # CLIP and similar models take both
            specs.append({name: ids, "pixel_values": Noise((rows, *pixels))})
    elif name == "pixel_values":
        specs = [{name: Noise((others, *pixels))}]
    elif name in ("input_values", "input_features"):
        specs = [{name: Noise((others, *shape))} for shape in _sound_shapes(config, name, samples)]
    if every is not None:
        for spec in specs:
            if "pixel_values" in spec and hasattr(config, "text_config"):
                spec["input_ids"] = every[:others, :tokens]
            if is_encoder_decoder(model):
                spec["decoder_input_ids"] = every[: next(iter(spec.values())).shape[0], :target_tokens]
    if name == "input_ids" and specs and is_encoder_decoder(model):
        # Such classifiers make their decoder's input of it, and want no shorter one.
        specs.append({name: specs[0][name]})
    return specs


def _sound_shapes(config: Any, name: str, samples: int) -> list[tuple[int, ...]]:
    """Possible shapes of one sound as ``input_values`` or ``input_features``, from the config."""
    bands, frames = (getattr(config, key, None) for key in ("num_mel_bins", "max_length"))
    if name == "input_values":
        if isinstance(bands, int) and isinstance(frames, int):  # AST; most other models take raw samples
            return [(frames, bands), (samples,)]
        return [(samples,)]
    if width := getattr(config, "feature_projection_input_dim", None):  # Wav2Vec2Bert
        return [(64, width)]
    return [(bands or 80, 2 * (getattr(config, "max_source_positions", 0) or 32)), (64, bands or 80)]


def with_own_dtype(model: nn.Module, specs: Iterable[Spec]) -> list[Spec]:
    """Specs, each followed by a copy in the dtype of the model's weights, which many models need in half precision."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Noise):
            return replace(leaf, dtype=str(own).removeprefix("torch."))
        return leaf.to(own) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return [each for spec in specs for each in (spec, map_leaves(spec, cast))]


def build(spec: Spec) -> Any:
    """An input from a spec, for ``headprune.inputs.call``."""
    return map_leaves(spec, lambda leaf: leaf.values() if isinstance(leaf, Noise) else leaf)


def pack(spec: Spec, stored: dict[str, Tensor]) -> dict[str, Any]:
    """A spec as JSON, whose nodes are keyed by their kind; adds its tensors to ``stored``."""
    if isinstance(spec, Noise):
        return {"noise": list(spec.shape), "mean": spec.mean, "std": spec.std, "dtype": spec.dtype}
    if isinstance(spec, Tensor):
        key = f"input.{sum(k.startswith('input.') for k in stored)}"
        stored[key] = spec.clone()
        return {"tensor": key}
    if isinstance(spec, Mapping):
        return {"dict": {k: pack(v, stored) for k, v in spec.items()}}
    if isinstance(spec, tuple | list):
        return {type(spec).__name__: [pack(v, stored) for v in spec]}
    return {"value": spec}


def unpack(packed: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Spec:
    """The inverse of `pack`: the spec that it was given."""
    kind, content = next(iter(packed.items()))
    if kind == "noise":
        return Noise(tuple(content), packed["mean"], packed["std"], packed["dtype"])
    if kind == "tensor":
        return stored[content]
    if kind == "dict":
        return {k: unpack(v, stored) for k, v in content.items()}
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](unpack(v, stored) for v in content)
    return content


def _spec_of(value: Any, name: str, special: Iterable[int]) -> Spec:
    """The spec of a value in an example.

    Args:
        name: Its key in the example.
        special: Token ids to keep.

    Raises:
        _NoSpecError: No spec describes the value.
    """
    if isinstance(value, Mapping):
        specs = {}
        for key, each in value.items():
            with suppress(_NoSpecError):  # such as a cache, without which the model may run
                specs[str(key)] = _spec_of(each, str(key), special)
        return specs
    if isinstance(value, tuple | list):
        parts = [_spec_of(v, "", special) for v in value]
        return parts if isinstance(value, list) else tuple(parts)
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise _NoSpecError
    t = value.detach().cpu()
    if t.is_floating_point() and len(set(t.flatten()[:4096].tolist())) > 8:  # not a mask
        finite = t.float()[torch.isfinite(t.float())]
        mean, std = (finite.mean().item(), finite.std().item()) if len(finite) > 1 else (0.0, 1.0)
        return Noise(tuple(t.shape), mean, std, str(t.dtype).removeprefix("torch."))
    if t.numel() > STORED or t.is_complex():
        raise _NoSpecError
    ids = t.ndim > 1 and t.dtype in (torch.long, torch.int) and not re.search("mask|type|position|bbox", name)
    return _other_ids(t, special) if ids else t.clone()


def _other_ids(ids: Tensor, special: Iterable[int]) -> Tensor:
    """Replace token ids by others up to the largest one; keeps special ids (padding, image placeholders) and ids below 5."""
    high, special = int(ids.max()) if ids.numel() else 0, sorted(special)
    spread = dict.fromkeys(5 + n * max(high - 5, 0) // 63 for n in range(64))
    pool = [i for i in spread if i not in special and i <= high]
    if not pool:
        return ids.clone()
    other = torch.tensor(pool)[_arbitrary(ids.numel()) % len(pool)].reshape(ids.shape).to(ids.dtype)
    stay = (ids < 5) | torch.isin(ids, torch.tensor(special, dtype=ids.dtype))
    return torch.where(stay, ids, other)


def _special_ids(model: nn.Module) -> set[int]:
    """The special token ids that a model's config names."""
    return {v for k, v in config_fields(model) if re.search(r"token_(id|index)$", k) and type(v) is int and v >= 0}


def _arbitrary(count: int) -> Tensor:
    """Pseudorandom integers below 65,521 (a quadratic modulo a prime), the same on every machine."""
    n = torch.arange(count) % 10_000_019
    return (n * (n * 7919 % 65521 + 104729)) % 65521
