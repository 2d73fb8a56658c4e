"""Measures models on the same examples and tasks, one after the other; the first is what the others are compared with."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headprune.app import harness
from headprune.app.data import DataParts, Part, load_parts, load_train
from headprune.app.data.encoder import content_hash
from headprune.app.documents import Cut, Examples, MetricValue, ValueTable
from headprune.app.finetune_run import run_of, trained_on
from headprune.app.models import LoadedModel, config_of, load_model, task_of
from headprune.app.options import DataOptions, LoadOptions, MetricOptions, TaskOptions
from headprune.app.sources import check_source, resolved, split_revision
from headprune.app.workflow.scene import Console, Measures, seen_before
from headprune.conventions import NEXT, SAME
from headprune.errors import HeadPruneError
from headprune.evaluation import Measurement
from headprune.exporting import is_exported
from headprune.exporting.engines import Session
from headprune.inputs import is_encoder_decoder, unlabelled


def measure_models(
    sources: Sequence[str], data: DataOptions, loading: LoadOptions, measuring: MetricOptions, tasks: TaskOptions,
    console: Console,
) -> list[ValueTable]:  # fmt: skip
    """The metrics of models on a dataset's reporting part, as `headprune prune` cuts it, and on tasks of lm-evaluation-harness.

    Args:
        sources: Models and run folders; after the first also exported files, which get its tokenizer's examples.
        data: Without a dataset, only tasks are measured.

    Raises:
        HeadPruneError: There is nothing to measure; a model, data or task does not load; models for different tasks.
    """
    _check(sources, data, loading, tasks)
    measuring.check()
    ready = harness.load_tasks(tasks)
    of_data = _OfData(data, measuring)
    of_tasks: list[tuple[str, harness.TaskResults]] = []
    first: LoadedModel | None = None
    for source in sources:
        if first is not None and is_exported(Path(source)):
            loaded = replace(first, model=EngineModel(Path(source), first), source=source)
        else:
            loaded = load_model(source, loading)
            console.say(*loaded.notes)
        if ready:
            harness.check_model(loaded)
        if data.dataset:
            of_data.add(source, loaded, console)
        if ready:
            with console.track(f"{', '.join(tasks.names)}: {source}") as progress:
                results = harness.run_tasks(loaded, ready, tasks.task_limit, data.batch_size, progress)
            of_tasks.append((source, results))
        first = first or replace(loaded, model=_without_weights(loaded))
        del loaded  # its weights, before the next model's are loaded; a pruned one's hooks refer to each other
        gc.collect()
    tables = [of_data.table()] if data.dataset else []
    return tables + (harness.tables_of(of_tasks) if ready else [])


def _without_weights(loaded: LoadedModel) -> nn.Module:
    """A module with a model's config alone."""
    shell: Any = nn.Module()
    shell.config = loaded.config
    return shell  # type: ignore[no-any-return]


def _check(sources: Sequence[str], data: DataOptions, loading: LoadOptions, tasks: TaskOptions) -> None:
    """Refuse what cannot be measured, before anything is loaded."""
    loading.check()
    if not data.dataset and not tasks.names:
        hint = "Name a dataset with -d, or tasks of lm-evaluation-harness with --tasks."
        raise HeadPruneError("There is nothing to measure on.", hint)
    if data.dataset:
        data.check()
    exported = [source for source in sources if is_exported(Path(source))]
    if sources[0] in exported:
        hint = f"Name the model first that it was made from: headprune evaluate MODEL {sources[0]}"
        raise HeadPruneError(f"{sources[0]} holds no tokenizer.", hint)
    if exported and tasks.names:
        message = f"{exported[0]} is for another engine, and --tasks are run in transformers."
        raise HeadPruneError(message, "Leave out --tasks, or this file.")
    first = ""
    for source in sources:
        if source in exported:
            if not Path(source).exists():
                raise HeadPruneError(f"{source} does not exist.", "`headprune export MODEL` writes such a file.")
            continue
        check_source(source)
        name, revision = split_revision(resolved(source))  # a run folder may hold several models
        common = {"revision": revision, "trust_remote_code": loading.trust_remote_code}
        task = task_of(config_of(name, common), loading.task, source).name
        if first and task != first:
            raise HeadPruneError(f"{sources[0]} is for {first}, {source} for {task}.", "Compare alike.")
        first = task


@dataclass(frozen=True)
class _Ordered(Part):
    """A part in the first model's order: by the lengths of another tokenizer's examples it would be another.

    Attributes:
        made: The first model's batches; its own way to make them would keep its weights in memory.
    """

    places: tuple[int, ...] = ()
    made: tuple[Any, ...] = ()

    def order(self) -> list[int]:
        return list(self.places)

    def batches(self, batch_size: int | None = None) -> Iterator[Any]:
        return iter(self.made) if self.made else super().batches(batch_size)


def _ordered(part: Part, places: Sequence[int], **changed: Any) -> _Ordered:
    own = {each.name: getattr(part, each.name) for each in fields(Part)}
    return _Ordered(**{**own, **changed}, places=tuple(places))


def _difference(part: Part, first: Part, per_token: bool) -> str:
    """Why a model that is measured on a part cannot be compared with the first model on its own; "" if it can."""
    if (part.split, part.rows) != (first.split, first.rows):
        return "other examples are left out than for the first model, so they are not compared."
    if per_token and _labels_of(part) != _labels_of(first):
        return "its tokens are not the first model's, so values per token are not compared."
    return ""


def _labels_of(part: Part) -> str:
    return content_hash([feature.get("labels") for feature in part.features])


class _OfData:
    """Models measured on a dataset's reporting part."""

    def __init__(self, data: DataOptions, measuring: MetricOptions) -> None:
        self.data, self.measuring = data, measuring
        self.values, self.notes = list[MetricValue](), list[str]()
        self.first: tuple[Part, Measurement] | None = None

    def add(self, source: str, loaded: LoadedModel, console: Console) -> None:
        """Measure one more model."""
        first, measures, why = self.first, Measures(loaded, self.measuring), ""
        if first is not None and isinstance(loaded.model, EngineModel):
            part = first[0]
            loaded.model(**next(part.batches()))  # its own error, if it takes no examples of this size
        else:
            parts = load_parts(self.data, loaded)
            part = parts.report
            self._say([*parts.notes, *_seen(source, loaded, parts, self.data)], console)
            if first is not None:
                why = _difference(part, first[0], measures.own == "perplexity")
                part = _ordered(part, first[0].order()) if part.rows == first[0].rows else part
        with console.track(f"measuring {source}") as progress, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "headprune: EngineModel takes no")  # a file may leave inputs out
            measurement = measures.evaluate(loaded.model, part, progress)
        if first is None:
            self.first = _ordered(part, part.order(), collate=None, made=tuple(part.batches())), measurement
        compared = first[1] if first and not why else None
        asked = [*measures.further, measures.own, "accuracy", "loss"]
        names = [name for name in measurement.metrics if name in asked]
        for metric in sorted(names, key=asked.index):
            value = MetricValue.of(source, metric, measurement, compared, note=why and f"{source}: {why}")
            self.values.append(value)
            self._say(filter(None, [value.note]), console, loud=False)

    def table(self) -> ValueTable:
        """What was measured, by metric."""
        assert self.first is not None
        names = list(dict.fromkeys(value.metric for value in self.values))
        values = sorted(self.values, key=lambda value: names.index(value.metric))
        examples, notes = Examples.of(self.first[0]), tuple(self.notes)
        return ValueTable(
            name=self.data.dataset, examples=examples.examples, data=examples, values=tuple(values), notes=notes
        )

    def _say(self, notes: Any, console: Console, loud: bool = True) -> None:
        """Keep notes, each once."""
        new = [note for note in notes if note not in self.notes]
        self.notes += new
        if loud:
            console.say(*new)


def _seen(source: str, loaded: LoadedModel, parts: DataParts, data: DataOptions) -> list[str]:
    """A note if examples that are reported here scored or chose the heads of a pruned model, or trained it."""
    folder = Path(resolved(source))
    try:
        run = run_of(folder)
        trained = trained_on(folder, run)
    except HeadPruneError:  # the folder around may hold a run.json of something else
        return []
    cuts = {} if run is None else {run.options.data: run.parts}
    if trained is not None:
        cuts[trained[1]] = trained[0]
    used, now = list[Part](), Cut.of(parts)
    for before, cut in cuts.items():
        if (before.dataset, before.subset) == (data.dataset, data.subset) and not cut.same(now):
            then = load_parts(before, loaded)
            used += [then.score, then.choose]
            if trained is not None and before == trained[1]:
                used.append(load_train(before, loaded, then, trained[2])[0])
    if not (seen := seen_before(parts, used, True)):
        return []
    purpose = f"score or choose the heads of {source}{', or to train it' if trained else ''}"
    return [
        f"{seen:,} of the {len(parts.report):,} examples were used to {purpose}: with the options of its run there are none."
    ]


# How tasks compare logits with labels: a file has no loss of its own that would show it.
_CONVENTIONS = {"causal-lm": NEXT, "masked-lm": SAME, "token-classification": SAME}


class EngineModel(nn.Module):
    """An exported file as a model with named outputs, on the CPU, for `headprune.evaluation`.

    Args:
        path: As for `Session`.
        like: The model that it was made from; only its config and task are used.
    """

    def __init__(self, path: Path, like: LoadedModel) -> None:
        super().__init__()
        self.session, self.config = Session(path), like.config
        self.headprune_convention = _CONVENTIONS.get(like.task.name)
        if is_encoder_decoder(self):
            raise HeadPruneError(
                f"{path} is an encoder-decoder, which is only measured in transformers.", "Leave it out."
            )

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """The file's outputs by name."""
        return dict(zip(self.session.outputs, self.session(**unlabelled(batch)), strict=True))
