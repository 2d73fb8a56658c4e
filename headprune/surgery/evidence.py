"""Evidence for the proof: inputs derived from the example, and outputs of the pruned layers themselves.

Other shapes, padding, other content, more tokens and a prompt show errors that the example hides. If heads hardly
change the model's outputs, these prove nothing: a gate of 1e-4 behind a layer (ReZero, LayerScale), or a W_O that is
still zero, hides a wrong cut. So the proof also compares the outputs of each kept head, of W_O and of the layer, each
relative to its own size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headprune import inputs
from headprune.attention import AttentionLayer, Heads, Layers
from headprune.inputs import Example, tensors, widened, writes
from headprune.pruned.hooks import surviving

LENGTH = 64  # tokens of the longer input, if the example is short; a longer example is doubled
LONG = 4096  # examples with more tokens (or samples of sound) are not made longer: that would cost too much

_LIMIT = re.compile(
    r"position_embeddings|n_positions|(source|target)_positions|n_ctx$|max_seq|seq_length|sequence_length"
)


class Prompt(dict[str, Any]):
    """An example from which the model generates token by token, with a cache."""


def inputs_for(model: nn.Module, example: Example) -> list[list[Example]]:
    """Inputs for the proof: the example, versions with other shapes and padding, random content, more tokens, and a prompt.

    If all tokens of the example are alike, attention is uniform, which hides errors; if it is short, errors that only affect
    later tokens are hidden. What is derived from a text has at most `LONG` tokens: with padding many models build a mask of tokens x
    tokens. Each input is a list of choices: a model may refuse some, and the first that it takes is used.
    """
    short = inputs.first_tokens(example, LONG)
    single = [example, *inputs.variants(short)[:2], *inputs.scrambled(short, inputs.vocabulary_size(model))]
    if isinstance(short, Mapping) and "input_ids" in short and writes(model):
        single.append(Prompt({k: v for k, v in short.items() if not k.startswith(("decoder_", "labels"))}))
    return [[each] for each in single] + longer(example, position_limit(model))


def longer(example: Example, limit: int | None = None) -> list[list[Example]]:
    """Examples with more tokens, as lists of choices: of each list, the first that the model takes is used.

    Shapes show where the tokens are: the second dimension of token ids and features, and every dimension of a mask that
    is as long. Features may also be ``[L, B, D]``, so there is a second list for that case. The contents are repeated, and
    no added token is padding.

    Args:
        example: Ids ``[B, L]``, features ``[B, L, D]`` or ``[L, B, D]``, alone or with masks, in a dict or tuple.
        limit: The most tokens that the model takes, if known.
    """
    main = _main(example)
    if main is None:
        return []
    result = []
    for dim in (1, 0) if main.ndim == 3 else (1,):
        lengths = {t.shape[dim] for t in _tokens(example) if t.ndim == main.ndim or dim == 1}
        batch = main.shape[1 - dim]
        choices: dict[tuple[torch.Size, ...], Example] = {}
        tries = [(max(LENGTH, 2 * n), 4 * n, 2 * n, n + -(-n // 4)) for n in lengths]  # the longest first
        for targets in zip(*tries, strict=True):
            new = {n: min(m, limit or m) for n, m in zip(lengths, targets, strict=True) if 1 < n <= LONG}
            new = {n: m for n, m in new.items() if m > n}
            for rows in dict.fromkeys((1, batch)) if new else ():
                extended = _extended(example, new, main, dim, batch, rows)
                choices.setdefault(tuple(t.shape for t in tensors(extended)), extended)
        if choices:
            result.append([*choices.values()])
    return result


def position_limit(model: nn.Module) -> int | None:
    """The most tokens that a transformers model takes, by its config; None if that names no limit."""
    limits = (v for k, v in inputs.config_fields(model) if _LIMIT.search(k) and type(v) is int and v > 1)
    return min(limits, default=None)


def _main(example: Example) -> Tensor | None:
    """The tokens: ids ``[B, L]``, or features with a third dimension."""
    if isinstance(example, Mapping):
        for name in ("input_ids", "inputs_embeds", "input_values", "input_features"):
            if isinstance(t := example.get(name), Tensor) and t.ndim in (2, 3):
                return t
    elif (first := next(iter(tensors(example)), None)) is not None and first.ndim > 3:
        return None  # images
    return next(iter(_tokens(example)), None)


def _tokens(example: Example) -> list[Tensor]:
    """Every sequence of the example, of an encoder or a decoder: ids, features, or samples of sound."""
    named = example.items() if isinstance(example, Mapping) else [("", t) for t in tensors(example)]
    sequences = [t for name, t in named if isinstance(t, Tensor) and not re.search("mask|bias|pixel", name)]
    return [t for t in sequences if t.dtype != torch.bool and t.ndim in (2, 3) and t.numel()]


def _extended(value: Any, new: Mapping[int, int], main: Tensor, dim: int, batch: int, rows: int, name: str = "") -> Any:
    """``value`` with its first ``rows`` examples, and with the lengths ``{old: new}`` in every dimension that counts tokens."""
    if isinstance(value, Mapping):
        return {k: _extended(v, new, main, dim, batch, rows, k) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_extended(v, new, main, dim, batch, rows) for v in value)
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    features = value.ndim == 3 and value.is_floating_point() and (value is main or value.shape[-1] not in new)
    image = value.ndim > 3 and value.is_floating_point() and name and not re.search("mask|bias", name)
    square = value.ndim == 2 and value.shape[0] == value.shape[1] and value is not main and "ids" not in name
    if features:
        along, at = [dim], 1 - dim
    elif square and value.shape[0] in new:  # a mask for pairs of tokens
        along, at = [0, 1], -1
    else:
        along, at = [] if image else list(range(1, value.ndim)), 0
    if at >= 0 and value.shape[at] == batch:
        value = value.narrow(at, 0, rows)
    for d in along:
        if (length := value.shape[d]) in new:
            value = value.index_select(d, torch.arange(new[length], device=value.device) % length)
    plain = value.ndim == 2 and not square and not value.is_floating_point()
    return torch.ones_like(value) if "attention_mask" in name and plain else value


class Bounds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises IndexError for an index out of range on any device: CUDA itself would fail for the rest of the process."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        look = _LOOKUPS.get(func.overloadpacket)
        for index, size in look(args) if look else ():
            if index.dtype not in (torch.bool, torch.uint8) and index.numel():
                low, high = (int(i) for i in index.aminmax())
                if low < -size or high >= size:
                    raise IndexError(f"index {high if high >= size else low} is out of range for {size} entries")
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
_LOOKUPS: dict[Any, Callable[[Any], list[tuple[Tensor, int]]]] = {
    _aten.embedding: lambda a: [(a[1], a[0].shape[0])],
    _aten.index_select: lambda a: [(a[2], a[0].shape[a[1]])],
    _aten.gather: lambda a: [(a[2], a[0].shape[a[1]])],
    _aten.index: lambda a: [(i, a[0].shape[d]) for d, i in enumerate(a[1]) if i is not None],
}


ROWS = 64  # positions that are kept of each output: a large model has many layers
FAINT = 1e-2  # smaller heads are compared as if they were as large as this share of their layer's largest

Seen = dict[str, list[list[Tensor]]]
"""Outputs by place in a layer, one entry for each call: one tensor ``[positions, features]``, or one for each head."""


@contextmanager
def watching(model: nn.Module, layers: Layers, drop: Heads, *, cut: bool) -> Iterator[Seen]:
    """Record the outputs of the layers that lose heads while the context lasts.

    Args:
        drop: ``{layer_name: [head, …]}`` that are masked now, or were cut.
        cut: Whether they were cut: then W_O's input holds only the heads that stay.
    """
    seen: Seen = {}
    with ExitStack() as stack:
        for layer in layers:
            if layer.name in drop:
                for handle in _hooks(model, layer, drop[layer.name], cut, seen):
                    stack.enter_context(handle)
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


def _hooks(model: nn.Module, layer: AttentionLayer, dropped: Sequence[int], cut: bool, seen: Seen) -> Iterator[Any]:
    """Hooks at all places in one layer that a pruned and a masked model both have; as contexts that remove them."""
    place = layer.output_projection
    assert place is not None
    kept = [h for h in range(layer.num_heads) if h not in set(dropped)]
    attention = model.get_submodule(layer.module)

    def note(key: str, parts: list[Tensor]) -> None:
        seen.setdefault(key, []).append([_sampled(t) for t in parts])

    def whole(module: nn.Module, args: Any, output: Any, key: str) -> None:
        if floats := [t for t in tensors(output) if t.is_floating_point() and not t.is_nested][:1]:
            note(key, floats)

    def heads(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = tensors([args, kwargs])[0]
        if not hidden.is_nested:
            hidden = hidden.movedim(1, -1) if isinstance(module, nn.modules.conv._ConvNd) else hidden
            note(f"what heads of {layer.name} give", _by_head(hidden, place.features, kept, cut))

    if layer.output_inside:  # otherwise the module's output goes to W_O, whose input is masked
        yield attention.register_forward_hook(partial(whole, key=f"the output of {layer.module}"))
    if kept or layer.bypass != "stub" or not layer.output_inside:  # otherwise W_O is gone
        output = model.get_submodule(place.module)
        if output is not attention:
            yield output.register_forward_hook(partial(whole, key=f"the output of {place.module}"))
        if kept and not layer.concatenates:
            yield output.register_forward_pre_hook(heads, with_kwargs=True)


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
