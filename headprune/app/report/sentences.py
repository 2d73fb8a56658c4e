"""What a run comes to, in words: the same in the report, the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from headprune.app.documents import BudgetResult, Metrics, Run
from headprune.app.report import findings, numbers
from headprune.app.report.verdict import (
    AgainstRandom,
    Kind,
    against_random,
    elsewhere,
    headline_row,
    verdict,
)
from headprune.evaluation import Change
from headprune.planning import STRATEGIES
from headprune.scoring.base import HeadScores

_SHARES = {
    Fraction(1, 2): "half", Fraction(1, 3): "a third", Fraction(2, 3): "two thirds", Fraction(1, 4): "a quarter",
    Fraction(3, 4): "three quarters", Fraction(1): "all",
}  # fmt: skip

_NAMED = 10  # heads in a list
RANDOM, SAVED = "random heads (mean, range)", "saved in"  # columns of the table


def headline(metrics: Metrics) -> str:
    """The run in one sentence."""
    found = verdict(metrics)
    b, metric = found.budget, metrics.metric
    dense, pruned = (numbers.value(m.metrics[metric], metric) for m in (metrics.dense, b.pruned))
    against = f"{metric} {pruned} against {dense} ({_cost(b.change, metric)}), {_speed(metrics, b)}"
    heads = _heads(b)
    if found.kind is Kind.GUESSING:
        level = numbers.value(metrics.dense.guessing or 0.0, metric)
        return (
            f"The dense model is no better than guessing ({metric} {dense}; a model that knows nothing has {level}), so this run "
            "says nothing about its heads."
        )
    if found.kind is Kind.UNSURE:
        left = numbers.loss(found.budget.change, metrics.metric)
        return (
            f"{b.change.examples:,} examples are too few to say whether heads can go: without {heads}, {against}; a loss of up to "
            f"{left} is possible."
        )
    if found.kind is Kind.COSTS:
        begin = (
            "Every plan loses something; the least is lost without"
            if len(metrics.budgets) > 1
            else "It costs to remove"
        )
        return f"{begin} {heads}: {against}."
    return f"{heads[0].upper()}{heads[1:]} can go: {against}."


def rule(metrics: Metrics) -> str:
    """By what rule a model is recommended, or why none is."""
    found = verdict(metrics)
    limit = numbers.amount(found.tolerated, metrics.metric)
    if any(b.budget and b.budget.parsed and b.budget.parsed.by_metric for b in metrics.budgets):
        if found.recommended:
            return f"Recommended: {found.budget.kept} heads, the fewest with which a loss beyond {limit}, as asked for, is ruled out at 95 %."
        return f"None is recommended: none rules out, on the reported examples, a loss beyond the {limit} that were asked for."
    what = f"no loss could be shown and one of more than {limit} is ruled out (at 95 %)"
    if found.recommended:
        few = "the fewest with which" if len(metrics.budgets) > 1 else "since"
        return f"Recommended: {found.budget.kept} heads, {few} {what}."
    return f"None is recommended; one would be if {what}."


def over_random(metrics: Metrics) -> str:
    """Whether the chosen heads beat random ones in the same number."""
    found = [against_random(metrics, b) for b in findings.largest_first(metrics)]
    told = []
    for word, answer in (
        ("better", "yes"),
        ("worse", "no, worse"),
        ("no measurable difference", "no measurable difference"),
    ):
        if some := [f"{r.budget.kept} heads{_gain(r, metrics.metric)}" for r in found if r.verdict == word]:
            told.append(f"{answer} with {_listed(some)}")
    text = "; ".join(told)
    text = f"{text[0].upper()}{text[1:]}."
    if any(r.value != r.budget.pruned.metrics[metrics.metric] for r in found):
        text += " Both were repaired layer by layer alone for this, so these are not the figures of the table."
    if any(r.change is not None for r in found):
        text += " The intervals are over examples, not over other draws of random heads."
    return text


def _gain(found: AgainstRandom, metric: str) -> str:
    """What choosing gained."""
    against = f"{numbers.value(found.value, metric)} against {numbers.value(found.mean, metric)}"
    if found.change is None:
        return f" ({against})"
    return f" ({against}: {numbers.change(found.change, metric).replace(' (', ', ')}"


def cautions(run: Run, metrics: Metrics) -> list[str]:
    """What a reader must know before believing the headline."""
    metric, told = metrics.metric, []
    if all(against_random(metrics, b).verdict != "better" for b in metrics.budgets) and not _of_user(metrics):
        told.append(
            "The chosen heads do not do measurably better than random ones in the same number, so this run is no evidence that it matters which go."
        )
    if (trained := findings.trained_on_choosing(metrics)) is not None:
        split = run.parts.choose.split
        told.append(
            f"The dense model's {metric} is {numbers.value(trained, metric)} where plans were chosen (`{split}`) and "
            f"{numbers.value(metrics.dense.metrics[metric], metric)} on the examples that are reported, so it was probably trained on "
            f"`{split}`. The reported figures stand, but the choice between plans was made on examples that flatter the model; "
            "`--choose-split` names others."
        )
    for e in elsewhere(metrics):
        if e.repair_hurt and e.gain is not None:
            told.append(
                f"With {e.budget.kept} heads, repair hurts on {e.name} ({numbers.change(e.gain, metric)}), while it "
                f"{_did(e.budget)} on the first data. `--no-repair` leaves it out."
            )
        if e.worse:
            told.append(
                f"With {e.budget.kept} heads, {metric} is measurably worse on {e.name} ({numbers.change(e.change, metric)}), though not "
                "on the first data."
            )
    if cut := run.parts.report.shortened:
        told.append(
            f"{cut:,} of the {run.parts.report.examples:,} reported texts were cut at their end: they are longer than the model or "
            "`--max-length` allows."
        )
    for b in findings.rests_on_few(metrics):
        told.append(
            f"With {b.kept} heads, the change of the loss rests on about {b.change.carried_by:.0f} of the {b.change.examples:,} "
            "examples, so its interval may be too narrow; measure on more."
        )
    return told


def stay_though_low(scores: Sequence[HeadScores], budget: BudgetResult) -> list[str]:
    """Heads that a plan keeps although they score low, by every method, and why; nothing where there are none."""
    told, why = [], []
    for s in scores:
        if s.method == "random" or not (heads := findings.kept_though_low(s, budget)):
            continue
        more = f" and {len(heads) - _NAMED} more" if len(heads) > _NAMED else ""
        told.append(
            f"By {s.method}, these stay although they are among the {budget.total - budget.kept} lowest: {', '.join(heads[:_NAMED])}{more}."
        )
        why.append(_why_low(s, budget))
    return [*told, *dict.fromkeys(why)]


def _why_low(scores: HeadScores, budget: BudgetResult) -> str:
    if not budget.strategy:
        return "The plan is the user's own."
    known = STRATEGIES.get(budget.strategy)
    if known is not None and known.runs_model:
        return (
            "A head is scored while all others are there, but the plan was made by trying what goes together: a head whose work others "
            "can do scores low, and matters once those others have gone. Scores that are close may also be in another order by chance (±)."
        )
    if budget.method != scores.method:
        return f"The heads that went were chosen by {budget.method}, which orders them otherwise than {scores.method}."
    return "Layers, groups or protected heads held them back: by scores alone they would have gone."


@dataclass(frozen=True)
class Row:
    """A row of the first table; ``recommended`` if it is the model to take."""

    cells: tuple[str, ...]
    recommended: bool = False


def table(metrics: Metrics) -> tuple[tuple[str, ...], list[Row]]:
    """The first table, its head and its rows: the dense model, then the pruned ones by size."""
    metric, dense, first = metrics.metric, metrics.dense, headline_row(metrics.latency)
    found = verdict(metrics)
    head = (
        "heads kept", f"{metric} (95 %)", "change (95 %)", "verdict", RANDOM, f"speed at {numbers.shape(first)} (95 %)",
        "parameters", SAVED,
    )  # fmt: skip
    rows = [
        Row(
            (
                f"{metrics.budgets[0].total} (dense)",
                numbers.measured_value(dense, metric),
                "",
                "",
                "",
                "",
                f"{dense.parameters:,}",
                "",
            )
        )
    ]
    for b in findings.largest_first(metrics):
        r = against_random(metrics, b)
        size = f"{b.checkpoint}/" + (f", {numbers.size(b.size)}" if b.size else "")
        rows.append(
            Row(
                (
                    str(b.kept), numbers.measured_value(b.pruned, metric), numbers.change(b.change, metric), b.change.verdict,
                    f"{numbers.value(r.mean, metric)} ({numbers.value(r.low, metric)} to {numbers.value(r.high, metric)})",
                    numbers.ratio(first.speedups[b.name]),
                    f"{b.parameters:,} ({b.parameters / dense.parameters - 1:+.1%})", size,
                ),
                found.recommended and b is found.budget,
            )
        )  # fmt: skip
    return head, rows


def elsewhere_rows(metrics: Metrics) -> list[str]:
    """A line for every pruned model on every second dataset."""
    metric = metrics.metric
    return [
        f"{data.name}: {metric} {numbers.measured_value(there.pruned, metric)} with {b.kept} heads against "
        f"{numbers.value(data.dense.metrics[metric], metric)}: {numbers.change(there.change, metric)}, {there.change.verdict}."
        for b in findings.largest_first(metrics)
        for data, there in zip(metrics.also, b.also, strict=True)
    ]


def _cost(change: Change, metric: str) -> str:
    if change.verdict == "no measurable change":
        return change.verdict
    forms = {"accuracy": f"{100 * change.value:+.1f} points", "perplexity": f"{change.value:+.1%}"}
    by = forms.get(metric, f"{change.value:+.3g}")
    return f"{by}, {change.verdict} by more than chance"


def _speed(metrics: Metrics, budget: BudgetResult) -> str:
    """How much faster, and how much faster it could be."""
    latency, row = metrics.latency, headline_row(metrics.latency)
    gained, where = row.speedups[budget.name], numbers.shape(row)
    told = {
        "faster": f"{gained.ratio:.2f}x as fast at {where}",
        "slower": f"slower at {where} ({gained.ratio:.2f}x as fast)",
    }.get(gained.verdict, f"not measurably faster at {where} ({numbers.ratio(gained)})")
    if not latency.bound:
        return told
    limit = row.speedups[latency.bound]
    if limit.verdict != "faster":
        return f"{told}; even without any head it would not be"
    if limit.ratio <= gained.ratio:
        return told
    return f"{told}; more than {limit.ratio:.2f}x can't be had by pruning heads"


def _heads(budget: BudgetResult) -> str:
    gone = budget.total - budget.kept
    share = _SHARES.get(Fraction(gone, budget.total))
    return f"{share} of the heads ({gone} of {budget.total})" if share else f"{gone} of the {budget.total} heads"


def _did(budget: BudgetResult) -> str:
    gain = budget.repair.gain if budget.repair else None
    if gain is None or gain.verdict == "no measurable change":
        return "changed nothing measurable"
    return {"better": "helped", "worse": "hurt too"}[gain.verdict]


def _of_user(metrics: Metrics) -> bool:
    return metrics.planning.plan is not None


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
