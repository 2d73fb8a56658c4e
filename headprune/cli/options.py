"""Every option of the command line, defined once: flag, type, default and help. Commands take them in groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from headprune.app import MAX_SEED
from headprune.budgets import BUDGETS

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hub id, local folder, a folder headprune saved, or a run folder.")
]
Task = Annotated[str | None, typer.Option(help="What the model is for [read from its config].")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps [auto].")]
Dtype = Annotated[
    str | None, typer.Option(help="auto, float32, bfloat16 or float16 [auto: as stored; float32 on a CPU].")
]
Seed = Annotated[int | None, typer.Option(min=0, max=MAX_SEED, help="Seed of every random draw [0].")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Run folder [reports/MODEL-1, or the next free number].")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the run folder.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


@dataclass(frozen=True)
class Manner:
    """How a command tells what it does."""

    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The libraries' messages too, and tracebacks.")] = (
        False
    )


@dataclass(frozen=True)
class Loading:
    """How a model is loaded."""

    task: Task = None
    device: Device = None
    dtype: Dtype = None
    trust_remote_code: Trust = False
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None


_IN_PLACING = "Models larger than a device (docs/scale.md)"


@dataclass(frozen=True)
class Placing:
    """Where the weights go of a model that is larger than a device; the names of `headprune.app.options.Options`."""

    device_map: Annotated[
        str | None,
        typer.Option(
            help="auto spreads the model over the GPUs, the CPU's memory and the disk; or balanced, sequential, or a JSON file.",
            rich_help_panel=_IN_PLACING,
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="The most memory to use on each device, such as 0=20GB,cpu=60GB [what is free].",
            rich_help_panel=_IN_PLACING,
        ),
    ] = None
    offload_folder: Annotated[
        str | None,
        typer.Option(
            help="Where to put weights that must be on disk and cannot be read from the checkpoint itself.",
            rich_help_panel=_IN_PLACING,
        ),
    ] = None


_IN_DATA = "Data"


@dataclass(frozen=True)
class Data:
    """Which examples; the names of `headprune.app.data.DataOptions`."""

    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", "-d", help="Hub id, folder, or .jsonl, .csv or .parquet file.", rich_help_panel=_IN_DATA
        ),
    ] = None
    subset: Annotated[str | None, typer.Option(help="Configuration of a Hub dataset.", rich_help_panel=_IN_DATA)] = None
    split: Annotated[
        str | None, typer.Option(help="Split to score on [train, if there is one].", rich_help_panel=_IN_DATA)
    ] = None
    choose_split: Annotated[
        str | None, typer.Option(help="Split to choose plans on [validation].", rich_help_panel=_IN_DATA)
    ] = None
    report_split: Annotated[str | None, typer.Option(help="Split to report on [test].", rich_help_panel=_IN_DATA)] = (
        None
    )
    text_column: Annotated[
        str | None,
        typer.Option(
            help="Column of the text, image or sound; a,b for pairs of texts [guessed].", rich_help_panel=_IN_DATA
        ),
    ] = None
    label_column: Annotated[
        str | None, typer.Option(help="Column of the label or target [guessed].", rich_help_panel=_IN_DATA)
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-L",
            min=2,
            help="Examples to score on, and as many to choose on [512].",
            rich_help_panel=_IN_DATA,
        ),
    ] = None
    report_limit: Annotated[
        int | None, typer.Option(min=2, help="Examples to report on, at most [2000].", rich_help_panel=_IN_DATA)
    ] = None
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per example, at most [512].", rich_help_panel=_IN_DATA)
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "-b", min=1, help="Examples per batch [32].", rich_help_panel=_IN_DATA),
    ] = None


_IN_SCORING = "Scoring"


@dataclass(frozen=True)
class Scoring:
    """What the scoring methods are told; the names of `headprune.scoring.Settings`, and ``distil``."""

    examples: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Examples to ablate, at most; gradients estimate the effect on the rest [all].",
            rich_help_panel=_IN_SCORING,
        ),
    ] = None
    seconds: Annotated[
        float | None,
        typer.Option("--time", min=0.1, help="Seconds to spend on ablation, about.", rich_help_panel=_IN_SCORING),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory that scoring may use, such as 4GB [half of what is free].", rich_help_panel=_IN_SCORING
        ),
    ] = None
    normalise: Annotated[
        bool,
        typer.Option("--normalise", help="Divide each layer's scores by their L2 norm.", rich_help_panel=_IN_SCORING),
    ] = False
    distil: Annotated[
        bool,
        typer.Option(
            "--distil", help="Score by the divergence from the dense model, not by labels.", rich_help_panel=_IN_SCORING
        ),
    ] = False
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Training steps of l0 and dsp; points of integrated-gradients.", rich_help_panel=_IN_SCORING
        ),
    ] = None
    permutations: Annotated[
        int | None, typer.Option(min=1, help="Permutations for shapley, at most.", rich_help_panel=_IN_SCORING)
    ] = None
    sparsity: Annotated[
        float | None, typer.Option(min=0, help="For l0: the price of a head.", rich_help_panel=_IN_SCORING)
    ] = None


@dataclass(frozen=True)
class Writing:
    """Where a run writes, and what it finds there."""

    output: Output = None
    overwrite: Overwrite = False
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Start anew, whatever an interrupted run has left.")
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Load and check everything, then stop; write nothing. prune also searches for the plan and prints it, "
            "unless its strategy needs scores that are not there yet.",
        ),
    ] = False


_BUDGET = "Budget (one kind per run; can be given several times, for nested plans)"


def _option_of(flag: str) -> str:
    """A flag as the name of an argument."""
    return flag.strip("-").replace("-", "_")


def _with_budgets(group: type) -> type:
    """A group of options with one for every kind of budget in the register, before its own."""
    options = {
        _option_of(kind.flag): Annotated[
            list[str] | None,
            typer.Option(kind.flag, *([kind.short] if kind.short else []), help=kind.help, rich_help_panel=_BUDGET),
        ]
        for kind in BUDGETS.values()
    }
    for name in options:
        setattr(group, name, None)
    group.__annotations__ = {**options, **group.__annotations__}
    return dataclass(frozen=True)(group)


@_with_budgets
class Budgets:
    """How many heads stay: budgets of one kind, each with its option, or a plan."""

    plan: Annotated[
        Path | None, typer.Option(help="A plan's file, such as a plan.json edited by hand.", rich_help_panel=_BUDGET)
    ] = None

    @property
    def asked(self) -> dict[str, list[str]]:
        """What was typed, by kind of budget."""
        typed = {name: getattr(self, _option_of(kind.flag)) for name, kind in BUDGETS.items()}
        return {name: texts for name, texts in typed.items() if texts}


_IN_PLANNING = "Planning"


@dataclass(frozen=True)
class Planning:
    """How the heads that go are picked."""

    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            help="How the heads to remove are chosen; `headprune methods` lists the strategies [auto].",
            rich_help_panel=_IN_PLANNING,
        ),
    ] = None
    protect: Annotated[
        str | None, typer.Option(help="Layers and heads that stay: L0,L3.H7.", rich_help_panel=_IN_PLANNING)
    ] = None
    min_heads_per_layer: Annotated[
        int | None, typer.Option(min=0, help="Query heads that every layer keeps [0].", rich_help_panel=_IN_PLANNING)
    ] = None
    effort: Annotated[
        str | None,
        typer.Option(
            help="How much work the search for heads may take: low, normal or high (counted, never timed; see docs/planning.md) [normal].",
            rich_help_panel=_IN_PLANNING,
        ),
    ] = None


_IN_TRAINING = "Training"


@dataclass(frozen=True)
class Training:
    """How a pruned model is trained; the names of `headprune.app.options.FinetuneOptions` and `headprune.app.distillation.Mixture`."""

    epochs: Annotated[float, typer.Option(help="Passes over the training part.", rich_help_panel=_IN_TRAINING)] = 1.0
    learning_rate: Annotated[
        float | None, typer.Option(help="The learning rate at its peak [3e-5].", rich_help_panel=_IN_TRAINING)
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of the distillation [2].", rich_help_panel=_IN_TRAINING)
    ] = None
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Weight of the dense model's answers against the labels [0.5].", rich_help_panel=_IN_TRAINING
        ),
    ] = None
    hidden_states: Annotated[
        bool,
        typer.Option(
            "--hidden-states", help="Learn the dense model's hidden states too.", rich_help_panel=_IN_TRAINING
        ),
    ] = False
    patience: Annotated[
        int | None,
        typer.Option(help="Stop after this many epochs without improvement [2].", rich_help_panel=_IN_TRAINING),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_SEED,
            help="For the order of the examples, and dropout [0].",
            rich_help_panel=_IN_TRAINING,
        ),
    ] = None


def by_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options as its arguments: Typer sees each option, the command gets one value a group.

    Every parameter whose type is a dataclass of this module is replaced by the dataclass's fields.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, own in inspect.signature(function).parameters.items():
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            parameters += [
                own.replace(name=f.name, kind=own.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name])
                for f in fields(groups[name])
            ]
        else:
            parameters.append(own.replace(kind=own.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(function)
    def command(**given: Any) -> None:
        made: dict[str, Any] = {
            name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()
        }
        function(**given, **made)

    del command.__wrapped__  # its signature would be read
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def typed(group: Any) -> dict[str, Any]:
    """The options of a group that were given."""
    return {name: value for name, value in asdict(group).items() if value is not None and value is not False}
