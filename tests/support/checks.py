"""What many tests check: hooks that are left, weights that changed, and pruned models against masked ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import headprune as hp
from headprune.inputs import call
from headprune.surgery import answers
from tests.support.zoo import ZOO


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(v, before[k]) for k, v in now.items())


def check(model: nn.Module, example: object, drop: dict[str, list[int]]) -> nn.Module:
    """Prune a copy, and compare with the masked original here too, not only inside prune."""
    pruned = copy.deepcopy(model)
    proof = hp.prune(pruned, drop, example)
    assert proof.difference <= 1e-4
    with torch.no_grad(), hp.mask(model, drop, example):
        masked = answers(call(model, example))
    with torch.no_grad():
        for got, expected in zip(answers(call(pruned, example)), masked, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
    return pruned


def pruned(name: str) -> tuple[torch.nn.Module, object]:
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    drop = {a.name: list(range(a.num_heads)) if i == 1 else list(a.units[0]) for i, a in enumerate(layers)}
    hp.prune(model, drop, example)
    return model, example
