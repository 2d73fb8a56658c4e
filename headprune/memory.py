"""Free memory, out-of-memory errors, and work in smaller parts after one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from accelerate.utils.memory import clear_device_cache

from headprune.errors import HeadPruneError

_OUT_OF_MEMORY = (
    "can't allocate memory", "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)  # fmt: skip


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        # Memory that PyTorch has reserved but does not use is free too, although the driver counts it as used.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    return int(psutil.virtual_memory().available)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error of any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Texts of the driver and CUDA's libraries, when they allocate themselves, and of the CPU's allocator.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def halving(items: Sequence[Any], size: int) -> Iterator[Any]:
    """Yield parts of ``items``, each a context manager; if memory runs out inside it, the part is retried in halves.

    >>> [list(part.items) for part in halving(range(5), 2)]
    [[0, 1], [2, 3], [4]]
    """
    start = 0
    while start < len(items):
        part = _Attempt(items[start : start + size])
        yield part
        if part.failed:
            size = max(1, len(part.items) // 2)
            continue
        start += len(part.items)


class _Attempt:
    def __init__(self, items: Sequence[Any]) -> None:
        self.items, self.failed = items, False

    def __enter__(self) -> Sequence[Any]:
        return self.items

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        if len(self.items) == 1:
            raise HeadPruneError(
                "Memory ran out even with the smallest stack.",
                "Use a smaller --batch-size or shorter examples; in Python also model.gradient_checkpointing_enable().",
            ) from error
        self.failed = True
        del error, trace
        clear_device_cache(garbage_collection=True)
        return True
