"""Numbers and names as a report writes them."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.amounts import digits
from headprune.app.documents import BudgetRecord, Environment, Measured, TimeParts
from headprune.evaluation import Change
from headprune.latency import GenerationRow, LatencyRow, Speedup

if TYPE_CHECKING:
    from headprune.app.comparison import ComparedModel

METRICS = {"accuracy": "accuracy", "f1": "F1 (macro)", "loss": "loss"}
"""The names of the metrics that are reported beside a run's own."""


def value(number: float, metric: str) -> str:
    """A metric's value: accuracy and F1 in per cent."""
    return f"{100 * number:.1f} %" if metric in ("accuracy", "f1") else digits(number, 4)


def change(paired: Change, metric: str) -> str:
    """A change with its interval: relative for perplexity, absolute for the loss, in points for others."""
    if metric == "perplexity":
        return f"{paired.value:+.1%} ({paired.low:+.1%} to {paired.high:+.1%})"
    if metric == "loss":
        return f"{paired.value:+.3g} ({paired.low:+.3g} to {paired.high:+.3g})"
    return f"{100 * paired.value:+.2f} points ({100 * paired.low:+.2f} to {100 * paired.high:+.2f})"


def interval(measured: Measured, metric: str) -> str:
    """A metric's value with its interval."""
    point, low, high = (value(v, metric) for v in (measured.metrics[metric], measured.low, measured.high))
    return f"{point} ({low} to {high})"


def mean_of(values: Sequence[float], metric: str) -> float:
    """The mean of a metric over several models; for perplexity the geometric mean, exp of the mean loss.

    Changes of perplexity are computed from losses, so only this mean agrees with their sign and size.
    """
    if metric != "perplexity" or not all(0 < value < math.inf for value in values):
        return sum(values) / len(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def amount(share: float, metric: str) -> str:
    """An amount of loss: points of accuracy, or per cent of the dense model's value."""
    return f"{100 * share:.3g} points" if metric == "accuracy" else f"{100 * share:.3g} %"


def loss(paired: Change, metric: str) -> str:
    """The largest loss that a change's interval leaves possible."""
    if metric == "accuracy":
        return f"{-100 * paired.low:.1f} points"
    return f"{paired.high:.1%}" if metric == "perplexity" else f"{paired.high:.3g}"


def with_error(number: float, error: float) -> str:
    """A score and, where it has one, its standard error."""
    return f"{number:.4g}" if error != error else f"{number:.4g} ± {error:.2g}"


def share_of(part: float, whole: float) -> str:
    """The relative change from the whole to a part, in per cent."""
    return f"{part / whole - 1:+.1%}"


def ratio(speedup: Speedup) -> str:
    """A speed-up with its interval."""
    return f"{speedup.ratio:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"


def shape(row: LatencyRow | BudgetRecord | TimeParts | GenerationRow | ComparedModel) -> str:
    """The batch size and the length of a timed input."""
    return f"batch {row.batch}" + (f" x {row.length} tokens" if row.length else "")


def device(environment: Environment, dtype: str) -> str:
    """The device that the model ran on."""
    count = environment.threads
    threads = f", {count} thread{'s' * (count != 1)}" if environment.device == "cpu" else ""
    return f"{environment.device_name} ({environment.device}{threads}, {dtype})"


def equality(difference: float, limit: float | None = None) -> str:
    """The largest difference of outputs from others, in words, with the limit; "are exactly" for no difference."""
    allowed = "" if limit is None else f" (allowed: {limit:.0e})"
    return f"differ by at most {difference:.1e} of their largest value{allowed} from" if difference else "are exactly"


def with_more(text: str, *more: str) -> str:
    """A figure with others in brackets, if there are any."""
    inside = "; ".join(filter(None, more))
    return f"{text} ({inside})" if inside else text


def name_of(model: str) -> str:
    """A model's name in a title: a Hub id as it is; for a path the folder's name, after its parent's if that says little.

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
    """A dataset's or model's name; for a path its last part, as a published card must not show this machine's folders."""
    return Path(text).name if os.sep in text and Path(text).exists() else text


def without_places(command: str) -> str:
    """A command line without ``--overwrite``, its paths shortened by `without_place`."""
    return shlex.join(without_place(part) for part in shlex.split(to_repeat(command)))
