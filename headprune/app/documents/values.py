"""What `headprune evaluate` prints, and a run with ``--tasks`` stores: metrics of several models on one dataset or task."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headprune.app.documents.run import Examples
from headprune.documents import Count
from headprune.errors import HeadPruneError
from headprune.evaluation import Change, Measurement, compare, interval


@dataclass(frozen=True, kw_only=True)
class MetricValue:
    """A metric of a model.

    Attributes:
        model: Its name.
        kind: The metric of `headprune.evaluation` that it is compared and written like: ``"accuracy"`` (a mean of shares; changes are in
            points), ``"perplexity"`` (changes are relative) or ``"loss"`` (a mean; changes are differences).
        low, high: 95 % interval; None if the metric has none.
        change: From the first model, paired by example; None for the first model, and if it is not known.
        note: Why there is no interval or change.
    """

    model: str
    metric: str
    kind: str
    value: float
    low: float | None = None
    high: float | None = None
    change: Change | None = None
    note: str = ""

    @classmethod
    def of(
        cls, model: str, metric: str, measurement: Measurement, first: Measurement | None, *, kind: str = "",
        higher_is_better: bool | None = None, note: str = "",
    ) -> MetricValue:  # fmt: skip
        """From measurements on the same examples.

        Args:
            metric: A key of ``measurement.metrics``.
            first: The first model's measurement; None for the first model, and for one that cannot be compared, as ``note`` says.
            kind: The metric's name by default.
            higher_is_better: If it is not as for ``kind``.
        """
        kind = kind or metric
        plain = cls(model=model, metric=metric, kind=kind, value=measurement.metrics[metric], note=note)
        try:
            low, high = interval(measurement, kind)
            change = None if first is None else compare(first, measurement, kind)
        except HeadPruneError as error:
            return replace(plain, note=note or str(error.args[0]))
        if change is not None:
            change = replace(change, metric=metric)
        if change is not None and higher_is_better is not None and (change.low > 0 or change.high < 0):
            change = replace(change, verdict="better" if (change.value > 0) == higher_is_better else "worse")
        return replace(plain, low=low, high=high, change=change)


@dataclass(frozen=True, kw_only=True)
class ValueTable:
    """Metrics of models on one dataset or task; the others are compared with the first model.

    Attributes:
        name: The dataset as the user named it, or the task's name.
        examples: How many examples, or documents.
        data: Identifies a dataset's examples; None for a task.
        notes: What a reader should know.
    """

    name: str
    examples: Count
    data: Examples | None = None
    values: tuple[MetricValue, ...]
    notes: tuple[str, ...] = ()
