"""Inputs for the proof, derived from the example: other shapes, padding, other content, more tokens, and a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headprune.inputs import (
    Example,
    config_fields,
    model_device,
    scrambled,
    shortened,
    tensors,
    variants,
    vocabulary_size,
    writes,
)

LENGTH = 64  # tokens of the longer input, if the example is short; a longer example is doubled
LONG = 4096  # examples with more tokens (or samples of sound) are not made longer: that would cost too much

_LIMIT = re.compile(
    r"position_embeddings|n_positions|(source|target)_positions|n_ctx$|max_seq|seq_length|sequence_length"
)


class Prompt(dict[str, Any]):
    """An example from which the model generates token by token, with a cache."""


def _prompt(model: nn.Module, example: Example) -> Prompt | None:
    """The part of an example from which the model generates text; None if it cannot."""
    if not isinstance(example, Mapping) or "input_ids" not in example or not writes(model):
        return None
    return Prompt({k: v for k, v in example.items() if not k.startswith(("decoder_", "labels"))})


def inputs_for(model: nn.Module, example: Example) -> list[list[Example]]:
    """Inputs for the proof: the example, versions with other shapes and padding, random content, more tokens, and a prompt.

    If all tokens of the example are alike, attention is uniform, which hides errors; if it is short, errors that only affect
    later tokens are hidden. What is derived from a text has at most `LONG` tokens: with padding many models build a mask of tokens x
    tokens. Each input is a list of choices: a model may refuse some, and the first that it takes is used.
    """
    short = shortened(example, LONG)
    prompt = _prompt(model, short)
    single = [example, *variants(short)[:2], *scrambled(short, vocabulary_size(model)), *([prompt] if prompt else [])]
    return [[each] for each in single] + longer(example, position_limit(model))


def longer(example: Example, limit: int | None = None) -> list[list[Example]]:
    """Examples with more tokens, as lists of choices: of each list, the first that the model takes is used.

    Shapes show where the tokens are: the second dimension of token ids and features, and every dimension of a mask that
    is as long. Features may also be ``[L, B, D]``, so there is a second list for that case. The contents are repeated, and
    no added token is padding.

    Args:
        example: Ids ``[B, L]``, features ``[B, L, D]`` or ``[L, B, D]``, alone or with masks, in a dict or tuple.
        limit: The most tokens that the model takes, if known.
    """
    main = _main(example)
    if main is None:
        return []
    result = []
    for dim in (1, 0) if main.ndim == 3 else (1,):
        lengths = {t.shape[dim] for t in _tokens(example) if t.ndim == main.ndim or dim == 1}
        batch = main.shape[1 - dim]
        choices: list[Example] = []
        for targets in zip(*map(_targets, lengths), strict=True):
            new = {n: min(m, limit or m) for n, m in zip(lengths, targets, strict=True) if 1 < n <= LONG}
            new = {n: m for n, m in new.items() if m > n}
            for rows in dict.fromkeys((1, batch)) if new else ():
                extended = _extended(example, new, main, dim, batch, rows)
                if _shapes(extended) not in map(_shapes, choices):
                    choices.append(extended)
        if choices:
            result.append(choices)
    return result


def _targets(length: int) -> tuple[int, ...]:
    """The lengths to try, the longest first."""
    return max(LENGTH, 2 * length), 4 * length, 2 * length, length + -(-length // 4)


def position_limit(model: nn.Module) -> int | None:
    """The most tokens that a transformers model takes, by its config; None if that names no limit."""
    limits = (v for k, v in config_fields(model) if _LIMIT.search(k) and type(v) is int and v > 1)
    return min(limits, default=None)


def _main(example: Example) -> Tensor | None:
    """The tokens: ids ``[B, L]``, or features with a third dimension."""
    if isinstance(example, Mapping):
        for name in ("input_ids", "inputs_embeds", "input_values", "input_features"):
            if isinstance(t := example.get(name), Tensor) and t.ndim in (2, 3):
                return t
    elif (first := next(iter(tensors(example)), None)) is not None and first.ndim > 3:
        return None  # images
    return next(iter(_tokens(example)), None)


def _tokens(example: Example) -> list[Tensor]:
    """Every sequence of the example: of an encoder, of a decoder; ids, features, or samples of sound."""
    named = example.items() if isinstance(example, Mapping) else [("", t) for t in tensors(example)]
    sequences = [t for name, t in named if isinstance(t, Tensor) and not re.search("mask|bias|pixel", name)]
    return [t for t in sequences if t.dtype != torch.bool and t.ndim in (2, 3) and t.numel()]


def _extended(value: Any, new: Mapping[int, int], main: Tensor, dim: int, batch: int, rows: int, name: str = "") -> Any:
    """``value`` with its first ``rows`` examples, and with the lengths ``{old: new}`` in every dimension that counts tokens."""
    if isinstance(value, Mapping):
        return {k: _extended(v, new, main, dim, batch, rows, k) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_extended(v, new, main, dim, batch, rows) for v in value)
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    features = value.ndim == 3 and value.is_floating_point() and (value is main or value.shape[-1] not in new)
    image = value.ndim > 3 and value.is_floating_point() and name and not re.search("mask|bias", name)
    square = value.ndim == 2 and value.shape[0] == value.shape[1] and value is not main and "ids" not in name
    if features:
        along, at = [dim], 1 - dim
    elif square and value.shape[0] in new:  # a mask for pairs of tokens
        along, at = [0, 1], -1
    else:
        along, at = [] if image else list(range(1, value.ndim)), 0
    if at >= 0 and value.shape[at] == batch:
        value = value.narrow(at, 0, rows)
    for d in along:
        if (length := value.shape[d]) in new:
            value = value.index_select(d, torch.arange(new[length], device=value.device) % length)
    plain = value.ndim == 2 and not square and not value.is_floating_point()
    if "attention_mask" in name and plain:
        value = torch.ones_like(value)
    return value


def _shapes(example: Example) -> list[torch.Size]:
    return [t.shape for t in tensors(example)]


@contextmanager
def within_bounds(model: nn.Module) -> Iterator[None]:
    """Raise IndexError for an index out of range on any device: CUDA would stop working for the whole process."""
    if model_device(model).type == "cpu":  # it raises by itself
        yield
        return
    with _Bounds():  # type: ignore[no-untyped-call]
        yield


class _Bounds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks every index before it is used."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        look = _LOOKUPS.get(func.overloadpacket)
        if look is not None:
            for index, size in look(args):
                if index.dtype not in (torch.bool, torch.uint8) and index.numel():
                    low, high = (int(i) for i in index.aminmax())
                    if low < -size or high >= size:
                        raise IndexError(f"index {high if high >= size else low} is out of range for {size} entries")
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
_LOOKUPS: dict[Any, Callable[[Any], list[tuple[Tensor, int]]]] = {
    _aten.embedding: lambda a: [(a[1], a[0].shape[0])],
    _aten.index_select: lambda a: [(a[2], a[0].shape[a[1]])],
    _aten.gather: lambda a: [(a[2], a[0].shape[a[1]])],
    _aten.index: lambda a: [(i, a[0].shape[d]) for d, i in enumerate(a[1]) if i is not None],
}
