"""What a prune removes, and the ways in which the modules may have to be changed for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headprune.attention import AttentionLayer, Heads
from headprune.errors import HeadPruneError
from headprune.offload import is_elsewhere
from headprune.pruned import ConfigView, is_ours
from headprune.surgery.features import names_groups


@dataclass(frozen=True)
class Removal:
    """Heads to remove, and how: enough to repeat a prune on a fresh copy of the model (`headprune.load` does).

    Attributes:
        layers: The layers that lose heads.
        drop: ``{layer_name: [head, …]}``.
        widths: Which integers that equal heads * head_dim shrink with the heads, a key of `WIDTHS`.
        cut_arguments: Whether arguments are cut whose shape suggests that they hold something for each head.
        own_config: Whether the modules' counts in their config change too.
        side_modules: Whether the counts of `AttentionLayer.side_modules` change too.
        narrow: Whether the modules' inputs claim to be as narrow as the heads are now.
        by_group: Whether integers named for groups are numbers of groups: in transformers ``num_key_value_groups`` is how many heads
            share one, elsewhere ``num_kv_groups`` is how many there are.
    """

    layers: tuple[AttentionLayer, ...]
    drop: Heads
    widths: str
    cut_arguments: bool
    own_config: bool = False
    side_modules: bool = False
    narrow: bool = False
    by_group: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "layers": [layer.to_json() for layer in self.layers]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Removal:
        layers = tuple(AttentionLayer.from_json(d) for d in data["layers"])
        drop = {k: list(v) for k, v in data["drop"].items()}
        flags = {
            name: data.get(name, False)
            for name in ("cut_arguments", "own_config", "side_modules", "narrow", "by_group")
        }
        return cls(layers, drop, data["widths"], **flags)


# Which integers that equal heads * head_dim shrink with the heads: some models reshape by them. As few as possible, because
# one that only scales (a softmax by the square root of the width) must stay. The proof decides.
WIDTHS: dict[str, Callable[[str], bool]] = {
    "none": lambda name: False,
    "inner": lambda name: name not in {"embed_dim", "d_model", "hidden_size", "dim", "hidden_dim", "n_embd", "width"},
    "all": lambda name: True,
}


def ways(layers: Sequence[AttentionLayer], drop: Heads, model: nn.Module | None = None) -> list[Removal]:
    """All ways to remove the heads, in the order in which they are tried: a trace cannot decide between them, the proof does.

    Args:
        model: Of which those ways are left out that differ in numbers alone that it does not have.
    """
    # An argument with as many entries as heads may be something for each head; where it is, leaving it fails.
    arguments = (False, True) if any(not a.features for layer in layers for a in layer.arguments) else (False,)
    sides = (False, True) if any(layer.side_modules for layer in layers) else (False,)
    groups = (False, True) if model is None or _names_groups(model, layers) else (False,)
    return [
        Removal(tuple(layers), drop, widths, cut, own, side, narrow, by_group)
        for by_group in groups
        for narrow in (False, True)
        for side in sides
        for own in (False, True)
        for cut in arguments
        for widths in WIDTHS
    ]


def _names_groups(model: nn.Module, layers: Sequence[AttentionLayer]) -> bool:
    """Whether modules whose numbers are corrected, or their configs, have one that is named for groups."""
    modules = [model.get_submodule(name) for layer in layers for name in (*layer.inner_modules, *layer.side_modules)]
    held = [value for module in modules for value in vars(module).values() if hasattr(value, "to_dict")]
    configs = [value.original if is_ours(value, ConfigView) else value for value in held]
    return any(names_groups(vars(each)) for each in (*modules, *configs))


def check_present(model: nn.Module, layer: AttentionLayer) -> None:
    """Refuse weights without numbers: they cannot be cut, nor the result proved. Those that Accelerate keeps elsewhere have some.

    Raises:
        HeadPruneError: Some of the layer's parameters are on the meta device, and no hook of their module loads them.
    """
    for owner, module in model.get_submodule(layer.module).named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not is_elsewhere(module, own):
                raise HeadPruneError(
                    f"Layer {layer.name} cannot be pruned: {f'{owner}.{own}' if owner else own} has no numbers (it is on the meta "
                    "device, and no hook of Accelerate on its module loads it).",
                    "Load the weights first; device_map= of from_pretrained may keep them on the CPU or on disk.",
                )


def left_as_ghosts(layers: Sequence[AttentionLayer], drop: Heads) -> tuple[str, ...]:
    """Layers that lose all heads, but keep one with zero output."""
    return tuple(a.name for a in layers if a.bypass == "ghost" and len(drop[a.name]) == a.num_heads)
