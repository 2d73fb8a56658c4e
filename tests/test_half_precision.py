"""Gates in half precision: their derivatives are sums of products in float32, and a gate of 1 changes no bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headprune as hp
from headprune.fingerprint import identities, identity
from headprune.gates import gated
from headprune.scoring.gradient import gate_gradients
from tests.support.problems import problem
from tests.support.zoo import bert, labelled, text

HALVES = [torch.bfloat16, torch.float16]


class Planted(nn.Module):
    """Four heads whose slopes are whole numbers, so that little but the gates' own products is rounded."""

    def __init__(self, heads: int = 4, width: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(heads * width, heads * width, bias=False) for _ in range(4))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for part in (self.q, self.k, self.v):
                part.weight.copy_(torch.randn(part.weight.shape, generator=generator) / 8)
            self.o.weight.copy_(torch.randint(0, 2, self.o.weight.shape, generator=generator) * 2.0 - 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def towards(out: Tensor, signs: Tensor) -> Tensor:
    """Linear, one loss per example."""
    return (out.to(torch.promote_types(out.dtype, torch.float32)) * signs).sum((1, 2)) / out.shape[1]


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
def test_signed_gradients_against_float64(dtype: torch.dtype, most: float) -> None:
    """With products in bfloat16 the median error was .0046, and .0050 of the scores, which are now ten times nearer."""
    model = Planted().to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 32, 64, generator=generator).to(dtype)
    signs = torch.randint(0, 2, (32, 1, 64), generator=generator) * 2 - 1
    found = gate_gradients(problem(model, [(x, signs)], loss_fn=towards)).effects
    exact = gate_gradients(problem(copy.deepcopy(model).double(), [(x.double(), signs)], loss_fn=towards)).effects
    assert float(((found - exact) / exact).abs().median()) < most
    means = found.mean(0), exact.mean(0)
    assert float(((means[0] - means[1]) / means[1]).abs().median()) < most / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scored_in_half", [False, True])
def test_scores_and_plans_serve_in_any_precision(dtype: torch.dtype, scored_in_half: bool) -> None:
    """A checkpoint in half precision is scored in float32 on a CPU, and was another model on a GPU; and the other way round."""
    half = bert()[0].to(dtype)
    wide = copy.deepcopy(half).float()
    scored, model = (half, wide) if scored_in_half else (wide, half)
    batches = [labelled(model, text(4, 7, seed=s), seed=s) for s in range(3)]
    scores = hp.score(scored, batches, "gradient")
    assert hp.plan(scores, 4).model == identity(half) == identity(wide)
    hp.search(model, batches[:2], keep=4, choose=batches[2:], scores=scores, strategy="one-shot", repair=False)
    for noted in identities(model):  # of these, a plan of an earlier version noted the exact one
        plan, copied = replace(hp.plan(scores, 4), model=noted), copy.deepcopy(model)
        if noted == identity(model):  # a plan that was noted otherwise is compared in the same place
            hp.repair(copied, plan, batches[:1], ridge=1.0, values=False, mixtures=False, answers=False)
        hp.prune(copied, plan)
    other = copy.deepcopy(model)
    other.bert.embeddings.word_embeddings.weight.data[3, 3] += 1.0
    with pytest.raises(hp.HeadPruneError, match="for another model"):
        hp.prune(other, plan)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gates_derivative_is_not_rounded_on_the_way(dtype: torch.dtype) -> None:
    """Against the sum in float64 of what W_O reads times its slope, both taken from the very same pass."""
    model, example = bert()
    model = model.to(dtype)
    layers = hp.find_attention(model, example)
    seen: dict[str, Tensor] = {}
    gates = {a.name: torch.ones(3, a.num_heads, dtype=torch.float64, requires_grad=True) for a in layers}

    def note(name: str, hidden: Tensor) -> None:
        hidden.retain_grad()
        seen[name] = hidden

    with gated(model, layers, gates):
        handles = [  # behind the gate
            model.get_submodule(a.output_projection.module).register_forward_pre_hook(
                lambda module, args, name=a.name: note(name, args[0])
            )
            for a in layers
        ]
        model(**example).logits.float()[:, 0].sum().backward()
        for handle in handles:
            handle.remove()
    for layer in layers:
        hidden = seen[layer.name]
        products = hidden.double() * hidden.grad.double()
        expected = torch.stack([products[..., list(f)].sum((1, 2)) for f in layer.output_projection.features], dim=1)
        scale = torch.stack([products[..., list(f)].abs().sum((1, 2)) for f in layer.output_projection.features], dim=1)
        assert bool(((gates[layer.name].grad - expected).abs() <= 1e-5 * scale).all())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_open_gates_change_no_bit(dtype: torch.dtype) -> None:
    model, example = bert()
    model = model.to(dtype)
    layers = hp.find_attention(model, example)
    with torch.no_grad():
        dense = model(**example).logits
        for shape in ((4,), (3, 4)):
            for fill in (None, {a.name: lambda hidden, gates: hidden.flip(0) * 3 for a in layers}):
                with gated(model, layers, {a.name: torch.ones(shape, dtype=torch.float64) for a in layers}, fill):
                    assert torch.equal(model(**example).logits, dense)
        # Half a head is half of it, rounded once.
        kept = {}
        handle = model.get_submodule(layers[0].output_projection.module).register_forward_pre_hook(
            lambda module, args: kept.setdefault("plain", args[0])
        )
        model(**example)
        with gated(model, layers, {layers[0].name: torch.full((4,), 0.3, dtype=torch.float64)}):
            inner = model.get_submodule(layers[0].output_projection.module).register_forward_pre_hook(
                lambda module, args: kept.setdefault("gated", args[0])
            )
            model(**example)
        handle.remove()
        inner.remove()
    assert torch.equal(kept["gated"], (kept["plain"].float() * 0.3).to(dtype))
