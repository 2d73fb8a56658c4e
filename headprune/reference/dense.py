"""The dense model's facts: what is known before anything is measured, and what is measured once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, Heads
from headprune.errors import HeadPruneError
from headprune.inputs import gathered, model_device
from headprune.offload import is_offloaded
from headprune.reference.answers import DenseAnswers, dense_answers
from headprune.reference.blocks import Steps
from headprune.reference.dense_weights import DenseWeights
from headprune.reference.directions import Directions, find_directions, inputs_of_heads, room
from headprune.reference.linearity import linear
from headprune.reference.mixtures import mixed_texts
from headprune.reference.moments import FOLDS, Moments, centred
from headprune.reference.projections import OutputProjection, Values, output_projections
from headprune.reference.runner import Calls, Runner, weighed
from headprune.running import Progress

_MIXTURES, _MOST_EXAMPLES = 2, 4096  # of every example, where there are not many anyway


@dataclass(frozen=True)
class Calibration:
    """A dense model, and the examples to measure it on.

    Attributes:
        layers: The model's attention layers.
        runner: The model, its output projections and the examples (and, once measured, mixtures of them).
        values: The value projections that can be refitted, by output projection.
        times: How many mixtures of every example are to be made.
        weights: The dense weights of all these projections.
        notes: What cannot be refitted, and why.
        sums: Whether sums over tokens are of use: not where nothing will be refitted.
    """

    layers: Sequence[AttentionLayer]
    runner: Runner
    values: Mapping[str, Values]
    times: int
    weights: DenseWeights
    notes: tuple[str, ...]
    sums: bool

    @property
    def model(self) -> nn.Module:
        """The model: dense but while other weights are written into it."""
        return self.runner.model

    @property
    def projections(self) -> Sequence[OutputProjection]:
        """The output projections that can be refitted."""
        return self.runner.projections

    @property
    def cost(self) -> float:
        """Forward passes over the examples that `measure` will take, about, without answers; a backward pass counts as two."""
        if not self.sums:
            return 0.0
        share = room(self.projections, self.values) if self.values else 0
        made = mixed_texts(self.runner.batches, self.runner.rows, self.times, 0)
        times = sum(len(each.firsts) for each in made) / self.runner.examples
        return bool(share) + times + (3 + share) * (1 + times)


@dataclass(frozen=True)
class DenseReference(Calibration):
    """What a dense model is like on its calibration examples. It does not change when the model does.

    Memory does not grow with the examples, but for the answers, which are one vector an example.

    Attributes:
        directions: What values may be made of, beside the old ones.
        moments: Of W_O's inputs, widened by what heads attend to along `directions`, and of its outputs: sums over tokens,
            weighted by how much the answers depend on each; by output projection. None where nothing will be refitted.
        passes: Forward passes over the examples that it took; a backward pass counts as two.
        answers: The answers to come nearer to, or why there are none; None if they were not asked for.
    """

    directions: Directions
    moments: Mapping[str, Moments]
    passes: float
    answers: DenseAnswers | str | None = None

    def with_answers(self) -> DenseReference:
        """This, and the dense model's answers."""
        before = self.runner.passes
        with self.weights.dense():
            answers = dense_answers(self.runner)
        return replace(self, answers=answers, passes=self.passes + self.runner.passes - before)

    def losing(self, drop: Heads) -> list[OutputProjection]:
        """The output projections that lose heads, and on which the model's answers depend."""
        return [p for p in self.projections if p.loses(drop) and self.seen(p)]

    def seen(self, projection: OutputProjection) -> bool:
        """Whether there is anything to fit an output projection to."""
        moments = self.moments.get(projection.name)
        return moments is not None and moments.seen

    def hessian(
        self, projection: OutputProjection, drop: Heads, mixes: Mapping[int, Tensor], ridge: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the ridge regression on the dense inputs that stay, widened by a head's width of directions.

        Args:
            drop: The heads that go.
            mixes: What heads' values are made of (`headprune.repairing.Weights.mixes`).

        Returns:
            The matrix ``[inputs, inputs]``, the mean that it was taken around ``[inputs]``, and which inputs they are.
        """
        moments, index = self.moments[projection.name], projection.kept(drop)
        if (values := self.values.get(projection.name)) is None:
            xx, xy = moments.rows_of(index)
        else:
            heads, rank = projection.heads(drop), self.directions.rank(projection.name)
            xx, xy = moments.rows_of(inputs_of_heads(projection, values, heads, rank).flatten())
            index = inputs_of_heads(projection, values, heads, values.head_dim).flatten()
            turn = _turn(values, heads, rank, mixes)
            xx, xy = turn.T @ xx.cpu() @ turn, turn.T @ xy.cpu()
        a, _, mean, _ = centred(xx.sum(0).cpu(), xy.sum(0).cpu(), projection.has_bias)
        strength = ridge * float(a.diagonal().mean()) if len(a) else 0.0
        # Inputs that never change have nothing to be fitted to.
        matrix = a + max(strength, 1e-12) * torch.eye(len(a), dtype=a.dtype)
        return matrix, mean if projection.has_bias else mean * 0, index

    def slopes(self, index: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """W_O's inputs and the slopes at its outputs, by module, for every call, on a batch of the model as it is now.

        Behind the inputs is what every head attends to along the first directions, a head's width of them.
        """
        found = self.runner.slopes(index)
        xs = {name: [x for x, _, _ in calls] for name, calls in found.items()}
        if self.values:
            batch = self.runner.batches[index]
            ys = {name: [y for _, y, _ in calls] for name, calls in found.items()}
            with torch.no_grad(), self.runner.deterministic_eval():
                xs = self.directions.widened(batch, xs, ys, list(xs), shares=1)
            self.runner.count(self.runner.rows.size(batch))
        return {
            name: [(x, slope) for x, (_, _, slope) in zip(xs[name], calls, strict=True)]
            for name, calls in found.items()
        }


def calibrate(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    batches: Sequence[Any],
    *,
    repair: bool = True,
    values: bool = True,
    mixtures: bool = True,
    biases: bool = True,
) -> Calibration:
    """A model as it is now, which from here on is the dense one, and its examples.

    Runs the model on a few examples, to see what can be refitted.

    Args:
        repair: Whether anything is to be refitted. If not, `measure` runs nothing and keeps no sums: a search then looks at the model
            with its old weights.
        values: Whether values are to be refitted too, where they can be.
        mixtures: Whether mixtures of the examples are to be fitted to as well, where they can be
            (`headprune.reference.mixtures`).
        biases: Whether output projections that have no bias can be given one.
    """
    notes: list[str] = []
    with torch.inference_mode(False):
        projections = list(output_projections(model, layers, notes, biases))
    runner = Runner(model, projections, batches)
    found = _refittable(runner, notes) if repair and values else {}
    times = min(_MIXTURES, _MOST_EXAMPLES // runner.examples - 1) if repair and mixtures else 0
    return Calibration(layers, runner, found, times, DenseWeights(model, projections, found), tuple(notes), repair)


def measure(calibration: Calibration, *, answers: bool = True, progress: Progress | None = None) -> DenseReference:
    """Measure the dense model; when this is called makes no difference.

    Args:
        answers: Whether the answers are kept, for the last step of a repair.
        progress: Called after every batch of the longest pass.
    """
    runner, before = calibration.runner, calibration.runner.passes
    with torch.inference_mode(False), torch.no_grad(), calibration.weights.dense(), runner.deterministic_eval():
        wanted = calibration.sums and calibration.projections
        if wanted:
            runner = runner.with_mixtures(calibration.times)
        with Steps.of(runner) if wanted else nullcontext() as steps:
            directions = find_directions(runner, calibration.values, steps)
            moments = _measured(runner, directions, progress, steps) if wanted else {}
    known: dict[str, Any] = {**vars(calibration), "runner": runner}
    found = DenseReference(**known, directions=directions, moments=moments, passes=runner.passes - before)
    return found.with_answers() if answers else found


def _refittable(runner: Runner, notes: list[str]) -> dict[str, Values]:
    """The value projections that can be refitted, by output projection; why others cannot is added to ``notes``."""
    possible = {p.name: p.values for p in runner.projections if p.values}
    if not possible:
        return {}
    with torch.inference_mode(False), torch.no_grad():
        found = linear(runner, possible)
    for name in possible:
        if name not in found:
            notes.append(f"{runner.layer(name).name} keeps its old values: its heads are not linear in them alone.")
    if found and not room(runner.projections, found):
        notes.append("Value projections keep their old weights: their statistics would not fit into memory.")
        return {}
    return found


def _measured(
    runner: Runner, directions: Directions, progress: Progress | None, steps: Steps | None
) -> dict[str, Moments]:
    """The sums over the tokens of all examples and mixtures; block by block, if there are steps."""
    device, batches = None if is_offloaded(runner.model) else model_device(runner.model), runner.everything
    found = {p.name: Moments(len(p.weight) + directions.more(p), p.weight.shape[1], device) for p in runner.projections}

    def summed(i: int) -> None:
        add(i, *runner.recorded_with_weights(i))

    def add(i: int, xs: Calls, ys: Calls, token_weights: Calls) -> None:
        folds: dict[Any, list[Tensor]] = {}
        finite: list[Tensor] = []
        of: list[str] = []
        for names in directions.in_parts(xs):
            wide = directions.widened(batches[i], xs, ys, names)
            for name in names:
                for x, y, token_weight in zip(wide[name], ys[name], token_weights[name], strict=True):
                    kind = runner.layer(name).kind
                    key = kind, x.shape[:-1], x.device
                    if key not in folds:
                        folds[key] = _folds(x, runner, i, kind)
                    finite.append(_add(found[name], x, y, token_weight, folds[key]))
                    of.append(name)
        _check_finite(runner, of, finite)

    if steps is None:
        runner.share("statistics", [partial(summed, i) for i in range(len(batches))], batches, progress)
    else:
        heard, blocks = progress or (lambda done, total, note="": None), len(steps.names)
        with torch.no_grad():
            steps.backward(batches, lambda i, own, seen: add(i, *weighed(seen)), lambda done: heard(done, blocks))
        runner.count(3 * sum(map(runner.rows.size, batches)))
    for projection in runner.projections:
        found[projection.name].add_ranks(projection.name)
    runner.count(directions.shares * sum(map(runner.rows.size, batches)))
    for projection in runner.projections:
        moments = found[projection.name]
        if not all(bool(m.isfinite().all()) for m in (moments.xx, moments.xy, moments.yy)):
            raise _not_finite(projection.layers[0], "the slopes of the model's answers there are")
    return found


def _check_finite(runner: Runner, names: Sequence[str], finite: Sequence[Tensor]) -> None:
    """Refuse numbers that are not finite: asked for all layers at once, since every answer waits for a GPU."""
    for name, fine in zip(names, gathered(finite).tolist() if finite else (), strict=True):
        if not fine:
            raise _not_finite(runner.layer(name), "what goes through its output projection is")


def _folds(x: Tensor, runner: Runner, index: int, kind: str) -> list[Tensor]:
    """The tokens of a batch without padding, as indices: every other example is of the other fold."""
    batch = runner.everything[index]
    real = runner.real(x, batch, kind)
    rows, tokens, size = x.shape[0], x.shape[:-1], runner.rows.size(batch)
    if runner.examples == 1:  # its tokens take turns
        fold = torch.arange(tokens.numel()) % FOLDS
    else:
        # Tokens flattened into rows, or windows cut out of every example: rows of one example stay together.
        example = runner.fold(index)[torch.arange(rows) * size // rows]
        fold = example.view(-1, *[1] * (len(tokens) - 1)).expand(tokens).flatten()
    counted = None if real is None else real.cpu()
    chosen = (fold == i if counted is None else (fold == i) & counted for i in range(FOLDS))
    return [own.nonzero().flatten().to(x.device) for own in chosen]


def _add(moments: Moments, x: Tensor, y: Tensor, token_weights: Tensor, folds: Sequence[Tensor]) -> Tensor:
    """Add a call's tokens to the sums, by how much they matter; returns whether all are finite, ``[1]``."""
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    finite = torch.ones(1, dtype=torch.bool, device=x.device)
    for i, chosen in enumerate(folds):
        finite = finite & x[chosen].isfinite().all() & y[chosen].isfinite().all()
        moments.add(i, x[chosen], y[chosen], token_weights.flatten()[chosen])
    return finite


def _turn(values: Values, heads: Sequence[int], rank: int, mixes: Mapping[int, Tensor]) -> Tensor:
    """From old values and all directions to the values that there are now and the first directions, with the 1 behind."""
    width = values.head_dim
    blocks = []
    for h in heads:
        block = torch.eye(width + rank, 2 * width, dtype=torch.float64)
        if h in mixes:
            block[:, :width] = mixes[h]
        blocks.append(block)
    found: Tensor = torch.block_diag(*blocks, torch.ones(1, 1, dtype=torch.float64))  # type: ignore[no-untyped-call]
    return found


def _not_finite(layer: AttentionLayer, what: str) -> HeadPruneError:
    return HeadPruneError(
        f"Layer {layer.name} cannot be repaired: {what} not finite.",
        "Leave out the example that does it, use --dtype float32, or do without repair.",
    )
