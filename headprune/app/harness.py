"""Tasks of lm-evaluation-harness (Gao et al. 2021), as it is: its figures of a model in memory, paired by document.

The harness says what each document contributes. Where the mean, the perplexity or the bits per byte that are
computed from these contributions are the harness's own figure, `headprune.evaluation` gives their intervals and changes.
Those of F1, Matthews' correlation, BLEU and the like are the jackknife's, from the harness's figure without some of the
documents. Other figures, such as a mean over groups of tasks, are shown without.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headprune.app.documents import MetricValue, ValueTable
from headprune.app.models import LoadedModel
from headprune.app.options import TaskOptions
from headprune.errors import HeadPruneError, explained, first_line
from headprune.evaluation import Measurement, value_of
from headprune.metrics import Jackknife
from headprune.running import Progress

_CLOSE = 1e-9  # relative: how near a figure computed here must be to the harness's own
_MODELS = ("causal-lm", "seq2seq")
_VERDICTS = {True: ("better", "worse"), False: ("worse", "better"), None: ("higher", "lower")}  # by higher_is_better


@dataclass(frozen=True)
class TaskMetric:
    """A figure of the harness for one model.

    Attributes:
        kind: As in `MetricValue`; "" if it is not known how the figure comes from the documents.
        higher_is_better: As the harness says; None if it does not.
        measurement: What each document contributes.
        documents: Identifies them, in order.
    """

    name: str
    kind: str
    higher_is_better: bool | None
    measurement: Measurement
    documents: tuple[str, ...]


TaskResults = Mapping[str, Sequence[TaskMetric]]
"""The metrics of each task and group of tasks, for one model."""


def load_tasks(options: TaskOptions) -> list[Any]:
    """The harness's tasks and groups of tasks, with their data; [] if none are asked for.

    Raises:
        HeadPruneError: The harness is not installed; no such folder or task; a task's data cannot be loaded; a task comes twice.
    """
    if not options.names:
        return []
    if importlib.util.find_spec("lm_eval") is None:
        raise HeadPruneError("For --tasks, lm-eval must be installed.", 'pip install "headprune[lm-eval]"')
    from lm_eval.tasks import TaskManager

    own = options.include_path
    if own is not None and not own.is_dir():
        raise HeadPruneError(f"There is no folder {own} (--include-path).", "Name the folder of the tasks' YAML files.")
    manager = TaskManager(include_path=own, include_defaults=False) if own else None
    if manager is None or not {*options.names} <= {*manager.all_tasks}:
        manager = TaskManager(include_path=own)  # with its 14,000 own tasks, which takes seconds
    if unknown := [name for name in options.names if name not in manager.all_tasks]:
        hint = "`lm-eval ls tasks` lists all; --include-path names a folder with your own."
        raise HeadPruneError(f"lm-evaluation-harness has no task {unknown[0]!r}.", hint)
    loaded: list[Any] = []
    for name in options.names:
        try:
            found = manager.load([name])
        except Exception as error:
            hint = "Check the network (HF_HUB_OFFLINE) and the task's data."
            raise explained(error) or HeadPruneError(
                f"The task {name} cannot be loaded: {first_line(error)}.", hint
            ) from error
        groups = found["groups"]
        loaded += [groups[name]] if name in groups else found["tasks"].values()  # the tasks of a tag
    try:
        manager.load(loaded)  # as when it measures, which `prune` does last: it refuses a task that two of them hold
    except ValueError as error:
        raise HeadPruneError(f"The tasks cannot be run together: {first_line(error)}.", "Name each once.") from error
    return loaded


def facts_of(tasks: Sequence[Any]) -> list[Any]:
    """What results on tasks depend on, for `headprune.store.digest`: their settings and their documents.

    Args:
        tasks: From `load_tasks`.
    """
    leaves = _tasks_in(tasks)
    documents = [str(getattr(leaf.eval_docs, "_fingerprint", list(leaf.eval_docs))) for leaf in leaves]
    return [[str(leaf.dump_config()) for leaf in leaves], documents, importlib.metadata.version("lm_eval")]


def _tasks_in(tasks: Sequence[Any]) -> list[Any]:
    """The tasks, those of groups included."""
    return [leaf for task in tasks for leaf in (task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task])]


def check_model(loaded: LoadedModel) -> None:
    """Refuse a model that the harness cannot measure.

    Raises:
        HeadPruneError: It is no language model that writes text.
    """
    if loaded.task.name not in _MODELS:
        message = f"{loaded.source} is for {loaded.task.name}: --tasks are for models that write text."
        raise HeadPruneError(message, f"Leave out --tasks, or say --task {' or '.join(_MODELS)} if it is one.")
    if loaded.processor.eos_token_id is None:
        message = f"The tokenizer of {loaded.source} has no token for the end of a text, which the harness needs."
        raise HeadPruneError(message, "Leave out --tasks, or set its eos_token.")


def run_tasks(
    loaded: LoadedModel, tasks: Sequence[Any], limit: int | None, batch_size: int, progress: Progress
) -> TaskResults:
    """A model's metrics by the harness, with its own seeds.

    Args:
        loaded: One that `check_model` accepts.
        tasks: From `load_tasks`.
        limit: Documents of each task, at most.

    Raises:
        HeadPruneError: The harness fails.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    try:
        with _quiet(progress):
            tokenizer = copy.deepcopy(loaded.processor)  # the harness sets how it pads; `loaded`'s is saved
            model = HFLM(pretrained=loaded.model, tokenizer=tokenizer, batch_size=batch_size)
            results = lm_eval.simple_evaluate(
                model, tasks=list(tasks), limit=limit, bootstrap_iters=0, log_samples=True
            )
    except Exception as error:
        message = f"lm-evaluation-harness does not run on {loaded.source}: {type(error).__name__}: {first_line(error)}."
        raise explained(error) or HeadPruneError(
            message, "Try one task after the other, and --task-limit 2."
        ) from error
    ways = {leaf.task_name: leaf.aggregation() for leaf in _tasks_in(tasks)}
    metrics = {name: _metrics_of(name, results, ways.get(name, {})) for name in results["results"]}
    return {name: of_task for name, of_task in metrics.items() if of_task}  # a group may have no figure of its own


def tables_of(models: Sequence[tuple[str, TaskResults]]) -> list[ValueTable]:
    """A table for each task, from the results of models by name; the first is what the others are compared with."""
    (_, first), tables = models[0], []
    for task, metrics in first.items():
        values, notes = list[MetricValue](), dict[str, None]()
        for metric in metrics:
            for k, (name, results) in enumerate(models):
                own = next((each for each in results.get(task, ()) if each.name == metric.name), None)
                if own is None:
                    notes[f"{metric.name}: that of {name} is no number."] = None
                    continue
                value = _value(name, own, metric if k else None)
                values.append(value)
                notes |= {f"{metric.name}: {value.note}": None} if value.note else {}
        size = max(len(metric.documents) for metric in metrics)
        tables.append(ValueTable(name=task, examples=size, values=tuple(values), notes=tuple(notes)))
    return tables


def _value(model: str, own: TaskMetric, first: TaskMetric | None) -> MetricValue:
    """A metric of a model, with its change from the first model's."""
    kinds = {own.kind, first.kind if first else own.kind}
    kind = "loss" if kinds == {"accuracy", "loss"} else own.kind  # shares that another model's values exceed
    if "" in kinds:
        why = "how the figure comes from the documents is not known, so it has no interval."
        return MetricValue(model=model, metric=own.name, kind="loss", value=own.measurement.metrics[own.name], note=why)
    alike = first is None or first.documents == own.documents
    note = "" if alike else "the models were asked about different documents, so they are not compared."
    value = MetricValue.of(
        model, own.name, own.measurement, first.measurement if first and alike else None, kind=kind, note=note
    )
    if (change := value.change) is None or not (change.low > 0 or change.high < 0):  # or NaN
        return value
    up, down = _VERDICTS[own.higher_is_better]
    return replace(value, change=replace(change, verdict=up if change.value > 0 else down))


def _metrics_of(name: str, results: Mapping[str, Any], ways: Mapping[str, Any]) -> list[TaskMetric]:
    """The metrics of a task, or of a group, with the contributions of its documents.

    Args:
        ways: How a task's metrics come from these contributions: functions, by metric.
    """
    leaves, metrics = _leaves(name, results["group_subtasks"]), []
    for key, value in results["results"][name].items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float | np.number):
            continue
        samples = [
            (f"{leaf} {sample['doc_id']} {sample['doc_hash']}", sample[metric])
            for leaf in leaves
            for sample in sorted(results["samples"][leaf], key=lambda sample: sample["doc_id"])
            if sample["filter"] == chosen and metric in sample
        ]
        title = metric if chosen == "none" else f"{metric} ({chosen})"
        contributions = [contribution for _, contribution in samples]
        kind, measurement = _measurement_of(title, float(value), contributions)
        if not kind and (jackknife := _jackknife(ways.get(metric), contributions)) is not None:
            kind, known = "loss", {"loss": jackknife}
            measurement = replace(measurement, metrics={title: float(value), "loss": float(value)}, jackknife=known)
        better = results["higher_is_better"].get(name, {}).get(metric)
        metrics.append(TaskMetric(title, kind, better, measurement, tuple(document for document, _ in samples)))
    return metrics


def _leaves(name: str, groups: Mapping[str, list[str]]) -> list[str]:
    """The tasks of a group, also of groups in it; a task alone."""
    return [leaf for child in groups[name] for leaf in _leaves(child, groups)] if name in groups else [name]


def _measurement_of(title: str, value: float, contributions: Sequence[Any]) -> tuple[str, Measurement]:
    """The documents' contributions as `headprune.evaluation` takes them, and the kind of metric that they give; "" for none.

    A contribution is a number, of which the figure is the mean or exp of minus the mean; or a pair of a log-likelihood
    and its number of words or bytes.
    """
    try:
        table = np.asarray(contributions, dtype=np.float64)
    except (TypeError, ValueError):  # such as texts
        table = np.empty((0, 0))
    size, metrics = len(table), {title: value}
    ones = np.ones(size)
    choices: list[tuple[str, np.ndarray, np.ndarray]] = []
    if table.ndim == 1 and size:
        shares = bool(((table >= 0) & (table <= 1)).all())
        choices = [("accuracy" if shares else "loss", table, ones), ("perplexity", -table, ones)]
    elif table.ndim == 2 and table.shape[1] == 2 and bool((table[:, 1] > 0).all()):
        loss, weights = -table[:, 0] / table[:, 1], table[:, 1]
        choices = [("perplexity", loss, weights), ("loss", loss / math.log(2), weights)]
    for kind, each, weights in choices:
        own = value_of(kind, float((each * weights).sum()), float(weights.sum()))
        if math.isclose(own, value, rel_tol=_CLOSE, abs_tol=1e-12):
            return kind, Measurement(metrics, each, each, weights)
    return "", Measurement(metrics, np.full(size, math.nan), np.full(size, math.nan), ones)


# Functions of all documents for which the jackknife holds: `higher`, `width`, `lowest` and `highest` of a `headprune.metrics.Metric`.
_SMOOTH = {
    "f1_score": (True, 1.0, 0.0, 1.0), "matthews_corrcoef": (True, 1.0, -1.0, 1.0), "bleu": (True, 100.0, 0.0, 100.0),
    "chrf": (True, 100.0, 0.0, 100.0), "chrfpp": (True, 100.0, 0.0, 100.0), "ter": (False, 0.0, 0.0, math.inf),
    "brier_score": (False, 0.0, 0.0, math.inf),
}  # fmt: skip
_GROUPS = 100  # of documents that are left out in turn: BLEU is slow


def _jackknife(way: Any, contributions: Sequence[Any]) -> Jackknife | None:
    """A figure without some of the documents, for one of the harness's own smooth functions of them all; None for others."""
    from lm_eval.api import metrics

    scale = next((scale for name, scale in _SMOOTH.items() if way is getattr(metrics, name, None)), None)
    if way is None or scale is None or len(contributions) < 2:
        return None
    groups = min(len(contributions), _GROUPS)
    rest = ([c for i, c in enumerate(contributions) if i % groups != left] for left in range(groups))
    return Jackknife(np.array([float(way(some)) for some in rest]), *scale)


@contextmanager
def _quiet(progress: Progress) -> Iterator[None]:
    """Report the harness's own progress bars to ``progress``, and let it not collect facts of this machine, which prints and takes seconds."""

    class Bar:
        def __init__(self, rows: Any = (), *more: Any, total: int | None = None, **settings: Any) -> None:
            self.rows, self.done = rows, 0
            self.total = len(rows) if total is None and hasattr(rows, "__len__") else total

        def __iter__(self) -> Iterator[Any]:
            for row in self.rows:
                yield row
                self.update()

        def update(self, count: int = 1) -> None:
            self.done += count
            if self.total:
                progress(self.done, self.total)

        def close(self) -> None:
            pass

    from lm_eval import evaluator

    modules = [module for name, module in sys.modules.items() if name.startswith("lm_eval.")]
    changes: list[tuple[Any, str, Any]] = [
        (m, "tqdm", Bar) for m in modules if isinstance(getattr(m, "tqdm", None), type)
    ]
    changes += [(evaluator, name, lambda *_: None) for name in ("get_git_commit_hash", "add_env_info")]
    with ExitStack() as stack:
        for module, name, stand_in in changes:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        yield
