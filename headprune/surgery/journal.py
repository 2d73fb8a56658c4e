"""The cut. Every change to a model goes through an undo log, which keeps the replaced tensors: the model is not copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headprune.attention import AttentionLayer, HeadArgument, HeadFeatures, is_inside
from headprune.modules import ConfigView, EmptyAttention, MultiheadAttention, convert
from headprune.surgery.features import Counts, Features, groups_left, surviving
from headprune.surgery.hooks import (
    Carried,
    HeadArguments,
    Narrowing,
    Placement,
    Selection,
    SharedPositionBias,
    narrowed,
    placed,
    placed_before,
    restore_whole_bias,
    selected,
    shares_position_bias,
    take_own_arguments,
    take_own_bias,
)
from headprune.surgery.removal import WIDTHS, Removal


class Journal:
    """An undo log: changes to a model, and how to take each back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._slices: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}  # so that what is shared stays shared
        self.changes: list[str] = []  # what was set where, to tell two ways apart

    def undo(self) -> None:
        """Take every change back, the last one first."""
        while self._undo:
            self._undo.pop()()

    def remove(self, model: nn.Module, removal: Removal) -> None:
        """Remove the heads of one `Removal`."""
        for layer in removal.layers:
            self._remove_from(model, layer, removal)

    def _remove_from(self, model: nn.Module, layer: AttentionLayer, removal: Removal) -> None:
        dropped = removal.drop[layer.name]
        attention = model.get_submodule(layer.module)
        stand_in = convert(attention)
        if stand_in is not None:
            self._replace_module(model, layer.module, stand_in)
            attention = stand_in
            for name, outer in model.named_modules():
                if isinstance(outer, nn.TransformerEncoder) and is_inside(layer.module, name):
                    self._set(outer, "use_nested_tensor", False)  # it needs the fused kernel that is gone
        kept = [h for h in range(layer.num_heads) if h not in set(dropped)]
        ghost = not kept and layer.bypass == "ghost"
        if not kept and layer.bypass == "stub":
            self._stub(model, layer)
            return
        if ghost:
            kept = list(layer.units[0])
        assert layer.output_projection is not None
        for part in layer.projections:
            self._slice(model.get_submodule(part.module), surviving(part.features, kept), output=True)
        for part in layer.selections:
            self._select(model.get_submodule(part.module), surviving(part.features, kept))
        shares_bias = shares_position_bias(attention)
        for table in () if shares_bias else layer.tables:
            owner, _, name = table.name.rpartition(".")
            self._slice_table(model.get_submodule(owner), name, surviving(table.indices, kept), table.dim)
        self._cut_output(model, layer, kept, ghost)
        if isinstance(attention, MultiheadAttention):
            known = attention.kept_heads or list(range(layer.num_heads))
            self._set(attention, "kept_heads", [known[h] for h in kept])
            key = next(p for p in layer.projections if p.module.endswith("k_proj"))
            for name in ("bias_k", "bias_v"):
                self._slice_parameter(attention, name, surviving(key.features, kept), dim=2)
        self._correct_counts(model, layer, removal, kept)
        if removal.narrow:
            self._narrow(attention, layer.num_heads * layer.head_dim, len(kept) * layer.head_dim)
        if shares_bias:
            self._index_position_bias(attention, layer.num_heads, kept)
        elif arguments := tuple(a for a in layer.arguments if a.features or removal.cut_arguments):
            self._index_arguments(attention, arguments, layer.num_heads, kept)

    def _cut_output(self, model: nn.Module, layer: AttentionLayer, kept: Sequence[int], ghost: bool) -> None:
        """W_O, or what stands for it, without the removed heads' columns."""
        assert layer.output_projection is not None
        output = model.get_submodule(layer.output_projection.module)
        if layer.concatenates:
            self._place(output, layer.output_projection, [] if ghost else kept, kept)
        else:
            if layer.mixer and layer.gate:
                mixer = model.get_submodule(layer.mixer)
                self._place(mixer, layer.gate, kept, kept, before=True)
                self._select(mixer, surviving(layer.output_projection.features, kept))
            self._slice(output, surviving(layer.output_projection.features, kept), output=False)
            if ghost:
                self._zero(output)

    def _correct_counts(self, model: nn.Module, layer: AttentionLayer, removal: Removal, kept: Sequence[int]) -> None:
        """Correct the numbers of heads that modules hold as attributes or in a config."""
        is_width = WIDTHS[removal.widths]
        for name in (*layer.inner_modules, *(layer.side_modules if removal.side_modules else ())):
            module = model.get_submodule(name)
            counts = Counts(layer, len(kept), groups_left(layer, kept), is_width, name != layer.module)
            for attribute, new in counts.changed(vars(module)).items():
                self._set(module, attribute, new)
            if removal.own_config:
                self._set_config(module, counts)
            for attribute, cache in list(vars(module).items()):  # tensors that were kept for all heads
                if type(cache) is dict and attribute[0] != "_" and any(isinstance(v, Tensor) for v in cache.values()):
                    self._set(module, attribute, {})

    def _slice(self, module: nn.Module, features: Features, *, output: bool) -> None:
        """Keep some input or output features of a linear module."""
        # nn.Linear and convolutions store [out, in, …], transformers' Conv1D [in, out].
        dim = 0 if output == isinstance(module, nn.Linear | nn.modules.conv._ConvNd) else 1
        size = self._slice_parameter(module, "weight", features, dim)
        if output:
            self._slice_parameter(module, "bias", features, 0)
        for name in ("out_features", "out_channels", "nf") if output else ("in_features", "in_channels", "nx"):
            if hasattr(module, name):
                self._set(module, name, size)

    def _carry(self, module: nn.Module, value: Carried, *hooks: Callable[[], RemovableHandle]) -> None:
        """Give a module something that its hooks read, and the hooks too if it has carried nothing of this kind so far."""
        if value.name not in module.__dict__:
            self._undo.extend(register().remove for register in hooks)
        self._set(module, value.name, value)

    def _select(self, module: nn.Module, features: Features) -> None:
        """Pass on only some features of a module's output."""
        selection = Selection(features, Selection.of(module))
        self._carry(module, selection, lambda: module.register_forward_hook(selected))

    def _zero(self, output: nn.Module) -> None:
        """Let a W_O that has just been sliced give nothing."""
        held, old = output._parameters, output._parameters["weight"]
        assert old is not None
        held["weight"] = nn.Parameter(torch.zeros_like(old), requires_grad=old.requires_grad)
        self._undo.append(lambda: held.__setitem__("weight", old))

    def _place(
        self, module: nn.Module, part: HeadFeatures, stay: Sequence[int], kept: Sequence[int], *, before: bool = False
    ) -> None:
        """Put the kept heads' output where it was among all heads, with zeros elsewhere.

        In the output of a module that returns its heads side by side; in the input (``before``) of a norm over all heads.
        """
        self._carry(
            module,
            Placement(part, stay, kept, Placement.of(module)),
            lambda: module.register_forward_pre_hook(placed_before) if before else module.register_forward_hook(placed),
        )

    def _narrow(self, module: nn.Module, width: int, new: int) -> None:
        """Let the inputs of a module that reads the width of its heads from their shape claim the new width."""
        earlier = Narrowing.of(module)
        narrowing = Narrowing(earlier.width if earlier else width, new)
        self._carry(module, narrowing, lambda: module.register_forward_pre_hook(narrowed, with_kwargs=True))

    def _slice_table(self, module: nn.Module, name: str, features: Features, dim: int) -> None:
        """Keep some entries of a parameter or buffer, and correct what its module knows about their number."""
        size = self._slice_parameter(module, name, features, dim)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and name == "weight":
            for statistic in ("running_mean", "running_var"):  # not differentiable, so never traced
                self._slice_parameter(module, statistic, features, dim)
            self._set(module, "num_features", size)
        elif isinstance(module, nn.modules.conv._ConvNd) and name == "weight" and dim == 0:
            if module.groups > 1:  # filters for some features, such as each head's: whole groups go
                self._set(module, "groups", module.groups * size // module.out_channels)
                self._set(module, "in_channels", module.in_channels * size // module.out_channels)
            self._set(module, "out_channels", size)

    def _slice_parameter(self, module: nn.Module, name: str, features: Features, dim: int) -> int:
        held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        old = held.get(name)
        if old is None:
            return 0
        index = features.index(old.shape[dim], old.device)
        key = (id(old), dim, tuple(index.tolist()))
        if key not in self._slices:
            new: Tensor = old.detach().index_select(dim, index)
            self._slices[key] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        new = held[name] = self._slices[key]
        self._undo.append(lambda: held.__setitem__(name, old))
        return new.shape[dim]

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set a plain attribute."""
        had, old = name in module.__dict__, module.__dict__.get(name)
        own = value.own if isinstance(value, ConfigView) else value
        self.changes.append(f"{id(module)} {name} {own if isinstance(own, int | dict | tuple) else type(own)}")
        module.__dict__[name] = value
        self._undo.append(lambda: module.__dict__.update({name: old}) if had else module.__dict__.pop(name, None))

    def _set_config(self, module: nn.Module, counts: Counts) -> None:
        """Give a module a view of its config with its own counts of heads, where it has a config."""
        for attribute, value in list(vars(module).items()):
            if hasattr(value, "to_dict") and not isinstance(value, nn.Module):
                fields = {**vars(value.original), **value.own} if isinstance(value, ConfigView) else vars(value)
                if changed := counts.changed(fields):
                    original, own = (value.original, value.own) if isinstance(value, ConfigView) else (value, {})
                    self._set(module, attribute, ConfigView(original, {**own, **changed}))

    def _replace_module(self, model: nn.Module, name: str, new: nn.Module) -> None:
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        old = parent._modules[child]
        parent._modules[child] = new
        self._undo.append(lambda: parent._modules.__setitem__(child, old))

    def _stub(self, model: nn.Module, layer: AttentionLayer) -> None:
        """Replace the whole attention module by W_O's bias."""
        assert layer.output_projection is not None
        output = model.get_submodule(layer.output_projection.module)
        if layer.output_inside:
            weight = output.weight
            assert isinstance(weight, Tensor)
            width = weight.shape[0] if isinstance(output, nn.Linear) else weight.shape[1]
            bias = output.bias if isinstance(getattr(output, "bias", None), Tensor) else None
            assert bias is None or isinstance(bias, Tensor)
            stub = EmptyAttention(width, bias, layer.output_arity)
        else:
            stub = EmptyAttention(0, None, layer.output_arity)
            self._slice(output, surviving(layer.output_projection.features, ()), output=False)
        self._replace_module(model, layer.module, stub)

    def _index_position_bias(self, attention: nn.Module, num_heads: int, kept: Sequence[int]) -> None:
        earlier: SharedPositionBias | None = SharedPositionBias.of(attention)
        if earlier is None:
            bias = SharedPositionBias(cast(Callable[..., Tensor], attention.compute_bias), num_heads, list(kept))
        else:  # heads of a second prune count within what the first one kept
            bias = SharedPositionBias(earlier.original, earlier.num_heads, [earlier.kept[h] for h in kept])
        self._carry(
            attention,
            bias,
            lambda: attention.register_forward_pre_hook(take_own_bias, with_kwargs=True),
            lambda: attention.register_forward_hook(restore_whole_bias, with_kwargs=True),
        )
        self._set(attention, "compute_bias", bias.compute)

    def _index_arguments(
        self, attention: nn.Module, arguments: tuple[HeadArgument, ...], num_heads: int, kept: Sequence[int]
    ) -> None:
        own, earlier = HeadArguments(arguments, num_heads, list(kept)), HeadArguments.of(attention)
        if earlier:  # heads of a second prune count within what the first one kept
            own = replace(earlier, kept=[earlier.kept[h] for h in kept])
        self._carry(attention, own, lambda: attention.register_forward_pre_hook(take_own_arguments, with_kwargs=True))
