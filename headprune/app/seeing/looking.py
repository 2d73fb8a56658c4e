"""heads.json is made here: profiles over a part of the data, and a few samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from headprune.app.data import Part
from headprune.app.documents import Heads, LayerProfile, Positions, Sample, SampleLayer
from headprune.app.models import LoadedModel
from headprune.app.seeing.labels import patch_positions, printable, token_labels
from headprune.attention import AttentionLayer
from headprune.batches import by_names
from headprune.inputs import without_labels
from headprune.seeing import HeadProfile, Profiler
from headprune.seeing.maps import Weights
from headprune.seeing.sequences import Grid, sequences_of
from headprune.seeing.weights import as_it_is, on_device, watched

_EXAMPLES = 64  # that profiles rest on, at most
_WEIGHTS = 3e8  # attention weights that are looked at for them, about
_LONGEST = 48  # positions of a sample whose rows are all held
_ROWS = 6  # rows that are held of a longer one
_BYTES = 1_400_000  # of all samples in the document
_WIDE = 20  # positions that a sample has to have, for more than one to be shown
_TITLE = 80  # characters


def look(loaded: LoadedModel, part: Part, layers: Sequence[AttentionLayer], seed: int = 0) -> Heads:
    """What the heads do on some examples of a part.

    Raises:
        HeadPruneError: No layer's weights can be seen.
    """
    longest = _longest(layers)
    samples = _samples(part, longest, getattr(loaded.processor, "all_special_ids", []))
    return _document(loaded, layers, list(_batches(part, layers)), samples, longest[0], seed)


def look_at(loaded: LoadedModel, inputs: dict[str, Any], layers: Sequence[AttentionLayer], seed: int = 0) -> Heads:
    """What the heads do in one input, which has one example.

    Raises:
        HeadPruneError: No layer's weights can be seen.
    """
    return _document(loaded, layers, [inputs], [(inputs, False)], _LONGEST, seed)


def _document(
    loaded: LoadedModel, layers: Sequence[AttentionLayer], batches: Sequence[Any], samples: Sequence[tuple[Any, bool]],
    longest: int, seed: int,
) -> Heads:  # fmt: skip
    started = time.monotonic()
    named = (getattr(loaded.processor, "sep_token_id", None), getattr(loaded.config, "sep_token_id", None))
    separators = {i for i in named if isinstance(i, int)}
    profiler = Profiler(loaded.model, batches, layers, separators, seed)
    profiles = profiler.profiles()
    seen = [layer for layer in layers if layer.name not in profiler.unseen]
    made = [_sample(loaded, seen, inputs, profiler.grid, cut, longest) for inputs, cut in samples]
    return Heads(
        examples=profiler.examples,
        tokens=profiler.tokens,
        repeated=profiler.repeated,
        unit="tokens" if profiler.grid is None else "patches",
        layers=tuple(
            LayerProfile(
                name=layer.name, index=layer.index, kind=layer.kind, heads=tuple(map(_rounded, profiles[layer.name])),
                unseen=profiler.unseen.get(layer.name, ""),
            )
            for layer in layers
        ),
        samples=tuple(sample for sample in made if sample.layers),
        seconds=round(time.monotonic() - started, 2),
    )  # fmt: skip


def _rounded(profile: HeadProfile) -> HeadProfile:
    short: dict[str, Any] = {k: round(v, 5) for k, v in asdict(profile).items() if isinstance(v, float)}
    return replace(profile, **short)


def _batches(part: Part, layers: Sequence[AttentionLayer]) -> Iterator[dict[str, Tensor]]:
    """Batches of examples of all lengths, as many as can be looked at soon."""
    order, lengths = part.order(), part.lengths()
    heads = sum(layer.num_heads for layer in layers)
    middle = lengths[order[len(order) // 2]]
    count = min(len(order), _EXAMPLES, max(2, int(_WEIGHTS / (heads * max(middle, 14) ** 2))))
    chosen = [order[i * len(order) // count] for i in range(count)]
    size = min(8, part.batch_size)
    for start in range(0, count, size):
        yield part.collate([part.features[i] for i in chosen[start : start + size]])


def _longest(layers: Sequence[AttentionLayer]) -> tuple[int, int]:
    """Positions of a sample whose rows are all held, and how many samples there are, so that the document stays small."""
    heads = sum(layer.num_heads for layer in layers)
    sides = [(min(_LONGEST, int((_BYTES * 0.75 / count / heads) ** 0.5)), count) for count in (3, 2, 1)]
    return next((pair for pair in sides if pair[0] >= _WIDE), sides[-1])


def _samples(part: Part, longest: tuple[int, int], special: Sequence[int]) -> list[tuple[Any, bool]]:
    """A few examples, and whether they were cut to be shown: texts that can be shown whole, if there are any."""
    most, count = longest
    order, lengths = part.order(), part.lengths()
    short = [i for i in order if 4 <= lengths[i] <= most]
    if short:
        wanted = [most * (k + 1) // (count + 1) if count > 1 else most * 2 // 3 for k in range(count)]
        order = list(dict.fromkeys(min(short, key=lambda i: abs(lengths[i] - n)) for n in wanted))
        return [_cut(part.collate([part.features[i]]), most, special) for i in order]
    chosen = dict.fromkeys(order[i * len(order) // count] for i in range(count))
    return [_cut(part.collate([part.features[i]]), most, special) for i in chosen]


def _cut(inputs: dict[str, Tensor], most: int, special: Sequence[int]) -> tuple[dict[str, Tensor], bool]:
    """An example with texts of so many tokens at most, and whether that is not all. A special token at the end stays there."""
    ids, cut = inputs.get("input_ids"), False
    ends = ids is not None and int(ids[0, -1]) in special
    found = dict(inputs)
    for name, t in inputs.items():
        if t.ndim == 2 and t.shape[1] > most and (ids is not None or name == "labels"):
            whole = ids is not None and t.shape == ids.shape and ends
            found[name] = torch.cat([t[:, : most - 1], t[:, -1:]], dim=1) if whole else t[:, :most]
            cut = True
    return found, cut


def _sample(
    loaded: LoadedModel, layers: Sequence[AttentionLayer], inputs: Any, grid: Grid | None, cut: bool, longest: int
) -> Sample:
    """One example as the heads see it."""
    given = on_device(loaded.model, without_labels(loaded.model, inputs))
    made = _Positions(loaded, given, grid)
    held: list[SampleLayer] = []

    def keep(weights: Weights) -> None:
        layer = weights.layer
        if not weights.ordered or (held and held[-1].layer == layer.index):  # a layer that runs again
            return
        queries, keys = weights.shape[2] // weights.windows, weights.shape[3]
        found = made.of(weights)
        if found is None:
            return
        rows = None if max(queries, keys) <= longest else made.some(queries)
        whole = weights.whole()[0]
        if weights.windows > 1:  # the mean over windows
            whole = torch.stack(whole.chunk(weights.windows, dim=1)).mean(dim=0)
        part = whole if rows is None else whole[:, list(rows)]
        held.append(SampleLayer.packed(layer.index, part[..., : found[2]].cpu().float().numpy(), *found[:2], rows))

    with as_it_is(loaded.model):
        watched(loaded.model, layers, given, 1, keep)
    return Sample(title=made.title, positions=made.found, layers=tuple(held), shortened=cut)


class _Positions:
    """What stands at the queries and keys of layers, by name."""

    def __init__(self, loaded: LoadedModel, inputs: Any, grid: Grid | None) -> None:
        self.found: dict[str, Positions] = {}
        self.grid, self.title = grid, ""
        self.image = next((t[0] for t in inputs.values() if t.ndim == 4 and t.is_floating_point()), None)
        rows = by_names(inputs)
        sequences = sequences_of(loaded.model, inputs, rows)
        self.texts: dict[str, tuple[str, ...]] = {}
        pair = sequences.source is not sequences.target
        for name, sequence in (
            ("source" if pair else "input", sequences.source),
            *([("target", sequences.target)] if pair else []),
        ):
            if sequence.ids is not None and hasattr(loaded.processor, "convert_ids_to_tokens"):
                self.texts[name] = token_labels(sequence.ids[0].tolist(), loaded.processor)
        if sequences.source.ids is not None and self.texts:
            text = loaded.processor.decode(sequences.source.ids[0].tolist(), skip_special_tokens=True)
            text = " ".join(printable(text.strip()).replace("·", " ").split())
            self.title = text if len(text) <= _TITLE else f"{text[:_TITLE]}…"

    def of(self, weights: Weights) -> tuple[str, str, int] | None:
        """The names of a layer's queries and keys, and how many keys there are without sinks; None where it is not known."""
        layer, queries, keys = weights.layer, weights.shape[2] // weights.windows, weights.shape[3]
        if self.grid is not None:
            names = [self._patches(n, weights.windows) for n in (queries, keys)]
            return None if None in names else (str(names[0]), str(names[1]), keys)
        pair = "source" in self.texts
        asks = "target" if pair and layer.kind != "encoder" else "source" if pair else "input"
        looks = "source" if layer.kind == "cross" else asks
        if any(name not in self.texts for name in (asks, looks)):
            return None
        width = len(self.texts[looks])
        if len(self.texts[asks]) != queries or keys < width or (keys > width and layer.kind != "decoder"):
            return None
        for name in (asks, looks):
            self.found.setdefault(name, Positions(labels=self.texts[name]))
        return asks, looks, width

    def _patches(self, count: int, windows: int) -> str | None:
        grid = self.grid.of(count) if self.grid is not None else None
        if grid is None:
            return None
        name = "window" if windows > 1 else "input" if grid == self.grid else f"{grid.rows} x {grid.columns} patches"
        self.found.setdefault(name, patch_positions(grid, self.image if windows == 1 else None))
        return name

    def some(self, count: int) -> tuple[int, ...]:
        """A few positions: the first, and others spread over the rest, in the middle of an image's rows."""
        grid = self.grid.of(count) if self.grid is not None else None
        if grid is None:
            return tuple(sorted({i * (count - 1) // (_ROWS - 1) for i in range(_ROWS)}))
        places = [(1, 1), (1, 3), (2, 2), (3, 1), (3, 3)]
        patches = [grid.before + (grid.rows * r // 4) * grid.columns + grid.columns * c // 4 for r, c in places]
        return tuple(dict.fromkeys([0, *patches]))
