"""Modules of a model for a while otherwise: stand-ins for attention that cannot be traced, calls that are wrapped, nothing compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headprune.pruned import convert


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what `torch.compile` has compiled as the plain Python it was: compiled code does not see new hooks."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def forget_compiled() -> None:
    """Compile anew: what was compiled before a module changed may not notice."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@contextmanager
def wrapped(
    modules: Mapping[str, nn.Module], around: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Put something around the calls of modules, hooks included."""
    changed: list[nn.Module] = []
    try:
        for name, module in modules.items():
            if "_call_impl" in module.__dict__:
                continue  # one module under two names
            module.__dict__["_call_impl"] = around(name, module._call_impl)
            changed.append(module)
        yield
    finally:
        for module in changed:
            del module.__dict__["_call_impl"]


@contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Swap every module that needs a stand-in for it, and swap back, also on an exception."""
    stand_ins: dict[int, nn.Module] = {}
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    # Its nested tensors only work with the fused kernel that a stand-in avoids.
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
