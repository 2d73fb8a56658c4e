"""Argument handling of the public functions: batches as a list, layers from a trace if none are given, and accelerators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headprune.attention import Layers
from headprune.batches import is_empty, is_out_of_memory
from headprune.errors import HeadPruneError, first_line
from headprune.fingerprint import fingerprint
from headprune.inputs import Example, call, inputs_of, model_device, move, tensors, too_long
from headprune.parallel import Ranks, accelerator_ranks
from headprune.plans import PruningPlan
from headprune.running import quiet
from headprune.store import digest
from headprune.trace import find_attention

if TYPE_CHECKING:
    from accelerate import Accelerator

Plan = PruningPlan | Mapping[str, Sequence[int]]
"""The heads to remove: a plan, or ``{layer_name: [head, ...]}``."""


def listed(batches: Iterable[Any], name: str = "batches") -> list[Any]:
    """Batches as a list, so that they can be read more than once; consumes a generator.

    Args:
        name: The argument's name, for the message.

    Raises:
        HeadPruneError: The argument is a single batch, or does not hold batches.
    """
    if isinstance(batches, Mapping | Tensor | str | bytes) or not isinstance(batches, Iterable):
        message = f"{name} is a {type(batches).__name__}, not a list of batches."
        hint = f"Pass {name}=[batch, …], each batch a dict of tensors or a pair (inputs, labels)."
        raise HeadPruneError(message, hint)
    return list(batches)


def given_to_choose(choose: Iterable[Any], batches: Sequence[Any]) -> list[Any]:
    """The batches of ``choose=`` that hold examples.

    Raises:
        HeadPruneError: None does, or one is also in ``batches``.
    """
    kept = [batch for batch in listed(choose, "choose") if not is_empty(batch)]
    if not kept:
        message = "choose= holds no examples."
        hint = "Pass other batches than batches=; a generator gives its batches only once, so not the same one twice."
        raise HeadPruneError(message, hint)
    known = {content_of([batch]) for batch in batches}
    twice = [i for i, batch in enumerate(kept) if content_of([batch]) in known]
    if twice:
        message = f"Batch {twice[0]} of choose= is one of batches=, too: it would choose by what was fitted to it."
        raise HeadPruneError(message, "Pass batches of other examples, or leave out choose=.")
    return kept


@contextmanager
def together(
    accelerator: Accelerator | None, model: nn.Module, batches: Sequence[Any], choose: Sequence[Any] = ()
) -> Iterator[Ranks]:
    """Share the work on a model among an Accelerator's processes while the context lasts; None changes nothing.

    Args:
        batches, choose: All batches, on every process.

    Raises:
        HeadPruneError: The processes were given different models or batches, the model is wrapped in DistributedDataParallel, or does not
            run on a batch.
    """
    if accelerator is not None and isinstance(model, nn.parallel.DistributedDataParallel):
        raise HeadPruneError("The model is wrapped for several processes.", "Pass accelerator.unwrap_model(model).")
    with accelerator_ranks(accelerator) as ranks:
        if accelerator is not None:
            ranks.agree("a model", lambda: fingerprint(model))
            ranks.agree("batches", lambda: content_of([*batches, *choose]))
        try:
            yield ranks
        except HeadPruneError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                _check_each(model, batches, "batches")
                _check_each(model, choose, "choose")
            raise


def _check_each(model: nn.Module, batches: Sequence[Any], name: str) -> None:
    """Run the model on each batch.

    Raises:
        HeadPruneError: It does not run on one.
    """
    device = model_device(model)
    for i, batch in enumerate(batches):
        if is_empty(batch):
            continue
        try:
            with quiet(model), torch.no_grad():
                call(model, move(inputs_of(model, batch), device))
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            message = f"The model does not run on batch {i} of {name}= (from 0): {what}."
            raise HeadPruneError(message, f"Check what its examples hold{too_long(model, batch)}.") from error


def content_of(batches: Sequence[Any]) -> str:
    """The digest of all tensors in batches."""
    return digest([list(tensors(batch)) for batch in batches])


def heads_of(plan: Plan) -> Mapping[str, Sequence[int]]:
    """The heads that a plan or a dict names, by layer."""
    return plan.drop if isinstance(plan, PruningPlan) else plan


def layers_for(
    model: nn.Module, layers: Layers | None, example: Example | None = None, batches: Sequence[Any] = ()
) -> Layers:
    """The given layers, or those that a trace finds on the example, otherwise on the first batch, otherwise on a made-up input.

    Raises:
        HeadPruneError: Nothing was given and no input can be made up, or the trace finds no attention.
    """
    if layers is not None:
        return layers
    if example is None:
        full = next((batch for batch in batches if not is_empty(batch)), None)
        example = None if full is None else inputs_of(model, full)
    return find_attention(model, example)
