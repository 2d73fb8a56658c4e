"""Calibration: the dense model's statistics on calibration examples, measured once for repair and search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, Heads, Layers
from headprune.batches import is_out_of_memory
from headprune.divergence import enough
from headprune.errors import HeadPruneError
from headprune.gates import mask
from headprune.inputs import gathered, is_transposed, model_device
from headprune.offload import add_stored_biases, is_elsewhere, is_offloaded, put
from headprune.parallel import current
from headprune.pruned.structure import remove_biases
from headprune.repairing.directions import Directions, find_directions, refittable_outputs, refittable_values, room
from headprune.repairing.examples import MOST_ROWS, SEVERAL, DenseAnswers, dense_answers
from headprune.repairing.linears import movable_linears
from headprune.repairing.mixtures import mixed_texts, mixes_only, mixtures_of_each
from headprune.repairing.projections import FOLDS, LinearLayer, Moments, OutputProjection, Values, output_projections
from headprune.repairing.results import LayerFit, NewWeights
from headprune.repairing.runner import Calls, Runner
from headprune.running import Progress, exact_attention

WEIGHTS_OF_TOKEN = 1024  # for each token at most, where every token has an answer
_REMEMBERED = 8  # cached fits of one W_O by one step: a search, its trials and the pruning reuse them


@dataclass(frozen=True)
class Statistics:
    """Sums over the tokens of the calibration examples in the dense model. Memory does not grow with the examples.

    Attributes:
        directions: Further directions of the values' input, from which new values may be made.
        moments: By output projection, of W_O's inputs (widened by what heads attend to along `directions`) and its
            outputs. Tokens are weighted by how much the answers depend on them. Empty if nothing will be refitted.
        passes: Forward passes over the examples that measuring took; a backward pass counts as two.
        mixtures: Number of mixtures of texts among what was summed over.
    """

    directions: Directions
    moments: Mapping[str, Moments]
    passes: float
    mixtures: int


@dataclass(frozen=True)
class Calibration:
    """A dense model, its calibration examples, and the statistics measured on them.

    `statistics` and `answers` take passes over the examples, so they are measured on first use. Outside of `applied`
    the model is always the dense one, so it makes no difference when that is.

    Attributes:
        layers: The model's attention layers.
        runner: The model, its output projections and the examples; once there are `statistics`, with mixtures of them.
        mixes: Whether mixtures of the examples are fitted to, where possible.
        others: Batches of further examples, which the last step is fitted to as well.
        notes: What cannot be refitted, and why.
        repairs: Whether anything will be refitted. If not, no sums are kept, and a search measures the old weights.
        ridge: Strength of the ridge towards the old weights; None: the best by cross-validation; infinite: no refit.
        progress: Called after every batch of the longest pass.
    """

    layers: Layers
    runner: Runner
    mixes: bool
    others: Sequence[Any]
    notes: tuple[str, ...]
    repairs: bool
    ridge: float | None
    progress: Progress | None = None
    _fits: dict[tuple[str, str], dict[tuple[int, ...], LayerFit]] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> nn.Module:
        return self.runner.model

    @property
    def projections(self) -> Sequence[OutputProjection]:
        """The output projections that can be refitted."""
        return self.runner.projections

    @property
    def values(self) -> Mapping[str, Values]:
        """The value projections that can be refitted, by output projection."""
        return self.runner.values

    @property
    def new_biases(self) -> list[str]:
        """The output projections without a bias that can be given one."""
        return [p.name for p in self.projections if p.has_bias and not p.own_bias]

    @property
    def cost(self) -> float:
        """About how many forward passes over the examples `statistics` takes; a backward pass counts as two."""
        if not self.repairs:
            return 0.0
        runner = self.runner
        of_each = mixtures_of_each(runner.examples)
        mixtures = mixed_texts(runner.batches, runner.rows, runner.blocks, of_each, 0) if self.mixes else ()
        times = sum(len(each.firsts) for each in mixtures) / runner.examples
        return bool(self.share) + (3 + self.share) * (times + (not (mixtures and mixes_only(runner.examples))))

    @property
    def share(self) -> int:
        """Number of further directions for each head's values, in multiples of head_dim."""
        return room(self.projections) if self.values else 0

    @cached_property
    def statistics(self) -> Statistics:
        """The sums over tokens, measured on first use."""
        runner, before = self.runner, self.runner.passes
        with torch.inference_mode(False), torch.no_grad(), runner.deterministic_eval():
            wanted = self.repairs and self.projections
            if wanted and self.mixes:
                runner.add_mixtures()
            directions = find_directions(runner)
            moments = _sum_moments(runner, directions, self.progress) if wanted else {}
            if moments is None:  # the model gives no answer to a mixture
                runner.mixtures = ()
                moments = _sum_moments(runner, directions, self.progress) or {}
        mixtures = sum(len(mixed.firsts) for mixed in runner.mixtures)
        return Statistics(directions, moments, runner.passes - before, mixtures)

    @cached_property
    def answers(self) -> tuple[DenseAnswers | str, float]:
        """The dense answers that the last step is fitted to, or why there are none; and the passes that they took."""
        _ = self.statistics  # first, since they add mixtures to the examples
        runner, before = self.runner, self.runner.passes
        if self.mixes and not runner.mixtures:
            runner.add_mixtures(images=True)
        answers = dense_answers(runner)
        if self.others and not isinstance(answers, str):
            # As many rows at most as the calibration examples may have.
            rows_of_each = answers.count * math.ceil(answers.examples / runner.examples)
            try:
                further = self._runner_of_others(MOST_ROWS // rows_of_each)
                if runner.mixtures:
                    further.add_mixtures(runner.images)
                both = dense_answers(runner, further)
            except Exception as error:  # others may have another form, and a model may raise anything about a mixture
                if is_out_of_memory(error):
                    raise
                both = ""
            else:
                runner.count(further.seen)
            answers = answers if isinstance(both, str) else both
        return answers, runner.passes - before

    def answers_to_mixtures(self, draw: int) -> DenseAnswers | str:
        """`answers`; or for any ``draw`` but 0, those to mixtures of other pairs, if there are any (of texts, to these alone)."""
        answers, _ = self.answers
        runner = self.runner
        if not draw or isinstance(answers, str) or not runner.mixtures:
            return answers
        further = [each for each in dict.fromkeys(answers.runners) if each is not runner]
        before, mixtures = sum(each.seen for each in further), runner.mixtures
        try:
            for each in (runner, *further):
                each.add_mixtures(runner.images, draw)
            drawn = dense_answers(runner, *further) if runner.mixtures else ""
        except Exception as error:  # a model may raise anything about a mixture
            if is_out_of_memory(error):
                raise
            drawn = ""
        runner.mixtures = runner.mixtures or mixtures
        runner.count(sum(each.seen for each in further) - before)
        return answers if isinstance(drawn, str) else drawn

    @cached_property
    def runner_of_others(self) -> Runner:
        """The model on `others`, or on as many of them as there are calibration examples.

        Raises:
            Exception: Of any class, where they have another form than the calibration examples.
        """
        return self._runner_of_others(self.runner.examples)

    def _runner_of_others(self, most: int) -> Runner:
        return Runner(self.model, self.projections, enough(self.model, self.others, max(1, most)))

    def losing(self, drop: Heads) -> list[OutputProjection]:
        """The output projections that lose heads, and on which the model's answers depend."""
        return [p for p in self.projections if p.loses(drop) and self.is_seen(p)]

    def is_seen(self, projection: OutputProjection) -> bool:
        """Whether an output projection has statistics to be fitted to."""
        moments = self.statistics.moments.get(projection.name)
        return moments is not None and moments.seen

    def fit(self, step: str, projection: OutputProjection, kept: Tensor, make: Callable[[], LayerFit]) -> LayerFit:
        """One W_O's fit by a step. It depends on the kept inputs alone, so it is cached for other choices of heads."""
        known, key = self._fits.setdefault((step, projection.name), {}), tuple(kept.tolist())
        if key not in known:
            known[key] = make()
            if len(known) > _REMEMBERED:
                del known[next(iter(known))]
        return known[key]

    def slopes(self, index: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """W_O's inputs and the slopes at its outputs in the current model, by module, for every call on a batch.

        The inputs are widened by what every head attends to along the first head_dim directions.
        """
        rest: Calls = {}
        calls = self.runner.slopes(index, self.statistics.directions.recording(rest))
        xs = {name: [x for x, _, _ in own] for name, own in calls.items()}
        if self.values:
            batch = self.runner.batches[index]
            ys = {name: [y for _, y, _ in own] for name, own in calls.items()}
            with torch.no_grad(), self.runner.deterministic_eval():
                xs = self.statistics.directions.widened(batch, xs, ys, list(xs), rest, shares=1)
            self.runner.count(self.runner.rows.size(batch))
        slopes = {name: [slope for _, _, (slope,) in own] for name, own in calls.items()}
        return {name: list(zip(xs[name], own, strict=True)) for name, own in slopes.items()}

    @contextmanager
    def applied(self, weights: NewWeights, drop: Heads | None = None) -> Iterator[None]:
        """Write new weights into the model while the context lasts; then restore the dense ones, to the bit.

        Args:
            weights: ``{module: (W [in, out], b [out] or None)}``; the other modules keep their dense weights.
            drop: Heads to mask.
        """
        try:
            self.write(weights)
            if drop is None:
                yield
                return
            masked = {layer.name: drop[layer.name] for layer in self.layers if layer.maskable and layer.name in drop}
            with mask(self.model, masked, layers=self.layers):
                yield
        finally:
            dense = self._dense_weights
            self.write({name: dense[name] for name in weights})

    @cached_property
    def linears(self) -> Sequence[LinearLayer]:
        """All linear layers that the last step may move. It must be asked for first while the model is dense."""
        # By K-FAC, more weights than that fit noise: with ten times as many, SmolLM2's other layers gained nothing.
        most = WEIGHTS_OF_TOKEN * self.runner.tokens if self.several else None
        with torch.inference_mode(False):
            return movable_linears(self.runner, self.layers, most, () if self.several else self.others)

    @property
    def several(self) -> bool:
        """Whether an example has several answers, such as one for every token."""
        answers, _ = self.answers
        return isinstance(answers, str) and answers.endswith(SEVERAL)

    @property
    def _dense_weights(self) -> NewWeights:
        outputs = {p.name: p.dense for p in (*vars(self).get("linears", ()), *self.projections)}
        return outputs | {v.name: (v.weight, v.bias) for v in self.values.values()}

    def changes(self, name: str, new: tuple[Tensor, Tensor | None]) -> bool:
        """Whether a module's new weights are not the dense ones."""
        pairs = zip(new, self._dense_weights[name], strict=True)
        return any(now is not None and (was is None or not torch.equal(now.to(was), was)) for now, was in pairs)

    def write(self, weights: NewWeights) -> None:
        """Write weights into the model; if a bias is None and the dense model has none, an added one is removed."""
        new = [name for name in self.new_biases if name in weights]
        with torch.inference_mode(False), torch.no_grad(), exact_attention(self.model):
            remove_biases(self.model, [name for name in new if weights[name][1] is None])
            add_stored_biases(self.model, [name for name in new if weights[name][1] is not None])
            for name, (weight, bias) in weights.items():
                module: Any = self.model.get_submodule(name)
                _set(module, "weight", weight if is_transposed(module) else weight.T)
                if bias is not None and module.bias is not None:
                    _set(module, "bias", bias)


def calibrate(
    model: nn.Module,
    layers: Layers,
    batches: Sequence[Any],
    *,
    repair: bool = True,
    values: bool = True,
    mixtures: bool = True,
    biases: bool = True,
    others: Sequence[Any] = (),
    ridge: float | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Make the `Calibration` of a model, which from here on is the dense one as it is now.

    Runs the model on a few examples, to see what can be refitted.

    Args:
        repair: Whether to refit anything.
        values: Whether to refit values too, where possible.
        mixtures: Whether to fit to mixtures of the examples, where possible (`headprune.repairing.mixtures`).
        biases: Whether output projections without a bias can be given one.
        others, ridge, progress: As of `Calibration`.
    """
    notes: list[str] = []
    with torch.inference_mode(False):
        projections = list(output_projections(model, layers, notes, biases))
    if not (repair and values):
        projections = [replace(p, values=None) for p in projections]
    runner = Runner(model, projections, batches)
    if projections:
        _keep_refittable(runner, notes)
    ridge = ridge if repair else torch.inf
    return Calibration(layers, runner, mixtures, others, tuple(notes), repair, ridge, progress)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    if is_elsewhere(module, name):
        put(module, name, value, in_memory=True)  # there may be many such changes
    else:  # in place, since stand-ins share their weights with the modules that they replace
        getattr(module, name).copy_(value)


def _keep_refittable(runner: Runner, notes: list[str]) -> None:
    """Leave out the output and value projections that cannot be refitted; why they cannot is added to ``notes``."""
    with torch.inference_mode(False), torch.no_grad():
        linear = refittable_outputs(runner)
        for p in runner.projections:
            if p.name not in linear:
                notes.append(f"{p.layers[0].title} keeps its old weights: {p.name} does more than to multiply by them.")
        runner.projections = [p for p in runner.projections if p.name in linear]
        good = refittable_values(runner) if runner.values else ()
    for name in runner.values:
        if name not in good:
            notes.append(f"{runner.layer(name).name} keeps its old values: its heads are not linear in them alone.")
    runner.projections = [p if p.name in good else replace(p, values=None) for p in runner.projections]
    if good and not room(runner.projections):
        notes.append("Value projections keep their old weights: their statistics would take too much memory.")
        runner.projections = [replace(p, values=None) for p in runner.projections]


def _sum_moments(runner: Runner, directions: Directions, progress: Progress | None) -> dict[str, Moments] | None:
    """The sums over the tokens of `Runner.fitted`, and `Runner.dense_answers`; None if a mixture gets no answer."""
    device = None if is_offloaded(runner.model) else model_device(runner.model)
    batches, fitted = runner.everything, runner.fitted
    sums = {p.name: Moments(len(p.weight) + directions.more(p), p.weight.shape[1], device) for p in runner.projections}

    def add(i: int) -> tuple[bool, Tensor | None]:
        rest: Calls = {}
        try:
            xs, ys, token_weights, answers = runner.recorded_with_weights(i, directions.recording(rest))
        except Exception as error:  # a model may want a certain end of a text, and raise anything
            if i in runner.own or is_out_of_memory(error):
                raise
            return False, None
        if i not in runner.own and answers is None:
            return False, None
        folds: dict[Any, list[Tensor]] = {}
        finite: dict[str, Tensor] = {}  # read for all layers at once, since every read waits for the GPU
        for names in directions.in_parts(xs):
            wide = directions.widened(batches[i], xs, ys, names, rest)
            for name in names:
                for x, y, token_weight in zip(wide[name], ys[name], token_weights[name], strict=True):
                    kind = runner.layer(name).kind
                    key = kind, x.shape[:-1], x.device
                    if key not in folds:
                        folds[key] = folds_of(x, runner, i, kind)
                    x, y, token_weight = (t.reshape(-1, t.shape[-1]) for t in (x, y, token_weight[..., None]))
                    for fold, chosen in enumerate(folds[key]):
                        fine = (x[chosen].isfinite().all() & y[chosen].isfinite().all())[None]
                        finite[name] = finite.get(name, fine) & fine
                        sums[name].add(fold, x[chosen], y[chosen], token_weight[chosen, 0])
        for name, fine in zip(finite, gathered([*finite.values()]).tolist() if finite else (), strict=True):
            if not fine:
                raise _not_finite(runner.layer(name), "what goes through its output projection is")
        return True, answers

    added = runner.share("statistics", [partial(add, i) for i in fitted], [batches[i] for i in fitted], progress)
    if not all(taken for taken, _ in added):
        return None
    runner.dense_answers = {i: a for i, (_, a) in zip(fitted, added, strict=True) if a is not None}
    for projection in runner.projections:
        moments = sums[projection.name]
        current().add(f"statistics of {projection.name}", [moments.xx, moments.xy, moments.yy])
        moments.complete()
    runner.count(directions.shares * sum(map(runner.size, fitted)))
    for projection in runner.projections:
        moments = sums[projection.name]
        if not all(bool(m.isfinite().all()) for m in (moments.xx, moments.xy, moments.yy)):
            raise _not_finite(projection.layers[0], "the slopes of the model's answers there are")
    return sums


def folds_of(x: Tensor, runner: Runner, index: int, kind: str, slope: Tensor | None = None) -> list[Tensor]:
    """Indices of a batch's tokens without padding, by fold; examples alternate between the folds.

    Tokens with a ``slope`` count in any case: the keys of cross-attention are of the encoder's tokens, for example, not of the decoder's.
    """
    batch = runner.everything[index]
    real = runner.real(x, batch, kind)
    if real is not None and slope is not None:
        real = real | slope.flatten(0, -2).any(-1)
    rows, tokens, size = x.shape[0], x.shape[:-1], runner.rows.size(batch)
    if runner.examples == 1:  # its tokens alternate between the folds
        fold = torch.arange(tokens.numel()) % FOLDS
    else:
        # Tokens flattened into rows, or windows cut out of every example: rows of one example stay together.
        example = runner.fold(index)[torch.arange(rows) * size // rows]
        fold = example.view(-1, *[1] * (len(tokens) - 1)).expand(tokens).flatten()
    counted = None if real is None else real.cpu()
    chosen = (fold == i if counted is None else (fold == i) & counted for i in range(FOLDS))
    return [own.nonzero().flatten().to(x.device) for own in chosen]


def _not_finite(layer: AttentionLayer, what: str) -> HeadPruneError:
    message = f"Layer {layer.title} cannot be repaired: {what} not finite."
    return HeadPruneError(message, "Leave out the example that does it, use --dtype float32, or do without repair.")
