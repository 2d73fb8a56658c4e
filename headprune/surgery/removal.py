"""What a prune takes away, and the ways in which it may have to be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headprune.attention import AttentionLayer, Heads
from headprune.errors import HeadPruneError


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


# Which integers that equal heads * head_dim are to shrink with the heads: some models reshape by them. As few as
# possible, since one that only scales (a softmax by the square root of the width) must stay; the proof picks.
WIDTHS: dict[str, Callable[[str], bool]] = {
    "none": lambda name: False,
    "inner": lambda name: name not in {"embed_dim", "d_model", "hidden_size", "dim", "hidden_dim", "n_embd", "width"},
    "all": lambda name: True,
}


def ways(layers: Sequence[AttentionLayer], drop: Heads) -> list[Removal]:
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
        for widths in WIDTHS
    ]


def check_present(model: nn.Module, layer: AttentionLayer) -> None:
    """Refuse weights that are not in memory: they cannot be cut, nor the result proved."""
    for name, parameter in model.get_submodule(layer.module).named_parameters():
        if parameter.is_meta:
            raise HeadPruneError(
                f"Layer {layer.name} cannot be pruned: {name} is not in memory (offloaded, or on the meta device).",
                "Load the weights first, or onto a device that holds them all.",
            )


def left_as_ghosts(layers: Sequence[AttentionLayer], drop: Heads) -> tuple[str, ...]:
    """Layers that lose all heads, but keep one with zero output."""
    return tuple(a.name for a in layers if a.bypass == "ghost" and len(drop[a.name]) == a.num_heads)
