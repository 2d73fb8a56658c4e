"""What model cards say of a pruned model's costs, and the report and the card of a fine-tuning."""

from __future__ import annotations

from dataclasses import replace

from headprune.amounts import code
from headprune.app.documents import BudgetResult, FinetuneRecord, Metrics, Run
from headprune.app.report import numbers
from headprune.app.report.content import Block, Section, Table, blocks_of, bullets, markdown
from headprune.app.report.sections import FINETUNED, plans, sections_of
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
    return markdown(_finetuned(record, name, whole=True))


def finetune_card(record: FinetuneRecord) -> str:
    """What the model card of the folder says: the verdict, the table, and the command."""
    pruned, teacher = map(numbers.without_place, (record.pruned, record.teacher))
    command = numbers.without_places(record.command)
    (section,) = _finetuned(replace(record, pruned=pruned, teacher=teacher, command=command), "", whole=False)
    return section.text


def _finetuned(record: FinetuneRecord, name: str, whole: bool) -> list[Section]:
    return sections_of(FINETUNED, record=record, table=finetune_table(record), name=name, whole=whole)[0]


def finetune_table(record: FinetuneRecord) -> Table:
    """The dense, the pruned and the fine-tuned model on the reporting part."""
    metric, rows = record.metric, []
    for key, name in (("dense", "dense"), ("pruned", "pruned"), ("finetuned", "pruned, fine-tuned")):
        change = record.changes.get(key)
        cells = (numbers.change(change, metric), change.verdict) if change else ("", "")
        rows.append((name, numbers.interval(record.models[key], metric), *cells))
    return Table(("model", f"{metric} (95 %)", "change from dense (95 %, paired)", "verdict"), rows)
