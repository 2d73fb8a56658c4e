"""A cache of named results: each is computed once, and found again later, even after the process was killed.

A `Store` is the cache within a run, lets an interrupted run resume, and gives several processes the same result. A scoring method, a
search and a whole run use it in the same way::

    def prune_run(config, folder, console):
        model, data, work = ..., ..., folder.store(console.say)
        known = work.keyed("score", model, data, config.scoring)                # key: all that the scores depend on
        scores = [known.get(m, partial(score, model, data.score, m, work=work)) for m in config.methods]
        store = work.keyed("prune", model, data, config, scores)                # key: all that the rest depends on
        result = store.get("search", partial(search, dense, scores, config.budgets, data.choose, store=store))
        base = store.get("dense", partial(evaluate, model, data.report))
        times = store.get("latency", partial(current().first, "latency", partial(benchmark, models)))  # by one process
        results = [store.get(f"pruned {plan.kept}", partial(carry_out, plan, store.folder / "content")) for plan in result.plans]

    store = Store()                   # the Python API: in memory
    store = Store(Path("work"))       # on disk: after a kill the same calls find the finished results

`Store.get` returns stored values exactly, so a resumed run gives bitwise the same results as an uninterrupted one. Values are what JSON
and safetensors can hold: numbers, texts, None, lists, tuples, dicts, tensors, arrays, and headprune's dataclasses and documents made
of these. Files are never unpickled. A damaged file is detected by its checksum, and its value is computed again.

`Store.keyed` gives every computation its own folder, named by a `digest` of all that it depends on, so results of another model, data,
seed, option or version are never mixed in.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from logging import Logger
from operator import itemgetter
from pathlib import Path
from pkgutil import resolve_name
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from headprune import files
from headprune.errors import HeadPruneError, first_line
from headprune.fingerprint import fingerprint, is_wrapper, tensor_bytes
from headprune.parallel import current

T = TypeVar("T")
SUFFIX = ".part"


class Store:
    """A cache of results by name.

    If several processes share the work (`headprune.parallel`), all of them make the same calls, and get the results that rank 0 stores.

    Args:
        folder: For the files, one per result, written atomically; created with the first result. None keeps results in memory.
        say: Called with a remark if the folder already holds unfinished work.

    Attributes:
        seconds: Time that interrupted runs have spent on this computation.
    """

    def __init__(self, folder: Path | None = None, say: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self._say = folder, say
        self._memory: dict[str, Any] = {}
        self._began = time.monotonic()
        heads = [_read(path)[0] for path in (folder.glob(f"*{SUFFIX}") if folder else ())]
        self.seconds = max((head["seconds"] for head in heads if head), default=0.0)

    def keyed(self, name: str, *facts: Any) -> Store:
        """The store of one computation, in its own folder; in memory if this store is.

        Args:
            name: The computation's name, for the folder's name and for remarks.
            facts: Everything that its results depend on: the arguments of `digest`.
        """
        if self.folder is None:
            return Store()
        own = self.folder / f"{name}-{current().first(f'naming {name}', partial(digest, *facts))}"
        if count := len(list(own.glob(f"*{SUFFIX}"))):
            parts = f"{count} finished part{'s' * (count > 1)}"
            self._say(f"{name}: continuing with {parts} of an interrupted run (--no-resume starts anew).")
        elif any(path != own for path in self.folder.glob(f"{name}-*")):
            why = "the model, data, seed, options, versions or machine have changed"
            self._say(f"{name}: unfinished work in {self.folder} is not used, as {why}.")
        return Store(own, self._say)

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return the stored result of this name; if there is none, call ``make`` and store its result.

        All ranks call ``make``, so that they can share the work in it; rank 0's result is stored. To run ``make`` on one rank only, use
        ``store.get(name, partial(current().first, name, make))``.

        Raises:
            HeadPruneError: The result cannot be stored: the disk is full, or no file can hold it.
        """
        ranks = current()
        known: tuple[T, ...] = ranks.first(f"looking for {name}", partial(self._find, name))
        if known:
            return known[0]
        result = make()
        return ranks.first(f"keeping {name}", partial(self.keep, name, result))

    def share(
        self,
        name: str,
        parts: Mapping[str, Callable[[], T]],
        costs: Sequence[float] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[T]:
        """As `get`, for many results at once: each is computed by one rank, and stored immediately.

        Args:
            name, costs, progress: For `headprune.parallel.Ranks.share`.
            parts: Name of each result -> function that computes it.
        """
        ranks = current()
        known: dict[str, tuple[T, ...]] = ranks.first(
            f"looking for {name}", lambda: {key: value for key in parts if (value := self._find(key))}
        )

        def part(key: str, make: Callable[[], T]) -> T:
            return known[key][0] if key in known else self.keep(key, make())

        tasks = [partial(part, key, make) for key, make in parts.items()]
        left = costs and [0.0 if key in known else cost for key, cost in zip(parts, costs, strict=True)]
        return ranks.share(name, tasks, left, progress)

    def known(self, name: str) -> Any:
        """The result that this process finds under a name; None if there is none. Does not consult other ranks."""
        return next(iter(self._find(name)), None)

    def keep(self, name: str, value: T) -> T:
        """Store a value under a name; returns it as later reads will return it.

        Raises:
            HeadPruneError: As `get`.
        """
        if self.folder is None:
            self._memory[name] = value
            return value
        parts: list[Tensor] = []
        seconds = round(self.seconds + time.monotonic() - self._began, 1)
        head = json.dumps({"name": name, "seconds": seconds, "value": _plain(value, parts, name)})
        tensors = {str(i): tensor.detach().cpu().contiguous().clone() for i, tensor in enumerate(parts)}
        content = head.encode() + b"\n" + bytes_of(tensors)
        try:
            files.write_file(self._path(name), hashlib.sha256(content).digest() + content)
        except OSError as error:
            hint = "Make room, then run the same command again: what was finished is kept."
            raise HeadPruneError(f"{name} cannot be kept: {first_line(error)}.", hint) from error
        kept: T = _restored(json.loads(head)["value"], tensors)
        return kept

    def forget(self, name: str) -> None:
        """Remove a result, so that the next `get` computes it again."""
        self._memory.pop(name, None)
        if self.folder is not None:
            self._path(name).unlink(missing_ok=True)

    def _find(self, name: str) -> tuple[Any, ...]:
        """The result stored under a name, as a 1-tuple; () if there is none, or its file is damaged."""
        if self.folder is None:
            return (self._memory[name],) if name in self._memory else ()
        with suppress(Exception):  # an unreadable result is computed again
            head, tensors = _read(self._path(name))
            if head["name"] == name:
                return (_restored(head["value"], tensors_of(tensors)),)
        return ()

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        words = re.sub(r"[^A-Za-z0-9]+", "-", name)[:40].strip("-")
        return self.folder / f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:12]}{SUFFIX}"


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """(name, seconds and value of a file; bytes of its tensors); both empty if the file is missing or damaged."""
    with suppress(OSError, LookupError, TypeError, ValueError, RecursionError):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            line, _, tensors = content[32:].partition(b"\n")
            head = json.loads(line)
            return {**head, "seconds": float(head["seconds"])}, tensors
    return {}, b""


def digest(*values: Any) -> str:
    """A short hash of values and their content; for a model, of its weights and `traits`.

    Values that cannot be compared, such as functions, get a different hash each time (a model's functions count by their code).
    """
    facts = [[fingerprint(value), traits(value)] if isinstance(value, nn.Module) else value for value in values]
    tensors: list[Tensor] = []
    parts: list[str | memoryview] = [json.dumps(_plain(facts, tensors))]
    for tensor in tensors:
        content = tensor_bytes(tensor) if tensor.numel() and not tensor.is_meta else ""
        parts += [f"{tuple(tensor.shape)}:{tensor.dtype}:", content]
    return files.digest(parts)


_OF_TORCH = {*vars(nn.Module()), "_hf_hook", "_old_forward", "hf_device_map"}  # the last three say where weights are


def traits(model: nn.Module) -> list[Any]:
    """Everything besides its weights that a model's answers depend on: config, module classes, non-persistent buffers, own attributes."""
    modules, saved, seen = dict(model.named_modules()), set(model.state_dict()), dict[int, tuple[int, Any]]()
    config: Any = getattr(model, "config", None)

    def told(value: Any) -> Any:
        try:
            return _told(value, seen)
        except Exception:  # anything may be an attribute; what cannot be looked at is like no other
            return object()

    own = {}
    for name, module in modules.items():
        left_out = {*_OF_TORCH, "forward", "to", "cuda"} if "_hf_hook" in vars(module) else _OF_TORCH
        own[name] = {key: told(value) for key, value in vars(module).items() if key not in left_out}
    return [
        _told(config.to_dict() if hasattr(config, "to_dict") else None, seen),
        {name: type(module) for name, module in modules.items()},
        {name: buffer for name, buffer in model.named_buffers() if name not in saved},
        own,
    ]


def _told(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """What an attribute consists of, as values that `_plain` can hold, and alike in every process; functions by name and code.

    Args:
        seen: By id, the number and the object of what was told already, such as a config that every module has.
    """
    if isinstance(value, Tensor) and (value.layout is not torch.strided or is_wrapper(value)):
        return object()  # its bytes cannot be read
    if value is None or isinstance(value, bool | int | float | str | Tensor | np.ndarray):
        return value
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, nn.Module | type | Logger):
        return name
    if id(value) in seen:
        return [name, seen[id(value)][0]]
    seen[id(value)] = len(seen), value

    if isinstance(value, Mapping):
        items = sorted(zip(map(str, value), value.values(), strict=True), key=itemgetter(0))
        return [name, *([key, _told(each, seen)] for key, each in items)]
    if isinstance(value, set | frozenset):
        return [name, *sorted(json.dumps(_told(each, seen), default=str) for each in value)]
    if isinstance(value, list | tuple):
        return [name, *(_told(each, seen) for each in value)]
    if isinstance(value, bytes | complex | np.generic | Path | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts: Any = [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    elif isinstance(value, CodeType):
        parts = [value.co_code, value.co_names, value.co_consts]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        parts = [value.func, value.args, value.keywords]
    else:
        parts = value.to_dict() if hasattr(value, "to_dict") else getattr(value, "__dict__", None)
    return [name, _told(parts, seen)]


# -- serialisation of values -------------------------------------------------------------------------


def _plain(value: Any, tensors: list[Tensor], where: str | None = None) -> Any:
    """A value as JSON: None, numbers and texts unchanged, everything else as [kind, content].

    Args:
        tensors: The value's tensors are appended here; the JSON refers to them by index.
        where: The value's name, for errors. Without one, an unsupported value is no error, but becomes a text that identifies it.

    Raises:
        HeadPruneError: The value contains something that no file can hold.
    """

    def parts(values: Iterable[tuple[Any, Any]]) -> list[Any]:
        return [_plain(each, tensors, where and f"{where} › {name}") for name, each in values]

    kind = type(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", str(len(tensors) - 1)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return ["array", parts([("its numbers", torch.from_numpy(value.copy()))])]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", parts(enumerate(value))]
    if isinstance(value, Mapping):
        keys = parts(("its name", key) for key in value)
        return ["dict", [["tuple", pair] for pair in zip(keys, parts(value.items()), strict=True)]]
    if kind.__module__.startswith("headprune.") and is_dataclass(value):
        own = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return [f"{kind.__module__}:{kind.__qualname__}", _plain(own, tensors, where)]
    if where is not None:
        raise HeadPruneError(f"{where} is a {kind.__name__}, which no file can hold.", "Please report this.")
    return str(value) if isinstance(value, torch.dtype | torch.device | Path | type) else uuid.uuid4().hex


def _restored(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_plain`: the value that it was given.

    Raises:
        ValueError: A class is none of headprune's dataclasses.
    """
    if not isinstance(data, list):
        return data
    kind, content = data
    if kind == "tensor":
        return tensors[content]
    if kind in ("array", "list", "tuple", "dict"):
        parts = [_restored(part, tensors) for part in content]
        return parts[0].numpy() if kind == "array" else {"list": list, "tuple": tuple, "dict": dict}[kind](parts)
    named = resolve_name(kind) if kind.startswith("headprune.") else None
    if not isinstance(named, type) or not is_dataclass(named):
        raise ValueError(f"{kind} holds no values")
    return named(**_restored(content, tensors))
