"""Find the attention layers of any model from one traced forward pass, without a table of architectures.

How it works. While the model runs on an example, every linear layer's output and every attention's
result is replaced by an equal tensor that starts a new autograd graph. So the graph between two
linear layers is small, and derivatives in it show which features belong to which head:

* Differentiate head ``h`` of the query, key and value (or of the eager scores) with respect to each
  linear layer's output: the non-zero columns are that head's rows of that projection. This works alike
  for fused and interleaved QKV, rotary embeddings and repeated key/value heads.
* Differentiate it with respect to parameters and buffers, too: if each head reads its own entries of one
  (a relative position table, a sink, a slope), a prune cuts these entries.
* The first linear layer whose input depends on the attention's result is W_O, and the forward derivative
  (by differentiating twice) of its input with respect to head ``h`` gives that head's columns.

No one has to trust the result: `headprune.prune` proves every removal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.input_specs import build, of_config, recorded, with_own_dtype
from headprune.inputs import Example, call, check_weights, does_not_run, model_device, move, usable
from headprune.offload import hook_of, is_elsewhere, is_offloaded, replace_inference_placeholders
from headprune.pruned import EmptyAttention, MultiheadAttention, convert, is_ours
from headprune.running import quiet, requiring_gradients
from headprune.trace.layers import read_layers
from headprune.trace.tracer import Tracer

__all__ = ["example_for", "find_attention"]

_LARGE = 1_000_000  # elements
_STRIDES = (1, 7, 61, 509, 4099)  # of large parameters, by dimension, so that all rows and columns differ


def find_attention(model: nn.Module, example: Example | None = None) -> list[AttentionLayer]:
    """Find every attention layer that runs on ``example``, in order of execution.

    Args:
        model: Any module, in any mode; it does not change. Its weights may be on the meta device (only the
            structure is read), spread over devices, or offloaded by accelerate.
        example: A dict of tensors (keyword arguments), a tensor, or a tuple (positional arguments), best with
            two rows and at least two tokens. It is moved to the model's device. By default a made-up input
            (`example_for`).

    Returns:
        One `AttentionLayer` per attention module (a module that runs several times, as in ALBERT,
        is one layer). Layers whose heads cannot be separated have ``prunable=False`` and a ``reason``.

    Raises:
        HeadPruneError: The model does not run on the example, it has no softmax attention, its weights were made in
            inference mode, or no example was given and none can be made up.
    """
    check_weights(model)
    _check_visible(model)
    if example is None:
        example = example_for(model)
    device = model_device(model)
    with torch.inference_mode(False):
        given = usable(move(example, "cpu" if device.type == "meta" else device))
    with quiet(model), torch.enable_grad():
        try:
            layers = _trace(model, given, buffers=True)
        except Exception:
            # Some buffers, such as a batch norm's, cannot require gradients, or the model modifies them in place.
            try:
                layers = _trace(model, given, buffers=False)
            except Exception as error:
                raise does_not_run(error) from error
    if not layers and not any(_is_emptied(m) for m in model.modules()):
        message = f"{type(model).__name__} has no softmax attention that headprune can see."
        raise HeadPruneError(message, "If attention only runs on longer or other inputs, pass such an example.")
    return layers


def _is_emptied(module: nn.Module) -> bool:
    """Whether a module is an attention layer that has lost all of its heads."""
    without_heads = is_ours(module, MultiheadAttention) and getattr(module, "num_heads", 1) == 0
    return without_heads or is_ours(module, EmptyAttention)


def example_for(model: nn.Module) -> Example:
    """A made-up input for a model, in the form of the inputs of an earlier `headprune.prune` or `headprune.repair`
    or, for a transformers model, in the form that its config implies.

    Raises:
        HeadPruneError: No form is known on which the model runs.
    """
    for spec in with_own_dtype(model, [*reversed(recorded(model)), *of_config(model)]):
        example: Example = build(spec)
        try:
            with quiet(model), torch.no_grad():
                call(model, move(example, model_device(model)))
        except Exception:  # a model may refuse an input with any error
            continue
        return example
    message = f"It is not known what {type(model).__name__} takes, so an example batch is needed to find the heads."
    raise HeadPruneError(message, "Pass example= or layers=.")


def _trace(model: nn.Module, example: Example, *, buffers: bool) -> list[AttentionLayer]:
    """Trace one forward pass and return its attention layers; ``buffers``: differentiate with respect to buffers, too."""
    with _materialised(model), _differentiable(model, buffers):
        tracer = Tracer(model)
        with tracer.watching(), tracer:
            tracer.note_leaks(call(model, example))
    return read_layers(tracer)


def _check_visible(model: nn.Module) -> None:
    """Refuse models that cannot be traced: TorchScript, and offloaded modules that need a stand-in, which would share their weights.

    Raises:
        HeadPruneError: The model holds such a module.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            message = f"{name or 'The model'} ({type(module).__name__}) is TorchScript, in which no head can be seen."
            raise HeadPruneError(message, "Give the model as it was before torch.jit.script or torch.jit.trace.")
    for name, module in model.named_modules() if is_offloaded(model) else ():
        if any(hook_of(part) is not None for part in module.modules()) and convert(module) is not None:
            message = f"{name} ({type(module).__name__}) is replaced by a stand-in that shares its weights, and Accelerate keeps these elsewhere."
            raise HeadPruneError(message, "Give it a device in the device map, so that its weights stay there.")


def _differentiable(model: nn.Module, buffers: bool) -> AbstractContextManager[None]:
    """Let every parameter (and, with ``buffers``, every floating-point buffer) require gradients while the context lasts."""
    replace_inference_placeholders(model)
    places: list[tuple[Any, str]] = [(m._parameters, n) for m in model.modules() for n in m._parameters]
    places += [(m._buffers, n) for m in model.modules() for n in m._buffers] if buffers else []
    return requiring_gradients(places, True)


@contextmanager
def _materialised(model: nn.Module) -> Iterator[None]:
    """Replace a model's meta tensors by random CPU tensors while the context lasts, except those that accelerate loads.

    Tracing needs a model's structure, not its weights. A large parameter becomes a strided view of a short random vector, whose entries
    it repeats: drawing billions of numbers would take minutes and too much memory.
    """
    generator, known = torch.Generator().manual_seed(0), dict[int, Tensor]()

    def real(t: Tensor) -> Tensor:
        if t.is_meta and id(t) not in known:
            known[id(t)] = _numbers(t, generator).requires_grad_(t.requires_grad)
        return known.get(id(t), t)

    with ExitStack() as stack:
        for module in model.modules():
            plain = vars(module)
            for own in (module._parameters, module._buffers, plain):
                for name, value in list(own.items()):
                    stays = name[0] == "_" if own is plain else value is not None and is_elsewhere(module, name)
                    if not stays and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
                        stack.callback(own.__setitem__, name, value)
                        own[name] = tree_map_only(Tensor, real, value)
        yield


def _numbers(meta: Tensor, generator: torch.Generator) -> Tensor:
    """The CPU tensor that replaces a meta tensor."""
    shape, dtype = meta.shape, meta.dtype
    if not meta.is_floating_point():
        # Positions and indices: zero is always valid. Masks: every token is visible.
        return torch.full(shape, dtype in (torch.bool, torch.uint8), dtype=dtype)
    if meta.ndim < 2:
        numbers = torch.rand(shape, generator=generator).to(dtype) + 0.5
    elif meta.numel() > _LARGE and isinstance(meta, nn.Parameter) and meta.ndim <= len(_STRIDES):
        last = sum(stride * (side - 1) for stride, side in zip(_STRIDES, shape, strict=False))
        numbers = torch.randn(last + 1, generator=generator) * shape[-1] ** -0.5
        numbers = numbers.to(dtype).as_strided(shape, _STRIDES[: meta.ndim])
    else:
        numbers = (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)
    return numbers
