"""Context managers to run a model reproducibly and restore it afterwards, to wrap module calls, and for activation checkpointing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from headprune.offload import is_offloaded, trainable
from headprune.pruned import convert

T = TypeVar("T")


class Progress(Protocol):
    """A progress callback of a long run."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """``done`` of ``total`` steps are finished; ``note`` is text for the user, such as the widest interval so far."""


def no_progress(done: int, total: int, note: str = "") -> None:
    """A `Progress` callback that does nothing."""


def tracked(items: Collection[T], progress: Progress) -> Iterator[T]:
    """Iterate over items, and report progress after each."""
    for done, item in enumerate(items, 1):
        yield item
        progress(done, len(items))


class SearchConsole(Protocol):
    """Receives a search's lines and its progress."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def track(self, label: str) -> AbstractContextManager[Progress]:
        """A progress bar."""


class CallbackConsole:
    """Passes progress to a function that takes (steps done, steps in all, note), if there is one; lines go to the log."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    def say(self, text: str) -> None:
        logging.getLogger("headprune").info(text)

    @contextmanager
    def track(self, label: str) -> Iterator[Progress]:
        def report(done: int, total: int, note: str = "") -> None:
            if self._progress:
                self._progress(done, total, f"{label} ({note})" if note else label)

        yield report


@contextmanager
def quiet(model: nn.Module, *, exact: bool = True, attributes: bool = True) -> Iterator[None]:
    """Make a model's answers reproducible, and its attention compute every head, while the context lasts; then restore the model.

    Evaluation mode, so no dropout; no key/value cache; stand-ins for fused attention (`exact_attention`); outside of
    `torch.inference_mode`.

    Args:
        exact: Run compiled modules as plain Python, and float32 products in full precision. False to measure a model as its user
            runs it.
        attributes: Restore the modules' attributes and buffers afterwards, which copies every buffer. False for single passes.
    """
    with ExitStack() as stack:
        gradients = torch.is_grad_enabled()
        stack.enter_context(torch.inference_mode(False))  # enables gradients
        stack.enter_context(torch.set_grad_enabled(gradients))
        if exact:
            stack.enter_context(full_precision())
            stack.enter_context(uncompiled())
        if attributes:
            stack.enter_context(attributes_kept(model))
        stack.enter_context(evaluating(model))
        stack.enter_context(exact_attention(model))
        stack.enter_context(uncached(model))
        yield


# -- the parts of `quiet` ------------------------------------------------------------------------


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode while the context lasts; then restore each module's mode."""
    with ExitStack() as stack:
        for model in models:
            for module in model.modules():
                stack.callback(setattr, module, "training", module.training)
            model.eval()
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as plain Python while the context lasts: code from `torch.compile` does not see new hooks."""
    compiling = "torch._dynamo" in sys.modules  # else nothing is compiled, and importing it takes seconds
    with torch.compiler.set_stance("force_eager") if compiling else nullcontext():
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products in full precision while the context lasts: no TF32 on a GPU, no bfloat16 in oneDNN.

    TF32 has a 10-bit mantissa, and convolutions use it by default. Its rounding would disturb least-squares fits and the comparison of
    a pruned model with the masked one.
    """
    backends: Any = torch.backends
    with ExitStack() as stack:
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # set through PyTorch 2.9's new settings, which must not be mixed with the old ones
            for place in (backends.cuda.matmul, backends.mkldnn.matmul):
                _set_for_a_while(stack, place, "fp32_precision", "ieee")
        else:
            if before != "highest":
                stack.callback(torch.set_float32_matmul_precision, before)
                torch.set_float32_matmul_precision("highest")
        try:
            _set_for_a_while(stack, backends.cudnn, "allow_tf32", False)
        except RuntimeError:
            for place in (backends.cudnn.conv, backends.cudnn.rnn):
                _set_for_a_while(stack, place, "fp32_precision", "ieee")
        yield


def _set_for_a_while(stack: ExitStack, place: Any, name: str, value: object) -> None:
    before = getattr(place, name)
    if before != value:
        stack.callback(setattr, place, name, before)
        setattr(place, name, value)


def restorer(parts: Iterable[Any]) -> Callable[[], None]:
    """A function that restores the present content of dicts and sets; completely, even if it is interrupted once."""
    before = [(part, part.copy()) for part in parts]

    def restore_all() -> None:
        for part, content in before:
            part.clear()
            part.update(content)

    def restore() -> None:
        try:
            restore_all()
        except BaseException:  # an interrupt may come between the two lines
            restore_all()
            raise

    return restore


@contextmanager
def restoring_dicts(dicts: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """Restore the content of dicts when the context ends; one callback for all, since a model has thousands."""
    with ExitStack() as stack:
        stack.callback(restorer(dicts))
        yield


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """Disable the key/value cache: no text is generated, and a block that runs twice would find its own keys in it."""
    with ExitStack() as stack:
        for module in model.modules():  # a decoder may have its own config
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is True:
                _set_for_a_while(stack, config, "use_cache", False)
        yield


@contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Replace every module that needs a stand-in, such as fused attention, while the context lasts."""
    stand_ins: dict[int, nn.Module | None] = {}
    with ExitStack() as stack:
        for parent in list(model.modules()):
            if isinstance(parent, nn.TransformerEncoder):  # nested tensors only work with the fused kernel
                _set_for_a_while(stack, parent, "use_nested_tensor", False)
            for name, child in list(parent.named_children()):
                if id(child) not in stand_ins:
                    stand_ins[id(child)] = convert(child)
                if (stand_in := stand_ins[id(child)]) is not None:
                    stack.callback(parent._modules.__setitem__, name, child)
                    parent._modules[name] = stand_in
        yield


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore all modules' attributes afterwards: one such as D2L's ``attention_weights`` would keep the traced graph alive."""
    modules = list(model.modules())
    every = [(name, value) for module in modules for name, value in vars(module).items()]
    caches = [value for name, value in every if type(value) is dict and name[0] != "_"]
    # A model may register hooks on its first run (transformers' `capture_outputs`), and record that in an attribute. Both are
    # restored, or a later run would register the hooks again.
    hooks = [value for name, value in every if "_hooks" in name and isinstance(value, dict)]
    # In TorchScript modules, `_buffers` and `_modules` are no dicts. BigBird puts other modules in place of its own.
    buffers = [module._buffers for module in modules if isinstance(module._buffers, dict)]
    children = [module._modules for module in modules if isinstance(module._modules, dict)]
    copies: dict[int, Tensor] = {}
    with restoring_dicts((*map(vars, modules), *caches, *buffers, *children, *hooks)), ExitStack() as stack:
        for _, value in every:
            if type(value) is list:
                stack.callback(value.__setitem__, slice(None), list(value))
        for cache in caches:
            if any(isinstance(v, Tensor) for v in cache.values()):
                cache.clear()  # tensors cached by earlier calls have no graph
        for own in buffers:
            for name, buffer in own.items():
                if buffer is not None:  # use a copy: a forward pass may modify it in place
                    own[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield


# -- for some passes only -------------------------------------------------------------------------


@contextmanager
def config_kept(model: nn.Module) -> Iterator[None]:
    """Restore a model's configs afterwards: classifiers set ``problem_type`` when they first compute a loss."""
    every = (getattr(module, "config", None) for module in model.modules())
    configs: dict[int, Any] = {id(c): c for c in every if hasattr(c, "to_dict") and not isinstance(c, type)}
    with restoring_dicts(map(vars, configs.values())):
        yield


def frozen(model: nn.Module) -> AbstractContextManager[None]:
    """Disable gradients of the weights while the context lasts, which halves the time of a backward pass to the gates."""
    return requiring_gradients(((module._parameters, name) for module, name in trainable(model)), False)


@contextmanager
def requiring_gradients(places: Iterable[tuple[Any, str]], required: bool) -> Iterator[None]:
    """Let tensors require gradients, or not, while the context lasts.

    Args:
        places: Each tensor's dict and name there, since Accelerate's hooks may replace the tensors whenever a module runs.
    """
    held = [(own, name, own[name]) for own, name in places if own[name] is not None]
    before = [(own, name, t, t.requires_grad) for own, name, t in held if t.is_floating_point() and t.is_leaf]
    try:
        for *_, tensor, _ in before:
            tensor.requires_grad_(required)
        yield
    finally:
        for own, name, tensor, was in before:
            tensor.requires_grad_(was)
            if (now := own.get(name)) is not None and now is not tensor and now.is_leaf:
                now.requires_grad_(was)


def forget_compiled() -> None:
    """Reset `torch.compile`, whose compiled code may not notice a changed module."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if getattr(
        frames, "FRAME_COUNTER", frames
    ):  # else nothing was compiled, and with a GPU a reset imports for seconds
        torch.compiler.reset()


@contextmanager
def wrapped(modules: Mapping[str, nn.Module], around: Callable[..., Any]) -> Iterator[None]:
    """Wrap the calls of modules, including their hooks, while the context lasts.

    Args:
        modules: By name.
        around: Called instead of a module, with (its name, the call, *arguments of the call).
    """
    method = "_call_impl"
    before: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    try:
        for name, module in modules.items():
            if id(module) not in before:  # one module may have two names
                before[id(module)] = module, {k: v for k, v in vars(module).items() if k == method}
                module.__dict__[method] = partial(around, name, getattr(module, method))
        yield
    finally:
        for module, own in before.values():
            del module.__dict__[method]
            module.__dict__.update(own)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """A model's blocks, by name: those that transformers marks, otherwise the items of ModuleLists; no blocks inside blocks."""
    blocks: dict[str, nn.Module] = {}
    named = dict(model.named_modules())
    marked = [n for n, m in named.items() if any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)]
    listed = [n for n in named if n and isinstance(named[n.rpartition(".")[0]], nn.ModuleList)]
    for name in marked or listed:
        if not any(name.startswith(f"{outer}.") for outer in blocks):
            blocks[name] = named[name]
    return blocks


@contextmanager
def checkpointed(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Use activation checkpointing if ``always``, if the model has enabled it, or if some of its weights are offloaded.

    transformers itself uses it only in training mode, with dropout. With offloaded weights, an autograd graph keeps all loaded weights in
    memory; with checkpoints, only those of one block at a time.
    """
    # transformers has an old and a new name for it.
    newer = hasattr(type(model), "is_activation_checkpointing")
    enabled = getattr(model, "is_activation_checkpointing" if newer else "is_gradient_checkpointing", False)
    blocks = blocks_of(model) if always or enabled or is_offloaded(model) else {}
    if not blocks:
        yield
        return

    def around(name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(call, *args, use_reentrant=False, **kwargs)

    # No early stop, so that hooks unload the weights that they loaded. No cache: a block that runs twice would find its own keys in it.
    with wrapped(blocks, around), set_checkpoint_early_stop(False), uncached(model):
        yield


def recomputing() -> bool:
    """Whether a backward pass is running, in which checkpointed blocks run a second time; hooks that record should then skip."""
    return torch._C._current_graph_task_id() != -1
