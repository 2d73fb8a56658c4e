"""Long scoring runs that go on where they stopped."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune import __version__
from headprune.errors import HeadPruneError
from headprune.inputs import tensors
from headprune.scoring.base import Problem, Store


class DiskStore(Store):
    """Every finished part is a file of its own, which appears complete or not at all.

    Args:
        folder: Where; made when the first part is finished.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = 0  # parts that an earlier run had finished

    def get(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        path = self.folder / f"{key}.npy"
        try:
            known = torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError):  # not there, or damaged: it is computed
            known = None
        if known is not None:
            self.found += 1
            return known
        value = compute()
        self._write(path, value)
        return value

    def _write(self, path: Path, value: Tensor) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        content = io.BytesIO()
        np.save(content, value.cpu().numpy(), allow_pickle=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise HeadPruneError(
                f"{path} could not be written: {error.strerror}.",
                "What was finished before is kept: run the same command again once there is room.",
            ) from error

    def clear(self) -> None:
        """Remove what was kept."""
        shutil.rmtree(self.folder, ignore_errors=True)


def work_key(problem: Problem, method: str, model: str, loss: Any = None) -> str:
    """A name for one very computation: of model, data, method, seed, settings and versions; anything else gets another name.

    Args:
        model: The model's fingerprint.
        loss: The user's own loss, if there is one: its code counts.
    """
    import transformers

    digest = hashlib.sha256()
    facts = {
        "method": method,
        "model": model,
        "seed": problem.seed,
        "settings": {k: v for k, v in asdict(problem.settings).items() if k != "max_memory"},
        "layers": [layer.to_json() for layer in problem.layers],
        "versions": [__version__, torch.__version__, transformers.__version__],
        "device": next((p.device.type for p in problem.model.parameters()), "cpu"),
        "dtype": sorted({str(p.dtype) for p in problem.model.parameters()}),
        "attention": str(getattr(getattr(problem.model, "config", None), "_attn_implementation", "")),
        "loss": _code(loss),
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for batch, size in problem.batches:
        digest.update(f"{size}:{sorted(batch) if isinstance(batch, dict) else type(batch).__name__};".encode())
        for t in tensors(batch):
            digest.update(f"{tuple(t.shape)}:{t.dtype};".encode())
            digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Work:
    """A folder for the unfinished work of scoring runs.

    Attributes:
        folder: One folder in it for every computation.
        say: Told what is there already.
    """

    folder: Path
    say: Callable[[str], None] = lambda text: None

    def store(self, problem: Problem, method: str, model: str, loss: Any = None) -> DiskStore:
        """The store of one computation, with what an earlier run of the very same has finished."""
        own = self.folder / f"{method}-{work_key(problem, method, model, loss)}"
        if parts := len(list(own.glob("*.npy"))):
            self.say(f"{method}: going on with {parts} finished parts of an interrupted run (--no-resume starts anew).")
        elif any(self.folder.glob(f"{method}-*")):
            self.say(
                f"{method}: unfinished work in {self.folder} is not used: its model, data, seed, options or versions were others."
            )
        return DiskStore(own)


def _code(loss: Any) -> str:
    code = getattr(loss, "__code__", None)
    return (
        ""
        if loss is None
        else f"{getattr(loss, '__qualname__', type(loss).__qualname__)}:{code.co_code.hex() if code else ''}"
    )
