"""Run a model whose weights are on the meta device, with random numbers in their place, one tensor at a time.

Tracing needs a model's structure, not its weights, so a model built under ``torch.device("meta")`` can be
traced before anything is loaded. Large tensors live only for the call that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LARGE = 1_000_000  # elements; smaller tensors are kept, so that derivatives lead to them
_SHIFTS = 4096


class Materialised(TorchFunctionMode):
    """While this mode is on, random tensors on the CPU take the place of meta tensors.

    Args:
        note: Called with a meta tensor, the one that takes its place, and whether that stays: if not, another call of the model may
            give it another, and only the memory where it lies stays what it is for now.
    """

    def __init__(self, note: Callable[[Tensor, Tensor, bool], None]) -> None:
        super().__init__()
        self.note = note
        self.kept: dict[int, Tensor] = {}  # small tensors, by the id of the meta tensor
        self.pools: dict[
            torch.dtype, list[Tensor]
        ] = {}  # all stay, so that nothing else comes to lie where weights lay
        self.pieces = 0
        self.generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self._real(func(*args))
        return func(*self._real(args), **self._real(kwargs or {}))

    def _real(self, value: Any) -> Any:
        """A value with real tensors, and the CPU, in the place of meta ones."""
        if isinstance(value, Tensor):
            return self._tensor(value) if value.is_meta else value
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "meta" else value
        if isinstance(value, Mapping):
            return {k: self._real(v) for k, v in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._real(v) for v in value)
        return value

    def _tensor(self, meta: Tensor) -> Tensor:
        """What takes the place of a meta tensor."""
        if id(meta) in self.kept:
            return self.kept[id(meta)]
        if not meta.is_floating_point():
            # Positions and indices: zero always exists. Masks: every token is visible.
            real = torch.full(meta.shape, meta.dtype in (torch.bool, torch.uint8), dtype=meta.dtype)
        elif meta.ndim < 2:
            real = torch.rand(meta.shape, generator=self.generator).to(meta.dtype) + 0.5
        elif meta.numel() > _LARGE:
            # A piece of one random vector, each tensor another piece: drawing billions of numbers would take minutes.
            self.pieces += 1
            shift = 16 * self.pieces % _SHIFTS
            piece = self._pool(meta.dtype, meta.numel() + _SHIFTS)[shift : shift + meta.numel()].view(meta.shape)
            self.note(meta, piece, False)
            return piece
        else:
            real = self._noise(meta.shape, meta.dtype)
        real.requires_grad_(meta.requires_grad and real.is_floating_point())
        self.kept[id(meta)] = real
        self.note(meta, real, True)
        return real

    def _pool(self, dtype: torch.dtype, size: int) -> Tensor:
        """A random vector of at least this size."""
        pools = self.pools.setdefault(dtype, [])
        if not pools or pools[-1].numel() < size:
            pools.append(self._noise((size,), dtype))
        return pools[-1]

    def _noise(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        return (torch.randn(tuple(shape), generator=self.generator) * scale).to(dtype)
