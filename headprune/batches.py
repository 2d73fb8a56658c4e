"""Which tensors of a batch hold one part for every example, and along which dimension.

It need not be the first dimension. A causal mask ``[tokens, tokens]`` has as many rows as there are examples if the texts are
as long as the batch is large, and a module may take ``[tokens, batch, width]``. So `find_rows` goes by the names of transformers'
arguments and by batches of different sizes; what these leave open is tried on the model, whose answers to the examples must stay
the same when they come in another order, and is refused if they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError
from headprune.inputs import ADDED, LABELS, tensors
from headprune.memory import is_out_of_memory

Path = tuple[str | int, ...]
"""Where a tensor is in a batch: keys and positions, from the outside in."""
Answers = Callable[[Any], Sequence[Tensor]]

# Arguments of transformers' models that have one row for every example by definition.
_NAMED = (
    *LABELS, "input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "attention_mask", "token_type_ids",
    "bbox", "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", *ADDED,
)  # fmt: skip
_NO_TENSOR = HeadPruneError("A batch holds no tensor.", "Give dicts of tensors, or pairs (inputs, labels).")


@dataclass(frozen=True)
class Rows:
    """How examples lie in batches.

    Attributes:
        dims: From `find_rows`: for tensors by their path, the dimension that counts examples; None for a tensor that all examples
            share. For a tensor that is not in it, its name decides.
    """

    dims: Mapping[Path, int | None] = field(default_factory=dict)

    def dim(self, path: Path) -> int | None:
        """The dimension of a tensor that counts examples; None if all examples share it.

        Raises:
            HeadPruneError: That is not known.
        """
        if path in self.dims:
            return self.dims[path]
        if _name(path) in _NAMED:
            return 0
        message = f"It is not known whether {'.'.join(map(str, path))} has one part for every example."
        raise HeadPruneError(message, "Look at it together with its model (headprune.batches.find_rows).")

    def size(self, batch: Any) -> int:
        """Examples in a batch.

        Raises:
            HeadPruneError: It has no tensor with a part for every example.
        """
        named = _by_path(batch)
        for path in sorted(named, key=_rank):  # known names first: `find_rows` may not have seen the others
            if (dim := self.dim(path)) is not None and named[path].ndim > dim:
                return named[path].shape[dim]
        raise _NO_TENSOR

    def take(self, batch: Any, index: Sequence[int]) -> Any:
        """Some examples of a batch, in this order; tensors that all examples share stay whole."""

        def some(path: Path, value: Tensor) -> Tensor:
            dim = self.dim(path) if value.ndim else None
            return value if dim is None else value.index_select(dim, torch.tensor(list(index), device=value.device))

        return _map(batch, some)

    def singles(self, batch: Any) -> list[Any]:
        """A batch as batches of one example."""
        return [self.take(batch, [i]) for i in range(self.size(batch))]

    def table(self, batch: Any, name: str) -> Tensor | None:
        """The tensor of this name if it is ``[examples, tokens]``, as a mask of padding is, unlike a causal mask; else None."""
        value = batch.get(name) if isinstance(batch, Mapping) else None
        dim = next((dim for path, dim in self.dims.items() if path[-1:] == (name,)), 0)
        return value if isinstance(value, Tensor) and value.ndim == 2 and dim == 0 else None

    def lengths(self, batch: Any) -> Tensor:
        """The tokens of every example ``[examples]``, by the first table of zeros and ones; 0 without one."""
        tables = [t for path, t in _by_path(batch).items() if t.ndim == 2 and self.dim(path) == 0]
        mask = next((t for t in tables if bool(((t == 0) | (t == 1)).all())), None)
        return torch.zeros(self.size(batch), dtype=torch.long) if mask is None else (mask != 0).sum(1)

    def unlike(self, batch: Any) -> list[int]:
        """The numbers of up to three examples of a batch, of different length: a model may cut padding out."""
        lengths = self.lengths(batch)
        if not lengths.any():
            return list(range(min(len(lengths), 3)))
        order = lengths.argsort().tolist()
        return list(dict.fromkeys((order[-1], order[0], order[len(order) // 2])))

    def lead(self, batch: Any, shapes: Callable[[Any], Sequence[torch.Size]]) -> bool:
        """Whether some tensors within the model have the examples' rows, one example after another.

        Compares how many rows two and three examples have; gates alone would not show it where the loss reads only one token.

        Args:
            shapes: The shapes of these tensors, when the model sees a batch.
        """
        last = 1 % self.size(batch)
        two, three = (shapes(self.take(batch, index)) for index in ([0, last], [0, last, 0]))
        return [(3 * shape[0], shape[1:]) for shape in two] == [(2 * shape[0], shape[1:]) for shape in three]


def is_empty(batch: Any) -> bool:
    """Whether a batch holds no example: its labels, or else its first tensor, have no element."""
    first = _first(batch)
    return first is not None and not first.numel()


def nonempty(batches: Iterable[Any], purpose: str) -> list[Any]:
    """The batches that hold examples.

    Raises:
        HeadPruneError: There is none.
    """
    kept = [batch for batch in batches if not is_empty(batch)]
    if not kept:
        raise HeadPruneError(f"There are no examples to {purpose}.", "Give batches of at least one example.")
    return kept


def apparent_size(batch: Any) -> int:
    """How many examples a batch seems to hold, by its labels or else its first tensor: for messages and counts only."""
    first = _first(batch)
    return 0 if first is None else first.shape[0]


def cost_of(batch: Any) -> float:
    """About how long a pass over a batch takes, relative to others."""
    return float(sum(t.numel() for t in tensors(batch)))


def by_names(example: Any) -> Rows:
    """How examples lie in one batch, without a model to try it on: by names, else along the first dimension.

    Raises:
        HeadPruneError: A tensor may be shared, or have its examples in another dimension.
    """
    size, unnamed = apparent_size(example), {}
    for path, t in _by_path(example).items():
        if t.ndim and _name(path) not in _NAMED:
            if size > 1 and list(t.shape).count(size) > 1:
                raise _unclear({path: t})
            unnamed[path] = 0 if t.shape[0] == size else None
    return Rows(unnamed)


def shaped(example: Mapping[str, Any], batch: int, length: int | None = None) -> dict[str, Any]:
    """A batch of a given size (and length, for texts), made by repeating an example's rows (and tokens).

    The values of the tokens do not change the time, and a full attention mask is the worst case.
    """
    rows = by_names(example)
    repeated: dict[str, Any] = rows.take(example, [i % rows.size(example) for i in range(batch)])
    ids = example.get("input_ids")
    tokens = ids.shape[1] if isinstance(ids, Tensor) else None
    if length is None or tokens is None:
        return repeated
    for key in repeated:
        value = rows.table(repeated, key)
        if value is not None and value.shape[1] == tokens:
            value = value[:, torch.arange(length) % tokens]
            repeated[key] = torch.ones_like(value) if key == "attention_mask" else value
    return repeated


def find_rows(model: nn.Module, batches: Sequence[Any], answers: Answers) -> Rows:
    """How examples lie in these batches, none of which is empty.

    The first dimension of the labels counts them, else that of a tensor which transformers names, else that of the first tensor.
    Other tensors have them along the first dimension that is as long in every batch. Where that may be chance, it is tried; and then
    that all examples share these tensors.

    Args:
        model: Its arguments' names count if it is a transformers model.
        batches: Dicts, tensors, or pairs ``(inputs, labels)``.
        answers: The model's answers to a batch: tensors, at least one of which has a part for each example.

    Raises:
        HeadPruneError: It is not clear what the dimensions of a tensor mean; the error names it.
    """
    known = [{path: t for path, t in _by_path(batch).items() if t.ndim} for batch in batches]
    paths = list(dict.fromkeys(path for named in known for path in named))
    if not paths:
        raise _NO_TENSOR
    names = _NAMED if hasattr(getattr(model, "config", None), "model_type") else (*LABELS, *ADDED)
    lead = min(paths, key=lambda path: _rank(path, names))
    sizes = [len(named[lead]) if lead in named else 0 for named in known]
    layout: dict[Path, int | None] = {lead: 0}
    doubtful: dict[Path, bool] = {}  # whether several dimensions may count examples
    for path in paths:
        shapes = [(named[path].shape, size) for named, size in zip(known, sizes, strict=True) if path in named and size]
        least = min((len(shape) for shape, _ in shapes), default=0)
        dims = [dim for dim in range(least) if all(shape[dim] == size for shape, size in shapes)]
        layout.setdefault(path, dims[0] if dims else None)
        certain = layout[path] == 0 and (_name(path) in names or path[:1] == (1,))  # (1,): a pair's labels
        if dims and not certain and (path == lead or len(dims) > 1 or len({size for _, size in shapes}) == 1):
            doubtful[path] = path == lead or len(dims) > 1
    holding = [path for path, dim in layout.items() if dim is not None and path != lead]
    # Labels count the examples, and only one tensor can hold them.
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
    """Whether examples get the answers that they get in their batch, taken out in another order and some twice.

    True also if the model does not run, whose own error comes later; None if its answers show no examples.

    Raises:
        HeadPruneError: As the answers.
    """
    # More examples than before, so that one row of a table is not broadcast; and a number that no dimension has.
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
    """Whether an answer has the same parts for the same examples, along whichever dimension."""
    dim = next((d for d, (a, b) in enumerate(zip(whole.shape, again.shape, strict=False)) if a != b), -1)
    each = whole.shape[dim] // size  # tokens flattened into rows, maybe
    parts = torch.tensor([i * each + j for i in index for j in range(each)], dtype=torch.long, device=whole.device)
    wanted = whole.index_select(dim, parts)
    if wanted.shape != again.shape or not wanted.is_floating_point():
        return torch.equal(wanted, again)
    most = 1e-3 if wanted.dtype in (torch.float32, torch.float64) else 5e-2
    scale = float(wanted.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(wanted, again, rtol=0, atol=most * scale, equal_nan=True)


def _by_path(batch: Any) -> dict[Path, Tensor]:
    """Every tensor in a batch."""
    named: dict[Path, Tensor] = {}
    _map(batch, named.setdefault)
    return named


def _map(value: Any, change: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """A batch with ``change(path, tensor)`` in place of every tensor; mappings become dicts, and lists tuples."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, Mapping):
        return {k: _map(v, change, (*path, k)) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_map(v, change, (*path, i)) for i, v in enumerate(value))
    return value


def _first(batch: Any) -> Tensor | None:
    named = {path: t for path, t in _by_path(batch).items() if t.ndim}
    return named[min(named, key=_rank)] if named else None


def _rank(path: Path, names: Sequence[str] = _NAMED) -> tuple[int, int]:
    """How likely a tensor's first dimension is to count examples; labels before inputs."""
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
