"""A run's model, data and attention layers; saves its pruned models, and checks that earlier scores are of the same.

On a CPU a checkpoint in half precision is run in float32, which is faster and rounds no small score. Its pruned model is
still saved in half precision: weights that were not refitted lose nothing, and the folder is not larger than the dense
one. The saved folder is what is measured, its weights widened to float32 again, like the dense model's.
"""

from __future__ import annotations

import copy
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from headprune import __version__, checkpoint, latency
from headprune.app.data import DataParts, Part, load_parts
from headprune.app.documents import Cut, Environment, Examples, Training
from headprune.app.models import LoadedModel, load_model, numbers_given
from headprune.app.options import DataOptions, FinetuneOptions, MetricOptions, Options
from headprune.app.runs import RunFolder
from headprune.app.sources import name_of, narrow, placed, placing_of, stored_size, widen
from headprune.attention import AttentionLayer
from headprune.batches import is_out_of_memory, shaped
from headprune.errors import HeadPruneError, PruneError, ScoresError, first_line
from headprune.evaluation import Measurement, Texts, evaluate
from headprune.fingerprint import config_hash, fingerprint, has_identity, identity, processor_hash
from headprune.generation import Generation, Spans
from headprune.inputs import call, model_device, move, positions_of, unlabelled, without_labels
from headprune.metrics import TEXTS, metric_named
from headprune.offload import copied
from headprune.parallel import current
from headprune.running import Progress, SearchConsole
from headprune.scoring import HeadScores, method_and_settings
from headprune.scoring.base import method_named
from headprune.surgery import answers
from headprune.trace import find_attention

Console = SearchConsole
"""Receives a run's messages and its progress."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written.

    Attributes:
        dtype: What its weights are stored in, such as ``"bfloat16"``.
        difference: The largest difference between its outputs and those of the model in memory, as a share of their largest value.
        weights: Bytes of its saved weights.
        note: What a reader should know; "" for nothing.
    """

    dtype: str
    difference: float
    weights: int
    note: str = ""


@dataclass(frozen=True)
class Measures:
    """The metrics of a model's task, or those that were asked for.

    Attributes:
        loaded: The model, for its task and its processor.
        options: As they were typed.
    """

    loaded: LoadedModel
    options: MetricOptions

    @property
    def own(self) -> str:
        """The metric that the model's logits and labels give without further work."""
        return self.loaded.task.metric if numbers_given(self.loaded) is None else "loss"

    @property
    def further(self) -> tuple[str, ...]:
        """The metrics to measure beside the task's own: those asked for, or Spearman's correlation for one number."""
        return self.options.metric or (("spearman",) if numbers_given(self.loaded) == "1 number" else ())

    @property
    def first(self) -> str:
        """The metric that decides: the first one asked for, or the task's own."""
        return next(iter(self.further), self.own)

    @property
    def for_plans(self) -> str:
        """The metric of plans on the choosing part: `first`, unless it is of texts, which would be generated for every plan."""
        return self.own if TEXTS in metric_named(self.first).forms else self.first

    def evaluate(self, model: nn.Module, part: Part, progress: Progress | None = None) -> Measurement:
        """Measure a model on a part."""
        return evaluate(model, part.batches(), metrics=self.further, texts=self.texts(part), progress=progress)

    def texts(self, part: Part) -> Texts | None:
        """How a model answers a part's examples with texts, if a metric needs them.

        Raises:
            HeadPruneError: The model's task has no such answers.
        """
        if not any(TEXTS in metric_named(name).forms for name in self.further):
            return None
        loaded, options, rows = self.loaded, self.options, [part.row(i) for i in part.order()]
        processor = copy.deepcopy(loaded.processor)  # calls set how it truncates; `loaded`'s is saved
        if loaded.task.name == "question-answering":
            return Spans(processor, rows, part.columns)
        if loaded.task.name not in ("seq2seq", "speech-seq2seq"):
            hint = "Choose another metric (docs/metrics.md lists them by task)."
            raise HeadPruneError(f"A model for {loaded.task.name} gives no texts to compare.", hint)
        target = part.columns.get("target") or part.columns["transcript"]
        tokenizer = getattr(processor, "tokenizer", processor)
        given = {"max_new_tokens": options.max_new_tokens, "num_beams": options.num_beams}
        return Generation(tokenizer, [str(row[target]) for row in rows], **given)


@dataclass(frozen=True)
class Scene:
    """A loaded model with its data and its layers.

    Attributes:
        console: Where messages go.
        environment: The machine that times are measured on; stored times of another one are not used.
    """

    options: Options
    loaded: LoadedModel
    parts: DataParts
    layers: list[AttentionLayer]
    console: Console
    environment: Environment

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def example(self) -> dict[str, Any]:
        """Two short examples of different length, for the trace and the proof."""
        return self.parts.score.short(2)

    @property
    def measures(self) -> Measures:
        return Measures(self.loaded, self.options.measuring)

    @property
    def metric(self) -> str:
        return self.measures.first

    @property
    def maskable(self) -> list[AttentionLayer]:
        """The layers that are scored, and that plans count."""
        return [layer for layer in self.layers if layer.maskable]

    def typical_input(self, batch: int = 1, length: int | None = None) -> dict[str, Any]:
        """Examples of median length, without labels where the model does not need them; or texts of another ``length``, without labels."""
        example: Any = self.parts.report.typical(min(batch, len(self.parts.report)))
        example = unlabelled(example) if length else without_labels(self.model, example)
        return shaped(example, batch, length)

    def finetune(
        self, pruned: nn.Module, train: Part, options: FinetuneOptions, work: Path
    ) -> tuple[nn.Module, Training]:
        """A pruned model trained on a part, with the dense one as its teacher, and how; ``work`` is for checkpoints."""
        from headprune.app.finetune import finetune  # imports Trainer, which takes seconds

        with self.console.track("fine-tuning") as progress:
            return finetune(
                pruned, self.model, train, self.parts.choose, options, work, metric=self.measures.own, progress=progress,
                say=self.console.say,
            )  # fmt: skip

    def save(self, model: nn.Module, path: Path, tolerance: float, **about: Any) -> Saved:
        """Save a pruned model in the precision of the dense checkpoint, and check that the folder gives the same outputs.

        Args:
            tolerance: How much outputs may differ, as a share of their largest value.
            about: Facts to store in the folder, beside the model's task and the model it was made from.

        Raises:
            PruneError: The outputs differ more.
        """
        note = ""
        if half := self.loaded.stored:
            try:
                return self._save(model, path, tolerance, about, half)
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, OSError):
                    raise
                why = f"as it was stored, the model does not work here ({first_line(error)})"
                note = f"Saved in float32: in {name_of(half)}, {why}."
        return replace(self._save(model, path, tolerance, about), note=note)

    def _save(
        self, model: nn.Module, path: Path, tolerance: float, about: dict[str, Any], half: torch.dtype | None = None
    ) -> Saved:
        """Save a model as it is, or in half precision."""
        example, given = move(self.example, model_device(model)), None
        if half is not None:
            model = copied(model)
            narrow(model, half)
            # Pixels and sounds are taken in half precision, too.
            given = {k: v.to(half) if torch.is_floating_point(v) else v for k, v in example.items()}
            with torch.inference_mode():
                outputs = answers(call(model, given))
            if not all(bool(t.isfinite().all()) for t in outputs):
                raise HeadPruneError("its answers are not finite")
        dtype, weights = name_of(half or next(model.parameters()).dtype), stored_size(model)
        about = {"task": self.loaded.task.name, "from": self.loaded.source, **about}
        checkpoint.save(model, path, processor=self.loaded.processor, overwrite=True, example=given, about=about)
        reloaded = self.load(path)
        if half is not None:
            widen(model)
        with torch.inference_mode():
            pairs = zip(answers(call(model, example)), answers(call(reloaded, example)), strict=True)
            difference = max(((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() for a, b in pairs)
        if not difference <= tolerance:
            hint = "Please report this."
            raise PruneError(f"The saved model answers differently after loading (by {difference:.2g}).", hint)
        return Saved(dtype, difference, weights)

    def load(self, path: Path) -> nn.Module:
        """Load a saved model, to measure it."""
        loading = self.options.loading
        places = placing_of(loading.device_map, loading.device_memory) or {"device": model_device(self.model)}
        # The code in the folder came with the dense model.
        model = checkpoint.load(path, **places, as_saved=True, trust_remote_code=loading.trust_remote_code)
        if self.loaded.stored is not None:
            widen(model)
        return model


def open_scene(options: Options, console: Console, *, labelled: bool | None = True) -> Scene:
    """Load the model and the data, and find the heads.

    Args:
        labelled: Whether labels are required; None: only if a scoring method uses the loss, and not with `Options.distil`.
    """
    options.check()
    if options.loading.device_map is not None and current().size > 1:
        raise HeadPruneError(
            "--device-map spreads one model over all devices, which several processes would each do.",
            "Start one process, or leave out --device-map: each process then takes a device.",
        )
    loaded = load_model(options.model, options.loading)
    console.say(f"{type(loaded.model).__name__} for {loaded.task.name} on {placed(loaded.model)}")
    if labelled is None:
        methods = [method_named(method_and_settings(text)[0]) for text in options.methods]
        labelled = not options.distil and any(method.loss for method in methods)
    parts = load_parts(options.data, loaded, labelled)
    columns = ", ".join(f"{what}: {name}" for what, name in parts.columns.items())
    sizes = ", ".join(f"{len(p)} to {p.name} ({p.split})" for p in (parts.score, parts.choose, parts.report))
    unused = sum(sum(p.left_out.values()) for p in (parts.score, parts.choose, parts.report))
    console.say(f"Data: {sizes}{f'; {unused} rows left out' if unused else ''}. Columns: {columns}.")
    parts.notes.extend(loaded.notes)
    console.say(*parts.notes)
    current().agree("a model", lambda: fingerprint(loaded.model))
    current().agree("examples", lambda: [part.content_hash for part in (parts.score, parts.choose, parts.report)])
    environment = current().first("environment", lambda: _environment(loaded.model))
    return Scene(options, loaded, parts, find_attention(loaded.model, parts.score.short(2)), console, environment)


def _environment(model: nn.Module) -> Environment:
    """Versions and hardware, for the report."""
    device = str(model_device(model))
    name = platform.processor() or platform.machine()
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(torch.device(device))
    elif Path("/proc/cpuinfo").is_file():
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = match.group(1).strip() if match else name
    return Environment(
        headprune=__version__, python=platform.python_version(), torch=torch.__version__,
        transformers=transformers.__version__, system=platform.system(), device=device, device_name=name,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def inputs(scene: Scene) -> list[tuple[int, int, dict[str, Any]]]:
    """The inputs that are timed, as (batch, tokens, example); the largest is the last."""
    examples = [(batch, scene.typical_input(batch, length)) for batch, length in _shapes(scene)]
    return [(batch, latency.example_shape(example)[1], example) for batch, example in examples]


def budget_input(scene: Scene) -> dict[str, Any]:
    """The input that latency budgets are measured on: a batch of the run's batch size, of median length."""
    return scene.typical_input(scene.options.data.batch_size, _shapes(scene)[0][1])


def _shapes(scene: Scene) -> list[tuple[int, int | None]]:
    """Batch 1 and the run's batch size; for texts at the median length, and at up to four times that, if possible."""
    sizes = sorted({1, scene.options.data.batch_size})
    lengths: list[int | None] = [None]
    if scene.loaded.task.modality == "text" and scene.loaded.task.name != "seq2seq":
        typical = latency.example_shape(scene.typical_input())[1]
        longer = min(4 * typical, positions_of(scene.model) or 4 * typical)
        lengths = [typical, longer] if longer > 1.2 * typical else [typical]
    return [(size, length) for length in lengths for size in sizes]


def check_same(scene: Scene, scores: Sequence[HeadScores], source: RunFolder) -> list[str]:
    """Refuse scores of another model, or of another scoring part than this run's; notes on what else has changed.

    A run has one scoring part, for scores, repair and the report. The other two parts share no example with it,
    however they are cut, so they may be larger or smaller than they were.

    Raises:
        ScoresError: The model, its config, its tokenizer or the scored examples differ; the message names the changed options.
    """
    for s in scores:
        if not has_identity(scene.model, s.model):
            raise ScoresError(
                f"The scores in {source.scores_path} are of another model than {scene.options.model} (fingerprint {s.model}, "
                f"this one is {identity(scene.model)}).",
                "Score this model first, or leave it out to prune the one that was scored.",
            )
    run = source.read_run()
    for what in run.model.other_now(run.environment, config_hash(scene.model), processor_hash(scene.loaded.processor)):
        hint = "Restore it, or score again."
        raise ScoresError(f"The {what} of {scene.options.model} has changed since {source.path} was scored.", hint)
    before, then, now = run.options.data, run.parts.score, Examples.of(scene.parts.score)
    changed = changed_options(before, scene.options.data)
    if then.same(now):
        if changed or run.parts.same(Cut.of(scene.parts)):
            return []
        note = f"{before.dataset} has changed since it was scored: the examples to choose or to report on are different now."
        scene.parts.notes.append(note)
        return [note]
    flags = " and ".join(flag for flag in changed if flag != "--report-limit")
    if not flags:
        hint = "Score again, or restore the data."
        raise ScoresError(f"{before.dataset} no longer holds the examples that were scored for {source.path}.", hint)
    raise ScoresError(
        f"The scores in {source.path} are of {then.examples:,} examples of {then.split!r}; with {flags} the scoring part "
        f"is another one ({now.examples:,} of {now.split!r}), and a run has one, for scores and repair.",
        f"Leave out {flags}, or score again with the same.",
    )


def seen_before(parts: DataParts, used: Sequence[Part], same_data: bool) -> int:
    """How many of the examples to report were used before.

    Args:
        used: The parts that they were in, such as those that scored and chose the heads.
        same_data: Whether the dataset is the same, so that row numbers are compared too: a text may be truncated differently now.
    """
    inputs = {key for part in used for key in part.inputs}
    rows = {(part.split, row) for part in used for row in part.rows} if same_data else set()
    report = parts.report
    examples = zip(report.inputs, report.rows, strict=True)
    return sum(key in inputs or (report.split, row) in rows for key, row in examples)


def changed_options(before: DataOptions, now: DataOptions) -> list[str]:
    """The flags of the changed data options that decide which examples are used."""
    names = [f.name for f in fields(DataOptions) if f.name not in ("batch_size", "also")]
    return [f"--{n.replace('_', '-')}" for n in names if getattr(before, n) != getattr(now, n)]
