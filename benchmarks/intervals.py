"""Error rates and coverage of verdicts, intervals and standard errors, with few examples and with rare effects.

    python benchmarks/intervals.py                      # prints the tables, and writes the section of docs/benchmarks.md; minutes
    python benchmarks/intervals.py --draws 200          # rougher, printed only

Everything is drawn from known truths, so what should be .95 can be checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from document import replace_section, table
from scipy.stats import bootstrap

import headprune as hp
from headprune.evaluation import interval
from headprune.latency import speedup
from headprune.metrics import LABELS, NUMBERS, TEXTS, Answers, metric_named
from headprune.scoring.base import standard_error
from headprune.uncertainty import FEW, carried_by

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
SIZES, ROUNDS, EXAMPLES = (8, 20, 50, 200, 1500), (10, 20, 50, 100, 400), (32, 128, 512, 2048)
Rng = np.random.Generator
Draw = tuple[float, float, float]
"""An interval's ends, and the truth."""


def labels(correct: np.ndarray, tokens: np.ndarray | None = None) -> hp.Measurement:
    """As `evaluate` gives them, of examples with as many labels as ``tokens`` says (one each)."""
    tokens = np.ones(len(correct), dtype=int) if tokens is None else tokens
    return hp.Measurement({}, 1 - correct / tokens, correct.astype(float), tokens)


def flips(lost: float, gained: float, rng: Rng, n: int) -> Draw:
    """One label an example, of which some shares are lost and gained."""
    u = rng.random(n)
    dense = np.where((u >= lost) & (u < lost + gained), 0, 1)
    change = hp.compare(labels(dense), labels(np.where(u < lost, 0, 1)), "accuracy")
    return change.low, change.high, gained - lost


def clusters(worse: float, rng: Rng, n: int) -> Draw:
    """Some labels an example (2 to 30), one in ten examples with flips of a tenth of them; of the flips, a share gets worse."""
    tokens = rng.integers(2, 31, size=n)
    many = np.where(rng.random(n) < 0.1, rng.binomial(tokens, 0.1), 0)
    lost = rng.binomial(many, worse)
    change = hp.compare(labels(tokens - (many - lost), tokens), labels(tokens - lost, tokens), "accuracy")
    return change.low, change.high, 0.1 * 0.1 * (1 - 2 * worse)


def nats(of: Callable[[Rng, int], np.ndarray], truth: float, rng: Rng, n: int) -> Draw:
    """Perplexity: differences of the loss per example."""
    dense, pruned = (hp.Measurement({}, x, np.zeros(n), np.ones(n, dtype=int)) for x in (np.zeros(n), of(rng, n)))
    change = hp.compare(dense, pruned, "perplexity")
    return float(np.log1p(change.low)), float(np.log1p(change.high)), truth


def single(share: float, rng: Rng, n: int) -> Draw:
    """The accuracy of one model."""
    return *interval(labels((rng.random(n) < share).astype(float)), "accuracy"), share


# -- metrics that are no means: each model errs by itself, and the truth is that of 200,000 examples ------------


def binary(lost: float, rng: Rng, n: int) -> list[Answers]:
    """Labels, three in ten of them 1, of which a tenth is wrong; the pruned model's errors are others in a share of the examples."""
    truth = (rng.random(n) < 0.3).astype(int)
    dense = np.where(rng.random(n) < 0.1, 1 - truth, truth)
    other = np.where(rng.random(n) < 0.1 + lost, 1 - truth, truth)
    pruned = np.where(rng.random(n) < 0.3, other, dense)
    return [Answers(LABELS, list(each), list(truth)) for each in (dense, pruned)]


def numbers(lost: float, rng: Rng, n: int) -> list[Answers]:
    truth = rng.normal(size=n)
    dense = truth + 0.5 * rng.normal(size=n)
    pruned = dense + (0.3 + lost) * rng.normal(size=n) if lost else truth + 0.5 * rng.normal(size=n)
    return [Answers(NUMBERS, list(each), list(truth)) for each in (dense, pruned)]


WORDS = np.array([f"w{i}" for i in range(50)])


def sentences(lost: float, rng: Rng, n: int) -> list[Answers]:
    """Texts of 5 to 20 words, of which a tenth is wrong; in three of ten texts the pruned model's errors are others."""
    truth = [rng.choice(WORDS, rng.integers(5, 21)) for _ in range(n)]

    def heard(share: float) -> list[str]:
        return [" ".join(np.where(rng.random(len(t)) < share, rng.choice(WORDS, len(t)), t)) for t in truth]

    dense, other = heard(0.1), heard(0.1 + lost)
    pruned = [b if rng.random() < 0.3 else a for a, b in zip(dense, other, strict=True)]
    return [Answers(TEXTS, each, [" ".join(t) for t in truth]) for each in (dense, pruned)]


def of_metric(name: str, make: Callable[[Rng, int], list[Answers]]) -> Case:
    """The paired change of a metric by its name."""
    metric = metric_named(name)

    @cache
    def truth() -> float:
        dense, pruned = (metric.score(each) for each in make(np.random.default_rng(1), 200_000))
        return pruned - dense

    def draw(rng: Rng, n: int) -> Draw:
        found = []
        for answers in make(rng, n):
            value, jackknife = metric.measure(answers)
            found.append(
                hp.Measurement({name: value}, np.zeros(n), np.zeros(n), np.ones(n, dtype=int), {name: jackknife})
            )
        change = hp.compare(*found, name)
        return change.low, change.high, truth()

    return draw


def bootstrapped(name: str, make: Callable[[Rng, int], list[Answers]]) -> Case:
    """The same change's interval by the BCa bootstrap (SciPy), from the metric's sums."""
    metric = metric_named(name)
    assert metric.sums is not None

    def draw(rng: Rng, n: int) -> Draw:
        sums = [metric.sums(each) for each in make(rng, n)]
        if (sums[0] == sums[1]).all():
            return 0.0, 0.0, 0.0

        def change(rows: np.ndarray) -> float:
            before, after = (metric.of(each[rows].sum(axis=0)) for each in sums)
            return after - before

        ends = bootstrap(
            (np.arange(n),), change, vectorized=False, n_resamples=999, method="BCa", rng=rng
        ).confidence_interval
        return ends.low, ends.high, 0.0

    return draw


OF_METRICS = {
    "f1": binary, "matthews_corrcoef": binary, "spearman": numbers, "wer": sentences, "bleu": sentences,
}  # fmt: skip


def rare(rng: Rng, n: int) -> np.ndarray:
    return (rng.random(n) < 0.05) * rng.exponential(size=n)


Case = Callable[[Rng, int], Draw]
EQUAL: dict[str, Case] = {
    **{f"accuracy, {rate:.0%} flip": partial(flips, rate / 2, rate / 2) for rate in (0.01, 0.05, 0.2)},
    "accuracy of tokens, flips in 10 %": partial(clusters, 0.5),
    "perplexity, normal": partial(nats, lambda rng, n: rng.normal(size=n), 0.0),
    "perplexity, skewed (exponential)": partial(nats, lambda rng, n: rng.exponential(size=n) - 1, 0.0),
    "perplexity, heavy tails (t, 3)": partial(nats, lambda rng, n: rng.standard_t(3, size=n), 0.0),
    "perplexity, 5 % of the examples, either way": partial(nats, lambda r, n: rare(r, n) * r.choice([-1, 1], n), 0.0),
}
CHANGED: dict[str, Case] = {
    **{f"accuracy, {rate:.0%} lost": partial(flips, rate, 0.0) for rate in (0.01, 0.05, 0.2)},
    "accuracy of tokens, 1 % lost": partial(clusters, 1.0),
    "perplexity, 5 % of the examples, all worse": partial(nats, lambda r, n: rare(r, n) + 0.05 * r.normal(size=n), 0.05),
    **{f"accuracy {share:g} of one model": partial(single, share) for share in (0.7, 0.95, 1.0)},
}  # fmt: skip


def told(found: Sequence[Draw]) -> float:
    """The share of intervals that leave out 0."""
    return float(np.mean([low > 1e-12 or high < -1e-12 for low, high, _ in found]))


def held(found: Sequence[Draw]) -> float:
    """The share of intervals that hold the truth."""
    return float(np.mean([low - 1e-12 <= truth <= high + 1e-12 for low, high, truth in found]))


def faster(factor: float, rng: Rng, n: int) -> bool:
    """Whether a model that takes ``factor`` of the time is told apart in n rounds, on a machine that changes its speed and is interrupted."""
    drift = 1 + 0.3 * np.sin(np.linspace(0, 3, n) + rng.uniform(0, 6))
    noise = np.exp(rng.normal(0, 0.03, (2, n))) * (1 + (rng.random((2, n)) < 0.05) * rng.exponential(1, (2, n)))
    return speedup(drift * noise[0], drift * noise[1] * factor).verdict != "no measurable change"


def scores(rng: Rng, n: int, draws: int) -> list[str]:
    """Head scores: an effect (exponential) in 2 % of the examples, none in the others; four such heads."""
    inside, few = [], []
    for _ in range(draws):
        effects = (rng.random((n, 4)) < 0.02) * rng.exponential(size=(n, 4))
        inside += (np.abs(effects.mean(0) - 0.02) <= 1.96 * standard_error(torch.from_numpy(effects)).numpy()).tolist()
        few += (carried_by(effects) < FEW).tolist()
    others = np.asarray(inside)[~np.asarray(few)]
    return [f"{n:,}", f"{np.mean(inside):.3f}", f"{np.mean(few):.3f}", f"{others.mean():.3f}" if len(others) else "–"]


def tables(draws: int) -> Iterator[str]:
    rng = np.random.default_rng(0)

    def rates(
        cases: dict[str, Case],
        rate: Callable[[Sequence[Draw]], float],
        sizes: Sequence[int] = SIZES,
        count: int = draws,
    ) -> Iterator[str]:
        rows = [[name, *(f"{rate([case(rng, n) for _ in range(count)]):.3f}" for n in sizes)] for name, case in cases.items()]  # fmt: skip
        yield from (*table(["", *(f"n = {n:,}" for n in sizes)], rows, "---"), "")

    yield from ("Simulated with known truths, for n examples.", "")
    yield from ("How often a verdict is wrong, for models that are equally good (should be at most .05):", "")
    yield from rates(EQUAL, told)
    yield from ("How often the 95 % interval of a change, or of one model's accuracy, contains the truth:", "")
    yield from rates(CHANGED, held)
    text = f"The same for metrics that are no means, by the jackknife: wrong verdicts, then coverage ({draws // 2:,} draws):"
    yield from (text, "")
    worse = {f"{name}, equally good": of_metric(name, partial(make, 0.0)) for name, make in OF_METRICS.items()}
    worse["wer, equally good, by the BCa bootstrap"] = bootstrapped("wer", partial(sentences, 0.0))
    yield from rates(worse, told, SIZES[2:], draws // 2)
    cases = {f"{name}, worse": of_metric(name, partial(make, 0.1)) for name, make in OF_METRICS.items()}
    yield from rates(cases, held, SIZES[2:], draws // 2)
    yield "How often a model is told apart from the dense one by its times, in n rounds (equally fast: should be at most .05):"
    yield ""
    speeds = {"equally fast": 1.0, "2 % slower": 1.02, "10 % slower": 1.1, "10 % faster": 0.9}
    rows = [[name, *(f"{np.mean([faster(factor, rng, n) for _ in range(draws)]):.3f}" for n in ROUNDS)] for name, factor in speeds.items()]  # fmt: skip
    yield from (*table(["", *(f"n = {n}" for n in ROUNDS)], rows, "---"), "")
    yield "How often a head score ± 1.96 standard errors contains the truth, with an effect in 2 % of the examples:"
    yield ""
    few = f"share reported to rest on fewer than {FEW:.0f} examples"
    rows = [scores(rng, n, draws // 4) for n in EXAMPLES]
    yield from (*table(["examples", "coverage", few, "coverage of the others"], rows, "---"), "")
    yield f"`python benchmarks/intervals.py`, {draws:,} draws per cell. `headprune.uncertainty` has the rule."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400)
    given = parser.parse_args()
    text = "\n".join(["## Intervals", "", *tables(given.draws)])
    print(text)
    if given.draws == parser.get_default("draws"):
        replace_section(DOCUMENT, "intervals", text)


if __name__ == "__main__":
    main()
