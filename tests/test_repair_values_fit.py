"""The fit of values and output weights together, on stacked tokens, against other solvers."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headprune.attention import AttentionLayer
from headprune.reference import OutputProjection
from headprune.reference.directions import inputs_of_heads
from headprune.reference.moments import Moments
from headprune.reference.projections import Values
from headprune.repairing.steps import values as values_module
from headprune.repairing.steps.outputs import downhill
from headprune.repairing.steps.values import _Start, fit_values


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


class Tokens:
    """Made-up tokens of one layer: heads in groups, features in any order."""

    def __init__(self, seed: int, sizes: Sequence[int], width: int, rank: int, bias: bool, tokens: int = 90) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        generator = torch.Generator().manual_seed(seed)
        heads, outputs = sum(sizes), 5
        self.rank, self.has_bias = rank, bias
        owner = tuple(g for g, size in enumerate(sizes) for _ in range(size))
        columns = torch.randperm(heads * width, generator=generator).view(heads, width)
        features = torch.randperm(len(sizes) * width, generator=generator).view(len(sizes), width)
        self.values = Values("v", draw(7, len(sizes) * width), None, features, owner, columns)
        layer = AttentionLayer("a", 0, "encoder", heads, len(sizes), width)
        start = draw(outputs) if bias else torch.zeros(outputs, dtype=torch.float64)
        self.place = OutputProjection("o", (layer,), draw(heads * width, outputs), start, bias, bias, self.values)
        # Correlated inputs with a mean, and outputs that they explain in part.
        inputs = heads * (width + rank)
        self.x = draw(tokens, inputs) @ draw(inputs, inputs) / inputs**0.5 + 0.5 * draw(inputs)
        self.y = self.x[:, : heads * width] @ self.place.weight + start
        self.y += 0.3 * self.x @ draw(inputs, outputs) + 0.3 * draw(tokens, outputs)
        self.told = torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.1
        self.moments = Moments(inputs, outputs, torch.device("cpu"))
        for fold in range(2):
            self.moments.add(fold, self.x[fold::2], self.y[fold::2], self.told[fold::2])

    def look(self, heads: Sequence[int]) -> None:
        """Everything that concerns the heads that stay."""
        self.heads, width = list(heads), self.values.head_dim
        own = [self.x[:, self.values.columns[h]] for h in heads]
        base = len(self.place.weight)
        other = [self.x[:, base + h * self.rank : base + (h + 1) * self.rank] for h in heads]
        self.z = torch.stack([torch.cat(both, dim=1) for both in zip(own, other, strict=True)], dim=1)
        kept = sorted({self.values.owner[h] for h in heads})
        self.owner = [kept.index(self.values.owner[h]) for h in heads]
        self.share = self.told / self.told.sum()
        self.old_out = torch.stack([self.place.weight[self.values.columns[h]] for h in heads])
        self.old_mix = torch.stack([torch.eye(width + self.rank, width, dtype=torch.float64)] * len(kept))
        mean = self.mean(self.z) if self.has_bias else torch.zeros_like(self.z[0])
        var = self.mean((self.z - mean) ** 2)
        self.v = var[:, :width].mean()
        self.u = var.mean() * self.old_out.square().sum(2).mean() * len(heads) / len(kept)

    def mean(self, x: Tensor) -> Tensor:
        return (self.share.view(-1, *[1] * (x.ndim - 1)) * x).sum(0)

    def out(self, mix: Tensor, out: Tensor) -> Tensor:
        """What the heads give, the bias left out, with a loop over them."""
        parts = [self.z[:, i] @ mix[g] @ out[i] for i, g in enumerate(self.owner)]
        return torch.stack(parts).sum(0)

    def bias(self, mix: Tensor, out: Tensor) -> Tensor:
        return self.mean(self.y - self.out(mix, out)) if self.has_bias else self.place.bias

    def error(self, mix: Tensor, out: Tensor, bias: Tensor) -> Tensor:
        return self.mean((self.y - self.out(mix, out) - bias) ** 2).sum()

    def objective(self, mix: Tensor, out: Tensor, ridge: float) -> Tensor:
        """As the docstring of `fit_values` has it."""
        pull = self.v * (out - self.old_out).square().sum() + self.u * (mix - self.old_mix).square().sum()
        return self.error(mix, out, self.bias(mix, out)) + ridge * pull

    def start(self) -> tuple[_Start, Tensor, Tensor]:
        index = inputs_of_heads(self.place, self.values, self.heads, self.rank)
        xx, xy = self.moments.rows_of(index.flatten())
        return _Start(self.place, self.values, self.heads, self.rank), xx.sum(0), xy.sum(0)

    def solved(self, ridge: float, rounds: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        start, xx, xy = self.start()
        return start.solved(start.sums(xx, xy), ridge, rounds, steps)


PROBLEMS = st.builds(
    Tokens, st.integers(0, 10**6), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4),
    st.integers(1, 5), st.booleans(),
)  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> Tokens:
    found: Tokens = draw(PROBLEMS)
    count = len(found.values.owner)
    heads = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count))
    found.look(sorted(heads))
    return found


def test_strengths_are_shares_of_the_variance_of_inputs() -> None:
    """Of W_O's those of the old values, of the values' mixtures all that they are made of."""
    tokens = Tokens(5, [2, 2], 3, 2, bias=True)
    tokens.look([0, 3])  # two heads of three features
    start, xx, xy = tokens.start()
    found = start.sums(xx, xy)
    equal(torch.tensor(found.own, dtype=torch.float64), tokens.v)
    equal(torch.tensor(found.var, dtype=torch.float64), tokens.mean((tokens.z - tokens.mean(tokens.z)) ** 2).mean())


def test_conjugate_gradients_end_at_the_least_squares() -> None:
    tokens = Tokens(5, [2, 1, 2], 3, 2, bias=True)
    tokens.look([0, 1, 3])
    start, xx, xy = tokens.start()
    found = start._mix(start.sums(xx, xy), start.mix, start.out, 0.05, 60).requires_grad_()
    error = tokens.error(found, tokens.old_out, tokens.bias(found, tokens.old_out))
    (slope,) = torch.autograd.grad(error + 0.05 * (found - tokens.old_mix).square().sum(), found)
    assert slope.abs().max() < 1e-9
    assert (found - tokens.old_mix).abs().max() > 1e-2


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([1e-6, 1e-3, 0.1, 3.0]), st.integers(1, 4), st.integers(1, 8))
def test_every_round_is_a_gain(tokens: Tokens, ridge: float, rounds: int, steps: int) -> None:
    start = float(tokens.objective(tokens.old_mix, tokens.old_out, ridge))
    last = start
    for done in range(rounds + 1):
        mix, out, bias = tokens.solved(ridge, done, steps)
        equal(bias, tokens.bias(mix, out))
        now = float(tokens.objective(mix, out, ridge))
        assert now <= last + 1e-9 * (1 + start)
        last = now
    assert last < start


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([1e-6, 0.1, 3.0]))
def test_every_step_of_the_values_is_a_gain(tokens: Tokens, ridge: float) -> None:
    """And enough of them are the least squares for the weights."""
    start, xx, xy = tokens.start()
    sums = start.sums(xx, xy)
    strength = ridge * float(tokens.u)
    last = float("inf")
    for steps in range(6):
        mix = start._mix(sums, start.mix, start.out, strength, steps)
        now = float(tokens.objective(mix, tokens.old_out, ridge))
        assert now <= last + 1e-9 * (1 + abs(now))
        last = now
    mix = start._mix(sums, start.mix, start.out, strength, 2000)
    # Every token and output is a row, every entry of a mix a column.
    mean = tokens.mean(tokens.z) if tokens.has_bias else torch.zeros_like(tokens.z[0])
    rows = tokens.z.new_zeros(len(tokens.z), tokens.y.shape[1], *mix.shape)
    for i, g in enumerate(tokens.owner):
        rows[:, :, g] += torch.einsum("td,fo->todf", tokens.z[:, i] - mean[i], tokens.old_out[i])
    wanted = tokens.y - tokens.mean(tokens.y) if tokens.has_bias else tokens.y
    root = tokens.share.sqrt()[:, None]
    pull = torch.eye(mix.numel(), dtype=mix.dtype) * strength**0.5
    left = torch.cat([(rows.flatten(2) * root[:, :, None]).flatten(0, 1), pull])
    right = torch.cat([(wanted * root).flatten(), pull @ tokens.old_mix.flatten()])
    best = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution.view_as(mix)
    expected = float(tokens.objective(best, tokens.old_out, ridge))
    assert float(tokens.objective(mix, tokens.old_out, ridge)) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([1e-4, 0.1, 3.0]), st.integers(0, 2))
def test_the_output_weights_are_the_least_squares_for_the_values(tokens: Tokens, ridge: float, rounds: int) -> None:
    mix, out, bias = tokens.solved(ridge, rounds, 4)
    x = torch.cat([tokens.z[:, i] @ mix[g] for i, g in enumerate(tokens.owner)], dim=1)
    root = tokens.share.sqrt()[:, None]
    one = torch.full_like(x[:, :1], float(tokens.has_bias))
    pull = torch.eye(x.shape[1] + 1, dtype=torch.float64)[:-1] * (ridge * tokens.v).sqrt()
    old = tokens.old_out.flatten(0, 1)
    left = torch.cat([root * torch.cat([x, one], dim=1), pull])
    right = torch.cat([root * tokens.y, pull[:, :-1] @ old])
    found = torch.linalg.lstsq(left, right, driver="gelsd").solution
    torch.testing.assert_close(out.flatten(0, 1), found[:-1], rtol=1e-6, atol=1e-8)
    if tokens.has_bias:
        torch.testing.assert_close(bias, found[-1], rtol=1e-6, atol=1e-8)


@settings(max_examples=6, deadline=None)
@given(problems(), st.sampled_from([0.1, 1.0]))
def test_many_rounds_end_where_the_slopes_are_zero(tokens: Tokens, ridge: float) -> None:
    def slopes(mix: Tensor, out: Tensor) -> list[Tensor]:
        both = [mix.clone().requires_grad_(), out.clone().requires_grad_()]
        return list(torch.autograd.grad(tokens.objective(both[0], both[1], ridge), both))

    start = max(float(s.abs().max()) for s in slopes(tokens.old_mix, tokens.old_out))
    for slope in slopes(*tokens.solved(ridge, 600, 20)[:2]):
        assert float(slope.abs().max()) < 1e-5 * start


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([None, 1e-4, 0.3]))
def test_the_fit_says_what_it_did(tokens: Tokens, ridge: float | None) -> None:
    """Its facts, its W_O and its mixes, from the tokens alone."""
    fit = fit_values(tokens.moments, tokens.place, tokens.values, tokens.heads, tokens.rank, ridge)
    assert list(fit.mixes) == tokens.heads
    owner = tokens.values.owner
    assert all(
        torch.equal(fit.mixes[a], fit.mixes[b]) for a in tokens.heads for b in tokens.heads if owner[a] == owner[b]
    )
    mix = torch.stack([fit.mixes[next(h for h, i in zip(tokens.heads, tokens.owner, strict=True) if i == g)]
                       for g in range(max(tokens.owner) + 1)])  # fmt: skip
    out = torch.stack([fit.weight[tokens.values.columns[h]] for h in tokens.heads])
    bias = tokens.place.bias if fit.bias is None else fit.bias
    assert (fit.bias is None) != tokens.has_bias
    spread = tokens.mean((tokens.y - tokens.mean(tokens.y)) ** 2).sum()
    assert fit.facts.after == pytest.approx(float(tokens.error(mix, out, bias) / spread), rel=1e-6, abs=1e-9)
    before = tokens.error(tokens.old_mix, tokens.old_out, tokens.place.bias) / spread
    assert fit.facts.before == pytest.approx(float(before), rel=1e-6, abs=1e-9)
    assert fit.facts.after <= fit.facts.before + 1e-9
    assert fit.facts.values
    assert fit.facts.ridge == ridge if ridge is not None else fit.facts.ridge in values_module.RIDGES
    gone = tokens.place.kept({"a": []}).tolist()
    gone = sorted(set(gone) - set(tokens.values.columns[tokens.heads].flatten().tolist()))
    assert not fit.weight[gone].any()
    assert (fit.held_out is None) == (ridge is not None)


def test_the_ridge_is_the_best_on_tokens_held_out() -> None:
    tokens = Tokens(3, [2, 1], 3, 4, bias=True)
    tokens.look([0, 2])
    fit = fit_values(tokens.moments, tokens.place, tokens.values, [0, 2], 4, None)
    index = inputs_of_heads(tokens.place, tokens.values, [0, 2], 4).flatten()
    xx, xy = tokens.moments.rows_of(index)
    start = _Start(tokens.place, tokens.values, [0, 2], 4)
    lost = {}
    for ridge in values_module.RIDGES:
        lost[ridge] = 0.0
        for fold in range(2):
            mix, out, bias = start.solved(start.sums(xx[1 - fold], xy[1 - fold]), ridge, 1, 6)
            wrong = tokens.y - tokens.out(mix, out) - bias
            lost[ridge] += float((tokens.told[:, None] * wrong**2)[fold::2].sum())
    best = min(lost, key=lost.__getitem__)
    assert fit.facts.ridge == best
    assert fit.held_out == pytest.approx(lost[best])


@pytest.mark.parametrize("lowest", range(len(values_module.RIDGES)))
def test_the_strength_is_the_valleys_floor(lowest: int) -> None:
    def error(strength: float) -> float:
        return 1.0 + abs(values_module.RIDGES.index(strength) - lowest)

    assert downhill(error, values_module.RIDGES, 2) == (values_module.RIDGES[lowest], 1.0)
    assert downhill(lambda strength: math.inf, values_module.RIDGES, 2)[1] == math.inf
