"""What a search finds, what it costs and when it is refused: against masking, counting and trying everything by hand."""

import copy
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import headprune as hp
from headprune.divergence import MOST
from headprune.latency import cache_bytes
from headprune.repairing import calibrate, fit_layers
from tests.support import brute
from tests.support.checks import hooks, same, state
from tests.support.errors import refuses
from tests.support.even import llama, llava, mistral
from tests.support.grouped import GroupedAttention, Shape
from tests.support.plain import WIDTH, Attention, Normed, noise
from tests.support.plans import any_constraints, check_nested, check_plan, gone
from tests.support.problems import small, unlabelled, without
from tests.support.zoo import ZOO, labelled, randomise, sizes, text

LOOKING = ["re-scored", "compensated", "greedy"]
Batches = list[dict[str, Tensor]]


def grouped(heads: int, kv: int, layers: int, **more: Any) -> tuple[nn.Module, Batches]:
    """A Llama and two batches that are padded on the left, as for generation."""
    config = tf.LlamaConfig(
        **sizes(
            "sdpa", hidden_size=8 * heads, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
            head_dim=4, intermediate_size=16, **more,
        )
    )  # fmt: skip
    model = randomise(tf.LlamaForCausalLM(config))
    batches = [text(3, 5, seed=seed) for seed in (1, 2)]
    return model, [labelled(model, {**b, "attention_mask": b["attention_mask"].flip(0, 1)}) for b in batches]


def random_scores(model: nn.Module, batches: Batches, values: Sequence[float] | None = None) -> hp.HeadScores:
    """Scores of a model's layers; with values of one's own."""
    scores = hp.score(model, batches[:1], "random")
    if values is None:
        return scores
    split = torch.tensor(values, dtype=torch.float64).split([layer.num_heads for layer in scores.layers])
    return replace(scores, values=dict(zip(scores.values, split, strict=True)))


def divergence(model: nn.Module, plan: hp.PruningPlan, batches: Batches) -> float:
    """Of the masked model's answers from the dense model's, in nats."""
    inputs = unlabelled(batches)
    dense = [brute.logits(model, batch) for batch in inputs]
    with hp.mask(model, plan, inputs[0]):
        return brute.kl(torch.cat(dense), torch.cat([brute.logits(model, batch) for batch in inputs]))


# -- every plan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", LOOKING)
@settings(max_examples=3)
@given(st.data())
def test_every_plan_holds(strategy: str, data: st.DataObject) -> None:
    """Plans are nested and can be pruned, what must stay stays, and the model is as it was."""
    kv = data.draw(st.sampled_from([1, 2, 3]))
    model, batches = grouped(kv * data.draw(st.integers(1, 3)), kv, data.draw(st.integers(1, 2)))
    layers, before = hp.find_attention(model, batches[0]), state(model)
    options = {
        **data.draw(any_constraints(layers)), "repair": data.draw(st.booleans()), "layers": layers, "choose": batches[1:],
    }  # fmt: skip
    total = sum(layer.num_heads for layer in layers)
    keep = data.draw(st.lists(st.integers(1, total), min_size=1, max_size=3))
    try:
        plans = hp.search(model, batches[:1], keep, strategy=strategy, **options)
    except hp.HeadPruneError:
        # What scores alone do not reach either.
        with pytest.raises(hp.HeadPruneError, match=r"out of reach|none would stay"):
            hp.search(model, batches[:1], keep, strategy="one-shot", scores=random_scores(model, batches), **options)
        return
    assert same(model, before)
    assert hooks(model) == 0
    assert plans == hp.search(model, batches[:1], keep, strategy=strategy, **options)
    assert [(plan.asked, plan.strategy) for plan in plans] == [(k, strategy) for k in keep]
    check_nested(plans)
    for plan in plans:
        check_plan(plan, layers, options["protect"], options["min_heads_per_layer"])
    hp.prune(copy.deepcopy(model), plans[0].drop, unlabelled(batches)[0], layers=layers)


@pytest.mark.parametrize("strategy", LOOKING)
@pytest.mark.parametrize("repair", [False, True])
def test_dead_heads_go_first(strategy: str, repair: bool) -> None:
    """By the divergence from the dense model no head is harmful."""
    model, batches = small(heads=4)
    for i, head in ((0, 2), (1, 0), (1, 3)):
        model.bert.encoder.layer[i].attention.output.dense.weight.data[:, 8 * head : 8 * head + 8] = 0
    layers = hp.find_attention(model, batches[0])
    plans = hp.search(model, unlabelled(batches), [5, 4], strategy=strategy, repair=repair, min_heads_per_layer=2)
    assert plans[0].drop == {layers[0].name: [2], layers[1].name: [0, 3]}
    assert list(map(len, plans[1].drop.values())) == [2, 2]


@pytest.mark.parametrize("strategy", ["re-scored", "greedy"])  # compensated does not look again
def test_one_of_two_duplicates_goes_first_and_the_other_late(strategy: str) -> None:
    """Without repair they are as important as they look."""
    model = randomise(tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=100, n_embd=32, n_head=4, n_layer=1))).double()
    attention = model.transformer.h[0].attn
    for p in (attention.c_attn.weight, attention.c_attn.bias):
        for start in (0, 32, 64):
            p.data[..., start + 8 : start + 16] = p.data[..., start : start + 8]
    attention.c_proj.weight.data[:16] *= 2
    batches = [text(8, 20, seed=seed) for seed in (1, 2)]
    first, second = hp.search(model, batches, [3, 2], strategy=strategy)
    assert gone(first) <= {("transformer.h.0.attn", 0), ("transformer.h.0.attn", 1)}
    assert len(gone(second) - gone(first)) == 1
    assert not gone(second) - gone(first) <= {("transformer.h.0.attn", 0), ("transformer.h.0.attn", 1)}
    (plain,) = hp.search(model, batches, 3, strategy=strategy, repair=False)
    assert gone(plain) <= {("transformer.h.0.attn", 2), ("transformer.h.0.attn", 3)}


def test_greedy_takes_what_costs_least() -> None:
    """By brute force over all heads, W_O's columns zeroed; first of all a harmful head, without which the labels are right."""
    model, batches = small(heads=3, layers=2)  # as many heads as it tries at once
    layers = hp.find_attention(model, batches[0])
    heads = [(i, h) for i in range(2) for h in range(3)]

    def loss(out: Sequence[tuple[int, int]], given: Batches) -> float:
        return without(model, given, [head not in out for head in heads])

    plans = hp.search(model, batches, [5, 4, 3], strategy="greedy", repair=False)
    out: list[tuple[int, int]] = []
    for plan in plans:
        out.append(min(set(heads) - set(out), key=lambda head: loss([*out, head], batches)))
        assert gone(plan) == {(layers[i].name, h) for i, h in out}
    with torch.no_grad(), hp.mask(model, {layers[0].name: [1]}, layers=layers):
        taught = [{**batch, "labels": model(**batch).logits.argmax(-1)} for batch in batches]
    if loss([], taught) > loss([(0, 1)], taught):
        (plan,) = hp.search(model, taught, 5, strategy="greedy", repair=False)
        best = min(heads, key=lambda head: loss([head], taught))
        assert gone(plan) == {(layers[best[0]].name, best[1])}


@pytest.mark.parametrize("head", range(3))
def test_greedy_never_takes_what_has_no_loss(head: int) -> None:
    """In half precision the answers may overflow without a head; `min` keeps a NaN that comes first."""
    model, batches = small(heads=3, layers=1)
    layers = hp.find_attention(model, batches[0])
    with torch.no_grad(), hp.mask(model, {layers[0].name: [head]}, layers=layers):
        overflowing = [model(**batch).logits for batch in batches]

    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        overflows = any(x.shape == output.logits.shape and torch.allclose(x, output.logits) for x in overflowing)
        return F.cross_entropy(output.logits, labels, reduction="none") * (math.nan if overflows else 1.0)

    pairs = [({k: v for k, v in batch.items() if k != "labels"}, batch["labels"]) for batch in batches]
    (plan,) = hp.search(model, pairs, 2, strategy="greedy", repair=False, loss_fn=loss_fn)
    assert gone(plan) != {(layers[0].name, head)}


def test_swap_counts_what_has_gone_before() -> None:
    """At the second number, heads that interact with those of the first cost more, or less."""
    model, batches = small(heads=4, layers=1)
    scores = random_scores(model, batches, [1, 2, 3, 4])
    for other, pair, second in ((1, 2.0, [0, 2]), (3, -2.5, [0, 3])):
        matrix = torch.diag(torch.tensor([1.0, 2, 3, 4], dtype=torch.float64))
        matrix[0, other] = matrix[other, 0] = pair
        given_ = replace(scores, matrix=matrix)
        plans = hp.search(model, batches, [3, 2], strategy="swap", scores=given_, repair=False)
        assert [next(iter(plan.drop.values())) for plan in plans] == [[0], second]


@pytest.mark.parametrize(("seed", "kept"), [(0, 8), (4, 9)])
def test_groups_or_slices_by_measure(seed: int, kept: int) -> None:
    """Of whole groups and of a head of every group, what stays nearer to the dense model on the examples that choose."""
    model, batches = grouped(6, 3, 2)
    randomise(model, seed)
    layers = hp.find_attention(model, batches[0])
    options: dict[str, Any] = {"strategy": "re-scored", "choose": batches[1:], "repair": False, "layers": layers}
    (best,) = hp.search(model, batches[:1], 9, **options)
    groups, _ = hp.search(model, batches[:1], 9, budgets="kv-cache 90%", **options)  # a cache shrinks by groups alone
    assert all({head ^ 1 for head in heads} == set(heads) for heads in groups.drop.values())
    assert (best.kept, groups.kept) == (kept, 8)
    assert divergence(model, best, batches[1:]) <= divergence(model, groups, batches[1:]) + 1e-9


def test_layers_that_are_given_are_those_that_lose_heads() -> None:
    """A search may know fewer layers than the repair."""
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    for strategy in LOOKING:
        (plan,) = hp.search(model, batches, 2, strategy=strategy, layers=layers[1:])
        assert (set(plan.drop), plan.kept, plan.total) == ({layers[1].name}, 2, 3)


def test_pairs_are_weighed_by_the_scores_own_order_of_layers() -> None:
    """By the search's, `swap` took other heads without a word where the scores were of more layers."""
    model, batches = small(4, 4)
    layers = hp.find_attention(model, batches[0])
    for some in (layers[2:], layers[::-1]):
        scores = [hp.score(model, batches, "fisher", layers=of) for of in (layers, some)]
        plans = [hp.search(model, batches, 3, strategy="swap", scores=s, layers=some, repair=False)[0] for s in scores]
        assert plans[0].drop == plans[1].drop


# -- which order is used ---------------------------------------------------------------------------------


class Ratio(nn.Module):
    """Its answers are no numbers without the first head."""

    first = WIDTH // 4  # features that it divides by

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(WIDTH, 3)
        randomise(self)
        self.attention.o.weight.data.copy_(torch.eye(WIDTH))
        self.attention.o.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out = self.attention(x)
        size = out[..., : self.first].abs().sum((-1, -2))
        return self.head(out.mean(1)) * (size / size)[:, None]


def test_an_order_whose_answers_are_no_numbers_is_the_last() -> None:
    """It was used if it came first: nothing is above NaN."""
    model = Ratio()
    batches = [(noise(4, 5, WIDTH), torch.tensor([0, 1, 2, 0])), (noise(6, 5, WIDTH)[2:], torch.tensor([0, 1, 2, 0]))]
    given_: dict[str, Any] = {"loss_fn": lambda out, labels: F.cross_entropy(out, labels, reduction="none")}
    scores = hp.score(model, batches, "random", **given_)
    orders = [replace(scores, method=m, values={"attention": torch.tensor(v).double()}) for m, v in (("a", [0, 1, 2, 3]), ("b", [3, 1, 2, 0]))]  # fmt: skip
    for both in (orders, orders[::-1]):
        (plan,) = hp.search(model, batches[:1], 3, choose=batches[1:], strategy="one-shot", scores=both, repair=False, **given_)  # fmt: skip
        assert (plan.method, plan.drop) == ("b", {"attention": [3]})


class GroupRatio(Ratio):
    """As `Ratio`, by the heads of a key/value group together."""

    first = WIDTH // 2

    def __init__(self) -> None:
        super().__init__()
        self.attention = randomise(GroupedAttention(Shape(2, 2, WIDTH // 4, True), WIDTH))
        self.attention.o_proj.weight.data.copy_(torch.eye(WIDTH))
        self.attention.o_proj.bias.data.zero_()


def test_groups_whose_answers_are_no_numbers_go_after_slices() -> None:
    model, batches = GroupRatio(), [(noise(8, 5, WIDTH)[i : i + 4], torch.tensor([0, 1, 2, 0])) for i in (0, 4)]
    given_: dict[str, Any] = {"loss_fn": lambda out, labels: F.cross_entropy(out, labels, reduction="none")}
    scores = hp.score(model, batches, "random", **given_)
    scores = replace(scores, values={"attention": torch.arange(4).double()})
    (plan,) = hp.search(model, batches[:1], 2, choose=batches[1:], strategy="one-shot", scores=scores, repair=False, **given_)  # fmt: skip
    assert plan.drop == {"attention": [0, 2]}


class Forward(torch.autograd.Function):
    """A kernel without a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        raise RuntimeError("There is no backward pass.")


def test_plans_that_are_not_repaired_are_compared_without_a_backward_pass() -> None:
    model, batches = small(4, 2)
    scores = [replace(hp.score(model, batches, "weight-norm"), method=name) for name in ("a", "b")]
    model.bert.encoder.register_forward_hook(lambda module, args, out: type(out)(Forward.apply(out[0])))
    (plan,) = hp.search(model, batches[:1], 5, choose=batches[1:], strategy="one-shot", scores=scores, repair=False)
    assert plan.kept == 5


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("most", [MOST, 0])
def test_a_language_models_plan_is_the_nearest_to_the_dense_answers(
    most: int, repair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where these are too many to keep; the loss of a few texts would have taken another one."""
    monkeypatch.setattr("headprune.divergence.MOST", most)
    model, batches = grouped(4, 2, 2)
    choose = [labelled(model, text(4, 6, seed=6))]
    scores = [replace(hp.score(model, batches, "random", seed=seed), method=f"m{seed}") for seed in range(4)]
    options: dict[str, Any] = {"choose": choose, "strategy": "one-shot", "repair": repair}
    alone = [hp.search(model, batches, 4, scores=each, **options)[0] for each in scores]
    (plan,) = hp.search(model, batches, 4, scores=scores, **options)
    before, nearness, losses = model(**choose[0]).logits.log_softmax(-1).detach(), [], []
    for own in alone:
        changed = copy.deepcopy(model)
        if repair:  # without the last step
            calibration = calibrate(model, hp.find_attention(model, choose[0]), batches)
            with calibration.applied(fit_layers(calibration, own.drop).by_module):
                changed = copy.deepcopy(model)
        with hp.mask(changed, own.drop, choose[0]):
            after = changed(**choose[0])
        each = (before.exp() * (before - after.logits.detach().log_softmax(-1))).sum(-1) * choose[0]["attention_mask"]
        nearness.append(float((each.sum(1) / choose[0]["attention_mask"].sum(1)).mean()))
        losses.append(float(after.loss.detach()))
    assert plan.drop == alone[nearness.index(min(nearness))].drop
    assert nearness.index(min(nearness)) != losses.index(min(losses))


def test_fewer_heads_are_wanted_where_accuracy_is_the_budget() -> None:
    model, batches = small(4, 2)
    choose = [labelled(model, text(12, 7, seed=7), seed=7)]
    scores = [replace(hp.score(model, batches, "random", seed=seed), method=f"m{seed}") for seed in range(3)]
    options: dict[str, Any] = {"choose": choose, "strategy": "one-shot", "repair": False, "budgets": "drop 0.6"}
    alone = [hp.search(model, batches, scores=each, **options)[0] for each in scores]
    (plan,) = hp.search(model, batches, scores=scores, **options)
    assert len({each.kept for each in alone}) > 1
    assert plan.kept == min(each.kept for each in alone)


# -- cost ------------------------------------------------------------------------------------------------


@contextmanager
def counting(model: nn.Module) -> Iterator[Counter[Any]]:
    """Passes through the model by hooks: ``("forward", rows)``, ``("backward", rows)``, and backward ones by their first tokens."""
    seen: Counter[Any] = Counter()

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        rows, first = len(output.logits), str(kwargs["input_ids"][0, :3].tolist())
        seen["forward", rows] += 1
        if output.logits.requires_grad:
            output.logits.register_hook(lambda slope: seen.update([("backward", rows), (first, 0)]))

    handle = model.register_forward_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("strategy", LOOKING)
def test_a_search_costs_what_it_says_before_and_after(strategy: str, repair: bool, caplog: Any) -> None:
    """A backward pass counts as two."""
    caplog.set_level(logging.INFO, "headprune")
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    with counting(model) as seen:
        (plan,) = hp.search(model, batches * 3, 2, strategy=strategy, layers=layers, repair=repair)
    took = sum(count * rows * (1 + (kind == "backward")) for (kind, rows), count in seen.items() if rows) / 27
    (note,) = re.findall(r"took about ([\d,]+) forward passes over 27 examples", " ".join(plan.notes))
    assert int(note) == pytest.approx(took, abs=3)  # a few examples are looked at first, to see what can be refitted
    (line,) = [text for text in caplog.messages if "Planning will take" in text]
    told = re.search(r"about ([\d,]+) forward passes over 27 examples \(([\d.]+) MFLOPs\)", line)
    assert told
    assert 0.8 * int(told[1]) <= int(note) <= 1.1 * int(told[1])  # greedy has fewer heads to try at the end
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(**unlabelled(batches)[2])  # of median size
    assert float(told[2]) == pytest.approx(int(told[1]) * 9 * counter.get_total_flops() / 1e6, rel=0.1)


def test_the_dense_model_is_looked_at_once_for_all_orders(caplog: pytest.LogCaptureFixture) -> None:
    """What is said of an order is its whole cost, whatever other orders have made before."""
    caplog.set_level(logging.INFO, "headprune")
    model, batches = small()
    choose, layers = [labelled(model, text(4, 7, seed=9))], hp.find_attention(model, batches[0])
    options: dict[str, Any] = {"layers": layers, "repair": False, "scores": ()}
    with counting(model) as seen:
        (best,) = hp.search(model, batches, 2, choose=choose, **options)
    (together,) = re.findall("All orders together took about (.*) forward passes over 9", " ".join(caplog.messages))
    with counting(model) as alone:
        (same_again,) = hp.search(model, batches, 2, strategy=best.strategy, **options)
    assert same_again.notes == best.notes
    assert seen["backward", 4] == 4  # the looks of re-scored, of which compensated takes the first
    assert alone["backward", 4] == (4 if best.strategy == "re-scored" else 1)
    assert float(together) == pytest.approx(4 * 3, abs=0.5)


@pytest.mark.parametrize(("strategy", "looks"), [("compensated", 1), ("re-scored", 3)])
def test_groups_and_slices_share_the_first_look(strategy: str, looks: int) -> None:
    """Two looks at the dense model were the same passes; where heads have gone, each kind needs its own."""
    model, batches = grouped(6, 3, 2)
    layers, repair = hp.find_attention(model, batches[0]), False
    with counting(model) as seen:
        hp.search(model, batches[:1], 9, choose=batches[1:], strategy=strategy, layers=layers, repair=repair)
    assert seen["backward", 3] - 3 == looks  # three are for a single example each, to see whether rows are apart


@pytest.mark.parametrize(("heads", "keep", "looks"), [
    (6, [6, 3], 8),  # of 12: at 10, 9, 8, 7, 6, 5, 4 and 3
    (6, [11], 1), (3, [5], 1), (3, [5, 5, 2], 4), (3, [6], 1),
])  # fmt: skip
def test_the_model_is_looked_at_again_whenever_a_sixth_is_gone(heads: int, keep: list[int], looks: int) -> None:
    model, batches = small(heads)
    with counting(model) as seen:
        hp.search(model, batches[:1], keep, strategy="re-scored", repair=False)
    assert seen["backward", 4] == looks


def test_a_look_takes_as_many_examples_as_it_may_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = small(layers=1)
    batches = [text(64, 5, seed=seed) for seed in range(5)]
    firsts = [str(batch["input_ids"][0, :3].tolist()) for batch in batches]
    for effort, chosen in (("low", [0, 2]), ("normal", range(5)), ("high", range(5))):
        with counting(model) as seen:
            hp.search(model, batches, 2, strategy="compensated", repair=False, effort=effort)
        assert [i for i, first in enumerate(firsts) if seen[first, 0]] == list(chosen)


@pytest.mark.parametrize(("effort", "limit"), [("low", "50 TFLOPs"), ("normal", "500 TFLOPs"), ("high", None)])
def test_an_order_that_would_be_too_much_work_is_left_out(
    effort: str, limit: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is said; who asks for it gets it."""
    caplog.set_level(logging.INFO, "headprune")
    monkeypatch.setattr(FlopCounterMode, "get_total_flops", lambda counter: 10**14)
    model, batches = small()
    options: dict[str, Any] = {"choose": batches[2:], "scores": (), "effort": effort, "repair": False}
    hp.search(model, batches[:2], 3, **options)
    left_out = [line for line in caplog.messages if "Not tried: re-scored" in line]
    assert len(left_out) == (limit is not None)
    assert limit is None or f"it may take {limit}" in left_out[0]
    (plan,) = hp.search(model, batches[:2], 3, **{**options, "strategy": "re-scored"})
    assert plan.strategy == "re-scored"


def test_a_slow_machine_plans_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = small()
    heard: list[tuple[Any, ...]] = []
    options: dict[str, Any] = {"choose": batches[2:], "progress": lambda *step: heard.append(step)}
    plans = hp.search(model, batches[:2], [4, 2], **options)
    labels = {note.partition(" (")[0] for _, _, note in heard}
    assert {"scoring by gradient", "planning by re-scored", "fitting keep 4, keep 2"} <= labels
    assert all(done <= total for done, total, _ in heard)
    clock = iter(range(0, 10**9, 3600))
    for name in ("monotonic", "time", "perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: float(next(clock)))
    assert hp.search(model, batches[:2], [4, 2], **options) == plans


# -- answers that cannot be looked at ---------------------------------------------------------------------


class Answers(nn.Module):
    """Logits by name, for which no labels are needed."""

    def __init__(self, kind: type[Attention], detached: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head, self.detached = kind(), kind(), nn.Linear(WIDTH, 3), detached

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.first(x)
        logits = self.head((x + self.second(x)).mean(1))
        return {"logits": logits.detach() if self.detached else logits}


@pytest.mark.parametrize("strategy", ["auto", *LOOKING])
def test_a_search_where_no_output_projection_can_be_refitted(strategy: str) -> None:
    model, batches = randomise(Answers(Normed)), [{"x": noise(4, 5, WIDTH)}, {"x": noise(6, 5, WIDTH)}]
    layers = hp.find_attention(model, batches[0])
    (plan,) = hp.search(model, batches, 4, layers=layers, strategy=strategy)
    assert plan.kept == 4
    assert not hp.repair(model, plan, batches, layers=layers).layers
    assert "about 0 forward passes" not in "".join(plan.notes)
    hp.prune(model, plan, batches[0], layers=layers)


@pytest.mark.parametrize("kind", [Attention, Normed])
def test_answers_that_cannot_be_differentiated_are_refused(kind: type[Attention]) -> None:
    """Where W_O cannot be refitted nothing else would say so, and heads would look free."""
    model = randomise(Answers(kind, detached=True))
    batches = [{"x": noise(4, 5, WIDTH)}, {"x": noise(6, 5, WIDTH)}]
    with pytest.raises(hp.HeadPruneError, match="do not depend on any head by what can be differentiated"):
        hp.search(model, batches, 4, strategy="compensated")


# -- budgets that are counted, timed or measured ----------------------------------------------------

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
def test_counted_budgets_are_met_with_most_heads(kind: str, count: Any, heads: float, encoder: Problem) -> None:
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
        assert count(pruned(model, plan.drop, batches[0]), batches[0]) == dense - (6 - plan.kept) * HEAD[kind]
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


@pytest.mark.parametrize("name", ["bart", "sliding"])
def test_caches_that_labels_or_a_window_hid(name: str) -> None:
    """BART keeps no cache if it is given labels; a layer with a window holds fewer tokens than the longest one."""
    if name == "bart":
        config = tf.BartConfig(
            vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
        )  # fmt: skip
        model, bytes_ = randomise(tf.BartForConditionalGeneration(config)), 2 * 2 * 32 * 4
    else:
        config = tf.Gemma3TextConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=32,
            sliding_window=4, layer_types=["sliding_attention", "full_attention"], max_position_embeddings=32,
        )  # fmt: skip
        model, bytes_ = randomise(tf.Gemma3ForCausalLM(config)), 2 * 2 * 16 * 4
    ids = torch.randint(5, 60, (4, 10), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}]
    assert cache_bytes(model, batches[0]) == bytes_
    other_ids = ids.flip(1)
    choose = [{"input_ids": other_ids, "attention_mask": torch.ones_like(ids), "labels": other_ids}]
    (plan,) = hp.search(model, batches, budgets="kv-cache 50%", choose=choose, strategy="compensated", repair=False)
    hp.prune(model, plan, unlabelled(batches)[0])
    assert cache_bytes(model, batches[0]) <= bytes_ / 2


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
