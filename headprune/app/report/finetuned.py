"""The short report of a fine-tuning. Every figure in it comes from its finetune.json."""

from __future__ import annotations

from dataclasses import replace

from headprune.amounts import visible
from headprune.app.documents import FinetuneRecord
from headprune.app.report import numbers
from headprune.app.report.heads import prose
from headprune.checkpoint import code

_NAMES = {"dense": "dense", "pruned": "pruned", "finetuned": "pruned, fine-tuned"}


def render(name: str, record: FinetuneRecord) -> str:
    """The whole report."""
    sections = [f"# {prose(name)}: a pruned model, fine-tuned", _opening(record), _results(record), _training(record)]
    return visible("\n\n".join([*sections, f"Made by {code(record.command)}."]) + "\n")


def _opening(d: FinetuneRecord) -> str:
    metric, change, gain = d.metric, d.changes.finetuned, d.changes.gain
    return (
        f"{code(d.pruned)} after training with distillation from {code(d.teacher)}. On {change.examples:,} examples that "
        f"decided nothing, {metric} is {numbers.value(d.models.finetuned.metrics[metric], metric)}: against the dense "
        f"model {numbers.change(change, metric)}, **{change.verdict}**; against the pruned one before training "
        f"{numbers.change(gain, metric)}, **{gain.verdict}**."
    )


def card(record: FinetuneRecord) -> str:
    """What the model card of the folder says."""
    pruned, teacher = (numbers.without_place(place) for place in (record.pruned, record.teacher))
    made = code(numbers.without_places(record.command))
    return "\n\n".join(
        [_opening(replace(record, pruned=pruned, teacher=teacher)), _results(record), f"Made by {made}."]
    )


def rows(d: FinetuneRecord) -> list[list[str]]:
    """The table of results, its head first."""
    metric = d.metric
    found = [["model", f"{metric} (95 %)", "change from dense (95 %, paired)", "verdict"]]
    for key, model in vars(d.models).items():
        value, low, high = (numbers.value(v, metric) for v in (model.metrics[metric], model.low, model.high))
        change = getattr(d.changes, key, None)
        told = [numbers.change(change, metric), change.verdict] if change else ["", ""]
        found.append([_NAMES[key], f"{value} ({low} to {high})", *told])
    return found


def _results(d: FinetuneRecord) -> str:
    head, *body = rows(d)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _training(d: FinetuneRecord) -> str:
    t, o, m, metric = d.training, d.options, d.options.mixture, d.metric
    hidden = ", and the relative squared difference of the hidden states" if m.hidden_states else ""
    kept = next(h for h in t.history if h["step"] == t.best)
    chosen = (
        f"the weights after epoch {kept['epoch']:g}"
        if t.best
        else "the weights from before training: it made none better"
    )
    before, *values = (numbers.value(h[metric], metric) for h in t.history)
    course = ", ".join(
        f"{value} after {h['epoch']:g} {'epoch' if h['epoch'] == 1 else 'epochs'}"
        for value, h in zip(values, t.history[1:], strict=True)
    )
    return (
        f"Loss: {m.alpha:g} x divergence from the dense model at temperature {m.temperature:g} + {1 - m.alpha:g} x the "
        f"labels' cross-entropy{hidden}. AdamW, learning rate {o.learning_rate:g}, batches of {d.data.batch_size}, "
        f"{t.steps:,} of {t.planned:,} steps on {t.examples:,} examples an epoch, seed {o.seed}, on "
        f"{d.environment.device_name} ({d.environment.device}). Kept: {chosen}, by {metric} on "
        f"{d.parts.choose.examples:,} choosing examples ({code(d.parts.choose.split)}): {before} before, {course}.\n\n"
        + "\n".join(f"- {prose(n)}" for n in d.notes)
    )
