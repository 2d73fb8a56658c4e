"""Modules of whose output the losses read only one token: those of a classifier's last block, behind its attention.

A classifier reads its first or its last token. In its last block, the other tokens are needed as keys and values, but
computing W_O and the feed-forward layers for them is wasted work. It is left out, and their output is NaN: so a loss that
reads another token after all is NaN too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError
from headprune.inputs import map_tensors, tensors
from headprune.running import wrapped
from headprune.scoring.base import NotFiniteError
from headprune.scoring.calls import Call, all_calls

_TOKENS = (0, -1)
_TRIED = 8  # after so many modules in a row whose whole output is read, no others are tried


def read_tokens(
    model: nn.Module,
    calls: Sequence[Call],
    losses: Callable[[], Tensor],
    same: Callable[[Tensor, Tensor], bool],
    hooked: Collection[str] = (),
) -> dict[str, int]:
    """The outermost modules of whose output only one token is read, ``{module: token}``; 0 is the first, -1 the last.

    Args:
        model: The model.
        calls: Its module calls, each module once; the last ones are tried first.
        losses: Runs the model on some examples.
        same: Whether losses are equal up to rounding.
        hooked: Modules whose hooks must see all tokens.
    """
    expected = losses()

    def unread(name: str, token: int) -> bool:
        try:
            with reading(model, {name: token}):
                return same(losses(), expected)
        except HeadPruneError:  # not finite, or made for all tokens, such as a router's own loss
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
    """Let modules compute only one token, and return NaN for the others.

    Hooks see all tokens, so gates do too.
    """

    def around(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            length = tensors((args, kwargs))[0].shape[1]
            at = tokens[name] % length
            args, kwargs = map_tensors((args, kwargs), lambda t: t[:, at : at + 1])
            alone = forward(*args, **kwargs)
            whole = alone.new_full((alone.shape[0], length, *alone.shape[2:]), math.nan)
            whole[:, at : at + 1] = alone
            return whole

        return run

    with wrapped({name: model.get_submodule(name) for name in tokens}, around, "forward"):
        yield


def _apart(model: nn.Module, calls: Sequence[Call], losses: Callable[[], Tensor], token: int) -> set[str]:
    """Modules whose output for a token only depends on that token."""
    found: set[str] = set()
    trying = False  # modules inside a module that is tried are called with inputs that no forward gives them

    def around(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal trying
            output = forward(*args, **kwargs)
            if not trying:
                trying = True
                try:
                    if _alone(forward, args, kwargs, output, token):
                        found.add(name)
                finally:
                    trying = False
            return output

        return run

    with wrapped({call.module: model.get_submodule(call.module) for call in all_calls(calls)}, around, "forward"):
        try:
            losses()
        except HeadPruneError:  # what ran once more left something behind, such as a router's logits for its own loss
            return set()
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
        or output.data_ptr() == given[0].data_ptr()  # the module does nothing that could be saved
    ):
        return False
    at = token % output.shape[1]

    def emptied(t: Tensor) -> Tensor:
        other = torch.full_like(t, math.nan)
        other[:, at] = t[:, at]
        return other

    wanted = output[:, at]
    most = (1e-5 if output.dtype in (torch.float32, torch.float64) else 2e-2) * wanted.abs().max()
    for change, index in ((emptied, at), (lambda t: t[:, at : at + 1].clone(), 0)):
        some, named = map_tensors((args, kwargs), change)
        try:
            found = forward(*some, **named)[:, index]
        except Exception:  # made for all tokens
            return False
        if not bool((found - wanted).abs().max() <= most):
            return False
    return True


def _notices(model: nn.Module, name: str, losses: Callable[[], Tensor]) -> bool:
    """Whether NaN in a module's output makes the losses NaN; not so if they count errors, or in some attention kernels."""

    def around(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: torch.full_like(forward(*args, **kwargs), math.nan)

    try:
        with wrapped({name: model.get_submodule(name)}, around, "forward"):
            return not bool(losses().isfinite().any())
    except NotFiniteError:
        return True
