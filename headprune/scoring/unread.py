"""Modules of whose output the losses read one token alone: a classifier's last block, behind its attention.

A classifier reads its first or its last token. Of the last block the others are then needed as keys and values, but their
way through W_O and the feed-forward layers is work for nothing. It is left out, and NaN stands where it would have been:
a loss that reads it after all cannot fail to show.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headprune.inputs import tensors
from headprune.scoring.base import NotFiniteError

_TOKENS = (0, -1)
_TRIED = 8  # modules in a row that are read whole; those before them have no better chance


class Node(Protocol):
    """A module call, and those inside it in their order."""

    @property
    def module(self) -> str: ...
    @property
    def inside(self) -> Sequence[Node]: ...


def read_tokens(
    model: nn.Module,
    calls: Sequence[Node],
    losses: Callable[[], Tensor],
    same: Callable[[Tensor, Tensor], bool],
    hooked: Collection[str] = (),
) -> dict[str, int]:
    """The outermost modules of whose output only one token is read, ``{module: token}``; 0 is the first, -1 the last.

    Args:
        model: That the losses are of.
        calls: What it calls, each module once; the last ones are tried first.
        losses: Runs it on some examples.
        same: Whether losses are equal up to rounding.
        hooked: Modules at whose inputs all tokens must be seen.
    """
    expected = losses()

    def unread(name: str, token: int) -> bool:
        try:
            with reading(model, {name: token}):
                return same(losses(), expected)
        except NotFiniteError:
            return False

    for token in _TOKENS:
        apart = _apart(model, calls, losses, token)
        found: list[str] = []
        failed = 0
        waiting = list(calls)
        while waiting and failed < _TRIED:
            call = waiting.pop()  # the last
            inner = any(name.startswith(f"{call.module}.") for name in hooked)
            if not inner and call.module in apart and unread(call.module, token):
                found.append(call.module)
                failed = 0
            elif call.inside:
                waiting += call.inside
            else:
                failed += 1
        if found:
            return {name: token for name in found if _notices(model, name, losses)}
    return {}


@contextmanager
def reading(model: nn.Module, tokens: Mapping[str, int]) -> Iterator[None]:
    """Let modules compute one token alone, and give NaN for the others.

    Hooks see all tokens, so that gates do.
    """

    def around(forward: Callable[..., Any], token: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            length = tensors((args, kwargs))[0].shape[1]
            at = token % length

            def cut(t: Tensor) -> Tensor:
                return t[:, at : at + 1]

            alone = forward(*_mapped(args, cut), **_mapped(kwargs, cut))
            whole = alone.new_full((alone.shape[0], length, *alone.shape[2:]), float("nan"))
            whole[:, at : at + 1] = alone
            return whole

        return run

    with _forwards(model, {name: partial(around, token=token) for name, token in tokens.items()}):
        yield


def _apart(model: nn.Module, calls: Sequence[Node], losses: Callable[[], Tensor], token: int) -> set[str]:
    """Modules that take a token for itself."""
    found: set[str] = set()
    asking = False  # modules inside one that is asked are called with what no forward gives them

    def watched(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal asking
                output = forward(*args, **kwargs)
                if not asking:
                    asking = True
                    try:
                        if _alone(forward, args, kwargs, output, token):
                            found.add(name)
                    finally:
                        asking = False
                return output

            return run

        return around

    def names(those: Sequence[Node]) -> Iterator[str]:
        for call in those:
            yield call.module
            yield from names(call.inside)

    with _forwards(model, {name: watched(name) for name in names(calls)}):
        losses()
    return found


def _alone(forward: Callable[..., Any], args: Any, kwargs: Any, output: Any, token: int) -> bool:
    """Whether a token of an output needs nothing but the same token of the inputs."""
    given = tensors((args, kwargs))
    if (
        not isinstance(output, Tensor)
        or output.ndim < 3
        or output.shape[1] < 2
        or not given
        or any(t.shape[:2] != output.shape[:2] or t.ndim < 3 or not t.is_floating_point() for t in (output, *given))
        or not all(isinstance(v, Tensor | bool | int | float | str | None) for v in (*args, *kwargs.values()))
        or output.data_ptr() == given[0].data_ptr()  # nothing is done that could be left out
    ):
        return False
    at = token % output.shape[1]

    def emptied(t: Tensor) -> Tensor:
        other = torch.full_like(t, float("nan"))
        other[:, at] = t[:, at]
        return other

    try:
        found = [
            forward(*_mapped(args, change), **_mapped(kwargs, change))[:, index]
            for change, index in ((emptied, at), (lambda t: t[:, at : at + 1].clone(), 0))
        ]
    except Exception:  # made for all tokens
        return False
    wanted = output[:, at]
    most = 1e-5 if output.dtype in (torch.float32, torch.float64) else 2e-2
    return all(bool((o - wanted).abs().max() <= most * wanted.abs().max()) for o in found)


def _notices(model: nn.Module, name: str, losses: Callable[[], Tensor]) -> bool:
    """Whether losses show NaN in an output at all; one that counts wrong answers does not, nor do some attention kernels."""

    def ruined(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: torch.full_like(forward(*args, **kwargs), float("nan"))

    try:
        with _forwards(model, {name: ruined}):
            return not bool(losses().isfinite().any())
    except NotFiniteError:
        return True


@contextmanager
def _forwards(
    model: nn.Module, around: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
) -> Iterator[None]:
    """Put something around the ``forward`` of modules, inside their hooks."""
    changed: list[tuple[nn.Module, Any]] = []
    try:
        for name, change in around.items():
            module = model.get_submodule(name)
            changed.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = change(module.forward)
        yield
    finally:
        for module, before in reversed(changed):
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with tensors changed."""
    if isinstance(value, dict):
        return {k: _mapped(v, change) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(v, change) for v in value)
    return change(value) if isinstance(value, Tensor) else value
