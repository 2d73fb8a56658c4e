"""The linear layers that the last step of a repair may move: besides W_O queries, keys, values, feed-forward layers and others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from headprune.attention import AttentionLayer, Layers
from headprune.batches import is_out_of_memory
from headprune.inputs import is_transposed
from headprune.offload import is_elsewhere, on_disk, value_of
from headprune.parallel import current
from headprune.repairing.directions import close
from headprune.repairing.examples import probe_of
from headprune.repairing.projections import LinearLayer, not_plain, owners_of_weights
from headprune.repairing.runner import Runner, Seen
from headprune.running import exact_attention

_MOST = 2 << 30  # bytes for all of them
_EXAMPLES = 8  # on which layers are looked at
_COPIES = 28  # bytes for each weight: the dense one, the step's sums and changes, the weights tried and kept


def movable_linears(
    runner: Runner, layers: Layers, most: int | None = None, others: Sequence[Any] = ()
) -> list[LinearLayer]:
    """The model's linear layers, as many as fit into memory (the smallest first), in its order. The model must be dense now.

    Left out are those on which the answers do not depend, and those whose rows are not known to belong to one example each,
    as in a mixture of experts.

    Args:
        most: If they have more weights than that, none is taken; nor if what goes through them in a batch does not fit. None: batches can be cut.
        others: Batches of further examples, whose rows must belong to one example each, too.
    """
    runner = _of_several(runner, others)
    model, room, chosen = runner.model, _MOST // _COPIES, set[str]()
    # What cannot be refitted keeps its weights, as its note says.
    kept = {own.output_projection.module for own in layers if own.output_projection} - {
        p.name for p in runner.projections
    }
    with exact_attention(model):
        owners = owners_of_weights(model, all_names=False)
        modules = {
            n: m for n, m in model.named_modules() if n not in kept and _is_linear(m) and not not_plain(m, owners)
        }
        sizes = {name: module.weight.numel() for name, module in modules.items()}
        if most is not None and sum(sizes.values()) > most:
            return []
        for name in sorted(sizes, key=lambda each: sizes[each]):
            room -= sizes[name]
            if room >= 0:
                chosen.add(name)
        found = [_linear(name, module, layers) for name, module in modules.items() if name in chosen]
    # One rank's: another may round otherwise, or have less memory.
    separate = current().first("linear layers", partial(_sizes_of_separate, runner, found)) if found else {}
    if most is not None and max(map(runner.rows.size, runner.batches)) * sum(separate.values()) > _MOST:
        return []
    return [linear for linear in found if linear.name in separate]


def _of_several(runner: Runner, others: Sequence[Any]) -> Runner:
    """The runner; or one of the others, if only they have batches of several examples, which show whose a row is."""
    if not others or max(map(runner.rows.size, runner.batches)) > 1:
        return runner
    try:
        return Runner(runner.model, runner.projections, others)
    except Exception as error:  # others may have another form; then they are not fitted to
        if is_out_of_memory(error):
            raise
        return runner


def _linear(name: str, module: Any, layers: Layers) -> LinearLayer:
    """With copies of the weights, which will change."""
    held, own = value_of(module, "weight").detach(), module.bias is not None
    held = on_disk(*held.shape, dtype=held.dtype).copy_(held) if is_elsewhere(module, "weight") else held.clone()
    weight = held if is_transposed(module) else held.T
    bias = value_of(module, "bias").detach().clone() if own else weight.new_zeros(weight.shape[1])
    return LinearLayer(name, (_nearest(name, layers),), weight, bias, own, own)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _nearest(name: str, layers: Layers) -> AttentionLayer:
    """The attention layer whose module's name has the longest start in common; of several, the last one."""
    own = name.split(".")

    def shared(layer: AttentionLayer) -> int:
        return sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, layer.module.split("."), strict=False))
        )

    return max(reversed(layers), key=shared)  # a head comes last


def _sizes_of_separate(runner: Runner, linears: Sequence[LinearLayer]) -> dict[str, int]:
    """The names of those that give ``x W + b``, and whose rows each belong to one example, as runs of one and of several examples show;
    and the bytes of one example's inputs, outputs and slopes there."""
    batch = max(runner.batches, key=runner.rows.size)
    size = min(runner.rows.size(batch), _EXAMPLES)

    def seen(size: int, *numbers: int) -> Seen:
        some = runner.rows.take(batch, range(size))

        def sums_of(output: Any) -> list[Tensor]:
            return [probe_of(runner.model, output, some, 0, runner.rows, i) for i in numbers]

        return runner.slopes_of(some, [linear.name for linear in linears], sums_of)

    try:
        alone = seen(1, 0)
        sizes = {
            name: sum(4 * (x.numel() + 3 * y.numel()) for x, y, _ in calls)  # with what is added to y
            for name, calls in alone.items()
        }
        size = min(size, max(2, _MOST // max(1, sum(sizes.values()))))
        tried = (0, size - 1)
        together = seen(size, *tried)
    except Exception:  # memory may run out, and a model may raise anything: then only W_O moves
        return {}

    def is_apart(linear: LinearLayer) -> bool:
        one, several = alone[linear.name], together[linear.name]
        if not several or [x.numel() * size for x, _, _ in one] != [x.numel() for x, _, _ in several]:
            return False
        for x, y, slopes in several:
            for i, slope in zip(tried, slopes, strict=True):
                own = slope.reshape(size, -1)
                if not own[i].any() or own.count_nonzero() > own[i].count_nonzero():
                    return False
            if x.ndim < 2 or not close(x @ linear.weight.to(x) + linear.bias.to(x), y):
                return False
        return True

    return {linear.name: sizes[linear.name] for linear in linears if is_apart(linear)}
