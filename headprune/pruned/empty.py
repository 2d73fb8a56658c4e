"""Modules without heads, and configs with other numbers of heads for one layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

# What Accelerate's hooks put into a module: they run the module that they were put on.
_OF_ACCELERATE = ("forward", "_old_forward", "_hf_hook")


class _Shadow(nn.Module):
    """Tensors without entries in the place of weights that are gone.

    They are in the state dict, so that a stock class refuses to load it: it would give what is missing random values. But they are
    no modules to find by name, since PEFT would want to adapt a ``query`` among them.
    """

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        return iter(())

    def __init__(self, gone: Mapping[str, Tensor]) -> None:
        super().__init__()
        inner: dict[str, dict[str, Tensor]] = {}
        for name, tensor in gone.items():
            first, _, rest = name.partition(".")
            if rest:
                inner.setdefault(first, {})[rest] = tensor
            else:
                self.register_buffer(first, tensor.detach().new_empty(0, *tensor.shape[1:]))
        for name, tensors in inner.items():
            self.add_module(name, _Shadow(tensors))


class EmptyAttention(nn.Module):
    """An attention layer without heads: it returns the bias of W_O for every token (`emptied` makes it).

    Attributes:
        width: Features of the output (0 where W_O comes after the attention module and adds its own bias).
        arity: Length of the returned tuple; 0 returns the tensor alone.
    """

    width: int
    arity: int
    bias: Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        out = hidden.new_zeros((*hidden.shape[:-1], self.width))  # memory of its own: what comes next may write into it
        if self.bias is not None:
            out = out + self.bias.to(hidden.dtype)
        if not self.arity:
            return out
        weights = None
        if hidden.ndim == 3 and getattr(getattr(self, "config", None), "_attn_implementation", "") == "eager":
            # No heads' attention weights, so that what is collected of all layers has an entry for this one.
            weights = hidden.new_zeros(hidden.shape[0], 0, hidden.shape[1], hidden.shape[1])
        return (out, weights, *(None,) * (self.arity - 2))[: self.arity]

    def to_json(self) -> dict[str, Any]:
        return {"empty": {"width": self.width, "bias": self.bias is not None, "arity": self.arity}}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_empty, (type(self).__mro__[2],), self.__dict__


@cache
def _empty_class(base: type[nn.Module]) -> type[EmptyAttention]:
    """An `EmptyAttention` that passes for the class it replaces, to code that looks for attention modules."""
    return type(f"Empty{base.__name__}", (EmptyAttention, base), {"__module__": __name__})


def _new_empty(base: type[nn.Module]) -> Any:
    return object.__new__(_empty_class(base))  # type: ignore[arg-type]


def emptied(attention: nn.Module, width: int, bias: Tensor | None, arity: int) -> nn.Module:
    """What replaces an attention module without heads.

    Args:
        attention: The module; its own attributes (such as its config, and hooks that collect outputs) are kept.
        width: Features of the output (0 where W_O comes after the attention module and adds its own bias).
        bias: W_O's bias, ``[width]``, or None.
        arity: Length of the returned tuple; 0 returns the tensor alone.
    """
    shadow = _Shadow({name: tensor for name, tensor in attention.named_parameters() if name != "bias"})
    new: nn.Module = _new_empty(type(attention))
    own = {k: v for k, v in vars(attention).items() if k not in _OF_ACCELERATE or "_hf_hook" not in vars(attention)}
    new.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in own.items()}
    for held in (new._parameters, new._buffers, new._modules, new._forward_pre_hooks):
        held.clear()
    new._non_persistent_buffers_set = set()
    new._buffers.update(shadow._buffers)
    new._modules.update(shadow._modules)
    vars(new).update(width=width, arity=arity)
    new._parameters["bias"] = None if bias is None else nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return new


class OnlyBias(nn.Module):
    """An output projection without input features: it returns its bias for every token."""

    def __init__(self, width: int, bias: Tensor | None, gone: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.width, self.in_features, self.out_features = width, 0, width
        self._buffers.update(_Shadow({name: tensor for name, tensor in gone.items() if name != "bias"})._buffers)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad)

    @classmethod
    def of(cls, projection: nn.Module, bias: Tensor | None) -> OnlyBias:
        """What replaces an ``nn.Linear`` or transformers' ``Conv1D``."""
        weight = projection.weight
        assert isinstance(weight, Tensor)
        width = weight.shape[0] if isinstance(projection, nn.Linear) else weight.shape[1]
        return cls(width, bias, dict(projection.named_parameters()))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros((*x.shape[:-1], self.width))
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"only_bias": {"width": self.width, "bias": self.bias is not None}}


class ConfigView:
    """A config that counts one layer's heads otherwise, and is the original in everything else.

    Some modules read the number of heads from the config that the whole model shares. A copy would miss
    later changes to the original, such as another attention implementation.
    """

    def __init__(self, original: Any, own: dict[str, int]) -> None:
        self.__dict__.update(original=original, own=own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "own" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        # transformers lets one field have several names.
        field = getattr(self.original, "attribute_map", {}).get(name, name)
        return self.own[field] if field in self.own else getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)
