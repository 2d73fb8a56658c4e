"""What model cards say of a pruned model's costs, and the report and the card of a fine-tuning."""

from __future__ import annotations

from dataclasses import replace

from headprune.amounts import code
from headprune.app.documents import BudgetResult, FinetuneRecord, Metrics, Run
from headprune.app.report import numbers
from headprune.app.report.content import Block, Section, Strong, Table, blocks_of, bullets, markdown
from headprune.app.report.sections import plans
from headprune.app.report.sections.measured import latency_table, metrics_table
from headprune.app.report.sections.opening import precision


def pruned_card(run: Run, metrics: Metrics, budget: BudgetResult) -> str:
    """The report's tables of the model beside the dense one, and how it was made."""
    one, name, rows = replace(metrics, budgets=(budget,)), budget.name, []
    for row in metrics.latency.rows:
        timings = {"dense": row.timings["dense"], name: row.timings[name]}
        rows.append(replace(row, timings=timings, speedups={name: row.speedups[name]}))
    dataset = code(numbers.without_place(run.options.data.dataset))
    machine = numbers.device(metrics.environment or run.environment, run.model.dtype)
    blocks: list[Block] = [
        f"On {budget.change.examples:,} examples of {dataset} ({code(run.parts.report.split)}), none of which decided anything; "
        "intervals: 95 %, paired by example for the change. “Dense” is the model before this run.",
        replace(plans.table(one), strong=None),
        metrics_table(one),
        *filter(None, [precision(run, one)]),
        latency_table(rows),
        f"Times: one forward pass on {machine}. Made by headprune {run.environment.headprune} with:",
        bullets(code(numbers.without_places(command)) for command in dict.fromkeys(run.commands)),
    ]
    return blocks_of(blocks)


def finetune_report(name: str, record: FinetuneRecord) -> str:
    """The whole report."""
    opening, table, command = _finetuned(record)
    text = blocks_of([opening, table, _training(record), bullets(record.notes), command])
    return markdown([Section(f"{name}: a pruned model, fine-tuned", text)])


def finetune_card(record: FinetuneRecord) -> str:
    """What the model card of the folder says."""
    pruned, teacher = map(numbers.without_place, (record.pruned, record.teacher))
    command = numbers.without_places(record.command)
    return blocks_of(_finetuned(replace(record, pruned=pruned, teacher=teacher, command=command)))


def _finetuned(record: FinetuneRecord) -> list[Block]:
    """The verdict, the table, and the command."""
    metric, change, gain = record.metric, record.changes["finetuned"], record.changes["gain"]
    value = numbers.value(record.models["finetuned"].metrics[metric], metric)
    opening = Strong(
        f"{metric} {value}: {change.verdict} against the dense model, {gain.verdict} against the pruned one.",
        f"{code(record.pruned)} was trained with distillation from {code(record.teacher)}. On {change.examples:,} examples that decided "
        f"nothing, the {metric} changed by {numbers.change(change, metric)} from the dense model's, and by {numbers.change(gain, metric)} "
        "from the pruned one's before training.",
    )
    return [opening, finetune_table(record), f"Made by {code(record.command)}."]


def finetune_table(record: FinetuneRecord) -> Table:
    """The dense, the pruned and the fine-tuned model on the reporting part."""
    metric, rows = record.metric, []
    for key, name in (("dense", "dense"), ("pruned", "pruned"), ("finetuned", "pruned, fine-tuned")):
        change = record.changes.get(key)
        cells = (numbers.change(change, metric), change.verdict) if change else ("", "")
        rows.append((name, numbers.interval(record.models[key], metric), *cells))
    return Table(("model", f"{metric} (95 %)", "change from dense (95 %, paired)", "verdict"), rows)


def _training(record: FinetuneRecord) -> str:
    """What was trained, and which weights were kept."""
    training, metric, choose, mixture = record.training, record.metric, record.parts.choose, record.options.mixture
    (best,) = (epoch for epoch in training.history if epoch["step"] == training.best)
    kept = f"the weights after epoch {best['epoch']:g}{'' if training.best else ' (training made none better)'}"
    values = [(numbers.value(epoch[metric], metric), epoch["epoch"]) for epoch in training.history]
    course = ", ".join(f"{value} after {number:g} epoch{'s' * (number != 1)}" for value, number in values)
    hidden = ", and the relative squared difference of the hidden states" * mixture.hidden_states
    return (
        f"Loss: {mixture.alpha:g} x divergence from the dense model at temperature {mixture.temperature:g} + {1 - mixture.alpha:g} x the "
        f"labels' cross-entropy{hidden}. Learning rate {record.options.learning_rate:g}, {training.steps:,} of {training.planned:,} steps on "
        f"{training.examples:,} examples an epoch. Kept: {kept}, by {metric} on {choose.examples:,} choosing examples "
        f"({code(choose.split)}): {course}."
    )
