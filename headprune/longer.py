"""Other inputs than the example, for a proof that must hold on them too: of other shapes and contents, and longer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headprune.inputs import Example, config_fields, first_rows, model_device, tensors

LENGTH = 64  # tokens of the longer input, if the example is short; a longer example is doubled
LONG = 4096  # examples with more tokens (or samples of sound) are not made longer: that would cost too much

_LIMIT = re.compile(
    r"position_embeddings|n_positions|(source|target)_positions|n_ctx$|max_seq|seq_length|sequence_length"
)


def variants(example: Example) -> list[Example]:
    """Differently shaped versions of an example, most different first.

    In this order, as far as the example allows: fewer tokens and one padded position; one padded position; one row less. A
    model that fixes its input's shape may refuse some: the caller tries them in turn.
    """
    found: list[Example] = []
    if isinstance(example, Mapping) and isinstance(ids := example.get("input_ids"), Tensor) and ids.ndim == 2:
        shorter = max(2, (ids.shape[1] * 3) // 5)
        if shorter < ids.shape[1]:
            cut = {k: _cut(k, v, ids, shorter) for k, v in example.items()}
            if isinstance(mask := cut.get("attention_mask"), Tensor) and mask.ndim == 2:
                cut["attention_mask"] = mask = mask.clone()
                mask[0, -1] = 0
            found.append(cut)
    if (padded := _padded(example)) is not None:
        found.append(padded)
    batch = {t.shape[0] for t in tensors(example) if t.ndim}
    if len(batch) == 1 and (rows := batch.pop()) > 1:
        found.append(first_rows(example, rows - 1))
    return found


def shortened(example: Example, most: int) -> Example:
    """The first ``most`` tokens of a text, ``input_ids`` and what is as long; any other example as it is."""
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    if not isinstance(example, Mapping) or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] <= most:
        return example
    return {k: _cut(k, v, ids, most) for k, v in example.items()}


def _cut(name: str, value: Any, ids: Tensor, length: int) -> Any:
    """The first tokens of an argument that has as many as ``ids``."""
    same = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == ids.shape
    return value[:, :length] if same and not name.startswith("decoder_") else value


def _padded(example: Example) -> Example | None:
    """The example with the last token of its first row flipped in every mask: padding, if it was none. None without a mask."""
    changed = False

    def other(value: Any) -> Any:
        nonlocal changed
        if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] < 3 or value.numel() == 0:
            return value
        if value.dtype != torch.bool and bool(((value != 0) & (value != 1)).any()):
            return value
        changed = True
        value = value.clone()
        value[0, -1] = value[0, -1] == 0
        return value

    if isinstance(example, Mapping):
        made: Example = {k: other(v) if "mask" in k else v for k, v in example.items()}
    elif isinstance(example, tuple | list):
        made = tuple(other(v) if isinstance(v, Tensor) and not v.is_floating_point() else v for v in example)
    else:
        return None
    return made if changed else None


def scrambled(example: Example, vocabulary: int) -> list[Example]:
    """The example with random content: token ids below ``vocabulary``, or noise with the same standard deviation."""
    generator = torch.Generator().manual_seed(0)

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator).to(t.device, t.dtype) * t.float().std().to(t.dtype)

    if isinstance(example, Mapping):
        changed = {}
        for key, value in example.items():
            if key == "input_ids" and isinstance(value, Tensor) and vocabulary:
                ids = torch.randint(0, vocabulary, value.shape, generator=generator).to(value.device, value.dtype)
                # The first few ids mostly mark padding and ends: they stay where they are, and none are added.
                changed[key] = torch.where((ids >= 5) & (value >= 5), ids, value)
            elif key in ("pixel_values", "inputs_embeds", "input_features") and isinstance(value, Tensor):
                changed[key] = noise(value)
        return [{**example, **changed}] if changed else []
    if isinstance(example, Tensor):
        return [noise(example)] if example.is_floating_point() else []
    first, *rest = example
    return [(noise(first), *rest)] if isinstance(first, Tensor) and first.is_floating_point() else []


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
