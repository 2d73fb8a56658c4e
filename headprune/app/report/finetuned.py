"""What a fine-tuning gave: its report, and what the model card says of it."""

from __future__ import annotations

from headprune.app.documents import FinetuneRecord
from headprune.app.report import markdown, numbers
from headprune.app.report.content import Block, Bullets, Section, Strong, Table, code

_NAMES = {"dense": "dense", "pruned": "pruned", "finetuned": "pruned, fine-tuned"}


def render(name: str, record: FinetuneRecord) -> str:
    """The whole report."""
    opening = _opening(record, record.pruned, record.teacher)
    command = f"Made by {code(record.command)}."
    blocks: list[Block] = [opening, results(record), _training(record), Bullets(record.notes), command]
    return markdown.render([Section(f"{name}: a pruned model, fine-tuned", blocks)])


def card(record: FinetuneRecord) -> str:
    """What the model card of the folder says."""
    opening = _opening(record, numbers.without_place(record.pruned), numbers.without_place(record.teacher))
    command = f"Made by {code(numbers.without_places(record.command))}."
    blocks: list[Block] = [opening, results(record), command]
    return "\n\n".join(map(markdown.block_of, blocks))


def results(record: FinetuneRecord) -> Table:
    """The dense, the pruned and the fine-tuned model on the reporting part."""
    metric, rows = record.metric, []
    for key, name in _NAMES.items():
        change = getattr(record.changes, key, None)
        cells = (numbers.change(change, metric), change.verdict) if change else ("", "")
        rows.append((name, numbers.interval(getattr(record.models, key), metric), *cells))
    return Table(("model", f"{metric} (95 %)", "change from dense (95 %, paired)", "verdict"), rows)


def _opening(record: FinetuneRecord, pruned: str, teacher: str) -> Strong:
    metric, change, gain = record.metric, record.changes.finetuned, record.changes.gain
    value = numbers.value(record.models.finetuned.metrics[metric], metric)
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
