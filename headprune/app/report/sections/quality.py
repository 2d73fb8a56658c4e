"""What pruning costs: every metric, on the reported examples and on other data, and what repair gained."""

from __future__ import annotations

from collections.abc import Iterator

from headprune import amounts
from headprune.app.documents import BudgetResult, Metrics, Run
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Block, Bullets, Section, Strong, Table, code, notes_by_size
from headprune.repairing.steps import STEPS


def other_data(run: Run, metrics: Metrics) -> Section | None:
    """Second datasets, that nothing was fitted to."""
    if not metrics.also:
        return None
    metric, budgets = metrics.metric, verdict.largest_first(metrics)
    repairs = any(b.repair for b in budgets)
    effect = ["repair"] * repairs or ["training"] * verdict.trained(metrics)
    rows = []
    for i, data in enumerate(metrics.also):
        name = f"{code(data.name)}, {data.data.examples:,} examples"
        rows.append(
            [name, f"{budgets[0].total} (dense)", numbers.interval(data.dense, metric), "", "", *("" for _ in effect)]
        )
        for b in budgets:
            there = b.also[i]
            gain = f"{numbers.change(there.gain, metric)}, {there.gain.verdict}" if there.gain else "–"
            value, change = numbers.interval(there.pruned, metric), numbers.change(there.change, metric)
            rows.append([name, str(b.kept), value, change, there.change.verdict, *(gain for _ in effect)])
    head = ["data", "heads kept", f"{metric} (95 %)", "change (95 %)", "verdict", *(f"effect of {e}" for e in effect)]
    what = "pruning and repair generalise" if repairs else "pruning generalises"
    sentence = (
        f"None of this data was used to score, to choose or to fit, so it shows how {what} beyond the first dataset."
    )
    return Section("On other data", [sentence, Table(head, rows)])


def all_metrics(run: Run, metrics: Metrics) -> Section:
    """Accuracy, F1 and loss, the p-values and the FLOPs."""
    metric, dense = metrics.metric, metrics.dense
    names = [metric, *(n for n in numbers.METRICS if n in dense.metrics and n != metric)]
    values = [numbers.value(dense.metrics[n], n) for n in names]
    rows = [[f"{metrics.budgets[0].total} (dense)", *values, "", amounts.flops(dense.flops, 4)]]
    for b in verdict.largest_first(metrics):
        p, values = b.change.p_value, [numbers.value(b.pruned.metrics[n], n) for n in names]
        flops = f"{amounts.flops(b.flops, 4)} ({numbers.share_of(b.flops, dense.flops)})"
        rows.append([str(b.kept), *values, "" if p is None else f"{p:.2g}", flops])
    sentence = (
        f"p: of the change of {metric}, by the test that gives its interval. FLOPs: one example of median length."
    )
    head = ["heads kept", *(numbers.METRICS.get(n, n) for n in names), "p", "FLOPs"]
    return Section("All metrics", (), "Every metric, with p-values and FLOPs", [Table(head, rows), sentence])


def repair(run: Run, metrics: Metrics) -> Section | None:
    """What repair and training did to each model."""
    budgets = [b for b in verdict.largest_first(metrics) if b.repair or b.finetune]
    if not budgets:
        return None
    notes = notes_by_size([(b.kept, b.repair.notes) for b in budgets if b.repair])
    blocks = [_values(metrics, budgets), *_explanation(budgets), *_steps(budgets), *notes]
    return Section("Repair", (), "How the remaining weights were changed, and what that gained", blocks)


def _values(metrics: Metrics, budgets: list[BudgetResult]) -> Table:
    """The metric on the reported examples: without the repair, with it, after training."""
    metric = metrics.metric
    alone, tuned = any(map(verdict.by_cheaper_repair, budgets)), verdict.trained(metrics)
    rows = []
    for b in budgets:
        without, only = (b.repair.without, b.repair.layers_alone) if b.repair else (None, None)
        models = [without, *[only] * alone, verdict.untrained(b), *[b.pruned if b.finetune else None] * tuned]
        rows.append([str(b.kept), *("–" if m is None else numbers.value(m.metrics[metric], metric) for m in models)])
    head = [f"{metric} without repair", *["layer by layer only"] * alone, "repaired", *["fine-tuned"] * tuned]
    return Table(["heads kept", *head], rows)


def _explanation(budgets: list[BudgetResult]) -> Iterator[str]:
    if first := next((b.repair for b in budgets if b.repair), None):
        mixtures = f" and {first.mixtures:,} mixtures of them (the first half of one text, the second of another)"
        yield (
            f"Repair fits the kept heads' weights by least squares, on the {first.examples:,} scoring examples"
            f"{mixtures if first.mixtures else ''}, to what the dense model computes there. It uses no labels and no training."
        )
    if tuning := next((b.finetune for b in budgets if b.finetune), None):
        yield (
            f"Fine-tuned on {tuning.examples:,} examples for {tuning.options.epochs:g} epoch{'s' * (tuning.options.epochs != 1)}, with "
            "distillation from the dense model; the choosing part decided which epoch is kept."
        )


def _steps(budgets: list[BudgetResult]) -> Iterator[Block]:
    """How every step of repair did on the examples that choose."""
    trials = {(b.kept, t.step): t for b in budgets if b.repair for t in b.repair.trials}
    if not trials:
        return
    names = [*dict.fromkeys(step for _, step in trials)]
    rows = []
    for b in budgets:
        cells = []
        for name in names:
            trial, answers = trials.get((b.kept, name)), b.repair.answers if b.repair else None
            part = f" ({answers.part:.0%} of it)" if name == "answers" and answers and answers.part < 1 else ""
            cell = f"{numbers.known(trial.before)} → {numbers.known(trial.after)}{part}" if trial else "–"
            cells.append(f"left out ({cell})" if trial and not trial.kept else cell)
        rows.append([str(b.kept), *cells])
    yield (
        f"Every step is kept only if it does better on the {next(iter(trials.values())).examples:,} choosing examples. Mean divergence from "
        "the dense model's answers there (KL, in nats; the squared difference, where answers are no probabilities), before → after the step:"
    )
    yield Table(["heads kept", *names], rows)
    yield Bullets([Strong(f"{step.name}:", f"{step.about}.") for step in STEPS if step.name in names])
