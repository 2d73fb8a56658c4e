"""The options of runs and fine-tuning, which the command line fills and run folders store. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, StrictBool, StrictInt

from headprune.errors import HeadPruneError, registered

MAX_SEED = 2**31 - 1  # NumPy takes no more than 2**32 - 1, and some draws add to it

_data, _metric, _model, _training, _tasks = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Data", "Metrics", "Model", "Training", "Tasks of lm-evaluation-harness")
)

TaskName = Annotated[str | None, _model(help="What the model is for [read from its config].")]
Device = Annotated[str, _model(help="auto, cpu, cuda or mps.")]
Trust = Annotated[bool, _model("--trust-remote-code", help="Run code that comes with the model.")]
Seed = Annotated[StrictInt, Field(ge=0, le=MAX_SEED)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast1 = Annotated[int, Field(ge=1)]
AtLeast2 = Annotated[int, Field(ge=2)]


def check_values(options: Any) -> None:
    """Refuse options with a value out of its range.

    Raises:
        HeadPruneError: A value is out of range; the message names it, and the range.
    """
    from headprune.documents import from_json, to_json

    try:
        from_json(type(options), to_json(options))
    except ValueError as error:
        raise HeadPruneError(f"There is a wrong option: {error}.", "See --help.") from None


@dataclass(frozen=True)
class DataOptions:
    """Where the data is and how to read it.

    Attributes:
        seed: For the order in which examples are taken.
    """

    dataset: Annotated[
        str, _data("--dataset", "-d", help="Hub id, folder, or .jsonl, .csv or .parquet file.", show_default=False)
    ] = ""
    subset: Annotated[str | None, _data(help="Configuration of a Hub dataset.")] = None
    split: Annotated[str | None, _data(help="Split to score on [train, if there is one].")] = None
    choose_split: Annotated[str | None, _data(help="Split to choose plans on [validation].")] = None
    report_split: Annotated[str | None, _data(help="Split to report on [test].")] = None
    text_column: Annotated[str | None, _data(help="Column of text, image or sound; a,b for pairs [guessed].")] = None
    label_column: Annotated[str | None, _data(help="Column of the label or target [guessed].")] = None
    limit: Annotated[AtLeast2, _data("--limit", "-L", min=2, help="Examples to score on; as many to choose on.")] = 512
    report_limit: Annotated[AtLeast2, _data(min=2, help="Examples to report on, at most.")] = 2000
    max_length: Annotated[int | None, Field(ge=2), _data(min=2, help="Tokens per example, at most [512].")] = None
    batch_size: Annotated[AtLeast1, _data("--batch-size", "-b", min=1, help="Examples per batch.")] = 32
    also: tuple[str, ...] = ()
    seed: int = 0

    def check(self) -> None:
        """Refuse invalid options, before anything is loaded.

        Raises:
            HeadPruneError: No dataset; a number out of its range; no such file or folder, or an empty one.
        """
        from headprune.app.data.reading import check_local

        if not self.dataset:
            hint = "Name one with -d, for instance: -d stanfordnlp/imdb, or -d data/train.jsonl; or the folder of a run, which knows its own."
            raise HeadPruneError("No dataset was given.", hint)
        check_values(self)
        if self.text_column is not None and self.text_column.count(",") > 1:
            raise HeadPruneError(f"--text-column {self.text_column} names more than two columns.", "Name one or two.")
        for dataset in (self.dataset, *self.also):
            check_local(dataset)


@dataclass(frozen=True)
class MetricOptions:
    """How models are measured.

    Attributes:
        metric: The metrics; the first decides verdict and recommendation. () for the task's own.
        max_new_tokens, num_beams: For metrics of texts that the model generates; None as in its own generation_config.
    """

    metric: Annotated[
        tuple[str, ...],
        _metric(
            metavar="NAME",
            help="What to measure by, such as f1_macro, matthews_corrcoef, spearman, squad_f1, seqeval, wer or bleu (docs/metrics.md); "
            "repeatable, the first decides [accuracy or perplexity, by task].",
            show_default=False,
        ),
    ] = ()
    max_new_tokens: Annotated[
        int | None, Field(ge=1), _metric(min=1, help="Tokens that a model generates, at most.")
    ] = None
    num_beams: Annotated[int | None, Field(ge=1), _metric(min=1, help="Beams to generate with; 1 is greedy.")] = None

    def check(self) -> None:
        """Refuse metrics that do not exist.

        Raises:
            HeadPruneError: There is none of that name, or it is given twice.
        """
        from headprune.metrics import metric_named

        for name in self.metric:
            metric_named(name)
            if self.metric.count(name) > 1:
                raise HeadPruneError(f"--metric {name} is there twice.", "Give each metric once.")


@dataclass(frozen=True)
class Task:
    """What a model is for.

    Attributes:
        head: The end of its class names: ``AutoModelFor<head>`` is transformers' Auto class.
        modality: ``"text"``, ``"image"`` or ``"audio"``.
        metric: The main metric: ``"accuracy"`` (higher is better) or ``"perplexity"`` (lower is better).
        suffixes: Other endings of the names of classes for this task.
    """

    name: str
    head: str
    modality: str
    metric: str
    suffixes: tuple[str, ...] = ()

    @property
    def auto_class(self) -> str:
        """The name of transformers' Auto class."""
        return f"AutoModelFor{self.head}" if self.head else "AutoModel"

    def fits(self, architecture: str) -> bool:
        """Whether a model's class is for this task, by its name."""
        return architecture.endswith((f"For{self.head}", *self.suffixes))


TASKS = {
    task.name: task
    for task in (
        Task("sequence-classification", "SequenceClassification", "text", "accuracy"),
        Task("token-classification", "TokenClassification", "text", "accuracy"),
        Task("question-answering", "QuestionAnswering", "text", "accuracy"),
        Task("masked-lm", "MaskedLM", "text", "perplexity", ("ForPreTraining",)),
        Task("causal-lm", "CausalLM", "text", "perplexity", ("LMHeadModel",)),
        Task("image-classification", "ImageClassification", "image", "accuracy", ("WithTeacher",)),
        Task("speech-seq2seq", "SpeechSeq2Seq", "audio", "perplexity"),
        Task("audio-classification", "AudioClassification", "audio", "accuracy"),
        Task("seq2seq", "Seq2SeqLM", "text", "perplexity", ("ForConditionalGeneration", "MTModel")),
    )
}


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    Attributes:
        trust_remote_code: Whether code that comes with the model may run. Only the user can say so, for each run.
        device_map, device_memory: Where the weights go, if the model is larger than a device.
    """

    task: TaskName = None
    device: Device = "auto"
    dtype: Annotated[str, _model(help="auto (as stored; float32 on a CPU), float32, bfloat16 or float16.")] = "auto"
    trust_remote_code: Trust = False
    device_map: Annotated[
        str | None,
        _model(help="For a model larger than a device (docs/scale.md): auto, balanced, sequential, or a JSON file."),
    ] = None
    device_memory: Annotated[
        str | None, _model(help="The most memory to use on each device, such as 0=20GB,cpu=60GB [what is free].")
    ] = None

    def check(self) -> None:
        """Refuse invalid options, before anything is loaded.

        Raises:
            HeadPruneError: No such task, or two places for the model.
        """
        from headprune.app.sources import placing_of

        if self.task is not None:
            registered(TASKS, "task", self.task)
        if placing_of(self.device_map, self.device_memory) and self.device != "auto":
            raise HeadPruneError("--device and --device-map both say where the model goes.", "Give one of them.")


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        model: A Hub id (with ``@revision``, if not the newest), or a folder.
        distil: Score by the divergence from the dense model's answers, not by the labels.
        keep: The budget near which scores should be most precise, where a method cannot be precise everywhere.
        methods: The scoring methods, each with its settings, such as ``"shapley:permutations=64"``.
    """

    model: str
    data: DataOptions
    loading: LoadOptions = field(default_factory=LoadOptions)
    measuring: MetricOptions = field(default_factory=MetricOptions)
    seed: Seed = 0
    distil: StrictBool = False
    keep: str | None = None
    methods: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse invalid options, before anything is loaded.

        Raises:
            HeadPruneError: A number out of its range, no such task or file.
        """
        from headprune.plans import keep_of

        check_values(self)
        if self.keep is not None:
            keep_of(self.keep)
        self.loading.check()
        self.data.check()
        self.measuring.check()


@dataclass(frozen=True)
class TaskOptions:
    """Tasks of lm-evaluation-harness to measure language models on."""

    tasks: Annotated[str, _tasks(metavar="NAME,…", help="Such as hellaswag,arc_easy.", show_default=False)] = ""
    include_path: Annotated[Path | None, _tasks(help="A folder with tasks of your own (YAML files).")] = None
    task_limit: Annotated[int | None, _tasks(min=1, help="Documents of each task, at most, from its start [all].")] = (
        None
    )

    @property
    def names(self) -> list[str]:
        """The tasks' names, each once."""
        return list(dict.fromkeys(filter(None, (name.strip() for name in self.tasks.split(",")))))


@dataclass(frozen=True)
class Mixture:
    """The parts of the fine-tuning loss, with their weights.

    Attributes:
        alpha: Weight of the dense model's answers, from 0 (labels only) to 1 (answers only).
        temperature: Both models' logits are divided by it. Above 1 the less likely classes count more.
        hidden_states: Whether the hidden states are compared too, with weight 1.
    """

    alpha: Annotated[float, Field(ge=0, le=1), _training(help="Weight of the dense answers against the labels.")] = 0.5
    temperature: Annotated[Above0, _training(help="Temperature of the distillation.")] = 2.0
    hidden_states: Annotated[bool, _training("--hidden-states", help="Learn the dense hidden states too.")] = False


@dataclass(frozen=True)
class FinetuneOptions:
    """How to fine-tune.

    Attributes:
        epochs: Passes over the training part; may be a fraction.
        learning_rate: The highest: it rises linearly over the first tenth of the steps, then falls linearly to 0.
        mixture: The parts of the loss.
        weight_decay: AdamW's, for weights of two or more dimensions (not for biases and norms).
        patience: Training stops after this many epochs without a better value on the choosing part.
        seed: For the order of the examples and for dropout.
    """

    epochs: Annotated[float, Field(gt=0, le=1_000_000), _training(help="Passes over the training part.")] = 1.0
    learning_rate: Annotated[Above0, _training(help="The learning rate at its peak.")] = 3e-5
    mixture: Mixture = field(default_factory=Mixture)
    weight_decay: float = 0.01
    patience: Annotated[AtLeast1, _training(help="Stop after this many epochs without improvement.")] = 2
    seed: Annotated[Seed, _training(min=0, help="For the order of the examples, and dropout.", show_default=False)] = 0
