"""Random numbers in the place of weights on the meta device.

Tracing needs a model's structure, not its weights, so a model built under ``torch.device("meta")`` can be traced before anything is
loaded. A large parameter is a view of a short random vector, in which every entry lies many times: drawing billions of numbers would take
minutes, and more memory than there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from headprune.offload import is_elsewhere

_LARGE = 1_000_000  # elements
_STRIDES = (1, 7, 61, 509, 4099)  # of large parameters, by dimension: neither rows nor columns are alike


@contextmanager
def materialised(model: nn.Module) -> Iterator[None]:
    """Random tensors on the CPU in the place of a model's meta tensors while the context lasts.

    Not of those that a hook of accelerate loads.
    """
    generator, known = torch.Generator().manual_seed(0), dict[int, Tensor]()

    def real(t: Tensor) -> Tensor:
        if t.is_meta and id(t) not in known:
            known[id(t)] = _numbers(t, generator).requires_grad_(t.requires_grad)
        return known.get(id(t), t)

    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for own in (module._parameters, module._buffers, vars(module)):
            for name, value in list(own.items()):
                loaded = own is not vars(module) and value is not None and is_elsewhere(module, name)
                if loaded or (own is vars(module) and name.startswith("_")):
                    continue
                if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
                    before.append((own, name, value))
    try:
        for own, name, value in before:
            own[name] = tree_map_only(Tensor, real, value)
        yield
    finally:
        for own, name, value in before:
            own[name] = value


def _numbers(meta: Tensor, generator: torch.Generator) -> Tensor:
    """What takes the place of a meta tensor."""
    shape, dtype = meta.shape, meta.dtype
    if not meta.is_floating_point():
        # Positions and indices: zero always exists. Masks: every token is visible.
        return torch.full(shape, dtype in (torch.bool, torch.uint8), dtype=dtype)
    if meta.ndim < 2:
        numbers = torch.rand(shape, generator=generator).to(dtype) + 0.5
    elif meta.numel() > _LARGE and isinstance(meta, nn.Parameter) and meta.ndim <= len(_STRIDES):
        last = sum(stride * (side - 1) for stride, side in zip(_STRIDES, shape, strict=False))
        numbers = torch.randn(last + 1, generator=generator) * shape[-1] ** -0.5
        numbers = numbers.to(dtype).as_strided(shape, _STRIDES[: meta.ndim])
    else:
        numbers = (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)
    return numbers
