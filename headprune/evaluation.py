"""How well a model does on labelled examples, and whether two models differ by more than chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headprune.arguments import listed, together
from headprune.batches import cost_of, nonempty
from headprune.conventions import BINARY, LABEL, SAME, SQUARED
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError, UndefinedError
from headprune.inputs import model_device, move
from headprune.losses import ExampleLoss, LossFn
from headprune.metrics import LABELS, LOSSES, NUMBERS, SEVERAL, TAGS, TEXTS, Answers, Jackknife, Metric, metric_of
from headprune.parallel import current
from headprune.running import Progress, quiet, uncompiled
from headprune.uncertainty import carried_by, p_value, quantile, spread, wilson

if TYPE_CHECKING:
    from accelerate import Accelerator

_FORMS = {LABEL: LABELS, BINARY: SEVERAL, SAME: TAGS, SQUARED: NUMBERS}
_MOST = 700.0  # exp of more overflows


@dataclass(frozen=True)
class Measurement:
    """How well one model does on a set of examples.

    Attributes:
        metrics: ``accuracy`` and ``f1_macro``, or ``perplexity`` and ``accuracy`` over tokens; for several labels at
            once ``accuracy`` of single labels; for answers in a text that of their starts and ends (no ``f1_macro``).
            Always ``loss`` (nats per labelled token; for numbers their mean squared error). If the model's own loss is
            used and is not a mean over labels (such as a CTC model's), only ``loss``, per example. And the metrics that
            were asked for, by name.
        loss: ``[examples]``, nats, each the mean over its tokens; or the model's own loss of each.
        correct: ``[examples]``, labelled tokens that are predicted correctly; NaN where the model predicts no classes.
        tokens: ``[examples]``, labelled tokens; 1 where the loss is ``loss_fn``, or the model's own and not a mean over labels.
        jackknife: Of every metric that was asked for, its values without some examples.
        texts: The model's answer to each example, where they are texts.
        guesses: Of the metrics that were asked for, those of a model that knows nothing, where that is known (`Metric.guess`).
    """

    metrics: dict[str, float]
    loss: np.ndarray
    correct: np.ndarray
    tokens: np.ndarray
    jackknife: dict[str, Jackknife] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    guesses: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.loss)

    def per_example(self, metric: str) -> np.ndarray:
        """Numerators of a metric, ``[examples]``; the metric is a function of their sum divided by the sum of ``tokens``.

        Raises:
            HeadPruneError: There is no such metric, or it is not known for this model.
        """
        if metric not in LOSSES:
            message = f"There is no interval of {metric!r}: it was not asked for."
            raise HeadPruneError(
                message, f"Choose from {', '.join([*LOSSES, *self.jackknife])}, or evaluate with metrics=[{metric!r}]."
            )
        numerators = self.correct if metric == "accuracy" else self.loss * self.tokens
        if not np.isfinite(numerators).all():
            raise HeadPruneError(f"The {metric} of this model is not known.", "Its logits could not be read.")
        return numerators


@dataclass(frozen=True)
class Change:
    """How a metric changed from the dense to the pruned model, on the same examples.

    Interval, p and verdict come from one test, so they never contradict each other (`headprune.uncertainty`).

    Attributes:
        metric: Its name. The change is a difference, of ``"perplexity"`` a ratio minus 1.
        value: The change; positive is better only where a higher metric is better (`headprune.metrics.Metric.higher`).
        low, high: 95 % interval, paired by example.
        p_value: Two-sided, of the hypothesis that nothing changed; below .05 if and only if the interval does not contain 0.
        verdict: ``"worse"``, ``"better"`` or ``"no measurable change"`` (the interval contains 0).
        examples: How many were compared.
        carried_by: How many of them the change rests on (`headprune.uncertainty.carried_by`).
    """

    metric: str
    value: float
    low: float
    high: float
    p_value: float
    verdict: str
    examples: int = 0
    carried_by: float = 0.0


class Texts(Protocol):
    """How a model answers examples with texts, such as `headprune.Generation`.

    Attributes:
        references: The right text of every example, or several of which any is right, in the order of the batches.
    """

    references: Sequence[Any]

    def read(self, model: nn.Module, batch: Any, first: int) -> list[str]:
        """The model's texts for a batch, whose first example has the number ``first``."""


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    metrics: Sequence[str | Metric | Callable[[Any, Any], float]] = (),
    texts: Texts | None = None,
    loss_fn: LossFn | None = None,
    accelerator: Accelerator | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Run a model over labelled batches, and measure how well it does.

    The model's own loss shows which label a token's logits are compared with (`headprune.conventions`). If that loss
    cannot be computed from the logits, the model computes it for one example at a time, and there is no accuracy. If it
    is a mean over labels, examples are weighted by their labels, and there is a perplexity; else each counts once.

    Args:
        model: Any model; its mode is left as it was.
        batches: Dicts that the model accepts, with labels, or pairs ``(inputs, labels)`` with ``loss_fn``.
        metrics: Further metrics, by name (docs/metrics.md), or functions of (predictions, references), where higher is better.
        texts: For metrics of texts: how the model answers with them, and the right ones.
        loss_fn: ``loss_fn(output, labels)`` giving one loss per example, ``[batch]``; then only the loss is measured. Not
            needed for dicts with labels.
        accelerator: To share the work out among the processes of an `accelerate.Accelerator`.
        progress: Called with (batches done, batches in all).

    Returns:
        A `Measurement`: metrics over all examples, and each example's share in them, so that `compare` can pair two models.

    Raises:
        HeadPruneError: No examples, no labels, a loss that is not finite; a model without a loss of its own, if nothing
            else tells which labels its logits are compared with. A metric that does not exist, or not for these answers;
            two metrics of one name.
    """
    asked = _asked(metrics)
    device, losses = model_device(model), ExampleLoss(model, loss_fn)
    given = listed(batches)
    kept = [move(batch, device) for batch in nonempty(given, "evaluate on")]

    def outcome_of(batch: Any, first: int) -> tuple[Any, ...]:
        outcome = losses.outcome(batch)
        # Copies, not views of larger tensors: they may be sent to other processes.
        parts = (outcome.predictions, outcome.targets, outcome.scores if asked else [])
        copies = ([t.cpu().clone() for t in each] for each in parts)
        written = texts.read(model, batch, first) if texts else []
        return outcome.loss.cpu().double(), outcome.tokens.cpu(), *copies, written

    with together(accelerator, model, given), quiet(model, exact=False, attributes=False), torch.inference_mode():
        with uncompiled():  # otherwise single examples would each cause a compilation
            prepared = losses.prepare(kept)
        starts = accumulate(map(losses.rows.size, prepared), initial=0)
        tasks = [partial(outcome_of, batch, first) for batch, first in zip(prepared, starts, strict=False)]
        outcomes = current().share("evaluating", tasks, [cost_of(batch) for batch in prepared], progress)
    measurement, read = _measurement(outcomes, losses)
    for name in {metric_of(metric).name for metric in metrics} & LOSSES.keys() - measurement.metrics.keys():
        raise _not_given(model, name)
    answers = _answers(model, losses.use.convention, *read) if asked else Answers("", (), ())
    for metric in asked:
        _add(metric, _in_texts(measurement.texts, texts) if texts and metric.takes_texts else answers, measurement)
    return measurement


def _add(metric: Metric, answers: Answers, measurement: Measurement) -> None:
    measurement.metrics[metric.name], measurement.jackknife[metric.name] = metric.measure(answers)
    if (guess := metric.guess(answers)) is not None:
        measurement.guesses[metric.name] = guess


def _asked(metrics: Sequence[str | Metric | Callable[[Any, Any], float]]) -> list[Metric]:
    """The metrics that losses do not give.

    Raises:
        HeadPruneError: Two have one name, or one that of a metric that losses give.
    """
    asked = [metric for metric in map(metric_of, metrics) if metric is not LOSSES.get(metric.name)]
    for name, count in Counter([*LOSSES, *(metric.name for metric in asked)]).items():
        if count > 1:
            own = ", and one is headprune's own" if name in LOSSES else ""
            raise HeadPruneError(f"Two metrics are called {name}{own}.", "Give one of them another name.")
    return asked


def _measurement(outcomes: Sequence[tuple[Any, ...]], losses: ExampleLoss) -> tuple[Measurement, list[list[Tensor]]]:
    """What is measured unasked; and each example's predictions, labels and scores."""
    losses_of, tokens_of, *lists = zip(*outcomes, strict=True)
    *read, written = ([value for batch in each for value in batch] for each in lists)
    loss, tokens, (guesses, truths, _) = torch.cat(losses_of).numpy(), torch.cat(tokens_of).numpy(), read
    if not np.isfinite(loss).all():
        bad = int(np.flatnonzero(~np.isfinite(loss))[0])
        message = f"The loss of example {bad} (in the order given) is {loss[bad]}."
        raise UndefinedError(message, "Check its label and text, or use --dtype float32.")
    if not tokens.any():
        raise HeadPruneError(
            "No example has a label.", f"Labels of {IGNORED}, and places outside of a text, count nowhere."
        )
    pairs = zip(guesses, truths, strict=True) if guesses else ()
    right = [(p == t).sum().item() for p, t in pairs] or [float("nan")] * len(loss)
    correct, labels = np.asarray(right, dtype=np.float64), max(float(tokens.sum()), 1)
    metrics = {"loss": float((loss * tokens).sum() / labels)}
    if guesses:
        metrics["accuracy"] = float(correct.sum() / labels)
        # Of several labels at once, each is a class of its own.
        each = losses.use.convention == BINARY and len({labels.shape for labels in truths}) == 1
        truth, guess = ((torch.stack if each else torch.cat)(values).numpy() for values in (truths, guesses))
        if losses.use.classifies and len(np.unique(truth)) <= 100:
            from sklearn.metrics import f1_score

            metrics["f1_macro"] = float(f1_score(truth, guess, average="macro", zero_division=0))
    if "perplexity" in losses.use.metrics:
        metrics["perplexity"] = value_of("perplexity", metrics["loss"], 1)
    return Measurement(metrics, loss, correct, tokens, texts=tuple(written)), read


def _in_texts(written: Sequence[str], texts: Texts) -> Answers:
    if len(written) != len(texts.references):
        message = f"There are {len(texts.references):,} references for {len(written):,} texts."
        raise HeadPruneError(message, "Give one, or a list of several, for each example.")
    return Answers(TEXTS, written, texts.references)


def _answers(
    model: nn.Module, convention: str | None, guesses: list[Tensor], truths: list[Tensor], scores: list[Tensor]
) -> Answers:
    """A model's answers as metrics take them, from `headprune.conventions.Outcome`."""
    form = _FORMS.get(convention or "", "")
    named = getattr(getattr(model, "config", None), "id2label", None) or {}
    names = tuple(str(named[number]) for number in sorted(named))
    if form == LABELS:  # an example without a label counts nowhere
        labelled = [i for i, labels in enumerate(truths) if len(labels)]
        guesses, truths, scores = ([each[i] for i in labelled] for each in (guesses, truths, scores))
    probabilities = None
    if form in (LABELS, SEVERAL):
        logits = torch.stack(scores).double()
        probabilities = (logits.softmax(1) if form == LABELS else logits.sigmoid()).numpy()
        if probabilities.shape[1] == 1:  # one label, which an example has or not: two classes
            form, probabilities = LABELS, np.hstack([1 - probabilities, probabilities])
    values: list[Any] = [t.numpy() for t in (scores if form == NUMBERS else guesses)]
    right: list[Any] = [t.numpy() for t in truths]
    if form in (LABELS, NUMBERS) and all(t.size == 1 for t in right):
        values, right = ([each.item() for each in some] for some in (values, right))
    return Answers(form, values, right, probabilities, names)


def measurable(model: nn.Module, batches: Iterable[Any], metrics: Sequence[str] = ()) -> tuple[str, ...]:
    """The metrics that `evaluate` would give unasked for these batches, found on a few of their examples.

    Args:
        metrics: Others that will be asked for.

    Raises:
        HeadPruneError: As `evaluate`; one of ``metrics`` compares other answers than the model's.
    """
    device, losses = model_device(model), ExampleLoss(model)
    with quiet(model), torch.inference_mode():
        losses.prepare([move(batch, device) for batch in batches])
    known = ("loss", *losses.use.metrics)
    for metric in map(metric_of, metrics):
        if metric.name in LOSSES and metric.name not in known:
            raise _not_given(model, metric.name)
        if TEXTS not in metric.forms:
            metric.check(_FORMS.get(losses.use.convention or "", ""))
    return known


def _not_given(model: nn.Module, metric: str) -> HeadPruneError:
    message = f"{type(model).__name__}'s answers have no {metric}."
    return HeadPruneError(message, "Choose another metric (docs/metrics.md lists them by task).")


def value_of(metric: str, numerator: float, tokens: float) -> float:
    """A metric from its sums: accuracy = correct / tokens, perplexity = exp(loss / tokens)."""
    mean = numerator / max(tokens, 1)
    return math.exp(min(mean, _MOST)) if metric == "perplexity" else mean


def interval(measurement: Measurement, metric: str) -> tuple[float, float]:
    """95 % interval of a metric over examples.

    For accuracy it is Wilson's, which has a width at 1.000 too; if examples have several labels, with the effective
    number of independent labels (Korn and Graubard 1998, Survey Methodology 24:193).

    Returns:
        Its lower and upper end, in the unit of the metric.

    Raises:
        HeadPruneError: There is no such metric, or it is not known for this model.
    """
    if known := measurement.jackknife.get(metric):
        value, moves = measurement.metrics[metric], known.deviations
        least = known.width or (abs(value) if len(moves) == 1 else 0.0)
        half = _half_width(moves, len(moves), 0.0 if moves.any() else least)
        return max(value - half, known.lowest), min(value + half, known.highest)
    mean, residuals, labels = _mean(measurement.per_example(metric), measurement.tokens)
    if metric == "accuracy":
        own = float((residuals**2).sum())
        # Nothing varies: all labels of an example may belong together.
        size = mean * (1 - mean) * labels**2 / own if own > 0 else float(len(residuals))
        return wilson(mean, max(size, 1.0))
    half = _half_width(residuals, labels, abs(mean * labels) if len(residuals) == 1 else 0.0)
    low, high = mean - half, mean + half
    low = max(low, 0.0) if (measurement.loss >= 0).all() else low
    return value_of(metric, low, 1), value_of(metric, high, 1)


def compare(dense: Measurement, pruned: Measurement, metric: str | None = None) -> Change:
    """The paired change of a metric, with its interval and verdict.

    The change of accuracy or loss per label is ``D = sum_i d_i / sum_i t_i`` over examples i with ``t_i`` labels; its error is
    that of a ratio (Cochran 1977, section 6.4, from ``d_i - D t_i``), widened as `headprune.uncertainty` says. If no example changed
    the accuracy, its interval still has a width: as if one label of one more example had changed, in each direction. The error
    of another metric is the jackknife's (Efron and Stein 1981), of the difference; if no answer changed, as if one more
    example had moved the metric as far as the dense model's examples lie apart.

    Args:
        dense, pruned: From `evaluate`, on the same examples in the same order.
        metric: Its name; by default the first of accuracy, perplexity and loss that both have.

    Raises:
        HeadPruneError: There is no such metric, or it is not known for these models; they were measured on different examples.
    """
    metric = metric or next((m for m in LOSSES if m in dense.metrics and m in pruned.metrics), "loss")
    if len(dense) != len(pruned):
        message = f"{len(dense)} and {len(pruned)} examples cannot be paired."
        raise HeadPruneError(message, "Measure both on the same examples.")
    if not np.array_equal(dense.tokens, pruned.tokens):
        raise HeadPruneError("The two models were measured on different labels.", "Measure both on the same examples.")
    before, after = dense.jackknife.get(metric), pruned.jackknife.get(metric)
    if before and after:
        effects = replace(after, without=after.without - before.without).deviations
        value, residuals, labels = pruned.metrics[metric] - dense.metrics[metric], effects, float(len(effects))
        one = abs(value) if len(effects) == 1 else 0.0
        least = 0.0 if effects.any() else max(before.width, float(np.ptp(before.deviations))) if before.width else one
        higher = before.higher
    else:
        effects = pruned.per_example(metric) - dense.per_example(metric)
        value, residuals, labels = _mean(effects, dense.tokens)
        least = 1.0 if metric == "accuracy" else abs(value * labels) if len(residuals) == 1 else 0.0
        higher = LOSSES[metric].higher
    half = _half_width(residuals, labels, least)
    p = p_value(value, half / quantile(len(residuals)), len(residuals))
    low, high = value - half, value + half
    if metric == "perplexity":
        value, low, high = (math.expm1(min(v, _MOST)) for v in (value, low, high))
    elif metric == "accuracy":
        low, high = max(low, -1.0), min(high, 1.0)
    verdict = verdict_of(low, high, higher)
    return Change(metric, value, low, high, p, verdict, len(dense), float(carried_by(effects)))


def verdict_of(low: float, high: float, higher: bool) -> str:
    """The verdict on a change with this interval; ``higher``: whether a higher metric is better."""
    if low > 0 or high < 0:  # not of NaN
        return "better" if (low > 0) == higher else "worse"
    return "no measurable change"


def _mean(numerators: np.ndarray, tokens: np.ndarray) -> tuple[float, np.ndarray, float]:
    """The mean per label, ``m = sum_i x_i / sum_i t_i``; ``x_i - m t_i`` of every example with labels; and how many labels."""
    has = tokens > 0
    labels = float(max(tokens.sum(), 1))
    mean = float(numerators[has].sum()) / labels
    return mean, numerators[has] - mean * tokens[has], labels


def _half_width(residuals: np.ndarray, labels: float, least: float) -> float:
    """Half the width of a mean's 95 % interval, from `_mean`; ``least`` as in `headprune.uncertainty.spread`."""
    if not len(residuals):
        return 0.0
    return quantile(len(residuals)) * float(spread(residuals, least)) / labels
