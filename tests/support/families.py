"""Models of `benchmarks/tiny.py`, one for each model type of transformers."""

from typing import Any

import pytest
import tiny
import torch
from torch import nn


def built(name: str, *, writes: bool = False) -> tuple[nn.Module, Any]:
    """The base model, or the one that ``writes`` text, with weights that matter."""
    if name not in tiny.model_types():
        pytest.skip(f"this transformers has no {name}")
    model, example = tiny.causal_lm(name) if writes else tiny.build(name)[::2]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.is_floating_point() and (p.ndim >= 2 or key.endswith("bias")):
                p.copy_(torch.randn(p.shape, generator=generator) / max(p.shape[-1], 1) ** 0.5)
    return model, example
