"""The cut. Every change to a model goes through an undo log, which keeps the replaced tensors: the model is not copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, HeadFeatures
from headprune.inputs import model_device
from headprune.offload import is_elsewhere, put, value_of, with_numbers
from headprune.pruned import MultiheadAttention, convert, hooks, is_ours
from headprune.pruned.hooks import Features, HeadArgument, surviving
from headprune.pruned.modules import ConfigView, OnlyBias, emptied
from headprune.pruned.structure import Edited, hold, replace_by_stand_in, set_module
from headprune.surgery.removal import Removal, count_changes, groups_left


class Journal:
    """An undo log: cuts a model, and records how to undo each change.

    Attributes:
        changes: What was set where, to tell two ways of removal apart.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._slices: dict[tuple[Any, ...], Tensor] = {}  # so that what is shared stays shared
        self.changes: list[str] = []

    def undo(self) -> None:
        """Undo every change, the last one first."""
        while self._undo:
            self._undo.pop()()

    def remove(self, model: nn.Module, removal: Removal) -> None:
        """Remove the heads of one `Removal`."""
        for layer in removal.layers:
            self._cut_layer(model, layer, removal)

    def _cut_layer(self, model: nn.Module, layer: AttentionLayer, removal: Removal) -> None:
        """Remove the heads of one layer."""
        dropped = set(removal.drop[layer.name])
        attention = model.get_submodule(layer.module)
        if convert(attention) is not None:
            attention = self._replace_by_stand_in(model, layer.module)
        kept = [h for h in range(layer.num_heads) if h not in dropped]
        ghost = not kept and layer.bypass == "ghost"
        if not kept and layer.bypass == "stub":
            self._replace_by_bias(model, layer)
            return
        if ghost:
            kept = list(layer.units[0])
        for part in layer.projections:
            self._slice(model.get_submodule(part.module), surviving(part.features, kept), output=True)
        for part in layer.selections:
            self._select(model.get_submodule(part.module), surviving(part.features, kept))
        shares_bias = hooks.SharedPositionBias.needed_by(attention)
        for table in () if shares_bias else layer.tables:
            owner, _, name = table.name.rpartition(".")
            self._slice_table(model.get_submodule(owner), name, surviving(table.indices, kept), table.dim)
        self._cut_output(model, layer, kept, ghost)
        if is_ours(attention, MultiheadAttention):
            known: Any = attention.kept_heads or list(range(layer.num_heads))
            self._set(attention, "kept_heads", [known[h] for h in kept])
            key = next(part for part in layer.projections if part.module.endswith("k_proj"))
            for name in ("bias_k", "bias_v"):
                self._slice_tensor(attention, name, surviving(key.features, kept), dim=2)
        self._correct_counts(model, layer, removal, kept)
        if removal.narrow:
            self._narrow(attention, layer.num_heads * layer.head_dim, len(kept) * layer.head_dim)
        if shares_bias:
            self._index_position_bias(attention, layer.num_heads, kept)
        elif arguments := tuple(a for a in layer.arguments if a.features or removal.cut_arguments):
            self._index_arguments(attention, arguments, layer.num_heads, kept)

    def _cut_output(self, model: nn.Module, layer: AttentionLayer, kept: Sequence[int], ghost: bool) -> None:
        """Remove heads' columns from W_O, or from what stands for it."""
        place = layer.output_projection
        assert place is not None
        output, left = model.get_submodule(place.module), surviving(place.features, kept)
        if layer.concatenates:
            self._place(output, place, [] if ghost else kept, kept)
            return
        if layer.mixer and layer.gate:
            mixer = model.get_submodule(layer.mixer)
            self._place(mixer, layer.gate, kept, kept, before=True)
            self._select(mixer, left)
        self._slice(output, left, output=False, zero=ghost)

    def _correct_counts(self, model: nn.Module, layer: AttentionLayer, removal: Removal, kept: Sequence[int]) -> None:
        """Correct the numbers of heads that modules hold as attributes or in a config, and drop what they cached for all heads."""
        left = len(kept), groups_left(layer, kept)
        for name in (*layer.inner_modules, *(layer.side_modules if removal.side_modules else ())):
            module = model.get_submodule(name)
            changes = partial(count_changes, layer=layer, left=left, removal=removal, beside=name != layer.module)
            for attribute, new in changes(vars(module)).items():
                self._set(module, attribute, new)
            if removal.own_config:
                self._set_config(module, changes)
            for attribute, cache in list(vars(module).items()):
                if type(cache) is dict and attribute[0] != "_" and any(isinstance(v, Tensor) for v in cache.values()):
                    self._set(module, attribute, {})

    # -- tensors ------------------------------------------------------------------------------------

    def _slice(self, module: nn.Module, features: Features, *, output: bool, zero: bool = False) -> None:
        """Keep some input or output features of a linear module; as zeros, where it shall give nothing."""
        # nn.Linear and convolutions store [out, in, …], transformers' Conv1D [in, out].
        dim = 0 if output == isinstance(module, nn.Linear | nn.modules.conv._ConvNd) else 1
        size = self._slice_tensor(module, "weight", features, dim, zero)
        if output:
            self._slice_tensor(module, "bias", features, 0)
        for name in ("out_features", "out_channels", "nf") if output else ("in_features", "in_channels", "nx"):
            if hasattr(module, name):
                self._set(module, name, size)

    def _slice_table(self, module: nn.Module, name: str, features: Features, dim: int) -> None:
        """Keep some entries of a parameter or buffer, and correct what its module knows about their number."""
        size = self._slice_tensor(module, name, features, dim)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and name == "weight":
            for statistic in ("running_mean", "running_var"):  # not differentiable, so never traced
                self._slice_tensor(module, statistic, features, dim)
            self._set(module, "num_features", size)
        elif isinstance(module, nn.modules.conv._ConvNd) and name == "weight" and dim == 0:
            if module.groups > 1:  # filters for some features, such as each head's: whole groups go
                self._set(module, "groups", module.groups * size // module.out_channels)
                self._set(module, "in_channels", module.in_channels * size // module.out_channels)
            self._set(module, "out_channels", size)

    def _slice_tensor(self, module: nn.Module, name: str, features: Features, dim: int, zero: bool = False) -> int:
        """Keep some entries of a module's parameter or buffer, if it has one of this name, perhaps as zeros; returns how many."""
        held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        old = held.get(name)
        if old is None:
            return 0
        index = features.index(old.shape[dim], torch.device("cpu"))
        elsewhere = is_elsewhere(module, name)  # then it is loaded, cut and stored again
        key = (id(old), dim, tuple(index.tolist()), zero)
        if elsewhere or key not in self._slices:
            whole = value_of(module, name) if elsewhere else old.detach()
            new: Tensor = whole.index_select(dim, index.to(whole.device))
            new = torch.zeros_like(new) if zero else new
            if not elsewhere:
                self._slices[key] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        if elsewhere:
            self._undo.append(put(module, name, new))
        else:
            if name in module._non_persistent_buffers_set:  # until it is undone, it is saved with the weights
                self._undo.append(partial(module._non_persistent_buffers_set.add, name))
            hold(module, name, self._slices[key])
            self._undo.append(partial(held.__setitem__, name, old))
        self._note_edited(module, tensors=(name,))
        return len(index)

    # -- attributes ---------------------------------------------------------------------------------

    def _remember(self, module: nn.Module, *names: str) -> None:
        """Give some attributes of a module their values of now, or none, when all is undone."""
        before = {name: vars(module)[name] for name in names if name in vars(module)}
        self._undo.append(lambda: vars(module).update(before))
        self._undo.extend(partial(vars(module).pop, name, None) for name in names)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set a plain attribute."""
        own = value.own if is_ours(value, ConfigView) else value
        self.changes.append(f"{id(module)} {name} {own if isinstance(own, int | dict | tuple | list) else type(own)}")
        self._remember(module, name)
        vars(module)[name] = value
        if isinstance(value, int | list):
            self._note_edited(module, numbers=(name,))

    def _note_edited(self, module: nn.Module, tensors: Sequence[str] = (), numbers: Sequence[str] = ()) -> None:
        """Record which tensors and numbers of a module differ from its class's."""
        self._remember(module, Edited.name)
        Edited.add(module, tensors, numbers)

    def _set_config(self, module: nn.Module, count_changes: Callable[[dict[str, Any]], dict[str, int]]) -> None:
        """Give a module a view of its config with its own counts of heads, where it has a config."""
        for attribute, value in list(vars(module).items()):
            if hasattr(value, "to_dict") and not isinstance(value, nn.Module):
                original, own = (value.original, value.own) if is_ours(value, ConfigView) else (value, {})
                if changes := count_changes({**vars(original), **own}):
                    self._set(module, attribute, ConfigView(original, {**own, **changes}))

    # -- hooks; the heads of a second prune count within what the first one kept ---------------------------

    def _attach(self, module: nn.Module, data: hooks.HookData) -> None:
        """Give a module data and the hooks that read it."""
        self._remember(module, data.name, "compute_bias")
        self._undo.extend(handle.remove for handle in data.attach(module))
        self.changes.append(f"{id(module)} {data.name}")

    def _select(self, module: nn.Module, features: Features) -> None:
        """Pass on only some features of a module's output."""
        earlier = hooks.Selection.of(module)
        self._attach(module, hooks.Selection((*(earlier.stages if earlier else ()), features)))

    def _place(
        self, module: nn.Module, part: HeadFeatures, stay: Sequence[int], kept: Sequence[int], *, before: bool = False
    ) -> None:
        """Put the kept heads' output where it was among all heads, with zeros elsewhere.

        In the output of a module that returns its heads side by side; in the input (``before``) of a norm over all heads.
        """
        earlier = hooks.Placement.of(module)
        computed = sorted(f for h in kept for f in part.features[h])
        target = sorted(f for h in stay for f in part.features[h])
        # The trace before a second prune saw what the first one placed, at the same features.
        width = earlier.width if earlier else sum(map(len, part.features))
        self._attach(module, hooks.Placement(width, tuple(computed.index(f) for f in target), tuple(target), before))

    def _narrow(self, module: nn.Module, width: int, new: int) -> None:
        """Let the inputs of a module that reads the width of its heads from their shape claim the new width."""
        earlier = hooks.Narrowing.of(module)
        self._attach(module, hooks.Narrowing(earlier.width if earlier else width, new))

    def _index_position_bias(self, attention: nn.Module, num_heads: int, kept: Sequence[int]) -> None:
        """Let a T5-style layer take its heads of the shared bias."""
        if earlier := hooks.SharedPositionBias.of(attention):
            num_heads, kept = earlier.num_heads, [earlier.kept[h] for h in kept]
        self._attach(attention, hooks.SharedPositionBias(num_heads, tuple(kept)))

    def _index_arguments(
        self, attention: nn.Module, arguments: tuple[HeadArgument, ...], num_heads: int, kept: Sequence[int]
    ) -> None:
        """Let a module take its heads of arguments that hold something for each."""
        if earlier := hooks.HeadArguments.of(attention):
            arguments, num_heads = earlier.arguments, earlier.num_heads
            kept = [earlier.kept[h] for h in kept]
        self._attach(attention, hooks.HeadArguments(arguments, num_heads, tuple(kept)))

    # -- modules ------------------------------------------------------------------------------------

    def _replace(self, model: nn.Module, name: str, new: nn.Module) -> None:
        """Replace a module by another."""
        self._undo.append(partial(set_module, model, name, set_module(model, name, new)))

    def _replace_by_stand_in(self, model: nn.Module, name: str) -> nn.Module:
        """Replace a module by its stand-in for good; returns that."""
        old = model.get_submodule(name)
        for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder)):
            self._remember(encoder, "use_nested_tensor")
        self._undo.append(partial(set_module, model, name, old))
        return replace_by_stand_in(model, name)

    def _replace_by_bias(self, model: nn.Module, layer: AttentionLayer) -> None:
        """Replace the whole attention module by W_O's bias."""
        assert layer.output_projection is not None
        attention, name = model.get_submodule(layer.module), layer.output_projection.module
        output: Any = model.get_submodule(name)
        bias: Tensor | None = getattr(output, "bias", None)
        if bias is not None and is_elsewhere(output, "bias"):  # so small that it stays where it is added
            trained, bias = bias.requires_grad, value_of(output, "bias").to(model_device(model))
            bias.requires_grad_(trained)
        if layer.output_inside:
            width = output.weight.shape[0] if isinstance(output, nn.Linear) else output.weight.shape[1]
            stub = emptied(attention, width, bias, layer.output_arity)
        else:
            stub = emptied(attention, 0, None, layer.output_arity)
            self._replace(model, name, with_numbers(OnlyBias.of(output, bias)))
        self._replace(model, layer.module, with_numbers(stub))
