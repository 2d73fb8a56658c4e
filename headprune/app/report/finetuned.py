"""The short report of a fine-tuning. Every figure in it comes from its finetune.json."""

from __future__ import annotations

from typing import Any

from headprune.app.report import numbers

_NAMES = {"dense": "dense", "pruned": "pruned", "finetuned": "pruned, fine-tuned"}


def render(name: str, document: dict[str, Any]) -> str:
    """The whole report."""
    sections = [f"# {name}: a pruned model, fine-tuned", _opening(document), _results(document), _training(document)]
    return "\n\n".join([*sections, f"Made by `{document['command']}`."]) + "\n"


def _opening(d: dict[str, Any]) -> str:
    metric, change, gain = d["metric"], d["changes"]["finetuned"], d["changes"]["gain"]
    return (
        f"`{d['pruned']}` after training with distillation from `{d['teacher']}`. On {change['examples']:,} examples that "
        f"decided nothing, {metric} is {numbers.value(d['models']['finetuned']['metrics'][metric], metric)}: against the dense "
        f"model {numbers.change(change, metric)}, **{change['verdict']}**; against the pruned one before training "
        f"{numbers.change(gain, metric)}, **{gain['verdict']}**."
    )


def rows(d: dict[str, Any]) -> list[list[str]]:
    """The table of results, its head first."""
    metric = d["metric"]
    found = [["model", f"{metric} (95 %)", "change from dense (95 %, paired)", "verdict"]]
    for key, model in d["models"].items():
        value, low, high = (numbers.value(v, metric) for v in (model["metrics"][metric], model["low"], model["high"]))
        change = d["changes"].get(key)
        told = [numbers.change(change, metric), change["verdict"]] if change else ["", ""]
        found.append([_NAMES[key], f"{value} ({low} to {high})", *told])
    return found


def _results(d: dict[str, Any]) -> str:
    head, *body = rows(d)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _training(d: dict[str, Any]) -> str:
    t, o, m, metric = d["training"], d["options"], d["options"]["mixture"], d["metric"]
    hidden = ", and the relative squared difference of the hidden states" if m["hidden_states"] else ""
    kept = next(h for h in t["history"] if h["step"] == t["best"])
    chosen = (
        f"the weights after epoch {kept['epoch']:g}"
        if t["best"]
        else "the weights from before training: it made none better"
    )
    course = ", ".join(f"{numbers.value(h[metric], metric)} after {h['epoch']:g} epochs" for h in t["history"][1:])
    held = f"{d['parts']['choose']['examples']:,} choosing examples (`{d['parts']['choose']['split']}`)"
    return (
        f"Loss: {m['alpha']:g} x divergence from the dense model at temperature {m['temperature']:g} + {1 - m['alpha']:g} x the "
        f"labels' cross-entropy{hidden}. AdamW, learning rate {o['learning_rate']:g}, batches of {d['data']['batch_size']}, "
        f"{t['steps']:,} of {t['planned']:,} steps on {t['examples']:,} examples an epoch, seed {o['seed']}, on "
        f"{d['environment']['device_name']} ({d['environment']['device']}). Kept: {chosen}, by {metric} on {held}: "
        f"{numbers.value(t['history'][0][metric], metric)} before, {course}.\n\n"
        + "\n".join(f"- {n}" for n in d["notes"])
    )
