"""Find the attention layers of any model from one traced forward; no table of architectures.

How it works. While the model runs on an example, every linear layer's output and every attention's
result is replaced by an equal tensor that starts a new autograd graph. So the graph between two
linear layers is small, and derivatives in it say which features belong to which head:

* differentiate head ``h`` of the query, key and value (or of the eager scores) with respect to each
  linear's output: the non-zero columns are that head's rows of that projection. Fused and interleaved
  QKV, rotary embeddings and repeated key/value heads all read alike;
* differentiate it with respect to the parameters and buffers too: one that each head reads in places of
  its own (a relative position table, a sink, a slope) is cut there;
* the first linear whose input depends on the attention's result is W_O, and the forward derivative
  (by differentiating twice) of its input with respect to head ``h`` gives that head's columns.

Nothing here is trusted blindly: `headprune.prune` proves every removal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.attention import AttentionLayer, HeadArgument, HeadFeatures, HeadGate, HeadTable, ghosts
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import Example, call, model_device, move, tensors
from headprune.meta import Materialised
from headprune.modules import EmptyAttention, MultiheadAttention, exact_attention, uncompiled

_SDPA = F.scaled_dot_product_attention
_SOFTMAX: set[Callable[..., Any]] = {F.softmax, torch.softmax, Tensor.softmax}
_CONV: set[Callable[..., Any]] = {F.conv1d, F.conv2d}  # linear layers over channels, where the kernel is 1 wide
_LINEAR: set[Callable[..., Any]] = {F.linear, torch.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__}


def find_attention(model: nn.Module, example: Example) -> list[AttentionLayer]:
    """Every attention layer that runs when ``model`` sees ``example``, in order of execution.

    Args:
        model: Any module, in any mode; it is left as it was. Its weights may be on the meta device (structure is
            all that is read), spread over devices, or brought in as they are needed by accelerate's hooks.
        example: A dict of tensors (keyword arguments), a tensor, or a tuple (positional arguments);
            two rows and at least two tokens tell the most. It is moved to the model's device.

    Returns:
        One `AttentionLayer` per attention module (a module that runs several times, as in ALBERT,
        is one layer). Layers whose heads cannot be separated have ``prunable=False`` and a ``reason``.

    Raises:
        HeadPruneError: The model refuses the example, or it has no softmax attention.
    """
    device = model_device(model)
    given = move(example, "cpu" if device.type == "meta" else device)
    with uncompiled(), evaluating(model), exact_attention(model), _attributes_kept(model), torch.enable_grad():
        try:
            layers = _traced(model, given, buffers=True)
        except Exception:
            # Some buffers may not be differentiated, such as a batch norm's, or are written to.
            try:
                layers = _traced(model, given, buffers=False)
            except Exception as error:
                raise HeadPruneError(
                    f"The model does not run on the example: {type(error).__name__}: {first_line(error)}.",
                    "Pass what its forward() takes: a dict of tensors, a tensor or a tuple.",
                ) from error
    if not layers and not any(isinstance(m, EmptyAttention) for m in model.modules()):
        raise HeadPruneError(
            f"{type(model).__name__} has no softmax attention that headprune can see.",
            "If attention only runs on longer or other inputs, pass such an example.",
        )
    return layers


def _traced(model: nn.Module, example: Example, *, buffers: bool) -> list[AttentionLayer]:
    tracer = _Tracer(model)
    with ExitStack() as stack:
        stack.enter_context(_differentiable(model, buffers))
        stack.enter_context(tracer.watching())
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            stack.enter_context(Materialised(tracer.tensors))
        stack.enter_context(tracer)
        tracer.note_bypass(call(model, example))
    return tracer.layers()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module, then each module's own mode again."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _differentiable(model: nn.Module, buffers: bool) -> Iterator[None]:
    """Let every parameter (and floating-point buffer) start a graph, frozen or not."""
    tensors_ = [*model.parameters(), *(model.buffers() if buffers else ())]
    every = {id(t): t for t in tensors_ if t.is_floating_point() and t.is_leaf}
    before = [(t, t.requires_grad) for t in every.values()]
    try:
        for t, _ in before:
            t.requires_grad_(True)
        yield
    finally:
        for t, required in before:
            t.requires_grad_(required)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Take back what modules note about themselves, such as D2L's ``attention_weights``: it holds the traced graph."""
    before = [(m, dict(m.__dict__)) for m in model.modules()]
    caches = [
        (v, dict(v)) for _, attributes in before for k, v in attributes.items() if type(v) is dict and k[0] != "_"
    ]
    for cache, content in caches:  # what was kept of earlier calls hides where it came from
        if any(isinstance(v, Tensor) for v in content.values()):
            cache.clear()
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for cache, content in caches:
            cache.clear()
            cache.update(content)


@dataclass
class _LinearCall:
    """One call of a linear layer."""

    module: str
    as_module: bool  # called through nn.Module.__call__, so that a hook on it runs
    source: Tensor  # its input
    leaf: Tensor  # its output, as the start of a new graph
    dim: int = -1  # the dimension of its features: 1 for a convolution

    def used(self, gradient: Tensor) -> set[int]:
        """The features that a gradient with respect to ``leaf`` says are used."""
        return _used(gradient.movedim(self.dim, -1))


@dataclass(frozen=True)
class _Heads:
    """Where the heads are in a tensor: ``indices[h]`` of dimension ``dim``.

    Four-dimensional attention has the heads in dimension 1; three-dimensional attention
    (batch * heads, tokens, …), as OPT's time and D2L wrote it, mixes them with the batch in dimension 0.
    """

    dim: int
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def along(cls, dim: int, count: int) -> _Heads:
        return cls(dim, tuple((h,) for h in range(count)))

    def repeated(self, size: int) -> _Heads:
        """The same heads in a tensor with fewer of them, each serving several (grouped keys and values)."""
        repeat = max(1, len(self) // size) if self.dim == 1 else 1
        return _Heads(self.dim, tuple(tuple(i // repeat for i in index) for index in self.indices))

    def take(self, tensor: Tensor, head: int) -> Tensor:
        return tensor.index_select(self.dim, torch.tensor(self.indices[head], device=tensor.device))

    def __len__(self) -> int:
        return len(self.indices)


@dataclass
class _Attention:
    """One computation of softmax attention."""

    module: str
    running: tuple[str, ...]  # modules running at the call, outermost first
    result: Tensor  # leaf: the attended values (SDPA) or the probabilities (softmax)
    heads: _Heads
    causal: bool
    fused: bool  # scaled_dot_product_attention, not softmax
    tokens: int  # queries; with one alone no direction can be seen
    rows: dict[str, list[set[int]]] = field(default_factory=dict)  # projection -> head -> features
    query_rows: dict[str, list[set[int]]] = field(default_factory=dict)
    value_rows: dict[str, list[set[int]]] = field(default_factory=dict)
    tables: dict[tuple[str, int], list[set[int]]] = field(default_factory=dict)  # (tensor, dim) -> head -> indices
    cross: bool = False
    output: str = ""
    columns: list[set[int]] = field(default_factory=list)
    output_dim: int = -1  # the dimension of W_O's input that its columns lie along
    bypass: str = ""  # what else its result reaches, past W_O
    passed: list[tuple[str, Tensor]] = field(default_factory=list)  # modules called on the way to W_O, with their input
    pairwise: bool = True  # scores of one token with another; not so: a softmax over channels, streams, points
    returned: list[set[int]] = field(default_factory=list)  # head -> features of the module's output, if apart
    selections: dict[str, list[set[int]]] = field(default_factory=dict)  # module over all heads -> head -> features
    reason: str = ""


class _Uses:
    """Which entries of parameters and buffers each head reads, along every dimension."""

    def __init__(self, names: dict[int, str], heads: int) -> None:
        self.names, self.heads = names, heads
        self.used: dict[tuple[str, int], list[set[int]]] = {}

    def add(self, head: int, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is None or id(leaf) not in self.names:
                continue
            for dim in range(leaf.ndim):
                empty = [set[int]() for _ in range(self.heads)]
                self.used.setdefault((self.names[id(leaf)], dim), empty)[head] |= _used(gradient.movedim(dim, -1))

    def merge_into(self, tables: dict[tuple[str, int], list[set[int]]]) -> None:
        """Keep those with entries that not all heads read."""
        for key, heads in self.used.items():
            shared = set.intersection(*heads)
            if self.heads > 1 and all(h - shared for h in heads):
                known = tables.setdefault(key, [set() for _ in heads])
                tables[key] = [k | (h - shared) for k, h in zip(known, heads, strict=True)]


class _Tracer(TorchFunctionMode):
    """Watches one forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.running: list[str] = []
        self.arguments: dict[str, list[Tensor]] = {}
        self.results: dict[str, Any] = {}
        self.mixers: dict[str, Tensor] = {}  # outputs of small modules that may mix the heads, such as norms
        self.owner: dict[int, list[str]] = {}  # module by its weight's memory, so that weight.T is known too
        self.tensors: dict[int, str] = {}  # names of parameters and buffers
        self.shape: dict[str, torch.Size] = {}
        self.sizes: dict[tuple[str, str], int] = {}  # (linear, "in" or "out") -> features
        self.given: dict[str, dict[str | int, Tensor]] = {}  # module -> argument -> tensor that may be a bias or mask
        self.cached: set[str] = set()  # modules that were given a cache
        self.calls: dict[int, _LinearCall] = {}  # by id of the leaf
        self.found: list[_Attention] = []
        self.generator = torch.Generator().manual_seed(0)
        self._index_parameters()

    def _index_parameters(self) -> None:
        """Remember which module owns which weight matrix, and what every tensor is called."""
        self.modules = dict(self.model.named_modules())
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.tensors[id(tensor)] = name
            self.shape[name] = tensor.shape
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                if _is_matrix(parameter):
                    self.owner.setdefault(_memory(parameter), []).append(name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the stack of running modules up to date."""
        with ExitStack() as stack:
            for name, module in self.modules.items():

                def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    self.running.append(name)
                    self.arguments[name] = [t for t in tensors((args, kwargs)) if t.ndim]
                    every = {**dict(enumerate(args)), **kwargs}
                    self.given[name] = {
                        k: v
                        for k, v in every.items()
                        if isinstance(v, Tensor) and (v.is_floating_point() or v.dtype == torch.bool) and v.ndim > 2
                    }
                    if args and isinstance(args[0], Tensor) and args[0].requires_grad:
                        for attention in self.found:
                            if not attention.output and not attention.reason and len(attention.passed) < 12:
                                attention.passed.append((name, args[0]))
                    if any(v is not None and "past" in k for k, v in kwargs.items()):
                        self.cached.add(name)

                def leave(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                    if self.running and self.running[-1] == name:
                        self.running.pop()
                    self.results[name] = _shape_of(output)
                    scales = any(p.ndim == 1 for p in self.modules[name].parameters(recurse=False))
                    if scales and isinstance(output, Tensor) and output.grad_fn is not None:
                        self.mixers[name] = output
                    self._match_concatenation(name, output)

                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._on_sdpa(func, args, kwargs)
        if func in _SOFTMAX:
            return self._on_softmax(func, args, kwargs)
        if func in _LINEAR:
            weights = [a for a in args if isinstance(a, Tensor) and a.ndim == 2]
            if (owner := self._owner(weights)) is not None:
                return self._on_linear(owner, func, args, kwargs)
        if func in _CONV:
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            plain = isinstance(weight, Tensor) and set(weight.shape[2:]) == {1} and weight.shape[1] == args[0].shape[1]
            if plain and (owner := self._owner([weight])) is not None:
                return self._on_linear(owner, func, args, kwargs, dim=1)
        return func(*args, **kwargs)

    def _owner(self, weights: list[Tensor]) -> str | None:
        """The module that one of these belongs to."""
        if self.running:  # its weight may have come in just for this call (accelerate)
            own = self.modules[self.running[-1]]._parameters.values()
            if any(w is p for w in weights for p in own):
                return self.running[-1]
        owners: list[str] = next((self.owner[_memory(w)] for w in weights if _memory(w) in self.owner), [])
        if self.running and self.running[-1] in owners:  # several, where modules share a weight
            return self.running[-1]
        return owners[0] if owners else None

    # -- the three events -------------------------------------------------------------------

    def _on_linear(self, owner: str, func: Any, args: Any, kwargs: Any, dim: int = -1) -> Tensor:
        own = [id(p) for p in self.modules[owner]._parameters.values()]
        operands = [a for a in args if isinstance(a, Tensor) and id(a) not in own and _memory(a) not in self.owner]
        source = next((a for a in operands if a.ndim > 1), None)
        out: Tensor = func(*args, **kwargs)
        if source is None or not out.is_floating_point():
            return out
        as_module = bool(self.running) and self.running[-1] == owner
        self.sizes[owner, "in"], self.sizes[owner, "out"] = source.shape[dim], out.shape[dim]
        matched = self._match_output(owner, as_module, source, dim)
        if not matched and source.ndim > 3 and self._inside_heads(owner, source):
            return out
        leaf: Tensor = out.detach().requires_grad_()
        self.calls[id(leaf)] = _LinearCall(owner, as_module, source, leaf, dim)
        return leaf.clone()  # a copy, since models may write into it

    def _inside_heads(self, owner: str, source: Tensor) -> bool:
        """Whether a linear layer works on heads that the same module has split already, as on relative positions."""
        around = [name for name in self.running if name and name != owner]
        calls = [self.calls[id(leaf)].module for leaf in _leaves(source) if id(leaf) in self.calls]
        return bool(calls and around) and all(name.startswith(f"{around[-1]}.") for name in calls)

    def _on_sdpa(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        query, key, value, mask, _, is_causal = _sdpa_arguments(*args, **kwargs)
        result: Tensor = func(*args, **kwargs).detach().requires_grad_()
        heads = self._heads(query)
        attention = _Attention(
            self._attention_module(), tuple(self.running), result, heads or _Heads.along(1, 0),
            causal=is_causal or _is_causal_mask(mask), fused=True, tokens=query.shape[-2],
        )  # fmt: skip
        self.found.append(attention)
        if heads is None:
            attention.reason = f"its query has shape {tuple(query.shape)}, in which no heads can be told apart"
            return result.clone()
        first = (0,) * (query.ndim - 2)
        attention.pairwise = self._pairwise(key[first] @ query[first][-1])
        attention.query_rows = self._rows(query, heads)
        _merge(attention.rows, attention.query_rows)
        for tensor in (query, key):
            self._note_selections(attention, tensor, heads.repeated(tensor.shape[1]))
        attention.value_rows = self._rows(value, heads.repeated(value.shape[1]))
        _merge(attention.rows, self._rows(key, heads.repeated(key.shape[1])))
        _merge(attention.rows, attention.value_rows)
        for tensor in (query, key, value):
            self._note_tables(attention, tensor, heads.repeated(tensor.shape[1]))
        if mask is not None and mask.requires_grad and mask.ndim == query.ndim and mask.shape[1] == query.shape[1]:
            _merge(attention.rows, self._rows(mask, heads))
            self._note_tables(attention, mask, heads)
        self._note_sources(attention, query, key)
        return result.clone()

    def _on_softmax(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        out: Tensor = func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not out.is_floating_point() or not scores.requires_grad or dim not in (-1, out.ndim - 1):
            return out
        heads = self._heads(scores)
        if heads is None:
            return out
        result: Tensor = out.detach().requires_grad_()
        attention = _Attention(
            self._attention_module(), tuple(self.running), result, heads,
            causal=_is_upper_zero(out), fused=False, tokens=out.shape[-2],
        )  # fmt: skip
        self.found.append(attention)
        attention.pairwise = self._pairwise(scores[(0,) * (scores.ndim - 2) + (-1,)])
        attention.query_rows = self._rows(scores, heads)
        self._note_selections(attention, scores, heads)
        self._note_tables(attention, scores, heads)
        _merge(attention.rows, attention.query_rows)
        self._note_sources(attention, scores, scores)
        return result.clone()

    # -- reading the small graphs -----------------------------------------------------------

    def _heads(self, tensor: Tensor) -> _Heads | None:
        """Where the heads of queries or scores are; None where there are none to be told apart."""
        if tensor.ndim >= 4:
            if not tensor.shape[1]:
                return None
            heads = _Heads.along(1, tensor.shape[1])
            # (batch, tokens, heads, …), as sliding windows and deformable attention have it: tokens all read alike.
            if len(heads) > 1 and self._alike(tensor, heads):
                for dim in range(2, tensor.ndim - 1):
                    others = _Heads.along(dim, tensor.shape[dim])
                    if 1 < len(others) <= 256 and not self._alike(tensor, others):
                        return others
            return heads
        if tensor.ndim != 3 or not tensor.requires_grad:
            return None
        # (batch * heads, …): slices that read the same features of the projections are one head.
        each = _Heads(0, tuple((i,) for i in range(tensor.shape[0])))
        rows = self._rows(tensor, each)
        groups: dict[frozenset[tuple[str, int]], list[int]] = {}
        for i in range(len(each)):
            used = frozenset((module, feature) for module, heads in rows.items() for feature in heads[i])
            groups.setdefault(used, []).append(i)
        if len(groups) < 2 or len({len(g) for g in groups.values()}) > 1:
            return None  # a softmax over classes or experts, or one head
        return _Heads(0, tuple(tuple(g) for g in groups.values()))

    def _pairwise(self, row: Tensor) -> bool:
        """Whether a query's scores ``[keys]`` depend on several tokens, as a softmax of queries with keys does."""
        leaves = [leaf for leaf in _leaves(row) if id(leaf) in self.calls and leaf.ndim > 1]
        if not leaves or len(row) < 2:
            return True  # nothing says that they do not
        gradients = torch.autograd.grad(row, leaves, self._noise(row), retain_graph=True, allow_unused=True)
        along = [self.calls[id(leaf)].dim for leaf in leaves]
        moved = [g.movedim(dim, -1) for g, dim in zip(gradients, along, strict=True) if g is not None]
        tokens = [int((g.flatten(0, -2) != 0).any(-1).sum()) for g in moved]
        return max(tokens, default=2) > 1

    def _alike(self, tensor: Tensor, heads: _Heads) -> bool:
        """Whether all heads read the same features of every projection, and of some."""
        rows = self._rows(tensor, heads)
        return bool(rows) and all(r == features[0] for features in rows.values() for r in features)

    def _rows(self, tensor: Tensor, heads: _Heads) -> dict[str, list[set[int]]]:
        """Which features of which projection each head of ``tensor`` depends on."""
        leaves = [leaf for leaf in _leaves(tensor) if id(leaf) in self.calls]
        rows: dict[str, list[set[int]]] = {}
        if not leaves:
            return rows
        for h in range(len(heads)):
            part = heads.take(tensor, h)
            gradients = torch.autograd.grad(part, leaves, self._noise(part), retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    call_ = self.calls[id(leaf)]
                    rows.setdefault(call_.module, [set() for _ in heads.indices])[h] |= call_.used(gradient)
        return rows

    def _note_selections(self, attention: _Attention, tensor: Tensor, heads: _Heads) -> None:
        """Modules inside the attention whose output has the heads apart, though what they read has not: norms over all heads."""
        if len(heads) < 2 or not tensor.requires_grad:
            return
        mixed = {m for m, rows in self._rows(tensor, heads).items() if all(r == rows[0] for r in rows)}
        inside = f"{attention.module}." if attention.module else ""
        projections = {call.module for call in self.calls.values()}
        mixers = {n: t for n, t in self.mixers.items() if n.startswith(inside) and n not in projections}
        if not mixed or not mixers:
            return
        features: dict[str, list[set[int]]] = {}
        for h in range(len(heads)):
            part = heads.take(tensor, h)
            gradients = torch.autograd.grad(
                part, list(mixers.values()), self._noise(part), retain_graph=True, allow_unused=True
            )
            for name, gradient in zip(mixers, gradients, strict=True):
                if gradient is not None:
                    features.setdefault(name, [set() for _ in range(len(heads))])[h] |= _used(gradient)
        for name, rows in features.items():
            if all(rows) and any(r != rows[0] for r in rows):
                attention.selections[name] = rows

    def _note_tables(self, attention: _Attention, tensor: Tensor, heads: _Heads) -> None:
        """Parameters and buffers in which each head of ``tensor`` has entries of its own."""
        leaves = [leaf for leaf in _leaves(tensor) if id(leaf) in self.tensors and leaf.ndim]
        if not leaves or len(heads) < 2:
            return
        used = _Uses(self.tensors, len(heads))
        for h in range(len(heads)):
            part = heads.take(tensor, h)
            used.add(
                h, leaves, torch.autograd.grad(part, leaves, self._noise(part), retain_graph=True, allow_unused=True)
            )
        used.merge_into(attention.tables)

    def _head_arguments(self, attention: _Attention) -> tuple[HeadArgument, ...]:
        """Arguments of the attention module with a dimension for the heads."""
        heads = len(attention.heads)
        hidden = {id(call.source) for call in self.calls.values()}  # what is projected is no bias
        found = []
        for key, tensor in self.given.get(attention.module, {}).items():
            dim = 1 if tensor.ndim == 4 else 0
            if heads < 2 or tensor.ndim > 4 or id(tensor) in hidden:
                continue
            batch = attention.result.shape[0] // (1 if attention.heads.dim else heads)
            if tensor.shape[dim] == heads:
                found.append(HeadArgument(key, dim, False))
            elif dim == 0 and tensor.shape[0] == batch * heads:
                found.append(HeadArgument(key, dim, True))
        return tuple(found)

    def _match_output(self, owner: str, as_module: bool, source: Tensor, dim: int) -> bool:
        """If ``source``, a linear's input, depends on an attention's result, that linear is its W_O. Whether it is one's."""
        matched = False
        if not self.found or not source.requires_grad:
            return matched
        reached = {id(leaf): leaf for leaf in _leaves(source)}
        for attention in self.found:
            if id(attention.result) not in reached or attention.reason:
                continue
            if attention.output:
                attention.bypass = attention.bypass or owner
                continue
            attention.output, attention.output_dim, matched = owner, dim, True
            if not as_module:
                attention.reason = f"its output projection ({owner}) is not called as a module"
                continue
            attention.columns = self._columns(attention, source, dim)
            self._note_values(attention, attention.columns, source.movedim(dim, -1), list(reached.values()))
        return matched

    def note_bypass(self, output: Any) -> None:
        """Look whether heads reach the model's output past their W_O."""
        if isinstance(output, Mapping):
            output = {k: v for k, v in output.items() if "attentions" not in k}
        elif isinstance(output, tuple | list):
            output = output[:1]
        reached = {id(leaf) for tensor in tensors(output) for leaf in _leaves(tensor)}
        for attention in self.found:
            if attention.output and id(attention.result) in reached:
                attention.bypass = attention.bypass or "the model's output"

    def _gate(self, attention: _Attention) -> HeadGate | None:
        """The first module between the attention and W_O that still has the heads apart."""
        if len(attention.heads) < 2:
            return None
        names = [name for name, _ in attention.passed]
        for name, tensor in attention.passed:
            # One that is called twice, such as a dropout, would gate something else as well.
            if names.count(name) > 1 or not any(leaf is attention.result for leaf in _leaves(tensor)):
                continue
            for dim in (-1, *((1,) if tensor.ndim > 3 else ())):
                columns = self._columns(attention, tensor, dim)
                if all(columns) and not _overlap(columns):
                    return HeadGate(name, dim, tuple(tuple(sorted(c)) for c in columns))
        return None

    def _match_concatenation(self, name: str, output: Any) -> None:
        """Note where the heads are in what attention module ``name`` returns: without a W_O, that is the place to gate."""
        returned = output[0] if isinstance(output, tuple) and output else output
        pending = [a for a in self.found if a.module == name and not a.output and not a.reason]
        if not pending or not isinstance(returned, Tensor) or not returned.requires_grad:
            return
        reached = {id(leaf): leaf for leaf in _leaves(returned)}
        for attention in pending:
            if id(attention.result) in reached and len(attention.heads) > 1:
                columns = self._columns(attention, returned)
                if all(columns) and not _overlap(columns):
                    attention.returned = columns
                    self._note_values(attention, columns, returned, list(reached.values()))

    def _columns(self, attention: _Attention, source: Tensor, dim: int = -1) -> list[set[int]]:
        """The features of ``source`` along ``dim`` that each head's result reaches."""
        cotangent = torch.zeros_like(source, requires_grad=True)
        (back,) = torch.autograd.grad(source, attention.result, cotangent, create_graph=True)
        heads, columns = attention.heads, []
        for h, indices in enumerate(heads.indices):
            tangent = torch.zeros_like(attention.result)
            where = torch.tensor(indices, device=tangent.device)
            tangent.index_copy_(heads.dim, where, self._noise(heads.take(tangent, h)))
            (forward,) = torch.autograd.grad(back, cotangent, tangent, retain_graph=True)
            columns.append(_used(forward.movedim(dim, -1)))
        return columns

    def _note_values(
        self, attention: _Attention, columns: list[set[int]], source: Tensor, leaves: list[Tensor]
    ) -> None:
        """What else enters the heads' features of ``source``: values of eager attention, gates and scales on the output."""
        leaves = [leaf for leaf in leaves if leaf is not attention.result and leaf.ndim]
        if not leaves or not all(columns) or _overlap(columns):
            return
        used = _Uses(self.tensors, len(attention.heads))
        for h, own in enumerate(columns):
            seed = torch.zeros_like(source)
            index = sorted(own)
            seed[..., index] = self._noise(seed[..., index])
            gradients = torch.autograd.grad(source, leaves, seed, retain_graph=True, allow_unused=True)
            used.add(h, leaves, gradients)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None and id(leaf) in self.calls:
                    call_ = self.calls[id(leaf)]
                    for rows in (attention.rows, *(() if attention.fused else (attention.value_rows,))):
                        rows.setdefault(call_.module, [set() for _ in columns])[h] |= call_.used(gradient)
        used.merge_into(attention.tables)

    def _note_sources(self, attention: _Attention, *parts: Tensor) -> None:
        """Cross-attention: some projections read an argument of the module that no other projection reads."""
        given = {id(t): t for t in self.arguments.get(attention.module, [])}
        read: set[frozenset[int]] = set()
        batch: set[int] = set()
        for part in parts:
            for leaf in _leaves(part):
                if id(leaf) in self.calls:
                    read.add(frozenset(self._origins(self.calls[id(leaf)].source, given)))
                    batch.add(self.calls[id(leaf)].source.shape[0])
        # Relative positions are projected from an argument too, but it has no rows of the batch.
        rows = max(batch, default=0)
        hidden = {names & {n for n in names if given[n].shape[0] == rows} for names in read if names}
        hidden = {names for names in hidden if names}
        attention.cross = len(hidden) > 1 and not set.intersection(*map(set, hidden))

    def _origins(self, source: Tensor, given: dict[int, Tensor]) -> set[int]:
        """The arguments, of those ``given``, that a projection's input was computed from, also by way of other projections."""
        if id(source) in given:
            return {id(source)}
        computed = [t for t in given.values() if t.requires_grad and source.requires_grad]
        if computed:
            gradients = torch.autograd.grad(source.sum(), computed, retain_graph=True, allow_unused=True)
            if found := {id(t) for t, g in zip(computed, gradients, strict=True) if g is not None}:
                return found
        calls = [self.calls[id(leaf)] for leaf in _leaves(source) if id(leaf) in self.calls]
        inner = [
            call for call in calls if call.source is not source and call.module.startswith(self._attention_module())
        ]
        return {name for call in inner for name in self._origins(call.source, given)}

    def _attention_module(self) -> str:
        """The innermost running module that is more than a softmax or dropout: one with parameters."""
        for name in reversed(self.running):
            module = self.modules[name]
            packed = (b for b in module.buffers() if not b.is_floating_point() and b.dtype != torch.bool)
            if any(t.ndim >= 2 for t in (*module.parameters(), *packed)):
                return name
        return self.running[-1] if self.running else ""

    def _noise(self, like: Tensor) -> Tensor:
        # Random, since a constant would vanish in a layer norm; away from zero, since zero means "unused".
        noise = torch.rand(like.shape, generator=self.generator) + 0.5
        return noise.to(like.device, like.dtype)

    # -- the result -------------------------------------------------------------------------

    def layers(self) -> list[AttentionLayer]:
        """One per attention module; several, where one module computes attention from several projections."""
        unique: dict[str, list[_Attention]] = {}
        for attention in self.found:
            if attention.returned and (not attention.columns or _overlap(attention.columns) or attention.bypass):
                attention.output, attention.columns = attention.module, attention.returned
            elif attention.bypass and not attention.reason and not _overlap(attention.columns):
                attention.reason = f"its heads reach {attention.bypass} past the output projection {attention.output}"
                attention.columns, attention.passed = [], []
            if not attention.fused and not attention.output and not attention.rows:
                continue  # a softmax that is no attention, such as a router's
            apart = attention.columns and all(attention.columns) and not _overlap(attention.columns)
            others = any(a.pairwise and a.module == attention.module for a in self.found)
            if not attention.pairwise and (others or not apart):
                continue  # over channels, streams or a convolution's taps
            known = unique.setdefault(attention.module, [])
            same = next((a for a in known if a.rows == attention.rows), None)
            if same is None:
                known.append(attention)
            elif (same.output, same.columns) != (attention.output, attention.columns):
                same.reason = f"its result goes through two output projections, {same.output} and {attention.output}"
                same.columns, same.passed = [], []
        made: list[AttentionLayer] = []
        for calls in unique.values():
            for number, attention in enumerate(calls, 1):
                made.append(self._layer(len(made), attention, "" if number == 1 else f"#{number}"))
        return made

    def _layer(self, index: int, attention: _Attention, suffix: str) -> AttentionLayer:
        heads = len(attention.heads)
        kind = "cross" if attention.cross else "decoder" if attention.causal else "encoder"
        reason = attention.reason or _separable(attention)
        attention.columns = _filled(attention.columns, self.sizes.get((attention.output, "in"), 0))
        output = None
        if attention.output and attention.columns and all(attention.columns) and not _overlap(attention.columns):
            output = HeadFeatures(attention.output, tuple(tuple(sorted(c)) for c in attention.columns))
        projections = []
        for module, rows in attention.rows.items():
            rows = _filled(rows, self.sizes.get((module, "out"), 0))
            outside = not f"{module}.".startswith(f"{attention.module}." if attention.module else "")
            if outside and any(module in a.rows and a.module != attention.module for a in self.found):
                continue  # something that several layers take their heads of, such as a position bias: it stays whole
            shared = set.intersection(*rows) if heads > 1 else set()
            own = [r - shared for r in rows]  # features that all heads use stay (MQA, latent attention)
            if any(own):
                projections.append(HeadFeatures(module, tuple(tuple(sorted(r)) for r in own)))
        groups = _groups(attention)
        kv_heads = len(groups) or heads
        if (
            not groups
            and heads > 1
            and any(all(r == rows[0] != set() for r in rows) for rows in attention.value_rows.values())
        ):
            kv_heads = 1
        tables = tuple(
            HeadTable(name, dim, tuple(tuple(sorted(i)) for i in _filled(indices, self.shape[name][dim])))
            for (name, dim), indices in attention.tables.items()
            # One that other layers read too must stay whole.
            if f"{name}.".startswith(f"{attention.module}.") and sum((name, dim) in a.tables for a in self.found) == 1
        )
        tables = tuple(t for t in tables if t.name.rpartition(".")[0] not in attention.selections)
        owners = tuple(t.name.rpartition(".")[0] for t in tables)
        counting = self._counting(attention)
        inner = dict.fromkeys((*owners, *(n for n in attention.running if n in counting)))
        gate = self._gate(attention) if output is None and attention.output and not suffix else None
        if output is not None and attention.output_dim != -1:
            gate = HeadGate(output.module, attention.output_dim, output.features)
        shape = self.results.get(attention.module)
        inside = f"{attention.output}.".startswith(f"{attention.module}.") if attention.module else True
        bypass = "ghost"
        if isinstance(self.modules[attention.module], MultiheadAttention):
            bypass = "slice"
        elif (
            kind == "encoder"
            and attention.output_dim == -1
            and attention.tokens > 1
            and shape is not None
            and attention.module not in self.cached
            and not _has_other_weights(self.modules, attention)
        ):
            bypass = "stub"
        if suffix and not reason:
            reason = f"{attention.module} computes several attentions, and their head counts cannot be told apart"
        if gate and output is None and not _is_plain(self.modules[gate.module]):
            reason = f"{gate.module} ({type(self.modules[gate.module]).__name__}) has no plain weight matrix to slice (quantised?)"
        if attention.module in ghosts(self.model):
            reason, output = "all of its heads were pruned; one stays with zero output, for the cache", None
        matrices = [t for t in tables if len(self.shape[t.name]) > 1]
        if not reason and not (projections or matrices or attention.selections):
            reason = f"no weights of {attention.module} were found that belong to single heads (quantised?)"
        if not reason:
            reason = self._unsliceable(attention, output, projections)
        return AttentionLayer(
            name=attention.module + suffix, index=index, kind=kind, num_heads=heads, num_kv_heads=kv_heads, groups=groups,
            head_dim=len(attention.columns[0]) if output else 0, prunable=not reason, reason=reason,
            output_projection=output, gate=gate, projections=tuple(projections), tables=tables,
            selections=tuple(HeadFeatures(n, tuple(tuple(sorted(r)) for r in rows)) for n, rows in attention.selections.items()),
            arguments=self._head_arguments(attention), inner_modules=tuple(inner), side_modules=tuple(n for n in counting if n not in inner),
            bypass=bypass, output_arity=shape or 0, output_inside=inside,
        )  # fmt: skip

    def _counting(self, attention: _Attention) -> list[str]:
        """Modules that may count the heads: the attention module and those inside, but no layers with weights of their own."""
        inside = f"{attention.module}." if attention.module else ""
        below = [n for n in self.modules if n == attention.module or n.startswith(inside)]
        if not attention.module or any(a.module != attention.module and a.module in below for a in self.found):
            below = [n for n in attention.running if n in below]
        return [
            n for n in below
            if n == attention.module or not any(p.ndim > 1 for p in self.modules[n].parameters(recurse=False))
        ]  # fmt: skip

    def _unsliceable(self, attention: _Attention, output: HeadFeatures | None, projections: list[HeadFeatures]) -> str:
        for part in (output, *projections):
            if part is None:
                continue
            if part.module == attention.module:
                continue  # concatenated heads, without a W_O
            module = self.modules[part.module]
            weight = getattr(module, "weight", None)
            if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or not _is_matrix(weight):
                return f"{part.module} ({type(module).__name__}) has no plain weight matrix to slice (quantised?)"
            if hasattr(weight, "placements"):
                return f"the weight of {part.module} is spread over devices (tensor parallel): prune before distributing it"
            uses = [n for n, m in self.modules.items() if getattr(m, "weight", None) is weight]
            if len(uses) > 1:
                return f"the weight of {part.module} is shared with {uses[1] if uses[0] == part.module else uses[0]}"
        return ""


def _is_matrix(weight: Tensor) -> bool:
    """Whether a weight is ``[out, in]``, or that of a convolution with a kernel of 1."""
    return weight.ndim >= 2 and set(weight.shape[2:]) <= {1}


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has no packed numbers, as quantised layers have."""
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not any(t.dtype in (torch.int8, torch.uint8, torch.int32) and t.numel() > 1 for t in held)


def _separable(attention: _Attention) -> str:
    """Why the heads of this layer cannot be told apart, or ""."""
    if not attention.output:
        return "no output projection follows the attention"
    if not attention.columns or not all(attention.columns):
        return f"a head does not reach the output projection {attention.output}"
    if _overlap(attention.columns):
        return f"the heads are mixed before the output projection {attention.output}"
    if len(attention.heads) > 1:
        queries = [*attention.query_rows.values(), *attention.selections.values()]
        if queries and not attention.tables and all(r == rows[0] for rows in queries for r in rows):
            return "its heads are computed from the same query features (something mixes them)"
        groups = _groups(attention)
        members = [h for group in groups for h in group]
        if groups and (sorted(members) != list(range(len(attention.heads))) or len({len(g) for g in groups}) > 1):
            return "its heads share features of the projections in a way that is no grouping"
    return ""


def _filled(rows: list[set[int]], size: int) -> list[set[int]]:
    """Rows with the gaps closed that an activation left: features that were zero for every token of the example.

    A feature of no head belongs to the heads on both sides of it, if those are the same; and where every head has its own
    block of ``size / heads`` features, to the head of that block. If that is not so, the proof will say.
    """
    users: dict[int, frozenset[int]] = {}
    for h, features in enumerate(rows):
        for feature in features:
            users[feature] = users.get(feature, frozenset()) | {h}
    if not users or len(users) == size:
        return rows
    filled = [set(r) for r in rows]
    block, rest = divmod(size, len(rows))
    if block and not rest and len(users) > size // 2 and all(u == {f // block} for f, u in users.items()):
        return [set(range(h * block, (h + 1) * block)) for h in range(len(rows))]
    known = sorted(users)
    for before, after in pairwise(known):
        if users[before] == users[after]:
            for h in users[before]:
                filled[h].update(range(before + 1, after))
    return filled


def _groups(attention: _Attention) -> tuple[tuple[int, ...], ...]:
    """The heads that share features with some others but not with all: key/value groups. () where none do."""
    heads = len(attention.heads)
    group = {h: frozenset({h}) for h in range(heads)}
    for rows in (*attention.rows.values(), *attention.selections.values()):
        users: dict[int, set[int]] = {}
        for h, features in enumerate(rows):
            for feature in features:
                users.setdefault(feature, set()).add(h)
        for together in {frozenset(u) for u in users.values() if len(u) < heads}:
            whole = frozenset().union(*(group[h] for h in together))
            group.update(dict.fromkeys(whole, whole))
    groups = sorted({tuple(sorted(g)) for g in group.values()})
    return tuple(groups) if any(len(g) > 1 for g in groups) else ()


def _overlap(columns: list[set[int]]) -> bool:
    return sum(map(len, columns)) != len(set().union(*columns))


def _merge(into: dict[str, list[set[int]]], rows: dict[str, list[set[int]]]) -> None:
    for module, heads in rows.items():
        mine = into.setdefault(module, [set() for _ in heads])
        for h, features in enumerate(heads):
            mine[h] = mine[h] | features


def _used(gradient: Tensor) -> set[int]:
    """Indices of the last dimension that are not zero everywhere."""
    flat = gradient.detach().nan_to_num().reshape(-1, gradient.shape[-1])
    return set((flat != 0).any(dim=0).nonzero().flatten().tolist())


def _memory(tensor: Tensor) -> int:
    """Where a tensor's numbers lie; the object itself for a meta tensor, which has none."""
    return id(tensor) if tensor.device.type == "meta" else tensor.data_ptr()


def _leaves(tensor: Tensor) -> list[Tensor]:
    """The tensors where ``tensor``'s autograd graph starts."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    seen, stack, leaves = set(), [tensor.grad_fn], []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack.extend(n for n, _ in node.next_functions)
    return leaves


def _sdpa_arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool]:  # fmt: skip
    return query, key, value, attn_mask, dropout_p, is_causal


def _is_causal_mask(mask: Tensor | None) -> bool:
    if mask is None or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return False
    blocked = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    ones = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return bool(blocked[..., ones].all()) and not bool(blocked[..., ones.T].all())


def _is_upper_zero(probabilities: Tensor) -> bool:
    t, s = probabilities.shape[-2:]
    if s not in (t, t + 1) or t < 2:  # one more where there is an attention sink
        return False
    probabilities = probabilities[..., :t]
    ones = torch.ones(t, t, dtype=torch.bool, device=probabilities.device).triu(1)
    return not bool(probabilities[..., ones].any()) and bool(probabilities[..., ones.T].any())


def _shape_of(output: Any) -> int | None:
    """Arity of a module's output if a stub can return the same: a tensor, or one tensor and Nones."""
    if isinstance(output, Tensor):
        return 0
    if type(output) is tuple and output and isinstance(output[0], Tensor) and all(o is None for o in output[1:]):
        return len(output)
    return None


def _has_other_weights(modules: dict[str, nn.Module], attention: _Attention) -> bool:
    """Whether a stub would remove more than attention: parameters besides the projections."""
    below = set(attention.rows) | {attention.output}
    root = modules[attention.module]
    for name, module in root.named_modules(prefix=attention.module):
        if name not in below and any(True for _ in module.parameters(recurse=False)):
            return True
    return False
