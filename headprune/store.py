"""Results of a computation by name: made once, and found again by whoever asks again, also after the process was killed.

One `Store` is the cache within a run, what an interrupted run goes on from, and how several processes get one result. A scoring
method, a search and a whole run use it alike::

    def prune_run(config, folder, ui):
        model, data, work = ..., ..., folder.store(ui.say)
        known = work.keyed("score", model, data, config.scoring)                # named by all that the scores depend on
        scores = [known.get(m, partial(score, model, data.score, m, work=work)) for m in config.methods]
        store = work.keyed("prune", model, data, config, scores)                # named by all that the rest depends on
        result = store.get("search", partial(search, dense, scores, config.budgets, data.choose, store=store))
        base = store.get("dense", partial(evaluate, model, data.report))
        times = store.get("latency", partial(current().first, "latency", partial(benchmark, models)))  # by one process
        results = [store.get(f"pruned {plan.kept}", partial(carry_out, plan, store.folder / "content")) for plan in result.plans]

    store = Store()                   # the Python API: in memory, gone with it
    store = Store(Path("work"))       # on disk: after a kill the same calls find what was finished

`Store.get` gives what was kept, so that a run that goes on gives what an undisturbed run gives, to the bit. Values are what JSON
and safetensors can hold: numbers, texts, None, lists, tuples, dicts, tensors, arrays, and headprune's dataclasses and documents made
of such. A file is never unpickled, and a damaged one is noticed by its checksum: its value is made again.

`Store.keyed` has a folder for every computation, named by a `digest` of all that it depends on: results of another model, data,
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
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from headprune import files
from headprune.errors import HeadPruneError, first_line
from headprune.fingerprint import fingerprint, tensor_bytes
from headprune.parallel import current

T = TypeVar("T")
SUFFIX = ".part"


class Store:
    """Results by name.

    Where several processes share out the work (`headprune.parallel`), all of them call it alike, and get what the first one keeps.

    Args:
        folder: For files, one for each result, which appears complete or not at all; made when the first one is. None keeps results
            in memory.
        say: Called with a remark about unfinished work that is there already.

    Attributes:
        seconds: That interrupted runs took of this computation.
    """

    def __init__(self, folder: Path | None = None, say: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self._say = folder, say
        self._memory: dict[str, Any] = {}
        self._began = time.monotonic()
        heads = [_read(path)[0] for path in (folder.glob(f"*{SUFFIX}") if folder else ())]
        self.seconds = max((head["seconds"] for head in heads if head), default=0.0)

    def keyed(self, name: str, *facts: Any) -> Store:
        """The store of one computation, in a folder of its own; in memory, if this one is.

        Args:
            name: Of the computation, for the folder's name and for remarks.
            facts: All that its results depend on, as `digest` takes it.
        """
        if self.folder is None:
            return Store()
        own = self.folder / f"{name}-{current().first(f'naming {name}', partial(digest, *facts))}"
        if count := len(list(own.glob(f"*{SUFFIX}"))):
            parts = f"{count} finished part{'s' * (count > 1)}"
            self._say(f"{name}: continuing with {parts} of an interrupted run (--no-resume starts anew).")
        elif any(path != own for path in self.folder.glob(f"{name}-*")):
            why = "the model, data, seed, options or versions have changed"
            self._say(f"{name}: unfinished work in {self.folder} is not used, as {why}.")
        return Store(own, self._say)

    def get(self, name: str, make: Callable[[], T]) -> T:
        """The result of this name: the one that is kept, or else what ``make`` gives, which is kept then.

        All of several processes call ``make``, so that they can share out the work in it, and the first one's result counts. For what
        only one of them is to do: ``store.get(name, partial(current().first, name, make))``.

        Raises:
            HeadPruneError: It cannot be kept: the disk is full, or no file can hold it.
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
        """As `get`, for many results at once: each is made by one process, and kept as soon as it is made.

        Args:
            name: Of all of them, for `headprune.parallel.Ranks.share`; as ``costs`` and ``progress``.
            parts: What makes each result, by its name.
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
        """What this process finds under a name; None if nothing is kept."""
        return next(iter(self._find(name)), None)

    def keep(self, name: str, value: T) -> T:
        """A value as it will be found again under its name, now that it is kept.

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
        """Remove a result, so that it is made again when it is asked for."""
        self._memory.pop(name, None)
        if self.folder is not None:
            self._path(name).unlink(missing_ok=True)

    def _find(self, name: str) -> tuple[Any, ...]:
        """What is kept under a name, alone in a tuple; () if there is nothing, or a damaged file."""
        if self.folder is None:
            return (self._memory[name],) if name in self._memory else ()
        with suppress(Exception):  # whatever it holds: it is made again
            head, tensors = _read(self._path(name))
            if head["name"] == name:
                return (_restored(head["value"], tensors_of(tensors)),)
        return ()

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        words = re.sub(r"[^A-Za-z0-9]+", "-", name)[:40].strip("-")
        return self.folder / f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:12]}{SUFFIX}"


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's name, seconds and value, and the bytes of its tensors; all empty if there is none, or a damaged one."""
    with suppress(OSError, LookupError, TypeError, ValueError, RecursionError):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            line, _, tensors = content[32:].partition(b"\n")
            head = json.loads(line)
            return {**head, "seconds": float(head["seconds"])}, tensors
    return {}, b""


def digest(*values: Any) -> str:
    """A short hash of values and all that they are made of; of a model its weights, config, modules and plain attributes.

    What cannot be compared with others, such as a function, gets another hash each time.
    """
    facts = [[fingerprint(value), traits(value)] if isinstance(value, nn.Module) else value for value in values]
    tensors: list[Tensor] = []
    parts: list[str | memoryview] = [json.dumps(_plain(facts, tensors))]
    for tensor in tensors:
        content = tensor_bytes(tensor) if tensor.numel() and not tensor.is_meta else ""
        parts += [f"{tuple(tensor.shape)}:{tensor.dtype}:", content]
    return files.digest(parts)


def traits(model: nn.Module) -> list[Any]:
    """What a model computes with beside its weights: config, its modules' classes, buffers that are not saved, plain attributes."""
    modules, saved = dict(model.named_modules()), set(model.state_dict())
    own = {f"{name}.{key}": value for name, module in modules.items() for key, value in vars(module).items()}
    plain = {k: v for k, v in own.items() if isinstance(v, bool | int | float | str) and not k.endswith(".training")}
    config: Any = getattr(model, "config", None)
    return [
        config.to_dict() if hasattr(config, "to_dict") else None,
        {name: type(module) for name, module in modules.items()},
        {name: buffer for name, buffer in model.named_buffers() if name not in saved},
        plain,
    ]


# -- values as a file holds them ---------------------------------------------------------------------


def _plain(value: Any, tensors: list[Tensor], where: str | None = None) -> Any:
    """A value as JSON can hold it: None, numbers and texts as they are, all else as [what it is, what is in it].

    Args:
        tensors: Gets those in it, for which their numbers stand.
        where: The value's name, for errors. Without one, what no file can hold is no error: a text stands for it, of other values another.

    Raises:
        HeadPruneError: No file can hold something in it.
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
    """What `_plain` was given."""
    if not isinstance(data, list):
        return data
    kind, content = data
    if kind == "tensor":
        return tensors[content]
    if kind in ("array", "list", "tuple", "dict"):
        parts = [_restored(part, tensors) for part in content]
        return parts[0].numpy() if kind == "array" else {"list": list, "tuple": tuple, "dict": dict}[kind](parts)
    return _class_named(kind)(**_restored(content, tensors))


def _class_named(path: str) -> Any:
    """A class of headprune's that holds values, and no other.

    Raises:
        ValueError: It is none.
    """
    kind = resolve_name(path) if path.startswith("headprune.") else None
    if not isinstance(kind, type) or not is_dataclass(kind):
        raise ValueError(f"{path} holds no values")
    return kind
