"""A short name for a model's exact weights, so that scores and plans are never used on another model."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLES = 256


def fingerprint(model: nn.Module) -> str:
    """Hash of every parameter's name, shape and up to 256 evenly spaced values (cast to float32)."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        digest.update(f"{name}:{tuple(parameter.shape)};".encode())
        if flat.device.type != "meta":
            # Whole-number steps: the same elements on every device.
            sample = flat[:: max(1, flat.numel() // _SAMPLES)]
            digest.update(sample.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]
