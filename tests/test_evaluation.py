"""Metrics, intervals and tests against independent computations."""

import math
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from scipy.stats import binom, spearmanr
from scipy.stats import t as student
from torch import Tensor, nn

import headprune as hp
from headprune import divergence
from headprune.divergence import DRAWN, Divergence, Fidelity
from headprune.evaluation import Change, Measurement, compare, evaluate, interval
from headprune.scoring.base import Estimate, standard_error
from headprune.uncertainty import FEW, carried_by, split_half
from tests.support import brute
from tests.support.plain import WIDTH, Attention, model_of
from tests.support.problems import small
from tests.support.zoo import bert, labelled, llama, randomise, sizes, text

OTHER = "no measurable change"


def measured(correct: np.ndarray) -> Measurement:
    return Measurement({}, 1 - correct.astype(float), correct.astype(float), np.ones(len(correct), dtype=int))


def flipped(n: int, lost: int, gained: int) -> Change:
    """n examples, all right before or after but for those that changed sides."""
    dense, pruned = np.ones(n), np.ones(n)
    pruned[:lost], dense[lost : lost + gained] = 0, 0
    return compare(measured(dense), measured(pruned), "accuracy")


@pytest.mark.parametrize("metric", ["pearson", "wer"])  # of which higher and lower values are better
def test_what_is_not_known_is_no_change(metric: str) -> None:
    one = measured(np.ones(3))
    one.metrics[metric], one.jackknife[metric] = (
        math.nan,
        hp.metrics.metric_named(metric).jackknife(np.full(3, math.nan)),
    )
    with np.testing.suppress_warnings() as quiet:
        quiet.filter(RuntimeWarning)
        assert compare(one, one, metric).verdict == OTHER


def test_verdicts() -> None:
    same = measured(np.random.default_rng(0).random(200) > 0.2)
    change = compare(same, same, "accuracy")
    assert (change.value, change.p_value, change.low, change.verdict) == (0, 1, -change.high, OTHER)
    assert 0.01 < change.high < 0.02  # one more of 200 each way, in t's quantile: some might have changed sides
    assert compare(same, same, "perplexity").high == 0  # losses equal to the bit are those of one model
    assert [flipped(100, *n).verdict for n in ((4, 0), (8, 0), (0, 8))] == [OTHER, "worse", "better"]
    good, bad = measured(np.ones(100)), measured(np.r_[np.ones(80), np.zeros(20)])
    for metric in ("accuracy", "perplexity", "loss"):
        assert [compare(good, bad, metric).verdict, compare(bad, good, metric).verdict] == ["worse", "better"]


def test_mistakes() -> None:
    some, nowhere = measured(np.ones(4)), np.full(4, np.nan)
    model, example = bert()
    model.classifier.bias.data[0] = float("inf")
    for message, refused in (
        ("no interval of 'f1'", lambda: compare(some, some, "f1")),
        ("not known", lambda: interval(Measurement({}, np.ones(4), nowhere, some.tokens), "accuracy")),
        ("different labels", lambda: compare(some, Measurement({}, some.loss, some.correct, 2 * some.tokens), "accuracy")),
        ("no examples", lambda: evaluate(model, [])), ("loss of example 0", lambda: evaluate(model, [labelled(model, example)])),
    ):  # fmt: skip
        with pytest.raises(hp.HeadPruneError, match=message):
            refused()


def test_interval_p_and_verdict_never_contradict_one_another() -> None:
    for n in (1, 2, 5, 8, 20, 100, 1500):
        for lost in range(min(n, 14) + 1):
            for gained in range(min(n - lost, 8) + 1):
                c = flipped(n, lost, gained)
                assert (c.verdict == "no measurable change") == (c.p_value >= 0.05) == (c.low <= 0 <= c.high)
                assert -1 <= c.low <= c.value <= c.high <= 1
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 10, 60):
        for shift in (0.0, 0.1, 1.0):
            one, other = (Measurement({}, rng.random(n) + at, np.zeros(n), rng.integers(1, 9, n)) for at in (0, shift))
            for metric in ("perplexity", "loss"):
                c = compare(one, Measurement({}, other.loss, other.correct, one.tokens), metric)
                assert (c.verdict == "no measurable change") == (c.p_value >= 0.05) == (c.low <= 0 <= c.high)
                assert c.low <= c.value <= c.high


def test_the_formula_by_hand() -> None:
    """Two labels and one label an example, one of which is lost: a ratio's residuals, and the largest of them twice more."""
    tokens = np.array([2, 1, 2, 1])
    dense = Measurement({}, np.zeros(4), tokens.astype(float), tokens)
    pruned = Measurement({}, np.zeros(4), np.array([1.0, 1, 2, 1]), tokens)
    change = compare(dense, pruned, "accuracy")
    residuals = [-1 + 2 / 6, 1 / 6, 2 / 6, 1 / 6]
    error = math.sqrt(sum(r * r for r in residuals) + 2 * 1.0) / 6  # one label at least
    assert change.value == pytest.approx(-1 / 6)
    assert change.high - change.value == pytest.approx(student.ppf(0.975, 3) * error)
    assert change.p_value == pytest.approx(2 * student.sf(1 / 6 / error, 3))


@pytest.mark.parametrize("n", [8, 20, 50, 200, 1500])
def test_equal_models_are_said_to_differ_at_most_five_times_in_a_hundred(n: int) -> None:
    """Added up over all outcomes, for flips as rare and as common as they come."""
    for rate in (r for r in (0.005, 0.02, 0.1, 0.3) if n * r <= 30):  # more is the normal case
        wrong, most = 0.0, min(n, int(n * rate + 4 * math.sqrt(n * rate) + 4))
        for flips in range(1, most + 1, 1 + most // 60):
            told = 0  # how few must be lost, of so many flips, for a verdict; the other side is as likely
            while told <= flips // 2 and flipped(n, told, flips - told).verdict != "no measurable change":
                told += 1
            chance = float(binom.pmf(range(flips, min(flips + 1 + most // 60, n + 1)), n, rate).sum())
            wrong += chance * min(1.0, 2 * float(binom.cdf(told - 1, flips, 0.5)))
        assert wrong <= 0.05


def test_perplexity_of_equal_models_is_said_to_differ_at_most_five_times_in_a_hundred() -> None:
    rng = np.random.default_rng(0)
    for n in (3, 8, 20, 50):
        told = 0
        for _ in range(300):
            x = rng.normal(size=n) if rng.random() < 0.5 else rng.choice([-1, 1], n) * (rng.random(n) < 0.1)
            one, other = (Measurement({}, loss, np.zeros(n), np.ones(n, dtype=int)) for loss in (np.zeros(n), x))
            told += compare(one, other, "perplexity").verdict != "no measurable change"
        assert told <= 20  # of 300; the bootstrap's were 30 and more with 8


@pytest.mark.parametrize(("right", "n"), [(20, 20), (0, 20), (1, 1), (13, 20)])
def test_one_models_interval_is_wilsons(right: int, n: int) -> None:
    low, high = interval(measured(np.r_[np.ones(right), np.zeros(n - right)]), "accuracy")
    assert 0 <= low < high <= 1
    for end in (low, high):  # where the score test just accepts
        if 0 < end < 1:
            assert abs(right / n - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n), rel=1e-5)


def test_labels_of_one_example_are_not_independent() -> None:
    """As many labels, in as few examples as they belong to: all of an example are right, or none is."""
    tokens = np.full(40, 25)
    right = np.where(np.arange(40) < 30, 25.0, 0.0)
    whole = interval(Measurement({}, np.zeros(40), right, tokens), "accuracy")
    single = interval(measured(np.arange(40) < 30), "accuracy")
    assert whole == pytest.approx(single)


def test_a_models_own_loss_does_not_change_its_perplexity() -> None:
    config = tf.MixtralConfig(**sizes("sdpa", num_key_value_heads=2, num_local_experts=2), router_aux_loss_coef=1.0)
    model, found = randomise(tf.MixtralForCausalLM(config)), []
    for model.config.output_router_logits in (True, False):
        found.append(evaluate(model, [labelled(model, text(rows=4))]).metrics["perplexity"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_packed_texts_are_apart_in_every_computation() -> None:
    """transformers keeps packed texts apart (by positions that start again) only without a cache. Scores were of separate texts,
    but measurements and repair were of texts that see each other."""
    model, _ = llama()
    ids = text(rows=2, length=10)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]])
    packed = {"input_ids": ids, "position_ids": positions, "labels": ids}
    losses = []
    for row, cut in enumerate((4, 7)):
        with (
            torch.no_grad()
        ):  # the first token behind the cut is guessed from the last one before it, as labels are shifted
            parts = [model(input_ids=part[None]).logits[0] for part in (ids[row, :cut], ids[row, cut:])]
        losses.append(torch.nn.functional.cross_entropy(torch.cat(parts)[:-1], ids[row, 1:]).item())
    assert evaluate(model, [packed]).loss == pytest.approx(losses, rel=1e-5)
    assert hp.score(model, [packed], "gradient").details["mean_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


# -- standard errors of scores with few examples and with rare effects --


def rare(n: int, rate: float, heads: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.random((n, heads)) < rate) * rng.exponential(size=(n, heads))


@pytest.mark.parametrize("examples", [32, 128, 512])
def test_an_effect_in_two_per_cent_of_the_examples(examples: int) -> None:
    """The interval holds the truth, or it is said that it may not: before, .42 with 32 examples and .83 with 512."""
    held, said, all_held = [], [], []
    for seed in range(100):
        effects = rare(examples, 0.02, 4, seed)
        off = np.abs(effects.mean(0) - 0.02)
        near = off <= 1.96 * standard_error(torch.from_numpy(effects)).numpy()
        few = carried_by(effects) < FEW
        all_held += near.tolist()
        held += near[~few].tolist()
        said += few.tolist()
    assert np.mean(said) > 0.9
    assert np.mean(all_held) > {32: 0.75, 128: 0.75, 512: 0.9}[examples]
    assert not held or np.mean(held) > 0.9


def test_a_head_without_any_effect_is_not_certain() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 1] = 0
    error = standard_error(x)
    largest = (x - x.mean(0)).abs().amax(0)
    assert float(error[1]) == pytest.approx(float(2**0.5 * (largest[0] + largest[2]) / 2 / 20))
    assert not standard_error(torch.zeros(5, 2, dtype=torch.float64)).any()
    assert standard_error(x[:1]).isnan().all()


def test_how_many_examples_carry_it() -> None:
    assert carried_by(np.ones((8, 1))) == pytest.approx(8)
    assert carried_by(np.eye(8)) == pytest.approx(np.ones(8))
    assert carried_by(np.zeros((8, 1))) == pytest.approx(0)


def test_reliability_is_the_rank_correlation_with_other_examples() -> None:
    """Of heads that differ by noise alone nothing is left (a bootstrap says 0.7); of a known signal, what two samples really share."""
    rng = np.random.default_rng(0)
    for signal in (0.0, 0.1, 0.3):
        truth, estimates, real = signal * np.linspace(-1, 1, 40), [], []
        for _ in range(10):
            a, b = (truth + rng.standard_t(3, (128, 40)) for _ in range(2))
            estimates.append(split_half(a))
            real.append(spearmanr(a.mean(0), b.mean(0)).statistic)
        assert np.mean(estimates) == pytest.approx(np.mean(real), abs=0.15)


def test_what_a_score_does_not_rest_on_is_said() -> None:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    effects = np.random.default_rng(0).normal(size=(300, 6))

    def caution(effects: np.ndarray) -> str:
        found = Estimate.mean_of(torch.from_numpy(effects), torch.zeros(len(effects), dtype=torch.float64))
        parts = (dict(zip([a.name for a in layers], t.split(3), strict=True)) for t in (found.values, found.stderr))
        return hp.HeadScores("a", "loss", *parts, found.examples, tuple(layers), "", found.details).caution

    assert caution(effects) == ""
    effects[:, 2] = 0
    effects[:, 4] *= np.arange(300) < 3
    assert "the scores of L1.H1 rest on fewer than 10 examples" in caution(effects)
    assert "no example shows any effect of L0.H2: up to 1.0% of all examples" in caution(effects)
    assert caution(effects[:5]) == ""  # five examples are few for all heads alike


# -- how far answers are from the dense model's: against sums over one token at a time --------------------------


class Fixed(nn.Module):
    """Gives the logits that it is given."""

    def __init__(self, problem: str | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(problem_type=problem, is_encoder_decoder=False)

    def forward(self, logits: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=logits)


def logits(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(2, 5), st.floats(0.5, 4), st.integers(0, 99))
def test_tokens_one_at_a_time(lengths: list[int], classes: int, temperature: float, seed: int) -> None:
    """Kullback-Leibler times T squared, averaged over an example's real tokens: what padding says does not matter."""
    mask = torch.tensor([[1] * n + [0] * (6 - n) for n in lengths])
    known, now = (logits(len(lengths), 6, classes, seed=s) for s in (seed, seed + 100))
    found = Divergence(Fixed(), 0, temperature).between(known, now, {"attention_mask": mask})
    for i, n in enumerate(lengths):
        p, q = (softmax(x[i, :n].numpy() / temperature, axis=-1) for x in (known, now))
        expected = temperature**2 * np.mean([rel_entr(p[t], q[t]).sum() for t in range(n)])
        assert float(found[i]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_class_that_the_dense_model_rules_out_weighs_nothing() -> None:
    known, now = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.tensor([[0.5, 1.0, 2.0]])
    p, q = softmax(known[0].numpy()), softmax(now[0].numpy())
    assert float(Divergence(Fixed(), 0).between(known, now, {})) == pytest.approx(float(rel_entr(p, q).sum()), rel=1e-6)


def test_labels_are_drawn_as_often_as_the_dense_model_says() -> None:
    one = torch.tensor([0.6, 0.3, 0.1]).log()
    drawn = Divergence(Fixed(), seed=0).with_answers({"logits": one.expand(4000, 3)}, 0)[DRAWN]
    torch.testing.assert_close(drawn.bincount() / 4000, one.exp(), atol=0.03, rtol=0)


@pytest.mark.parametrize("answer", [dict, lambda **named: SimpleNamespace(**named)], ids=["dict", "object"])
def test_an_output_may_be_a_dict_or_an_object(answer):
    """Both name their logits. (A plain dict's were not found: no score by the answers, and repair fitted to something else.)"""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model_of(Attention)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            logits = self.body(x).mean(1)
            loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
            return answer(logits=logits, **loss)

    model = Model()
    x = torch.randn(48, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    batches = [{"x": part, "labels": torch.arange(len(part)) % 3} for part in x.split(16)]
    scores = hp.score(model, batches, "ablation", distil=True)
    dense = torch.log_softmax(model.body(x).mean(1), -1)
    with hp.mask(model, {"body.0": [1]}, {"x": x[:2]}):
        now = torch.log_softmax(model.body(x).mean(1), -1)
    expected = (dense.exp() * (dense - now)).sum(1).mean()
    torch.testing.assert_close(scores.values["body.0"][1].float(), expected, rtol=1e-3, atol=1e-6)
    done = hp.repair(model, {"body.0": [1, 2]}, batches)
    assert done.answers is not None or any(trial.step == "answers" for trial in done.trials), done.notes


# -- how near a changed model stays --------------------------------------------------------------


def test_the_divergence_is_the_mean_over_examples() -> None:
    model, batches = small()
    model.train()  # dropout must not be heard
    found = Fidelity(model, batches)
    assert found.known
    assert float(found.each(nullcontext).mean()) == 0
    layers = hp.find_attention(model, batches[0])
    drop = {layers[0].name: [0, 2], layers[1].name: [1]}
    model.eval()
    before = torch.cat([brute.logits(model, batch) for batch in batches])
    with hp.mask(model, drop, layers=layers):
        after = torch.cat([brute.logits(model, batch) for batch in batches])
        assert float(found.each(nullcontext).mean()) == pytest.approx(brute.kl(before, after), rel=1e-9)
    assert float(found.each(nullcontext).mean()) == 0


def test_answers_too_many_to_keep_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = small()
    size = sum(len(batch["labels"]) for batch in batches) * 2 * 8
    monkeypatch.setattr(divergence, "MOST", size)
    assert Fidelity(model, batches).known
    monkeypatch.setattr(divergence, "MOST", size - 1)
    assert not Fidelity(model, batches).known


@pytest.mark.parametrize("kind", ["plain", "capped", "tied", "written"])
def test_a_language_models_dense_answers_are_known_from_what_its_last_layer_reads(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many to keep: of a head whose output is the logits, only the head runs again; of others, all of the model."""
    sizes: Any = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "tie_word_embeddings": kind == "tied",
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "capped":
        model: Any = tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes, query_pre_attn_scalar=8))
    else:
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
    if kind == "written":  # as Chameleon's, where no image may follow
        forward = model.forward

        def written(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.logits[..., :100] = torch.finfo(output.logits.dtype).min
            return output

        model.forward = written
    model = model.eval()
    tokens = torch.randint(1, 300, (6, 9), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": part} for part in tokens.split(3)]
    monkeypatch.setattr(divergence, "MOST", 6 * 9 * 300 * 4 - 1)
    runs = Counter[str]()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: runs.update(["body"]))
    found = Fidelity(model, batches)
    assert not found.known
    assert runs["body"] == 2
    layers = hp.find_attention(model, batches[0])
    drop = {layers[0].name: [0, 1], layers[1].name: [2, 3]}
    before = model(tokens).logits.log_softmax(-1)
    for _ in range(2):  # the dense model is as it was in between
        runs.clear()
        with hp.mask(model, drop, layers=layers):
            after = model(tokens).logits.log_softmax(-1)
        expected = (before.exp() * (before - after)).sum(-1).mean(1)
        runs.clear()
        each = found.each(partial(hp.mask, model, drop, layers=layers))
        assert runs["body"] == (4 if kind in ("capped", "written") else 2)
        torch.testing.assert_close(each.float(), expected, rtol=1e-3, atol=1e-7)


def test_rounding_is_no_difference() -> None:
    """An order whose plan gives the dense answers but for rounding was preferred by many orders of magnitude to another such order."""
    model, batches = small()
    model.float()
    found = Fidelity(model, batches)
    assert found.log_divergence(nullcontext) == pytest.approx(math.log(1e-7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7)
    assert float(found.each(nullcontext).mean()) >= 0
    assert found.log_divergence(nullcontext) == pytest.approx(math.log(1e-7), abs=1.0)
    model.double()
    assert Fidelity(model, batches).log_divergence(nullcontext) == pytest.approx(math.log(1e-12))
