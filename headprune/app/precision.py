"""Models that are stored in half precision and computed with in full: what is kept of either.

Rounding to half and back changes nothing in a weight that came from half, so a checkpoint that was stored in half can be saved so
again; only what was fitted anew is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

HALVES = (torch.bfloat16, torch.float16)


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's weights to a half precision, but for those that transformers keeps in float32.

    Buffers stay as they are: rotary frequencies must not be rounded.
    """
    for parameter in _narrowed(model, dtype):
        parameter.data = parameter.data.to(dtype)


def widen(model: nn.Module) -> None:
    """Bring weights, and buffers that are saved, from half precision to float32."""
    saved = model.state_dict(keep_vars=True).values()
    for tensor in (*model.parameters(), *saved):
        if tensor.dtype in HALVES:
            tensor.data = tensor.data.float()


def holds(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a half precision holds a model's weights without rounding."""
    return all(bool((p.to(dtype).to(p.dtype) == p).all()) for p in _narrowed(model, dtype))


def _narrowed(model: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    pattern = re.compile("|".join(rf"(?:(?:^|\.){name}(?:\.|$))" for name in kept)) if kept else None
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not (pattern and pattern.search(name)):
            yield parameter
