"""The module calls of one forward pass: their order, their outputs, and which output tokens the losses depend on.

A replay runs only the modules after a layer's gate. `observe` records the order of module calls. `starts_of` finds the calls that
return before a gate, and the batch dimension of their outputs. `keeping` stores these outputs, and `answering` returns them again.

A classifier reads only the first or the last token. Its last block needs the other tokens as keys and values, but computing W_O and
the feed-forward layers for them is wasted work. `read_tokens` finds these modules, and `reading` skips that work. It returns NaN for
the skipped tokens, so a loss that does read one of them becomes NaN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from headprune.errors import HeadPruneError
from headprune.inputs import map_tensors, tensors
from headprune.running import wrapped
from headprune.scoring.base import NotFiniteError, Problem

TOKENS = (0, -1)  # a classifier may read one of these
_TRIED = 8  # give up after this many modules in a row that need all tokens

Key = tuple[str, int]
"""(module name, how many calls of it came before)."""
Start = dict[Key, "KeptOutput"]
"""The calls that a replay skips, and the layout of their outputs."""


@dataclass
class Call:
    """One call of a module.

    Attributes:
        entered, left: Times of entry and return, on a clock that counts events of the forward pass.
        writes: Whether it modifies its arguments in place; a replay must not skip such a call.
    """

    module: str
    number: int
    entered: int
    left: int = 0
    output: Any = None
    writes: bool = False


@dataclass(frozen=True)
class KeptOutput:
    """The batch dimensions of one call's output.

    Attributes:
        dims: The batch dimension of every tensor; None if it has none.
        bytes_per_row: Size of the output for one example.
    """

    dims: tuple[int | None, ...]
    bytes_per_row: int


def observe(problem: Problem, batch: Any) -> tuple[list[Call], dict[str, int]]:
    """The module calls of one dense forward pass, by time of entry, and the time at which each layer's gate is first reached."""
    clock, counts = count(1), Counter[str]()
    calls: list[Call] = []
    gates: dict[str, int] = {}

    def pass_gates(name: str, concatenates: bool) -> None:
        for layer in problem.layers:
            at = layer.mask_point
            if at is not None and at.module == name and layer.concatenates == concatenates:
                gates.setdefault(layer.name, next(clock))

    def around(name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        call = Call(name, counts[name], next(clock))
        counts[name] += 1
        calls.append(call)
        pass_gates(name, concatenates=False)
        given = tensors((args, kwargs))
        before = [t._version for t in given]
        call.output = original(*args, **kwargs)
        call.writes = before != [t._version for t in given]
        pass_gates(name, concatenates=True)
        call.left = next(clock)
        return call.output

    with wrapped(dict(problem.model.named_modules()), around):
        problem.losses(batch)
    return calls, gates


def starts_of(gates: Mapping[str, int], two: Sequence[Call], three: Sequence[Call]) -> dict[str, Start]:
    """For every layer, the outermost skippable calls that return before its gate; ``two``, ``three``: the calls with 2 and 3 examples."""
    twins = {(call.module, call.number): call for call in three}
    outputs = {(c.module, c.number): _kept_output(c, twins.pop((c.module, c.number), None)) for c in two}
    # If one output of a module cannot be kept, all its calls run, so that call numbers stay right.
    running = {name for (name, _), output in outputs.items() if output is None} | {name for name, _ in twins}
    starts: dict[str, Start] = {}
    for layer, gate in gates.items():
        start, until = starts.setdefault(layer, {}), 0
        for call in two:
            output = outputs[call.module, call.number]
            if until < call.entered and call.left < gate and call.module not in running and output is not None:
                start[call.module, call.number] = output
                until = call.left  # skips the calls inside it
    return starts


def _kept_output(call: Call, twin: Call | None) -> KeptOutput | None:
    """An output's batch dimensions, from the same call with 2 and with 3 examples; None if it cannot be kept."""
    a, b = (tensors_in(each.output) if each else None for each in (call, twin))
    if a is None or b is None or len(a) != len(b) or call.writes:
        return None
    dims: list[int | None] = []
    for x, y in zip(a, b, strict=True):
        differing = [d for d, (m, n) in enumerate(zip(x.shape, y.shape, strict=False)) if m != n]
        if x.ndim != y.ndim or len(differing) > 1 or any(3 * x.shape[d] != 2 * y.shape[d] for d in differing):
            return None
        dims.append(differing[0] if differing else None)
    own = sum(t.nbytes for t, d in zip(a, dims, strict=True) if d is not None)
    return KeptOutput(tuple(dims), own // 2)


@contextmanager
def keeping(model: nn.Module, wanted: Start, kept: dict[Key, Any]) -> Iterator[Counter[str]]:
    """Store the outputs of the wanted calls in ``kept``; yields a counter of calls per module."""
    counts: Counter[str] = Counter()

    def around(name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        key = (name, counts[name])
        counts[name] += 1
        output = original(*args, **kwargs)
        if key in wanted:
            kept[key] = tree_map_only(Tensor, Tensor.clone, output)  # a copy: later modules may modify it in place
        return output

    with wrapped({name: model.get_submodule(name) for name, _ in wanted}, around):
        yield counts


@contextmanager
def answering(model: nn.Module, skipped: Start, kept: Mapping[Key, Any], rows: int) -> Iterator[None]:
    """Make the skipped calls return their kept outputs, repeated for every row of gates, instead of running."""

    left = {name: iter(sorted(key for key in skipped if key[0] == name)) for name, _ in skipped}

    def around(name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if (key := next(left[name], None)) is None:
            return original(*args, **kwargs)
        dims = iter(skipped[key].dims)

        def repeated(t: Tensor) -> Tensor:
            dim = next(dims)
            # Always a copy: the next module may modify it in place.
            return t.clone() if dim is None else torch.cat([t] * rows, dim)

        return tree_map_only(Tensor, repeated, kept[key])

    with wrapped({name: model.get_submodule(name) for name in left}, around):
        yield


def tensors_in(value: Any) -> list[Tensor] | None:
    """The tensors of an output; None if it holds anything but tensors and plain values, such as a cache."""
    leaves = tree_leaves(value)
    plain = all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str) for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)] if plain else None


# -- the token that the losses depend on -------------------------------------------------------------


def read_tokens(
    model: nn.Module,
    calls: Sequence[Call],
    losses: Callable[[], Tensor],
    same: Callable[[Tensor, Tensor], bool],
    hooked: Collection[str] = (),
) -> dict[str, int]:
    """The outermost modules that need to compute only one token, ``{module: token}``; 0 is the first token, -1 the last.

    Args:
        model: The model.
        calls: Its module calls, each module once.
        losses: Runs the model on some examples.
        same: Compares losses, up to rounding.
        hooked: Modules whose hooks must see all tokens.
    """
    expected = losses()
    calls = sorted(calls, key=lambda call: -call.left)  # last ones first, outer calls before inner ones

    def unread(module: str, token: int) -> bool:
        """Whether the module computes this token from the same token of its inputs alone, and the losses depend on no other token."""
        local = True

        def around(name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            nonlocal local
            output = forward(*args, **kwargs)
            local &= _is_local(forward, args, kwargs, output, token)
            return output

        try:
            with wrapped({module: model.get_submodule(module)}, around, "forward"):
                losses()
            with reading(model, {module: token} if local else {}):
                return local and same(losses(), expected)
        except HeadPruneError:  # not finite, or a loss over all tokens, such as a router's
            return False

    for token in TOKENS:
        cut: list[Call] = []
        failed = 0
        for call, following in zip(calls, [*calls[1:], None], strict=True):
            if cut and call.entered > cut[-1].entered:
                continue  # inside a module that was found already
            inner = any(name.startswith(f"{call.module}.") for name in hooked)
            if not inner and unread(call.module, token):
                cut.append(call)
                failed = 0
            elif following is None or following.entered < call.entered:  # nothing is called inside it
                failed += 1
                if failed == _TRIED:
                    break
        if cut:
            return {call.module: token for call in cut if _shows_nan(model, call.module, losses)}
    return {}


@contextmanager
def reading(model: nn.Module, tokens: Mapping[str, int]) -> Iterator[None]:
    """Make modules compute only one token, and return NaN for the others.

    Only ``forward`` is replaced, so hooks (and with them gates) still see all tokens.
    """

    def around(name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        length = tensors((args, kwargs))[0].shape[1]
        at = tokens[name] % length
        args, kwargs = map_tensors((args, kwargs), lambda t: t[:, at : at + 1])
        one = forward(*args, **kwargs)
        whole = one.new_full((one.shape[0], length, *one.shape[2:]), math.nan)
        whole[:, at : at + 1] = one
        return whole

    with wrapped({name: model.get_submodule(name) for name in tokens}, around, "forward"):
        yield


def _is_local(forward: Callable[..., Any], args: Any, kwargs: Any, output: Any, token: int) -> bool:
    """Whether an output token depends only on the same token of the inputs."""
    given = tensors((args, kwargs))
    plain = all(isinstance(v, Tensor | bool | int | float | str | None) for v in (*args, *kwargs.values()))
    if not plain or not given or not isinstance(output, Tensor) or output.ndim < 3 or output.shape[1] < 2:
        return False
    if any(t.shape[:2] != output.shape[:2] or t.ndim < 3 or not t.is_floating_point() for t in (output, *given)):
        return False
    if output.data_ptr() == given[0].data_ptr():  # the module returns its input: no work to skip
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
            changed = forward(*some, **named)[:, index]
        except Exception:  # it needs all tokens
            return False
        if not bool((changed - wanted).abs().max() <= most):
            return False
    return True


def _shows_nan(model: nn.Module, name: str, losses: Callable[[], Tensor]) -> bool:
    """Whether NaN in a module's output makes the losses NaN. Error counts and some attention kernels hide NaN."""

    def around(name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        return torch.full_like(forward(*args, **kwargs), math.nan)

    try:
        with wrapped({name: model.get_submodule(name)}, around, "forward"):
            return not bool(losses().isfinite().any())
    except NotFiniteError:
        return True
