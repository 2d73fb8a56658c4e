"""Which tensors of a batch hold one part for every example, and along which dimension: only this file decides that.

It need not be the first dimension. A causal mask ``[tokens, tokens]`` has as many rows as there are examples if the texts are
as long as the batch is large, and a module may take ``[tokens, batch, width]``. So `find_rows` looks, in this order, at the
names of transformers' arguments; at batches of different sizes; and at the model's answers when the examples come in
another order, some of them twice: under the right reading, each example gets the same answer as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product
from typing import Any

import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError
from headprune.inputs import ADDED, LABELS, tensors
from headprune.memory import is_out_of_memory

Path = tuple[str | int, ...]
"""Where a tensor is in a batch: keys and positions, from the outside in."""
Reading = dict[Path, int | None]
"""For tensors by their path, the dimension that counts examples; None for a tensor that all examples share."""

# Arguments of transformers' models that have one row for every example by definition.
_NAMED = (
    *LABELS, "input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "attention_mask", "token_type_ids",
    "bbox", "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", *ADDED,
)  # fmt: skip
_TRIED = 64  # readings at most


@dataclass(frozen=True)
class Rows:
    """How examples lie in batches.

    Attributes:
        dims: What `find_rows` found. For a tensor that is not in it, its name decides, or nothing.
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
        raise HeadPruneError(
            f"It is not known whether {_called(path)} has one part for every example.",
            "Look at it together with its model (headprune.batches.find_rows).",
        )

    def size(self, batch: Any) -> int:
        """Examples in a batch.

        Raises:
            HeadPruneError: It has no tensor with a part for every example.
        """
        found = dict(_walk(batch))
        for path in sorted(found, key=_rank):  # known names first: `find_rows` may not have seen the others
            if (dim := self.dim(path)) is not None and found[path].ndim > dim:
                return found[path].shape[dim]
        raise HeadPruneError("A batch holds no tensor.", "Give dicts of tensors, or pairs (inputs, labels).")

    def take(self, batch: Any, index: Sequence[int]) -> Any:
        """Some examples of a batch, in this order; tensors that all examples share stay whole."""
        return _take(batch, list(index), self.dim)

    def singles(self, batch: Any) -> list[Any]:
        """A batch as batches of one example."""
        return [self.take(batch, [i]) for i in range(self.size(batch))]

    def table(self, batch: Any, name: str) -> Tensor | None:
        """The tensor of this name if it is ``[examples, tokens]``, as a mask of padding is, unlike a causal mask; else None."""
        found = batch.get(name) if isinstance(batch, Mapping) else None
        if not isinstance(found, Tensor) or found.ndim != 2:
            return None
        told = [dim for path, dim in self.dims.items() if path[-1:] == (name,)]
        return found if not told or told[0] == 0 else None

    def masks(self, batch: Any) -> list[Tensor]:
        """All tables ``[examples, tokens]`` of zeros and ones."""
        every = [t for path, t in _walk(batch) if t.ndim == 2 and self.dim(path) == 0]
        return [t for t in every if bool(((t == 0) | (t == 1)).all())]


def is_empty(batch: Any) -> bool:
    """Whether a batch holds no example: its labels, or else its first tensor, have no element."""
    first = _first(batch)
    return first is not None and not first.numel()


def apparent_size(batch: Any) -> int:
    """How many examples a batch seems to hold, by its labels or else its first tensor: for messages and counts only."""
    first = _first(batch)
    return 0 if first is None else first.shape[0]


def _first(batch: Any) -> Tensor | None:
    found = {path: t for path, t in _walk(batch) if t.ndim}
    return found[min(found, key=_rank)] if found else None


def cost_of(batch: Any) -> float:
    """About how long a pass over a batch takes, relative to others."""
    return float(sum(t.numel() for t in tensors(batch)))


def by_names(example: Any) -> Rows:
    """How examples lie in one batch, without a model to ask: by names, else along the first dimension.

    Raises:
        HeadPruneError: A tensor may be shared, or have its examples in another dimension.
    """
    size = apparent_size(example)
    dims: Reading = {}
    for path, t in _walk(example):
        if _name(path) in _NAMED or not t.ndim:
            continue
        if size > 1 and list(t.shape).count(size) > 1:
            raise _open({path: t})
        dims[path] = 0 if t.shape[0] == size else None
    return Rows(dims)


def find_rows(
    model: nn.Module,
    batches: Sequence[Any],
    answers: Callable[[Any], Sequence[Tensor]],
    *,
    count: Callable[[Any], int | None] | None = None,
) -> Rows:
    """How examples lie in these batches, none of which is empty.

    Args:
        model: Its arguments' names count if it is a transformers model.
        batches: Dicts, tensors, or pairs ``(inputs, labels)``.
        answers: The model's answers to a batch: tensors, at least one of which has a part for each example.
        count: How many examples a batch holds, if the answers show it (one loss for each; None if the model does not
            run): then labels are tried too.

    Raises:
        HeadPruneError: It is not clear what the dimensions of a tensor mean; the error names it.
    """
    known = [dict(_walk(batch)) for batch in batches]
    paths = list(dict.fromkeys(path for found in known for path, t in found.items() if t.ndim))
    if not paths:
        raise HeadPruneError("A batch holds no tensor.", "Give dicts of tensors, or pairs (inputs, labels).")
    names = _NAMED if hasattr(getattr(model, "config", None), "model_type") else (*LABELS, *ADDED)
    smallest = min(range(len(batches)), key=lambda i: sum(t.numel() for t in known[i].values()))
    told = count(batches[smallest]) if count is not None else None
    trial = _Trial(batches[smallest], answers)
    fallback: Reading | None = None
    doubtful: dict[Path, Tensor] = {}
    for lead in _leads(known, paths, names):
        sizes = [found[lead[0]].shape[lead[1]] if lead[0] in found else None for found in known]
        size = sizes[smallest]
        if size is None or (told is not None and size != told):
            continue
        options = _options(known, paths, names, sizes, lead, told is not None)
        sure = told is not None or _name(lead[0]) in names or lead == ((1,), 0)
        if fallback is None and sure and all(len(dims) == 1 for dims in options.values()):
            return Rows({path: dims[0] for path, dims in options.items()})
        for reading in islice(_readings(options), _TRIED):
            if trial.agrees(reading, size):
                return Rows(reading)
        if fallback is None:
            fallback = next(_readings(options))
            if max(s or 0 for s in sizes) > 1:
                doubtful = {
                    p: t for p, t in known[smallest].items() if sum(d is not None for d in options.get(p, ())) > 1
                }
    if doubtful and trial.ran:  # if the model does not run at all, its own error comes later
        raise _open(doubtful)
    # If examples depend on one another in the model, no reading gives the same answers; then the likeliest one is used.
    if fallback is None:
        raise HeadPruneError(
            f"No dimension of a batch's tensors counts its {told} examples."
            if told
            else "A batch's examples are nowhere.",
            "Give dicts of tensors, or pairs (inputs, labels), with one label for every example.",
        )
    return Rows(fallback)


class _Trial:
    """Tries readings of a batch: its examples come in another order, some twice, and each must get the same answer."""

    def __init__(self, batch: Any, answers: Callable[[Any], Sequence[Tensor]]) -> None:
        self.batch, self._answers = batch, answers
        self._whole: list[Tensor] | None = None
        self._sides = {side for t in tensors(batch) for side in t.shape}

    def agrees(self, reading: Reading, size: int) -> bool:
        """Whether the examples, read this way, get the same answers as in the whole batch."""
        # More rows than before, so that one row of a table is not broadcast; and a number that no dimension has.
        more = next(n for n in range(size + 1, size + 2 + len(self._sides)) if n not in self._sides)
        index = [(i + 1) % size for i in range(more)]
        try:
            if self._whole is None:
                self._whole = self._ask(self.batch)
            now = self._ask(_take(self.batch, index, reading.__getitem__))
        except Exception as error:  # a wrong reading may raise any error
            if is_out_of_memory(error):
                raise
            return False
        if len(now) != len(self._whole):
            return False
        found = [_same_rows(whole, new, index, size) for whole, new in zip(self._whole, now, strict=True)]
        return True in found and False not in found

    @property
    def ran(self) -> bool:
        """Whether the model takes the batch as it is."""
        return self._whole is not None

    def _ask(self, batch: Any) -> list[Tensor]:
        with torch.no_grad():
            return [t.detach() for t in self._answers(batch)]


def _same_rows(whole: Tensor, now: Tensor, index: Sequence[int], size: int) -> bool | None:
    """Whether an answer has the same parts for the same examples; None if it has no part for each example."""
    if whole.shape == now.shape:
        return None
    differing = [d for d, (a, b) in enumerate(zip(whole.shape, now.shape, strict=False)) if a != b]
    if whole.ndim != now.ndim or len(differing) != 1 or whole.shape[differing[0]] % size:
        return False
    dim = differing[0]
    each = whole.shape[dim] // size  # tokens flattened into rows, maybe
    rows = [i * each + j for i in index for j in range(each)]
    wanted = whole.index_select(dim, torch.tensor(rows, device=whole.device))
    if wanted.shape != now.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(wanted, now)
    finite = wanted.isfinite() & now.isfinite()
    most = 1e-3 if wanted.dtype in (torch.float32, torch.float64) else 5e-2
    scale = wanted[finite].abs().max() if bool(finite.any()) else 0.0
    return bool(((wanted - now)[finite].abs() <= most * scale).all())


def _leads(
    known: Sequence[Mapping[Path, Tensor]], paths: Sequence[Path], names: Sequence[str]
) -> Iterator[tuple[Path, int]]:
    """Tensors and their dimensions that may count examples, the likeliest first."""
    ranked = sorted(paths, key=_rank)
    named = [path for path in ranked if _name(path) in names]
    if named:
        yield named[0], 0
        return
    for path in ranked:
        for dim in range(min(found[path].ndim for found in known if path in found)):
            yield path, dim


def _options(
    known: Sequence[Mapping[Path, Tensor]], paths: Sequence[Path], names: Sequence[str], sizes: Sequence[int | None],
    lead: tuple[Path, int], labels: bool,
) -> dict[Path, list[int | None]]:  # fmt: skip
    """The dimensions that may count examples, for every tensor, the likeliest first; only one where there is no doubt.

    Args:
        sizes: Of the batches, as ``lead`` says.
        labels: Whether labels can be tried.
    """
    fitting: dict[Path, list[int]] = {}
    varied: dict[Path, bool] = {}
    for path in paths:
        shapes = [(found[path].shape, size) for found, size in zip(known, sizes, strict=True) if path in found and size]
        least = min((len(shape) for shape, _ in shapes), default=0)
        fitting[path] = [d for d in range(least) if all(shape[d] == size for shape, size in shapes)]
        varied[path] = len({size for _, size in shapes}) > 1
    coincidence = any(len(dims) > 1 for dims in fitting.values())
    options: dict[Path, list[int | None]] = {}
    for path, dims in fitting.items():
        own = path == lead[0] or (0 in dims and _name(path) in names)
        untried = path[:1] == (1,) and not labels  # of a pair, what the model does not see
        if own:
            options[path] = [lead[1] if path == lead[0] else 0]
        elif not dims:
            options[path] = [None]
        elif untried or (len(dims) == 1 and varied[path] and not coincidence):
            options[path] = [dims[0]]
        else:
            options[path] = [*dims, None]
    return options


def _readings(options: Mapping[Path, Sequence[int | None]]) -> Iterator[Reading]:
    """All combinations, the likeliest first: those in which few tensors have another than their likeliest dimension."""
    likely = {path: dims[0] for path, dims in options.items()}
    open_ = [path for path, dims in options.items() if len(dims) > 1]
    for count in range(len(open_) + 1):
        for paths in combinations(open_, count):
            for dims in product(*(options[path][1:] for path in paths)):
                yield {**likely, **dict(zip(paths, dims, strict=True))}


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a batch, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk(part, (*path, key))
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            yield from _walk(part, (*path, i))


def _take(value: Any, index: list[int], dim_of: Callable[[Path], int | None], path: Path = ()) -> Any:
    if isinstance(value, Tensor):
        dim = dim_of(path) if value.ndim else None
        return value if dim is None else value.index_select(dim, torch.tensor(index, device=value.device))
    if isinstance(value, Mapping):
        return {k: _take(v, index, dim_of, (*path, k)) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_take(v, index, dim_of, (*path, i)) for i, v in enumerate(value))
    return value


def _rank(path: Path) -> tuple[int, int]:
    """How likely a tensor's first dimension is to count examples; labels before inputs."""
    name = _name(path)
    return _NAMED.index(name) if name in _NAMED else len(_NAMED), -(path[0] if path and isinstance(path[0], int) else 0)


def _name(path: Path) -> str:
    return str(path[-1]) if path else ""


def _called(path: Path) -> str:
    """A tensor's name, for messages."""
    return ".".join(map(str, path)) or "the batch"


def _open(found: Mapping[Path, Tensor]) -> HeadPruneError:
    told = " and ".join(f"{_called(path)} {list(t.shape)}" for path, t in found.items())
    return HeadPruneError(
        f"Which dimension of {told} counts examples, if any, cannot be told: several are as long as the batch is large, "
        "and the model's answers do not say.",
        "Give batches of different sizes (one of them smaller), or keep what all examples share in the model.",
    )
