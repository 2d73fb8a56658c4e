"""A step of a repair that does no better on examples that it was not fitted to is left out, and it is said."""

import copy
import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headprune as hp
from tests.support import brute, cases
from tests.support.zoo import randomise, text

WORDS, LENGTH = 12, 10


class Classifier(nn.Module):
    """Torch's attention without a normalisation behind it: what a bad fit gives reaches the answer."""

    def __init__(self, heads: int = 4, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.3)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(2))
        self.answer = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places
        for attention in self.attention:
            h = h + attention(h, h, h, need_weights=False)[0]
        answer: Tensor = self.answer(h.mean(1))
        return answer


def texts(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Does word 2 come before word 3? Each is there once."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(4, WORDS, (count, LENGTH), generator=generator)
    places = torch.rand(count, LENGTH, generator=generator).argsort(1)[:, :2]
    x.scatter_(1, places[:, :1], 2)
    x.scatter_(1, places[:, 1:], 3)
    return x, (places[:, 0] < places[:, 1]).long()


@pytest.fixture(scope="module")
def trained() -> Classifier:
    torch.manual_seed(0)
    model = Classifier()
    x, y = texts(2048, 1)
    steps = torch.optim.AdamW(model.parameters(), 1e-2)
    with torch.enable_grad():
        for i in range(200):
            some = torch.arange(64) + 64 * (i % 32)
            loss = F.cross_entropy(model(x[some]), y[some])
            steps.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            steps.step()
    return model.eval()


DROPS: tuple[brute.Drop, ...] = (
    {"attention.0": [0, 1]}, {"attention.1": [2]}, {"attention.0": [3], "attention.1": [0, 1]},
    {"attention.0": [0, 1, 2], "attention.1": [1, 2, 3]},
)  # fmt: skip


def far(model: nn.Module, dense: nn.Module) -> tuple[float, float]:
    """Accuracy on other texts, and the divergence from the dense model's answers."""
    x, y = texts(400, 99)
    now = brute.logits(model, x)
    return float((now.argmax(1) == y).float().mean()), brute.kl(brute.logits(dense, x), now)


def without(model: nn.Module, drop: brute.Drop) -> nn.Module:
    """A copy with the heads' columns of W_O zeroed."""
    return cases.without(model, hp.find_attention(model, texts(1, 1)[0]), drop)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("examples", [4, 8, 32, 100])
def test_few_examples_do_no_harm_to_others(trained: Classifier, examples: int, others: bool) -> None:
    (x, _), choose = texts(examples, 5), [texts(examples, 6)[0]] if others else None
    gains = 0
    for drop in DROPS if examples < 32 else DROPS[2:]:
        mended, done = brute.repaired(trained, drop, *x.split(16), choose=choose)  # type: ignore[no-untyped-call]
        before, after = far(without(trained, drop), trained), far(mended, trained)
        assert after[0] >= before[0] - 0.02
        assert after[1] <= before[1] * 1.1 + 0.02
        gains += after[1] < 0.5 * before[1]
        assert done.trials
        if not any(t.kept for t in done.trials):  # it answers as it will when it is pruned
            expected = brute.logits(without(trained, drop), x)
            torch.testing.assert_close(brute.logits(mended, x), expected, rtol=1e-5, atol=1e-5)
            assert (done.layers, done.answers, done.biases) == ({}, None, ())
        elif examples == 4:
            assert others
    assert gains or examples < 100  # what does better is kept


def test_other_examples_decide(trained: Classifier) -> None:
    """What a trial says is the divergence there, without the step and with it; a decision costs one pass, or two."""
    (x, y), (others, _), drop = texts(200, 5), texts(150, 6), DROPS[2]
    model, calls = copy.deepcopy(trained), list[int]()
    model.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    done = hp.repair(model, drop, [(x, y)], choose=[others[:99], others[99:]], layers=hp.find_attention(trained, x))
    dense = brute.logits(trained, others)
    assert [t.step for t in done.trials] == ["output projections", "values", "answers"]
    assert 1 + 1 + 3 <= calls.count(99) <= 1 + 1 + 4  # the dense model, without any step, and with each
    assert {t.examples for t in done.trials} == {150}
    before = brute.kl(dense, brute.logits(without(trained, drop), others))
    assert done.trials[0].before == pytest.approx(before, rel=1e-4)
    kept = [t for t in done.trials if t.kept]
    assert kept[-1].after == pytest.approx(brute.kl(dense, brute.logits(model, others)), rel=1e-4)
    for one, following in pairwise(done.trials):
        assert following.before == (one.after if one.kept else one.before)
        assert one.kept == (one.after < one.before)
        assert one.gain == one.before - one.after


def test_without_others_it_is_estimated_by_cross_fitting() -> None:
    """A third of the error on what was fitted to, and two thirds of the other half's: W_O fitted to every other example."""
    model, batches = brute.classifier(2)
    drop: brute.Drop = {"bert.encoder.layer.0.attention.self": [1]}
    _, done = brute.repaired(model, drop, *batches, ridge=0.1, values=False, mixtures=False, choose=None)
    whole = {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
    dense = brute.logits(model, whole)

    def tried(fitted: slice, rows: slice) -> float:
        own = brute.rows_of(whole, fitted)
        mended, fit = brute.repaired(model, drop, own, ridge=0.1, values=False, mixtures=False)
        assert fit.trials[0].kept
        return brute.kl(dense[rows], brute.logits(mended, brute.rows_of(whole, rows)))

    every, even, odd = (slice(start, None, step) for start, step in ((0, 1), (0, 2), (1, 2)))
    (trial,) = done.trials
    assert (trial.step, trial.examples) == ("output projections", 32)
    expected = (tried(every, every) + tried(even, odd) + tried(odd, even)) / 3
    assert trial.after == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_three_examples_show_nothing(trained: Classifier, examples: int) -> None:
    x, _ = texts(examples, 5)
    mended, done = brute.repaired(trained, DROPS[1], x, choose=None)
    assert done.layers == {}
    assert any("fewer than 4 examples" in note for note in done.notes)
    torch.testing.assert_close(brute.logits(mended, x), brute.logits(without(trained, DROPS[1]), x))


@pytest.mark.parametrize(("kept", "biases"), [(False, True), (True, True), (True, False)])
def test_a_bias_is_added_where_it_may_be_and_does_better(kept: bool, biases: bool) -> None:
    """The step is compared with columns of zeros and a bias of zeros; where it is left out, none stays."""
    model, example = brute.model_of("llama", 8 if kept else 4)
    choose = [brute.repeated(example)] if kept else None
    mended, done = brute.repaired(model, {"L0": [0, 1]}, example, ridge=0.1, values=False, biases=biases, choose=choose)
    assert done.trials[0].kept == kept
    assert done.biases == ("model.layers.0.self_attn.o_proj",) * (kept and biases)
    assert len(mended.state_dict()) - len(model.state_dict()) == (kept and biases)


def test_outputs_without_logits_are_compared_by_squares() -> None:
    """Of all numbers of an answer; what is no number, or of no example, does not count."""

    class Bare(Classifier):
        def forward(self, x: Tensor) -> Any:
            answer = super().forward(x)
            return {"x": answer, "ids": x, "scale": answer.mean(), "y": 2 * answer}

    model, x = randomise(Bare()).double(), texts(120, 5)[0]
    _, done = brute.repaired(model, DROPS[0], x, choose=[texts(110, 6)[0]], values=False)
    with torch.no_grad():
        now, dense = (m(texts(110, 6)[0]) for m in (without(model, DROPS[0]), model))
    expected = sum(float((now[k] - dense[k]).square().mean()) for k in ("x", "y"))
    assert done.trials[0].before == pytest.approx(expected, rel=1e-6)


def test_it_is_json_also_where_answers_overflow() -> None:
    trials = (hp.Trial("values", math.nan, math.inf, 3, False),)
    found = json.loads(json.dumps(hp.Repair({}, 3, 0, 1, trials=trials).to_json(), allow_nan=False))
    assert found == {
        "layers": {}, "examples": 3, "mixtures": 0, "passes": 1, "biases": [], "notes": [], "answers": None,
        "trials": [{"step": "values", "before": None, "after": None, "examples": 3, "kept": False}],
    }  # fmt: skip


def test_choosing_by_what_was_fitted_to_is_refused() -> None:
    model, batches = brute.classifier(2)
    for choose, message in ((batches[1:2], "is one of batches="), ([], "holds no examples")):
        with pytest.raises(hp.HeadPruneError, match=message):
            brute.repaired(model, {"L0": [1]}, *batches, choose=choose)
    with pytest.raises(hp.HeadPruneError, match="no examples"):
        brute.repaired(model, {"L0": [1]}, brute.rows_of(batches[0], slice(0, 0)), choose=[text(4, 7)])
