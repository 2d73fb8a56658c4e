"""What model cards say of a pruned model's costs, and the report and the card of a fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator

from headprune import amounts
from headprune.amounts import code
from headprune.app.documents import BudgetResult, FinetuneRecord, Metrics, Run
from headprune.app.report import numbers
from headprune.app.report.content import Block, Bullets, Section, Strong, Table, block_of, markdown


def pruned_card(run: Run, metrics: Metrics, budget: BudgetResult) -> str:
    """A table of the model beside the dense one, and how it was made."""
    dataset = numbers.without_place(run.options.data.dataset)
    machine = numbers.device(metrics.environment or run.environment, run.model.dtype)
    blocks: list[Block] = [
        f"On {budget.change.examples:,} examples of {code(dataset)} ({code(run.parts.report.split)}), none of which decided anything; "
        "intervals: 95 %, paired by example for the change. “Dense” is the model before this run.",
        _costs(metrics, budget),
        " ".join(_origin(run, metrics, budget)),
        f"Times: one forward pass on {machine}. Made by headprune {run.environment.headprune} with:",
        Bullets([code(numbers.without_places(command)) for command in dict.fromkeys(run.commands)]),
    ]
    return "\n\n".join(map(block_of, blocks))


def _costs(metrics: Metrics, budget: BudgetResult) -> Table:
    metric, dense, pruned = metrics.metric, metrics.dense, budget.pruned
    change = f"{numbers.change(budget.change, metric)}: {budget.change.verdict}"
    rows = [[metric, numbers.interval(dense, metric), numbers.interval(pruned, metric), change]]
    for name, title in numbers.METRICS.items():
        if name != metric and name in dense.metrics:
            rows.append([title, *(numbers.value(model.metrics[name], name) for model in (dense, pruned)), ""])
    counts = [f"{model.parameters:,}" for model in (dense, budget)]
    flops = [amounts.flops(model.flops, 4) for model in (dense, budget)]
    rows.append(["parameters", *counts, numbers.share_of(budget.parameters, dense.parameters)])
    rows.append(["FLOPs, one example of median length", *flops, numbers.share_of(budget.flops, dense.flops)])
    for row in metrics.latency.rows:
        faster = row.speedups[budget.name]
        times = (f"{row.timings[name].median:.2f}" for name in ("dense", budget.name))
        rows.append([f"ms, {numbers.shape(row)}", *times, f"{numbers.ratio(faster)} as fast: {faster.verdict}"])
    return Table(("", "dense", f"{budget.kept} of {budget.total} heads", "change"), rows)


def _origin(run: Run, metrics: Metrics, budget: BudgetResult) -> Iterator[str]:
    """What is due to the choice of heads, to repair and to training, and how the weights are stored."""
    metric, repair, tuning = metrics.metric, budget.repair, budget.finetune
    mean = f"{'geometric ' * (metric == 'perplexity')}mean {metric} of {numbers.value(numbers.mean_of(budget.random, metric), metric)}"
    how = "layer by layer only" if repair and repair.layers_alone else "as well"
    yield f"Random heads in the same number{f', repaired {how},' if repair else ''} give a {mean}."
    if repair is not None:
        without = numbers.value(repair.without.metrics[metric], metric)
        yield f"Without the repair{' and before training' if tuning else ''}, the {metric} of this model is {without}."
    if tuning is not None:
        before = numbers.value(tuning.before.metrics[metric], metric)
        yield f"It was trained after the pruning, with distillation from the dense model; before that its {metric} was {before}."
    if budget.dtype and budget.dtype != run.model.dtype:
        option = code(f'dtype="{run.model.dtype}"')
        yield f"Weights are stored in {budget.dtype}; it was measured in {run.model.dtype}, as `from_pretrained` with {option} gives."


_NAMES = {"dense": "dense", "pruned": "pruned", "finetuned": "pruned, fine-tuned"}


def finetune_report(name: str, record: FinetuneRecord) -> str:
    """The whole report."""
    opening = _opening(record, record.pruned, record.teacher)
    command = f"Made by {code(record.command)}."
    blocks: list[Block] = [opening, finetune_table(record), _training(record), Bullets(record.notes), command]
    return markdown([Section(f"{name}: a pruned model, fine-tuned", blocks)])


def finetune_card(record: FinetuneRecord) -> str:
    """What the model card of the folder says."""
    opening = _opening(record, numbers.without_place(record.pruned), numbers.without_place(record.teacher))
    command = f"Made by {code(numbers.without_places(record.command))}."
    blocks: list[Block] = [opening, finetune_table(record), command]
    return "\n\n".join(map(block_of, blocks))


def finetune_table(record: FinetuneRecord) -> Table:
    """The dense, the pruned and the fine-tuned model on the reporting part."""
    metric, rows = record.metric, []
    for key, name in _NAMES.items():
        change = record.changes.get(key)
        cells = (numbers.change(change, metric), change.verdict) if change else ("", "")
        rows.append((name, numbers.interval(record.models[key], metric), *cells))
    return Table(("model", f"{metric} (95 %)", "change from dense (95 %, paired)", "verdict"), rows)


def _opening(record: FinetuneRecord, pruned: str, teacher: str) -> Strong:
    metric, change, gain = record.metric, record.changes["finetuned"], record.changes["gain"]
    value = numbers.value(record.models["finetuned"].metrics[metric], metric)
    return Strong(
        f"{metric} {value}: {change.verdict} against the dense model, {gain.verdict} against the pruned one.",
        f"{code(pruned)} was trained with distillation from {code(teacher)}. On {change.examples:,} examples that decided nothing, the "
        f"{metric} changed by {numbers.change(change, metric)} from the dense model's, and by {numbers.change(gain, metric)} from the "
        "pruned one's before training.",
    )


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
