"""The outputs of the pruned layers themselves: where heads hardly change a model's outputs, those prove nothing.

A gate of 1e-4 behind a layer (ReZero, LayerScale), or a W_O that still is zero, hides a wrong cut from the model's outputs.
So the proof also compares the output of each head that stays, of W_O, and of the layer, each as a share of its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, Heads
from headprune.inputs import tensors, widened
from headprune.pruned.hooks import surviving

ROWS = 64  # positions that are kept of each output: a large model has many layers
FAINT = 1e-2  # a head far smaller than its layer's largest is compared as if it were this share of that one

Seen = dict[str, list[list[Tensor]]]
"""For each place in a layer, what was seen there in each of its calls: a tensor ``[positions, features]`` for each head, or one."""


@contextmanager
def watching(model: nn.Module, layers: Sequence[AttentionLayer], drop: Heads, *, cut: bool) -> Iterator[Seen]:
    """Note the outputs of the layers that lose heads while the context lasts.

    Args:
        drop: ``{layer_name: [head, …]}`` that are masked now, or were cut.
        cut: Whether they were cut: then W_O's input holds only the heads that stay.
    """
    seen: Seen = {}
    with ExitStack() as stack:
        for layer in layers:
            if layer.name in drop:
                for handle in _hooks(model, layer, drop[layer.name], cut, seen):
                    stack.callback(handle.remove)
        yield seen


def differing(got: Seen, expected: Seen, tolerance: float) -> str:
    """Where the outputs of a pruned model's layers differ from those of the masked model; "" if they do not."""
    for place, calls in expected.items():
        if len(got.get(place, [])) != len(calls):
            return f"{place} runs {len(got.get(place, []))} times instead of {len(calls)}"
        for pruned, masked in zip(got[place], calls, strict=True):
            if [t.shape for t in pruned] != [t.shape for t in masked]:
                return f"what reaches {place} has another shape"
            most = max(map(largest, masked), default=0.0)
            for head, (a, b) in enumerate(zip(pruned, masked, strict=True)):
                if (off := gap(a, b)) == math.inf:
                    return f"{place} is not finite where the masked model's is"
                scale = max(largest(b), FAINT * most)
                if off > tolerance * scale:
                    which = f" (head {head} of those left)" if len(masked) > 1 else ""
                    return f"{place}{which} differs from the masked model's by {off / max(scale, 1e-30):.2g} of its largest value"
    return ""


def _hooks(model: nn.Module, layer: AttentionLayer, dropped: Sequence[int], cut: bool, seen: Seen) -> list[Any]:
    """Hooks at every place of one layer that a pruned and a masked model have in common."""
    place = layer.output_projection
    assert place is not None
    kept = [h for h in range(layer.num_heads) if h not in set(dropped)]
    attention = model.get_submodule(layer.module)

    def note(key: str, parts: list[Tensor]) -> None:
        seen.setdefault(key, []).append([_sampled(t) for t in parts])

    def whole(key: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if floats := [t for t in tensors(output) if t.is_floating_point() and not t.is_nested][:1]:
                note(key, floats)

        return hook

    def heads(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = tensors([args, kwargs])[0]
        if not hidden.is_nested:
            hidden = hidden.movedim(1, -1) if isinstance(module, nn.modules.conv._ConvNd) else hidden
            note(f"what heads of {layer.name} give", _by_head(hidden, place.features, kept, cut))

    handles = []
    if layer.output_inside:  # otherwise the layer's heads go on to W_O, and are masked there
        handles.append(attention.register_forward_hook(whole(f"the output of {layer.module}")))
    if kept or layer.bypass != "stub" or not layer.output_inside:  # otherwise W_O is gone
        output = model.get_submodule(place.module)
        if output is not attention:
            handles.append(output.register_forward_hook(whole(f"the output of {place.module}")))
        if kept and not layer.concatenates:
            handles.append(output.register_forward_pre_hook(heads, with_kwargs=True))
    return handles


def _by_head(hidden: Tensor, features: Sequence[Sequence[int]], kept: Sequence[int], cut: bool) -> list[Tensor]:
    """The features of each head that stays, from W_O's input before or after the cut."""
    if not cut:
        return [hidden[..., list(features[h])] for h in kept]
    stay = surviving(features, kept)
    size = hidden.shape[-1] + len(stay.owned - stay.kept)
    where = {i: n for n, i in enumerate(stay.index(size, torch.device("cpu")).tolist())}
    return [hidden[..., [where[i] for i in features[h]]] for h in kept]


def _sampled(t: Tensor) -> Tensor:
    """A few positions, spread evenly, in float32 or wider."""
    flat = t.detach().reshape(-1, t.shape[-1]) if t.ndim > 1 else t.detach().reshape(1, -1)
    if len(flat) > ROWS:
        flat = flat[torch.linspace(0, len(flat) - 1, ROWS, device="cpu").long().to(flat.device)]
    return widened(flat).clone()


def largest(t: Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    return t.nan_to_num(0, 0, 0).abs().max().item() if t.numel() else 0.0


def gap(got: Tensor, expected: Tensor) -> float:
    """The largest difference between finite numbers; infinity where the two are not finite in the same places."""
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return math.inf
    return (got - expected)[finite].abs().max().item() if bool(finite.any()) else 0.0
