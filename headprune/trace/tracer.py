"""Watch one forward of a model, and note what each head of each attention depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.inputs import tensors
from headprune.trace.graphs import Heads, Uses, is_matrix, leaves_of, memory, merge, nodes_of, overlap, used
from headprune.trace.record import Attention, LinearCall

# Autograd's names of what changes no number.
_SHAPES = {
    f"{n}Backward"
    for n in (
        "Clone",
        "View",
        "UnsafeView",
        "Alias",
        "Transpose",
        "Permute",
        "Squeeze",
        "Unsqueeze",
        "ReshapeAlias",
        "T",
    )
}
_MOST_SLICES = 2048  # of (batch * heads, …), each of which is differentiated
_SDPA = F.scaled_dot_product_attention
_SOFTMAX: set[Callable[..., Any]] = {F.softmax, torch.softmax, Tensor.softmax}
_CONV: set[Callable[..., Any]] = {F.conv1d, F.conv2d}  # linear layers over channels, where the kernel is 1 wide
_LINEAR: set[Callable[..., Any]] = {F.linear, torch.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__}


class Tracer(TorchFunctionMode):
    """Watches one forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.running: list[str] = []
        self.arguments: dict[str, list[Tensor]] = {}
        self.results: dict[str, Any] = {}
        self.mixers: dict[str, Tensor] = {}  # outputs of small modules that may mix the heads, such as norms
        self.returned: dict[str, str] = {}  # module -> the linear layer whose output, unchanged, it returned
        self.outputs: dict[str, Tensor] = {}  # of modules between an attention and W_O
        self.entered: dict[str, int] = {}  # how often each module was called
        self.owner: dict[int, list[str]] = {}  # module by its weight's memory, so that weight.T is known too
        self.tensors: dict[int, str] = {}  # names of parameters and buffers
        self.shape: dict[str, torch.Size] = {}
        self.sizes: dict[tuple[str, str], int] = {}  # (linear, "in" or "out") -> features
        self.given: dict[str, dict[str | int, Tensor]] = {}  # module -> argument -> tensor that may be a bias or mask
        self.cached: set[str] = set()  # modules that were given a cache
        self.calls: dict[int, LinearCall] = {}  # by id of the leaf
        self.found: list[Attention] = []
        self.read: list[tuple[Tensor, Heads, dict[str, list[set[int]]]]] = []  # what `_rows` found in this attention
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
                if is_matrix(parameter):
                    self.owner.setdefault(memory(parameter), []).append(name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the stack of running modules up to date."""
        with ExitStack() as stack:
            for name, module in self.modules.items():

                def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    self.running.append(name)
                    self.entered[name] = self.entered.get(name, 0) + 1
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

                def leave(_: nn.Module, __: Any, output: Any, name: str = name) -> Any:
                    if self.running and self.running[-1] == name:
                        self.running.pop()
                    self.results[name] = _shape_of(output)
                    self._note_returned(name, output)
                    scales = any(p.ndim == 1 for p in self.modules[name].parameters(recurse=False))
                    if scales and isinstance(output, Tensor) and output.grad_fn is not None:
                        self.mixers[name] = output
                    self._match_concatenation(name, output)
                    if isinstance(output, Tensor) and any(name in dict(a.passed) for a in self.found if not a.output):
                        # A node of its own in the graph, to see whether W_O depends on it.
                        self.outputs[name] = output.view_as(output)
                        return self.outputs[name]
                    return None

                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._on_sdpa(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            self._on_hidden(args, kwargs)
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
        owners: list[str] = next((self.owner[memory(w)] for w in weights if memory(w) in self.owner), [])
        if self.running and self.running[-1] in owners:  # several, where modules share a weight
            return self.running[-1]
        return owners[0] if owners else None

    # -- the three events -------------------------------------------------------------------

    def _on_linear(self, owner: str, func: Any, args: Any, kwargs: Any, dim: int = -1) -> Tensor:
        own = [id(p) for p in self.modules[owner]._parameters.values()]
        operands = [a for a in args if isinstance(a, Tensor) and id(a) not in own and memory(a) not in self.owner]
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
        self.calls[id(leaf)] = LinearCall(owner, as_module, source, leaf, dim)
        return leaf.clone()  # a copy, since models may write into it

    def _inside_heads(self, owner: str, source: Tensor) -> bool:
        """Whether a linear layer works on heads that the same module has split already, as on relative positions."""
        around = [name for name in self.running if name and name != owner]
        calls = [self.calls[id(leaf)].module for leaf in leaves_of(source) if id(leaf) in self.calls]
        return bool(calls and around) and all(name.startswith(f"{around[-1]}.") for name in calls)

    def _on_sdpa(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        query, key, value, mask, _, is_causal = _sdpa_arguments(*args, **kwargs)
        result: Tensor = func(*args, **kwargs).detach().requires_grad_()
        self.read = []
        heads = self._heads(query)
        attention = Attention(
            self._attention_module(), tuple(self.running), result, heads or Heads.along(1, 0),
            causal=is_causal or _is_causal_mask(mask), fused=True, tokens=query.shape[-2],
        )  # fmt: skip
        self.found.append(attention)
        if heads is None:
            attention.reason = f"its query has shape {tuple(query.shape)}, in which no heads can be told apart"
            return result.clone()
        first = (0,) * (query.ndim - 2)
        attention.pairwise = self._pairwise(key[first] @ query[first][-1])
        attention.query_rows = self._rows(query, heads)
        merge(attention.rows, attention.query_rows)
        for tensor in (query, key):
            self._note_selections(attention, tensor, heads.repeated(tensor.shape[1]))
        attention.value_rows = self._rows(value, heads.repeated(value.shape[1]))
        merge(attention.rows, self._rows(key, heads.repeated(key.shape[1])))
        merge(attention.rows, attention.value_rows)
        for tensor in (query, key, value):
            self._note_tables(attention, tensor, heads.repeated(tensor.shape[1]))
            self._note_arguments(attention, tensor, heads.repeated(tensor.shape[1]))
        if mask is not None and mask.requires_grad and mask.ndim == query.ndim and mask.shape[1] == query.shape[1]:
            merge(attention.rows, self._rows(mask, heads))
            self._note_tables(attention, mask, heads)
        self._note_sources(attention, query, key)
        return result.clone()

    def _on_hidden(self, args: Any, kwargs: Any) -> None:
        """Attention inside torch's own function, where nothing can be seen; at least it is told."""
        heads = kwargs.get("num_heads", args[4] if len(args) > 4 else 1)
        attention = Attention(
            self._attention_module(), tuple(self.running), torch.zeros(0), Heads.along(1, heads),
            causal=False, fused=True, tokens=1,
        )  # fmt: skip
        attention.reason = "it calls torch's multi_head_attention_forward, which hides its heads; declare a stand-in"
        self.found.append(attention)

    def _on_softmax(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        out: Tensor = func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not out.is_floating_point() or not scores.requires_grad or dim is None:
            return out
        scores = scores.movedim(dim, -1)  # the keys last, as most write it
        self.read = []
        heads = self._heads(scores)
        if heads is None:
            return out
        out = out.movedim(dim, -1)
        result: Tensor = out.detach().requires_grad_()
        attention = Attention(
            self._attention_module(), tuple(self.running), result, heads,
            causal=_is_upper_zero(out), fused=False, tokens=out.shape[-2],
        )  # fmt: skip
        self.found.append(attention)
        # A softmax over another dimension is mostly no attention: it counts where its heads reach a W_O separately.
        last = dim in (-1, out.ndim - 1)
        attention.pairwise = last and self._pairwise(scores[(0,) * (scores.ndim - 2) + (-1,)])
        attention.query_rows = self._rows(scores, heads)
        self._note_selections(attention, scores, heads)
        self._note_tables(attention, scores, heads)
        self._note_arguments(attention, scores, heads)
        merge(attention.rows, attention.query_rows)
        self._note_sources(attention, scores, scores)
        return result.clone().movedim(-1, dim)

    # -- reading the small graphs -----------------------------------------------------------

    def _heads(self, tensor: Tensor) -> Heads | None:
        """Where the heads of queries or scores are; None where there are none to be told apart."""
        if tensor.ndim >= 4:
            if not tensor.shape[1]:
                return None
            heads = Heads.along(1, tensor.shape[1])
            # (batch, tokens, heads, …), as sliding windows and deformable attention have it: tokens all read alike.
            if len(heads) == 1 or self._alike(tensor, heads):
                for dim in range(2, tensor.ndim - 1):
                    others = Heads.along(dim, tensor.shape[dim])
                    if 1 < len(others) <= 256 and not self._alike(tensor, others):
                        return others
            return heads
        if tensor.ndim != 3 or not tensor.requires_grad or tensor.shape[0] > _MOST_SLICES:
            return None
        # (batch * heads, …): slices that read the same features of the projections are one head.
        each = Heads(0, tuple((i,) for i in range(tensor.shape[0])))
        rows = self._rows(tensor, each)
        groups: dict[frozenset[tuple[str, int]], list[int]] = {}
        for i in range(len(each)):
            used = frozenset((module, feature) for module, heads in rows.items() for feature in heads[i])
            groups.setdefault(used, []).append(i)
        if len(groups) < 2 or len({len(g) for g in groups.values()}) > 1:
            return None  # a softmax over classes or experts, or one head
        return Heads(0, tuple(tuple(g) for g in groups.values()))

    def _pairwise(self, row: Tensor) -> bool:
        """Whether a query's scores ``[keys]`` depend on several tokens, as a softmax of queries with keys does."""
        leaves = [leaf for leaf in leaves_of(row) if id(leaf) in self.calls and leaf.ndim > 1]
        if not leaves or len(row) < 2:
            return True  # nothing says that they do not
        gradients = torch.autograd.grad(row, leaves, self._noise(row), retain_graph=True, allow_unused=True)
        along = [self.calls[id(leaf)].dim for leaf in leaves]
        moved = [g.movedim(dim, -1) for g, dim in zip(gradients, along, strict=True) if g is not None]
        tokens = [int((g.flatten(0, -2) != 0).any(-1).sum()) for g in moved]
        return max(tokens, default=2) > 1

    def _alike(self, tensor: Tensor, heads: Heads) -> bool:
        """Whether all heads read the same features of every projection, and of some."""
        rows = self._rows(tensor, heads)
        return bool(rows) and all(r == features[0] for features in rows.values() for r in features)

    def _rows(self, tensor: Tensor, heads: Heads) -> dict[str, list[set[int]]]:
        """Which features of which projection each head of ``tensor`` depends on.

        Several ask the same of one attention's queries and keys: a backward pass for every head is made once.
        """
        rows = next((r for known, those, r in self.read if known is tensor and those == heads), None)
        if rows is None:
            rows = self._read_rows(tensor, heads)
            self.read.append((tensor, heads, rows))
        return {module: [set(own) for own in features] for module, features in rows.items()}

    def _read_rows(self, tensor: Tensor, heads: Heads) -> dict[str, list[set[int]]]:
        leaves = [leaf for leaf in leaves_of(tensor) if id(leaf) in self.calls]
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

    def _note_selections(self, attention: Attention, tensor: Tensor, heads: Heads) -> None:
        """Modules inside the attention whose output has the heads apart, though what they read has not: norms over all heads."""
        if len(heads) < 2 or not tensor.requires_grad:
            return
        inside = f"{attention.module}." if attention.module else ""
        projections = {call.module for call in self.calls.values()}
        mixers = {n: t for n, t in self.mixers.items() if n.startswith(inside) and n not in projections}
        if not mixers or not any(all(r == rows[0] for r in rows) for rows in self._rows(tensor, heads).values()):
            return
        features: dict[str, list[set[int]]] = {}
        for h in range(len(heads)):
            part = heads.take(tensor, h)
            gradients = torch.autograd.grad(
                part, list(mixers.values()), self._noise(part), retain_graph=True, allow_unused=True
            )
            for name, gradient in zip(mixers, gradients, strict=True):
                if gradient is not None:
                    features.setdefault(name, [set() for _ in range(len(heads))])[h] |= used(gradient)
        for name, rows in features.items():
            if all(rows) and any(r != rows[0] for r in rows):
                attention.selections[name] = rows

    def _note_tables(self, attention: Attention, tensor: Tensor, heads: Heads) -> None:
        """Parameters and buffers in which each head of ``tensor`` has entries of its own."""
        leaves = [leaf for leaf in leaves_of(tensor) if id(leaf) in self.tensors and leaf.ndim]
        if not leaves or len(heads) < 2:
            return
        used = Uses(self.tensors, len(heads))
        for h in range(len(heads)):
            part = heads.take(tensor, h)
            used.add(
                h, leaves, torch.autograd.grad(part, leaves, self._noise(part), retain_graph=True, allow_unused=True)
            )
        used.merge_into(attention.tables)

    def _note_arguments(self, attention: Attention, tensor: Tensor, heads: Heads) -> None:
        """Arguments of the attention module that each head of ``tensor`` reads in features of its own, by no projection."""
        given = {k: t for k, t in self.given.get(attention.module, {}).items() if t.grad_fn is not None}
        if len(heads) < 2 or not given or not tensor.requires_grad:
            return
        way = nodes_of(tensor)
        # What a projection made is cut there.
        given = {
            k: t
            for k, t in given.items()
            if t.grad_fn in way and not any(id(leaf) in self.calls for leaf in leaves_of(t))
        }
        for h in range(len(heads) if given else 0):
            part = heads.take(tensor, h)
            gradients = torch.autograd.grad(
                part, list(given.values()), self._noise(part), retain_graph=True, allow_unused=True
            )
            for key, gradient in zip(given, gradients, strict=True):
                if gradient is not None:
                    attention.arguments.setdefault(key, [set() for _ in heads.indices])[h] |= used(gradient)

    def _match_output(self, owner: str, as_module: bool, source: Tensor, dim: int) -> bool:
        """If ``source``, a linear's input, depends on an attention's result, that linear is its W_O. Whether it is one's."""
        matched = False
        if not self.found or not source.requires_grad:
            return matched
        reached = {id(leaf): leaf for leaf in leaves_of(source)}
        for attention in self.found:
            if id(attention.result) not in reached or attention.reason:
                continue
            if attention.output:
                attention.bypass = attention.bypass or owner
                continue
            attention.output, attention.output_dim, attention.source, matched = owner, dim, source, True
            if not as_module or owner == attention.module:
                attention.reason = f"its output projection ({owner}) is not called as a module"
                continue
            attention.columns = self.columns_of(attention, source, dim)
            self._note_values(attention, attention.columns, source.movedim(dim, -1), list(reached.values()))
        return matched

    def note_bypass(self, output: Any) -> None:
        """Look whether heads reach the model's output past their W_O."""
        if isinstance(output, Mapping):
            output = {k: v for k, v in output.items() if "attentions" not in k}
        elif isinstance(output, tuple | list):
            output = output[:1]
        reached = {id(leaf) for tensor in tensors(output) for leaf in leaves_of(tensor)}
        for attention in self.found:
            if attention.output and id(attention.result) in reached:
                attention.bypass = attention.bypass or "the model's output"

    def _match_concatenation(self, name: str, output: Any) -> None:
        """Note where the heads are in what attention module ``name`` returns: without a W_O, that is the place to gate."""
        returned = output[0] if isinstance(output, tuple) and output else output
        pending = [a for a in self.found if a.module == name and not a.output and not a.reason]
        if not pending or not isinstance(returned, Tensor) or not returned.requires_grad:
            return
        reached = {id(leaf): leaf for leaf in leaves_of(returned)}
        for attention in pending:
            if id(attention.result) in reached and len(attention.heads) > 1:
                columns = self.columns_of(attention, returned)
                if all(columns) and not overlap(columns):
                    attention.returned = columns
                    self._note_values(attention, columns, returned, list(reached.values()))

    def _note_returned(self, name: str, output: Any) -> None:
        """Remember which linear layer's output a module returns as it is, in another shape at most."""
        returned = output[0] if isinstance(output, tuple) and output else output
        node = returned.grad_fn if isinstance(returned, Tensor) else None
        while node is not None and len(node.next_functions) == 1 and node.name().removesuffix("0") in _SHAPES:
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in self.calls:
            self.returned[name] = self.calls[id(leaf)].module
        else:
            self.returned.pop(name, None)

    def columns_of(self, attention: Attention, source: Tensor, dim: int = -1) -> list[set[int]]:
        """The features of ``source`` along ``dim`` that each head's result reaches."""
        cotangent = torch.zeros_like(source, requires_grad=True)
        (back,) = torch.autograd.grad(source, attention.result, cotangent, create_graph=True)
        heads, columns = attention.heads, []
        for h, indices in enumerate(heads.indices):
            tangent = torch.zeros_like(attention.result)
            where = torch.tensor(indices, device=tangent.device)
            tangent.index_copy_(heads.dim, where, self._noise(heads.take(tangent, h)))
            (forward,) = torch.autograd.grad(back, cotangent, tangent, retain_graph=True)
            columns.append(used(forward.movedim(dim, -1)))
        return columns

    def adds_more(self, attention: Attention) -> bool:
        """Whether something is added to the heads before what was taken for their W_O reads them, such as a residual.

        Only asked where the module returns its heads side by side: nothing but weights and gates should come in between.
        """
        source = attention.source
        if source is None or not source.requires_grad:
            return False
        cotangent = torch.zeros_like(source, requires_grad=True)
        (back,) = torch.autograd.grad(source, attention.result, cotangent, create_graph=True)
        (made,) = torch.autograd.grad(back, cotangent, attention.result.detach(), retain_graph=True)
        rest = (source.detach() - made).movedim(attention.output_dim, -1)
        index = sorted(set().union(*attention.columns))
        size = source.detach().abs().max().clamp(min=1e-30)
        return bool(rest[..., index].abs().max() > 1e-3 * size) if index else False

    def _note_values(self, attention: Attention, columns: list[set[int]], source: Tensor, leaves: list[Tensor]) -> None:
        """What else enters the heads' features of ``source``: values of eager attention, gates and scales on the output."""
        leaves = [leaf for leaf in leaves if leaf is not attention.result and leaf.ndim]
        if not leaves or not all(columns) or overlap(columns):
            return
        used = Uses(self.tensors, len(attention.heads))
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

    def _note_sources(self, attention: Attention, *parts: Tensor) -> None:
        """Cross-attention: some projections read an argument of the module that no other projection reads."""
        given = {id(t): t for t in self.arguments.get(attention.module, [])}
        read: set[frozenset[int]] = set()
        batch: set[int] = set()
        for part in parts:
            for leaf in leaves_of(part):
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
        calls = [self.calls[id(leaf)] for leaf in leaves_of(source) if id(leaf) in self.calls]
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
