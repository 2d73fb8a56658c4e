"""Numbers and names as a report writes them."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.amounts import digits
from headprune.app.documents import BudgetRecord, Environment, Measured, TimeParts
from headprune.evaluation import Change
from headprune.latency import GenerationRow, LatencyRow, Speedup
from headprune.metrics import metric_named

if TYPE_CHECKING:
    from headprune.app.comparison import ComparedModel


def value(number: float, metric: str) -> str:
    """A metric's value, in per cent where people read it so."""
    return f"{100 * number:.1f} %" if metric_named(metric).percent else digits(number, 4)


def change(paired: Change, metric: str) -> str:
    """A change with its interval: relative for perplexity, in points for metrics in per cent."""
    kind, values = metric_named(metric), (paired.value, paired.low, paired.high)
    form = _share(*values) if kind.relative else "{:+.2f}" if kind.percent else "{:+.3g}"
    point, low, high = (form.format(100 * each if kind.percent else each) for each in values)
    return f"{point}{' points' * kind.percent} ({low} to {high})"


def difference(number: float, metric: str, sign: str = "") -> str:
    """A difference of a metric: in points, in per cent for perplexity, or plain; with ``sign="+"`` also a rise shows its sign."""
    kind = metric_named(metric)
    if kind.percent:
        return f"{100 * number:{sign}.1f} points"
    return _share(number, sign=sign).format(number) if kind.relative else f"{number:{sign}.3g}"


def _share(*values: float, sign: str = "+") -> str:
    """How shares are written: with a digit behind the point, and where all would be 0.0 %, with three."""
    return f"{{:{sign}.{1 if max(map(abs, values)) >= 5e-4 or not any(values) else 3}%}}"


def interval(measured: Measured, metric: str) -> str:
    """A metric's value with its interval."""
    return between(measured.metrics[metric], measured.low, measured.high, metric)


def between(point: float, low: float, high: float, metric: str) -> str:
    """A metric's value, between two others."""
    return f"{value(point, metric)} ({value(low, metric)} to {value(high, metric)})"


def mean_of(values: Sequence[float], metric: str) -> float:
    """The mean of a metric over several models; for perplexity the geometric mean, exp of the mean loss.

    Changes of perplexity are computed from losses, so only this mean agrees with their sign and size.
    """
    if not metric_named(metric).relative or not all(0 < value < math.inf for value in values):
        return sum(values) / len(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def amount(share: float, metric: str) -> str:
    """An amount of loss, as `headprune.app.report.verdict.loss_within` gives it: in points, or per cent of the dense model's value."""
    kind = metric_named(metric)
    if kind.width and not kind.percent:
        return f"{kind.width * share:.3g}"
    return f"{100 * share:.3g} {'points' if kind.percent else '%'}"


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
    """A model's name in a title: the last two parts of its Hub id or path.

    >>> [name_of(m) for m in ("org/bert", "../real/minilm-rt/", "/runs/digits/model")]
    ['org/bert', 'real/minilm-rt', 'digits/model']
    """
    return "/".join([part for part in model.split("/") if part not in ("", ".", "..", "~")][-2:]) or model


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
    path = Path(text)
    return path.name if os.sep in text and (path.is_absolute() or path.exists()) else text


def without_places(command: str) -> str:
    """A command line without ``--overwrite``, its paths shortened by `without_place`.

    >>> without_places("headprune prune /models/mine --dataset=/data/a,/data/b -d org/name --overwrite")
    'headprune prune mine --dataset=a,b -d org/name'
    """

    def shortened(part: str) -> str:
        option, equals, value = part.partition("=") if part.startswith("--") else ("", "", part)
        return option + equals + ",".join(map(without_place, value.split(",")))

    return shlex.join(map(shortened, shlex.split(to_repeat(command))))
