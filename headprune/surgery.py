"""Remove heads for real, and prove it: the pruned model must answer as the masked one did.

Every change goes through a journal, so a prune that cannot be proved is undone and the model is bit
for bit what it was. The journal keeps the replaced tensors, so no whole-model copy is made.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, HeadArgument, HeadFeatures, Heads, check_heads, ghosts
from headprune.errors import HeadPruneError, PruneError, first_line
from headprune.gates import mask
from headprune.inputs import Example, call, model_device, move, scrambled, tensors, usable, variants
from headprune.modules import (
    ConfigView,
    EmptyAttention,
    MultiheadAttention,
    convert,
    exact_attention,
    forget_compiled,
    uncompiled,
)
from headprune.planning import PruningPlan
from headprune.trace import evaluating, find_attention

_RECORD = "_headprune_record"
_TRIED = "tried before"  # another way that comes to the same changes

# Relative tolerances of the proof: what summing the same products in another order may change.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Proof:
    """What `prune` checked.

    Attributes:
        difference: Largest difference between the masked and the pruned model's outputs, as a share of
            that output's largest value.
        tolerance: What ``difference`` had to stay under.
        inputs: How many differently shaped inputs were compared; generation with a cache counts as one.
        ghosts: Layers without heads that still hold one head with zero output (for their cache).
    """

    difference: float
    tolerance: float
    inputs: int
    ghosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Removal:
    """One successful prune, enough to repeat it on a fresh copy of the model (`headprune.load` does)."""

    layers: tuple[AttentionLayer, ...]
    drop: Heads
    widths: str
    cut_arguments: bool
    own_config: bool = False  # whether the modules' counts in their config change too
    side_modules: bool = False  # whether modules beside the attention computation count its heads as well
    narrow: bool = False  # whether the modules are told that their input is as narrow as their heads are now

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": [layer.to_json() for layer in self.layers],
            "drop": self.drop,
            "widths": self.widths,
            "cut_arguments": self.cut_arguments,
            "own_config": self.own_config,
            "side_modules": self.side_modules,
            "narrow": self.narrow,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Removal:
        layers = tuple(AttentionLayer.from_json(d) for d in data["layers"])
        drop = {k: list(v) for k, v in data["drop"].items()}
        flags = {name: data.get(name, False) for name in ("cut_arguments", "own_config", "side_modules", "narrow")}
        return cls(layers, drop, data["widths"], **flags)


def prune(
    model: nn.Module,
    plan: PruningPlan | Mapping[str, Sequence[int]],
    example: Example,
    *,
    layers: Sequence[AttentionLayer] | None = None,
) -> Proof:
    """Remove heads in place, and prove that the model answers as if they were masked.

    Args:
        model: Any model with attention. May have been pruned before.
        plan: A `PruningPlan`, or ``{layer_name: [head, ...]}`` to remove.
        example: A batch for the trace and for the proof; a second, differently shaped one is derived from it.
        layers: From `headprune.find_attention`, to save the trace.

    Returns:
        The `Proof`.

    Raises:
        HeadPruneError: An unknown layer or head, heads that cannot go alone, a plan for another model.
        PruneError: The pruned model would not have been the masked one; the model is unchanged.
    """
    if isinstance(plan, PruningPlan):
        plan.check_model(model)
    layers = find_attention(model, example) if layers is None else layers
    drop = check_heads(plan.drop if isinstance(plan, PruningPlan) else plan, layers)
    touched = [layer for layer in layers if layer.name in drop]
    modes = {layer.name: model.get_submodule(layer.module).training for layer in touched if layer.prunable}
    for layer in touched:
        _check_possible(layer, drop[layer.name])
        _check_present(model, layer)

    tolerance = max((_TOLERANCE.get(p.dtype, 0.0) for p in model.parameters()), default=_TOLERANCE[torch.float32])
    with torch.inference_mode(False), uncompiled(), evaluating(model), torch.no_grad():
        inputs = _inputs(model, usable(move(example, model_device(model))))
        reference = _references(model, inputs, drop, layers)
        failures, tried = [], set[tuple[str, ...]]()
        for removal in _ways(touched, drop):
            journal = _Journal()
            try:
                difference, why = _attempt(model, journal, removal, reference, tolerance, tried)
            except BaseException:  # an interrupt must not leave half a prune either
                journal.undo()
                raise
            if not why:
                break
            journal.undo()
            failures += [why] if why != _TRIED else []
        else:
            culprits = _culprits(model, touched, drop, inputs, layers, tolerance)
            names = ", ".join(c.name for c in culprits[:3]) or "these layers together"
            raise PruneError(
                f"The heads of {names} cannot be removed exactly: {failures[-1]}. The model is unchanged.",
                "Mask them instead (headprune.mask), or leave that layer out of the plan.",
            )
    forget_compiled()
    for name, training in modes.items():  # a stand-in or stub is new: it takes the mode of what it replaced
        model.get_submodule(name.partition("#")[0]).train(training)
    _remember(model, removal)
    return Proof(difference, tolerance, len(reference), _ghosts(touched, drop))


def remove(model: nn.Module, removal: Removal) -> None:
    """Repeat a removal without a proof: for a skeleton whose weights are loaded afterwards."""
    _Journal().remove(model, removal)
    _remember(model, removal)


def _remember(model: nn.Module, removal: Removal) -> None:
    record(model).append(removal)
    ghosts(model).update(_ghosts(removal.layers, removal.drop))


def record(model: nn.Module) -> list[Removal]:
    """The removals that ``model`` has been through, oldest first."""
    if _RECORD not in model.__dict__:
        model.__dict__[_RECORD] = []
    removals: list[Removal] = model.__dict__[_RECORD]
    return removals


# -- the proof --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reference:
    """What a pruned model has to answer.

    Attributes:
        batch: The input.
        masked: The masked model's outputs.
        effect: How much the mask changed each output, at most; infinite where that is not known.
    """

    batch: Example
    masked: list[Tensor]
    effect: list[float]


def _references(
    model: nn.Module, inputs: Sequence[Example], drop: Heads, layers: Sequence[AttentionLayer]
) -> list[_Reference]:
    """The masked model's answers to those inputs that it takes; it must take the first."""
    found = []
    with exact_attention(model):  # dense and masked by the same arithmetic
        for number, batch in enumerate(inputs):
            try:
                with mask(model, drop, layers=layers):
                    masked = _answer(model, batch)
                if isinstance(batch, _Prompt):
                    found.append(_Reference(batch, (sure := _sure(masked)), [float("inf")] * len(sure)))
                    continue
                effect = [_change(m, d) for m, d in zip(masked, _answer(model, batch), strict=True)]
                found.append(_Reference(batch, masked, effect))
            except HeadPruneError:
                raise
            except Exception as error:
                if number == 0:
                    raise HeadPruneError(
                        f"The model does not run on the example: {type(error).__name__}: {first_line(error)}.",
                        "Pass what its forward() takes: a dict of tensors, a tensor or a tuple.",
                    ) from error
                # A model may refuse an input that was only derived, or not generate from its example alone.
    if not any(torch.isfinite(t).any() for t in found[0].masked):
        raise HeadPruneError("The masked model's outputs are not finite, so a prune cannot be proved on them.")
    return found


def _change(masked: Tensor, dense: Tensor) -> float:
    """How much a mask changed an output; infinitely, if it has another shape now (a length that the model decides)."""
    if masked.shape != dense.shape:
        return float("inf")
    return (masked - dense).nan_to_num(0, 0, 0).abs().max().item() if masked.numel() else 0.0


def _inputs(model: nn.Module, example: Example) -> list[Example]:
    """The example, one of another shape and padding, one of random content, and a prompt to go on from.

    An example whose tokens are all alike makes attention uniform, and so hides a wrong one.
    """
    prompt = _prompt(model, example)
    return [example, *variants(example)[:2], *scrambled(example, _vocabulary(model)), *([prompt] if prompt else [])]


def _vocabulary(model: nn.Module) -> int:
    """How many tokens the model knows; 0 where it knows none, or does not say."""
    try:
        table = cast(Any, model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return 0
    return table.num_embeddings if isinstance(table, nn.Embedding) else 0


def _attempt(
    model: nn.Module,
    journal: _Journal,
    removal: Removal,
    reference: Sequence[_Reference],
    tolerance: float,
    tried: set[tuple[str, ...]],
) -> tuple[float, str]:
    """Remove and compare. Returns the largest relative difference, and why it failed ("" if it did not)."""
    worst = 0.0
    try:
        journal.remove(model, removal)
        if (changes := tuple(journal.changes)) in tried:
            return worst, _TRIED
        tried.add(changes)
        for each in reference:
            got = _answer(model, each.batch)
            got = got[: len(each.masked)] if isinstance(each.batch, _Prompt) else got
            if len(got) != len(each.masked) or got[0].shape != each.masked[0].shape:
                return worst, "the pruned model's outputs have another shape"
            for g, e, effect in zip(got, each.masked, each.effect, strict=True):
                if _per_head(g.shape, e.shape):
                    continue
                if g.shape != e.shape:
                    return worst, "the pruned model's outputs have another shape"
                finite = torch.isfinite(e)
                if not torch.equal(finite, torch.isfinite(g)):
                    return worst, "the pruned model's outputs are not finite where the masked one's are"
                if not finite.any():
                    continue
                scale = e[finite].abs().max().clamp(min=1e-30).item()
                difference = (g[finite] - e[finite]).abs().max().item()
                worst = max(worst, difference / scale)
                # A model in which these heads hardly count would pass whatever is done to them.
                if difference > max(0.05 * effect, 0.2 * tolerance * scale):
                    return worst, f"its outputs differ from the masked model's by {worst:.2g} of their largest value"
    except Exception as error:
        return worst, f"the pruned model does not run ({type(error).__name__}: {first_line(error)})"
    if worst > tolerance:
        return worst, f"its outputs differ from the masked model's by {worst:.2g} of their largest value"
    return worst, ""


def _culprits(
    model: nn.Module,
    touched: Sequence[AttentionLayer],
    drop: Heads,
    inputs: Sequence[Example],
    layers: Sequence[AttentionLayer],
    tolerance: float,
) -> list[AttentionLayer]:
    """The layers that fail when pruned alone."""
    culprits = []
    for layer in touched:
        alone = {layer.name: drop[layer.name]}
        reference = _references(model, inputs, alone, layers)
        tried = set[tuple[str, ...]]()
        for removal in _ways([layer], alone):
            journal = _Journal()
            why = _attempt(model, journal, removal, reference, tolerance, tried)[-1]
            journal.undo()
            if not why:
                break
        else:
            culprits.append(layer)
    return culprits


def _per_head(got: torch.Size, expected: torch.Size) -> bool:
    """Whether a tensor merely has fewer heads now, as attention maps and caches have."""
    fewer = [g < e for g, e in zip(got, expected, strict=False) if g != e]
    return len(got) == len(expected) > 2 and fewer == [True]


class _Prompt(dict[str, Any]):
    """An example to go on from, token by token, with a cache."""


def _prompt(model: nn.Module, example: Example) -> _Prompt | None:
    """The part of an example that a text generator goes on from; None if the model is none."""
    able = getattr(model, "can_generate", None)
    if not isinstance(example, Mapping) or "input_ids" not in example or not callable(able) or not able():
        return None
    return _Prompt({k: v for k, v in example.items() if not k.startswith(("decoder_", "labels"))})


def _continued(model: nn.Module, prompt: _Prompt) -> list[Tensor]:
    """The scores of three tokens that the model generates, greedily and with a cache."""
    pad = getattr(cast(Any, model).config, "pad_token_id", None)
    out = cast(Any, model).generate(
        **prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=1, use_cache=True, output_logits=True,
        return_dict_in_generate=True, pad_token_id=pad if isinstance(pad, int) else 0,
    )  # fmt: skip
    return [s.detach().float() for s in out.logits]


def _sure(scores: list[Tensor]) -> list[Tensor]:
    """Scores up to the first token that is chosen by a hair: rounding may choose another, and all after it differ."""
    for step, each in enumerate(scores, 1):
        first, second = each.topk(2, dim=-1).values.unbind(-1)
        if ((first - second) <= 1e-2 * each.abs().amax(-1)).any():
            return scores[:step]
    return scores


def _answer(model: nn.Module, batch: Example) -> list[Tensor]:
    """What the model answers, with the same random numbers each time: some draw masks or noise even in evaluation."""
    device = model_device(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        if isinstance(batch, _Prompt):
            return _continued(model, batch)
        return answers(call(model, batch))


def answers(output: Any) -> list[Tensor]:
    """The outputs that a prune must preserve, in float32 or wider: every floating-point tensor but attention weights.

    Attention weights have a head dimension, or are a mean over heads: they cannot stay the same.
    """
    if isinstance(output, Mapping):
        output = {k: v for k, v in output.items() if not k.endswith("attentions") and k != "past_key_values"}
    elif hasattr(output, "__dict__") and not isinstance(output, Tensor):
        output = vars(output)
    found = [t.detach() for t in tensors(output) if t.is_floating_point()]
    found = found[:1] + [t for t in found[1:] if not _is_distribution(t)]
    if not found:
        raise HeadPruneError("The model returns no floating-point tensor that a prune could be proved on.")
    return [t if t.dtype == torch.float64 else t.float() for t in found]


def _is_distribution(t: Tensor) -> bool:
    """Whether a tensor looks like attention weights: numbers from 0 to 1 that sum to 1 (or 0, if masked) over the keys."""
    if t.ndim < 3:
        return False
    sums = t.sum(-1)
    return bool((t >= 0).all() and (((sums - 1).abs() < 1e-3) | (sums == 0)).all())


# -- the cut ----------------------------------------------------------------------------------

# Which integers that equal heads * head_dim are to shrink with the heads: some models reshape by them. As few as
# possible, since one that only scales (a softmax by the square root of the width) must stay; the proof picks.
_WIDTHS: dict[str, Callable[[str], bool]] = {
    "none": lambda name: False,
    "inner": lambda name: name not in {"embed_dim", "d_model", "hidden_size", "dim", "hidden_dim", "n_embd", "width"},
    "all": lambda name: True,
}


def _ways(layers: Sequence[AttentionLayer], drop: Heads) -> list[Removal]:
    """What a trace cannot decide, tried in this order; the proof picks."""
    # An argument with as many entries as heads may be something for each head; where it is, leaving it fails.
    arguments = (False, True) if any(not a.features for layer in layers for a in layer.arguments) else (False,)
    sides = (False, True) if any(layer.side_modules for layer in layers) else (False,)
    return [
        Removal(tuple(layers), drop, widths, cut, own, side, narrow)
        for narrow in (False, True)
        for side in sides
        for own in (False, True)
        for cut in arguments
        for widths in _WIDTHS
    ]


def _check_possible(layer: AttentionLayer, dropped: Sequence[int]) -> None:
    """Refuse what cannot be exact, with the way out."""
    if not layer.prunable:
        raise HeadPruneError(f"Layer {layer.name} cannot be pruned: {layer.reason}.")
    if not layer.groups:
        return
    left = [len(set(unit) - set(dropped)) for unit in layer.units]
    if len({n for n in left if n}) > 1:
        counts = ", ".join(map(str, left))
        raise HeadPruneError(
            f"Layer {layer.name}: its key/value groups would keep {counts} query heads, but groups must stay equal.",
            f"Drop whole groups (such as heads {', '.join(map(str, layer.units[0]))}) "
            "or the same number of heads from each.",
        )


def _check_present(model: nn.Module, layer: AttentionLayer) -> None:
    """Refuse weights that are not in memory: they cannot be cut, nor the result proved."""
    for name, parameter in model.get_submodule(layer.module).named_parameters():
        if parameter.is_meta:
            raise HeadPruneError(
                f"Layer {layer.name} cannot be pruned: {name} is not in memory (offloaded, or on the meta device).",
                "Load the weights first, or onto a device that holds them all.",
            )


def _ghosts(layers: Sequence[AttentionLayer], drop: Heads) -> tuple[str, ...]:
    return tuple(a.name for a in layers if a.bypass == "ghost" and len(drop[a.name]) == a.num_heads)


class _Journal:
    """Changes to a model, each with its way back."""

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
        dropped, is_width = removal.drop[layer.name], _WIDTHS[removal.widths]
        attention = model.get_submodule(layer.module)
        stand_in = convert(attention)
        if stand_in is not None:
            self._replace_module(model, layer.module, stand_in)
            attention = stand_in
            for name, outer in model.named_modules():
                if isinstance(outer, nn.TransformerEncoder) and f"{layer.module}.".startswith(
                    f"{name}." if name else ""
                ):
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
            self._slice(model.get_submodule(part.module), _surviving(part, kept), output=True)
        for part in layer.selections:
            self._select(model.get_submodule(part.module), _surviving(part, kept))
        shares_bias = _shares_position_bias(attention)
        for table in () if shares_bias else layer.tables:
            owner, _, name = table.name.rpartition(".")
            stay = _surviving(HeadFeatures(owner, table.indices), kept)
            self._slice_table(model.get_submodule(owner), name, stay, table.dim)
        output = model.get_submodule(layer.output_projection.module)
        if layer.concatenates:
            self._place(output, layer.output_projection, [] if ghost else kept, kept)
        else:
            if layer.mixer and layer.gate:
                mixer, heads = model.get_submodule(layer.mixer), HeadFeatures(layer.mixer, layer.gate.features)
                self._place(mixer, heads, kept, kept, before=True)
                self._select(mixer, _surviving(layer.output_projection, kept))
            self._slice(output, _surviving(layer.output_projection, kept), output=False)
            if ghost:
                self._zero(output)
        if isinstance(attention, MultiheadAttention):
            known = attention.kept_heads or list(range(layer.num_heads))
            self._set(attention, "kept_heads", [known[h] for h in kept])
            key = next(p for p in layer.projections if p.module.endswith("k_proj"))
            for name in ("bias_k", "bias_v"):
                self._slice_parameter(attention, name, _surviving(key, kept), dim=2)
        for name in (*layer.inner_modules, *(layer.side_modules if removal.side_modules else ())):
            module = model.get_submodule(name)
            counts = _Counts(layer, len(kept), _groups_left(layer, kept), is_width, name != layer.module)
            for attribute, new in counts.changed(vars(module)).items():
                self._set(module, attribute, new)
            if removal.own_config:
                self._set_config(module, counts)
            for attribute, cache in list(vars(module).items()):  # tensors that were kept for all heads
                if type(cache) is dict and attribute[0] != "_" and any(isinstance(v, Tensor) for v in cache.values()):
                    self._set(module, attribute, {})
        if removal.narrow:
            self._narrow(attention, layer.num_heads * layer.head_dim, len(kept) * layer.head_dim)
        if shares_bias:
            self._index_position_bias(attention, layer.num_heads, kept)
        elif arguments := tuple(a for a in layer.arguments if a.features or removal.cut_arguments):
            self._index_arguments(attention, arguments, layer.num_heads, kept)

    def _slice(self, module: nn.Module, features: _Features, *, output: bool) -> None:
        """Keep some input or output features of a linear module."""
        linear = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        dim = (
            0 if output == linear else 1
        )  # nn.Linear and convolutions store [out, in, …], transformers' Conv1D [in, out]
        size = self._slice_parameter(module, "weight", features, dim)
        if output:
            self._slice_parameter(module, "bias", features, 0)
        for name in ("out_features", "out_channels", "nf") if output else ("in_features", "in_channels", "nx"):
            if hasattr(module, name):
                self._set(module, name, size)

    def _select(self, module: nn.Module, features: _Features) -> None:
        """Let only some features of a module's output through."""
        earlier: _Selection | None = module.__dict__.get("_headprune_selection")
        if earlier is None:
            self._undo.append(module.register_forward_hook(_selected).remove)
        self._set(module, "_headprune_selection", _Selection(features, earlier))

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

        What returns its heads side by side does so to its output, a norm over all of them to its input (``before``).
        """
        earlier: _Placement | None = module.__dict__.get("_headprune_placement")
        if earlier is None:
            hook = module.register_forward_pre_hook(_placed_before) if before else module.register_forward_hook(_placed)
            self._undo.append(hook.remove)
        self._set(module, "_headprune_placement", _Placement(part, list(stay), list(kept), earlier))

    def _narrow(self, module: nn.Module, width: int, new: int) -> None:
        """Tell a module that reads the width of its heads from its input's shape how wide they are now."""
        earlier: tuple[int, int] | None = module.__dict__.get("_headprune_narrow")
        if earlier is None:
            self._undo.append(module.register_forward_pre_hook(_told_narrow, with_kwargs=True).remove)
        self._set(module, "_headprune_narrow", (earlier[0] if earlier else width, new))

    def _slice_table(self, module: nn.Module, name: str, features: _Features, dim: int) -> None:
        """Keep some entries of a parameter or buffer, and what its module notes of their number."""
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

    def _slice_parameter(self, module: nn.Module, name: str, features: _Features, dim: int) -> int:
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

    def _set_config(self, module: nn.Module, counts: _Counts) -> None:
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
        """Take the whole attention module out; what stays is W_O's bias."""
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
            self._slice(output, _Features(frozenset(), _all_features(layer.output_projection)), output=False)
        self._replace_module(model, layer.module, stub)

    def _index_position_bias(self, attention: nn.Module, num_heads: int, kept: Sequence[int]) -> None:
        earlier: _SharedPositionBias | None = attention.__dict__.get("_headprune_bias")
        if earlier is None:
            bias = _SharedPositionBias(cast(Callable[..., Tensor], attention.compute_bias), num_heads, list(kept))
            handles = [
                attention.register_forward_pre_hook(_take_own_bias, with_kwargs=True),
                attention.register_forward_hook(_restore_whole_bias, with_kwargs=True),
            ]
            self._undo.extend(handle.remove for handle in handles)
        else:  # heads of a second prune count within what the first one kept
            bias = _SharedPositionBias(earlier.original, earlier.num_heads, [earlier.kept[h] for h in kept])
        self._set(attention, "_headprune_bias", bias)
        self._set(attention, "compute_bias", bias.compute)

    def _index_arguments(
        self, attention: nn.Module, arguments: tuple[HeadArgument, ...], num_heads: int, kept: Sequence[int]
    ) -> None:
        earlier: _HeadArguments | None = attention.__dict__.get("_headprune_arguments")
        if earlier is None:
            own = _HeadArguments(arguments, num_heads, list(kept))
            self._undo.append(attention.register_forward_pre_hook(_take_own_arguments, with_kwargs=True).remove)
        else:  # heads of a second prune count within what the first one kept
            own = _HeadArguments(earlier.arguments, earlier.num_heads, [earlier.kept[h] for h in kept])
        self._set(attention, "_headprune_arguments", own)


@dataclass(frozen=True)
class _HeadArguments:
    """Which entries of its arguments a pruned attention module takes."""

    arguments: tuple[HeadArgument, ...]
    num_heads: int
    kept: list[int]

    def take(self, value: Any, argument: HeadArgument) -> Any:
        if argument.features and isinstance(value, Tensor):
            features = _surviving(HeadFeatures("", argument.features), self.kept)
            return value.index_select(argument.dim, features.index(value.shape[argument.dim], value.device))
        if not isinstance(value, Tensor) or value.ndim <= argument.dim or value.shape[argument.dim] % self.num_heads:
            return value
        if argument.folded:  # (batch * heads, …)
            return value.reshape(-1, self.num_heads, *value.shape[1:])[:, self.kept].flatten(0, 1)
        return value.index_select(argument.dim, torch.tensor(self.kept, device=value.device))


def _take_own_arguments(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    own: _HeadArguments = attention.__dict__["_headprune_arguments"]
    positional = list(args)
    for argument in own.arguments:
        if isinstance(argument.key, int):
            if argument.key < len(positional):
                positional[argument.key] = own.take(positional[argument.key], argument)
        elif argument.key in kwargs:
            kwargs = {**kwargs, argument.key: own.take(kwargs[argument.key], argument)}
    return tuple(positional), kwargs


class _Selection:
    """Which features of a module's output pass on."""

    def __init__(self, features: _Features, earlier: _Selection | None) -> None:
        self.features, self.earlier = features, earlier

    def take(self, output: Tensor) -> Tensor:
        if self.earlier is not None:  # indices of a second prune count within what the first one kept
            output = self.earlier.take(output)
        return output.index_select(-1, self.features.index(output.shape[-1], output.device))


def _selected(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    selection: _Selection = module.__dict__["_headprune_selection"]
    return selection.take(output)


class _Placement:
    """Where the heads that are left belong among the features that a module without W_O returned."""

    def __init__(self, part: HeadFeatures, stay: list[int], kept: list[int], earlier: _Placement | None) -> None:
        features = [f for h in stay for f in part.features[h]]
        computed = sorted(f for h in kept for f in part.features[h])
        # What a second prune traced was placed already, at the same features.
        self.width: int = sum(map(len, part.features)) if earlier is None else earlier.width
        self.source = [computed.index(f) for f in sorted(features)]
        self.target = sorted(features)

    def place(self, output: Tensor) -> Tensor:
        """``output``, which has the kept heads, with a place for every head."""
        source, target = (torch.tensor(i, dtype=torch.long, device=output.device) for i in (self.source, self.target))
        whole = output.new_zeros(*output.shape[:-1], self.width)
        return whole.index_copy(-1, target, output.index_select(-1, source))


def _placed(module: nn.Module, args: Any, output: Any) -> Any:
    placement: _Placement = module.__dict__["_headprune_placement"]
    if isinstance(output, tuple):
        return (placement.place(output[0]), *output[1:])
    return placement.place(output)


def _placed_before(module: nn.Module, args: Any) -> Any:
    placement: _Placement = module.__dict__["_headprune_placement"]
    return (placement.place(args[0]), *args[1:])


class _NarrowTensor(Tensor):
    """A tensor that says that it is narrower than it is, to code that sizes its heads by its input's last dimension.

    What is computed from it is a plain tensor; only swapping other dimensions keeps the pretence.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    said: int

    @classmethod
    def of(cls, tensor: Tensor, said: int) -> _NarrowTensor:
        narrow = tensor.as_subclass(cls)
        narrow.said = said
        return narrow

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((*Tensor.size(self)[:-1], self.said))

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.shape if dim is None else self.shape[dim]

    def transpose(self, dim0: int, dim1: int) -> Tensor:  # type: ignore[override]
        swapped = Tensor.transpose(self, dim0, dim1)
        return (
            swapped if self.ndim - 1 in (dim0 % self.ndim, dim1 % self.ndim) else _NarrowTensor.of(swapped, self.said)
        )


def _told_narrow(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    width, said = module.__dict__["_headprune_narrow"]

    def tell(value: Any) -> Any:
        wide = (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim in (2, 3)
            and value.shape[-1] == width
        )
        return _NarrowTensor.of(value, said) if wide else value

    return tuple(map(tell, args)), {k: tell(v) for k, v in kwargs.items()}


@dataclass(frozen=True)
class _Features:
    """Features of a projection that stay: all but those that belong to removed heads alone."""

    kept: frozenset[int]
    owned: frozenset[int]  # features that belong to some head; the others always stay

    def index(self, size: int, device: torch.device) -> Tensor:
        stay = [i for i in range(size) if i in self.kept or i not in self.owned]
        return torch.tensor(stay, dtype=torch.long, device=device)


def _surviving(part: HeadFeatures, kept: Sequence[int]) -> _Features:
    return _Features(frozenset(i for h in kept for i in part.features[h]), _all_features(part))


def _all_features(part: HeadFeatures) -> frozenset[int]:
    return frozenset(i for features in part.features for i in features)


def _groups_left(layer: AttentionLayer, kept: Sequence[int]) -> int:
    if not layer.groups:
        return 1 if layer.num_kv_heads == 1 else len(kept)
    return sum(1 for unit in layer.units if set(unit) & set(kept))


@dataclass(frozen=True)
class _Counts:
    """How many heads and key/value groups a layer has left, for the integers by which modules count them."""

    layer: AttentionLayer
    heads: int
    groups: int
    is_width: Callable[[str], bool]
    beside: bool  # not the attention module itself: one that works on keys or values calls those its heads

    def changed(self, fields: Mapping[str, Any]) -> dict[str, int]:
        """The integers among ``fields`` that count heads or their features, with their new values."""
        layer, kv = self.layer, self.layer.num_kv_heads
        found = {}
        for name, value in fields.items():
            if type(value) is not int or name.startswith("_"):
                continue
            if _GROUPS.search(name) and value == layer.num_heads // kv:
                found[name] = self.heads // self.groups if self.groups else 1
            elif _KV_HEADS.search(name) and value == kv:
                found[name] = self.groups
            elif _HEADS.search(name) and value == layer.num_heads:
                found[name] = self.heads
            elif _HEADS.search(name) and value == kv and self.beside:
                found[name] = self.groups
            elif (_HEAD_WIDTH.search(name) and value == layer.head_dim) or _LENGTH.search(name):
                continue
            elif self.is_width(name) and value == layer.num_heads * layer.head_dim:
                found[name] = self.heads * layer.head_dim
            elif self.is_width(name) and _KV_WIDTH.search(name) and value == kv * layer.head_dim:
                found[name] = self.groups * layer.head_dim
        return {name: new for name, new in found.items() if new != fields[name]}


_HEADS = re.compile(r"heads$|^(n|num|nb)_?head$|^h$")
_KV_HEADS = re.compile(r"(kv|key_value).*heads?$|heads?_?kv$|^n_?kv")
_GROUPS = re.compile(r"(kv|key_value).*groups$|^n_rep$")
_LENGTH = re.compile(
    r"window|len|position|block|ctx|context|seq|token|vocab|patch|chunk|bucket|image|max_|stride|kernel|landmark|latent|^num_"
)
_KV_WIDTH = re.compile(r"kv|key|value")
_HEAD_WIDTH = re.compile(r"head_(dim|size)$|^(dim|size)_(per_)?head$|^(d_kv|d_k|d_v|d_head|key_value_proj_dim)$")


# -- T5's position bias: the one thing a trace cannot see --------------------------------------
# The first layer computes a bias for all heads and every later layer of the stack receives it. A
# pruned layer must take its own heads out of it, and pass the whole on.


def _shares_position_bias(attention: nn.Module) -> bool:
    return hasattr(attention, "compute_bias") and "position_bias" in inspect.signature(attention.forward).parameters


class _SharedPositionBias:
    """Hands a pruned T5-style layer its heads of the shared bias, and restores the whole for the next layer."""

    def __init__(self, original: Callable[..., Tensor], num_heads: int, kept: list[int]) -> None:
        self.original = original  # the module's own compute_bias
        self.num_heads = num_heads
        self.kept = kept
        self.whole: Tensor | None = None
        self.taken: Tensor | None = None
        self.dim = 1

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.take(self.original(*args, **kwargs))

    def take(self, whole: Tensor) -> Tensor:
        self.whole = whole
        # LongT5's local attention has its blocks before the heads.
        self.dim = 1 if whole.shape[1] == self.num_heads or whole.ndim < 4 else 2
        self.taken = whole.index_select(self.dim, torch.tensor(self.kept, device=whole.device))
        return self.taken


def _take_own_bias(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    bias: _SharedPositionBias = attention.__dict__["_headprune_bias"]
    if (whole := kwargs.get("position_bias")) is not None:
        kwargs = {**kwargs, "position_bias": bias.take(whole)}
    return args, kwargs


def _restore_whole_bias(attention: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    bias: _SharedPositionBias = attention.__dict__["_headprune_bias"]
    hidden, own, *rest = output
    whole, taken, bias.whole, bias.taken = bias.whole, bias.taken, None, None
    if whole is not None and taken is not None and own.ndim == taken.ndim:
        # What the layer added for every head alike, such as a mask, the next layers need too.
        added = own.narrow(bias.dim, 0, 1) - taken.narrow(bias.dim, 0, 1)
        whole = torch.where(added == 0, whole, whole + added)
    if whole is None:  # cross-attention's first layer: zeros, alike for every head
        whole = own[:, :1].expand(-1, bias.num_heads, -1, -1)
    return (hidden, whole, *rest)
