"""The last step of a repair: a Gauss-Newton step of all linear layers together, towards the dense answers.

Unlike the fit of a single layer, it accounts for how all layers' errors add up. It takes three passes or more, so plans
are compared without it. The weights change only along the coordinates in which the answers' gradients are longest: a
few thousand, or more if an answer has one direction only (as with two classes), because its gradients need more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from headprune.errors import HeadPruneError
from headprune.inputs import tensors
from headprune.parallel import current
from headprune.repairing.coordinates import Coordinates, Parts, choose_coordinates
from headprune.repairing.examples import MOST_ROWS, DenseAnswers, directions, logits_by_example
from headprune.repairing.layers import downhill
from headprune.repairing.mixtures import ENOUGH
from headprune.repairing.projections import LinearLayer
from headprune.repairing.results import AnswersRepair, AnswersStep, Changes
from headprune.repairing.runner import Seen

_MOST = 1 << 14  # coordinates of all layers together, with several directions per answer
_MOST_OF_ONE = 1 << 16  # the same, with one direction per answer

STRENGTHS = tuple(10 ** (i / 2) for i in range(-8, 5))  # of the mean squared length of an answer's gradient
_START = 10**-0.5  # the strength that is tried first
_GAIN = 0.999  # a step must lower the error below this share of the old one: less gain may be rounding
_ROUNDED = 1e-2  # strengths below it need float64
_MOST_TRIED = 1024  # rows that strengths are compared on, where an example has several
_ABOUT = 1.05  # times the least error on left-out examples: as good
_WEAKER = 2  # strengths at most that the one taken is below the best: a longer step leaves where the gradients hold
_ROWS_AT_ONCE, _COORDINATES_AT_ONCE = 256, 4096  # that are converted to float64 at once
_MOST_HELD = 1 << 29  # bytes of inputs, outputs and slopes of the examples that run at once
_MOST_KEPT = 1 << 28  # bytes of inputs and slopes from which coordinates are chosen: some hundred examples suffice

Places = Mapping[str, tuple[LinearLayer, Tensor]]
"""Linear layers to change, with the indices of their kept inputs."""


def gauss_newton(answers: DenseAnswers, places: Places) -> AnswersStep | None:
    """One Gauss-Newton step with a ridge, from the current model towards the dense model's answers.

    It minimises ``sum_i |r_i - J_i d|^2 + strength * v * |d|^2``: r_i is the dense answer to example i minus the
    current one, J_i the answer's gradient with respect to all of these weights, d their change, v the mean squared
    length of a row of J. d is restricted to the coordinates in which J is longest (`choose_coordinates`). One number per answer is
    solved for (kernel ridge regression with the neural tangent kernel; Saunders et al. 1998, Jacot et al. 2018,
    arXiv:1806.07572). The strength is found by leaving out each group of examples in turn, in closed form.

    Returns:
        None if no strength does better than no change on left-out examples.
    """
    before, residuals, gradients, coordinates = _system(answers.cut(_most_at_once(answers, places)), places)
    if not bool(residuals.isfinite().all() & gradients.isfinite().all()) or not bool(gradients.any()):
        return None
    kernel, unit = kernel_of(gradients)

    def changes(alpha: Tensor) -> Changes:
        return weights_of(coordinates.matrices(_sum(gradients, alpha) / unit), places)

    def step(alpha: Tensor, strength: float, held_out: float) -> AnswersStep:
        @cache
        def on_fold(fold: int) -> Changes:
            own = (answers.folds == fold).repeat_interleave(residuals.shape[1])
            alone = torch.zeros_like(alpha)
            _, alone[own] = _left_out(kernel[own][:, own], residuals.flatten()[own], [], strength)
            return changes(alone)

        facts = AnswersRepair(before, held_out, strength, len(residuals))
        others = int((answers.folds == 1).sum()) if answers.others else 0
        return AnswersStep(changes(alpha), facts, on_fold, others)

    steps = (step(*solution) for solution in kernel_ridge(kernel, residuals, answers.left_out, _ABOUT))
    found = next(steps, None)
    return found and replace(found, careful=cache(partial(next, steps, None)))


def step_multiplications(examples: int, others: int, classes: int) -> float:
    """About how many a step takes, beside its passes: those of the kernel and of its factors at some strengths.

    Args:
        examples: How many there are; of few, mixtures are fitted to as well.
        others: How many further ones are fitted to.
        classes: Directions of an answer.
    """
    fitted = min(max(examples, min(2 * examples, ENOUGH)), MOST_ROWS)
    each = directions(classes, fitted)
    rows = each * fitted + min(each * others, MOST_ROWS)
    return rows**2 * ((_MOST_OF_ONE if each == 1 else _MOST) + 4.0 * rows)


def _most_at_once(answers: DenseAnswers, places: Places) -> int:
    """How many examples' inputs, outputs and slopes of all layers take `_MOST_HELD`, by one that is as long as any."""
    lengths = [
        max(t.numel() for t in tensors(b)) / len(known) for b, known in zip(answers.batches, answers.known, strict=True)
    ]
    longest = lengths.index(max(lengths))
    runner = answers.runners[longest]
    one = runner.rows.take(answers.batches[longest], [0])
    seen = runner.slopes_of(one, places, lambda output: [logits_by_example(runner, output, one).sum()])
    size = sum(4 * (x.numel() + (1 + answers.count) * y.numel()) for calls in seen.values() for x, y, _ in calls)
    runner.count(3)
    return max(1, _MOST_HELD // max(1, size))


def _system(answers: DenseAnswers, places: Places) -> tuple[float, Tensor, Tensor, Coordinates]:
    """The answers' root mean squared error, residuals along the directions ``[examples, directions]``, the gradients
    there ``[examples * directions, coordinates]``, and the coordinates."""
    gaps: list[Tensor] = []
    residuals: dict[int, Tensor] = {}
    kept: dict[int, Parts] = {}
    # In this order the first few are far apart: batches often come sorted by length.
    order = sorted(range(len(answers.batches)), key=lambda i: i * 0.6180339887 % 1)

    def seen(i: int) -> tuple[Tensor, Tensor, Parts]:
        gap, off, calls = _slopes(answers, i, list(places))
        return gap, off, {n: joined(calls[n], own, p.has_bias, len(off)) for n, (p, own) in places.items()}

    # Every rank runs the first batches, to choose the coordinates; the others are shared out.
    for i in order:
        gap, residuals[i], kept[i] = seen(i)
        gaps.append(gap)
        size = sum(t.numel() * t.element_size() for own in kept.values() for pair in own.values() for t in pair)
        if size > _MOST_KEPT:
            break
    most = _MOST_OF_ONE if answers.count == 1 else _MOST
    # Of one rank: where another rounds otherwise, eigenvectors have other signs.
    coordinates = current().first("coordinates", partial(choose_coordinates, list(kept.values()), most))
    rows = {j: coordinates.of(own) for j, own in kept.items()}
    rest = order[len(kept) :]
    kept.clear()

    def row(i: int) -> tuple[Tensor, Tensor, Tensor]:
        gap, off, parts = seen(i)
        return gap, off, coordinates.of(parts)

    first = answers.runners[0]
    results = first.share("gradients", [partial(row, i) for i in rest], [answers.batches[i] for i in rest])
    for i, (gap, off, own_rows) in zip(rest, results, strict=True):
        gaps.append(gap)
        residuals[i], rows[i] = off, own_rows
    first.count((1 + 2 * answers.count) * answers.examples)
    every = range(len(answers.batches))
    before = _root(torch.cat(gaps))
    return before, torch.cat([residuals[i] for i in every]), torch.cat([rows[i] for i in every]), coordinates


def _slopes(answers: DenseAnswers, index: int, names: Sequence[str]) -> tuple[Tensor, Tensor, Seen]:
    """A batch's residuals ``[examples, ...]``, whole and along the fitted directions, and the slopes along these."""
    runner, batch, residuals = answers.runners[index], answers.batches[index], []

    def along(output: object) -> list[Tensor]:
        logits = logits_by_example(runner, output, batch)
        gap = (answers.known[index] - logits.detach().cpu().double()) @ answers.basis.T
        directions = _directions(gap, answers.noise[index])
        residuals.extend([gap, (directions @ gap[..., None])[..., 0]])
        return [(logits * each.to(logits)).sum() for each in (directions @ answers.basis).transpose(0, 1)]

    seen = runner.slopes_of(batch, names, along)
    return residuals[0], residuals[1], seen


def kernel_ridge(
    kernel: Tensor, residuals: Tensor, left_out: Tensor, about: float
) -> Iterator[tuple[Tensor, float, float]]:
    """Kernel ridge regression, with a strength that is good by leaving out each group of examples in turn.

    With A the kernel plus the ridge, and y the residuals, a group's error when it is left out is
    ``(A⁻¹)_gg⁻¹ (A⁻¹ y)_g`` (block form of Allen's PRESS, 1974). Of strengths that are about as good as the best, the
    weakest is taken (a tenth of the best at least): it leaves less of the residuals, and adds little noise (figures are in
    docs/planning.md). If there are many groups, and examples have several rows, strengths are compared on some of the groups.

    Args:
        kernel: Inner products of gradients, ``[rows, rows]``, a row for each direction of an example's answer, example by
            example; 1 on average on the diagonal.
        residuals: The residuals, ``[examples, directions]``.
        left_out: ``[examples]``, the number of an example's group.
        about: Strengths with at most so many times the best one's error are about as good.

    Yields:
        The coefficients of the gradients ``[rows]`` in float64, the strength, and the root mean squared error on left-out groups: by
        the weakest strength, then by the best if that is another; those alone that do better than no change.
    """
    wanted, groups = residuals.flatten(), _rows_of_groups(left_out, residuals.shape[1])
    some = of_all = cache(partial(_left_out, kernel, wanted, groups))
    chosen = torch.arange(len(wanted))
    if residuals.shape[1] > 1 and (apart := -(-len(wanted) // _MOST_TRIED)) > 1:
        own = [rows[::apart] for rows in groups]
        chosen = torch.cat([rows.flatten() for rows in own])
        at = torch.split(torch.arange(len(chosen)), [rows.numel() for rows in own])
        tried = [those.view_as(rows) for those, rows in zip(at, own, strict=True)]
        some = cache(partial(_left_out, kernel[chosen][:, chosen], wanted[chosen], tried))

    def error(strength: float) -> float:
        return some(strength)[0]

    strength, least = downhill(error, STRENGTHS, STRENGTHS.index(_START))
    most = min(about * least, _GAIN * _root(wanted[chosen]))
    best = STRENGTHS.index(strength)
    for weaker in reversed(STRENGTHS[max(0, best - _WEAKER) : best]):
        if not error(weaker) < most:
            break
        strength = weaker
    for one in dict.fromkeys((strength, STRENGTHS[best])):  # all groups may see it otherwise
        held_out, alpha = of_all(one)
        if held_out < _GAIN * _root(residuals):
            yield alpha, one, held_out


def _sum(rows: Tensor, alpha: Tensor) -> Tensor:
    """Sum of the rows times ``alpha [rows]``: ``[coordinates]`` in float64."""
    return torch.cat([some.T.double() @ alpha for some in torch.split(rows, _COORDINATES_AT_ONCE, dim=1)])


def _left_out(kernel: Tensor, wanted: Tensor, groups: Sequence[Tensor], strength: float) -> tuple[float, Tensor]:
    """Root mean squared error on groups when each is left out, and the coefficients fitted to all groups, float64."""
    wide = kernel if strength >= _ROUNDED else kernel.double()
    root, failed = torch.linalg.cholesky_ex(wide + strength * torch.eye(len(wide), dtype=wide.dtype))
    if int(failed):  # the ridge is smaller than rounding
        return float("inf"), wanted
    inverse = torch.cholesky_inverse(root)
    alpha = (inverse @ wanted.to(inverse)).double()
    # One step of iterative refinement, for what float32 rounded away.
    rest = wanted - strength * alpha - kernel.double() @ alpha
    alpha = alpha + (inverse @ rest.to(inverse)).double()
    blocks = ((inverse[rows[:, :, None], rows[:, None]].double(), alpha[rows][..., None]) for rows in groups)
    errors = [torch.linalg.solve(*block).flatten() for block in blocks]
    return _root(torch.cat(errors)) if errors else float("nan"), alpha


def kernel_of(rows: Tensor) -> tuple[Tensor, float]:
    """Inner products of rows ``[rows, rows]`` by their mean squared length, and this length."""
    # Divided by it, since squares of short rows may be 0 in float32.
    longest = max(float(some.abs().max()) for some in torch.split(rows, _ROWS_AT_ONCE))
    kernel = rows.new_empty(len(rows), len(rows))
    block = max(1, -(-len(rows) // 4))
    for first in range(0, len(rows), block):
        end = first + block
        products = (rows[first:end] / longest) @ rows[first:].T
        kernel[first:end, first:] = products  # symmetric: each product fills both sides of the diagonal
        kernel[first:, first:end] = products.T
    unit = float(kernel.diagonal().double().mean())
    return kernel.div_(unit), unit * longest


def _rows_of_groups(left_out: Tensor, directions: int) -> list[Tensor]:
    """The row numbers of every group: one tensor ``[groups, rows]`` for each group size."""
    order = left_out.argsort(stable=True)
    sizes = [n for n in left_out.bincount().tolist() if n]
    by_size: dict[int, list[Tensor]] = {}
    for own in torch.split(order, sizes):
        rows = own[:, None] * directions + torch.arange(directions)
        by_size.setdefault(len(own), []).append(rows.flatten())
    return [torch.stack(rows) for rows in by_size.values()]


def _directions(gap: Tensor, noise: Tensor) -> Tensor:
    """Directions along which answers are fitted, ``[examples, some, directions]``.

    All of them; or if only some can be, first that of the gap to the dense model's answer, then random ones orthogonal
    to it, along which nothing should change. They are scaled so that the mean square along them is, on average, that
    along all directions.

    Args:
        gap: ``[examples, directions]``.
        noise: Normal, ``[examples, directions, some]``.
    """
    (examples, every), some = gap.shape, noise.shape[2]
    if some == every:
        return torch.eye(every, dtype=gap.dtype).expand(examples, every, every)
    start, lengths = noise.clone(), torch.ones(some, dtype=gap.dtype)
    if some > 1:
        start[..., 0] = gap
        lengths[1:] = ((every - 1) / (some - 1)) ** 0.5
        lengths *= (some / every) ** 0.5
    directions: Tensor = (torch.linalg.qr(start)[0] * lengths).mT
    return directions


def joined(
    calls: Sequence[tuple[Tensor, Tensor, Sequence[Tensor]]], kept: Tensor, has_bias: bool, examples: int
) -> tuple[Tensor, Tensor]:
    """A linear layer's calls joined: kept inputs ``[examples, tokens, in]``, with an appended 1 for a bias, and slopes
    ``[directions, examples, tokens, out]``."""
    if not calls:
        raise HeadPruneError("a layer does not run on every example.")
    if any(y[..., 0].numel() % examples for _, y, _ in calls):
        raise HeadPruneError("tokens cannot be told apart by example.")
    wide = torch.float64 if calls[0][0].dtype == torch.float64 else torch.float32

    def by_example(t: Tensor) -> Tensor:
        return t.to(wide).reshape(examples, -1, t.shape[-1])

    slopes = torch.cat([torch.stack([by_example(slope) for slope in each]) for *_, each in calls], dim=2)
    inputs = [torch.cat([by_example(x[..., kept.to(x.device)]) for x, *_ in calls], dim=1)] if len(kept) else []
    return torch.cat([*inputs, slopes.new_ones(*slopes.shape[1:3], int(has_bias))], dim=2), slopes


def weights_of(matrices: Mapping[str, Tensor], places: Places) -> Changes:
    """Changes of weights and biases by module, from those of the kept inputs' rows and the bias as the last row."""
    result = {}
    for name, (place, kept) in places.items():
        weight, bias = (torch.zeros_like(t, device="cpu") for t in (place.weight, place.bias))
        weight[kept] = matrices[name][: len(kept)].to(weight)
        if place.has_bias:
            bias += matrices[name][-1].to(bias)
        result[name] = weight, bias
    return result


def _root(values: Tensor) -> float:
    """Root mean square."""
    return float(values.double().square().mean().sqrt())
