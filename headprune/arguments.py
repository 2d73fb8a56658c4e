"""How the public functions read their arguments: batches as a list, and layers where none are given."""

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
"""The heads to remove: a plan, or ``{layer_name: [head, ...]}``."""


def listed(batches: Iterable[Any], name: str = "batches") -> list[Any]:
    """Batches as a list, so that they can be read more than once: a generator is consumed here and only here.

    Args:
        name: The argument's name, for the message.

    Raises:
        HeadPruneError: It is one batch, or does not hold batches.
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
    """The given layers, or those that a trace finds: with the example, else the first batch, else a made-up input.

    Raises:
        HeadPruneError: Nothing was given, and the model's input is not known; or the trace finds no attention.
    """
    if layers is not None:
        return layers
    if example is None:
        full = next((batch for batch in batches if not is_empty(batch)), None)
        example = None if full is None else inputs_of(model, full)
    return find_attention(model, example)
