"""What the removal of a unit costs, to second order: against refits without it, one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads
from headprune.batches import Rows
from headprune.planning.effects import effects
from headprune.planning.units import Unit
from headprune.reference.token_weights import across as _across
from headprune.reference.token_weights import noise as _noise
from headprune.repairing import Refit
from tests.support.checks import hooks, same, state
from tests.support.plain import WIDTH, Attention, Pair, noise
from tests.support.plans import units_for
from tests.support.problems import duplicated, small
from tests.support.repairs import made, padded, refit_of
from tests.support.zoo import randomise, text


def direct(refit: Refit, drop: Heads, unit: Unit, ridge: float) -> Tensor:
    """Effect of a unit by solving the regression without it, with the same strength, and by summing over the tokens."""
    layer = refit.reference.layers[unit.layer]
    place = next(p for p in refit.reference.projections if layer in p.layers)
    weights = refit.fitted(drop)
    old, old_bias = place.weight, place.bias
    now, now_bias = weights.by_module.get(place.name, (old, old_bias))
    moments = refit.reference.moments[place.name]
    xx, xy = moments.xx.sum(0), moments.xy.sum(0)
    tokens = xx[-1, -1]
    kept = place.kept(drop)
    mean = xx[-1, :-1] / tokens
    if not place.has_bias:
        mean = mean * 0
    both = (xx[:-1, :-1] / tokens - torch.outer(mean, mean))[kept][:, kept]
    strength = ridge * float(both.diagonal().mean())
    rest = place.kept({**drop, layer.name: [*drop.get(layer.name, []), *unit.heads]})
    a = (xx[:-1, :-1] / tokens - torch.outer(mean, mean))[rest][:, rest]
    wanted = xy[-1] / tokens
    c = (xy[:-1] / tokens - torch.outer(mean, wanted))[rest]
    new = torch.zeros_like(old)
    eye = torch.eye(len(rest), dtype=a.dtype)
    new[rest] = torch.linalg.solve(a + strength * eye, c + strength * old[rest])
    new_bias = wanted - mean @ new if place.has_bias else old_bias
    if place.name not in weights.by_module:
        now_bias = old_bias
    out = []
    with refit.applied(weights):
        for index in range(len(refit.reference.runner.batches)):
            total = 0
            for x, slope in refit.reference.slopes(index)[place.name]:
                change = x @ (new - now) + (new_bias - now_bias if place.has_bias else 0)
                total = total + (change * slope).flatten(1).sum(1)
            out.append(total)
    return torch.cat(out)


@pytest.mark.parametrize(("name", "single"), [
    ("bert", False), ("gpt2", False), ("vit", False), ("t5", False), ("llama", False), ("llama", True), ("albert", False),
])  # fmt: skip
@pytest.mark.parametrize("gone", [False, True])
def test_effects_are_the_refits_without_the_unit(name: str, single: bool, gone: bool) -> None:
    model, example, layers = made(name)
    before = state(model)
    refit = refit_of(model, layers, [example, Rows().take(example, [1])], ridge=0.05, values=False)
    drop = {layers[0].name: list(layers[0].units[1])} if gone else {}
    units = units_for(layers, drop, single)
    found = effects(refit, layers, drop, units)
    assert same(model, before)
    assert hooks(model) == 0
    assert found.shape == (4, len(units))
    for i in range(0, len(units), 1 + len(units) // 8):
        torch.testing.assert_close(found[:, i], direct(refit, drop, units[i], 0.05), rtol=1e-8, atol=1e-8)


def gate_gradients(model: nn.Module, layers: Sequence[hp.AttentionLayer], batch: Any, drop: Heads) -> Tensor:
    """Minus the derivative of the probe by a factor on every head, one example at a time."""
    rows = []
    for row in range(len(batch["input_ids"])):
        one = {k: v for k, v in Rows().take(batch, [row]).items() if k != "labels"}
        factors = [torch.ones(a.num_heads, dtype=torch.float64, requires_grad=True) for a in layers]
        handles = []
        for a, factor in zip(layers, factors, strict=True):
            gate = torch.ones(a.num_heads, dtype=torch.float64)
            gate[drop.get(a.name, [])] = 0

            def hook(m: nn.Module, args: Any, factor: Tensor = factor, gate: Tensor = gate) -> Any:
                return ((args[0].unflatten(-1, (len(gate), -1)) * (factor * gate)[:, None]).flatten(-2),)

            module = model.get_submodule(a.output_projection.module)
            handles.append(module.register_forward_pre_hook(hook))
        chances = model(**one).logits.log_softmax(-1)
        real = one["attention_mask"].bool() if chances.ndim == 3 else None
        root = chances.detach().exp().sqrt()
        told = _across(root, _noise(chances.detach(), real, [row]))
        probe = (told * root * chances).sum()
        rows.append(-torch.cat(torch.autograd.grad(probe, factors)))
        for handle in handles:
            handle.remove()
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_without_repair_they_are_gate_gradients(name: str) -> None:
    model, example, layers = made(name)
    refit = refit_of(model, layers, [example], ridge=float("inf"))
    drop = {layers[1].name: list(layers[1].units[0])}
    units = units_for(layers, drop, single=True)
    found = effects(refit, layers, drop, units)
    offsets = [sum(a.num_heads for a in layers[:i]) for i in range(len(layers))]
    expected = gate_gradients(model, layers, example, drop)[:, [offsets[u.layer] + u.heads[0] for u in units]]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    groups = effects(refit, layers, drop, (whole := units_for(layers, drop)))
    for column, unit in zip(groups.T, whole, strict=True):
        parts = [i for i, u in enumerate(units) if u.layer == unit.layer and u.heads[0] in unit.heads]
        torch.testing.assert_close(column, found[:, parts].sum(1))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "xlnet", "xlnet, square"])
@pytest.mark.parametrize("ridge", [None, 0.1, float("inf")])
def test_batches_and_padding_do_not_matter(name: str, ridge: float | None) -> None:
    model, example, layers = made(name)
    if name in ("bert", "gpt2", "llama"):
        example = text(5, 7)
    rows = len(example["input_ids"])
    drop = {layers[0].name: list(layers[0].units[0])}
    units = units_for(layers, drop)

    def found(batches: Sequence[Any]) -> Tensor:
        return effects(refit_of(model, layers, batches, ridge=ridge, mixtures=False), layers, drop, units)

    whole = found([example])
    assert whole.abs().max() > 1e-4
    torch.testing.assert_close(found([Rows().take(example, [i]) for i in range(rows)]), whole, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        found([Rows().take(example, [0, 1]), Rows().take(example, range(2, rows))]), whole, rtol=1e-6, atol=1e-8
    )
    if not name.startswith("xlnet"):
        torch.testing.assert_close(found([padded(example, 3, left=False)]), whole, rtol=1e-6, atol=1e-8)


def test_a_layer_that_has_lost_nothing_is_judged_with_repair() -> None:
    """Wherever it is: cross-validation has not said that its old weights are best."""
    model, example, layers = made("bert")
    refit = refit_of(model, layers, [example], values=False)
    drop = {layers[0].name: [0]}
    units = units_for(layers, drop)
    found = effects(refit, layers, drop, units)
    gates = effects(refit_of(model, layers, [example], ridge=float("inf")), layers, {}, units)
    behind = [i for i, u in enumerate(units) if u.layer == 2]
    assert list(refit.fitted(drop).ridges) == [refit.reference.projections[0].name]
    first = direct(refit, drop, units[behind[0]], 0.3)
    torch.testing.assert_close(found[:, behind[0]], first, rtol=1e-8, atol=1e-8)
    assert (found - gates)[:, behind].abs().max() > 1e-6


def test_dead_heads_and_duplicates() -> None:
    model, batches = small(heads=4)
    duplicated(model)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.output.dense.weight[:, 16:24] = 0
    layers = hp.find_attention(model, batches[0])
    units = units_for(layers, {})
    repaired = effects(refit_of(model, layers, batches, ridge=1e-6), layers, {}, units)
    masked = effects(refit_of(model, layers, batches, ridge=float("inf")), layers, {}, units)
    assert not masked[:, 6].any()
    assert repaired[:, 6].abs().max() < 1e-9
    for h in (0, 1):
        assert repaired[:, h].abs().mean() < 1e-3 * masked[:, h].abs().mean()
        # Once one is gone, the other is worth what both were.
        after = effects(refit_of(model, layers, batches, ridge=1e-6), layers, {layers[0].name: [1 - h]}, [units[h]])
        assert after.abs().mean() > 100 * repaired[:, h].abs().mean()


class Classifier(nn.Module):
    """Attention blocks and a classifier of the mean."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class Bare(Attention):
    """Without an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.o = None

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class Normed(Attention):
    """As BitNet: a norm over all heads before W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.norm(self.attend(x)))


BLOCKS = {
    "shared": (Pair, Attention),
    "bare": (Bare, Attention),
    "normed": (Normed, Normed),
}  # in the last, no W_O can be


@pytest.mark.parametrize("blocks", BLOCKS)
def test_heads_that_cannot_be_made_up_for_are_not_free(blocks: str) -> None:
    """Layers whose W_O cannot be refitted: the gate gradient, not nothing."""
    model = randomise(Classifier(*(kind() for kind in BLOCKS[blocks]))).double()
    x = noise(6, 5, WIDTH).double()
    layers = hp.find_attention(model, x)
    refit = refit_of(model, layers, [x], ridge=0.1)
    units = units_for(layers, {})
    fixed = {a.name for a in layers} - {a.name for p in refit.reference.projections for a in p.layers}
    assert fixed
    drop: Heads = {layers[-1].name: [1], layers[0].name: [2]}
    for gone in ({}, drop):
        left = [u for u in units if not set(u.heads) & set(gone.get(layers[u.layer].name, ()))]
        found = effects(refit, layers, gone, left)
        plain = effects(refit_of(model, layers, [x], ridge=float("inf")), layers, gone, left)
        those = [i for i, u in enumerate(left) if layers[u.layer].name in fixed]
        assert found[:, those].abs().mean(0).min() > 1e-4
        if not gone:
            torch.testing.assert_close(found[:, those], plain[:, those])
    # By finite differences of the probe, with the removed heads masked.
    weights = refit.fitted(drop)
    (at,) = [i for i, u in enumerate(left) if layers[u.layer].name in fixed][:1]
    layer, (head,) = layers[left[at].layer], left[at].heads
    gate: Any = {a.name: torch.ones(a.num_heads, dtype=torch.float64) for a in layers}
    for name, heads in drop.items():
        gate[name][heads] = 0
    with torch.no_grad(), refit.applied(weights):
        from headprune.gates import gated

        with gated(model, layers, gate):
            output = model(x)
        told = _noise(output, None, range(6))
        ends = []
        for step in (1e-6, -1e-6):
            gate[layer.name][head] = 1 + step
            with gated(model, layers, gate):
                ends.append((told * model(x)).sum(1))
    torch.testing.assert_close(found[:, at], -(ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_a_layer_that_does_not_matter_costs_nothing() -> None:
    model, batches = small()
    with torch.no_grad():
        model.classifier.weight.zero_()
    layers = hp.find_attention(model, batches[0])
    assert not effects(refit_of(model, layers, batches), layers, {}, units_for(layers, {})).any()


class Unread(Classifier):
    """What its first block gives is never read."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0](x)
        return self.head((x + self.blocks[1](x)).mean(1))


def test_a_layer_that_no_answer_depends_on_costs_nothing() -> None:
    model, x = randomise(Unread(Bare(), Attention())).double(), noise(6, 5, WIDTH).double()
    layers = hp.find_attention(model, x)
    refit = refit_of(model, layers, [x], ridge=0.1)
    units = units_for(layers, {})
    found = effects(refit, layers, {}, units)
    unread = [i for i, u in enumerate(units) if layers[u.layer].name.endswith("0")]
    assert len(unread) == 4
    assert not found[:, unread].any()
    assert found[:, [i for i in range(len(units)) if i not in unread]].abs().min() > 0


class Detached(Classifier):
    """Its answers do not tell what they depend on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def test_answers_that_cannot_be_differentiated_are_refused() -> None:
    """Of layers whose W_O cannot be refitted nothing else would say so, and heads would look free."""
    model, x = randomise(Detached(Pair())).double(), noise(6, 5, WIDTH).double()
    layers = hp.find_attention(model, x)
    refit = refit_of(model, layers, [x], ridge=0.1)
    assert not refit.reference.projections
    with pytest.raises(hp.HeadPruneError, match="do not depend on any head by what can be differentiated"):
        effects(refit, layers, {}, units_for(layers, {}))


class Answers(nn.Module):
    """Logits by name, for which no labels are needed; ``told``: they can be differentiated."""

    def __init__(self, *blocks: nn.Module, told: bool = True) -> None:
        super().__init__()
        self.inner, self.told = Classifier(*blocks), told

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.inner(x)
        return {"logits": logits if self.told else logits.detach()}


@pytest.mark.parametrize("strategy", ["auto", "re-scored", "compensated", "greedy"])
def test_a_search_where_no_output_projection_can_be_refitted(strategy: str) -> None:
    model, batches = randomise(Answers(Normed(), Normed())), [{"x": noise(4, 5, WIDTH)}, {"x": noise(6, 5, WIDTH)}]
    layers = hp.find_attention(model, batches[0])
    assert [a.head_dim for a in layers] == [WIDTH // 4] * 2
    (plan,) = hp.search(model, batches, 4, layers=layers, strategy=strategy)
    assert plan.kept == 4
    assert not hp.repair(model, plan, batches, layers=layers).layers
    assert "about 0 forward passes" not in "".join(plan.notes)
    hp.prune(model, plan, batches[0], layers=layers)


@pytest.mark.parametrize("kind", [Attention, Normed])
def test_logits_that_cannot_be_differentiated_are_refused(kind: type[Attention]) -> None:
    model, batches = (
        randomise(Answers(kind(), kind(), told=False)),
        [{"x": noise(4, 5, WIDTH)}, {"x": noise(6, 5, WIDTH)}],
    )
    with pytest.raises(hp.HeadPruneError, match="do not depend on any head by what can be differentiated"):
        hp.search(model, batches, 4, layers=hp.find_attention(model, batches[0]), strategy="compensated")
