"""Exchanges of heads: what they find, what they must not touch, and that the judge has not seen what it judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune import fidelity
from headprune.planning import Constraints, Order, Search
from headprune.planning.exchange import Halves, exchanged
from headprune.repair import Refit
from tests.problems import small
from tests.zoo import labelled, randomise, text


def many(model: nn.Module, batches: int = 4, rows: int = 6) -> list[dict[str, Tensor]]:
    return [labelled(model, text(rows, 7, seed=10 + i), seed=i) for i in range(batches)]


def searched(model: nn.Module, batches: Sequence[Any], **more: Any) -> Search:
    layers = hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})
    constraints = Constraints.parse(more.pop("protect", ""), layers, more.pop("least", 0))
    refit = Refit(model, layers, batches, **more)
    return Search(layers, constraints=constraints, model=model, batches=batches, refit=refit)


def order_of(search: Search, steps: Sequence[tuple[int, int]]) -> Order:
    """These heads first, then all others."""
    every = [(i, h) for i, layer in enumerate(search.layers) for h in range(layer.num_heads)]
    all_steps = [*steps, *(at for at in every if at not in steps)]
    return Order.of(search.layers, [{search.layers[i].name: [h]} for i, h in all_steps], strategy="made up")


def dead(model: nn.Module, layer: int, head: int, width: int = 8) -> None:
    with torch.no_grad():
        model.bert.encoder.layer[layer].attention.output.dense.weight[:, width * head : width * (head + 1)] = 0  # type: ignore[union-attr,index]


def test_a_head_that_gives_nothing_goes_in_place_of_one_that_does() -> None:
    model, _ = small(heads=4)
    dead(model, 1, 2)
    search = searched(model, many(model))
    start = order_of(search, [(0, 1), (0, 3)])
    found = exchanged(search, start, [7])
    assert found is not None
    assert found.plan(7).drop == {search.layers[1].name: [2]}
    assert found.strategy == "exchanged"
    assert sorted((n, h) for s in found.steps for n, hs in s.items() for h in hs) == sorted(
        (n, h) for s in start.steps for n, hs in s.items() for h in hs
    )
    assert any("forward passes" in note for note in found.notes)


@pytest.mark.parametrize("seed", range(3))
def test_plans_get_no_worse_and_stay_nested(seed: int) -> None:
    model, _ = small(heads=4)
    batches = many(model)
    search = searched(model, batches)
    every = [(i, h) for i in range(2) for h in range(4)]
    mixed = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
    start = order_of(search, [every[i] for i in mixed])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = exchanged(search, start, [6, 3])
    assert found is not None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    larger, smaller = found.plan(6), found.plan(3)
    assert (larger.kept, smaller.kept) == (6, 3)
    for name, heads in larger.drop.items():
        assert set(heads) <= set(smaller.drop[name])
    assert search.refit is not None
    halves = Halves(search.refit)

    def quality(drop: Any, like: Any) -> float:
        return float(halves.divergences(drop, like).mean())

    like = search.refit.fitted(start.plan(6).drop)
    assert quality(larger.drop, like) <= quality(start.plan(6).drop, like)


def test_constraints_hold() -> None:
    model, _ = small(heads=4)
    dead(model, 1, 2)
    dead(model, 0, 0)
    search = searched(model, many(model), protect="L1.H2", least=3)
    found = exchanged(search, order_of(search, [(0, 1), (1, 0)]), [6])
    assert found is not None
    drop = found.plan(6).drop
    assert drop[search.layers[0].name] == [0]
    assert 2 not in drop[search.layers[1].name]
    assert all(len(heads) == 1 for heads in drop.values())


def test_what_judges_was_not_fitted_to() -> None:
    """Other examples in one fold change nothing in what is fitted to the other."""
    model, _ = small(heads=4)
    batches = many(model)
    other = [{k: v.clone() for k, v in batch.items()} for batch in batches]
    generator = torch.Generator().manual_seed(3)
    for batch in other:
        batch["input_ids"][1::2] = torch.randint(1, 100, batch["input_ids"][1::2].shape, generator=generator)
    found = []
    for those in (batches, other):
        search = searched(model, those, values=False)
        drop = {search.layers[0].name: [1], search.layers[1].name: [0, 3]}
        assert search.refit is not None
        like = search.refit.fitted(drop)
        like.ridges.update(dict.fromkeys(like.ridges, 0.1))
        found.append([search.refit.fitted_to(fold, drop, like) for fold in (0, 1)])
    for name in found[0][0].of:
        torch.testing.assert_close(found[0][0].of[name][0], found[1][0].of[name][0], rtol=1e-9, atol=1e-12)
        assert not torch.allclose(found[0][1].of[name][0], found[1][1].of[name][0], rtol=1e-3)


def test_each_half_is_judged_by_itself() -> None:
    """The divergences of both halves are those of every example, under weights that are fitted to the others."""
    model, _ = small(heads=4)
    batches = many(model, 2, 5)  # an odd number: folds go on across batches
    search = searched(model, batches)
    refit = search.refit
    assert refit is not None
    drop = {search.layers[0].name: [1, 2]}
    like = refit.fitted(drop)
    halves = Halves(refit)
    found = halves.divergences(drop, like).split(5)
    model.eval()
    for fold in (0, 1):
        with torch.no_grad():
            dense = torch.cat([model(**b).logits for b in batches]).softmax(-1)
            with refit.applied(refit.fitted_to(1 - fold, drop, like)), hp.mask(model, drop, layers=search.layers):
                now = torch.cat([model(**b).logits for b in batches]).log_softmax(-1)
        every = (dense * (dense.log() - now)).sum(-1)
        mine = [i for i in range(10) if i % 2 == fold]
        torch.testing.assert_close(found[fold], every[mine].double(), rtol=1e-6, atol=1e-9)


def test_where_nothing_can_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = small(heads=4)
    search = searched(model, many(model))
    start = order_of(search, [(0, 1)])
    assert exchanged(search, start, []) is None
    assert exchanged(search, start, [8]) is None
    whole = Order.of(search.layers, [{layer.name: [h] for layer in search.layers} for h in range(3)])
    assert exchanged(search, whole, [4]) is None
    few = searched(model, many(model, 1, 3))
    assert exchanged(few, order_of(few, [(0, 1)]), [7]) is None
    monkeypatch.setattr(fidelity, "_MOST", 0)
    assert exchanged(search, start, [7]) is None


def test_groups_are_exchanged_whole() -> None:
    config = tf.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, hidden_size=24, intermediate_size=32,
        vocab_size=100, pad_token_id=0,
    )  # fmt: skip
    model = randomise(tf.LlamaForSequenceClassification(config))
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 8:16] = 0
    search = searched(model, many(model))
    steps = [(0, 0), (0, 2), (1, 0), (1, 4), (0, 4), (1, 2)]
    start = Order.of(search.layers, [{search.layers[i].name: [h, h + 1]} for i, h in steps])
    found = exchanged(search, start, [10])
    assert found is not None
    assert found.plan(10).drop == {search.layers[1].name: [2, 3]}
