"""Metrics of several models on one dataset or task, and report.npz: what models did on each example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headprune.app.data import Part
from headprune.app.data.encoder import content_hash
from headprune.app.documents.run import Examples
from headprune.documents import Count
from headprune.errors import HeadPruneError, first_line
from headprune.evaluation import Change, Measurement, compare, interval
from headprune.files import atomic_file
from headprune.metrics import metric_named


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
        cls, model: str, metric: str, measurement: Measurement, first: Measurement | None, *, kind: str = "", note: str = ""
    ) -> MetricValue:  # fmt: skip
        """From measurements on the same examples.

        Args:
            metric: A key of ``measurement.metrics``.
            first: The first model's measurement; None for the first model, and for one that cannot be compared, as ``note`` says.
            kind: The metric's name by default.
        """
        kind = kind or metric
        plain = cls(model=model, metric=metric, kind=kind, value=measurement.metrics[metric], note=note)
        try:
            low, high = interval(measurement, kind)
            change = None if first is None else replace(compare(first, measurement, kind), metric=metric)
        except HeadPruneError as error:
            return replace(plain, note=note or str(error.args[0]))
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


@dataclass(frozen=True)
class ReportValues:
    """What models did on each reported example, so that the models of two runs can be paired.

    Attributes:
        rows: ``[examples]``, row numbers in the split.
        inputs: ``[examples]``, hashes of the inputs with their labels; in older files without them.
        models: By ``"dense"`` or the checkpoint's name; of their metrics only those that are no means are in the file.
    """

    rows: np.ndarray
    inputs: np.ndarray
    models: Mapping[str, Measurement]

    @classmethod
    def of(cls, part: Part, models: Mapping[str, Measurement]) -> ReportValues:
        order = part.order()
        inputs = np.array([int(content_hash(part.features[i]), 16) for i in order], np.uint64)
        return cls(np.array([part.rows[i] for i in order]), inputs, models)

    def common(self, other: ReportValues) -> tuple[list[int], list[int]]:
        """The places of the examples that are in both, here and there."""
        places = {key: i for i, key in enumerate(zip(other.rows.tolist(), other.inputs.tolist(), strict=True))}
        keys = list(zip(self.rows.tolist(), self.inputs.tolist(), strict=True))
        here = [i for i, key in enumerate(keys) if key in places]
        return here, [places[keys[i]] for i in here]

    def some(self, model: str, places: Sequence[int]) -> Measurement:
        """A model's values on some of the examples; metrics that are no means are known of all of them only."""
        m, at = self.models[model], np.asarray(places, dtype=int)
        if np.array_equal(at, np.arange(len(m))):
            return m
        return Measurement({}, m.loss[at], m.correct[at], m.tokens[at])

    def write(self, path: Path) -> None:
        arrays = {"rows": self.rows, "inputs": self.inputs, "tokens": next(iter(self.models.values())).tokens}
        for name, measurement in self.models.items():
            arrays |= {f"{name}/loss": measurement.loss, f"{name}/correct": measurement.correct}
            if measurement.texts:
                arrays[f"{name}/texts"] = np.array(measurement.texts)
            for metric, known in measurement.jackknife.items():  # the value first
                arrays[f"{name}/metric/{metric}"] = np.array([measurement.metrics[metric], *known.without])
        with atomic_file(path) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> ReportValues:
        """Read a file.

        Raises:
            HeadPruneError: It is damaged.
        """
        try:
            with np.load(path) as file:  # without pickle: it runs no code
                arrays = {name: file[name] for name in file.files}
            names = [name.removesuffix("/loss") for name in arrays if name.endswith("/loss")]
            models = {
                name: Measurement(
                    {}, arrays[f"{name}/loss"], arrays[f"{name}/correct"], arrays["tokens"],
                    texts=tuple(arrays.get(f"{name}/texts", np.array([])).tolist()),
                )
                for name in names
            }  # fmt: skip
            for key in [key for key in arrays if "/metric/" in key]:
                name, _, metric = key.partition("/metric/")
                value, *without = arrays.pop(key).tolist()
                models[name].metrics[metric] = value
                models[name].jackknife[metric] = metric_named(metric).jackknife(np.array(without))
            if len({array.shape for array in arrays.values()}) > 1:
                raise ValueError("its arrays have different shapes")
            return cls(arrays["rows"], arrays["inputs"], models)
        except Exception as error:  # zipfile, zlib and NumPy raise what they like
            hint = "Copy the whole folder again, or make the run again."
            raise HeadPruneError(f"{path} is damaged: {first_line(error)}.", hint) from None
