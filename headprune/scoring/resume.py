"""Finished parts of long scoring runs on disk, so that an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import io
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.files import write_file
from headprune.fingerprint import fingerprint, versions
from headprune.inputs import model_device
from headprune.scoring.base import Problem, Store


class DiskStore(Store):
    """Every finished part is one file, which appears complete or not at all: an array, and a checksum of it and its key.

    Args:
        folder: For the files; created when the first part is finished.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = 0  # parts that an earlier run had finished

    def known(self, key: str) -> Tensor | None:
        try:
            content = self._path(key).read_bytes()
            if _sealed(key, content[:-_SEAL]) != content:
                return None  # damaged
            found = torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))
        except (OSError, ValueError, EOFError):  # missing, or not ours
            return None
        self.found += 1
        return found

    def keep(self, key: str, value: Tensor) -> Tensor:
        content = io.BytesIO()
        np.save(content, value.cpu().numpy(), allow_pickle=False)
        write_file(self._path(key), _sealed(key, content.getvalue()))
        return value

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.npy"

    def clear(self) -> None:
        """Remove all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)


_SEAL = hashlib.sha256().digest_size


def _sealed(key: str, content: bytes) -> bytes:
    """A part's content and its checksum, which is another for another part."""
    return content + hashlib.sha256(key.encode() + content).digest()


def work_key(problem: Problem, method: str, model: str, loss: Any = None) -> str:
    """A name for one computation. Another model, method, seed or version, other data or settings give another name.

    Args:
        model: The model's fingerprint.
        loss: The user's own loss, if there is one. Its code counts, and the values that it refers to.
    """
    digest = _Digest()
    facts = {
        "method": method,
        "model": model,
        "seed": problem.seed,
        "settings": {k: v for k, v in asdict(problem.settings).items() if k != "max_memory"},
        "layers": [layer.to_json() for layer in problem.layers],
        "distilled": problem.surrogate is not None,
        "versions": versions(),
        "device": model_device(problem.model).type,
        "dtype": sorted({str(p.dtype) for p in problem.model.parameters()}),
    }
    digest.add([facts, _state(problem.model), problem.batches, loss])
    return digest.hash.hexdigest()[:16]


def digest(*values: Any) -> str:
    """A short name for some values; of a model, its weights, its config, and its other buffers and attributes count."""
    made = _Digest()
    for value in values:
        model = isinstance(value, nn.Module)
        made.add([type(value), fingerprint(value), _state(value)] if model else value)
    return made.hash.hexdigest()[:16]


@dataclass(frozen=True)
class Work:
    """A folder for the unfinished work of scoring runs.

    Attributes:
        folder: Holds one folder for each computation.
        say: Called with a remark about unfinished work that is there already.
    """

    folder: Path
    say: Callable[[str], None] = lambda text: None

    def store(self, problem: Problem, method: str, model: str, loss: Any = None) -> DiskStore:
        """The store of one computation, with the parts that an earlier run of the same computation has finished."""
        own = self.folder / f"{method}-{work_key(problem, method, model, loss)}"
        if parts := len(list(own.glob("*.npy"))):
            done = "1 finished part" if parts == 1 else f"{parts} finished parts"
            self.say(f"{method}: continuing with {done} of an interrupted run (--no-resume starts anew).")
        elif any(path != own for path in self.folder.glob(f"{method}-*")):
            self.say(
                f"{method}: unfinished work in {self.folder} is not used, as the model, data, seed, options or versions have changed."
            )
        return DiskStore(own)


class _Digest:
    """A hash of values and their parts, in order. A value that cannot be compared with others gets a random hash."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[int, tuple[int, Any]] = {}  # numbered, and kept alive, so that no other value gets the same id

    def add(self, value: Any) -> None:
        """Hash a value: its type, and its parts."""
        self.hash.update(f"<{type(value).__qualname__}>".encode())
        if value is None or isinstance(value, bool | int | float | str | bytes | complex):
            self.hash.update(repr(value).encode())
        elif isinstance(value, torch.dtype | torch.device | torch.Size | Path | range):
            self.hash.update(str(value).encode())
        elif isinstance(value, Tensor):
            self.hash.update(f"{tuple(value.shape)}:{value.dtype}".encode())
            if value.device.type != "meta":
                flat = value.detach().cpu().contiguous().reshape(-1)
                self.hash.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            self.hash.update(f"{value.shape}:{value.dtype.str}".encode() + value.tobytes())
        elif isinstance(value, type | ModuleType | BuiltinFunctionType | MethodWrapperType):
            self.hash.update(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}".encode())
        elif id(value) in self.seen:
            self.hash.update(f"again {self.seen[id(value)][0]}".encode())
        else:
            self.seen[id(value)] = len(self.seen), value
            self._add_parts(value)
            self.hash.update(b"</>")  # [[1], 2] is not [[1, 2]]

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                self.add(key)
                self.add(part)
        elif isinstance(value, tuple | list):
            for part in value:
                self.add(part)
        elif isinstance(value, np.ndarray):  # of objects
            self.add([value.shape, value.tolist()])
        elif isinstance(value, set | frozenset):
            self.add(sorted(map(repr, value)))
        elif isinstance(value, CodeType):
            self.add([value.co_code, value.co_names, value.co_consts, value.co_varnames])
        elif isinstance(value, FunctionType):
            self.add([value.__module__, value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__])
            self.add([cell.cell_contents for cell in value.__closure__ or ()])
            self.add({n: value.__globals__[n] for n in _names(value.__code__) if n in value.__globals__})
        elif isinstance(value, MethodType):
            self.add([value.__func__, value.__self__])
        elif isinstance(value, partial):
            self.add([value.func, value.args, value.keywords])
        elif isinstance(value, nn.Module):
            self.add([type(value).forward, dict(value.state_dict()), _state(value)])
        elif hasattr(value, "__dict__") and type(value).__module__ != "builtins":
            self.add([_called(type(value)), vars(value)])
        else:
            self.add(uuid.uuid4().hex)


def _called(cls: type) -> FunctionType | None:
    """What runs when an object of a class is called: the class's own code, or what it inherits."""
    found = (vars(base).get("__call__") for base in cls.__mro__)
    return next((each for each in found if isinstance(each, FunctionType)), None)


def _names(code: CodeType) -> list[str]:
    """The globals and attributes that a function's code names, and the code of functions within it (lambdas, comprehensions)."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for part in inner for name in _names(part))]))


def _state(model: nn.Module) -> list[Any]:
    """What a model computes with besides its weights: its config, its modules' classes, buffers that are not saved, plain attributes."""
    saved = set(model.state_dict())
    config: Any = getattr(model, "config", None)
    return [
        config.to_dict() if hasattr(config, "to_dict") else None,
        {name: type(module) for name, module in model.named_modules()},
        {name: buffer for name, buffer in model.named_buffers() if name not in saved},
        {
            f"{name}.{key}": value
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key != "training" and isinstance(value, bool | int | float | str)
        },
    ]
