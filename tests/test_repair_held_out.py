"""A repair that does no better on examples that it was not fitted to is left out, and it is said."""

import json
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headprune as hp
from headprune.divergence import Divergence, Fidelity
from headprune.reference.runner import Calls, Runner
from headprune.repairing import Refit, Repair, Weights, checked, repair
from headprune.repairing import held_out as room
from headprune.repairing.held_out import better
from headprune.repairing.weights import Trial
from tests.support.checks import state
from tests.support.problems import duplicated, small
from tests.support.repairs import refit_of

WORDS, LENGTH = 12, 10


class Classifier(nn.Module):
    """Torch's attention, once, without a normalisation behind it: what a bad fit gives reaches the answer."""

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
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(4, WORDS, (count, LENGTH), generator=g)
    places = torch.rand(count, LENGTH, generator=g).argsort(1)[:, :2]
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
            loss.backward()
            steps.step()
    return model.eval()


DROPS = ([("0", [0, 1])], [("1", [2])], [("0", [3]), ("1", [0, 1])], [("0", [0, 1, 2]), ("1", [1, 2, 3])])


def drop_of(pairs: list[tuple[str, list[int]]]) -> dict[str, list[int]]:
    return {f"attention.{name}": heads for name, heads in pairs}


@torch.no_grad()
def far(model: nn.Module, refit: Refit, weights: Weights, drop: dict[str, list[int]]) -> tuple[float, float]:
    """Accuracy on other texts, and the divergence from the dense model's answers."""
    x, y = texts(400, 99)
    dense = model(x)
    with refit.applied(weights), hp.mask(model, drop, layers=refit.reference.layers):
        now = model(x)
    return float((now.argmax(1) == y).float().mean()), float(Divergence(model, 0).between(dense, now, {}).mean())


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("examples", [4, 8, 40])
def test_accuracy_of_what_was_not_fitted_does_not_fall(trained: Classifier, examples: int, others: bool) -> None:
    x, y = texts(examples, 5)
    batches = list(zip(x.split(16), y.split(16), strict=True))
    layers = hp.find_attention(trained, x)
    refit = refit_of(trained, layers, batches, answers=True)
    choose = Fidelity(trained, [texts(examples, 6)[0]]) if others else None
    for pairs in DROPS:
        drop = drop_of(pairs)
        found = checked(refit, drop, choose)
        before, after = far(trained, refit, Weights(), drop), far(trained, refit, found, drop)
        assert after[0] >= before[0] - 0.02
        assert after[1] <= before[1] * 1.1 + 0.02
        assert found.trials
        if not any(t.kept for t in found.trials):
            assert not found.facts
            assert found.answers is None


@pytest.mark.parametrize("others", [False, True])
def test_what_does_better_is_kept(trained: Classifier, others: bool) -> None:
    x, y = texts(160, 5)
    layers = hp.find_attention(trained, x)
    refit = refit_of(trained, layers, [(x, y)], answers=True)
    choose = Fidelity(trained, [texts(160, 6)[0]]) if others else None
    gains = 0
    for pairs in DROPS:
        found = checked(refit, drop_of(pairs), choose)
        before, after = (far(trained, refit, w, drop_of(pairs))[1] for w in (Weights(), found))
        gains += after < 0.5 * before
    assert gains >= 2


def kl(dense: Tensor, now: Tensor) -> Tensor:
    return F.kl_div(now.log_softmax(1), dense.log_softmax(1), log_target=True, reduction="none").sum(1)


@torch.no_grad()
def test_other_examples_decide(trained: Classifier) -> None:
    """By the public names: what a trial says is the divergence there, without the step and with it."""
    (x, y), (others, _) = texts(200, 5), texts(150, 6)
    before, drop, layers = state(trained), drop_of(DROPS[2]), hp.find_attention(trained, x)
    dense = trained(others)
    with hp.mask(trained, drop, layers=layers):
        masked = kl(dense, trained(others)).mean()
    done = repair(trained, drop, [(x, y)], choose=[others[:100], others[100:]], layers=layers)
    try:
        with hp.mask(trained, drop, layers=layers):
            repaired = kl(dense, trained(others)).mean()
    finally:
        trained.load_state_dict(before)
    assert [t.step for t in done.trials] == ["output projections", "values", "answers"]
    assert {t.examples for t in done.trials} == {150}
    assert done.trials[0].before == pytest.approx(float(masked), rel=1e-4)
    assert [t for t in done.trials if t.kept][-1].after == pytest.approx(float(repaired), rel=1e-4)
    for one, next_ in pairwise(done.trials):
        assert next_.before == (one.after if one.kept else one.before)
        assert one.kept == (one.after < one.before)


def test_without_others_it_is_estimated_by_cross_fitting(trained: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the error on what was fitted to, and two thirds of the other half's: W_O fitted by hand to every other example."""
    noisy = Runner.recorded_with_weights  # goes by an example's number

    def alike(self: Runner, index: int) -> tuple[Calls, Calls, Calls]:
        xs, ys, weights = noisy(self, index)
        return xs, ys, {name: [torch.ones_like(t) for t in calls] for name, calls in weights.items()}

    monkeypatch.setattr(Runner, "recorded_with_weights", alike)
    x, _ = texts(10, 5)
    layers = hp.find_attention(trained, x)
    drop = {"attention.0": [0, 1]}
    found = checked(refit_of(trained, layers, [x], values=False, ridge=0.1), drop)

    def divergences(rows: Tensor, fitted: Tensor | None) -> Tensor:
        """On some rows, of W_O as the pull that was given fits it to others."""
        with torch.no_grad():
            dense = trained(x[rows])
        if fitted is None:
            weights, alone = Weights(), refit_of(trained, layers, [x], values=False, ridge=0.1)
        else:
            alone = refit_of(trained, layers, [x[fitted].repeat_interleave(2, 0)], values=False, ridge=0.1)
            weights = alone.fitted(drop)
        with alone.applied(weights), hp.mask(trained, drop, layers=layers), torch.no_grad():
            return kl(dense, trained(x[rows]))

    every = torch.arange(10)
    halves = torch.cat([divergences(every[fold::2], every[1 - fold :: 2]) for fold in (0, 1)])
    (trial,) = found.trials
    assert (trial.step, trial.examples) == ("output projections", 10)
    assert trial.before == pytest.approx(float(divergences(every, None).mean()), rel=1e-4)
    assert trial.after == pytest.approx(float(divergences(every, every).mean() + 2 * halves.mean()) / 3, rel=1e-3)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_decision_costs_one_pass_or_two(trained: Classifier, passes: int) -> None:
    """Over the examples that choose, the dense model's answers being known; and only the last step runs the model on the others."""
    (x, _), (others, _) = texts(120, 5), texts(60, 6)
    refit = refit_of(trained, hp.find_attention(trained, x), list(x.split(50)), answers=bool(passes))
    choose, calls = Fidelity(trained, [others]), list[int]()
    handle = trained.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    before = refit.reference.runner.passes
    found = checked(refit, drop_of(DROPS[2]), choose)
    handle.remove()
    over = calls.count(len(others)) - 1  # without any step
    assert len(found.trials) == 2 + passes
    assert 2 + passes <= over <= 2 + 2 * passes
    assert refit.reference.runner.passes - before == (
        2 if passes else 0
    )  # forward, and backward for the one difference of two classes


def test_chance_is_not_believed() -> None:
    g = torch.Generator().manual_seed(0)
    for n in (2, 3, 8, 40, 99):
        kept = sum(better(*torch.rand(2, n, generator=g, dtype=torch.float64)) for _ in range(400))
        assert kept <= 400 * (n / 100) ** 1.5 / 2 + 20  # and what chance adds
    one = torch.rand(8, generator=g, dtype=torch.float64) + 1
    assert better(one, one / 2)
    assert not better(one, one)
    assert not better(one, torch.full_like(one, math.nan))
    worse = one / 2
    worse[0] = 40.0  # seven gain, and one is lost: the mean decides
    assert not better(one, worse)


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_three_examples_show_nothing(trained: Classifier, examples: int) -> None:
    x, _ = texts(examples, 5)
    before = state(trained)
    done = repair(trained, drop_of(DROPS[1]), [x], layers=hp.find_attention(trained, x))
    try:
        assert done.layers == {}
        assert any("fewer than 4 examples" in note for note in done.notes)
    finally:
        trained.load_state_dict(before)


def test_a_model_whose_repair_is_left_out_answers_as_it_will_when_pruned(
    trained: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "better", lambda before, after: False)
    x, _ = texts(20, 5)
    before, drop = state(trained), drop_of(DROPS[2])
    layers = hp.find_attention(trained, x)
    with hp.mask(trained, drop, layers=layers), torch.no_grad():
        masked = trained(x)
    done = repair(trained, drop, [x], layers=layers)
    try:
        with torch.no_grad():
            torch.testing.assert_close(trained(x), masked, rtol=1e-5, atol=1e-5)
        assert (done.layers, done.answers, done.biases) == ({}, None, ())
        assert done.trials
        assert not any(t.kept for t in done.trials)
    finally:
        trained.load_state_dict(before)


@torch.no_grad()
def test_given_ridges_are_compared_too() -> None:
    model, batches = small()
    duplicated(model)
    layers = hp.find_attention(model, batches[0])
    done = repair(model, {layers[0].name: [1]}, batches * 4, layers=layers, ridge=0.1)
    assert done.trials[0].kept
    assert done.layers
    assert done.answers is None


def test_it_is_json_where_answers_overflow() -> None:
    trial = Trial("values", math.nan, math.inf, 3, False)
    told = Repair({}, 3, 0, 1, trials=(trial,)).to_json()
    assert json.loads(json.dumps(told, allow_nan=False))["trials"][0] == {
        "step": "values", "before": None, "after": None, "examples": 3, "kept": False,
    }  # fmt: skip


def test_what_both_models_rule_out_does_not_count() -> None:
    dense, now = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()
    plain = Divergence(nn.Linear(1, 1), 0).between(dense[:, :3], now[:, :3], {})
    dense[:, 3] = now[:, 3] = -math.inf
    torch.testing.assert_close(Divergence(nn.Linear(1, 1), 0).between(dense, now, {}), plain)
