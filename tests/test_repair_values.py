"""Refit of the values against brute force: edited weights, stacked tokens, and other solvers."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from headprune.attention import AttentionLayer, Heads
from headprune.inputs import call
from headprune.modules import exact_attention
from headprune.planning.effects import effects
from headprune.planning.units import Unit
from headprune.repairing import OutputProjection, Refit, Weights, repair
from headprune.repairing import statistics as statistics_module
from headprune.repairing import values as values_module
from headprune.repairing.places import Values
from headprune.repairing.runner import Calls
from headprune.repairing.solve import Moments, downhill, fit_output
from headprune.repairing.values import _Start, fit_values, inputs_of_heads
from headprune.rows import Rows
from tests.support import zoo
from tests.support.checks import hooks, same, state
from tests.support.plain import HEADS, WIDTH, noise
from tests.support.plans import units_for
from tests.support.problems import small
from tests.support.repairs import batch_of, close, made, padded, padding_of, some
from tests.support.zoo import randomise, sizes, text


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


# -- what heads attend to ----------------------------------------------------------------------


def with_directions(refit: Refit) -> Refit:
    assert refit.statistics.dense
    return refit


def widened(refit: Refit, index: int = 0) -> Calls:
    """As the refit finds them."""
    with torch.no_grad(), refit.runner.deterministic_eval():
        xs, ys = refit.runner.recorded(refit.batches[index])
        return refit.statistics.widened(refit.batches[index], xs, ys, list(xs))


def by_hand(refit: Refit, example: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """W_O's inputs and what heads attend to ``[..., heads, directions]``, by module, each called once.

    Of a layer at a time, every column of every head's values becomes one direction, so that W_O sees the same number in
    all of a head's inputs.
    """
    found = {}
    with torch.no_grad(), exact_attention(refit.model):
        model = refit.model.eval()
        for place in refit.places:
            values = place.values
            assert values is not None
            module: Any = model.get_submodule(values.name)
            seen: list[Tensor] = []
            handle = model.get_submodule(place.name).register_forward_pre_hook(
                lambda m, args, seen=seen: seen.append(args[0].clone())
            )
            own = [(p, p.clone()) for p in module.parameters()]
            call(model, example)
            columns = [f for features in set(place.layers[0].values.features) for f in features]  # type: ignore[union-attr]
            for direction in refit.statistics.directions[place.name].T:
                if type(module).__name__ == "Conv1D":
                    module.weight[:, columns] = direction[:, None].to(module.weight)
                else:
                    module.weight[columns] = direction.to(module.weight)
                if module.bias is not None:
                    module.bias[columns] = 0
                call(model, example)
            handle.remove()
            for parameter, old in own:
                parameter.copy_(old)
            first, *others = seen
            features = place.layers[0].output_projection.features  # type: ignore[union-attr]
            each = [torch.stack([x[..., f] for f in features], dim=-2) for x in others]
            for x in each:
                torch.testing.assert_close(x, x[..., :1].expand_as(x))
            found[place.name] = first, torch.stack([x[..., 0] for x in each], dim=-1)
    return found


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "mha", "torch_transformer"])
def test_widened_inputs_are_what_edited_values_give(name: str) -> None:
    model, example, layers = made(name)
    before = state(model)
    refit = with_directions(Refit(model, layers, [batch_of(example)]))
    assert list(refit.values) == [p.name for p in refit.places]
    assert len(refit.places) == len(layers)
    expected, found = by_hand(refit, example), widened(refit)
    assert same(model, before)
    for place in refit.places:
        x, further = expected[place.name]
        (wide,) = found[place.name]
        assert further.shape[-2] == place.layers[0].num_heads
        assert further.abs().mean() > 1e-3
        equal(wide, torch.cat([x, further.flatten(-2)], dim=-1))
        assert wide.shape[-1] + 1 == refit.statistics.dense[place.name].xx.shape[-1]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_widened_inputs_of_the_model_as_it_is_now(name: str) -> None:
    """`slopes` looks at a repaired model, along the first directions."""
    model, example, layers = made(name)
    refit = Refit(model, layers, [example], ridge=0.1)
    weights = refit.fitted(some(layers))
    assert weights.mixes
    with refit.applied(weights):
        expected = by_hand(refit, example)
        found = refit.slopes(0)
    for place in refit.places:
        x, further = expected[place.name]
        ((wide, _),) = found[place.name]
        first = further[..., : place.layers[0].head_dim]
        equal(wide, torch.cat([x, first.flatten(-2)], dim=-1))


def test_moments_are_sums_over_tokens_that_are_no_padding() -> None:
    model, example, layers = made("bert")
    refit = with_directions(Refit(model, layers, [example], mixtures=False))
    real = example["attention_mask"].bool()
    for name, (x, further) in by_hand(refit, example).items():
        z = torch.cat([x, further.flatten(-2), torch.ones_like(x[..., :1])], dim=-1)[real]
        told = refit.runner.sensitivity(0)[name][0][real]
        equal(refit.statistics.dense[name].xx.sum(0), (z.T * told) @ z)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_directions_are_the_best_for_tokens_that_attend_to_themselves(name: str) -> None:
    """The first ones give what the best projection of that rank gives: by the SVD of all tokens' outputs."""
    model, example, layers = made(name)
    refit = with_directions(Refit(model, layers, [example]))
    for place in refit.places:
        values = place.values
        assert values is not None
        seen: list[Tensor] = []
        with torch.no_grad():
            handle = model.get_submodule(values.name).register_forward_pre_hook(lambda m, a, s=seen: s.append(a[0]))
            call(model, example)
            handle.remove()
        kind = padding_of(name, place, example)
        if name == "t5" and place.layers[0].kind == "cross":
            continue  # its values' tokens are the encoder's, its own the decoder's: see the test of its padding
        x = seen[0][kind] if kind is not None else seen[0].flatten(0, 1)
        x = x - x.mean(0)
        weight = [
            values.weight[:, values.features[g]] @ place.weight[values.columns[h]] for h, g in enumerate(values.owner)
        ]
        out = torch.cat([x @ w for w in weight], dim=1)
        sizes = torch.linalg.svdvals(out).square()
        q = refit.statistics.directions[place.name]
        for rank in (1, 4, 8):
            inner, _ = torch.linalg.qr(x @ q[:, :rank])
            left = (out - inner @ (inner.T @ out)).square().sum()
            torch.testing.assert_close(left, sizes[rank:].sum(), rtol=1e-6, atol=1e-8 * float(sizes.sum()))
        length = values.weight[:, values.features.flatten()].norm(dim=0).square().mean().sqrt()
        torch.testing.assert_close(q.norm(dim=0), length.expand(q.shape[1]))


# -- the fit -----------------------------------------------------------------------------------


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


# -- planted -----------------------------------------------------------------------------------


def planted() -> tuple[nn.Module, list[dict[str, Tensor]], dict[str, Tensor]]:
    """Of the first layer, head 0 attends as head 1 does and is of no use; batches to fit to, and another."""
    model, _ = small()
    attention: Any = model.bert.encoder.layer[0].attention  # type: ignore[union-attr, index]
    with torch.no_grad():
        for p in (attention.self.query, attention.self.key):
            p.weight[8:16] = p.weight[:8]
            p.bias[8:16] = p.bias[:8]
        attention.output.dense.weight[:, :8] = 0
    return model, [text(20, 7, seed=s) for s in (1, 2, 3)], text(10, 7, seed=9)


@pytest.mark.parametrize(("rounds", "most"), [(None, 0.03), (30, 1e-5)])
@torch.no_grad()
def test_a_head_takes_the_values_of_one_that_attends_alike(
    rounds: int | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds come close, more come as close as one likes; on examples that it was not fitted to."""
    if rounds:
        monkeypatch.setattr(values_module, "_ROUNDS", rounds)
    model, batches, other = planted()
    layers = hp.find_attention(model, other)
    drop = {layers[0].name: [1]}
    dense = model(**other).logits
    far = {}
    for values in (False, True):
        mended = copy.deepcopy(model)
        done = repair(mended, drop, batches, layers=layers, ridge=1e-9, values=values)
        assert done.layers[layers[0].name].values == values
        with hp.mask(mended, drop, layers=layers):
            far[values] = float((mended(**other).logits - dense).abs().max())
        hp.prune(mended, drop, other, layers=layers)
        assert float((mended(**other).logits - dense).abs().max()) == pytest.approx(far[values], rel=1e-3, abs=1e-8)
    assert far[True] < most
    assert far[False] > 0.5


# -- modules whose values cannot be refitted -----------------------------------------------------


def check_promise(refit: Refit, weights: Weights, example: Any, mask: Tensor | None) -> None:
    """Of the first layer: its error with the weights written, counted by hand."""
    place = refit.places[0]
    seen: list[Tensor] = []
    told = refit.runner.sensitivity(0)[place.name][0]
    with torch.no_grad(), refit.runner.deterministic_eval():
        handle = refit.model.get_submodule(place.name).register_forward_hook(lambda m, a, out: seen.append(out.clone()))
        call(refit.model, example)
        with refit.applied(weights):
            call(refit.model, example)
        handle.remove()
    chosen = torch.ones(seen[0].shape[:-1], dtype=torch.bool) if mask is None else mask
    share = (told[chosen] / told[chosen].sum())[:, None]
    y, found = (out[chosen] for out in seen)
    spread = (share * (y - (share * y).sum(0)) ** 2).sum()
    facts = weights.facts[place.layers[0].name]
    assert facts.values
    assert float((share * (y - found) ** 2).sum() / spread) == pytest.approx(facts.after, rel=1e-5, abs=1e-9)


class Attention(nn.Module):
    """Ordinary attention with a projection each, and a bias that is not small."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def values(self, x: Tensor) -> Tensor:
        return self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q, self.k))
        return self.o(F.scaled_dot_product_attention(q, k, self.values(x)).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Squashed(Attention):
    """A nonlinearity behind the values."""

    def values(self, x: Tensor) -> Tensor:
        return super().values(x).tanh()


class Normed(Attention):
    """A norm without weights behind every head's values, which does not care how they are turned."""

    def values(self, x: Tensor) -> Tensor:
        found = super().values(x)
        return found * torch.rsqrt(found.square().mean(-1, keepdim=True) + 1e-6)


class Residual(Attention):
    """The values also go past W_O."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.3 * self.v(x)  # type: ignore[no-any-return]


class Lengths(Attention):
    """How long the values are goes past W_O, which does not care how they are turned."""

    def forward(self, x: Tensor) -> Tensor:
        length = self.v(x).square().mean(-1, keepdim=True)
        return super().forward(x) * (1 + length)  # type: ignore[no-any-return]


class Stretched(Attention):
    """A factor for every feature behind the values."""

    def values(self, x: Tensor) -> Tensor:
        return super().values(x) * torch.linspace(0.5, 2, WIDTH // HEADS).to(x)


class Tied(Attention):
    """Values are keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q, self.v))
        return self.o(F.scaled_dot_product_attention(q, v, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Two attentions and a classifier of every token."""

    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.first, self.second, self.head = kind(), Attention(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.first(x), (WIDTH,))
        return self.head(x + self.second(x))  # type: ignore[no-any-return]


class Handed(Attention):
    """Its values are added to an earlier layer's, as in value residual learning (arXiv:2410.17897)."""

    earlier: Tensor

    def values(self, x: Tensor) -> Tensor:
        return super().values(x) + self.earlier


class Later(Stack):
    """The second attention reads the first one's values as well."""

    def __init__(self) -> None:
        super().__init__(Attention)
        self.second = Handed()

    def forward(self, x: Tensor) -> Tensor:
        self.second.earlier = self.first.values(x)
        return super().forward(x)


def test_plain_modules_have_their_values_refitted() -> None:
    """What the others are compared with."""
    model, x = randomise(Stack(Attention)).double(), noise(6, 5, WIDTH).double()
    refit = Refit(model, hp.find_attention(model, x), [x], ridge=0.1)
    weights = refit.fitted({"first": [1], "second": [0]})
    assert set(weights.by_module) == {"first.o", "first.v", "second.o", "second.v"}
    assert refit.notes == []


class Scaled(Attention):
    """A factor for every head behind the values, of which every token also gets some of the one before."""

    def values(self, x: Tensor) -> Tensor:
        found = super().values(x) * torch.tensor([0.5, -1.0, 2.0, 3.0]).to(x)[:, None, None]
        return found + 0.5 * F.pad(found, (0, 0, 1, 0))[..., :-1, :]


@pytest.mark.parametrize("kind", [Attention, Scaled])
def test_what_is_linear_in_its_values_is_as_promised(kind: type[Attention]) -> None:
    model, x = randomise(Stack(kind)).double(), noise(20, 5, WIDTH).double()
    refit = Refit(model, hp.find_attention(model, x), [x], ridge=0.01)
    weights = refit.fitted({"first": [1]})
    assert list(weights.by_module) == ["first.o", "first.v"]
    check_promise(refit, weights, x, None)


@pytest.mark.parametrize("kind", [Squashed, Normed, Residual, Lengths, Stretched, Tied])
def test_values_that_are_not_for_w_o_alone_stay(kind: type[Attention]) -> None:
    model, x = randomise(Stack(kind)).double(), noise(6, 5, WIDTH).double()
    layers = hp.find_attention(model, x)
    assert [a.name for a in layers] == ["first", "second"]
    before = state(model)
    refit = Refit(model, layers, [x], ridge=0.1)
    drop: Heads = {"first": [1], "second": [0]}
    weights = refit.fitted(drop)
    assert same(model, before)
    assert hooks(model) == 0
    assert set(weights.by_module) == {"first.o", "second.o", "second.v"}
    assert weights.facts["first"].after < weights.facts["first"].before
    assert not weights.facts["first"].values
    alone = Refit(model, layers, [x], ridge=0.1, values=False).fitted(drop)
    torch.testing.assert_close(weights.by_module["first.o"][0], alone.by_module["first.o"][0])
    assert [n for n in refit.notes if n.startswith("first keeps its old values")] == refit.notes
    assert len(refit.notes) == 1


def test_values_that_a_later_layer_reads_stay() -> None:
    """W_O's inputs there would change, which nobody has fitted it to."""
    model, x = randomise(Later()).double(), noise(6, 5, WIDTH).double()
    layers = hp.find_attention(model, x)
    refit = Refit(model, layers, [x], ridge=0.1)
    weights = refit.fitted({"first": [1]})
    assert list(weights.by_module) == ["first.o"]
    assert any("first keeps its old values" in n for n in refit.notes)


def gemma(name: str) -> nn.Module:
    """Gemmas that norm their values."""
    common: dict[str, Any] = {
        "vocab_size": 100, "vocab_size_per_layer_input": 100, "hidden_size": 32, "hidden_size_per_layer_input": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8,
        "pad_token_id": 0, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {
        "Gemma3n": {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 2},
        "Gemma4": {"global_head_dim": 8},
    }
    if not hasattr(tf, f"{name}TextConfig"):
        pytest.skip("transformers is too old")
    config = getattr(tf, f"{name}TextConfig")(**common, **more[name])
    return randomise(getattr(tf, f"{name}ForCausalLM")(config)).double()


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_values_behind_a_norm_stay(name: str) -> None:
    model, example = gemma(name), text()
    layers = hp.find_attention(model, example)
    refit = Refit(model, layers, [example], ridge=0.1)
    weights = refit.fitted({layers[0].name: list(layers[0].units[0])})
    assert list(weights.by_module) == [refit.places[0].name]
    assert len(refit.notes) == 2


# -- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "mha", "torch_transformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_applied_gives_back_the_values_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model, example = zoo.ZOO[name]()
    model = model.to(dtype).train()
    example = (
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}
        if isinstance(example, dict)
        else tuple(t.to(dtype) if t.is_floating_point() else t for t in example)
    )
    layers = hp.find_attention(model, example)
    before, pointers = state(model), {n: id(p) for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    refit = Refit(model, layers, [batch_of(example)], ridge=0.1)
    drop = some(layers)
    weights = refit.fitted(drop)
    losing = [p for p in refit.places if p.layers[0].name in drop]
    assert {p.values.name for p in losing if p.values} <= set(weights.by_module)
    assert all(p.values for p in losing)

    def check() -> None:
        assert same(model, before)
        assert {n: id(p) for n, p in model.named_parameters()} == pointers
        assert [m.training for m in model.modules()] == modes
        assert hooks(model) == 0

    check()
    with refit.applied(weights):
        now = state(model)
        changed = {k for k, v in before.items() if not torch.equal(v, now[k])}
        assert len(changed) >= 2 * len(losing)
        with exact_attention(model):
            for place in losing:
                assert place.values is not None
                module: Any = model.get_submodule(place.values.name)
                found = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
                assert torch.equal(found, weights.by_module[place.values.name][0].to(dtype))
                # Of a fused projection, only the values of heads that stay.
                alike = (found == place.values.weight.to(dtype)).all(0)
                stays = [f for f in range(found.shape[1]) if f not in place.values.features.flatten()]
                assert alike[stays].all()
                kept = {place.values.owner[h] for h in place.heads(drop)}
                for head, features in enumerate(place.values.features):
                    assert bool(alike[features].all()) == (head not in kept)
    check()
    with pytest.raises(KeyboardInterrupt), refit.applied(weights):
        raise KeyboardInterrupt
    check()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "mha"])
def test_the_model_gives_what_the_fit_was_promised(name: str) -> None:
    """Of the first layer that loses heads: its error with the weights written, counted by hand."""
    model, example, layers = made(name)
    refit = Refit(model, layers, [batch_of(example)], ridge=0.1, mixtures=False)
    weights = refit.fitted({layers[0].name: list(layers[0].units[0])})
    check_promise(refit, weights, example, padding_of(name, refit.places[0], example))


PRUNED = {
    "bert": ({"L0": [1], "L2": [0, 1, 2, 3]}, zoo.bert),
    "llama": ({"L0": [0, 1], "L1": [2, 3, 4, 5]}, zoo.llama),  # groups
    "llama, slices": ({"L0": [0, 2, 4], "L2": [1, 3, 5]}, zoo.llama),
    "gpt2": ({"L0": [0], "L1": [1, 2]}, zoo.gpt2),
    "vit": ({"L1": [0, 3]}, zoo.vit),
    "t5": ({"L0": [1], "L3": [0, 2], "L1": [3]}, zoo.t5),
}


@pytest.mark.parametrize("name", PRUNED)
@torch.no_grad()
def test_pruned_saved_and_loaded(name: str, tmp_path: Path) -> None:
    drop, make = PRUNED[name]
    model, example = make()
    layers = hp.find_attention(model, example)
    refit = Refit(model, layers, [example], ridge=0.1)
    weights = refit.fitted({a.name: drop[f"L{a.index}"] for a in layers if f"L{a.index}" in drop})
    refit.apply(weights)
    lost = {f"L{a.index}": a.name for a in layers}
    assert all(weights.facts[lost[n]].values for n, heads in drop.items() if len(heads) < 4 or name.startswith("llama"))
    whole = model(**example).logits
    with hp.mask(model, drop, layers=layers):
        masked = model(**example).logits
    torch.testing.assert_close(whole, masked, rtol=1e-4, atol=1e-4)  # their W_O rows are zero
    loaded = hp.load(hp.save(model, tmp_path / "whole"))
    torch.testing.assert_close(loaded(**example).logits, whole)
    hp.prune(model, drop, example, layers=layers)
    torch.testing.assert_close(model(**example).logits, masked, rtol=1e-3, atol=1e-3)
    loaded = hp.load(hp.save(model, tmp_path / "pruned"))
    torch.testing.assert_close(loaded(**example).logits, model(**example).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv", [1, 4])
def test_values_are_refitted_where_that_is_better_on_examples_held_out(kv: int) -> None:
    model, example = grouped(4, kv), text(20, 9)
    layers = hp.find_attention(model, example)
    refit = Refit(model, layers, [example])
    drop = {a.name: [1] for a in layers}
    weights = refit.fitted(drop)
    for place in refit.places:
        assert place.values is not None
        moments, rank = refit.statistics.dense[place.name], refit.statistics.directions[place.name].shape[1]
        alone = fit_output(moments, place, place.kept(drop), None)
        both = fit_values(moments, place, place.values, [0, 2, 3], rank, None)
        assert alone.held_out is not None
        assert both.held_out is not None
        better = both.held_out < alone.held_out
        assert better == (kv == 4)  # what has one key/value head has no other values to take over
        assert weights.facts[place.layers[0].name] == (both if better else alone).facts
        assert (place.values.name in weights.by_module) == (place.name in weights.mixes) == better


def test_sweeps_leave_the_values_alone() -> None:
    model, example, layers = made("bert")
    drop = some(layers)
    refit = Refit(model, layers, [example], ridge=0.1)
    weights = refit.fitted(drop, sweeps=1)
    alone = Refit(model, layers, [example], ridge=0.1, values=False).fitted(drop, sweeps=1)
    assert not weights.mixes
    close(weights, alone)
    before = {v.name: v.weight.clone() for v in refit.values.values()}
    repair(model, drop, [example], layers=layers, sweeps=1)
    assert all(torch.equal(model.get_parameter(f"{name}.weight").T, weight) for name, weight in before.items())


# -- always the same -----------------------------------------------------------------------------


def grouped(heads: int, kv: int) -> nn.Module:
    config = tf.LlamaConfig(
        **sizes(
            "sdpa", hidden_size=32, num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=kv, head_dim=4
        )
    )  # fmt: skip
    return randomise(tf.LlamaForCausalLM(config)).double()


def identical(a: Weights, b: Weights) -> bool:
    return a.by_module.keys() == b.by_module.keys() and all(
        torch.equal(weight, b.by_module[n][0]) and (bias is None or torch.equal(bias, b.by_module[n][1]))  # type: ignore[arg-type]
        for n, (weight, bias) in a.by_module.items()
    )


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mha"])
@pytest.mark.parametrize("ridge", [None, 0.1])
def test_two_refits_are_the_same_to_the_bit(name: str, ridge: float | None) -> None:
    model, example, layers = made(name)
    drop = some(layers)
    batches = [batch_of(example)]
    torch.manual_seed(1)
    first = Refit(model, layers, batches, ridge=ridge).fitted(drop)
    torch.manual_seed(2)
    refit = Refit(model, layers, batches, ridge=ridge)
    refit.fitted({layers[0].name: list(layers[0].units[0])})  # something else before
    assert ridge is None or first.mixes
    assert identical(first, refit.fitted(drop))
    assert identical(first, refit.fitted(drop))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "one group", "two groups", "dead head"])
def test_other_batches_give_the_same_up_to_rounding(name: str) -> None:
    if name.endswith(("group", "groups")):  # fewer values than directions that there is room for
        model, example = grouped(4, 1 if name == "one group" else 2), text(5, 9)
    elif name == "dead head":
        model, (example, *_), _ = planted()
    else:
        model, example, _ = made(name)
        example = text(5, 9) if name in ("bert", "gpt2", "llama") else example
    layers = hp.find_attention(model, example)
    rows = len(next(iter(example.values())))
    # So that something is lost in the first layer too.
    drop = {a.name: list(a.units[1 % len(a.units)][:1]) for a in layers}

    def found(batches: Sequence[Any]) -> Weights:
        return Refit(model, layers, batches, ridge=0.1, mixtures=False).fitted(drop)

    whole = found([example])
    assert set(whole.mixes) == {a.output_projection.module for a in layers if a.output_projection}
    close(found([Rows().take(example, [i]) for i in range(rows)]), whole)
    close(found([Rows().take(example, [0, 1]), Rows().take(example, range(2, rows))]), whole)
    if name in ("bert", "gpt2"):
        close(found([padded(example, 4, left=False)]), whole)


def test_directions_of_cross_attention_do_not_see_padding() -> None:
    """What it takes its values from is the encoder's, where padding is not what the decoder's is."""
    model, example, layers = made("t5")
    refit = with_directions(Refit(model, layers, [example]))
    other = with_directions(Refit(model, layers, [padded(example, 4, left=False)]))
    for place in refit.places:
        a, b = refit.statistics.directions[place.name], other.statistics.directions[place.name]
        torch.testing.assert_close(a @ a.T, b @ b.T, rtol=1e-6, atol=1e-8)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [3, 2, 1, 0])
def test_as_many_directions_as_there_is_room_for(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, layers = made("bert")
    room = len(layers) * 2 * 8 * (32 + 4 * 8 * shares + 1) ** 2
    monkeypatch.setattr(statistics_module, "_MOST", room - (not shares))
    drop = some(layers)
    refit = Refit(model, layers, [example], ridge=0.1)
    weights = refit.fitted(drop)
    sizes = {name: tuple(m.xx.shape) for name, m in refit.statistics.dense.items()}
    assert set(sizes.values()) == {(2, 33 + 32 * shares, 33 + 32 * shares)}
    alone = Refit(model, layers, [example], ridge=0.1, values=False).fitted(drop)
    assert weights.by_module.keys() >= alone.by_module.keys()
    if shares:
        assert refit.notes == []
        assert {len(m) for mixes in weights.mixes.values() for m in mixes.values()} == {8 + 8 * shares}
        found = effects(refit, layers, drop, units_for(layers, drop))
        assert found.isfinite().all()
    else:
        assert len(refit.notes) == 1
        assert "would not fit into memory" in refit.notes[0]
        close(weights, alone)
    with refit.applied(weights):
        pass


def test_a_byte_less_is_a_share_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, layers = made("bert")
    for shares in (3, 2):
        monkeypatch.setattr(statistics_module, "_MOST", len(layers) * 2 * 8 * (33 + 32 * shares) ** 2 - 1)
        refit = with_directions(Refit(model, layers, [example]))
        assert {q.shape[1] for q in refit.statistics.directions.values()} == {8 * (shares - 1)}


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_parts_of_a_batch_give_the_same_moments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, layers = made(name)
    whole = Refit(model, layers, [example]).statistics.dense
    for most in (1, 30_000):
        monkeypatch.setattr(statistics_module, "_MOST_AT_ONCE", most)
        refit = Refit(model, layers, [example])
        for key, found in refit.statistics.dense.items():
            assert torch.equal(found.xx, whole[key].xx)
            assert torch.equal(found.xy, whole[key].xy)
            assert torch.equal(found.yy, whole[key].yy)
        with torch.no_grad(), refit.runner.deterministic_eval():
            xs, _ = refit.runner.recorded(refit.batches[0])
        parts = list(refit.statistics.at_once(xs))
        assert [n for part in parts for n in part] == [p.name for p in refit.places]
        assert most > 1 or len(parts) == len(refit.places)
        sizes = {name: found.xx.shape[-1] - 1 for name, found in whole.items()}
        for part in parts:
            bytes_ = sum(4 * x.numel() // x.shape[-1] * sizes[n] for n in part for x in xs[n])
            assert len(part) == 1 or bytes_ <= most


# -- never worse -----------------------------------------------------------------------------------


_BERT = small()
_LLAMA = grouped(4, 2)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 2)), min_size=2, max_size=2),
    st.sampled_from([None, 1e-8, 1e-6, 1e-2, 1.0, 100.0]),
    st.integers(1, 3),
)
def test_never_worse_on_the_calibration_examples(gone: list[set[int]], ridge: float | None, batches: int) -> None:
    model, given_ = _BERT
    check_never_worse(model, given_[:batches], gone, ridge)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 3)), min_size=2, max_size=2), st.sampled_from([None, 1e-8, 1e-2, 100.0])
)  # fmt: skip
def test_never_worse_with_groups_and_slices(gone: list[set[int]], ridge: float | None) -> None:
    check_never_worse(_LLAMA, [text(4, 6)], gone, ridge)


def check_never_worse(model: nn.Module, batches: Sequence[Any], gone: Sequence[set[int]], ridge: float | None) -> None:
    layers = hp.find_attention(model, batches[0])
    before = state(model)
    drop = {a.name: sorted(g) for a, g in zip(layers, gone, strict=True) if g}
    weights = Refit(model, layers, batches, ridge=ridge).fitted(drop)
    assert same(model, before)
    assert set(weights.facts) == set(drop)
    for layer in layers:
        if layer.name not in drop:
            continue
        facts = weights.facts[layer.name]
        assert -1e-9 <= facts.after <= facts.before + 1e-9
        every = len(drop[layer.name]) == layer.num_heads
        assert facts.values <= (not every)
        assert facts.values or every or ridge is None
    if ridge is not None and weights.mixes:
        # More freedom, and the old values to begin with.
        alone = Refit(model, layers, batches, ridge=ridge, values=False).fitted(drop)
        for name, facts in weights.facts.items():
            assert facts.before == pytest.approx(alone.facts[name].before, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_nothing_removed_nothing_changed(name: str) -> None:
    model, example, layers = made(name)
    before = state(model)
    none: list[Heads] = [{}, {layers[0].name: []}]
    for drop in none:
        done = repair(model, drop, [example], layers=layers)
        assert done.layers == {}
    assert same(model, before)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_layer_without_heads_has_a_bias_at_most(name: str) -> None:
    model, example, layers = made(name)
    refit = Refit(model, layers, [example], ridge=0.1)
    weights = refit.fitted({layers[1].name: list(range(layers[1].num_heads))})
    place = refit.places[1]
    assert list(weights.by_module) == [place.name]
    weight, bias = weights.by_module[place.name]
    assert not weight.any()
    moments = refit.statistics.dense[place.name]
    assert bias is not None
    torch.testing.assert_close(bias, moments.xy.sum(0)[-1] / moments.xx.sum(0)[-1, -1])


def test_an_infinite_ridge_leaves_values_alone() -> None:
    model, example, layers = made("bert")
    refit = Refit(model, layers, [example], ridge=float("inf"))
    weights = refit.fitted(some(layers))
    assert refit.values == {}
    assert not weights.mixes


@pytest.mark.parametrize("ridge", [None, 1e-9])
def test_a_layer_with_heads_that_are_never_looked_at(ridge: float | None) -> None:
    """Whose values are all zero: nothing to attend to but what is made anew."""
    model, example, layers = made("bert")
    attention: Any = model.bert.encoder.layer[0].attention  # type: ignore[union-attr, index]
    with torch.no_grad():
        attention.self.value.weight[:8] = 0
        attention.self.value.bias[:8] = 0
        attention.output.dense.weight[:, :8] = 0
    weights = Refit(model, layers, [example], ridge=ridge).fitted({layers[0].name: [1]})
    for weight, bias in weights.by_module.values():
        assert weight.isfinite().all()
        assert bias is None or bias.isfinite().all()
    assert all(f.after <= f.before + 1e-9 for f in weights.facts.values())


# -- effects -----------------------------------------------------------------------------------


def anew(x: Tensor, further: Tensor, place: OutputProjection, mixes: Mapping[int, Tensor]) -> Tensor:
    """What W_O gets of the same attention once values are made anew."""
    x = x.clone()
    features = place.layers[0].output_projection.features  # type: ignore[union-attr]
    for head, mix in mixes.items():
        own = list(features[head])
        x[..., own] = torch.cat([x[..., own], further[..., head, :]], dim=-1) @ mix
    return x


def direct(refit: Refit, example: Any, drop: Heads, unit: Unit, ridge: float) -> Tensor:
    """Effect of a unit by another fit without it: to what the layer gives now, from its inputs and what heads could read.

    Weights of what they could read are zero now, and all weights are pulled towards those that there are.
    """
    layer = refit.layers[unit.layer]
    place = next(p for p in refit.places if layer in p.layers)
    weights = refit.fitted(drop)
    now = weights.by_module.get(place.name, (place.weight, None))[0]
    width, heads = layer.head_dim, layer.num_heads
    features = layer.output_projection.features  # type: ignore[union-attr]
    x, further = by_hand(refit, example)[place.name]
    z = torch.cat(
        [anew(x, further, place, weights.mixes.get(place.name, {})), further[..., :width].flatten(-2)], dim=-1
    )
    real = example["attention_mask"].bool()
    told = refit.runner.sensitivity(0)[place.name][0][real]
    z = z[real]
    share = (told / told.sum())[:, None]
    now = torch.cat([now, now.new_zeros(heads * width, now.shape[1])])

    def columns(kept: Sequence[int]) -> list[int]:
        further = [range((heads + h) * width, (heads + h + 1) * width) for h in kept]
        return [f for h, more in zip(kept, further, strict=True) for f in (*features[h], *more)]

    there = [h for h in range(heads) if h not in drop.get(layer.name, [])]
    both, rest = columns(there), columns([h for h in there if h not in unit.heads])
    mean = (share * z).sum(0) if place.has_bias else torch.zeros_like(z[0])
    strength = ridge * float((share * (z - mean) ** 2).sum(0)[both].mean())
    wanted = (z - mean)[:, both] @ now[both]
    pull = torch.eye(len(rest), dtype=z.dtype) * strength**0.5
    left = torch.cat([share.sqrt() * (z - mean)[:, rest], pull])
    right = torch.cat([share.sqrt() * wanted, pull @ now[rest]])
    new = torch.zeros_like(now)
    new[rest] = torch.linalg.lstsq(left, right, driver="gelsd").solution
    change = new - now
    change[[f for f in range(len(now)) if f not in both]] = 0
    with refit.applied(weights):
        x, further = by_hand(refit, example)[place.name]
        ((_, slope),) = refit.slopes(0)[place.name]
    z = torch.cat([x, further[..., :width].flatten(-2)], dim=-1) - mean
    return ((z @ change) * slope).flatten(1).sum(1)


@pytest.mark.parametrize(("name", "single"), [("bert", False), ("gpt2", False), ("llama", False), ("llama", True)])
@pytest.mark.parametrize("gone", [False, True])
def test_effects_are_those_of_the_wider_fit_without_the_unit(name: str, single: bool, gone: bool) -> None:
    model, example, layers = made(name)
    before = state(model)
    refit = Refit(model, layers, [example], ridge=0.05, mixtures=False)
    drop = {layers[0].name: list(layers[0].units[1]), layers[2].name: list(layers[2].units[0])} if gone else {}
    units = units_for(layers, drop, single)
    found = effects(refit, layers, drop, units)
    assert same(model, before)
    assert hooks(model) == 0
    assert found.shape == (3, len(units))
    assert found.abs().max() > 1e-4
    plain = effects(Refit(model, layers, [example], ridge=0.05, values=False, mixtures=False), layers, drop, units)
    assert (found - plain).abs().max() > 1e-4
    for i in range(0, len(units), 1 + len(units) // 6):
        expected = direct(refit, example, drop, units[i], 0.05)
        torch.testing.assert_close(found[:, i], expected, rtol=1e-7, atol=1e-8)
    assert same(model, before)


def test_under_a_strong_pull_values_make_no_difference() -> None:
    model, example, layers = made("bert")
    units = units_for(layers, {})
    weak, strong = (
        [effects(Refit(model, layers, [example], ridge=r, values=v), layers, {}, units) for v in (False, True)]
        for r in (0.1, 1e9)
    )
    torch.testing.assert_close(strong[0], strong[1], rtol=1e-6, atol=1e-7)
    assert (weak[0] - weak[1]).abs().max() > 1e-3


def test_a_head_costs_less_where_another_can_read_what_it_reads() -> None:
    model, batches, _ = planted()
    layers = hp.find_attention(model, batches[0])
    units = [Unit(0.0, 0, (1,))]
    wide = effects(Refit(model, layers, batches, ridge=1e-8), layers, {}, units)
    plain = effects(Refit(model, layers, batches, ridge=1e-8, values=False), layers, {}, units)
    assert plain.abs().mean() > 1e-3
    assert plain.abs().mean() > wide.abs().mean() > 0


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (1, 1)])
def test_heads_wider_than_their_input(heads: tuple[int, int]) -> None:
    """There are fewer directions than a head is wide."""
    config = tf.LlamaConfig(
        **sizes(
            "sdpa", hidden_size=8, num_hidden_layers=2, num_attention_heads=heads[0], num_key_value_heads=heads[1],
            head_dim=12,
        )
    )  # fmt: skip
    model, example = randomise(tf.LlamaForCausalLM(config)).double(), text()
    layers = hp.find_attention(model, example)
    refit = Refit(model, layers, [example], ridge=0.1)
    drop = {layers[0].name: [0]}
    weights = refit.fitted(drop)
    assert all(f.after <= f.before + 1e-9 for f in weights.facts.values())
    units = units_for(layers, {}, single=True)
    found = effects(refit, layers, {}, units)
    assert found.isfinite().all()
    # Those that are missing are inputs that are always zero.
    refit.statistics.directions = {
        n: F.pad(q, (0, max(0, 12 - q.shape[1]))) for n, q in refit.statistics.directions.items()
    }
    expected = torch.stack([direct(refit, example, {}, unit, 0.1) for unit in units], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("lowest", range(len(values_module.RIDGES)))
def test_the_strength_is_the_valleys_floor(lowest: int) -> None:
    tried: list[float] = []

    def error(strength: float) -> float:
        tried.append(strength)
        return 1.0 + abs(values_module.RIDGES.index(strength) - lowest)

    assert downhill(error, values_module.RIDGES, 2) == (values_module.RIDGES[lowest], 1.0)
    assert len(tried) == len(set(tried))  # none twice
    assert downhill(lambda strength: math.inf, values_module.RIDGES, 2)[1] == math.inf
