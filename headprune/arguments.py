"""What the public functions make of their arguments: batches as a list, and layers and an example where none are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.inputs import Example
from headprune.loss import inputs_of
from headprune.plans import PruningPlan
from headprune.rows import is_empty
from headprune.trace import find_attention

Plan = PruningPlan | Mapping[str, Sequence[int]]
"""Which heads go: a plan, or ``{layer_name: [head, ...]}``."""


def listed(batches: Iterable[Any], name: str = "batches") -> list[Any]:
    """Batches as a list, so that they can be gone through more than once: a generator is consumed here, and only here.

    Args:
        name: Of the argument, for the error.

    Raises:
        HeadPruneError: One batch in the place of many, or nothing that holds batches.
    """
    if isinstance(batches, Mapping | Tensor | str | bytes) or not isinstance(batches, Iterable):
        raise HeadPruneError(
            f"{name} is a {type(batches).__name__}, not a list of batches.",
            f"Pass {name}=[batch, …], each batch a dict of tensors or a pair (inputs, labels).",
        )
    return list(batches)


def heads_of(plan: Plan) -> Mapping[str, Sequence[int]]:
    """The heads that a plan or a dict names, by layer."""
    return plan.drop if isinstance(plan, PruningPlan) else plan


def layers_for(
    model: nn.Module,
    layers: Sequence[AttentionLayer] | None,
    example: Example | None = None,
    batches: Sequence[Any] = (),
) -> Sequence[AttentionLayer]:
    """The layers that were given, or else those that a trace finds: on the example, on the first batch, or on a made-up input.

    Raises:
        HeadPruneError: Nothing was given, and it is not known what the model takes; or the trace finds no attention.
    """
    if layers is not None:
        return layers
    if example is None:
        full = next((batch for batch in batches if not is_empty(batch)), None)
        example = None if full is None else inputs_of(model, full)
    return find_attention(model, example)
