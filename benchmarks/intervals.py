"""Error rates and coverage of verdicts, intervals and standard errors, with few examples and with rare effects.

    python benchmarks/intervals.py                      # prints the tables, and writes the section of docs/benchmarks.md; minutes
    python benchmarks/intervals.py --draws 200          # rougher, printed only

Everything is drawn from known truths, so what should be .95 can be checked. "Before": what this replaced, the percentile
bootstrap over examples, and the standard deviation over the root of their number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from document import replace_section

from headprune.evaluation import Measurement, compare, interval
from headprune.latency import speedup
from headprune.scoring.base import standard_error
from headprune.uncertainty import FEW, carried_by

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
SIZES = (8, 20, 50, 200, 1500)
ROUNDS = (20, 50, 100, 400)
RESAMPLES = 200


def labels(correct: np.ndarray, tokens: np.ndarray | None = None) -> Measurement:
    """As `evaluate` gives them, of examples with as many labels as ``tokens`` says (one each)."""
    tokens = np.ones(len(correct), dtype=int) if tokens is None else tokens
    return Measurement({}, 1 - correct / tokens, correct.astype(float), tokens)


def losses(loss: np.ndarray) -> Measurement:
    return Measurement({}, loss, np.zeros(len(loss)), np.ones(len(loss), dtype=int))


def bootstrap(x: np.ndarray, tokens: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """What this replaced: percentile interval of ``sum x / sum tokens``."""
    counts = rng.multinomial(len(x), np.full(len(x), 1 / len(x)), size=RESAMPLES)
    return tuple(np.percentile((counts @ x) / (counts @ tokens), [2.5, 97.5]))


class Tally:
    """Shares of intervals that hold the truth, and that leave out 0."""

    def __init__(self) -> None:
        self.held: list[bool] = []
        self.told: list[bool] = []

    def add(self, low: float, high: float, truth: float) -> None:
        self.held.append(low - 1e-12 <= truth <= high + 1e-12)
        self.told.append(low > 1e-12 or high < -1e-12)

    @property
    def coverage(self) -> float:
        return float(np.mean(self.held))

    @property
    def verdicts(self) -> float:
        return float(np.mean(self.told))


def flips(n: int, lost: float, gained: float, draws: int, rng: np.random.Generator) -> tuple[Tally, Tally]:
    """One label an example, of which some shares are lost and gained."""
    before, after = Tally(), Tally()
    ones = np.ones(n, dtype=int)
    for _ in range(draws):
        u = rng.random(n)
        dense, pruned = np.where(u < lost, 1, np.where(u < lost + gained, 0, 1)), np.where(u < lost, 0, 1)
        change = compare(labels(dense), labels(pruned), "accuracy")
        after.add(change.low, change.high, gained - lost)
        before.add(*bootstrap((pruned - dense).astype(float), ones, rng), gained - lost)
    return before, after


def clusters(n: int, worse: float, draws: int, rng: np.random.Generator) -> tuple[Tally, Tally]:
    """Some labels an example (2 to 30), one in ten examples with flips of a tenth of them; of the flips, a share gets worse."""
    before, after = Tally(), Tally()
    truth = 0.1 * 0.1 * (1 - 2 * worse)
    for _ in range(draws):
        tokens = rng.integers(2, 31, size=n)
        many = np.where(rng.random(n) < 0.1, rng.binomial(tokens, 0.1), 0)
        lost = rng.binomial(many, worse)
        dense, pruned = tokens - (many - lost), tokens - lost
        change = compare(labels(dense, tokens), labels(pruned, tokens), "accuracy")
        after.add(change.low, change.high, truth)
        before.add(*bootstrap((pruned - dense).astype(float), tokens, rng), truth)
    return before, after


DIFFERENCES: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "normal": (lambda rng, n: rng.normal(size=n), 0.0),
    "skewed (exponential)": (lambda rng, n: rng.exponential(size=n) - 1, 0.0),
    "heavy tails (t, 3)": (lambda rng, n: rng.standard_t(3, size=n), 0.0),
    "5 % of the examples, either way": (
        lambda rng, n: (rng.random(n) < 0.05) * rng.choice([-1, 1], size=n) * rng.exponential(size=n), 0.0,
    ),
    "5 % of the examples, all worse": (
        lambda rng, n: (rng.random(n) < 0.05) * rng.exponential(size=n) + 0.05 * rng.normal(size=n), 0.05,
    ),
}  # fmt: skip


def nats(kind: str, n: int, draws: int, rng: np.random.Generator) -> tuple[Tally, Tally]:
    """Perplexity: differences of the loss per example."""
    before, after = Tally(), Tally()
    draw, truth = DIFFERENCES[kind]
    for _ in range(draws):
        x = draw(rng, n)
        change = compare(losses(np.zeros(n)), losses(x), "perplexity")
        after.add(np.log1p(change.low), np.log1p(change.high), truth)
        before.add(*bootstrap(x, np.ones(n), rng), truth)
    return before, after


def single(n: int, share: float, draws: int, rng: np.random.Generator) -> tuple[Tally, Tally]:
    """The accuracy of one model."""
    before, after = Tally(), Tally()
    for _ in range(draws):
        correct = (rng.random(n) < share).astype(float)
        after.add(*interval(labels(correct), "accuracy"), share)
        before.add(*bootstrap(correct, np.ones(n), rng), share)
    return before, after


def scores(n: int, rate: float, draws: int, rng: np.random.Generator) -> dict[str, float]:
    """Head scores: an effect (exponential) in a share of the examples, none in the others; four such heads."""
    old, new, told, quiet = [], [], [], []
    for _ in range(draws):
        effects = (rng.random((n, 4)) < rate) * rng.exponential(size=(n, 4))
        off = np.abs(effects.mean(0) - rate)
        error = standard_error(torch.from_numpy(effects)).numpy()
        old += (off <= 1.96 * effects.std(0, ddof=1) / n**0.5).tolist()
        held = off <= 1.96 * error
        new += held.tolist()
        few = carried_by(effects) < FEW
        told += few.tolist()
        quiet += held[~few].tolist()
    return {
        "before": np.mean(old),
        "after": np.mean(new),
        "told": np.mean(told),
        "quiet": np.mean(quiet) if quiet else np.nan,
    }


def rounds(n: int, factor: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Times of two models in n rounds, on a machine that changes its speed and is sometimes interrupted."""
    drift = 1 + 0.3 * np.sin(np.linspace(0, 3, n) + rng.uniform(0, 6))
    noise = np.exp(rng.normal(0, 0.03, (2, n))) * (1 + (rng.random((2, n)) < 0.05) * rng.exponential(1, (2, n)))
    return drift * noise[0], drift * noise[1] * factor


def speeds(n: int, factor: float, draws: int, rng: np.random.Generator) -> tuple[float, float]:
    """How often a model that takes ``factor`` of the time is told apart; before, by a bootstrap of the median."""
    before, after = [], []
    for _ in range(draws):
        dense, other = rounds(n, factor, rng)
        after.append(speedup(dense, other).verdict != "no measurable change")
        ratios = dense / other
        medians = np.median(ratios[rng.integers(0, n, size=(RESAMPLES * 5, n))], axis=1)
        low, high = np.percentile(medians, [2.5, 97.5])
        before.append(low > 1 or high < 1)
    return float(np.mean(before)), float(np.mean(after))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def tables(draws: int, sizes: tuple[int, ...] = SIZES) -> list[str]:
    rng = np.random.default_rng(0)

    def row(name: str, made: Callable[[int], tuple[Tally, Tally]], what: str) -> list[str]:
        found = [made(n) for n in sizes]
        return [name, *(f"{getattr(a, what):.3f} → {getattr(b, what):.3f}" for a, b in found)]

    head = [f"n = {n:,}" for n in sizes]
    lines = [
        "Simulated with known truths, for n examples. Each cell shows before → after: before is the percentile bootstrap over examples (for "
        "head scores, the standard deviation divided by the root of n), after is what headprune does now.",
        "",
        "How often a verdict is wrong, for models that are equally good (should be at most .05):",
        "",
    ]
    equal = [
        row(f"accuracy, {rate:.0%} flip", lambda n, r=rate: flips(n, r / 2, r / 2, draws, rng), "verdicts")
        for rate in (0.01, 0.05, 0.2)
    ]
    equal.append(row("accuracy of tokens, flips in 10 %", lambda n: clusters(n, 0.5, draws, rng), "verdicts"))
    equal += [
        row(f"perplexity, {kind}", lambda n, k=kind: nats(k, n, draws, rng), "verdicts")
        for kind, (_, truth) in DIFFERENCES.items()
        if truth == 0
    ]
    lines += table(["", *head], equal)
    lines += ["How often the 95 % interval of a change contains the truth:", ""]
    changed = [
        row(f"accuracy, {rate:.0%} lost", lambda n, r=rate: flips(n, r, 0.0, draws, rng), "coverage")
        for rate in (0.01, 0.05, 0.2)
    ]
    changed.append(row("accuracy of tokens, 1 % lost", lambda n: clusters(n, 1.0, draws, rng), "coverage"))
    changed += [
        row(f"perplexity, {kind}", lambda n, k=kind: nats(k, n, draws, rng), "coverage")
        for kind, (_, truth) in DIFFERENCES.items()
        if truth
    ]
    lines += table(["", *head], changed)
    lines += ["How often the 95 % interval of one model's accuracy contains the truth:", ""]
    lines += table(
        ["", *head],
        [row(f"accuracy {p:g}", lambda n, p=p: single(n, p, draws, rng), "coverage") for p in (0.7, 0.95, 1.0)],
    )
    lines += [
        "How often a model is told apart from the dense one by its times, in n rounds (equally fast: should be at most .05):",
        "",
    ]
    made = {
        name: [speeds(n, factor, max(draws, 20), rng) for n in ROUNDS]
        for name, factor in (("equally fast", 1.0), ("2 % slower", 1.02), ("10 % slower", 1.1), ("10 % faster", 0.9))
    }
    rows = [[name, *(f"{before:.3f} → {after:.3f}" for before, after in found)] for name, found in made.items()]
    lines += table(["", *(f"n = {n}" for n in ROUNDS)], rows)
    lines += [
        "How often a head score ± 1.96 standard errors contains the truth, with an effect in 2 % of the examples:",
        "",
    ]
    rows = []
    for n in (32, 128, 512, 2048):
        found = scores(n, 0.02, max(draws // 4, 20), rng)
        rows.append(
            [
                f"{n:,}",
                *(f"{found[k]:.3f}" for k in ("before", "after", "told")),
                "–" if np.isnan(found["quiet"]) else f"{found['quiet']:.3f}",
            ]
        )
    lines += table(
        [
            "examples",
            "coverage, before",
            "coverage, after",
            f"share reported to rest on fewer than {FEW:.0f} examples",
            "coverage of the others",
        ],
        rows,
    )
    return [
        *lines,
        f"`python benchmarks/intervals.py`, {draws:,} draws per cell. `headprune.uncertainty` has the rule.",
    ]


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
