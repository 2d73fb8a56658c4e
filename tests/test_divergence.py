"""How far answers are from the dense model's: against sums over one token at a time, and whatever lies beside an example."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from torch import Tensor, nn

import headprune as hp
from headprune import divergence
from headprune.divergence import DRAWN, Divergence, Fidelity
from tests.support import brute
from tests.support.plain import WIDTH, Attention, model_of
from tests.support.problems import small


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
    assert found.divergence() == 0
    layers = hp.find_attention(model, batches[0])
    drop = {layers[0].name: [0, 2], layers[1].name: [1]}
    model.eval()
    before = torch.cat([brute.logits(model, batch) for batch in batches])
    with hp.mask(model, drop, layers=layers):
        after = torch.cat([brute.logits(model, batch) for batch in batches])
        assert found.divergence() == pytest.approx(brute.kl(before, after), rel=1e-9)
    assert found.divergence() == 0


def test_answers_too_many_to_keep_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = small()
    size = sum(len(batch["labels"]) for batch in batches) * 2 * 8
    monkeypatch.setattr(divergence, "MOST", size)
    assert Fidelity(model, batches).known
    monkeypatch.setattr(divergence, "MOST", size - 1)
    assert not Fidelity(model, batches).known


def test_rounding_is_no_difference() -> None:
    """An order whose plan gives the dense answers but for rounding was preferred by many orders of magnitude to another such order."""
    model, batches = small()
    model.float()
    found = Fidelity(model, batches)
    assert found.log_divergence() == pytest.approx(math.log(1e-7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7)
    assert found.divergence() >= 0
    assert found.log_divergence() == pytest.approx(math.log(1e-7), abs=1.0)
    model.double()
    assert Fidelity(model, batches).log_divergence() == pytest.approx(math.log(1e-12))
