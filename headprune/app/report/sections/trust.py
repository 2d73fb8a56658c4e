"""What a reader must know before believing the headline, and how to make the run again."""

from __future__ import annotations

from collections.abc import Iterator

from headprune.amounts import code, head_count
from headprune.app.documents import Examples, Metrics, Run
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Markdown, bullets, command_lines
from headprune.uncertainty import FEW


def cautions(run: Run, metrics: Metrics) -> list[str]:
    """Every one that this run needs, the most important first."""
    return [
        *_no_better_than_random(metrics), *_trained_on_choosing(run, metrics), *_worse_on_other_data(metrics),
        *shortened(run.parts.report, "reported"), *_carried_by_few(metrics),
    ]  # fmt: skip


def shortened(part: Examples, role: str) -> Iterator[str]:
    """Texts were cut at their end."""
    were, their, they = ("was", "its", "it is") if part.shortened == 1 else ("were", "their", "they are")
    if part.shortened:
        yield (
            f"{part.shortened:,} of the {part.examples:,} {role} texts {were} cut at {their} end: {they} longer than the model or "
            "`--max-length` allows."
        )


def _no_better_than_random(metrics: Metrics) -> Iterator[str]:
    verdicts = {verdict.against_random(metrics, b).verdict for b in metrics.budgets}
    if metrics.planning.plan is None and "better" not in verdicts:
        several = len(metrics.budgets) > 1
        sizes = "At none of these sizes did the chosen heads" if several else "The chosen heads did not"
        yield f"{sizes} measurably beat as many random ones, so this run does not show that it matters which heads go."


def _trained_on_choosing(run: Run, metrics: Metrics) -> Iterator[str]:
    """The dense model is far better where plans were chosen than where they are reported."""
    dense, metric = metrics.dense, metrics.metric
    (there,) = (p for p in metrics.curve if p.method == "dense")
    if there.low > dense.high if metric == "accuracy" else there.high < dense.low:
        split = code(run.parts.choose.split)
        yield (
            f"The dense model's {metric} is {numbers.value(there.value, metric)} where plans were chosen ({split}) and "
            f"{numbers.value(dense.metrics[metric], metric)} on the examples that are reported, so it was probably trained on "
            f"{split}. The reported figures stand, but plans were compared on examples that the model has memorised; choose others with "
            "`--choose-split`."
        )


def _worse_on_other_data(metrics: Metrics) -> Iterator[str]:
    """A pruned model does worse on second data than the first data lets expect."""
    metric = metrics.metric
    for b in verdict.largest_first(metrics):
        gain = b.repair.gain.verdict if b.repair and b.repair.gain else ""
        effect = "helped" if gain == "better" else "changed nothing measurable"
        for data, there in zip(metrics.also, b.also, strict=True):
            if there.gain and there.gain.verdict == "worse" and gain != "worse":
                yield (
                    f"With {head_count(b.kept)}, repair hurts on {code(data.name)} ({numbers.change(there.gain, metric)}), while it "
                    f"{effect} on the first data. `--no-repair` turns it off."
                )
            if there.change.verdict == "worse" and b.change.verdict != "worse":
                yield (
                    f"With {head_count(b.kept)}, {metric} is measurably worse on {code(data.name)} "
                    f"({numbers.change(there.change, metric)}), though not on the first data."
                )


def _carried_by_few(metrics: Metrics) -> Iterator[str]:
    """A change of perplexity hangs on so few examples that its interval may be too narrow."""
    for b in verdict.largest_first(metrics) if metrics.metric != "accuracy" else ():
        if 0 < b.change.carried_by < FEW <= b.change.examples:
            yield (
                f"With {head_count(b.kept)}, the change of the loss rests on about {b.change.carried_by:.0f} of the "
                f"{b.change.examples:,} examples, so its interval may be too narrow; measure on more."
            )


def notes(run: Run) -> Markdown:
    """The columns of the data, what was guessed or left out, and the layers that cannot be pruned."""
    columns = ", ".join(f"{what} = {code(name)}" for what, name in run.columns.items())
    fixed = (f"{code(a.name)} cannot be pruned: {a.reason}." for a in run.model.layers if not a.prunable)
    return bullets([f"Columns: {columns}.", *run.notes, *fixed])


def commands(run: Run) -> Markdown:
    """What to type to make the run again."""
    return command_lines([*dict.fromkeys(map(numbers.to_repeat, run.commands))])
