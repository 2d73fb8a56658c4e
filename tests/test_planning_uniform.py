"""The strategy uniform: numbers of heads that the stock class can have."""

from typing import Any

import pytest
import torch

import headprune as hp
from headprune.checkpoint import load_call
from headprune.planning import Constraints, Order, Search, arrange
from headprune.scoring.scores import HeadScores
from tests.support.even import MADE, llama
from tests.support.zoo import labelled


def order_of(made: tuple[Any, Any], **more: Any) -> tuple[Order, HeadScores, Any, Any]:
    model, example = made
    layers = hp.find_attention(model, example)
    scores = hp.score(model, [example], "random", layers=layers, distil=True)
    return arrange(Search(layers, scores, model=model, **more), "uniform", [1]), scores, model, example


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "t5", "llava")]


@pytest.mark.parametrize("name", ["qwen3", "bert", *SLOW])
def test_every_plan_is_one_that_the_class_can_have(name: str, tmp_path: Any) -> None:
    """By its saved folder, which is tried with answers."""
    import copy

    order, _, model, example = order_of(MADE[name]())
    assert order.stock == (name != "bert")
    assert len(order.steps) == {"qwen3": 1, "vit": 3, "t5": 3, "bert": 4, "llava": 1}[name]
    for number, plan in enumerate(order.plans()):
        if number:
            pruned = copy.deepcopy(model)
            hp.prune(pruned, plan, example)
            assert load_call(hp.save(pruned, tmp_path / str(number))).remote == (name == "bert")


def test_between_two_numbers_it_rounds_down() -> None:
    """Llama's 6 heads can be 4, 3, 2 or 1, not 5: they divide the hidden size."""
    order, scores, *_ = order_of(llama(hidden=48, heads=6))
    assert order.kept() == (12, 8, 6, 4, 2)
    assert order.notes == ("LlamaForCausalLM can have 6, 4, 3, 2, 1 heads in every layer.",)
    plan = order.plan(11)
    assert plan.kept == 8
    assert plan.notes[0].startswith("8 of 12 heads are kept, not 11")
    for layer in scores.layers:  # the most important ones
        gone = scores.values[layer.name][plan.drop[layer.name]]
        assert gone.max() <= scores.values[layer.name].sort().values[1]
    with pytest.raises(hp.HeadPruneError, match=r"cannot have fewer heads in every layer.*Keep at least 2"):
        order.plan(1)


def test_layers_that_share_a_position_bias_lose_the_same_heads() -> None:
    """The heads with the least score in sum; cross-attention has no such bias, and chooses by itself."""
    order, scores, *_ = order_of(MADE["t5"]())
    plan = order.plan(18)
    names = [layer.name for layer in scores.layers]
    for stack in ("encoder", "decoder"):
        own = [n for n in names if n.startswith(stack) and n.endswith("SelfAttention")]
        total = torch.stack([scores.values[n] for n in own]).sum(0)
        assert [plan.drop[n] for n in own] == [[int(total.argmin())]] * 2
    for cross in (n for n in names if n.endswith("EncDecAttention")):
        assert plan.drop[cross] == [int(scores.values[cross].argmin())]


def test_parts_that_cannot_be_stated_stay() -> None:
    order, *_ = order_of(MADE["llava"]())
    assert all("language_model" in name for plan in order.plans() for name in plan.drop)
    (reason,) = [reason for reason in order.stays if "cannot have another number of heads there" in reason]
    assert reason.startswith(
        "model.vision_tower.encoder.layers.0.self_attn and 1 more: LlavaForConditionalGeneration cannot"
    )
    assert order.notes == ("LlavaForConditionalGeneration can have 4, 2 heads in every layer.",)


def test_where_no_number_can_be_represented() -> None:
    order, *_ = order_of(MADE["bert"]())
    assert order.kept() == (12, 9, 6, 3, 0)
    assert "cannot have another number of heads, so the folder loads with trust_remote_code=True" in order.notes[0]
    assert "--pad" not in order.notes[0]


def test_protected_heads_stay() -> None:
    model, example = llama(hidden=48, heads=6)
    layers = hp.find_attention(model, example)
    order, *_ = order_of((model, example), constraints=Constraints.parse("L0.H0,L0.H1,L0.H2", layers))
    assert order.kept() == (12, 8, 6)
    assert all(h > 2 for plan in order.plans() for h in plan.drop.get(layers[0].name, ()))


def test_written_and_read() -> None:
    order, *_ = order_of(MADE["qwen3"]())
    assert order.stock
    assert Order.from_json(order.to_json()) == order


def test_search_and_repair(tmp_path: Any) -> None:
    """Mistral's class has no place for the biases of a repair, so plans are compared without them."""
    model, example = MADE["mistral"]()
    batches = [labelled(model, example, seed) for seed in range(4)]
    scores = hp.score(model, batches, "gradient")
    (plan,) = hp.search(model, batches, 0.5, strategy="uniform", scores=scores, seed=1)
    assert plan.strategy == "uniform"
    assert any("so repair adds none" in note for note in plan.notes)
    hp.repair(model, plan, batches, biases=False)
    hp.prune(model, plan, example)
    assert not load_call(hp.save(model, tmp_path / "m")).remote
