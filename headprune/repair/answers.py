"""The last step of a repair: output projections moved together, so that the model's answers come nearer to the dense model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headprune.divergence import logits_of
from headprune.errors import HeadPruneError
from headprune.loss import batch_size
from headprune.repair.crossed import blocks
from headprune.repair.places import Place
from headprune.repair.runner import Mixed, Runner, Seen
from headprune.repair.weights import AnswersRepair

STRENGTHS = tuple(10 ** (i / 2) for i in range(-8, 5))  # of the mean squared length of an answer's gradient
_GAIN = 0.999  # what is left of the error, at most: less gain may be rounding
_MOST_ROWS = 3072  # answers that are fitted to: the system is as wide
_MIXTURES = 1  # for every example, where there is room
_MOST_KEPT = 1 << 31  # bytes of inputs and slopes at once
_MOST_GRADIENTS = 1 << 28  # bytes of gradients at once
_NOT = "The answers are not fitted as a whole"


Parts = dict[str, list[tuple[Tensor, Tensor]]]
"""By output projection, of every batch: inputs ``[examples, tokens, kept]`` and slopes ``[directions, examples, tokens, out]``."""


@dataclass(frozen=True)
class Step:
    """Changes of weights, by output projection: ``W [in, out]`` and ``b [out]``, float64 on the CPU."""

    of: Mapping[str, tuple[Tensor, Tensor]]
    facts: AnswersRepair


class Answers:
    """The dense model's answers to calibration examples, and how to come nearer to them.

    What is asked for: of one vector of logits an example, the differences between classes (for a head that gives several labels
    at once, or numbers, all that it gives). Where these are too many, as many random directions as there is room for,
    others for every example.

    Args:
        runner: The model, dense as it is now.

    Attributes:
        note: Why there is nothing to do; "" if there is.
        mixtures: How many mixtures of examples are fitted to beside them.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.note, self.mixtures = runner, "", 0
        most = max(1, _MOST_ROWS // max(map(batch_size, runner.batches)))
        count = min(len(runner.batches), most)
        # Batches often come sorted by length: some from everywhere.
        chosen = [i * len(runner.batches) // count for i in range(count)]
        self._batches = [runner.batches[i] for i in chosen]
        try:
            self._known = self._answers(self._batches)
        except HeadPruneError as error:
            self.note = f"{_NOT}: {error.args[0]}"
            return
        if not all(bool(known.isfinite().all()) for known in self._known):
            self.note = f"{_NOT}: the dense model's are not all finite."
            return
        several = getattr(getattr(runner.model, "config", None), "problem_type", None) == "multi_label_classification"
        examples, classes = sum(map(len, self._known)), self._known[0].shape[1]
        every = several or classes == 1
        # Mixtures only where there is room for all that is asked for of them.
        times = min(_MIXTURES, _MOST_ROWS // (examples * (classes - (not every))) - 1)
        mixed = [m for m in runner.further if m.batch in chosen and m.shift <= times]
        self._left_out = _together(runner, chosen, mixed)
        self._batches += [m.inputs for m in mixed]
        self._known += self._answers([m.inputs for m in mixed])
        self.mixtures, examples = sum(len(m.rows) for m in mixed), sum(map(len, self._known))
        found = _directions(examples, classes, every, max(1, _MOST_ROWS // examples))
        self._count = found.shape[1]
        self._directions = torch.split(found, [len(known) for known in self._known])

    def _answers(self, batches: Sequence[Any]) -> list[Tensor]:
        """Of the model as it is now, ``[examples, classes]`` by batch."""
        with torch.no_grad(), self.runner.calm():
            found = [self._logits(self.runner.run(b, lambda *_: None), b).cpu().double() for b in batches]
        self.runner.passes += sum(map(len, found)) / self.runner.examples
        return found

    @property
    def _share(self) -> float:
        """Of a pass over all examples."""
        return sum(map(len, self._known)) / self.runner.examples

    def step(self, places: Mapping[str, tuple[Place, Tensor]]) -> Step | None:
        """Towards the dense model's answers, of the model as it is now: one Gauss-Newton step, with a ridge.

        Minimised is ``sum_i |r_i - J_i d|^2 + strength * v * |d|^2``: r_i is what example i's answer lacks of the dense
        model's, J_i its gradient with respect to all of these weights, d their change, v the mean squared length of a row
        of J. With fewer answers than weights this is solved for one number per answer (kernel ridge regression with the
        neural tangent kernel; Saunders et al. 1998, Jacot et al. 2018, arXiv:1806.07572), and the strength is the best by
        leaving out each example in turn, in closed form.

        Args:
            places: The output projections to change, with their inputs that stay.

        Returns:
            None where no strength does better than no change on examples left out.
        """
        try:
            lacking, kernel, parts = self._system(places)
        except HeadPruneError as error:
            self.note = f"{_NOT}: {error.args[0]}"
            return None
        if (
            not (bool(lacking.isfinite().all()) and bool(kernel.isfinite().all()))
            or float(kernel.diagonal().sum()) <= 0
        ):
            return None
        found = solved(kernel, lacking, self._left_out)
        if found is None:
            return None
        alpha, strength, held_out = found
        facts = AnswersRepair(_root(lacking), held_out, strength, lacking.shape[0], self.mixtures)
        return Step(self._change(places, alpha, parts), facts)

    def distance(self) -> float:
        """Root mean squared difference between this model's answers, as it is now, and the dense model's."""
        now = self._answers(self._batches)
        found = [_lacking(*each) for each in zip(now, self._known, self._directions, strict=True)]
        return _root(torch.cat(found))

    # -- the system --------------------------------------------------------------------------------

    def _system(self, places: Mapping[str, tuple[Place, Tensor]]) -> tuple[Tensor, Tensor, Parts]:
        """What is lacking ``[examples, directions]``, the inner products of its gradients, and what these were made of.

        In float64; the last is empty where there was no room to keep it.
        """
        rows = sum(map(len, self._known)) * self._count
        kernel = torch.zeros(rows, rows, dtype=torch.float64)
        lacking: list[Tensor] = []
        parts: Parts = {}
        groups = list(self._groups(places))
        for group in groups:
            lacking, parts = [], {name: [] for name in group}
            for batch, known, directions in zip(self._batches, self._known, self._directions, strict=True):
                logits, calls = self._slopes(batch, group, directions.transpose(0, 1))
                lacking.append(_lacking(logits, known, directions))
                for name in group:
                    parts[name].append(_joined(calls[name], places[name][1], len(known)))
            self.runner.passes += (1 + 2 * self._count) * self._share
            for name in group:
                _add_products(kernel, parts[name], places[name][0].has_bias)
        return torch.cat(lacking), kernel, parts if len(groups) == 1 else {}

    def _change(
        self, places: Mapping[str, tuple[Place, Tensor]], alpha: Tensor, parts: Parts
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The gradients weighted by ``alpha`` [examples, directions], summed."""
        found = {
            name: (torch.zeros_like(place.weight, device="cpu"), torch.zeros_like(place.bias, device="cpu"))
            for name, (place, _) in places.items()
        }

        def add(name: str, x: Tensor, slope: Tensor) -> None:
            (place, kept), (weight, bias) = places[name], found[name]
            weight[kept] += (x.flatten(0, 1).T @ slope.flatten(0, 1)).cpu().double()
            if place.has_bias:
                bias += slope.sum((0, 1)).cpu().double()

        weights = torch.split(alpha, [len(known) for known in self._known])
        for name, each in parts.items():
            for (x, slopes), weight in zip(each, weights, strict=True):
                add(name, x, torch.einsum("np,pnto->nto", weight.to(slopes.dtype).to(slopes.device), slopes))
        if not parts:
            for batch, weight, directions in zip(self._batches, weights, self._directions, strict=True):
                _, calls = self._slopes(batch, list(places), torch.einsum("np,npc->nc", weight, directions)[None])
                for name, (_, kept) in places.items():
                    x, slopes = _joined(calls[name], kept, len(weight))
                    add(name, x, slopes[0])
            self.runner.passes += 3 * self._share
        return found

    def _slopes(self, batch: Any, names: Sequence[str], directions: Tensor) -> tuple[Tensor, Seen]:
        """A batch's logits, and the slopes of their sums along ``directions`` [sums, examples, classes]."""
        shape: list[Tensor] = []

        def along(output: object) -> list[Tensor]:
            logits = self._logits(output, batch)
            shape.append(logits.detach())
            return [(logits * direction.to(logits)).sum() for direction in directions]

        seen = self.runner.slopes_of(batch, names, along)
        return shape[0], seen

    def _groups(self, places: Mapping[str, tuple[Place, Tensor]]) -> Iterator[list[str]]:
        """As many projections at once as there is room for."""
        tokens = sum(known.shape[0] for known in self._known) * self._tokens
        group: list[str] = []
        size = 0.0
        for name, (place, kept) in places.items():
            own = 4 * tokens * (len(kept) + self._count * place.weight.shape[1])
            if group and size + own > _MOST_KEPT:
                yield group
                group, size = [], 0.0
            group.append(name)
            size += own
        yield group

    @property
    def _tokens(self) -> int:
        """About how many there are in an example: of the longest batch."""
        longest = 1
        for batch in self._batches:
            values = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
            shapes = [v.shape for v in values if isinstance(v, Tensor)]
            longest = max([longest, *(s[1] for s in shapes if len(s) == 2), *(256 for s in shapes if len(s) > 2)])
        return longest

    def _logits(self, output: object, batch: Any) -> Tensor:
        logits = logits_of(output, batch if isinstance(batch, dict) else {})
        if logits.ndim != 2 or len(logits) != batch_size(batch) or hasattr(output, "start_logits"):
            raise HeadPruneError("an example has more than one answer (one for every token, say).")
        return logits


def _together(runner: Runner, chosen: Sequence[int], mixed: Sequence[Mixed]) -> Tensor:
    """What is left out together, ``[examples]``: every example by itself; with mixtures, all that are mixed with one another."""
    own = [blocks(batch_size(runner.batches[i])) + runner.first(i) for i in chosen]
    if not mixed:
        return torch.arange(sum(map(len, own)))
    by_batch = dict(zip(chosen, own, strict=True))
    return torch.cat([*own, *(by_batch[m.batch][m.rows] for m in mixed)])


def solved(kernel: Tensor, lacking: Tensor, left_out: Tensor) -> tuple[Tensor, float, float] | None:
    """Kernel ridge regression, its strength the best by leaving out each group of examples in turn.

    Args:
        kernel: ``[rows, rows]``, the rows being an example's directions, example by example.
        lacking: ``[examples, directions]``.
        left_out: ``[examples]``, the number of an example's group.

    Returns:
        The coefficients ``[examples, directions]``, the strength, and the root mean squared error on what was left out;
        None where no strength does better than nothing.
    """
    directions = lacking.shape[1]
    wanted, unit = lacking.flatten(), float(kernel.diagonal().mean())
    values, vectors = torch.linalg.eigh(kernel)
    values = values.clamp(min=0)
    along = vectors.T @ wanted
    groups = _rows_of_groups(left_out, directions)
    best = _GAIN * _root(lacking), float("inf")
    for strength in STRENGTHS:
        share = values / (values + strength * unit)
        left = wanted - vectors @ (share * along)
        errors = []
        for rows in groups:
            own = vectors[rows]
            one = torch.eye(rows.shape[1], dtype=kernel.dtype)
            errors.append(torch.linalg.solve(one - (own * share) @ own.mT, left[rows][..., None]).flatten())
        best = min(best, (_root(torch.cat(errors)), strength))
    held_out, strength = best
    if strength == float("inf"):
        return None
    return (vectors @ (along / (values + strength * unit))).view_as(lacking), strength, held_out


def _rows_of_groups(left_out: Tensor, directions: int) -> list[Tensor]:
    """The rows of every group, ``[groups, rows]``, those of groups of one size together."""
    order = left_out.argsort(stable=True)
    sizes = [n for n in left_out.bincount().tolist() if n]
    by_size: dict[int, list[Tensor]] = {}
    for own in torch.split(order, sizes):
        rows = own[:, None] * directions + torch.arange(directions)
        by_size.setdefault(len(own), []).append(rows.flatten())
    return [torch.stack(rows) for rows in by_size.values()]


def _lacking(logits: Tensor, known: Tensor, directions: Tensor) -> Tensor:
    """``[examples, directions]``."""
    return torch.einsum("nc,npc->np", known - logits.cpu().double(), directions)


def _directions(examples: int, classes: int, each: bool, most: int) -> Tensor:
    """``[examples, directions, classes]``, float64: along every answer, or along the differences between classes.

    An orthonormal basis; or, where that is more than ``most``, random orthonormal ones, others for every example.
    """
    whole = torch.eye(classes, dtype=torch.float64)
    if not each:
        whole -= 1.0 / classes
        whole = torch.linalg.eigh(whole)[1][:, 1:].T
    if len(whole) <= most:
        return whole.expand(examples, *whole.shape)
    drawn = torch.randn(examples, len(whole), most, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: Tensor = torch.linalg.qr(drawn)[0].mT @ whole
    return found


def _joined(
    calls: Sequence[tuple[Tensor, Tensor, Sequence[Tensor]]], kept: Tensor, examples: int
) -> tuple[Tensor, Tensor]:
    """All of a projection's calls: inputs ``[examples, tokens, kept]``, slopes ``[sums, examples, tokens, out]``."""
    if any(y[..., 0].numel() % examples for _, y, _ in calls):
        raise HeadPruneError("tokens cannot be told apart by example.")
    wide = torch.float64 if calls[0][0].dtype == torch.float64 else torch.float32

    def by_example(t: Tensor) -> Tensor:
        return t.to(wide).reshape(examples, -1, t.shape[-1])

    xs = [by_example(x[..., kept.to(x.device)]) for x, *_ in calls if len(kept)]
    slopes = [torch.stack([by_example(slope) for slope in each]) for *_, each in calls]
    joined = torch.cat(slopes, dim=2)
    return torch.cat(xs, dim=1) if xs else joined.new_zeros(*joined.shape[1:3], 0), joined


def _add_products(kernel: Tensor, parts: Sequence[tuple[Tensor, Tensor]], has_bias: bool) -> None:
    """Add one projection's inner products of gradients to ``kernel`` [rows, rows]; some outputs at a time, to save room."""
    rows, inputs, outputs = len(kernel), parts[0][0].shape[-1] + 1, parts[0][1].shape[-1]
    width = max(1, _MOST_GRADIENTS // (4 * rows * inputs))
    block = -(-rows // 4)
    for start in range(0, outputs, width):
        gradients = []
        for x, slopes in parts:
            some = slopes[..., start : start + width]
            each = [torch.einsum("nti,pnto->npio", x, some).flatten(2)]
            if has_bias:
                each.append(some.sum(2).transpose(0, 1))
            gradients.append(torch.cat(each, dim=2).flatten(0, 1))
        flat = torch.cat(gradients)
        for first in range(0, rows, block):  # what is on one side of the diagonal is on the other too
            found = (flat[first : first + block] @ flat[first:].T).cpu().to(kernel)
            kernel[first : first + block, first:] += found
            kernel[first + block :, first : first + block] += found[:, block:].T


def _root(values: Tensor) -> float:
    """Root mean square."""
    return float(values.double().square().mean().sqrt())
