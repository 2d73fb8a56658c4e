"""Models that are stored in half precision but run in float32.

A weight that came from half precision can be rounded to it again without a change, so a checkpoint that was stored in half
precision can be saved in it again; only weights that were fitted since are rounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headprune.fingerprint import HALVES
from headprune.offload import Offloaded


def half_of(config: Any) -> torch.dtype | None:
    """The half precision that a config says its weights are stored in."""
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return next((half for half in HALVES if found in (half, str(half).removeprefix("torch."))), None)


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's weights to a half precision, except those that transformers keeps in float32.

    Buffers stay as they are: rotary frequencies must not be rounded.
    """
    for _, parameter in _narrowed(model, dtype):
        parameter.data = parameter.data.to(dtype)


def widen(model: nn.Module) -> None:
    """Convert weights, and buffers that are saved, from half precision to float32."""
    saved = model.state_dict(keep_vars=True).values()
    for tensor in (*model.parameters(), *saved):
        if tensor.dtype in HALVES:
            tensor.data = tensor.data.float()


def holds(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a half precision can represent a model's weights exactly."""
    stored = Offloaded(model)
    values = (stored.get(name, parameter) for name, parameter in _narrowed(model, dtype))
    return all(bool((p.to(dtype).to(p.dtype) == p).all()) for p in values)


def stored_size(model: nn.Module, half: torch.dtype | None = None) -> int:
    """Bytes of a model's weights and saved buffers, shared ones once: as they are, or once `narrow` has rounded them to ``half``."""
    narrowed = {id(p) for _, p in _narrowed(model, half)} if half else set()
    saved = [t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]
    return sum(
        t.numel() * (half.itemsize if half and id(t) in narrowed else t.element_size())
        for t in {id(t): t for t in saved}.values()
    )


def _narrowed(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    pattern = re.compile("|".join(rf"(?:(?:^|\.){name}(?:\.|$))" for name in kept)) if kept else None
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not (pattern and pattern.search(name)):
            yield name, parameter
