"""What a model gets right, and whether two models differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError
from headprune.inputs import model_device, move
from headprune.loss import ExampleLoss
from headprune.modules import exact_attention
from headprune.scoring.base import Progress
from headprune.trace import evaluating

RESAMPLES = 4000


@dataclass(frozen=True)
class Measurement:
    """What one model made of a set of examples.

    Attributes:
        metrics: ``accuracy`` and ``f1`` (macro over the classes that occur), or ``perplexity`` and
            ``accuracy`` over tokens; always ``loss`` (nats per labelled token).
        loss: ``[examples]``, nats, each the mean over its tokens.
        correct: ``[examples]``, labelled tokens predicted right.
        tokens: ``[examples]``, labelled tokens.
    """

    metrics: dict[str, float]
    loss: np.ndarray
    correct: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.loss)

    def per_example(self, metric: str) -> np.ndarray:
        """Numerator of the metric for each example; the metric is a function of its sum over ``tokens``' sum."""
        return self.correct if metric == "accuracy" else self.loss * self.tokens


@dataclass(frozen=True)
class Change:
    """How a metric changed from the dense to the pruned model, on the same examples.

    Attributes:
        metric: ``"accuracy"`` (the change is a difference) or ``"perplexity"`` (the change is a ratio minus 1).
        value: The change; negative accuracy and positive perplexity are worse.
        low, high: 95 % interval, paired bootstrap over examples (percentile, 4,000 resamples).
        p_value: Exact McNemar test for one label per example, else NaN.
        verdict: ``"worse"``, ``"better"`` or ``"no measurable change"`` (the interval holds 0).
    """

    metric: str
    value: float
    low: float
    high: float
    p_value: float
    verdict: str
    examples: int = 0
    details: dict[str, Any] = field(default_factory=dict)


def evaluate(model: nn.Module, batches: Iterable[Any], progress: Progress | None = None, total: int = 0) -> Measurement:
    """Run a model over labelled batches.

    Raises:
        HeadPruneError: No examples, or a loss that is not finite.
    """
    device = model_device(model)
    kept = [move(batch, device) for batch in batches]
    if not kept:
        raise HeadPruneError("There are no examples to evaluate on.", "Check the dataset, its split and --limit.")
    loss, tokens, correct = [], [], []
    guesses: list[Tensor] = []
    truths: list[Tensor] = []
    losses = ExampleLoss(model)
    with evaluating(model), torch.inference_mode(), exact_attention(model):
        prepared = losses.prepare(kept)
        for i, batch in enumerate(prepared):
            outcome = losses.outcome(batch)
            loss.append(outcome.loss.cpu().double())
            tokens.append(outcome.tokens.cpu())
            guesses.extend(p.cpu() for p in outcome.predictions)
            truths.extend(t.cpu() for t in outcome.targets)
            if progress:
                progress(i + 1, len(prepared))
    all_loss, all_tokens = torch.cat(loss).numpy(), torch.cat(tokens).numpy()
    if not np.isfinite(all_loss).all():
        bad = int(np.flatnonzero(~np.isfinite(all_loss))[0])
        raise HeadPruneError(
            f"The loss of example {bad} (in the order given) is {all_loss[bad]}.",
            "Check its label and text, or use --dtype float32.",
        )
    correct = [(p == t).sum().item() for p, t in zip(guesses, truths, strict=True)] or [float("nan")] * len(all_loss)
    measured = Measurement({}, all_loss, np.asarray(correct, dtype=np.float64), all_tokens)
    measured.metrics.update(_metrics(measured, guesses, truths))
    return measured


def value_of(metric: str, numerator: float, tokens: float) -> float:
    """A metric from its sums: accuracy = correct / tokens, perplexity = exp(loss / tokens)."""
    mean = numerator / max(tokens, 1)
    return math.exp(min(mean, 700.0)) if metric == "perplexity" else mean


def interval(measured: Measurement, metric: str, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of a metric over examples."""
    sums, tokens = _resampled([measured.per_example(metric)], measured.tokens, seed)
    values = [value_of(metric, s, t) for s, t in zip(sums[0], tokens, strict=True)]
    return float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5))


def compare(dense: Measurement, pruned: Measurement, metric: str, seed: int = 0) -> Change:
    """The paired change of a metric, with its interval and verdict.

    Raises:
        ValueError: The two were not measured on the same number of examples.
    """
    if len(dense) != len(pruned):
        raise ValueError(f"{len(dense)} and {len(pruned)} examples cannot be paired")
    before, after = dense.per_example(metric), pruned.per_example(metric)

    def change(b: float, a: float, tokens: float) -> float:
        was, now = value_of(metric, b, tokens), value_of(metric, a, tokens)
        return now / was - 1 if metric == "perplexity" else now - was

    value = change(before.sum(), after.sum(), dense.tokens.sum())
    sums, tokens = _resampled([before, after], dense.tokens, seed)
    changes = [change(b, a, t) for b, a, t in zip(*sums, tokens, strict=True)]
    low, high = float(np.percentile(changes, 2.5)), float(np.percentile(changes, 97.5))
    verdict = "no measurable change"
    if high < 0 or low > 0:
        verdict = "worse" if (value > 0) == (metric == "perplexity") else "better"
    p_value = float("nan")
    if metric == "accuracy" and (dense.tokens == 1).all():
        p_value = mcnemar(int(((before == 1) & (after == 0)).sum()), int(((before == 0) & (after == 1)).sum()))
    return Change(metric, value, low, high, p_value, verdict, len(dense))


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided McNemar test: ``lost`` examples became wrong, ``gained`` became right."""
    from scipy.stats import binomtest

    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0


def _resampled(parts: Sequence[np.ndarray], tokens: np.ndarray, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Bootstrap sums of every part, and of the tokens, with the same draws for all: ``[resamples]`` each."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), size=RESAMPLES)
    return [counts @ part for part in parts], counts @ tokens


def _metrics(measured: Measurement, guesses: list[Tensor], truths: list[Tensor]) -> dict[str, float]:
    tokens = float(measured.tokens.sum())
    found = {"loss": float((measured.loss * measured.tokens).sum() / max(tokens, 1))}
    if not guesses:
        return {**found, "perplexity": value_of("perplexity", found["loss"], 1)}
    if truths[0].is_floating_point() and len(truths[0]) == 1:
        return found  # regression: the loss is the squared error
    found["accuracy"] = float(measured.correct.sum() / max(tokens, 1))
    truth, guess = torch.cat(truths).numpy(), torch.cat(guesses).numpy()
    if len(np.unique(truth)) <= 100:
        from sklearn.metrics import f1_score

        found["f1"] = float(f1_score(truth, guess, labels=np.unique(truth), average="macro", zero_division=0))
    found["perplexity"] = value_of("perplexity", found["loss"], 1)
    return found
