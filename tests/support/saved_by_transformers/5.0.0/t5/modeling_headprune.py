"""Written by headprune 0.1.0: loads a model whose attention heads were pruned, without headprune.

    from transformers import AutoModelForPreTraining
    model = AutoModelForPreTraining.from_pretrained(FOLDER, trust_remote_code=True)

The classes at the end are transformers' own; after one is built, its modules are changed as config.json says under
"headprune". What comes before is a copy of the package headprune.pruned (Apache-2.0).
"""

from __future__ import annotations

from transformers.models.t5 import modeling_t5 as _dense


from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        self.kept_heads: list[int] | None = None  # of those of a mask for each head
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
        self.bias_k, self.bias_v = (
            None if bias is None else nn.Parameter(bias.detach(), requires_grad=trainable)
            for bias in (source.bias_k, source.bias_v)
        )

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

        # As PyTorch does: trusted to be causal, the mask itself is not looked at (nor are added keys reached).
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _additive(attn_mask, q.dtype)
        if mask is not None and mask.dim() == 3:  # (batch * heads, T, S), as PyTorch takes it
            mask = mask.view(rows, -1, *mask.shape[1:])
            if self.kept_heads is not None and mask.shape[1] != self.num_heads:
                mask = mask[:, self.kept_heads]  # made for all heads, by what does not know that some are gone
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
    """A module that shares everything with ``module`` but has some other ``methods``; its parts can be exchanged."""
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
        q, k, v = (
            proj(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
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


import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Carried:
    """Something that a pruned module carries: an attribute called ``name``, and hooks that read it."""

    name: ClassVar[str]

    @classmethod
    def of(cls, module: nn.Module) -> Any:
        """What a module carries of this kind; None if it carries nothing."""
        return vars(module).get(cls.name)

    def hooks(self, module: nn.Module) -> list[Any]:
        """Register what reads it; the handles."""
        return []

    def carried_by(self, module: nn.Module) -> list[Any]:
        """Give it to a module, with the hooks if it carried none of this kind before; their handles."""
        new = self.of(module) is None
        vars(module)[self.name] = self
        return self.hooks(module) if new else []


@dataclass(frozen=True)
class Edited(Carried):
    """Which of a module's tensors and integers are others than its class makes; and whether it is a stand-in that stays."""

    name = "_headprune_edited"
    tensors: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    stand_in: bool = False

    @classmethod
    def add(cls, module: nn.Module, tensors: Sequence[str] = (), numbers: Sequence[str] = ()) -> None:
        """Note more of them."""
        old = cls.of(module) or cls()
        vars(module)[cls.name] = cls(old.tensors | set(tensors), old.numbers | set(numbers), old.stand_in)


@dataclass(frozen=True)
class Features:
    """The features of a tensor's dimension that stay: all but those that belong to removed heads alone."""

    kept: frozenset[int]
    owned: frozenset[int]  # features that belong to some head; the others always stay

    def index(self, size: int, device: torch.device) -> Tensor:
        """The indices that stay, of ``size``."""
        stay = [i for i in range(size) if i in self.kept or i not in self.owned]
        return torch.tensor(stay, dtype=torch.long, device=device)


def surviving(features: Sequence[Sequence[int]], kept: Sequence[int]) -> Features:
    """What stays of ``features[head]`` with some heads."""
    return Features(frozenset(i for h in kept for i in features[h]), frozenset(i for own in features for i in own))


@dataclass(frozen=True)
class HeadArgument:
    """An argument of the attention module that holds something for each head, such as ALiBi's bias.

    Attributes:
        key: Its keyword, or its position.
        dim: The dimension that the heads lie along: it has as many entries as heads (times the batch, if ``folded``), or
            else the entries of ``features``.
        folded: Whether that dimension is (batch * heads).
        features: ``features[h]`` along ``dim`` belong to head ``h``, as the trace has seen. () where only the shape says
            that there may be something for each head; the proof tells.
    """

    key: str | int
    dim: int
    folded: bool
    features: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "dim": self.dim,
            "folded": self.folded,
            "features": [list(f) for f in self.features],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadArgument:
        return cls(data["key"], data["dim"], data["folded"], tuple(map(tuple, data.get("features", ()))))


@dataclass(frozen=True)
class HeadArguments(Carried):
    """Which entries of its arguments a pruned attention module takes."""

    name = "_headprune_arguments"
    arguments: tuple[HeadArgument, ...]
    num_heads: int
    kept: tuple[int, ...]

    def hooks(self, module: nn.Module) -> list[Any]:
        return [module.register_forward_pre_hook(_take_own_arguments, with_kwargs=True)]

    def take(self, value: Any, argument: HeadArgument) -> Any:
        """The kept heads' part of an argument; an argument that has no part for each head stays whole."""
        if argument.features and isinstance(value, Tensor):
            stay = surviving(argument.features, self.kept)
            return value.index_select(argument.dim, stay.index(value.shape[argument.dim], value.device))
        if not isinstance(value, Tensor) or value.ndim <= argument.dim or value.shape[argument.dim] % self.num_heads:
            return value
        if argument.folded:  # (batch * heads, …)
            return value.reshape(-1, self.num_heads, *value.shape[1:])[:, list(self.kept)].flatten(0, 1)
        return value.index_select(argument.dim, torch.tensor(self.kept, device=value.device))

    def to_json(self) -> dict[str, Any]:
        return {
            "arguments": [a.to_json() for a in self.arguments],
            "num_heads": self.num_heads,
            "kept": to_ranges(self.kept),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadArguments:
        return cls(tuple(map(HeadArgument.from_json, data["arguments"])), data["num_heads"], from_ranges(data["kept"]))


def _take_own_arguments(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: the kept heads' part of arguments that hold something for every head."""
    own = HeadArguments.of(attention)
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    taken = {a.key: own.take(given[a.key], a) for a in own.arguments if a.key in given}
    return tuple(taken.get(i, v) for i, v in enumerate(args)), {k: taken.get(k, v) for k, v in kwargs.items()}


@dataclass(frozen=True)
class Selection(Carried):
    """Which features of a module's output are passed on, by each prune that it has been through."""

    name = "_headprune_selection"
    stages: tuple[Features, ...]  # indices count within what the stage before kept

    def hooks(self, module: nn.Module) -> list[Any]:
        return [module.register_forward_hook(_selected)]

    def take(self, output: Tensor) -> Tensor:
        """The features that are passed on."""
        for features in self.stages:
            output = output.index_select(-1, features.index(output.shape[-1], output.device))
        return output

    def to_json(self) -> dict[str, Any]:
        return {"stages": [[to_ranges(sorted(s.kept)), to_ranges(sorted(s.owned))] for s in self.stages]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Selection:
        return cls(tuple(Features(*(frozenset(from_ranges(part)) for part in stage)) for stage in data["stages"]))


def _selected(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: the kept heads' features of what a module computes for all."""
    taken: Tensor = Selection.of(module).take(output)
    return taken


@dataclass(frozen=True)
class Placement(Carried):
    """Where the kept heads belong among the features that a module returned (or took) when it had all heads.

    Attributes:
        width: Features of all heads.
        source, target: Feature ``source[i]`` of what there is now belongs to ``target[i]``.
        before: Whether it is the input that is placed (of a norm over all heads), not the output.
    """

    name = "_headprune_placement"
    width: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    before: bool = False

    def hooks(self, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(_placed_before) if self.before else module.register_forward_hook(_placed)
        ]

    def place(self, output: Tensor) -> Tensor:
        """``output``, which has the kept heads, with a place for every head."""
        source, target = (torch.tensor(i, dtype=torch.long, device=output.device) for i in (self.source, self.target))
        whole = output.new_zeros(*output.shape[:-1], self.width)
        return whole.index_copy(-1, target, output.index_select(-1, source))

    def to_json(self) -> dict[str, Any]:
        return {
            "width": self.width,
            "source": to_ranges(self.source),
            "target": to_ranges(self.target),
            "before": self.before,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        return cls(data["width"], from_ranges(data["source"]), from_ranges(data["target"]), data["before"])


def _placed(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a module without W_O: the kept heads' output where it was among all."""
    place = Placement.of(module).place
    return (place(output[0]), *output[1:]) if isinstance(output, tuple) else place(output)


def _placed_before(module: nn.Module, args: Any) -> Any:
    """Forward pre-hook of a norm over all heads: the same, for its input."""
    return (Placement.of(module).place(args[0]), *args[1:])


class _NarrowTensor(Tensor):
    """A tensor whose shape claims a smaller width, for code that sizes its heads by its input's last dimension.

    What is computed from it is a plain tensor; only the transpose of other dimensions keeps the claim.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    claimed: int

    @classmethod
    def of(cls, tensor: Tensor, claimed: int) -> _NarrowTensor:
        narrow = tensor.as_subclass(cls)
        narrow.claimed = claimed
        return narrow

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((*Tensor.size(self)[:-1], self.claimed))

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.shape if dim is None else self.shape[dim]

    def transpose(self, dim0: int, dim1: int) -> Tensor:  # type: ignore[override]
        swapped = Tensor.transpose(self, dim0, dim1)
        last = self.ndim - 1 in (dim0 % self.ndim, dim1 % self.ndim)
        return swapped if last else _NarrowTensor.of(swapped, self.claimed)


@dataclass(frozen=True)
class Narrowing(Carried):
    """What a module's inputs claim about their last dimension: ``claimed`` where it is ``width``."""

    name = "_headprune_narrow"
    width: int
    claimed: int

    def hooks(self, module: nn.Module) -> list[Any]:
        return [module.register_forward_pre_hook(_narrowed, with_kwargs=True)]

    def to_json(self) -> dict[str, Any]:
        return {"width": self.width, "claimed": self.claimed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Narrowing:
        return cls(data["width"], data["claimed"])


def _narrowed(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook: inputs that claim to be as narrow as the heads are now."""
    own = Narrowing.of(module)

    def claim(value: Any) -> Any:
        features = isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (2, 3)
        return _NarrowTensor.of(value, own.claimed) if features and value.shape[-1] == own.width else value

    return tuple(map(claim, args)), {k: claim(v) for k, v in kwargs.items()}


# T5's position bias, the one thing a trace cannot see: the first layer computes a bias for all heads, and every later layer
# of the stack receives it. A pruned layer must take its own heads out of it, and pass the whole on.


class SharedPositionBias(Carried):
    """Gives a pruned T5-style layer its heads of the shared bias, and the whole bias to the next layer."""

    name = "_headprune_bias"

    def __init__(self, num_heads: int, kept: Sequence[int]) -> None:
        self.num_heads, self.kept = num_heads, tuple(kept)
        self.original: Callable[..., Tensor] | None = None  # the module's own compute_bias
        self.whole: Tensor | None = None
        self.taken: Tensor | None = None
        self.dim = 1

    @staticmethod
    def needed_by(attention: nn.Module) -> bool:
        """Whether a module computes or takes a position bias as T5's do."""
        return hasattr(attention, "compute_bias") and "position_bias" in inspect.signature(attention.forward).parameters

    def hooks(self, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(_take_own_bias, with_kwargs=True),
            module.register_forward_hook(_restore_whole_bias, with_kwargs=True),
        ]

    def carried_by(self, module: nn.Module) -> list[Any]:
        earlier: SharedPositionBias | None = self.of(module)
        self.original = earlier.original if earlier else module.compute_bias  # type: ignore[assignment]
        vars(module)["compute_bias"] = self.compute
        return super().carried_by(module)

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self.original is not None
        return self.take(self.original(*args, **kwargs))

    def take(self, whole: Tensor) -> Tensor:
        self.whole = whole
        # In LongT5's local attention, blocks come before the heads.
        self.dim = 1 if whole.shape[1] == self.num_heads or whole.ndim < 4 else 2
        self.taken = whole.index_select(self.dim, torch.tensor(self.kept, device=whole.device))
        return self.taken

    def to_json(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "kept": to_ranges(self.kept)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SharedPositionBias:
        return cls(data["num_heads"], from_ranges(data["kept"]))


def _take_own_bias(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: the kept heads' part of a shared bias."""
    bias: SharedPositionBias = SharedPositionBias.of(attention)
    if (whole := kwargs.get("position_bias")) is not None:
        kwargs = {**kwargs, "position_bias": bias.take(whole)}
    return args, kwargs


def _restore_whole_bias(attention: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Forward hook: the whole bias, for the next layer."""
    bias: SharedPositionBias = SharedPositionBias.of(attention)
    hidden, own, *rest = output
    whole, taken, bias.whole, bias.taken = bias.whole, bias.taken, None, None
    if whole is not None and taken is not None and own.ndim == taken.ndim:
        # The next layers also need what this layer added for all heads alike, such as a mask.
        added = own.narrow(bias.dim, 0, 1) - taken.narrow(bias.dim, 0, 1)
        whole = torch.where(added == 0, whole, whole + added)
    if whole is None:  # cross-attention's first layer: zeros, alike for every head
        whole = own[:, :1].expand(-1, bias.num_heads, -1, -1)
    return (hidden, whole, *rest)


CARRIED: dict[str, Any] = {
    "arguments": HeadArguments,
    "selection": Selection,
    "placement": Placement,
    "narrowing": Narrowing,
    "position_bias": SharedPositionBias,
}


def to_ranges(indices: Sequence[int]) -> str:
    """Indices as runs, since a head's features are mostly one run.

    >>> to_ranges((0, 1, 2, 7))
    '0:3,7:8'
    """
    ranges: list[list[int]] = []
    for i in indices:
        if ranges and ranges[-1][1] == i:
            ranges[-1][1] = i + 1
        else:
            ranges.append([i, i + 1])
    return ",".join(f"{start}:{stop}" for start, stop in ranges)


def from_ranges(text: str) -> tuple[int, ...]:
    """What `to_ranges` wrote."""
    pairs = (run.split(":") for run in text.split(",") if run)
    return tuple(i for start, stop in pairs for i in range(int(start), int(stop)))


from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class _Shadow(nn.Module):
    """Tensors without entries in the place of weights that are gone.

    They are in the state dict, so that a stock class refuses to load it: it would give what is missing random values. But they are
    no modules to find by name, since PEFT would want to adapt a ``query`` among them.
    """

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        return iter(())

    def __init__(self, gone: Mapping[str, Tensor]) -> None:
        super().__init__()
        below: dict[str, dict[str, Tensor]] = {}
        for name, tensor in gone.items():
            first, _, rest = name.partition(".")
            if rest:
                below.setdefault(first, {})[rest] = tensor
            else:
                self.register_buffer(first, tensor.detach().new_empty(0, *tensor.shape[1:]))
        for name, tensors in below.items():
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


_CLASSES: dict[type, type[EmptyAttention]] = {}


def _empty_class(base: type[nn.Module]) -> type[EmptyAttention]:
    """An `EmptyAttention` that passes for the class it stands in for, to code that looks for attention modules."""
    if base not in _CLASSES:
        _CLASSES[base] = type(f"Empty{base.__name__}", (EmptyAttention, base), {"__module__": __name__})
    return _CLASSES[base]


def _new_empty(base: type[nn.Module]) -> Any:
    return object.__new__(_empty_class(base))


def emptied(attention: nn.Module, width: int, bias: Tensor | None, arity: int) -> nn.Module:
    """What takes the place of an attention module without heads.

    Args:
        attention: The module; what it notes of itself (such as its config, and hooks that collect outputs) is kept.
        width: Features of the output (0 where W_O comes after the attention module and adds its own bias).
        bias: W_O's bias, ``[width]``, or None.
        arity: Length of the returned tuple; 0 returns the tensor alone.
    """
    gone = {n: t for n, t in attention.named_parameters() if n != "bias"}
    new: nn.Module = _new_empty(type(attention))
    new.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(attention).items()}
    for held in (new._parameters, new._buffers, new._modules, new._forward_pre_hooks):
        held.clear()
    new._non_persistent_buffers_set = set()
    shadow = _Shadow(gone)
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
        shadow = _Shadow({n: t for n, t in gone.items() if n != "bias"})
        self._buffers.update(shadow._buffers)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad)

    @classmethod
    def of(cls, projection: nn.Module, bias: Tensor | None) -> OnlyBias:
        """What takes the place of an ``nn.Linear`` or of transformers' ``Conv1D``."""
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


from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn


Structure = dict[str, Any]
"""What `structure_of` gives: values that JSON can hold."""

VERSION = 1
_BIASES, _GHOSTS, _REMOVED = "_headprune_biases", "_headprune_ghosts", "_headprune_removed"


def structure_of(model: nn.Module) -> Structure:
    """How a model's modules differ from their classes, because it was pruned or repaired.

    Returns:
        ``{}`` for a model that was never pruned or repaired; else ``version``; ``modules``, by qualified name; ``shared``, groups
        of names of one tensor; and by name the ``biases`` that were added and the ``ghosts`` (layers without heads that keep
        one with zero output).
    """
    modules: dict[str, dict[str, Any]] = {}
    names: dict[int, list[str]] = {}  # of the tensors that changed
    replaced: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if replaced and name.startswith(replaced):
            continue  # what an emptied module holds in the place of its weights
        if is_ours(module, EmptyAttention, OnlyBias):
            modules[name] = cast(Any, module).to_json()
            replaced += (f"{name}.",)
            continue
        entry = _entry(module)
        if entry:
            modules[name] = entry
        for own in entry.get("tensors", ()):
            names.setdefault(id(_held(module, own)[own]), []).append(f"{name}.{own}" if name else own)
    biases, kept = added_biases(model), sorted(ghosts(model))
    if not (modules or biases or kept):
        return {}
    shared = [group for group in names.values() if len(group) > 1]
    return {"version": VERSION, "modules": modules, "shared": shared, "biases": biases, "ghosts": kept}


def _entry(module: nn.Module) -> dict[str, Any]:
    """How one module differs from its class."""
    edited = Edited.of(module) or Edited()
    entry: dict[str, Any] = {"stand_in": True} if edited.stand_in else {}
    if tensors := {
        n: list(_held(module, n)[n].shape) for n in sorted(edited.tensors) if _held(module, n).get(n) is not None
    }:
        entry["tensors"] = tensors
    if numbers := {n: getattr(module, n) for n in sorted(edited.numbers)}:
        entry["numbers"] = numbers
    if configs := {n: dict(v.own) for n, v in vars(module).items() if is_ours(v, ConfigView)}:
        entry["configs"] = configs
    if carried := {kind: cls.of(module).to_json() for kind, cls in CARRIED.items() if cls.of(module) is not None}:
        entry["carried"] = carried
    return entry


def restructure(model: nn.Module, structure: Mapping[str, Any]) -> None:
    """Make a dense model's modules differ from their classes as ``structure`` says; tensors' values mean nothing then.

    Args:
        model: Dense, of the class and config that ``structure`` was read off; or its base model, or a model with a head on that.
        structure: Of `structure_of`; it may also say which heads were ``removed``.
    """
    if not structure:
        return
    if structure["version"] > VERSION:
        raise ValueError(f"this folder was saved by a newer headprune (structure {structure['version']})")
    made: dict[str, Tensor] = {}
    group_of = {name: group[0] for group in structure["shared"] for name in group}
    for saved, entry in structure["modules"].items():
        name = _renamed(model, saved)
        if name is None:
            continue
        module = model.get_submodule(name)
        if entry.get("stand_in"):
            module = replace_by_stand_in(model, name)
        if "empty" in entry:
            bias = _new(next(module.parameters()), [entry["empty"]["width"]]) if entry["empty"]["bias"] else None
            set_module(model, name, emptied(module, entry["empty"]["width"], bias, entry["empty"]["arity"]))
            continue
        if "only_bias" in entry:
            bias = (
                _new(next(module.parameters()), [entry["only_bias"]["width"]]) if entry["only_bias"]["bias"] else None
            )
            set_module(model, name, OnlyBias.of(module, bias))
            continue
        for own, shape in entry.get("tensors", {}).items():
            held, full = _held(module, own), f"{saved}.{own}" if saved else own
            key = group_of.get(full, full)
            if key not in made:
                made[key] = _new(held.get(own), shape, next(module.parameters(), None))
            hold(module, own, made[key])
        vars(module).update(entry.get("numbers", {}))
        edited = Edited(
            frozenset(entry.get("tensors", ())), frozenset(entry.get("numbers", ())), bool(entry.get("stand_in"))
        )
        if edited != Edited():
            vars(module)[Edited.name] = edited
        for own, fields in entry.get("configs", {}).items():
            vars(module)[own] = ConfigView(getattr(module, own), dict(fields))
        for kind, data in entry.get("carried", {}).items():
            CARRIED[kind].from_json(data).carried_by(module)
    vars(model)[_BIASES] = [n for n in (_renamed(model, b) for b in structure["biases"]) if n is not None]
    vars(model)[_GHOSTS] = {n for n in (_renamed(model, g) for g in structure["ghosts"]) if n is not None}
    note_removed(
        model, [{_renamed(model, n) or n: h for n, h in drop.items()} for drop in structure.get("removed", ())]
    )


def _renamed(model: nn.Module, saved: str) -> str | None:
    """The name that a module has in this model: another where only the base model is loaded, or where a head is put on it."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name in (saved, saved.removeprefix(prefix), prefix + saved):
        try:
            model.get_submodule(name)
        except AttributeError:
            continue
        return name
    return None


def _held(module: nn.Module, name: str) -> dict[str, Any]:
    """The parameters or the buffers of a module, wherever ``name`` is (or belongs)."""
    return module._buffers if name in module._buffers else module._parameters


def _new(like: Tensor | None, shape: Sequence[int], beside: Tensor | None = None) -> Tensor:
    """A tensor or parameter to be filled; of the type of ``beside`` where the class has none there."""
    source = like if like is not None else beside
    assert source is not None
    new = source.detach().new_zeros(shape)
    if like is not None and not isinstance(like, nn.Parameter):
        return new
    return nn.Parameter(new, requires_grad=source.requires_grad)


def hold(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Put a tensor into a module. A buffer that was cut is saved with the weights from then on: no class can compute it."""
    _held(module, name)[name] = value
    if name in module._buffers:
        module._non_persistent_buffers_set.discard(name)


def set_module(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Replace a module by another; returns the old one."""
    parent_name, _, child = name.rpartition(".")
    held = model.get_submodule(parent_name)._modules
    old, held[child] = held[child], new
    assert old is not None
    return old


def replace_by_stand_in(model: nn.Module, name: str) -> nn.Module:
    """Replace a module by its stand-in (`headprune.standins`) for good."""
    module = model.get_submodule(name)
    new = convert(module)
    if new is None:
        return module
    set_module(model, name, new)
    vars(new)[Edited.name] = Edited(stand_in=True)
    for outer_name, outer in model.named_modules():
        if isinstance(outer, nn.TransformerEncoder) and f"{name}.".startswith(f"{outer_name}." if outer_name else ""):
            vars(outer)["use_nested_tensor"] = False  # it needs the fused kernel that is gone
    return new


# -- what was added to a model as a whole -----------------------------------------------------------


def home(model: nn.Module) -> tuple[nn.Module, str]:
    """The model that notes are kept on, and what comes before its modules' names: of PEFT's wrapper the model within, which is
    what stays once the adapters are merged."""
    get = getattr(model, "get_base_model", None)
    inner: nn.Module = get() if callable(get) else model
    return inner, next((f"{name}." for name, module in model.named_modules() if module is inner and name), "")


def added_biases(model: nn.Module) -> list[str]:
    """Modules of a repaired model that have got a bias."""
    inner, prefix = home(model)
    return [prefix + name for name in vars(inner).get(_BIASES, [])]


def add_biases(model: nn.Module, names: Sequence[str]) -> None:
    """Give modules a bias of zeros, as a repair had to."""
    inner, prefix = home(model)
    own, modules = vars(inner).setdefault(_BIASES, []), dict(model.named_modules())
    for name in names:
        if name.removeprefix(prefix) not in own and name in modules:  # a stand-in's is there once it stays for good
            weight: Any = modules[name].weight
            modules[name].bias = nn.Parameter(weight.new_zeros(weight.shape[0]), requires_grad=weight.requires_grad)
            Edited.add(modules[name], tensors=("bias",))
            own.append(name.removeprefix(prefix))


def remove_biases(model: nn.Module, names: Sequence[str]) -> None:
    """Take away what `add_biases` gave."""
    inner, prefix = home(model)
    own = vars(inner).setdefault(_BIASES, [])
    for name in names:
        if (noted := name.removeprefix(prefix)) in own:
            module: Any = model.get_submodule(name)
            module.bias = None
            own.remove(noted)


def note_removed(model: nn.Module, removed: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Note which heads a model has lost, prune by prune."""
    inner, prefix = home(model)
    noted = [{name.removeprefix(prefix): heads for name, heads in drop.items()} for drop in removed]
    vars(inner)[_REMOVED] = [*vars(inner).get(_REMOVED, ()), *noted]


def removed(model: nn.Module) -> list[dict[str, list[int]]]:
    """Which heads a model has lost, prune by prune: each counts within what the prune before left."""
    inner, prefix = home(model)
    return [{prefix + name: heads for name, heads in drop.items()} for drop in vars(inner).get(_REMOVED, ())]


def note_ghosts(model: nn.Module, names: Sequence[str]) -> None:
    """Note layers whose heads were all removed, but that keep one head with zero output."""
    inner, prefix = home(model)
    vars(inner)[_GHOSTS] = {*vars(inner).get(_GHOSTS, ()), *(name.removeprefix(prefix) for name in names)}


def ghosts(model: nn.Module) -> set[str]:
    """What `note_ghosts` was told."""
    inner, prefix = home(model)
    return {prefix + name for name in vars(inner).get(_GHOSTS, ())}


# -- the classes --------------------------------------------------------------------------------


class _Pruned:
    """A standard class with the pruned model's modules."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        restructure(self, config.headprune)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Buffers that no file holds are computed by transformers' own code, which it leaves out for modules of others."""
        return False

    def _init_weights(self, module: Any) -> None:
        """Only where something was not loaded: what takes the place of other modules may lack what the standard code fills."""
        tensors = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        if not all(getattr(t, "_is_hf_initialized", False) for t in tensors):
            super()._init_weights(module)


class T5ForConditionalGeneration(_Pruned, _dense.T5ForConditionalGeneration):
    pass


class T5Model(_Pruned, _dense.T5Model):
    pass
