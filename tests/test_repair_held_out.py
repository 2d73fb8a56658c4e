"""A repair that does no better on examples that it was not fitted to is left out, and it is said."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headprune as hp
from headprune.divergence import Divergence
from headprune.reference.answers import DenseAnswers
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


@pytest.mark.parametrize("examples", [4, 8, 40])
def test_accuracy_of_what_was_not_fitted_does_not_fall(trained: Classifier, examples: int) -> None:
    x, y = texts(examples, 5)
    batches = list(zip(x.split(16), y.split(16), strict=True))
    layers = hp.find_attention(trained, x)
    refit = refit_of(trained, layers, batches, answers=True)
    for pairs in DROPS:
        drop = drop_of(pairs)
        found = checked(refit, drop)
        before, after = far(trained, refit, Weights(), drop), far(trained, refit, found, drop)
        assert after[0] >= before[0] - 0.02
        assert after[1] <= before[1] * 1.1 + 0.02
        assert found.trials
        if not any(t.kept for t in found.trials):
            assert not found.facts
            assert found.answers is None


def test_what_does_better_is_kept(trained: Classifier) -> None:
    x, y = texts(160, 5)
    layers = hp.find_attention(trained, x)
    refit = refit_of(trained, layers, [(x, y)], answers=True)
    gains = 0
    for pairs in DROPS:
        found = checked(refit, drop_of(pairs))
        before, after = (far(trained, refit, w, drop_of(pairs))[1] for w in (Weights(), found))
        gains += after < 0.5 * before
    assert gains >= 2


def test_the_comparison_by_hand(trained: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """W_O fitted to every other example, tried on those between, and the other way round."""
    noisy = Runner.recorded_with_weights  # goes by an example's number

    def alike(self: Runner, index: int) -> tuple[Calls, Calls, Calls]:
        xs, ys, weights = noisy(self, index)
        return xs, ys, {name: [torch.ones_like(t) for t in calls] for name, calls in weights.items()}

    monkeypatch.setattr(Runner, "recorded_with_weights", alike)
    x, _ = texts(10, 5)
    layers = hp.find_attention(trained, x)
    drop = {"attention.0": [0, 1]}
    refit = refit_of(trained, layers, [x], values=False, ridge=0.1)
    found = checked(refit, drop)
    with torch.no_grad():
        dense = trained(x)
    each: dict[str, list[Tensor]] = {}
    for fold in (0, 1):
        rows = torch.arange(10) % 2 == fold
        # The pull towards the old weights is the one that was given, so a fit to these rows alone is the same.
        alone = refit_of(trained, layers, [x[rows].repeat_interleave(2, 0)], values=False, ridge=0.1)
        weights = alone.fitted(drop)
        for name, some in (("before", Weights()), ("after", weights)):
            with alone.applied(some), hp.mask(trained, drop, layers=layers), torch.no_grad():
                now = trained(x[~rows])
            kl = F.kl_div(now.log_softmax(1), dense[~rows].log_softmax(1), log_target=True, reduction="none").sum(1)
            each.setdefault(name, []).append(kl)
    (trial,) = found.trials
    assert (trial.step, trial.examples) == ("output projections", 10)
    assert trial.before == pytest.approx(float(torch.cat(each["before"]).mean()), rel=1e-4)
    assert trial.after == pytest.approx(float(torch.cat(each["after"]).mean()), rel=1e-3)


def test_the_last_step_is_made_without_what_it_is_tried_on() -> None:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    x = {k: torch.cat([b[k] for b in batches] * 8) for k in batches[0]}  # 72 texts
    refit = refit_of(model, layers, [{k: v[i : i + 24] for k, v in x.items()} for i in (0, 24, 48)], answers=True)
    assert refit.reference.runner.mixtures
    known = refit.reference.answers
    assert isinstance(known, DenseAnswers)
    held = {24 * index + row for index, own in known.apart.items() for row in own}
    assert len(held) == 16  # a quarter, in whole chunks
    rest = known.runner
    assert rest.examples == 72 - 16
    kept = torch.cat([b["input_ids"] for b in rest.batches])
    assert torch.equal(kept, x["input_ids"][[i for i in range(72) if i not in held]])
    for mixed in rest.mixtures:
        begins = rest.batches[mixed.batch]["input_ids"][mixed.rows]
        assert torch.equal(mixed.inputs["input_ids"][:, 0], begins[:, 0])
    whole = sum(len(m.rows) for m in refit.reference.runner.mixtures)
    assert sum(len(m.rows) for m in rest.mixtures) == whole * 56 // 72


@pytest.mark.parametrize(("examples", "folds"), [(20, 2), (300, 1)])
def test_it_costs_few_passes(trained: Classifier, examples: int, folds: int) -> None:
    x, _ = texts(examples, 5)
    refit = refit_of(trained, hp.find_attention(trained, x), list(x.split(50)))
    refit.fitted(drop_of(DROPS[1]))
    before = refit.reference.runner.passes
    checked(refit, drop_of(DROPS[2]))
    assert (
        refit.reference.runner.passes - before <= 4 * folds / 2 + 1e-9
    )  # dense, without, W_O, values: on one half or both


def test_chance_is_not_believed() -> None:
    g = torch.Generator().manual_seed(0)
    for n in (2, 3, 8, 40, 100):
        kept = sum(better(*torch.rand(2, n, generator=g, dtype=torch.float64)) for _ in range(400))
        assert kept <= 400 * n / 200 + 20  # and what chance adds
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
    done = repair(model, {layers[0].name: [1]}, batches, layers=layers, ridge=0.1)
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
