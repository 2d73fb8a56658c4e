"""What every scoring method is given and gives back, and the register of methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.batches import Rows, cost_of
from headprune.errors import HeadPruneError
from headprune.plans import heads_to_keep
from headprune.running import Progress
from headprune.scoring.settings import Settings
from headprune.store import Store
from headprune.uncertainty import carried_by, spread

Batches = Sequence[tuple[Any, int]]
"""Pairs (batch, examples in it)."""


@dataclass(frozen=True)
class Problem:
    """What every method is given: a model, its layers, the examples and their loss.

    Attributes:
        model: In evaluation mode, on its device.
        layers: The maskable layers.
        batches: Pairs (batch, examples in it), on the model's device.
        losses: Per-example losses ``[batch]`` of the model on a batch; differentiable under grad mode.
        seed: For methods that draw.
        progress: Called as work goes on.
        settings: What the user asked for.
        store: Where finished parts of the work are kept, so that an interrupted run can be resumed.
        surrogate: Losses to differentiate in the place of ``losses``, where those are divergences from the dense model, which
            have no gradient at the dense model: cross-entropies against labels drawn from it. None elsewhere.
        replays: Whether losses under gates may be replayed.
        rows: How examples lie in the batches; by default it goes by the names of tensors.
    """

    model: nn.Module
    layers: Sequence[AttentionLayer]
    batches: Batches
    losses: Callable[[Any], Tensor]
    seed: int
    progress: Progress
    settings: Settings = field(default_factory=Settings)
    store: Store = field(default_factory=Store)
    surrogate: Callable[[Any], Tensor] | None = None
    replays: bool = True
    rows: Rows = field(default_factory=Rows)

    @property
    def examples(self) -> int:
        return sum(size for _, size in self.batches)

    @property
    def keep(self) -> int | None:
        """How many heads are going to stay, if that was said."""
        return None if self.settings.keep is None else heads_to_keep(self.settings.keep, self.heads)

    @property
    def heads(self) -> int:
        """Heads of all layers; methods give them in the layers' order."""
        return sum(layer.num_heads for layer in self.layers)

    def parts(self, batches: Batches, name: str, compute: Callable[[Any, int], Tensor]) -> Tensor:
        """What ``compute(batch, size)`` gives for every batch, one below the other; kept in the store as it comes."""
        parts = {f"{name}-{i}": partial(compute, batch, size) for i, (batch, size) in enumerate(batches)}
        return torch.cat(self.store.share(name, parts, [cost_of(batch) for batch, _ in batches], self.progress))

    def numbered(self) -> Iterator[tuple[int, Any, int]]:
        """(Number of the first example, batch, examples in it) for every batch."""
        start = 0
        for batch, size in self.batches:
            yield start, batch, size
            start += size

    def place(self, batch: Any, row: int | None = None) -> str:
        """A batch, or an example of it, in words for the user."""
        for start, known, size in self.numbered():
            if known is batch:
                where = f"example {start + (row or 0)}"
                return f"{where} (in the order given)" if row is not None else f"{where} to {start + size - 1}"
        return f"example {row} of some" if row is not None else "some examples"

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """``[..., heads]`` as ``{layer_name: [..., num_heads]}``."""
        parts = torch.split(flat, [layer.num_heads for layer in self.layers], dim=-1)
        return {layer.name: part for layer, part in zip(self.layers, parts, strict=True)}


class NotFiniteError(HeadPruneError):
    """A loss that is not finite."""

    def __init__(self, problem: Problem, batch: Any, row: int, value: float) -> None:
        self.row, self.value = row, value
        super().__init__(
            f"The loss of {problem.place(batch, row)} is {value}.", "Check its label and text, or use --dtype float32."
        )


@dataclass(frozen=True)
class Samples:
    """Per-example effects of every head: what most methods estimate a mean of.

    Attributes:
        effects: ``[examples, heads]``, float64, heads in the order of the problem's layers.
        losses: The dense model's loss per example, ``[examples]``.
    """

    effects: Tensor
    losses: Tensor


@dataclass(frozen=True)
class Estimate:
    """A method's result.

    Attributes:
        values: ``[heads]``.
        stderr: ``[heads]``; NaN where there is none, and then ``details["stderr"]`` says why.
        examples: How many were used.
        details: More for `HeadScores.details`.
        effects: ``[examples, heads]``, if the values are their mean.
        matrix: ``[heads, heads]``, for methods that weigh pairs.
    """

    values: Tensor
    stderr: Tensor
    examples: int
    details: dict[str, Any] = field(default_factory=dict)
    effects: Tensor | None = None
    matrix: Tensor | None = None

    @classmethod
    def mean_of(cls, samples: Samples, **details: Any) -> Estimate:
        """Mean over examples, with its standard error (`standard_error`; NaN for a single example)."""
        effects = samples.effects
        n = len(effects)
        details = {"mean_loss": samples.losses.mean().item(), **details}
        if n == 1:
            details["stderr"] = "none from a single example"
        else:
            details["carried_by"] = rounded(torch.from_numpy(carried_by(effects.numpy())))
        return cls(effects.mean(dim=0), standard_error(effects), n, details, effects)

    @classmethod
    def without_error(cls, values: Tensor, why: str, examples: int = 0, **details: Any) -> Estimate:
        """Values that have no standard error."""
        return cls(values, torch.full_like(values, math.nan), examples, {"stderr": why, **details})


def standard_error(effects: Tensor) -> Tensor:
    """Of the mean over examples, of every head ``[heads]``; NaN for a single example.

    A little larger than the usual one: two more examples are counted, one with the largest effect that was seen and one with
    its opposite (`headprune.uncertainty.spread`), because few examples carry most of an effect. A head that has no effect on
    these examples may have one on others: its largest effect is taken to be the median of the other heads' largest effects.

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
    """To six digits, for `Estimate.details`."""
    return [float(f"{v:.6g}") for v in values.tolist()]


@dataclass(frozen=True)
class Method:
    """A way to score heads.

    Attributes:
        loss: Whether it reads the loss, and so labels, where there are any.
    """

    name: str
    unit: str
    run: Callable[[Problem], Estimate]
    about: str
    loss: bool = True


METHODS: dict[str, Method] = {}
DEFAULT_METHODS = ("ablation", "gradient")


def method_named(name: str) -> Method:
    """A method of the register.

    Raises:
        HeadPruneError: There is none of that name.
    """
    if name not in METHODS:
        raise HeadPruneError(f"There is no scoring method {name!r}.", f"Choose from {', '.join(METHODS)}.")
    return METHODS[name]


def method(
    name: str, unit: str, *, loss: bool = True
) -> Callable[[Callable[[Problem], Estimate]], Callable[[Problem], Estimate]]:
    """Register a scoring method under a name; the first line of its docstring describes it."""

    def register(run: Callable[[Problem], Estimate]) -> Callable[[Problem], Estimate]:
        METHODS[name] = Method(name, unit, run, (run.__doc__ or "").strip().partition("\n")[0], loss)
        return run

    return register
