"""A model's modules changed for a while: stand-ins for attention that cannot be traced, wrapped calls, nothing compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from headprune.pruned import convert


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


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """No key/value cache: no text is generated, and a block that runs twice would find its own keys in it."""
    # A decoder may have a config of its own.
    configs: dict[int, Any] = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
    caching = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextmanager
def config_kept(model: nn.Module) -> Iterator[None]:
    """Leave a model's configs as they are: classifiers note their ``problem_type`` in it when they first compute a loss."""
    every = (getattr(module, "config", None) for module in model.modules())
    configs: dict[int, Any] = {id(c): c for c in every if hasattr(c, "to_dict") and not isinstance(c, type)}
    before = [(config, dict(vars(config))) for config in configs.values()]
    try:
        yield
    finally:
        for config, values in before:
            vars(config).clear()
            vars(config).update(values)


def forget_compiled() -> None:
    """Let `torch.compile` compile again: code from before a module changed may not notice the change."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


Around = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(name of a module, its method) to what is called in the method's place."""


@contextmanager
def wrapped(modules: Mapping[str, nn.Module], around: Around, method: str = "_call_impl") -> Iterator[None]:
    """Wrap a method of modules while the context lasts: by default the call with its hooks, or ``"forward"`` inside them."""
    before: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    try:
        for name, module in modules.items():
            if id(module) not in before:  # one module may have two names
                before[id(module)] = module, {k: v for k, v in vars(module).items() if k == method}
                module.__dict__[method] = around(name, getattr(module, method))
        yield
    finally:
        for module, own in before.values():
            del module.__dict__[method]
            module.__dict__.update(own)


@contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Replace every module that needs a stand-in while the context lasts."""
    stand_ins: dict[int, nn.Module] = {}
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    # nn.TransformerEncoder's nested tensors only work with the fused kernel, which a stand-in does not use.
    nested = [(m, m.use_nested_tensor) for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    try:
        for encoder, _ in nested:
            encoder.use_nested_tensor = False
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if id(child) not in stand_ins:
                    stand_in = convert(child)
                    if stand_in is None:
                        continue
                    stand_ins[id(child)] = stand_in
                swapped.append((parent, name, child))
                parent._modules[name] = stand_ins[id(child)]
        yield
    finally:
        for parent, name, child in reversed(swapped):
            parent._modules[name] = child
        for encoder, used in nested:
            encoder.use_nested_tensor = used
