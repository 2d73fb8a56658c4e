"""Public methods of `benchmarks/baselines.py` against their definitions, computed without headprune's gates."""

from __future__ import annotations

import baselines
import pytest
import torch
from baselines import METHODS, Baseline, applied, rearrange, rescaled
from torch import Tensor, nn

import headprune as hp
from tests.support import zoo
from tests.support.checks import hooks
from tests.support.problems import small
from tests.support.zoo import labelled

HEADS, WIDTH = 3, 8  # of `small`


def made(name: str) -> tuple[nn.Module, list[dict[str, Tensor]], list[hp.AttentionLayer]]:
    model, example = getattr(zoo, name)()
    batches = [labelled(model, example, seed=seed) for seed in (2, 3)]
    return model, batches, hp.find_attention(model, example)


def bert() -> tuple[nn.Module, list[dict[str, Tensor]], list[hp.AttentionLayer]]:
    model, batches = small(HEADS)
    return model, batches, hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})


def rows(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{k: v[i : i + 1] for k, v in b.items()} for b in batches for i in range(len(b["labels"]))]


def joined(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {k: torch.cat([e[k] for e in examples]) for k in examples[0]}


class HeadMask:
    """transformers' old ``head_mask`` for `small`: one factor for each layer and head, by hooks of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.factors = torch.ones(len(model.bert.encoder.layer), HEADS, dtype=torch.float64, requires_grad=True)

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        """Adds the gradient of the batch's mean loss to ``factors.grad``, as ``loss.backward()`` does."""
        handles = [
            block.attention.output.dense.register_forward_pre_hook(
                lambda _, args, factor=self.factors[i]: (
                    (args[0].unflatten(-1, (HEADS, -1)) * factor[:, None]).flatten(-2),
                )
            )
            for i, block in enumerate(self.model.bert.encoder.layer)
        ]
        self.model(**batch).loss.backward()
        for handle in handles:
            handle.remove()
        return self.factors.grad

    def fresh(self, batch: dict[str, Tensor]) -> Tensor:
        self.factors.grad = None
        return self.backward(batch).clone()


def order_of(seed: int, count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def dropped(layers, scores: Tensor, keep: int) -> dict[str, list[int]]:
    """The lowest of ``scores`` [layers, heads]."""
    flat = scores.flatten().argsort()[: scores.numel() - keep].tolist()
    drop = {a.name: sorted(i % HEADS for i in flat if i // HEADS == n) for n, a in enumerate(layers)}
    return {name: heads for name, heads in drop.items() if heads}


def by_layer(scores: Tensor) -> Tensor:
    return scores / scores.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("keep", [1, 2, 4, 5])
def test_rankings_are_those_of_the_definitions(keep):
    model, batches, layers = bert()
    mask = HeadMask(model)
    michel = torch.stack([mask.fresh(row).abs() for row in rows(batches)]).mean(0)
    for name, scores in (("Michel", michel), ("reverse", -michel), ("Michel, layer L2", by_layer(michel))):
        assert METHODS[name](model, batches, layers, keep, 0) == Baseline(dropped(layers, scores, keep))


@pytest.mark.parametrize("seed", [0, 5])
def test_run_bertology_is_its_loop(seed):
    model, batches, layers = bert()
    mask, examples = HeadMask(model), rows(batches)
    importance = torch.zeros(2, HEADS, dtype=torch.float64)
    for i in order_of(seed, len(examples)):
        importance += mask.backward(examples[i]).abs()  # the gradient is never zeroed
    importance = by_layer(importance)
    slopes = baselines.shuffled(baselines.gradients(model, batches, layers), seed)
    torch.testing.assert_close(baselines.bertology_scores(slopes, layers), importance.flatten(), rtol=1e-6, atol=1e-9)
    for keep in (2, 4):
        assert METHODS["run_bertology"](model, batches, layers, keep, seed).drop == dropped(layers, importance, keep)


def test_only_run_bertology_depends_on_the_order_of_examples():
    model, batches, layers = bert()
    backwards = [joined(rows(batches)[::-1])]
    there, back = (baselines.gradients(model, b, layers) for b in (batches, backwards))
    torch.testing.assert_close(there.abs().mean(0), back.abs().mean(0))
    one, other = baselines.bertology_scores(there, layers), baselines.bertology_scores(back, layers)
    assert (one - other).abs().max() > 0.05
    ours = [hp.score(model, b, "gradient", layers=layers).flat() for b in (batches, backwards)]
    torch.testing.assert_close(*ours)


@pytest.mark.parametrize("keep", [1, 3, 4])
def test_kwon_squares_the_gradient_of_a_batch(monkeypatch, keep):
    monkeypatch.setattr(baselines, "KWON_BATCH", 4)
    model, batches, layers = bert()
    mask, examples = HeadMask(model), rows(batches)
    order = [examples[i] for i in order_of(3, len(examples))]
    fisher = sum(mask.fresh(joined(order[i : i + 4])).square() for i in range(0, len(order), 4))
    assert METHODS["Kwon, Fisher"](model, batches, layers, keep, 3).drop == dropped(layers, fisher, keep)


def test_gradients_are_remembered_for_these_weights_and_examples_alone():
    model, batches, layers = bert()
    first = baselines.gradients(model, batches, layers)
    saved = baselines.gradients.saved
    assert baselines.gradients(model, batches, layers) is first
    assert baselines.gradients.saved > saved
    assert not torch.equal(baselines.gradients(model, batches[:1], layers), first)
    with torch.no_grad():
        model.classifier.weight.mul_(2)
    assert not torch.equal(baselines.gradients(model, batches, layers), first)


# -- Kwon's rearrangement ----------------------------------------------------------------------


def cost(fisher: Tensor, gone: list[int]) -> float:
    return fisher[gone][:, gone].sum().item()


def greedy(vectors: Tensor, count: int) -> list[int]:
    """As the paper tells it, with gradient vectors ``[units, batches]``: the cost of a set is its sum's squared length."""

    def length(units: list[int]) -> float:
        return vectors[units].sum(0).square().sum().item()

    order = vectors.square().sum(1).argsort().tolist()
    gone = order[:count]
    for unit in order[count:]:
        gone = min(([u for u in [*gone, unit] if u != left] for left in [*gone, unit]), key=length)
    return sorted(gone)


@pytest.mark.parametrize("seed", range(20))
def test_rearrangement_is_greedy_and_never_costs_more(seed):
    generator = torch.Generator().manual_seed(seed)
    units, batches = 12, 1 + seed
    vectors = torch.randn(units, batches, generator=generator, dtype=torch.float64)
    vectors *= torch.rand(units, 1, generator=generator, dtype=torch.float64)
    fisher = vectors @ vectors.T
    for count in range(units + 1):
        found = rearrange(fisher, count)
        assert len(set(found)) == count
        before = fisher.diagonal().argsort().tolist()[:count]
        assert cost(fisher, found) <= cost(fisher, before) + 1e-9
        assert cost(fisher, found) == pytest.approx(cost(fisher, greedy(vectors, count)), abs=1e-9)


def test_rearrangement_takes_heads_that_cancel():
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.2, 0.0], [-1.2, 0.0]], dtype=torch.float64)
    assert rearrange(vectors @ vectors.T, 2) == [0, 3]


def test_a_layer_loses_as_many_heads_as_before_the_swap():
    model, batches, layers = bert()
    for keep in range(1, 6):
        one, two = (
            METHODS[name](model, batches, layers, keep, 0).drop for name in ("Kwon, Fisher", "Kwon, Fisher + swap")
        )
        assert {k: len(v) for k, v in one.items()} == {k: len(v) for k, v in two.items()}


# -- Kwon's rescaling --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "llama"])
def test_where_nothing_is_missing_every_factor_is_one(name):
    model, batches, layers = made(name)
    heads, neurons = rescaled(model, batches, layers, {}, {})
    assert len(heads) == len(layers) - 1  # all but the first layer's
    assert len(neurons) == len(layers)
    for factor in [*heads.values(), *neurons.values()]:
        torch.testing.assert_close(factor, torch.ones_like(factor), atol=1e-2, rtol=0)
    assert hooks(model) == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rank", [6, 40])
def test_damped_factors_lower_the_error(seed, rank):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rank, 8, generator=generator, dtype=torch.float64)
    wanted = inputs.sum(1) + torch.randn(rank, generator=generator, dtype=torch.float64)
    gram, moment = inputs.T @ inputs, inputs.T @ wanted
    found = baselines.damped(gram, moment)
    direct = 1 + torch.linalg.solve(gram @ gram + torch.eye(8), gram @ (moment - gram.sum(1)))
    torch.testing.assert_close(found, direct, atol=1e-3, rtol=0)
    assert (inputs @ found - wanted).norm() <= (inputs.sum(1) - wanted).norm()


def without(model: nn.Module, layers, drop: dict[str, list[int]]) -> nn.Module:
    """A copy whose W_O has zeros in the dropped heads' columns."""
    copied, _ = small(HEADS)
    copied.load_state_dict(model.state_dict())
    with torch.no_grad():
        for layer in layers:
            for head in drop.get(layer.name, ()):
                dense = copied.get_submodule(layer.output_projection.module)
                dense.weight[:, WIDTH * head : WIDTH * head + WIDTH] = 0
    return copied


def inside(model: nn.Module, batch: dict[str, Tensor], block: int) -> dict[str, Tensor]:
    """What goes into a block's attention (``residual``), W_O (``heads``), the last linear (``neurons``), both norms (``a``, ``b``)."""
    layer = model.bert.encoder.layer[block]
    seen = {}
    places = {
        "residual": layer.attention.self.query, "heads": layer.attention.output.dense, "a": layer.attention.output.LayerNorm,
        "neurons": layer.output.dense, "b": layer.output.LayerNorm, "middle": layer.intermediate.dense,
    }  # fmt: skip
    handles = [m.register_forward_pre_hook(lambda _, args, k=k: seen.update({k: args[0]})) for k, m in places.items()]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return seen


def test_factors_solve_the_stated_least_squares(monkeypatch):
    """Teacher and student as copies with zeroed weights; every system written out, one row a token and output."""
    monkeypatch.setattr(baselines, "damped", lambda gram, moment: torch.linalg.solve(gram, moment))
    monkeypatch.setattr(baselines, "FARTHEST", float("inf"))
    model, batches, layers = bert()
    names = [a.name for a in layers]
    teacher, student = {names[0]: [1]}, {names[0]: [0, 1], names[1]: [2]}
    heads, neurons = rescaled(model, batches, layers, teacher, student)
    assert list(heads) == names[1:]
    theirs, mine = without(model, layers, teacher), without(model, layers, student)
    for i, block in enumerate(mine.bert.encoder.layer):
        if i:
            big, goal = [], []
            for batch in batches:
                a, b, real = inside(theirs, batch, i), inside(mine, batch, i), batch["attention_mask"].bool()
                dense = block.attention.output.dense
                parts = [
                    b["heads"][real][:, WIDTH * h : WIDTH * h + WIDTH]
                    @ dense.weight[:, WIDTH * h : WIDTH * h + WIDTH].T
                    for h in (0, 1)
                ]
                big.append(torch.stack([*parts, torch.ones_like(parts[0])], dim=-1).flatten(0, 1))
                goal.append((a["a"] - dense.bias - b["residual"])[real].flatten())
            fitted = torch.linalg.lstsq(torch.cat(big), torch.cat(goal)[:, None]).solution[:, 0]
            torch.testing.assert_close(heads[names[i]][:2].double(), fitted[:2], atol=1e-5, rtol=1e-4)
            with torch.no_grad():
                for h in (0, 1):
                    block.attention.output.dense.weight[:, WIDTH * h : WIDTH * h + WIDTH] *= heads[names[i]][h]
        dense, big, goal = block.output.dense, [], []
        for batch in batches:
            a, b, real = inside(theirs, batch, i), inside(mine, batch, i), batch["attention_mask"].bool()
            if i == 1:  # the classifier reads the first token alone
                real = torch.zeros_like(real)
                real[:, 0] = True
            big.append((b["neurons"][real][:, None] * dense.weight).flatten(0, 1))
            goal.append((a["b"] - dense.bias - b["middle"])[real].flatten())
        fitted = torch.linalg.lstsq(torch.cat(big), torch.cat(goal)[:, None]).solution[:, 0]
        factor = neurons[f"bert.encoder.layer.{i}.output.dense"].double()
        torch.testing.assert_close(factor, fitted, atol=1e-4, rtol=1e-3)
        with torch.no_grad():
            dense.weight *= factor
    with applied(model, layers, Baseline(student, heads, neurons)), torch.no_grad():
        torch.testing.assert_close(model(**batches[0]).logits, mine(**batches[0]).logits, atol=1e-6, rtol=1e-6)
    assert hooks(model) == 0


def test_a_factor_too_far_ends_the_tuning(monkeypatch):
    monkeypatch.setattr(baselines, "FARTHEST", 0.0)
    model, batches, layers = bert()
    assert rescaled(model, batches, layers, {}, {layers[0].name: [0]}) == ({}, {})


def test_what_is_no_stack_of_blocks_is_refused():
    model, batches, layers = made("t5")
    with pytest.raises(ValueError, match="no feed-forward layer"):
        rescaled(model, batches, layers, {}, {})


# -- every method ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_to_the_budget_by_whole_groups(name, method):
    model, batches, layers = made(name)
    total = sum(a.num_heads for a in layers)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for keep in (2, total // 4 * 2, total):
        found = METHODS[method](model, batches, layers, keep, 0)
        gone = sum(map(len, found.drop.values()))
        assert total - gone == keep
        for layer in layers:
            lost = set(found.drop.get(layer.name, ()))
            assert all(lost.issuperset(unit) or lost.isdisjoint(unit) for unit in layer.units)
        with applied(model, layers, found), torch.no_grad():
            assert model(**batches[0]).loss.isfinite()
    assert hooks(model) == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_random_is_drawn_by_the_seed():
    model, batches, layers = bert()
    found = [METHODS["random"](model, batches, layers, 3, seed).drop for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_a_group_is_scored_by_one_gate_for_all_of_its_heads():
    """By the central difference of the loss, the group's columns of W_O made a little larger and smaller."""
    model, example = zoo.llama()
    model = model.double()
    batch = {k: v[:1] for k, v in labelled(model, example).items()}
    layers = hp.find_attention(model, example)
    found = baselines.unit_gradients(model, [batch], layers)
    assert found.shape == (1, sum(len(layer.units) for layer in layers))
    step, expected = 2e-3, []  # its norms work in float32, whatever the weights are
    for layer in layers:
        weight = model.get_submodule(layer.output_projection.module).weight
        for unit in layer.units:
            columns = [c for head in unit for c in layer.output_projection.features[head]]
            losses = []
            with torch.no_grad():
                before = weight.clone()
                for sign in (1, -1):
                    weight[:, columns] = before[:, columns] * (1 + sign * step)
                    logits = model(input_ids=batch["input_ids"]).logits[0, :-1]  # transformers' loss rounds to float32
                    losses.append(torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:]).item())
                weight.copy_(before)
            expected.append((losses[0] - losses[1]) / (2 * step))
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64), atol=1e-3, rtol=1e-3)
