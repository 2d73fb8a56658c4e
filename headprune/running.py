"""A model while it runs: quietly, with the same answers each time, and left as it was; and its modules' calls wrapped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from headprune.offload import is_offloaded, trainable
from headprune.pruned import convert

T = TypeVar("T")


class Progress(Protocol):
    """A callback that is told how far a long run is."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """``done`` of ``total`` steps; ``note`` is more for a person who waits, such as the widest interval so far."""


def no_progress(done: int, total: int, note: str = "") -> None:
    """Progress that no one follows."""


def tracked(items: Collection[T], progress: Progress) -> Iterator[T]:
    """The items one by one; after each, how many are done."""
    for done, item in enumerate(items, 1):
        yield item
        progress(done, len(items))


@contextmanager
def quiet(model: nn.Module, *, exact: bool = True, attributes: bool = True) -> Iterator[None]:
    """The same answers each time, from attention that computes every head by itself; afterwards the model is as it was.

    Evaluation mode, so no dropout; no key/value cache; stand-ins for fused attention (`exact_attention`); outside of
    `torch.inference_mode`.

    Args:
        exact: Run compiled modules as plain Python and float32 products with all their bits. Not so where a model is measured as
            its user runs it.
        attributes: Restore the modules' attributes and buffers afterwards. Not so for single passes: it copies every buffer.
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
    """Evaluation mode for every module while the context lasts; afterwards each module has its own mode again."""
    with ExitStack() as stack:
        for model in models:
            for module in model.modules():
                stack.callback(setattr, module, "training", module.training)
            model.eval()
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as plain Python while the context lasts: code from `torch.compile` does not see new hooks."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 products with all their bits while the context lasts: no TF32 on a GPU, no bfloat16 in oneDNN.

    TF32 has 10 bits, and convolutions use it by default. Where a pruned model is compared with the masked one, or sums are fitted to,
    that would look like another answer.
    """
    backends: Any = torch.backends
    with ExitStack() as stack:
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # it was set by the settings of PyTorch 2.9, which this may not be mixed with
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
    """What gives dicts and sets the content back that they have now; all of them also where it is interrupted once."""
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
def held(dicts: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """What dicts hold now, they hold again when the context ends; a model has thousands, so there is no callback for each."""
    restore = restorer(dicts)
    try:
        yield
    finally:
        restore()


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """No key/value cache: no text is generated, and a block that runs twice would find its own keys in it."""
    # A decoder may have a config of its own.
    configs: dict[int, Any] = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
    with ExitStack() as stack:
        for config in configs.values():
            if getattr(config, "use_cache", None) is True:
                _set_for_a_while(stack, config, "use_cache", False)
        yield


@contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Replace every module that needs a stand-in while the context lasts."""
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
    """Restore the attributes of all modules afterwards: one such as D2L's ``attention_weights`` would hold the traced graph."""
    modules = list(model.modules())
    every = [(name, value) for module in modules for name, value in vars(module).items()]
    caches = [value for name, value in every if type(value) is dict and name[0] != "_"]
    # A model may register hooks on its first run (transformers' `capture_outputs`), and note that in an attribute. Both are
    # restored, or a later run would register the hooks once more.
    hooks = [value for name, value in every if "_hooks" in name and isinstance(value, dict)]
    # A compiled script has something else there.
    buffers = [module._buffers for module in modules if isinstance(module._buffers, dict)]
    copies: dict[int, Tensor] = {}
    with held((*map(vars, modules), *caches, *buffers, *hooks)), ExitStack() as stack:
        for _, value in every:
            if type(value) is list:
                stack.callback(value.__setitem__, slice(None), list(value))
        for cache in caches:
            if any(isinstance(v, Tensor) for v in cache.values()):
                cache.clear()  # tensors kept from earlier calls have no graph
        for own in buffers:
            for name, buffer in own.items():
                if buffer is not None:  # a forward may write into it, so it gets a copy
                    own[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield


# -- what some passes need besides ----------------------------------------------------------------


@contextmanager
def config_kept(model: nn.Module) -> Iterator[None]:
    """Leave a model's configs as they are: classifiers note their ``problem_type`` in it when they first compute a loss."""
    every = (getattr(module, "config", None) for module in model.modules())
    configs: dict[int, Any] = {id(c): c for c in every if hasattr(c, "to_dict") and not isinstance(c, type)}
    with held(map(vars, configs.values())):
        yield


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for the weights while the context lasts: the backward pass to the gates then takes half the time."""
    before = [(module, name, module._parameters[name]) for module, name in trainable(model)]
    for *_, p in before:
        if p is not None:
            p.requires_grad_(False)
    try:
        yield
    finally:
        for module, name, p in before:
            if p is not None:
                p.requires_grad_(True)
            if (now := module._parameters.get(name)) is not None:  # another one, where a hook of accelerate loads it
                now.requires_grad_(True)


def forget_compiled() -> None:
    """Let `torch.compile` compile again: code from before a module changed may not notice the change."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@contextmanager
def wrapped(modules: Mapping[str, nn.Module], around: Callable[..., Any], method: str = "_call_impl") -> Iterator[None]:
    """Wrap a method of modules while the context lasts: by default the call with its hooks, or ``"forward"`` inside them.

    Args:
        modules: By name.
        around: Called in the method's place with (name of the module, the method, and then the method's arguments).
        method: The method's name.
    """
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
    """A model's blocks, by name: transformers' own, or else the outermost entries of lists of modules; no blocks inside blocks."""
    blocks: dict[str, nn.Module] = {}
    named = dict(model.named_modules())
    marked = [n for n, m in named.items() if any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)]
    lists = [(f"{name}." if name else "", m) for name, m in named.items() if isinstance(m, nn.ModuleList)]
    listed = [f"{prefix}{child}" for prefix, module in lists for child, _ in module.named_children()]
    for name in marked or listed:
        if not any(name.startswith(f"{outer}.") for outer in blocks):
            blocks[name] = named[name]
    return blocks


@contextmanager
def checkpointed(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Activation checkpointing, if ``always``, if the model has enabled it, or if some of its weights are offloaded.

    By itself it only happens in training mode, with dropout. A graph holds the weights that were loaded for it: with checkpoints only those
    of one block at a time.
    """
    # Transformers has two names for it.
    newer = hasattr(type(model), "is_activation_checkpointing")
    enabled = getattr(model, "is_activation_checkpointing" if newer else "is_gradient_checkpointing", False)
    blocks = blocks_of(model) if always or enabled or is_offloaded(model) else {}
    if not blocks:
        yield
        return

    def around(name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(call, *args, use_reentrant=False, **kwargs)

    # To its end: what loaded a module's weights must unload them again. A block that runs twice would find its own keys in a cache.
    with wrapped(blocks, around), set_checkpoint_early_stop(False), uncached(model):
        yield


def recomputing() -> bool:
    """Whether a backward pass is on, in which a checkpointed block runs once more: hooks that note something have noted it already."""
    return torch._C._current_graph_task_id() != -1
