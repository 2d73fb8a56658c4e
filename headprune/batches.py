"""The batch dimension of every tensor in a batch, examples selected along it, and work in smaller parts after memory ran out.

The batch dimension need not be the first. A module may take ``[tokens, batch, width]``, and a causal mask ``[tokens, tokens]`` has
none, but may have as many rows as there are examples. So `find_rows` uses the names of transformers' arguments and compares batches
of different sizes. If that leaves a doubt, it tests a layout on the model: reordered examples must get the same answers. If none
passes, it raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from headprune.errors import HeadPruneError
from headprune.inputs import ADDED, LABELS, Path, by_path, map_paths, tensors

Answers = Callable[[Any], Sequence[Tensor]]

# Arguments of transformers models whose first dimension is always the batch.
_NAMED = (
    *LABELS, "input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "attention_mask", "token_type_ids",
    "bbox", "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", *ADDED,
)  # fmt: skip
_NO_TENSOR = HeadPruneError("A batch holds no tensor.", "Give dicts of tensors, or pairs (inputs, labels).")


@dataclass(frozen=True)
class Rows:
    """The batch dimensions of the tensors in batches.

    Attributes:
        dims: From `find_rows`: path of a tensor -> its batch dimension; None for a tensor that all examples share. For other paths,
            the tensor's name decides.
    """

    dims: Mapping[Path, int | None] = field(default_factory=dict)

    def dim(self, path: Path) -> int | None:
        """The batch dimension of a tensor; None if all examples share it.

        Raises:
            HeadPruneError: It is not known.
        """
        if path in self.dims:
            return self.dims[path]
        if _name(path) in _NAMED:
            return 0
        message = f"It is not known whether {'.'.join(map(str, path))} has one part for every example."
        raise HeadPruneError(message, "Look at it together with its model (headprune.batches.find_rows).")

    def size(self, batch: Any) -> int:
        """Number of examples in a batch.

        Raises:
            HeadPruneError: No tensor has a batch dimension.
        """
        named = by_path(batch)
        for path in sorted(named, key=_rank):  # known names first: `find_rows` may not have seen the others
            if (dim := self.dim(path)) is not None and named[path].ndim > dim:
                return named[path].shape[dim]
        raise _NO_TENSOR

    def take(self, batch: Any, index: Sequence[int]) -> Any:
        """Select examples of a batch, in the order of ``index``; tensors that all examples share stay whole."""

        def some(path: Path, value: Any) -> Any:
            dim = self.dim(path) if isinstance(value, Tensor) and value.ndim else None
            return value if dim is None else value.index_select(dim, torch.tensor(list(index), device=value.device))

        return map_paths(batch, some)

    def take_evenly(self, batches: Sequence[Any], rows: Sequence[tuple[int, int]], count: int) -> list[Any]:
        """``count`` evenly spaced examples (all, if there are no more): batches often come sorted by length.

        Args:
            rows: The examples to take from, as (batch, row in it).
        """
        some: dict[int, list[int]] = {}
        count = min(count, len(rows))
        for i in range(count):
            index, row = rows[(2 * i + 1) * len(rows) // (2 * count)]
            some.setdefault(index, []).append(row)
        return [self.take(batches[index], own) for index, own in some.items()]

    def singles(self, batch: Any) -> list[Any]:
        """Split a batch into batches of one example."""
        return [self.take(batch, [i]) for i in range(self.size(batch))]

    def table(self, batch: Any, name: str) -> Tensor | None:
        """The tensor of this name if it is ``[examples, tokens]``, such as a padding mask (but not a causal mask); otherwise None."""
        value = batch.get(name) if isinstance(batch, Mapping) else None
        dim = next((dim for path, dim in self.dims.items() if path[-1:] == (name,)), 0)
        return value if isinstance(value, Tensor) and value.ndim == 2 and dim == 0 else None

    def lengths(self, batch: Any) -> Tensor:
        """Number of tokens of every example, ``[examples]``, from the first 0/1 mask ``[examples, tokens]``; zeros without one."""
        tables = [t for path, t in by_path(batch).items() if t.ndim == 2 and self.dim(path) == 0]
        mask = next((t for t in tables if bool(((t == 0) | (t == 1)).all())), None)
        return torch.zeros(self.size(batch), dtype=torch.long) if mask is None else (mask != 0).sum(1)

    def unlike(self, batch: Any) -> list[int]:
        """Indices of up to three examples of a batch, of different lengths if possible, since a model may remove padding."""
        lengths = self.lengths(batch)
        if not lengths.any():
            return list(range(min(len(lengths), 3)))
        order = lengths.argsort().tolist()
        return list(dict.fromkeys((order[-1], order[0], order[len(order) // 2])))

    def lead(self, batch: Any, shapes: Callable[[Any], Sequence[torch.Size]]) -> bool:
        """Whether the first dimension of some tensors inside the model is the batch, or the batch times something.

        Compares two examples with three. Gradients of gates would not show it if the loss depends on only one token.

        Args:
            shapes: Runs the model on a batch, and returns the shapes of these tensors.
        """
        last = 1 % self.size(batch)
        two, three = (shapes(self.take(batch, index)) for index in ([0, last], [0, last, 0]))
        return [(3 * shape[0], shape[1:]) for shape in two] == [(2 * shape[0], shape[1:]) for shape in three]


def is_empty(batch: Any) -> bool:
    """Whether a batch holds no example: its labels, or without labels its first tensor, have no element."""
    first = _first(batch)
    return first is not None and not first.numel()


def nonempty(batches: Iterable[Any], purpose: str) -> list[Any]:
    """The batches that hold examples.

    Raises:
        HeadPruneError: No batch does.
    """
    kept = [batch for batch in batches if not is_empty(batch)]
    if not kept:
        raise HeadPruneError(f"There are no examples to {purpose}.", "Give batches of at least one example.")
    return kept


def apparent_size(batch: Any) -> int:
    """A guess of the batch size, from the labels or the first tensor; only for messages and counts."""
    first = _first(batch)
    return 0 if first is None else first.shape[0]


def cost_of(batch: Any) -> float:
    """Approximate relative cost of a forward pass on a batch: its number of elements."""
    return float(sum(t.numel() for t in tensors(batch)))


def by_names(example: Any) -> Rows:
    """The batch dimensions of one batch, without a model to test them on: by names, otherwise the first dimension.

    Raises:
        HeadPruneError: Several dimensions of a tensor could be the batch.
    """
    size, unnamed = apparent_size(example), {}
    for path, t in by_path(example).items():
        if t.ndim and _name(path) not in _NAMED:
            if size > 1 and list(t.shape).count(size) > 1:
                raise _unclear({path: t})
            unnamed[path] = 0 if t.shape[0] == size else None
    return Rows(unnamed)


def shaped(example: Mapping[str, Any], batch: int, length: int | None = None) -> dict[str, Any]:
    """A batch of a given size (and length, for texts) for timing, made by repeating an example's rows (and tokens).

    Token values do not change the time, and a full attention mask is the worst case. Each text ends as its own does, and
    its end is not repeated: classifiers such as BART's and T5's read their answer there, and want as many ends in every text.
    """
    rows = by_names(example)
    repeated: dict[str, Any] = rows.take(example, [i % rows.size(example) for i in range(batch)])
    ids = example.get("input_ids")
    tokens = ids.shape[1] if isinstance(ids, Tensor) else None
    if length is None or tokens is None:
        return repeated
    mask = rows.table(repeated, "attention_mask")
    real = torch.ones_like(repeated["input_ids"]) if mask is None or mask.shape[1] != tokens else mask
    places = torch.stack([_places(row, length) for row in real])
    for key in repeated:
        value = rows.table(repeated, key)
        if value is not None and value.shape[1] == tokens:
            value = value.gather(1, places)
            repeated[key] = torch.ones_like(value) if key == "attention_mask" else value
    return repeated


def _places(mask: Tensor, length: int) -> Tensor:
    """Places of a text's tokens, as many as asked for: they are repeated but for the last two (mBART writes its language behind the end)."""
    own = mask.nonzero().flatten() if mask.any() else torch.arange(len(mask), device=mask.device)
    start = own[:-2] if len(own) > 2 else own[:1]
    return torch.cat([start[torch.arange(length) % len(start)], own[-2:]])[-length:]


def find_rows(model: nn.Module, batches: Sequence[Any], answers: Answers) -> Rows:
    """Find the batch dimensions of the tensors in these batches, none of which is empty.

    The batch size is the first dimension of the labels, without labels that of a tensor whose name transformers defines, otherwise that
    of the first tensor. In other tensors, the batch is the first dimension that has this size in every batch. If that may be a
    coincidence, the model decides (`_agrees`): first this layout is tested, then one in which all examples share these tensors.

    Args:
        model: For a transformers model, the names of arguments are used.
        batches: Dicts, tensors, or pairs ``(inputs, labels)``.
        answers: The model's answers to a batch: tensors, at least one of them with a batch dimension.

    Raises:
        HeadPruneError: A tensor's batch dimension is ambiguous; the error names the tensor.
    """
    known = [{path: t for path, t in by_path(batch).items() if t.ndim} for batch in batches]
    paths = list(dict.fromkeys(path for named in known for path in named))
    if not paths:
        raise _NO_TENSOR
    names = _NAMED if hasattr(getattr(model, "config", None), "model_type") else (*LABELS, *ADDED)
    lead = min(paths, key=lambda path: _rank(path, names))
    sizes = [len(named[lead]) if lead in named else 0 for named in known]
    layout: dict[Path, int | None] = {lead: 0}
    doubtful: dict[Path, bool] = {}  # whether several dimensions may be the batch
    for path in paths:
        shapes = [(named[path].shape, size) for named, size in zip(known, sizes, strict=True) if path in named and size]
        least = min((len(shape) for shape, _ in shapes), default=0)
        dims = [dim for dim in range(least) if all(shape[dim] == size for shape, size in shapes)]
        layout.setdefault(path, dims[0] if dims else None)
        certain = layout[path] == 0 and (_name(path) in names or path[:1] == (1,))  # (1,): a pair's labels
        if dims and not certain and (path == lead or len(dims) > 1 or len({size for _, size in shapes}) == 1):
            doubtful[path] = path == lead or len(dims) > 1
    holding = [path for path, dim in layout.items() if dim is not None and path != lead]
    # The labels give the batch size, and only one other tensor can hold the examples.
    if not doubtful or max(sizes) == 1 or (len(holding) == 1 and doubtful == {holding[0]: False}):
        return Rows(layout)
    smallest = min(range(len(batches)), key=lambda i: sizes[i] or math.inf)
    shared = {path: None if path in doubtful and path != lead else dim for path, dim in layout.items()}
    for rows in map(Rows, (layout, shared)):
        agrees = _agrees(batches[smallest], rows, sizes[smallest], answers)
        if agrees or (agrees is None and not any(doubtful.values())):
            return rows
    raise _unclear({path: known[smallest][path] for path in doubtful if path in known[smallest]})


def _agrees(batch: Any, rows: Rows, size: int, answers: Answers) -> bool | None:
    """Whether examples get the same answers when they are reordered, and some repeated, along the dimensions in ``rows``.

    Also True if the model does not run at all, since its own error comes later; None if no answer has a batch dimension.

    Raises:
        HeadPruneError: ``answers`` raises it for the unchanged batch.
    """
    # A larger batch, so that a single row is not broadcast, of a size that no dimension has.
    sides = {side for t in tensors(batch) for side in t.shape}
    more = next(n for n in range(size + 1, size + 2 + len(sides)) if n not in sides)
    index = [(i + 1) % size for i in range(more)]
    whole: list[Tensor] | None = None
    try:
        with torch.no_grad():
            whole = [t.detach() for t in answers(batch)]
            again = [t.detach() for t in answers(rows.take(batch, index))]
    except Exception as error:  # a wrong layout may raise any
        if is_out_of_memory(error) or (whole is None and isinstance(error, HeadPruneError)):
            raise
        return whole is None
    changed = [(a, b) for a, b in zip(whole, again, strict=False) if a.shape != b.shape]
    return all(_follows(*pair, index, size) for pair in changed) if changed else None


def _follows(whole: Tensor, again: Tensor, index: Sequence[int], size: int) -> bool:
    """Whether an answer to reordered examples is the reordered answer, along any dimension."""
    dim = next((d for d, (a, b) in enumerate(zip(whole.shape, again.shape, strict=False)) if a != b), -1)
    each = whole.shape[dim] // size  # more than 1 if tokens are flattened into rows
    parts = torch.tensor([i * each + j for i in index for j in range(each)], dtype=torch.long, device=whole.device)
    wanted = whole.index_select(dim, parts)
    if wanted.shape != again.shape or not wanted.is_floating_point():
        return torch.equal(wanted, again)
    most = 1e-3 if wanted.dtype in (torch.float32, torch.float64) else 5e-2
    scale = float(wanted.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(wanted, again, rtol=0, atol=most * scale, equal_nan=True)


def _first(batch: Any) -> Tensor | None:
    named = {path: t for path, t in by_path(batch).items() if t.ndim}
    return named[min(named, key=_rank)] if named else None


def _rank(path: Path, names: Sequence[str] = _NAMED) -> tuple[int, int]:
    """Sort key: tensors whose first dimension is most likely the batch come first; labels before inputs."""
    name = _name(path)
    return names.index(name) if name in names else len(names), -(path[0] if path and isinstance(path[0], int) else 0)


def _name(path: Path) -> str:
    return str(path[-1]) if path else ""


def _unclear(named: Mapping[Path, Tensor]) -> HeadPruneError:
    which = " and ".join(f"{'.'.join(map(str, path)) or 'the batch'} {list(t.shape)}" for path, t in named.items())
    return HeadPruneError(
        f"Which dimension of {which} counts examples, if any, cannot be told: taken apart along the first that is as long as the batch "
        "is large, the examples get other answers, and no batch has another size.",
        "Give batches of different sizes (one of them smaller), or keep what all examples share in the model.",
    )


# -- memory ------------------------------------------------------------------------------------------------

_OUT_OF_MEMORY = (
    "can't allocate memory", "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)  # fmt: skip


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        # Memory that PyTorch has reserved but does not use is free too, although the driver counts it as used.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    return int(psutil.virtual_memory().available)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error of any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Texts of the driver and CUDA's libraries, when they allocate themselves, and of the CPU's allocator.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def halving(items: Sequence[Any], size: int) -> Iterator[Any]:
    """Yield parts of ``items``, each a context manager; if memory runs out inside it, the part is retried in halves.

    >>> [list(part.items) for part in halving(range(5), 2)]
    [[0, 1], [2, 3], [4]]
    """
    start = 0
    while start < len(items):
        part = _Attempt(items[start : start + size])
        yield part
        if part.failed:
            size = max(1, len(part.items) // 2)
        else:
            start += len(part.items)


class _Attempt:
    def __init__(self, items: Sequence[Any]) -> None:
        self.items, self.failed = items, False

    def __enter__(self) -> Sequence[Any]:
        return self.items

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        if len(self.items) == 1:
            raise HeadPruneError(
                "Memory ran out even with the smallest stack.",
                "Use a smaller --batch-size or shorter examples; in Python also model.gradient_checkpointing_enable().",
            ) from error
        self.failed = True
        del error, trace
        clear_device_cache(garbage_collection=True)
        return True
