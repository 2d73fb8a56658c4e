"""Where the tensors lie that a cut makes: in memory, or in files that are mapped into memory, so that none of them must stay there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

SMALL = 65536  # bytes: a tensor up to here stays in memory
_FOLDER: ContextVar[Path | None] = ContextVar("headprune_scratch", default=None)


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Cuts that are made while the context lasts keep large tensors in files of ``folder``; each goes with its tensor."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def placed(tensor: Tensor) -> Tensor:
    """The tensor, or within `on_disk` its copy in a file; nothing may be written to that."""
    folder = _FOLDER.get()
    if folder is None or tensor.nbytes <= SMALL or tensor.device.type != "cpu":
        return tensor
    plain = tensor.detach().contiguous()
    with tempfile.NamedTemporaryFile(dir=folder) as file:  # the mapping outlives the name
        file.write(plain.reshape(-1).view(torch.uint8).numpy().data)  # a full disk is an error here, not a signal later
        file.flush()
        mapped = torch.from_file(file.name, shared=False, size=plain.numel(), dtype=plain.dtype)
    return mapped.view(plain.shape)
