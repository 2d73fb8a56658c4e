"""Outputs of module calls: kept from a dense forward, and returned again instead of running the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.running import wrapped


@dataclass
class Output:
    """What one call of a module returns, as two batch sizes show it."""

    dims: tuple[int | None, ...]  # per tensor, the dimension of the batch; None where there is none
    changed: bool  # written to after it was returned: a copy must be kept
    bytes_per_row: int


@contextmanager
def keeping(
    model: nn.Module, wanted: Mapping[tuple[str, int], Output], kept: dict[tuple[str, int], Any]
) -> Iterator[dict[str, int]]:
    """Keep what the wanted calls return; yields how often each of their modules is called."""
    counts: dict[str, int] = {}

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            key = (name, counts.get(name, 0))
            counts[name] = key[1] + 1
            output = original(*args, **kwargs)
            if key in wanted:
                kept[key] = mapped(output, Tensor.clone) if wanted[key].changed else output
            return output

        return run

    modules = {name: model.get_submodule(name) for name, _ in wanted}
    with wrapped(modules, around):
        yield counts


@contextmanager
def answering(
    model: nn.Module, skipped: Mapping[tuple[str, int], Output], kept: Mapping[tuple[str, int], Any], rows: int
) -> Iterator[None]:
    """Let modules return their kept output, repeated for every row of gates, instead of running."""
    queues: dict[str, list[tuple[str, int]]] = {}
    for key in sorted(skipped):
        queues.setdefault(key[0], []).append(key)

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        queue = list(queues[name])

        def run(*args: Any, **kwargs: Any) -> Any:
            if not queue:
                return original(*args, **kwargs)
            key = queue.pop(0)
            dims = iter(skipped[key].dims)

            def repeated(t: Tensor) -> Tensor:
                dim = next(dims)
                # A copy in any case: the next module may write into it.
                return t.clone() if dim is None else torch.cat([t] * rows, dim)

            return mapped(kept[key], repeated)

        return run

    with wrapped({name: model.get_submodule(name) for name in queues}, around):
        yield


class OpaqueError(Exception):
    """An output that is not made of tensors and plain values."""


def tensors_in(value: Any) -> list[Tensor] | None:
    """The tensors of an output; None if it holds what cannot be kept, such as a cache."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    try:
        mapped(value, note)
    except OpaqueError:
        return None
    return found


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change(tensor)`` in place of every tensor, in the order of `tensors_in`; all types stay the same.

    Raises:
        OpaqueError: Something else than tensors, plain values, and mappings, lists and tuples of them.
    """
    if isinstance(value, Tensor):
        return change(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        made = {k: mapped(v, change) for k, v in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, change) for v in value))
    if type(value) in (tuple, list):
        return type(value)(mapped(v, change) for v in value)
    raise OpaqueError
