"""Trace one forward pass of a model: which modules run, and what each head of each attention depends on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.attention import is_inside
from headprune.inputs import tensors
from headprune.offload import is_offloaded
from headprune.trace.reading import (
    Reader,
    are_causal,
    disjoint,
    is_causal_mask,
    is_matrix,
    joined,
    leaves_of,
    memory,
)
from headprune.trace.record import AttentionCall, HeadSlices, LinearCall, ModuleRecord, Rows

# Autograd's names of operations that change only the shape or strides.
_SHAPES = ("Clone", "View", "UnsafeView", "Alias", "Transpose", "Permute", "Squeeze", "Unsqueeze", "ReshapeAlias", "T")
_SDPA = F.scaled_dot_product_attention
_SOFTMAX: set[Callable[..., Any]] = {F.softmax, torch.softmax, Tensor.softmax}
_CONV: set[Callable[..., Any]] = {F.conv1d, F.conv2d}  # with kernel size 1: linear layers over channels
_LINEAR: set[Callable[..., Any]] = {F.linear, torch.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__}
_MOST_BETWEEN = 12  # the most modules between an attention and W_O to record

Place = tuple[int, int]
"""A tensor's memory address, and how many numbers are there."""


class Tracer(TorchFunctionMode):
    """Records one forward pass.

    Attributes:
        attentions: Every computation of attention, in order of execution.
        records: A record of every module, by name.
        calls: Calls of linear layers, by the id of the leaf tensor that replaces their output.
        tensors: Names of parameters and buffers, by id.
        owner: Module names by the memory address of their weights, so that ``weight.T`` is recognised too.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.running: list[str] = []
        self.records = {name: ModuleRecord() for name in self.modules}
        self.calls: dict[int, LinearCall] = {}
        self.attentions: list[AttentionCall] = []
        named = (*model.named_parameters(), *model.named_buffers())
        self.tensors = {id(tensor): name for name, tensor in named}
        self.shape = {name: tensor.shape for name, tensor in named}
        self.owner: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                if is_matrix(parameter):
                    self.owner.setdefault(memory(parameter), []).append(name)
        self.loads = is_offloaded(model)
        self.reader = Reader(self.calls, self.tensors)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the calls of all modules while the context lasts."""
        with ExitStack() as stack:
            for name, module in self.modules.items():
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.append(name)
        record = self.records[name]
        record.calls += 1
        record.inputs = [t for t in tensors((args, kwargs)) if t.ndim]
        wide = {k: v for k, v in {**dict(enumerate(args)), **kwargs}.items() if isinstance(v, Tensor) and v.ndim > 2}
        record.biases = {k: v for k, v in wide.items() if v.is_floating_point() or v.dtype == torch.bool}
        record.cached |= any(v is not None and "past" in k for k, v in kwargs.items())
        if args and isinstance(args[0], Tensor) and args[0].requires_grad:
            for attention in self.attentions:
                if not attention.output and not attention.reason and len(attention.between) < _MOST_BETWEEN:
                    attention.between.append((name, args[0]))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if self.running and self.running[-1] == name:
            self.running.pop()
        record = self.records[name]
        first = output[0] if isinstance(output, tuple) and output else output
        record.arity, record.returned = _arity(output), self._returned(first)
        scales = any(p.ndim == 1 for p in module.parameters(recurse=False))
        if scales and isinstance(output, Tensor) and output.grad_fn is not None:
            record.mixed = output
        self._match_concatenation(name, first)
        if isinstance(output, Tensor) and any(name in dict(a.between) for a in self.attentions if not a.output):
            # A new node in the graph, to see whether W_O depends on it.
            record.output = output.view_as(output)
            return record.output
        return None

    def _note_loaded(self, given: Any) -> None:
        """Record the names of parameters that accelerate loads for this call, as long as they exist."""
        held = [(m, n, p) for m in reversed(self.running) for n, p in self.modules[m]._parameters.items()]
        for part in given:
            if isinstance(part, nn.Parameter) and id(part) not in self.tensors:
                for module, name in [(m, n) for m, n, p in held if p is part][:1]:
                    self.tensors[id(part)] = f"{module}.{name}" if module else name
                    weakref.finalize(part, self.tensors.pop, id(part), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if self.loads and self.running:
            self._note_loaded(given)
        if func is _SDPA:
            return self._on_sdpa(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            self._on_hidden(args, kwargs)
        if func in _SOFTMAX:
            return self._on_softmax(func, args, kwargs)
        if func in _LINEAR:
            owner = self._owner([a for a in given if isinstance(a, Tensor) and a.ndim == 2])
            if owner is None and func is F.linear:
                owner = self._owner_of_experts(args)
            # Of another class than nn.Linear it is not known which side of the weight is out: I-BERT's gives it by keyword.
            if owner is not None and ("weight" not in kwargs or isinstance(self.modules[owner], nn.Linear)):
                return self._on_linear(owner, func, args, kwargs)
        if func in _CONV:
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            source = kwargs.get("input", args[0] if args else None)
            plain = isinstance(weight, Tensor) and set(weight.shape[2:]) == {1} and weight.shape[1] == source.shape[1]
            if plain and (owner := self._owner([weight])) is not None:
                return self._on_linear(owner, func, args, kwargs, dim=1)
        return func(*args, **kwargs)

    def _owner(self, weights: list[Tensor]) -> str | None:
        """The module that owns one of these weights; None if no module does."""
        owners: list[str] = next((self.owner[memory(w)] for w in weights if memory(w) in self.owner), [])
        for inner in self.running[-1:]:
            own = self.modules[inner]._parameters.values()  # accelerate may have loaded them for this call
            if inner in owners or any(w is p for w in weights for p in own):
                return inner
        return owners[0] if owners else None  # modules that share a weight: the first

    def _owner_of_experts(self, args: Any) -> str | None:
        """The running module, if the weight is a slice of its parameter ``[experts, out, in]``; otherwise None."""
        base = args[1]._base if len(args) > 1 and isinstance(args[1], Tensor) else None
        inner = self.running[-1] if self.running else ""
        own = self.modules[inner]._parameters.values() if inner else ()
        return inner if base is not None and base.ndim > 2 and any(base is p for p in own) else None

    # -- the three events -------------------------------------------------------------------

    def _on_linear(self, owner: str, func: Any, args: Any, kwargs: Any, dim: int = -1) -> Tensor:
        own = [id(p) for p in self.modules[owner]._parameters.values()]
        given = (*args, *kwargs.values())
        operands = [a for a in given if isinstance(a, Tensor) and id(a) not in own and memory(a) not in self.owner]
        source = next((a for a in operands if a.ndim > 1), None)
        out: Tensor = func(*args, **kwargs)
        if source is None or not out.is_floating_point():
            return out
        as_module = bool(self.running) and self.running[-1] == owner
        self.records[owner].size_in, self.records[owner].size_out = source.shape[dim], out.shape[dim]
        mixing = [a for a in self.attentions if self._mixes_probabilities(a, source, dim)]
        matched = bool(mixing) or self._match_output(owner, as_module, source, dim)
        if not matched and source.ndim > 3 and self._inside_heads(owner, source):
            return out
        leaf: Tensor = out.detach().requires_grad_()
        self.calls[id(leaf)] = LinearCall(owner, source, leaf, dim)
        for attention in mixing:
            attention.mix(leaf, dim)
        return leaf.clone()  # a copy: models may modify it in place

    def _mixes_probabilities(self, attention: AttentionCall, source: Tensor, dim: int) -> bool:
        """Whether a linear layer's input is an attention's probabilities, one feature per head, before they weigh the values."""
        if attention.fused or attention.output or attention.reason or not source.requires_grad:
            return False
        heads, result = len(attention.heads), attention.result
        if heads < 2 or result.shape[-1] < 2 or source.shape[dim] != heads or source.numel() != result.numel():
            return False
        if all(leaf is not result for leaf in leaves_of(source)):
            return False
        columns = self.reader.columns_of(attention, source, dim)
        return disjoint(columns) and all(len(own) == 1 for own in columns)

    def _inside_heads(self, owner: str, source: Tensor) -> bool:
        """Whether a linear layer works on heads that its parent module has already split, as some do for relative positions."""
        outer = [name for name in self.running if name and name != owner]
        calls = [self.calls[id(leaf)].module for leaf in leaves_of(source) if id(leaf) in self.calls]
        return bool(calls and outer) and all(name.startswith(f"{outer[-1]}.") for name in calls)

    def _new_attention(self, result: Tensor, heads: HeadSlices | None, **about: Any) -> AttentionCall:
        """Record an attention computed by the running module."""
        module, heads = self._attention_module(), heads or HeadSlices.along(1, 0)
        attention = AttentionCall(module, tuple(self.running), result, heads, **about)
        self.attentions.append(attention)
        return attention

    def _on_sdpa(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        if self.reader.are_grouped(query, key):
            shape = query.shape
            parts = {k: joined(v, shape) if isinstance(v, Tensor) else v for k, v in given.items()}
            return torch.unflatten(self._on_sdpa(func, (), parts), 1, shape[1:3])
        result: Tensor = func(*args, **kwargs).detach().requires_grad_()
        self.reader.forget()
        heads = self.reader.heads_in(query)
        causal = given.get("is_causal", False) or is_causal_mask(mask)
        attention = self._new_attention(result, heads, causal=causal, tokens=query.shape[-2])
        if heads is None:
            attention.reason = f"its query has shape {tuple(query.shape)}, in which no heads can be told apart"
            return result.clone()
        first = (0,) * (query.ndim - 2)
        attention.pairwise = self.reader.compares_tokens(key[first] @ query[first][-1])
        attention.query_rows = self._read(attention, query, heads)
        self._read(attention, key, heads.repeated(key.shape[heads.dim]))
        own = heads.repeated(value.shape[heads.dim])
        attention.value_rows = self._read(attention, value, own, are_values=True)
        each = [own.take(value.detach(), h) for h in range(len(own))]
        attention.same_values = [next(i for i, one in enumerate(each) if torch.equal(one, part)) for part in each]
        at = heads.dim
        if mask is not None and mask.requires_grad and mask.ndim == query.ndim and mask.shape[at] == query.shape[at]:
            self.reader.read(attention, mask, heads)
        self._note_sources(attention, query, key)
        return result.clone()

    def _read(self, attention: AttentionCall, tensor: Tensor, heads: HeadSlices, *, are_values: bool = False) -> Rows:
        """Record what each head of the queries, keys, values or scores depends on; returns the features of projections."""
        mixed = {n: r.mixed for n, r in self.records.items() if r.mixed is not None and not are_values}
        return self.reader.read(attention, tensor, heads, mixed, self.records[attention.module].biases)

    def _on_hidden(self, args: Any, kwargs: Any) -> None:
        """Record an attention inside torch's ``multi_head_attention_forward``, whose computation is hidden."""
        heads = kwargs.get("num_heads", args[4] if len(args) > 4 else 1)
        why = "it calls torch's multi_head_attention_forward, which hides its heads; declare a stand-in"
        self._new_attention(torch.zeros(0), HeadSlices.along(1, heads), reason=why)

    def _on_softmax(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        out: Tensor = func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not out.is_floating_point() or not scores.requires_grad or dim is None:
            return out
        scores = scores.movedim(dim, -1)  # keys last, as usual
        self.reader.forget()
        if self.reader.are_grouped(scores):
            others = {k: v for k, v in kwargs.items() if k not in ("input", "dim")}
            flat = self._on_softmax(func, (joined(scores, scores.shape), -1, *args[2:]), others)
            return torch.unflatten(flat, 1, scores.shape[1:3]).movedim(-1, dim)
        heads = self.reader.heads_in(scores)
        if heads is None:
            self._note_lone_head(scores)
            return out
        out = out.movedim(dim, -1)
        result: Tensor = out.detach().requires_grad_()
        attention = self._new_attention(result, heads, causal=are_causal(out), fused=False, tokens=out.shape[-2])
        # A softmax over another dimension counts as attention only if its heads reach a W_O separately.
        last = dim in (-1, out.ndim - 1)
        attention.pairwise = last and self.reader.compares_tokens(scores[(0,) * (scores.ndim - 2) + (-1,)])
        attention.query_rows = self._read(attention, scores, heads)
        self._note_sources(attention, scores, scores)
        return result.clone().movedim(-1, dim)

    def _note_lone_head(self, scores: Tensor) -> None:
        """Record a single-head attention ``[batch, queries, keys]`` of a module in a ModuleList, as textbooks write heads."""
        listed = isinstance(self.modules.get(self._attention_module().rpartition(".")[0]), nn.ModuleList)
        if listed and scores.ndim == 3 and self.reader.compares_tokens(scores[0, -1]):
            heads = HeadSlices(0, (tuple(range(scores.shape[0])),))
            why = "it is a head by itself, and headprune removes heads from among those that one softmax computes"
            if self.reader.have_own_rows(scores, (along := HeadSlices.along(1, scores.shape[1]))):
                heads, why = along, f"its scores have shape {tuple(scores.shape)}, without a dimension of queries"
            attention = self._new_attention(scores, heads, fused=False, tokens=scores.shape[-2], reason=why)
            self._read(attention, scores, heads)

    def _match_output(self, owner: str, as_module: bool, source: Tensor, dim: int) -> bool:
        """Take a linear layer for W_O of every attention that its input ``source`` depends on; returns whether it depends on any."""
        if not self.attentions or not source.requires_grad:
            return False
        matched = False
        reached = {id(leaf) for leaf in leaves_of(source)}
        for attention in self.attentions:
            if id(attention.result) not in reached or attention.reason:
                continue
            if attention.output:
                attention.leak = attention.leak or owner
                continue
            attention.output, attention.output_dim, attention.source, matched = owner, dim, source, True
            if not as_module or owner == attention.module:
                attention.reason = f"its output projection ({owner}) is not called as a module"
                continue
            attention.columns = self.reader.columns_of(attention, source, dim)
            self.reader.note_values(attention, attention.columns, source.movedim(dim, -1))
        return matched

    def note_leaks(self, output: Any) -> None:
        """Record which attentions' heads reach the model's output past their W_O."""
        if isinstance(output, Mapping):
            output = {k: v for k, v in output.items() if "attentions" not in k}
        elif isinstance(output, tuple | list):
            output = output[:1]
        reached = {id(leaf) for tensor in tensors(output) for leaf in leaves_of(tensor)}
        for attention in self.attentions:
            if attention.output and id(attention.result) in reached:
                attention.leak = attention.leak or "the model's output"

    def _match_concatenation(self, name: str, returned: Any) -> None:
        """Record where the heads are in what attention module ``name`` returns: without a W_O, they are masked there."""
        pending = [a for a in self.attentions if a.module == name and not a.output and not a.reason]
        if not pending or not isinstance(returned, Tensor) or not returned.requires_grad:
            return
        leaves = leaves_of(returned)
        for attention in pending:
            if len(attention.heads) > 1 and any(leaf is attention.result for leaf in leaves):
                columns = self.reader.columns_of(attention, returned)
                if disjoint(columns):
                    attention.returned = columns
                    self.reader.note_values(attention, columns, returned)

    def _returned(self, returned: Any) -> str:
        """The linear layer whose output a module returns, perhaps reshaped; "" if it returns something else."""
        node = returned.grad_fn if isinstance(returned, Tensor) else None
        while node is not None and len(node.next_functions) == 1 and node.name().removesuffix("Backward0") in _SHAPES:
            node = node.next_functions[0][0]
        call = self.calls.get(id(getattr(node, "variable", None)))
        return call.module if call else ""

    def _note_sources(self, attention: AttentionCall, *parts: Tensor) -> None:
        """Record whether this is cross-attention: no argument of the module is read by all projections of queries and keys."""
        given = {_place(t): t for t in self.records[attention.module].inputs}
        sources = [self.calls[id(leaf)].source for part in parts for leaf in leaves_of(part) if id(leaf) in self.calls]
        # Relative positions are also projected from an argument, but one without a batch dimension.
        rows = max((source.shape[0] for source in sources), default=0)
        origins = {frozenset(n for n in self._origins(s, given) if rows == _rows(given[n], s)) for s in sources}
        origins.discard(frozenset())
        attention.cross = len(origins) > 1 and not frozenset.intersection(*origins)

    def _origins(self, source: Tensor, given: dict[Place, Tensor]) -> set[Place]:
        """The arguments in ``given`` from which a projection's input was computed, perhaps through other projections."""
        if (place := _place(source)) in given:
            return {place}
        computed = [t for t in given.values() if t.requires_grad and source.requires_grad]
        if computed:
            gradients = torch.autograd.grad(source.sum(), computed, retain_graph=True, allow_unused=True)
            if direct := {_place(t) for t, g in zip(computed, gradients, strict=True) if g is not None}:
                return direct
        calls = [self.calls[id(leaf)] for leaf in leaves_of(source) if id(leaf) in self.calls]
        module = self._attention_module()
        inner = [call for call in calls if call.source is not source and is_inside(call.module, module)]
        return {name for call in inner for name in self._origins(call.source, given)}

    def _attention_module(self) -> str:
        """The innermost running module that holds a weight matrix, unlike a softmax or dropout module."""
        for name in reversed(self.running):
            module = self.modules[name]
            packed = (b for b in module.buffers() if not b.is_floating_point() and b.dtype != torch.bool)
            if any(t.ndim >= 2 for t in (*module.parameters(), *packed)):
                return name
        return self.running[-1] if self.running else ""


def _place(tensor: Tensor) -> Place:
    """What a tensor has in common with its transposes."""
    return memory(tensor), tensor.numel()


def _rows(argument: Tensor, source: Tensor) -> int:
    """The first dimension of an argument, as a projection sees it, whose input may have the first two exchanged."""
    return (source if argument.shape[1::-1] == source.shape[:2] else argument).shape[0]


def _arity(output: Any) -> int | None:
    """Length of the tuple that a module returns, 0 for a tensor; None for several tensors, which a stub cannot return."""
    if isinstance(output, Tensor):
        return 0
    if type(output) is tuple and output and isinstance(output[0], Tensor) and all(o is None for o in output[1:]):
        return len(output)
    return None
