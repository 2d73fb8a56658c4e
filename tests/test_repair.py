"""Repair against brute force: the same regression on the stacked tokens, by another solver."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads, check_heads
from headprune.inputs import call
from headprune.modules import exact_attention
from headprune.planning.effects import effects
from headprune.planning.units import Unit
from headprune.repairing import OutputProjection, Refit, Weights, added_biases, repair
from headprune.repairing.probe import across as _across
from headprune.repairing.probe import noise as _noise
from headprune.rows import Rows
from headprune.surgery import answers
from tests.support import zoo
from tests.support.checks import hooks, same, state
from tests.support.interrupted import Processes
from tests.support.plain import WIDTH, Attention, Pair, model_of, noise
from tests.support.problems import duplicated, small
from tests.support.repairs import MODELS, batch_of, close, made, padded, padding_of, some, xlnet
from tests.support.zoo import TorchEncoder, randomise, text


def seen(model: nn.Module, names: Sequence[str], example: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """What goes through modules, by hooks of the tests' own."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {n: [] for n in names}
    with torch.no_grad(), exact_attention(model):
        handles = [
            model.get_submodule(n).register_forward_hook(lambda m, a, out, n=n: found[n].append((a[0], out)))
            for n in names
        ]
        call(model, example)
        for handle in handles:
            handle.remove()
    return found


def brute(
    x: Tensor, y: Tensor, weight: Tensor, old: Tensor, old_bias: Tensor, ridge: float, bias: bool
) -> tuple[Tensor, Tensor]:
    """Least squares with rows for the ridge, on the difference from the old weights."""
    weight = weight / weight.sum()
    mean = (weight[:, None] * x).sum(0) if bias else torch.zeros_like(x[0])
    strength = ridge * float((weight[:, None] * (x - mean) ** 2).sum(0).mean())
    ones = torch.full((len(x), 1), float(bias), dtype=x.dtype)
    root = weight.sqrt()[:, None]
    left = root * torch.cat([x, ones], 1)
    right = root * (y - x @ old - old_bias)
    pull = torch.eye(x.shape[1] + 1, dtype=x.dtype) * strength**0.5
    pull = pull[:-1]  # the bias is free
    both = torch.cat([left, pull]), torch.cat([right, torch.zeros(len(pull), y.shape[1], dtype=y.dtype)])
    found = torch.linalg.lstsq(*both, driver="gelsd").solution
    return old + found[:-1], old_bias + found[-1] * float(bias)


def tokens(
    refit: Refit, place: OutputProjection, name: str, example: Any, calls: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Stacked inputs, outputs and weights of the tokens that count; the weights are of slopes taken here."""
    mask = padding_of(name, place, example)
    xs, ys, ws = [], [], []
    for n, (x, y) in enumerate(calls):
        if name.startswith("xlnet"):
            w = torch.cat([refit.runner.sensitivity(i)[place.name][n] for i in range(len(refit.batches))], dim=1)
        else:
            w = refit.runner.sensitivity(0)[place.name][n]
        chosen = torch.ones(x.shape[:-1], dtype=torch.bool) if mask is None else mask
        xs, ys, ws = [*xs, x[chosen]], [*ys, y[chosen]], [*ws, w[chosen]]
    return [torch.cat(xs), torch.cat(ys), torch.cat(ws)]


@pytest.mark.parametrize("name", MODELS)
def test_the_fit_is_the_regression(name: str) -> None:
    model, example, layers = made(name)
    before = state(model)
    for ridge in (1e-3, 1.0):
        refit = Refit(model, layers, [batch_of(example)], ridge=ridge, values=False, mixtures=False)
        drop = some(layers) or {layers[0].name: [1]}  # ALBERT has but one
        weights = refit.fitted(drop)
        assert same(model, before)
        inputs = seen(model, [p.name for p in refit.places], example)
        assert set(weights.by_module) == {p.name for p in refit.places if any(a.name in drop for a in p.layers)}
        for place in refit.places:
            if place.name not in weights.by_module:
                continue
            x, y, w = tokens(refit, place, name, example, inputs[place.name])
            assert (w > 0).any()
            kept = place.kept(drop)
            new, bias = brute(x[:, kept], y, w, place.weight[kept], place.bias, ridge, place.has_bias)
            found, found_bias = weights.by_module[place.name]
            torch.testing.assert_close(found[kept], new, rtol=1e-7, atol=1e-8)
            if place.has_bias:
                torch.testing.assert_close(found_bias, bias, rtol=1e-7, atol=1e-8)
            gone = [i for i in range(len(place.weight)) if i not in kept.tolist()]
            assert gone
            assert not found[gone].any()
            facts = weights.facts[place.layers[0].name]
            share = w[:, None] / w.sum()
            spread = (share * (y - (share * y).sum(0)) ** 2).sum()
            left = (share * (y - x[:, kept] @ new - (bias if place.has_bias else place.bias)) ** 2).sum()
            assert facts.after == pytest.approx(float(left / spread), rel=1e-6, abs=1e-9)
            assert facts.ridge == ridge


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mha"])
def test_a_sweep_sees_the_repaired_model(name: str) -> None:
    model, example, layers = made(name)
    refit = Refit(model, layers, [batch_of(example)], ridge=0.01, values=False)
    drop = some(layers)
    first = refit.fitted(drop)
    weights = refit.fitted(drop, sweeps=1)
    names = [p.name for p in refit.places]
    dense = seen(model, names, example)
    with refit.applied(first):
        pruned = seen(model, names, example)
    for place in refit.places:
        if place.name in weights.by_module:
            calls = [(x, y) for (x, _), (_, y) in zip(pruned[place.name], dense[place.name], strict=True)]
            x, y, w = tokens(refit, place, name, example, calls)
            kept = place.kept(drop)
            new, _ = brute(x[:, kept], y, w, place.weight[kept], place.bias, 0.01, place.has_bias)
            torch.testing.assert_close(weights.by_module[place.name][0][kept], new, rtol=1e-6, atol=1e-8)
    # Layers behind the first that loses a head are fitted as well, those before it are not.
    assert list(weights.by_module) == names[1:]


def across(root: Tensor, draw: Tensor) -> Tensor:
    """On the sphere of radius sqrt(classes - 1), at right angles to ``root``; row by row."""
    rows = []
    for r, d in zip(root, draw, strict=True):
        rest = d - torch.dot(r, d) * r / torch.dot(r, r)
        rows.append(rest / torch.linalg.vector_norm(rest) * (len(r) - 1) ** 0.5)
    return torch.stack(rows)


def test_the_probe_is_the_fisher_information() -> None:
    """On average the square of its slope at the logits is diag(p) - p p^T."""
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    root = chances.sqrt().expand(200_000, 4)
    draw = torch.randn(root.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    told = _across(root, draw) * root
    slopes = told - chances * told.sum(-1, keepdim=True)  # of sum(told * log_softmax(logits))
    found = slopes.T @ slopes / len(slopes)
    assert torch.allclose(found, chances.diag() - torch.outer(chances, chances), atol=3e-3)
    two = torch.tensor([[0.9, 0.1]], dtype=torch.float64).sqrt()
    for seed in range(3):  # two classes: only the sign is drawn
        draw = torch.randn(1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        told = _across(two, draw) * two
        assert abs(float(told[0, 0] - 0.9 * told.sum())) == pytest.approx((0.9 * 0.1) ** 0.5)


def test_where_an_answer_starts_and_ends_is_no_padding() -> None:
    """An example's tokens matter as much in a padded batch as alone, and what is said of padding matters to none."""
    config = tf.BertConfig(
        vocab_size=100, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=32, pad_token_id=0,
    )  # fmt: skip
    model = randomise(tf.BertForQuestionAnswering(config)).double()
    given_ = text(3, 9)
    given_["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [1] * 4 + [0] * 5])
    layers = hp.find_attention(model, given_)
    whole = Refit(model, layers, [given_])
    alone = [{k: v[i : i + 1, :n] for k, v in given_.items()} for i, n in enumerate((9, 6, 4))]
    apart = Refit(model, layers, alone)
    for place in whole.places:
        together = whole.runner.sensitivity(0)[place.name][0]
        for i, n in enumerate((9, 6, 4)):
            assert torch.allclose(together[i, :n], apart.runner.sensitivity(i)[place.name][0][0], rtol=1e-6)
    units = [Unit(0.0, i, (h,)) for i, a in enumerate(layers) for h in range(a.num_heads)]
    assert torch.allclose(effects(whole, layers, {}, units), effects(apart, layers, {}, units), rtol=1e-5)


def test_the_weights_of_tokens_are_slopes() -> None:
    """By finite differences of the probe, at two tokens."""
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    refit = Refit(model, layers, batches)
    place = refit.places[1]
    x, slope = refit.slopes(1)[place.name][0]
    given_ = {k: v for k, v in batches[1].items() if k != "labels"}
    module: Any = model.get_submodule(place.name)
    with torch.no_grad():
        chances = model(**given_).logits.softmax(-1)
    told = across(chances.sqrt(), _noise(chances, None, [4, 5])) * chances.sqrt()  # the second batch's examples
    for at in ((0, 1, 3), (1, 0, 5)):
        ends = []
        for step in (1e-5, -1e-5):
            moved = torch.zeros_like(slope)
            moved[at] = step
            handle = module.register_forward_hook(lambda m, a, out, moved=moved: out + moved)
            with torch.no_grad():
                ends.append(float((told * model(**given_).logits.log_softmax(-1)).sum()))
            handle.remove()
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float(slope[at]), rel=1e-5, abs=1e-9)
    assert x.shape[:2] == slope.shape[:2]


@pytest.mark.parametrize("drop", [{}, {"L0": []}])
def test_nothing_removed_nothing_changed(drop: Heads) -> None:
    for model, example in (zoo.bert(), zoo.llama()):
        before = state(model)
        done = repair(model, drop, [example], layers=hp.find_attention(model, example), sweeps=1)
        assert same(model, before)
        assert done.layers == {}
        assert done.biases == ()


def test_layers_that_lose_nothing_keep_their_weights() -> None:
    """On the dense model's activations there is nothing to gain; a fit would only be noise."""
    model, example = zoo.bert()
    layers = hp.find_attention(model, example)
    weights = Refit(model, layers, [batch_of(example)]).fitted({layers[1].name: [2]})
    assert list(weights.facts) == [layers[1].name]


_BERT = small()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 2)), min_size=2, max_size=2),
    st.sampled_from([None, 1e-6, 1e-2, 1.0, 100.0, float("inf")]),
    st.integers(1, 3),
    st.integers(0, 1),
)
def test_never_worse_on_the_calibration_examples(
    gone: list[set[int]], ridge: float | None, batches: int, sweeps: int
) -> None:
    model, given_ = _BERT
    layers = hp.find_attention(model, given_[0])
    before = state(model)
    refit = Refit(model, layers, given_[:batches], ridge=ridge, values=False)
    weights = refit.fitted({a.name: sorted(g) for a, g in zip(layers, gone, strict=True) if g}, sweeps)
    for facts in weights.facts.values():
        assert facts.after <= facts.before + 1e-9
        assert facts.after >= -1e-9
    assert same(model, before)


@pytest.mark.parametrize(("ridge", "most"), [(None, 1e-3), (1e-8, 1e-5)])
@torch.no_grad()
def test_a_duplicate_is_made_up_for(ridge: float | None, most: float) -> None:
    model, batches = small()
    duplicated(model)
    model.bert.encoder.layer[0].attention.output.dense.weight[:, 8:16] *= -0.3  # alike, but used otherwise
    layers = hp.find_attention(model, batches[0])
    dense = model(**batches[0]).logits
    drop = {layers[0].name: [1]}
    with hp.mask(model, drop, layers=layers):
        masked = model(**batches[0]).logits
    repair(model, drop, batches, layers=layers, ridge=ridge, values=False)
    with hp.mask(model, drop, layers=layers):
        repaired = model(**batches[0]).logits
    assert (repaired - dense).abs().max() < most
    assert (masked - dense).abs().max() > 20 * most


def fitted(model: nn.Module, batches: Sequence[Any], ridge: float | None = None) -> Weights:
    layers = hp.find_attention(model, batches[0])
    return Refit(model, layers, batches, ridge=ridge, mixtures=False).fitted(some(layers))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("ridge", [None, 0.1])
def test_batches_and_padding_do_not_matter(name: str, ridge: float | None) -> None:
    model, _, _ = made(name)
    batch = text(5, 9)
    whole = fitted(model, [batch], ridge)
    close(fitted(model, [Rows().take(batch, [i]) for i in range(5)], ridge), whole)
    close(fitted(model, [Rows().take(batch, [0, 1, 2]), Rows().take(batch, [3, 4])], ridge), whole)
    close(fitted(model, [padded(batch, 4, left=False)], ridge), whole)
    if name == "llama":  # whose positions only count relatively
        close(fitted(model, [padded(batch, 3, left=True)], ridge), whole)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("ridge", [None, 0.1])
def test_one_example_only(name: str, ridge: float | None) -> None:
    model, example, _ = made(name)
    one = Rows().take(example, [0])
    weights = fitted(model, [one], ridge)
    assert min(weights.ridges.values()) < float("inf")  # its tokens are both folds
    assert all(f.after <= f.before + 1e-9 for f in weights.facts.values())
    close(fitted(model, [padded(one, 3, left=False)], ridge), weights)


def test_a_decoder_and_its_encoder_have_padding_of_their_own() -> None:
    """As long as each other, so that the shapes do not tell."""
    model, _, layers = made("t5")
    batch = text(3, 6, decoder=6)
    batch["decoder_attention_mask"] = torch.ones(3, 6, dtype=torch.long)
    batch["decoder_attention_mask"][0, 3:] = 0
    labelled = {k: v for k, v in batch.items() if not k.startswith("decoder")}
    labelled["labels"] = torch.randint(3, 90, (3, 6), generator=torch.Generator().manual_seed(4))
    labelled["labels"][1, 2:] = -100
    for given_, mask in (
        (batch, batch["decoder_attention_mask"].bool()),
        (labelled, labelled["labels"] != -100),
        ({k: v for k, v in batch.items() if k != "decoder_attention_mask"}, torch.ones(3, 6, dtype=torch.bool)),
    ):
        refit = Refit(model, layers, [given_], ridge=0.1, values=False)
        drop = some(layers)
        weights = refit.fitted(drop)
        inputs = seen(model, [p.name for p in refit.places], given_)
        for place in refit.places[1:]:
            chosen = batch["attention_mask"].bool() if place.layers[0].kind == "encoder" else mask
            (x, y), (w,) = inputs[place.name][0], refit.runner.sensitivity(0)[place.name]
            kept = place.kept(drop)
            new, _ = brute(
                x[chosen][:, kept], y[chosen], w[chosen], place.weight[kept], place.bias, 0.1, place.has_bias
            )
            torch.testing.assert_close(weights.by_module[place.name][0][kept], new, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_applied_restores_to_the_bit(name: str) -> None:
    model, example = MODELS[name]()
    layers = hp.find_attention(model, example)
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 2 == 0)
    required = {n: p.requires_grad for n, p in model.named_parameters()}
    pointers = {n: id(p) for n, p in model.named_parameters()}
    model.train()
    before, modes = state(model), [m.training for m in model.modules()]
    refit = Refit(model, layers, [batch_of(example)])
    drop = some(layers) or {layers[0].name: [1]}
    weights = refit.fitted(drop, sweeps=1)

    def check() -> None:
        assert same(model, before)
        assert {n: p.requires_grad for n, p in model.named_parameters()} == required
        assert {n: id(p) for n, p in model.named_parameters()} == pointers
        assert [m.training for m in model.modules()] == modes
        assert all(p.grad is None for p in model.parameters())
        assert hooks(model) == 0
        assert added_biases(model) == []

    check()
    with refit.applied(weights):
        assert not same(model, before)
        added = set(dict(model.named_parameters())) - set(required)
        assert added == {f"{n}.bias" for n in refit.added if n in weights.by_module}
        for key in added:
            own = model.get_parameter(key.replace("bias", "weight"))
            assert model.get_parameter(key).requires_grad == own.requires_grad
    check()
    with pytest.raises(KeyboardInterrupt), refit.applied(weights):
        raise KeyboardInterrupt
    check()
    with torch.inference_mode(), refit.applied(weights):
        pass
    check()


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "mha"])
def test_under_inference_mode(name: str) -> None:
    model, example = MODELS[name]()
    layers = hp.find_attention(model, example)
    expected = Refit(model, layers, [batch_of(example)]).fitted(some(layers))
    with torch.inference_mode():
        made_here = (
            {k: v.clone() for k, v in example.items()}
            if isinstance(example, dict)
            else tuple(t.clone() for t in example)
        )
        refit = Refit(model, layers, [batch_of(made_here)])
        weights = refit.fitted(some(layers))
        refit.apply(weights)
    close(weights, expected)
    assert not any(p.is_inference() for p in model.parameters())
    assert all(bool(t.isfinite().all()) for t in answers(call(model, example)))


PRUNED = {
    "bert": ({"L0": [1], "L2": [0, 1, 2, 3]}, zoo.bert),  # a stub
    "llama": ({"L0": [0, 1], "L1": [0, 1, 2, 3, 4, 5], "L2": [0, 3, 5]}, zoo.llama),  # a ghost; a head of every group
    "gpt2": ({"L0": [0], "L1": [0, 1, 2, 3]}, zoo.gpt2),
    "t5": ({"L0": [1], "L3": [0, 2], "L2": [0, 1, 2, 3]}, zoo.t5),
    "xlnet": ({"L0": [2], "L1": [1, 3]}, xlnet),
}


@pytest.mark.parametrize("name", PRUNED)
def test_repaired_pruned_saved_loaded_and_again(name: str, tmp_path: Path, processes: Processes) -> None:
    drop, make = PRUNED[name]
    model, example = make()
    layers = hp.find_attention(model, example)
    refit = Refit(model, layers, [example])  # three examples: `repair` would leave it out
    weights = refit.fitted(check_heads(drop, layers))
    refit.apply(weights)
    done = refit.report(weights)
    assert bool(done.biases) == (name in ("llama", "t5"))
    assert added_biases(model) == list(done.biases)
    for _ in range(2):
        with torch.no_grad():
            with hp.mask(model, drop, layers=layers):
                masked = model(**example).logits
            hp.prune(model, drop, example, layers=layers)
            torch.testing.assert_close(model(**example).logits, masked, rtol=1e-3, atol=1e-3)
            loaded = hp.load(hp.save(model, tmp_path / "m", overwrite=True))
            torch.testing.assert_close(loaded(**example).logits, model(**example).logits, rtol=1e-6, atol=1e-6)
        layers = hp.find_attention(model, example)
        left = next(a for a in layers if a.num_heads > 1 and len(a.units) > 1)
        drop = {left.name: list(left.units[0])}
        repair(model, drop, [example], layers=layers, sweeps=1)
    torch.save((example, model(**example).logits.detach()), tmp_path / "expected.pt")
    hp.save(model, tmp_path / "m", overwrite=True)  # repaired, not yet pruned again
    if name == "llama":
        code = (
            "import torch, headprune as hp\n"
            "x, y = torch.load('expected.pt')\n"
            "with torch.no_grad(): assert torch.allclose(hp.load('m')(**x).logits, y, atol=1e-5)"
        )
        (done,) = processes.run({"cwd": str(tmp_path), "arguments": [], "code": code})
        assert done["status"] == 0, done["stderr"]
    else:
        with torch.no_grad():
            torch.testing.assert_close(hp.load(tmp_path / "m")(**example).logits, model(**example).logits)


def test_only_repaired_models_reload_too(tmp_path: Path) -> None:
    model, example = zoo.llama()
    layers = hp.find_attention(model, example)
    repair(model, {"L0": [0, 1]}, [example], layers=layers)
    with torch.no_grad():
        loaded = hp.load(hp.save(model, tmp_path / "m"))
        torch.testing.assert_close(loaded(**example).logits, model(**example).logits)


def test_shared_weights_are_left_alone() -> None:
    x = noise(4, 6, WIDTH)

    class Torch(nn.Module):
        """Two attention modules of PyTorch's own with the same output weight, which stand-ins hide."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in "ab")
            self.second.out_proj.weight = self.first.out_proj.weight

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(x, x, x)[0]
            return x + self.second(x, x, x)[0]

    for model in (randomise(Pair()), randomise(Torch())):
        before = state(model)
        done = repair(model, {"first": [1]}, [x], layers=hp.find_attention(model, x))
        assert same(model, before)
        assert len(done.notes) == 2
        assert "shares them with another module" in done.notes[0]


class Scaled(nn.Module):
    """As an adapter's wrapper: it has a weight, which is not all that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.base(x)


class Adapted(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.o = Scaled()


class Bare(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


@pytest.mark.parametrize("kind", [Adapted, Bare])
def test_what_is_no_linear_output_projection_is_left_alone(kind: type[Attention]) -> None:
    model, x = model_of(kind), noise(4, 6, WIDTH)
    layers = hp.find_attention(model, x)
    before = state(model)
    refit = Refit(model, layers, [x])
    assert not refit.fitted({layers[0].name: [1]}).by_module.keys() - {"0.o.base"}
    assert same(model, before)
    if not refit.places:
        assert "keeps its old weights" in refit.notes[0]


def test_parametrised_weights_are_left_alone() -> None:
    model, x = model_of(Attention), noise(4, 6, WIDTH)
    layers = hp.find_attention(model, x)
    nn.utils.parametrizations.weight_norm(model[0].o)
    refit = Refit(model, layers, [x])
    assert [p.name for p in refit.places] == ["2.o"]
    assert "no plain linear layer" in refit.notes[0]


def test_weights_not_in_memory_are_left_alone() -> None:
    model, example = zoo.bert()
    layers = hp.find_attention(model, example)
    refit = Refit(model.to("meta"), layers, [example])
    assert refit.places == []
    assert len(refit.notes) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(dtype: torch.dtype) -> None:
    model, example = zoo.llama()
    wide = {k: v[0] for k, v in fitted(model, [example], 0.1).by_module.items()}
    model = model.to(dtype)
    layers = hp.find_attention(model, example)
    before = state(model)
    refit = Refit(model, layers, [batch_of(example)], ridge=0.1)
    weights = refit.fitted(some(layers), sweeps=0)
    for name, (weight, _) in weights.by_module.items():
        assert (weight - wide[name]).abs().max() < 0.2 * wide[name].abs().max()
    with refit.applied(weights):
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model(**example).logits.isfinite().all()
    assert same(model, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_told(value: float) -> None:
    model, example = zoo.bert()
    layers = hp.find_attention(model, example)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.value.bias[3] = value
    with pytest.raises(hp.HeadPruneError, match=f"^Layer {layers[1].name} .*not finite"):
        repair(model, {"L1": [1]}, [example], layers=layers)
    assert hooks(model) == 0


def test_answers_that_are_ruled_out() -> None:
    """Some models give a logit of minus infinity to what must not be answered."""
    model, example = zoo.gpt2()

    class Ruled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **given: Any) -> Any:
            out = self.model(**given)
            out.logits = out.logits.index_fill(-1, torch.tensor([1, 5]), float("-inf"))
            return out

    ruled = Ruled().eval()
    layers = hp.find_attention(ruled, example)
    done = repair(ruled, {"L0": [1]}, [example, example], layers=layers)
    assert all(math.isfinite(t.before) and math.isfinite(t.after) for t in done.trials)
    assert done.trials


def test_too_few_tokens_for_two_folds() -> None:
    model, example = zoo.bert()
    layers = hp.find_attention(model, example)
    one = {k: v[:1, :1] for k, v in example.items()}
    two = {k: v[:2, :1] for k, v in example.items()}
    for batch in (one, two):
        refit = Refit(model, layers, [batch])
        weights = refit.fitted({"" + layers[0].name: [0], layers[1].name: [0, 1, 2, 3]})
        if batch is one:  # nothing is held out, so nothing says that other weights are better
            assert set(weights.ridges.values()) == {float("inf")}
        for weight, bias in weights.by_module.values():
            assert weight.isfinite().all()
            assert bias is not None
            assert bias.isfinite().all()


def test_no_examples() -> None:
    model, example = zoo.bert()
    layers = hp.find_attention(model, example)
    for batches in ([], [{k: v[:0] for k, v in example.items()}]):
        with pytest.raises(hp.HeadPruneError, match="no examples"):
            Refit(model, layers, batches)
    with pytest.raises(hp.HeadPruneError, match="no head 9"):
        repair(model, {"L0": [9]}, [example], layers=layers)


def test_a_layer_that_does_not_matter() -> None:
    """Its slopes are zero, so there is nothing to fit it to."""
    model, batches = small()
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.output.dense.weight.zero_()
        model.classifier.weight.zero_()
    layers = hp.find_attention(model, batches[0])
    weights = Refit(model, layers, batches).fitted(some(layers))
    assert weights.by_module == {}


def test_tokens_before_the_batch() -> None:
    """PyTorch's order: the stand-in and the hooks see the batch first all the same."""
    model = randomise(TorchEncoder(batch_first=False)).double()
    x = torch.randn(5, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padding = torch.zeros(5, 5, dtype=torch.bool)
    layers = hp.find_attention(model, (x, padding))
    refit = Refit(model, layers, [((x, padding), x)])
    assert len(refit.batches) == 1
    other = Refit(model, layers, [((x[i : i + 1], padding[i : i + 1]), x[i : i + 1]) for i in range(5)])
    close(other.fitted(some(layers)), refit.fitted(some(layers)))


def test_weights_applied_within_others_leave_these() -> None:
    model, batches = small(heads=4, layers=2)
    layers = hp.find_attention(model, batches[0])
    refit = Refit(model, layers, batches)
    first, second = refit.fitted({layers[0].name: [1]}), refit.fitted({layers[0].name: [0], layers[1].name: [2]})
    before = state(model)
    with refit.applied(second):
        alone = state(model)
    with refit.applied(first):
        outer = state(model)
        with refit.applied(second):
            assert same(model, alone)
        assert same(model, outer)
        with refit.applied(Weights()):
            assert same(model, before)
        assert same(model, outer)
    assert same(model, before)
