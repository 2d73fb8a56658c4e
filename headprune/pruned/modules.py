"""Modules that take the place of attention modules: those without heads, exact stand-ins, and configs with a layer's own head counts.

Copied into saved folders together with `headprune.pruned.structure`; so this file imports nothing of headprune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Attributes that Accelerate's hooks set: bound to the module that they were set on.
_OF_ACCELERATE = ("forward", "_old_forward", "_hf_hook")


class _Shadow(nn.Module):
    """Tensors without entries in the place of removed weights.

    They are in the state dict, so that a stock class refuses to load it; it would fill missing weights with random
    numbers. But `named_modules` does not list them, since PEFT would try to adapt a ``query`` among them.
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


def _shadow(module: nn.Module) -> _Shadow:
    """The `_Shadow` of a module's parameters, but for its own bias, which stays."""
    return _Shadow({name: tensor for name, tensor in module.named_parameters() if name != "bias"})


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
            # Attention weights of 0 heads, so that weights collected from all layers have an entry for this one.
            weights = hidden.new_zeros(hidden.shape[0], 0, hidden.shape[1], hidden.shape[1])
        return (out, weights, *(None,) * (self.arity - 2))[: self.arity]

    def to_json(self) -> dict[str, Any]:
        return {"empty": {"width": self.width, "bias": self.bias is not None, "arity": self.arity}}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_empty, (type(self).__mro__[2],), self.__dict__


@cache
def _empty_class(base: type[nn.Module]) -> type[EmptyAttention]:
    """An `EmptyAttention` that also derives from the class it replaces, for code that looks for attention modules."""
    return type(f"Empty{base.__name__}", (EmptyAttention, base), {"__module__": __name__})


def _new_empty(base: type[nn.Module]) -> Any:
    return object.__new__(_empty_class(base))  # type: ignore[arg-type]


def emptied(attention: nn.Module, width: int, bias: Tensor | None, arity: int) -> nn.Module:
    """The `EmptyAttention` that replaces an attention module without heads.

    Args:
        attention: The module; its own attributes (such as its config, and hooks that collect outputs) are kept.
        width: Features of the output (0 where W_O comes after the attention module and adds its own bias).
        bias: W_O's bias, ``[width]``, or None.
        arity: Length of the returned tuple; 0 returns the tensor alone.
    """
    shadow = _shadow(attention)
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
    """An output projection (``nn.Linear`` or transformers' ``Conv1D``) without input features: it returns its bias for every token."""

    def __init__(self, projection: nn.Module, bias: Tensor | None) -> None:
        super().__init__()
        weight: Any = projection.weight
        width = weight.shape[0] if isinstance(projection, nn.Linear) else weight.shape[1]
        self.width, self.in_features, self.out_features = width, 0, width
        self._buffers.update(_shadow(projection)._buffers)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros((*x.shape[:-1], self.width))
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"only_bias": {"width": self.width, "bias": self.bias is not None}}


class ConfigView:
    """A view of a config with one layer's own counts of heads; everything else comes from the original.

    Some modules read the number of heads from the config that the whole model shares. A copy would miss
    later changes to the original, such as another attention implementation.
    """

    def __init__(self, original: Any, own: dict[str, int]) -> None:
        self.__dict__.update(original=original, own=own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "own" not in self.__dict__:  # a copy is being made
            raise AttributeError(name)
        # transformers lets one field have several names.
        field = getattr(self.original, "attribute_map", {}).get(name, name)
        return self.own[field] if field in self.own else getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)


def is_ours(value: object, *classes: type) -> bool:
    """Whether a value is of one of this package's classes, or of the copy of it in a saved folder's code.

    A model that transformers loaded from such a folder is made of the copies.
    """
    names = {cls.__name__ for cls in classes}
    return isinstance(value, classes) or any(
        cls.__name__ in names and cls.__module__.endswith(".modeling_headprune") for cls in type(value).__mro__
    )


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with separate projections, so that it can have any number of heads.

    PyTorch's own class requires ``num_heads * head_dim == embed_dim``, calls W_O without calling the
    module (so hooks on it never run) and has a fused path that skips Python. This one shares the
    original's weights (no copy), takes the same arguments and returns the same values.
    """

    # nn.TransformerEncoderLayer reads these; the value sends it past its fused kernel, which would
    # read in_proj_weight and so bypass this module.
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim = source.embed_dim
        self.num_heads = source.num_heads
        self.head_dim = source.head_dim
        self.batch_first = source.batch_first
        self.kept_heads: list[int] | None = None  # the entries of a mask for each head that are used
        self.dropout = source.dropout
        self.add_zero_attn = source.add_zero_attn
        self.training = source.training
        if source._qkv_same_embed_dim:
            weights = source.in_proj_weight.detach().chunk(3)
        else:
            weights = tuple(w.detach() for w in (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight))
        biases = source.in_proj_bias.detach().chunk(3) if source.in_proj_bias is not None else (None,) * 3
        trainable = source.out_proj.weight.requires_grad
        self.q_proj, self.k_proj, self.v_proj = (_linear(w, b, trainable) for w, b in zip(weights, biases, strict=True))
        self.out_proj = _linear(source.out_proj.weight.detach(), source.out_proj.bias, trainable)
        extra = source.bias_k, source.bias_v
        self.bias_k, self.bias_v = (None if b is None else nn.Parameter(b.detach(), trainable) for b in extra)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `torch.nn.MultiheadAttention.forward`."""
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        rows, length = query.shape[:2]
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(rows, 1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(rows, 1, -1)], dim=1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        extra = k.shape[1] - key.shape[1]
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))

        # As in PyTorch, `is_causal` is trusted and the mask itself is ignored (and added keys are not reached).
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _additive(attn_mask, q.dtype)
        if mask is not None and mask.dim() == 3:  # (batch * heads, T, S), as PyTorch takes it
            mask = mask.view(rows, -1, *mask.shape[1:])
            if self.kept_heads is not None and mask.shape[1] != self.num_heads:
                mask = mask[:, self.kept_heads]  # made for all heads, by code that does not know of the prune
        padding = _additive(key_padding_mask, q.dtype)
        if padding is not None:
            padding = padding[:, None, None, :]
            mask = padding if mask is None else mask + padding
        if mask is not None and extra:
            mask = F.pad(mask, (0, extra))

        dropout = self.dropout if self.training else 0.0
        weights = None
        if self.num_heads == 0:  # every head was pruned: W_O adds its bias to nothing
            attended = q
        elif need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            attended = F.dropout(weights, dropout, self.training) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        out = self.out_proj(attended.transpose(1, 2).reshape(rows, length, self.num_heads * self.head_dim))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights


Rule = Callable[[Any], nn.Module]
_RULES: dict[str, Rule] = {}


def stand_in(attention: type[nn.Module] | str) -> Callable[[Rule], Rule]:
    """Declare how to rebuild an attention class that cannot be traced as it is written.

    headprune needs softmax attention (`scaled_dot_product_attention` or a softmax over the keys) whose heads reach one
    linear layer, called as a module. Modules of any other class, for instance with W_O in an ``einsum``, are replaced by
    the module that the rule returns: while the model is traced or masked, and permanently when it is pruned.

    Args:
        attention: The class, or its qualified name (then it need not be imported). The rule is not used for subclasses.

    Returns:
        A decorator for the rule: a function of the module that returns a module with the same arguments and results, which
        shares the weights (a view, no copy). See docs/support-a-model.md.
    """
    name = attention if isinstance(attention, str) else _qualified(attention)

    def declare(rule: Rule) -> Rule:
        _RULES[name] = rule
        return rule

    return declare


def convert(module: nn.Module) -> nn.Module | None:
    """An exact stand-in for ``module`` if a rule declares one for its class, else None."""
    cls = type(module)
    torchs = isinstance(module, nn.MultiheadAttention) and cls.forward is nn.MultiheadAttention.forward
    rule: Rule | None = MultiheadAttention if torchs else _RULES.get(_qualified(cls))
    return None if rule is None else rule(module).train(module.training)


def rebuilt(module: nn.Module, methods: dict[str, Any]) -> Any:
    """A module that shares everything with ``module`` but has some other ``methods``; its parts can be replaced."""
    base = type(module)
    new: Any = object.__new__(type(f"Traceable{base.__name__}", (base,), {**methods, "__module__": __name__}))
    # Its own dicts, so that parts can be added and taken away.
    new.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(module).items()}
    return new


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@stand_in("transformers.models.xlnet.modeling_xlnet.XLNetRelativeAttention")
def _xlnet(module: Any) -> nn.Module:
    """W_O is a parameter ``[d_model, heads, head_dim]`` in an einsum."""

    def post_attention(self: Any, h: Tensor, attn_vec: Tensor, residual: bool = True) -> Tensor:
        attended = self.dropout(self.o_proj(attn_vec.flatten(-2)))
        normed: Tensor = self.layer_norm(attended + h if residual else attended)
        return normed

    new: nn.Module = rebuilt(module, {"post_attention": post_attention})
    weight: Any = new._parameters.pop("o")
    new.o_proj = _linear(weight.detach().flatten(1), None, weight.requires_grad)
    return new


@stand_in("transformers.models.wavlm.modeling_wavlm.WavLMAttention")
def _wavlm(module: Any) -> nn.Module:
    """Everything happens in `torch.nn.functional.multi_head_attention_forward`."""

    def attend(self: Any, hidden: Tensor, attention_mask: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor]:
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (proj(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for proj in projections)
        scores = q @ k.transpose(-2, -1) * self.scaling + bias.view(len(hidden), -1, *bias.shape[1:])
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask.ne(1)[:, None, None], float("-inf"))
        weights = F.softmax(scores, dim=-1)
        attended = F.dropout(weights, self.dropout, self.training) @ v
        return self.out_proj(attended.transpose(1, 2).flatten(2)), weights.mean(1, keepdim=True).expand_as(weights)

    new: nn.Module = rebuilt(module, {"torch_multi_head_self_attention": attend})
    return new


def _linear(weight: Tensor, bias: Tensor | None, trainable: bool) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=trainable)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=trainable)
    return linear


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
