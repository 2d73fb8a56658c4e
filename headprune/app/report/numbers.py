"""Numbers as a report writes them."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from headprune import amounts
from headprune.amounts import digits
from headprune.app.documents import Asked, BudgetResult, Environment, Measured, TimeParts
from headprune.evaluation import Change
from headprune.latency import LatencyRow, Speedup
from headprune.timing import GenerationRow


def value(number: float, metric: str) -> str:
    """A metric's value: accuracy and F1 in per cent."""
    return f"{100 * number:.1f} %" if metric in ("accuracy", "f1") else digits(number, 4)


def change(found: Change, metric: str) -> str:
    """A change with its interval: perplexity's relative, others' in points."""
    if metric == "perplexity":
        return f"{found.value:+.1%} ({found.low:+.1%} to {found.high:+.1%})"
    if metric == "loss":
        return f"{found.value:+.3g} ({found.low:+.3g} to {found.high:+.3g})"
    return f"{100 * found.value:+.2f} points ({100 * found.low:+.2f} to {100 * found.high:+.2f})"


def measured_value(found: Measured, metric: str) -> str:
    """A metric's value with its interval."""
    return f"{value(found.metrics[metric], metric)} ({value(found.low, metric)} to {value(found.high, metric)})"


def amount(share: float, metric: str) -> str:
    """An amount of loss: points of accuracy, or per cent of the dense model's value."""
    return f"{100 * share:.3g} points" if metric == "accuracy" else f"{100 * share:.3g} %"


def loss(found: Change, metric: str) -> str:
    """The largest loss that a change's interval leaves possible."""
    if metric == "accuracy":
        return f"{-100 * found.low:.1f} points"
    return f"{found.high:.1%}" if metric == "perplexity" else f"{found.high:.3g}"


def size(count: int) -> str:
    """Bytes in kB, MB, GB or TB."""
    for step, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= step:
            return f"{digits(count / step, 3)} {unit}"
    return f"{count} bytes"


def ratio(speedup: Speedup) -> str:
    """How many times as fast, with its interval."""
    return f"{speedup.ratio:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"


def shape(row: LatencyRow | Asked | TimeParts | GenerationRow) -> str:
    """The input that was timed."""
    return f"batch {row.batch}" + (f" x {row.length} tokens" if row.length else "")


def operations(count: float) -> str:
    """Floating-point operations of a search."""
    return amounts.flops(count, 3)


def flops(count: int) -> str:
    """FLOPs in M, G or T."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,}"


def cache(size: float) -> str:
    """Bytes of a key/value cache."""
    return f"{size:,.0f} B" if size < 10_000 else f"{size / 1000:,.1f} kB"


def measured(result: BudgetResult) -> str:
    """What a budget asked for, and what its model was measured to cost; "" where heads were just counted."""
    asked = result.budget
    if asked is None or asked.parsed is None or asked.reading is None:
        return ""
    where = f" at {shape(asked)}, on a fresh measurement" if asked.batch is not None else ""
    return asked.parsed.result(result.kept, asked.reading, where)


def ridge(strength: float) -> str:
    """The strength of a ridge; ∞ where nothing was refitted."""
    return "∞" if strength == float("inf") else f"{strength:g}"


def rank(correlation: float) -> str:
    """A rank correlation; – where there is none."""
    return "–" if correlation != correlation else f"{correlation:.2f}"


def known(number: float | None) -> str:
    """A number that may not be finite."""
    return "not finite" if number is None else digits(number, 3)


def with_error(number: float, error: float, form: str, sign: str, error_form: str | None = None) -> str:
    """A score and, where it has one, its standard error."""
    return f"{number:{form}}" if error != error else f"{number:{form}}{sign}{error:{error_form or form}}"


def device(environment: Environment, dtype: str) -> str:
    """The device that the model ran on."""
    count = environment.threads
    threads = f", {count} thread{'s' * (count != 1)}" if environment.device == "cpu" else ""
    return f"{environment.device_name} ({environment.device}{threads}, {dtype})"


def with_more(text: str, *more: str) -> str:
    """A figure with others in brackets, if there are any."""
    told = "; ".join(filter(None, more))
    return f"{text} ({told})" if told else text


def name_of(model: str) -> str:
    """What a model is called in a title: a Hub id as it is; of a path the folder's name, and its parent's where that says little.

    >>> [name_of(m) for m in ("org/bert", "../real/minilm-rt/", "/runs/digits/model", "a/b/digits-2/pruned-6")]
    ['org/bert', 'minilm-rt', 'digits/model', 'digits-2/pruned-6']
    """
    parts = [part for part in model.split("/") if part not in ("", ".", "..", "~")]
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model) or not parts:
        return model
    vague = re.fullmatch(r"(model|checkpoint|pruned|finetuned|best|last|final|output)([-_]?\d+)?", parts[-1])
    return "/".join(parts[-2:] if vague else parts[-1:])


def to_repeat(command: str) -> str:
    """A command line that is safe to paste: without ``--overwrite``, which would replace what lies there."""
    try:
        parts = shlex.split(command)
    except ValueError:  # it was not written by `shlex.join`
        return command
    kept = [part for part in parts if part != "--overwrite"]
    return command if len(kept) == len(parts) else shlex.join(kept)


def without_place(text: str) -> str:
    """A dataset's or model's name; of a path its last part: where it lies on this machine is nobody's business."""
    return Path(text).name if os.sep in text and Path(text).exists() else text


def without_places(command: str) -> str:
    """A command line, its paths likewise."""
    return shlex.join(without_place(part) for part in shlex.split(to_repeat(command)))


def quoted(text: str) -> str:
    """As a text in Python, in double quotes."""
    return json.dumps(text, ensure_ascii=False)
