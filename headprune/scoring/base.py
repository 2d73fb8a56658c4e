"""Scoring methods: their settings, input (`Problem`), output (`Estimate`) and registry."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from headprune.attention import Layers
from headprune.batches import Rows, cost_of, is_out_of_memory
from headprune.errors import HeadPruneError, first_line, registered
from headprune.gates import Fill, gated
from headprune.inputs import too_long
from headprune.plans import heads_to_keep, keep_of
from headprune.running import Progress
from headprune.store import Store
from headprune.uncertainty import carried_by, spread

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Options of scoring methods. A method ignores those that it does not use; None stands for the method's default.

    On the command line they follow the method's name: ``-m ablation:examples=64`` (`method_and_settings`).

    Attributes:
        keep: How many heads the plan will keep (a count, or a share such as ``"50%"``): adaptive methods spend most of their budget on
            heads near this cut, and learned gates aim at this number.
        examples: The most examples to ablate exactly; gradients on all examples estimate the rest.
        seconds: Approximate time budget; ``time`` on the command line.
        max_memory: Bytes that a method may use beyond the model; by default half of the free memory.
        normalise: Divide each layer's scores by their L2 norm (Michel et al., section 4.1, after Molchanov et al. 2017).
        steps: Training steps of learned gates, or points of integration.
        permutations: The most permutations that Shapley values are sampled from.
        sparsity: Weight of the L0 penalty per head, where ``keep`` is not given.
    """

    keep: int | str | None = None
    examples: int | None = None
    seconds: float | None = None
    max_memory: int | None = None
    normalise: bool = False
    steps: int | None = None
    permutations: int | None = None
    sparsity: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers out of range.

        Raises:
            HeadPruneError: A number is too small or not finite.
        """
        if self.keep is not None:
            keep_of(self.keep)
        for name, low in {"examples": 2, "max_memory": 1, "steps": 1, "permutations": 1, "sparsity": 0}.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise HeadPruneError(f"{name} is {value}.", f"Give {low} or more.")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise HeadPruneError(f"The time to spend is {self.seconds} seconds.", "Give more than 0.")


def method_and_settings(text: str, base: Settings | None = None) -> tuple[str, Settings]:
    """A scoring method's name and settings from one text, such as ``"shapley:permutations=64"`` or ``"ablation:examples=64,normalise"``.

    >>> method_and_settings("ablation:examples=64,time=60")[1].seconds
    60.0

    Args:
        base: Settings that the text does not mention keep these values.

    Raises:
        HeadPruneError: An unknown method, a setting that the method does not read, or a value out of range.
    """
    name, _, rest = text.partition(":")
    chosen = method_named(name.strip())
    known = (*chosen.settings, "normalise")
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = (word.strip() for word in part.partition("="))
        setting = {short: long for long, short in _SHORT.items()}.get(key, key)
        if setting not in known:
            names = ", ".join(_SHORT.get(each, each) for each in known)
            raise HeadPruneError(f"There is no setting {key!r} of {chosen.name}.", f"It has {names}.")
        try:
            given[setting] = _READERS.get(setting, int)(value)
        except (KeyError, ValueError, OverflowError):
            message = f"{value!r} is no value for {key} in {text!r}."
            raise HeadPruneError(message, f"Write it as {name}:{_EXAMPLES.get(setting, f'{setting}=64')}.") from None
    return chosen.name, replace(base or Settings(), **given)


def bytes_of(text: str) -> int:
    """Parse an amount of memory, such as ``"4GB"``, into bytes.

    Raises:
        ValueError: The text is no amount of memory.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    size = int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")) if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is no amount of memory")
    return size


_SHORT = {"seconds": "time", "max_memory": "memory"}  # the command line's names of settings
_EXAMPLES = {"normalise": "normalise", "max_memory": "memory=4GB", "seconds": "time=60"}
_READERS: dict[str, Callable[[str], Any]] = {  # all others are whole numbers
    "keep": lambda value: int(value) if value.isdigit() else value,
    "seconds": float,
    "max_memory": bytes_of,
    "normalise": lambda value: {"": True, "true": True, "false": False}[value.lower()],
    "sparsity": float,
}


# -- methods -----------------------------------------------------------------------------------------

Batches = Sequence[tuple[Any, int]]
"""Pairs (batch, examples in it)."""


@dataclass(frozen=True)
class Problem:
    """The input of a scoring method: a model, its layers, the examples and their loss.

    Attributes:
        model: In evaluation mode, on its device.
        layers: The maskable layers.
        batches: Pairs (batch, examples in it), on the model's device.
        loss: From a batch to the loss of every example in it, ``[batch]``; differentiable under grad mode.
        seed: For methods that draw random numbers.
        progress: Called with (steps done, steps in all, note).
        settings: The user's options.
        store: Keeps finished parts of the work, so that an interrupted run can resume.
        surrogate: If ``loss`` is a divergence from the dense model, whose gradient is zero at the dense model: the loss to
            differentiate instead, a cross-entropy against labels drawn from the dense model. Otherwise None.
        replays: Whether losses under gates may be replayed (`headprune.scoring.replay`).
        rows: Finds the batch dimension of each tensor; by default from the tensor's name.
        checkpoints: Whether to use activation checkpointing, because memory ran out without it.
    """

    model: nn.Module
    layers: Layers
    batches: Batches
    loss: Callable[[Any], Tensor]
    seed: int
    progress: Progress
    settings: Settings = field(default_factory=Settings)
    store: Store = field(default_factory=Store)
    surrogate: Callable[[Any], Tensor] | None = None
    replays: bool = True
    rows: Rows = field(default_factory=Rows)
    checkpoints: bool = False

    @property
    def examples(self) -> int:
        return sum(size for _, size in self.batches)

    @property
    def keep(self) -> int | None:
        """How many heads the plan will keep; None if the settings do not say."""
        return None if self.settings.keep is None else heads_to_keep(self.settings.keep, self.heads)

    @property
    def heads(self) -> int:
        """Number of heads in all layers; methods return values in the layers' order."""
        return sum(layer.num_heads for layer in self.layers)

    def gated(
        self, gates: Mapping[str, Tensor], fill: Mapping[str, Fill] | None = None
    ) -> AbstractContextManager[None]:
        """Gates ``{layer_name: gates}`` on the model, as `headprune.gates.gated` takes them, while the context lasts."""
        return gated(self.model, self.layers, gates, fill)

    def losses(self, batch: Any) -> Tensor:
        """The losses of a batch, ``[batch]``; checks that they are finite.

        Raises:
            HeadPruneError: The model does not run on the batch.
            NotFiniteError: A loss is not finite.
        """
        try:
            losses = self.loss(batch)
        except HeadPruneError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            message = f"The model does not run on {self.place(batch)}: {type(error).__name__}: {first_line(error)}."
            raise HeadPruneError(message, f"Check what these examples hold{too_long(self.model, batch)}.") from error
        if len(wrong := (~losses.isfinite()).nonzero()):
            raise NotFiniteError(self, batch, int(wrong[0]), losses[int(wrong[0])].item())
        return losses

    def parts(self, name: str, compute: Callable[[int, Any, int], T], progress: Progress | None = None) -> list[T]:
        """``compute(number of the first example, batch, size)`` for every batch; each result is stored as soon as it is there."""
        tasks = {f"{name}-{i}": partial(compute, *batch) for i, batch in enumerate(self.numbered())}
        return self.store.share(name, tasks, [cost_of(batch) for batch, _ in self.batches], progress)

    def numbered(self) -> Iterator[tuple[int, Any, int]]:
        """(Number of the first example, batch, examples in it) for every batch."""
        start = 0
        for batch, size in self.batches:
            yield start, batch, size
            start += size

    def place(self, batch: Any, row: int | None = None) -> str:
        """Name a batch, or one example in it, by example numbers, for error messages."""
        for start, known, size in self.numbered():
            if known is batch:
                where = f"example {start + (row or 0)}"
                return f"{where} (in the order given)" if row is not None else f"{where} to {start + size - 1}"
        return f"example {row} of some" if row is not None else "some examples"

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Split ``[..., heads]`` by layer: ``{layer_name: [..., num_heads]}``."""
        parts = torch.split(flat, [layer.num_heads for layer in self.layers], dim=-1)
        return {layer.name: part for layer, part in zip(self.layers, parts, strict=True)}


class NotFiniteError(HeadPruneError):
    """A loss that is not finite."""

    def __init__(self, problem: Problem, batch: Any, row: int, value: float) -> None:
        self.row, self.value = row, value
        message = f"The loss of {problem.place(batch, row)} is {value}."
        super().__init__(message, "Check its label and text, or use --dtype float32.")


@dataclass(frozen=True)
class Estimate:
    """A method's result.

    Attributes:
        values: Scores, ``[heads]``.
        stderr: Standard errors, ``[heads]``; NaN where there is none, and then ``details["stderr"]`` says why.
        examples: Number of examples used.
        details: More for `HeadScores.details`.
        effects: ``[examples, heads]``, if the values are means of these.
        matrix: ``[heads, heads]``, for methods that score pairs of heads.
    """

    values: Tensor
    stderr: Tensor
    examples: int
    details: dict[str, Any] = field(default_factory=dict)
    effects: Tensor | None = None
    matrix: Tensor | None = None

    @classmethod
    def mean_of(cls, effects: Tensor, losses: Tensor, **details: Any) -> Estimate:
        """Mean over examples, with its standard error (`standard_error`; NaN for a single example).

        Args:
            effects: Every head's effect on every example, ``[examples, heads]``, float64.
            losses: The dense model's loss of every example, ``[examples]``.
            details: More for `Estimate.details`.
        """
        details = {"mean_loss": losses.mean().item(), **details}
        if len(effects) == 1:
            details["stderr"] = "none from a single example"
        else:
            details["carried_by"] = rounded(torch.from_numpy(carried_by(effects.numpy())))
        return cls(effects.mean(dim=0), standard_error(effects), len(effects), details, effects)

    @classmethod
    def without_error(cls, values: Tensor, why: str, examples: int = 0, **details: Any) -> Estimate:
        """An estimate without standard errors; ``why`` says why there are none."""
        return cls(values, torch.full_like(values, math.nan), examples, {"stderr": why, **details})

    def divided(self, by: Tensor) -> Estimate:
        """Every head's score divided by a number, ``[heads]``, with its errors and effects.

        The matrix becomes that of gates which are scaled so that its diagonal, if it was the scores, is the divided scores.
        """
        effects = None if self.effects is None else self.effects / by
        matrix = None if self.matrix is None else self.matrix / by.sqrt() / by.sqrt()[:, None]
        details = dict(self.details)
        if (sampling := details.get("sampling_stderr")) is not None:
            details["sampling_stderr"] = rounded(by.new_tensor(sampling) / by)
        return Estimate(self.values / by, self.stderr / by, self.examples, details, effects, matrix)


def standard_error(effects: Tensor) -> Tensor:
    """Every head's standard error of the mean over examples, ``[heads]``; NaN for a single example.

    Slightly larger than the textbook value, because a few examples carry most of an effect: it counts two more examples, one
    with the largest effect observed and one with its negative (`headprune.uncertainty.spread`). For a head without any effect
    on these examples, the median of the other heads' largest effects stands in for its largest effect.

    Args:
        effects: ``[examples, heads]``, float64.
    """
    if len(effects) == 1:
        return torch.full_like(effects[0], math.nan)
    residuals = (effects - effects.mean(dim=0)).numpy()
    largest = np.abs(residuals).max(axis=0)
    middle = np.median(largest[largest > 0]) if (largest > 0).any() else 0.0
    return torch.from_numpy(spread(residuals, np.where(largest > 0, 0.0, middle)) / len(effects))


def rounded(values: Tensor) -> list[float]:
    """Values rounded to six significant digits, for `Estimate.details`."""
    return [float(f"{v:.6g}") for v in values.tolist()]


Run = Callable[[Problem], Estimate]


@dataclass(frozen=True)
class Method:
    """A registered scoring method.

    Attributes:
        loss: Whether the scores depend on the loss (and so on labels, if the data has any).
        settings: The fields of `Settings` that the method uses, besides ``normalise``, which all use.
        passes: Forward passes over the examples that it takes, about; a backward pass counts as two.
    """

    name: str
    unit: str
    run: Run
    about: str
    loss: bool = True
    settings: tuple[str, ...] = ()
    passes: float = 3.0


METHODS: dict[str, Method] = {}
DEFAULT_METHODS = ("ablation", "gradient")


def method_named(name: str) -> Method:
    """Look up a scoring method by name.

    Raises:
        HeadPruneError: No method has this name.
    """
    return registered(METHODS, "scoring method", name)


def method(
    name: str, unit: str, *, loss: bool = True, settings: tuple[str, ...] = (), passes: float = 3.0
) -> Callable[[Run], Run]:
    """Decorator: register a scoring method under a name; its docstring's first line describes it to users. Arguments: see `Method`."""

    def register(run: Run) -> Run:
        about = (run.__doc__ or "").strip().partition("\n")[0].replace("``", "`")  # texts have one backtick for code
        METHODS[name] = Method(name, unit, run, about, loss, settings, passes)
        return run

    return register
