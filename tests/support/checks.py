"""What many tests check: hooks that are left, weights that changed, and pruned models against masked ones."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import headprune as hp
from tests.support.zoo import ZOO


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(v, before[k]) for k, v in now.items())


def pruned(name: str) -> tuple[torch.nn.Module, object]:
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    drop = {a.name: list(range(a.num_heads)) if i == 1 else list(a.units[0]) for i, a in enumerate(layers)}
    hp.prune(model, drop, example)
    return model, example
