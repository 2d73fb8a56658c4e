"""Timing is fair and its statistics are right. No test here waits for a clock."""

import numpy as np
import pytest
import torch
from torch import nn

import headprune as hp
from headprune import latency
from tests.support.zoo import bert, gpt2, text


class Recorder(nn.Module):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        self.log.append(self.name)
        return x


def test_models_take_turns() -> None:
    log: list[str] = []
    models = {name: Recorder(name, log) for name in "ab"}
    row = hp.benchmark(models, torch.zeros(2, 3), min_runs=6, min_seconds=0)
    assert log[-12:] == ["a", "b", "b", "a"] * 3
    assert log[:-12].count("a") == log[:-12].count("b") == 1 + latency.WARM_UP
    assert (row.batch, row.length, list(row.speedups)) == (2, 0, ["b"])
    assert row.timings["a"].runs == row.timings["b"].runs == 6


def test_models_keep_their_mode() -> None:
    """Timed in evaluation mode; a model that was being trained stayed in it."""
    model, frozen = nn.Sequential(nn.Dropout(), nn.Linear(3, 3)), nn.Linear(3, 3).eval()
    model.train()
    model[0].eval()
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.training))
    hp.benchmark({"a": model, "b": frozen}, torch.zeros(2, 3), min_runs=2, min_seconds=0)
    assert not any(seen)
    assert [m.training for m in (model, *model, frozen)] == [True, False, True, False]
    model.register_forward_pre_hook(lambda m, _: 1 / 0)
    with pytest.raises(hp.HeadPruneError, match="The model 'a' does not run on the example: ZeroDivisionError"):
        hp.benchmark({"a": model}, torch.zeros(2, 3))
    with pytest.raises(hp.HeadPruneError, match="names no models"):
        hp.benchmark({}, torch.zeros(2, 3))
    with pytest.raises(hp.HeadPruneError, match="holds no tensor"):
        hp.benchmark({"a": frozen}, {"x": 1})
    assert model.training


def test_the_ratio_is_paired() -> None:
    """A machine that slows down for both must not blur the ratio."""
    drift = np.linspace(1, 5, 50)
    result = latency.speedup(drift * 2, drift)
    assert (result.ratio, result.low, result.high, result.verdict) == (2, 2, 2, "faster")


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "no measurable change"), (1.1, "slower"), (0.9, "faster")])
def test_planted_times_are_recognised(factor: float, expected: str) -> None:
    """Of two models in turn on a machine that changes its speed and is sometimes interrupted; by a bootstrap, 93 % of the equal ones."""
    rng, verdicts = np.random.default_rng(1), []
    for _ in range(4000):
        drift = 1 + 0.3 * np.sin(np.linspace(0, 3, 20) + rng.uniform(0, 6))
        noise = np.exp(rng.normal(0, 0.03, (2, 20))) * (1 + (rng.random((2, 20)) < 0.05) * rng.exponential(1, (2, 20)))
        verdicts.append(latency.speedup(drift * noise[0], drift * noise[1] * factor).verdict)
    assert verdicts.count(expected) >= 3800


class GivesViews(nn.Module):
    """Submodules get views of a parameter: DeBERTa's relative embeddings, Perceiver's latents, Deformable DETR's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 4)
        self.given = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(self.given(self.table[None]).expand(len(x), -1, -1))


ENCODER = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 1
)  # fused: unknown to PyTorch's counter


@pytest.mark.parametrize(("model", "shape", "expected"), [
    (nn.Linear(8, 4), (5, 8), 2 * 5 * 8 * 4), (GivesViews(), (2, 6, 4), 2 * (2 * 2 * 6 * 4 * 4)),
    (ENCODER, (1, 6, 32), 2 * 6 * (4 * 32 * 32 + 2 * 32 * 48 + 2 * 6 * 32)),
])  # fmt: skip
def test_flops(model: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    assert latency.flops(model, torch.randn(shape)) == expected
    assert all(p.requires_grad for p in model.parameters())


def test_counts_of_models() -> None:
    """FLOPs of BERT: quadratic are q·k and p·v in 3 layers, 2 * T² * 32 each; the pooler and the classifier do not grow."""
    short, long = (latency.flops(bert()[0], text(1, n)) for n in (4, 8))
    assert long - 2 * short == 3 * 2 * 2 * 32 * (8 * 8 - 2 * 4 * 4) - 2 * (32 * 32 + 32 * 2)
    model, _ = gpt2()  # shared parameters count once
    assert latency.parameters(model) == sum({id(p): p.numel() for p in model.parameters()}.values())


@pytest.mark.parametrize(("batch", "length"), [(1, 4), (5, 9), (7, 30)])
def test_shapes(batch: int, length: int) -> None:
    inputs = latency.shaped({**text(3, 9), "labels": torch.zeros(3)}, batch, length)
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (batch, length)
    assert inputs["attention_mask"].all()
