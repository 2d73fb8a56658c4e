"""What many tests check and do: hooks that are left, weights that changed, a flipped bit, a kill."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


class Interrupted(BaseException):
    pass


def flip(path: Path, at: int = -3) -> None:
    """One bit of a file, such as one of a number: it makes another number, and only a checksum tells."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(bytes(content))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(v, before[k]) for k, v in now.items())


def older_fingerprint(model: nn.Module) -> str:
    """As fingerprints were before xxHash."""
    parts = (f"{n}:{tuple(t.shape)}:{t.dtype};".encode() + t.numpy().tobytes() for n, t in model.state_dict().items())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
