"""The attention weights of one input, for people and programs to look at."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.arguments import layers_for
from headprune.attention import AttentionLayer
from headprune.batches import Rows, find_rows
from headprune.errors import HeadPruneError, first_line
from headprune.gates import RowsError
from headprune.inputs import Example, call, model_device, move, tensors, usable
from headprune.memory import is_out_of_memory
from headprune.running import quiet
from headprune.seeing.maps import Keep, Weights, attention_maps


def attention_weights(
    model: nn.Module, example: Example, layers: Sequence[AttentionLayer] | None = None
) -> dict[str, Tensor]:
    """The attention weights of every head, of any model that headprune traces, whichever way it computes them.

    The model need not be set to eager attention. All weights of a layer are held, so for long inputs name few ``layers``, or use
    `headprune.profile_heads`, which never holds more than a part of them.

    Args:
        model: It is run once, in evaluation mode.
        example: A dict of tensors, a tensor or a tuple.
        layers: Only these.

    Returns:
        ``{layer_name: [examples, heads, queries, keys]}``, in float32. A row sums to 1; to less where an attention sink takes the
        rest (then it is there as a last key, if the model computes it as one), and to 0 where a query may look nowhere. Where a
        model cuts windows out of its input, the queries of all windows stand one behind the other, each with its window's keys.
        Of a layer that runs several times, the last run's.

    Raises:
        HeadPruneError: The model does not run on the example, or the weights of a layer cannot be seen.
    """
    example = on_device(model, example)
    layers = layers_for(model, layers, example)

    def seen(inputs: Example, size: int) -> dict[str, Tensor]:
        found = watched(model, layers, inputs, size, lambda weights: weights.whole().cpu())
        return {name: calls[-1] for name, calls in found.items()}

    with as_it_is(model):
        rows = rows_of(model, [example])
        parts = together_or_singly(seen, rows, example)
    return {layer.name: torch.cat([part[layer.name] for part in parts]) for layer in layers}


def on_device(model: nn.Module, batch: Any) -> Any:
    """A batch where the model is."""
    with torch.inference_mode(False):
        return usable(move(batch, model_device(model)))


@contextmanager
def as_it_is(model: nn.Module) -> Iterator[None]:
    """A model that only runs: in evaluation mode, without gradients and caches, and with the attributes it has now afterwards."""
    with quiet(model), torch.no_grad():
        yield


def rows_of(model: nn.Module, batches: Sequence[Example]) -> Rows:
    """How examples lie in batches of inputs.

    Raises:
        HeadPruneError: It cannot be told.
    """
    return find_rows(model, batches, lambda inputs: tensors(call(model, inputs)))


def watched(
    model: nn.Module, layers: Sequence[AttentionLayer], inputs: Example, size: int, keep: Keep
) -> dict[str, list[Any]]:
    """Run the model on inputs of some examples; what ``keep`` keeps of every layer's weights, for each time it runs.

    Raises:
        RowsError: The examples cannot be told apart in some layer.
        HeadPruneError: The model does not run on them.
    """
    # Nobody reads the logits, which for a language model can be the largest of all tensors.
    named = isinstance(inputs, Mapping) and not {"labels", "logits_to_keep"} & set(inputs)
    short = {"logits_to_keep": 1} if named and "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with attention_maps(model, layers, size, keep) as found:
        try:
            call(model, inputs, **short)
        except HeadPruneError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise HeadPruneError(
                f"The model does not run on the example: {type(error).__name__}: {first_line(error)}.",
                "Pass what its forward() takes: a dict of tensors, a tensor or a tuple.",
            ) from error
    return found


def together_or_singly(seen: Callable[[Example, int], Any], rows: Rows, inputs: Example) -> list[Any]:
    """What ``seen(inputs, examples)`` gives for all examples at once; one by one, where they cannot be told apart."""
    size = rows.size(inputs)
    try:
        return [seen(inputs, size)]
    except RowsError:
        if size == 1:
            raise
        return [seen(row, 1) for row in rows.singles(inputs)]


def visible(weights: Weights) -> Tensor:
    """Which keys any query looks at, ``[examples, keys]``: those of padding are hidden from all."""
    found: Tensor | None = None
    for _, some in weights.blocks():
        seen = (some > 0).any(dim=1).any(dim=1)
        found = seen if found is None else found | seen
    assert found is not None
    return found
