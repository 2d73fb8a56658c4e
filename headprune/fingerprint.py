"""A short name for a model's exact weights, so that scores and plans are never used on another model."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Hash of every parameter and persistent buffer: name, shape, type and all of its bytes.

    A sample would be quicker, but blind: an even stride over a weight matrix can miss every column but one.
    """
    digest = hashlib.sha256()
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        where = tensor.data_ptr()
        if tensor.device.type == "meta" or not tensor.numel() or where in seen:
            continue  # no bytes, or those of a weight that is tied to this one
        seen.add(where)
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
