"""Timing is fair and its statistics are right. No test here waits for a clock."""

import numpy as np
import pytest
import torch
from torch import nn

from headprune import latency
from headprune.latency import bench, flops, parameters, shaped, speedup
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
    (row,) = bench(models, [(2, 0, torch.zeros(2, 3))], min_runs=6, min_seconds=0)
    timed = log[2 * latency.WARM_UP :]
    assert timed == ["a", "b", "b", "a"] * 3
    assert row.timings["a"].runs == row.timings["b"].runs == 6
    assert list(row.speedups) == ["b"]


def test_models_keep_their_mode() -> None:
    """Timed in evaluation mode; a model that was being trained stayed in it."""
    model, frozen = nn.Sequential(nn.Dropout(), nn.Linear(3, 3)), nn.Linear(3, 3).eval()
    model.train()
    model[0].eval()
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.training))
    bench({"a": model, "b": frozen}, [(2, 0, torch.zeros(2, 3))], min_runs=2, min_seconds=0)
    assert not any(seen)
    assert [m.training for m in (model, *model, frozen)] == [True, False, True, False]
    model.register_forward_pre_hook(lambda m, _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench({"a": model}, [(2, 0, torch.zeros(2, 3))])
    assert model.training


def test_the_ratio_is_paired() -> None:
    """A machine that slows down for both must not blur the ratio."""
    drift = np.linspace(1, 5, 50)
    found = speedup(drift * 2, drift)
    assert (found.ratio, found.low, found.high, found.verdict) == (2, 2, 2, "faster")


def test_verdicts() -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.2, size=(2, 200))
    assert speedup(noise[0], noise[1]).verdict == "no measurable change"
    assert speedup(noise[0], noise[1] * 2).verdict == "slower"
    assert speedup(noise[0] * 2, noise[1]).verdict == "faster"


def test_flops_of_a_linear_layer() -> None:
    assert flops(nn.Linear(8, 4), torch.zeros(5, 8)) == 2 * 5 * 8 * 4


def test_flops_include_attention() -> None:
    model, _ = bert()
    short, long = (flops(model, text(1, n)) for n in (4, 8))
    linear = long - 2 * short
    # What is left is quadratic: q·k and p·v in 3 layers, 2 * T² * 32 each; the pooler and the classifier do not grow.
    quadratic = 3 * 2 * 2 * 32 * (8 * 8 - 2 * 4 * 4)
    fixed = 2 * (32 * 32 + 32 * 2)
    assert linear == quadratic - fixed


class GivesViews(nn.Module):
    """Submodules get views of a parameter: DeBERTa's relative embeddings, Perceiver's latents, Deformable DETR's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 4)
        self.given = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(self.given(self.table[None]).expand(len(x), -1, -1))


def test_flops_where_a_module_gets_a_view_of_a_parameter() -> None:
    model = GivesViews()
    assert flops(model, torch.randn(2, 6, 4)) == 2 * (2 * 2 * 6 * 4 * 4)
    assert all(p.requires_grad for p in model.parameters())


def test_shared_parameters_count_once() -> None:
    model, _ = gpt2()
    assert parameters(model) == sum({id(p): p.numel() for p in model.parameters()}.values())


@pytest.mark.parametrize(("batch", "length"), [(1, 4), (5, 9), (7, 30)])
def test_shapes(batch: int, length: int) -> None:
    made = shaped({**text(3, 9), "labels": torch.zeros(3)}, batch, length)
    assert set(made) == {"input_ids", "attention_mask"}
    assert made["input_ids"].shape == made["attention_mask"].shape == (batch, length)
    assert made["attention_mask"].all()


def test_flops_of_torch_encoders() -> None:
    """The fused layer is unknown to PyTorch's counter."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 1)
    x = torch.randn(1, 6, 32)
    projections, feed_forward, attention = 4 * 32 * 32, 2 * 32 * 48, 2 * 6 * 32
    assert flops(encoder.eval(), x) == 2 * 6 * (projections + feed_forward + attention)


def rounds(rng: np.random.Generator, factor: float, count: int = 20) -> tuple[list[float], list[float]]:
    """Times of two models in turn on a machine that changes its speed and is sometimes interrupted."""
    drift = 1 + 0.3 * np.sin(np.linspace(0, 3, count) + rng.uniform(0, 6))
    noise = np.exp(rng.normal(0, 0.03, (2, count))) * (
        1 + (rng.random((2, count)) < 0.05) * rng.exponential(1, (2, count))
    )
    dense, other = drift * noise[0], drift * noise[1] * factor
    return dense.tolist(), other.tolist()


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "no measurable change"), (1.1, "slower"), (0.9, "faster")])
def test_planted_times_are_told(factor: float, expected: str) -> None:
    rng = np.random.default_rng(1)
    found = [speedup(*rounds(rng, factor)).verdict for _ in range(4000)]
    assert found.count(expected) >= 3800  # by a bootstrap, 93 % of the equally fast ones
