"""Budgets that are counted, timed or measured: held by the model that was really pruned, with as many heads as can be."""

import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import headprune as hp
from tests.support.errors import refuses
from tests.support.even import llama, llava, mistral
from tests.support.plans import check_nested
from tests.support.problems import small, unlabelled
from tests.support.zoo import ZOO, labelled, text

Batch = dict[str, Tensor]
Problem = tuple[nn.Module, list[Batch], list[Batch]]


@pytest.fixture
def encoder() -> Problem:
    """A model of 6 heads in 2 layers, batches to fit to, and batches to choose by."""
    model, _ = small()
    batches = [labelled(model, text(rows, 7, seed=seed), seed=seed) for seed, rows in enumerate((4, 4, 24, 24))]
    return model, batches[:2], batches[2:]


def inputs_of(batch: Batch) -> Batch:
    return unlabelled([batch])[0]


def other(batch: Batch) -> Batch:
    """Other examples of the same form."""
    named = "pixel_values" if "pixel_values" in batch else "input_ids"
    return {**batch, named: batch[named] + 1}


def by_scores(model: nn.Module, batch: Batch, values: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Options of a search that goes by random scores, or by those that are given."""
    scores = hp.score(model, [batch], "random")
    scores = scores if values is None else replace(scores, values=values)
    return {"strategy": "one-shot", "scores": scores, "repair": False, "layers": list(scores.layers)}


def parameters(model: nn.Module, batch: Batch) -> float:
    return sum({id(p): p.numel() for p in model.parameters()}.values())


@torch.no_grad()
def operations(model: nn.Module, batch: Batch) -> float:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**inputs_of(batch))
    return counter.get_total_flops()


@torch.no_grad()
def cached(model: nn.Module, batch: Batch) -> float:
    """Bytes per token in a real cache."""
    cache = model(**inputs_of(batch), use_cache=True).past_key_values
    cache = getattr(cache, "self_attention_cache", cache)
    held = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum(t.nbytes for t in held) / max(t.shape[0] * t.shape[2] for t in held)


def pruned(model: nn.Module, drop: dict[str, list[int]], example: Batch) -> nn.Module:
    smaller = copy.deepcopy(model)
    hp.prune(smaller, drop, inputs_of(example))
    return smaller


# A head of the encoder: rows of Q, K and V with their biases, and columns of W_O; at 4 x 7 tokens, with the products of its attention.
HEAD = {"params": 4 * 24 * 8 + 3 * 8, "flops": 28 * 2 * 4 * 24 * 8 + 2 * 2 * 4 * 7 * 7 * 8}


@pytest.mark.parametrize(("kind", "count", "heads"), [("params", parameters, 1.5), ("flops", operations, 2.0)])
def test_counted_budgets_are_met_with_as_many_heads_as_can_be(
    kind: str, count: Any, heads: float, encoder: Problem
) -> None:
    """As a share of the dense model's, and in their own unit; nested with numbers of heads. A head's share is counted by hand."""
    model, batches, choose = encoder
    dense = count(model, batches[0])
    asked = [f"{kind} {100 - 100 * heads * HEAD[kind] / dense:.6f}%", f"--target-{kind} {dense - HEAD[kind]:.0f}"]
    options = by_scores(model, batches[0])
    plans = hp.search(model, batches, [4, 1], choose=choose, budgets=asked, **options)
    assert [plan.budget for plan in plans[2:]] == [asked[0], f"{kind} {dense - HEAD[kind]:.0f}"]
    assert [plan.kept for plan in plans] == [4, 1, 4, 5]  # to the last parameter or operation
    check_nested(plans)
    for plan in plans[2:]:
        smaller = pruned(model, plan.drop, batches[0])
        assert count(smaller, batches[0]) == dense - (6 - plan.kept) * HEAD[kind]
    assert count(model, batches[0]) == dense


def test_a_budget_of_time_is_met(encoder: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by the weights of the linear layers that a pass goes through."""
    model, batches, choose = encoder
    now = [0.0]

    def pass_by(module: nn.Module, args: Any) -> None:
        now[0] += module.weight.numel() / 1e5

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in linear:
        module.register_forward_pre_hook(pass_by)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    dense, head = sum(module.weight.numel() for module in linear) / 1e5, 4 * 24 * 8 / 1e5
    asked = [f"latency {100 - 150 * head / dense:.6f}%", f"latency {1000 * (dense - 2.5 * head):.6f} ms", f"latency {dense - head + 1e-6:.7f}s"]  # fmt: skip
    plans = hp.search(model, batches, choose=choose, budgets=asked, **by_scores(model, batches[0]))
    assert [plan.kept for plan in plans] == [4, 3, 5]


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_budget_of_lost_accuracy(allowed: int, encoder: Problem) -> None:
    """The fewest heads for which, and for all more, the lower end of the 95 % interval that `compare` gives holds it."""
    model, batches, choose = encoder
    dense, options = hp.evaluate(model, choose), by_scores(model, batches[0])
    every = hp.search(model, batches, range(1, 6), choose=choose, **options)
    highs = {}
    for plan in every:
        with hp.mask(model, plan, layers=options["layers"]):
            change = hp.compare(dense, hp.evaluate(model, choose))
        assert change.metric == "accuracy"
        highs[plan.kept] = -change.low
    amount = sorted(highs.values())[allowed]
    failing = [kept for kept, high in highs.items() if high > amount + 1e-6]
    holding = [kept for kept in highs if kept > max(failing, default=0)]
    asked = {"budgets": f"max-drop {amount + 1e-6:.6f}", "choose": choose, **options}
    if not holding:
        told = f"out of reach: with . of 6 heads .* than {min(highs.values()):.4f}"
        refuses(told, hp.search, model, batches, **asked)
        return
    (plan,) = hp.search(model, batches, **asked)
    assert plan.budget == f"drop {amount + 1e-6:.6f}"
    assert plan.kept == min(holding)


@pytest.mark.parametrize("name", ["llama", "t5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "gpt2"))])
def test_cache_bytes_are_those_of_a_real_cache(name: str) -> None:
    """The search computes them from the heads: a budget of what the cache of a pruned model holds is met by just its plan."""
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    decoders, batch = [layer for layer in layers if layer.kind == "decoder"], labelled(model, example)
    everything = {layer.name: list(range(layer.num_heads)) for layer in decoders[:1]}
    a_unit_of_each = {layer.name: list(layer.units[-1]) for layer in decoders}
    for drop in (everything, a_unit_of_each):
        values = {layer.name: torch.ones(layer.num_heads).double() for layer in layers}
        for name_, heads in drop.items():
            values[name_][heads] = torch.linspace(-2, -1, len(heads)).double()
        left = cached(pruned(model, drop, example), example)
        asked = {"budgets": f"kv-cache {left:.0f}", "choose": [other(batch)], **by_scores(model, batch, values)}
        (plan,) = hp.search(model, [batch], **asked)
        assert plan.drop == drop or drop == everything  # which keeps a head for the cache, so that the last need not go
        assert cached(pruned(model, plan.drop, example), example) == left
        share = f"kv-cache {100 * left / cached(model, example) + 1e-6:.8f}%"
        assert hp.search(model, [batch], **{**asked, "budgets": share})[0].drop == plan.drop
    if decoders[0].groups:  # a head of every group leaves it
        slices = pruned(model, {decoders[0].name: [unit[0] for unit in decoders[0].units]}, example)
        assert cached(slices, example) == cached(model, example)


@pytest.mark.parametrize(("given", "says"), [
    ({"budgets": "weight 80%"}, r"no budget 'weight'. Choose from keep, flops, params"), ({"budgets": ["flops"]}, "--target-flops  is no budget"),
    ({"budgets": []}, "keep= names no number of heads, and budgets= nothing else"), ({"budgets": "flops 100%"}, "is met by the dense model, so"),
    ({"budgets": "params 1G"}, "is met by the dense model \\("), ({"budgets": "kv-cache 50%"}, "has no key/value cache"),
    ({"budgets": "drop 2"}, "allows to lose all accuracy.*did you mean 2%"), ({"budgets": "keep 99"}, "more than all 6 heads"),
    ({"budgets": "params 1%", "strategy": "compensated"}, r"--target-params 1% is out of reach: .* 0 of 6, .* nearest that can be met is --target-params"),
    ({"budgets": "params 60%", "strategy": "compensated", "protect": "L0,L1.H1", "min_heads_per_layer": 1},
     r"compensated can keep \(protected: L0, L1\.H1; at least 1 in every layer\), 4 of 6"),
    ({"budgets": "drop 0", "strategy": "compensated"}, r"out of reach: with \d of 6 heads the loss is"),
    ({"budgets": "drop 0.1", "loss_fn": F.cross_entropy}, "needs an accuracy or a perplexity"),
    ({"budgets": "drop 0.1", "choose": None, "one": True}, "measured on other examples"),
])  # fmt: skip
def test_mistakes(given: dict[str, Any], says: str, encoder: Problem) -> None:
    model, batches, choose = encoder
    options = {"choose": choose, "repair": False, **given}
    refused = refuses(says, hp.search, model, batches[:1] if options.pop("one", False) else batches, **options)
    assert refused.hint


# -- as many heads in every layer ---------------------------------------------------------------------


def uniform(
    made: tuple[nn.Module, Any], keep: Any, labels: bool = True, **more: Any
) -> tuple[list[hp.PruningPlan], hp.HeadScores]:
    """Plans of as many heads in every layer, by random scores."""
    model, example = made
    layers, batch = hp.find_attention(model, example), labelled(model, example) if labels else example
    scores = hp.score(model, [batch], "random", layers=layers, distil=not labels)
    options: dict[str, Any] = {"strategy": "uniform", "scores": scores, "layers": layers, "repair": False, **more}
    return hp.search(model, [batch], keep, choose=[other(batch)], **options), scores


SLOW = [pytest.param(name, kept, marks=pytest.mark.slow) for name, kept in (("vit", [9, 6, 3]), ("t5", [18, 12, 6]))]


@pytest.mark.parametrize(("name", "kept"), [("qwen3", [6]), ("bert", [9, 6, 3]), *SLOW])
def test_every_plan_is_one_that_the_class_can_have(name: str, kept: list[int], tmp_path: Any) -> None:
    """By its saved folder, which needs no code of its own; where no number can be represented, that is said."""
    model, example = made = ZOO[name]()
    plans, _ = uniform(made, kept)
    assert [plan.kept for plan in plans] == kept
    for plan in plans:
        folder = hp.save(pruned(model, plan.drop, example), tmp_path / str(plan.kept))
        assert ("auto_map" in (folder / "config.json").read_text()) == (name == "bert")
        assert len({len(heads) for heads in plan.drop.values()}) == 1
    if name == "bert":
        assert "cannot have another number of heads, so the folder loads with trust_remote" in plans[0].notes[0]


def test_between_two_numbers_it_rounds_down() -> None:
    """Llama's 6 heads can be 4, 3, 2 or 1, not 5: they divide the hidden size."""
    plans, scores = uniform(llama(48, 6), [11, 8, 7, 6, 4, 2])
    assert [plan.kept for plan in plans] == [8, 8, 6, 6, 4, 2]
    assert plans[1].notes[0] == "LlamaForCausalLM can have 6, 4, 3, 2, 1 heads in every layer."
    assert plans[0].notes[0].startswith("8 of 12 heads are kept, not 11")
    for layer in scores.layers:  # the most important ones
        lost = scores.values[layer.name][plans[0].drop[layer.name]]
        assert lost.max() <= scores.values[layer.name].sort().values[1]
    refuses(r"cannot have fewer heads in every layer.*Keep at least 2", uniform, llama(48, 6), 1)
    protected, _ = uniform(llama(48, 6), [8, 6], protect="L0.H0,L0.H1,L0.H2")
    assert [plan.drop["model.layers.0.self_attn"] for plan in protected][1] == [3, 4, 5]
    refuses("Keep at least 6", uniform, llama(48, 6), 4, protect="L0.H0,L0.H1,L0.H2")


def test_layers_that_share_a_position_bias_lose_the_same_heads() -> None:
    """The heads with the least score in sum; cross-attention has no such bias, and chooses by itself."""
    (plan,), scores = uniform(ZOO["t5"](), 18)
    names = [layer.name for layer in scores.layers]
    for stack in ("encoder", "decoder"):
        own = [name for name in names if name.startswith(stack) and name.endswith("SelfAttention")]
        total = torch.stack([scores.values[name] for name in own]).sum(0)
        assert [plan.drop[name] for name in own] == [[int(total.argmin())]] * 2
    for cross in (name for name in names if name.endswith("EncDecAttention")):
        assert plan.drop[cross] == [int(scores.values[cross].argmin())]


def test_parts_that_the_class_cannot_state_keep_their_heads() -> None:
    """Of a language model that sees, the image encoder."""
    (plan,), _ = uniform(llava(), 14, labels=False)
    assert all("language_model" in name for name in plan.drop)
    assert "LlavaForConditionalGeneration can have 4, 2 heads in every layer." in plan.notes
    reason = "model.vision_tower.encoder.layers.0.self_attn and 1 more: LlavaForConditionalGeneration cannot have"
    assert any(reason in note for note in plan.notes)


def test_a_class_without_a_place_for_biases_gets_none(tmp_path: Any) -> None:
    """Plans of Mistral are compared without them."""
    model, example = mistral()
    batches = [labelled(model, example, seed) for seed in range(4)]
    scores = hp.score(model, batches, "gradient")
    (plan,) = hp.search(model, batches, 0.5, strategy="uniform", scores=scores, seed=1)
    assert any("so repair adds none" in note for note in plan.notes)
    hp.repair(model, plan, batches, biases=False)
    hp.prune(model, plan, example)
    assert "auto_map" not in (hp.save(model, tmp_path / "m") / "config.json").read_text()
