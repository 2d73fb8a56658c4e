"""What repair leaves alone or refuses, and what it says then."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune.repairing import repair
from tests.support import zoo
from tests.support.checks import hooks, same, state
from tests.support.families import built
from tests.support.plain import WIDTH, Attention, Pair, model_of, noise
from tests.support.problems import small
from tests.support.repairs import batch_of, close, fitted, refit_of, some
from tests.support.zoo import TorchEncoder, randomise


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
    refit = refit_of(model, layers, [x])
    assert not refit.fitted({layers[0].name: [1]}).by_module.keys() - {"0.o.base"}
    assert same(model, before)
    if not refit.reference.projections:
        assert "keeps its old weights" in refit.reference.notes[0]


def test_parametrised_weights_are_left_alone() -> None:
    model, x = model_of(Attention), noise(4, 6, WIDTH)
    layers = hp.find_attention(model, x)
    nn.utils.parametrizations.weight_norm(model[0].o)
    refit = refit_of(model, layers, [x])
    assert [p.name for p in refit.reference.projections] == ["2.o"]
    assert "no plain linear layer" in refit.reference.notes[0]


def test_weights_not_in_memory_are_left_alone() -> None:
    model, example = zoo.bert()
    layers = hp.find_attention(model, example)
    refit = refit_of(model.to("meta"), layers, [example])
    assert refit.reference.projections == []
    assert len(refit.reference.notes) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(dtype: torch.dtype) -> None:
    model, example = zoo.llama()
    wide = {k: v[0] for k, v in fitted(model, [example], 0.1).by_module.items()}
    model = model.to(dtype)
    layers = hp.find_attention(model, example)
    before = state(model)
    refit = refit_of(model, layers, [batch_of(example)], ridge=0.1)
    weights = refit.fitted(some(layers))
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
        refit = refit_of(model, layers, [batch])
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
            refit_of(model, layers, batches)
    with pytest.raises(hp.HeadPruneError, match="no head 9"):
        repair(model, {"L0": [9]}, [example], layers=layers)


def test_a_layer_that_does_not_matter() -> None:
    """Its slopes are zero, so there is nothing to fit it to."""
    model, batches = small()
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.output.dense.weight.zero_()
        model.classifier.weight.zero_()
    layers = hp.find_attention(model, batches[0])
    weights = refit_of(model, layers, batches).fitted(some(layers))
    assert weights.by_module == {}


def test_tokens_before_the_batch() -> None:
    """PyTorch's order: the stand-in and the hooks see the batch first all the same."""
    model = randomise(TorchEncoder(batch_first=False)).double()
    x = torch.randn(5, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padding = torch.zeros(5, 5, dtype=torch.bool)
    layers = hp.find_attention(model, (x, padding))
    refit = refit_of(model, layers, [((x, padding), x)])
    assert len(refit.reference.runner.batches) == 1
    other = refit_of(model, layers, [((x[i : i + 1], padding[i : i + 1]), x[i : i + 1]) for i in range(5)])
    close(other.fitted(some(layers)), refit.fitted(some(layers)))


def test_examples_packed_into_one_tensor_are_refused_in_a_line_or_compared() -> None:
    model, example = built("glm4v_vision")  # [patches of all images, features], and the images' sizes
    layers = hp.find_attention(model, example)
    with pytest.raises(hp.HeadPruneError, match="does not run on some of a batch's examples"):
        hp.repair(model, {layers[0].name: [0]}, [example], layers=layers)
    one = {name: value[: len(value) // 2] for name, value in example.items()}
    generator = torch.Generator().manual_seed(0)
    several = [
        ({**one, "hidden_states": torch.randn(16, one["hidden_states"].shape[1], generator=generator)}, torch.zeros(1))
        for _ in range(4)
    ]
    done = hp.repair(model, {layers[0].name: [0]}, several, layers=layers)
    assert all(trial.before > 0 for trial in done.trials)


def test_answers_whose_length_the_model_decides_are_compared_where_they_can_be() -> None:
    model, example = built("fastspeech2_conformer")
    layers = hp.find_attention(model, example)
    batches = [{**example, "input_ids": example["input_ids"].roll(i, 1)} for i in range(3)]
    done = hp.repair(model, {a.name: [0] for a in layers}, batches, layers=layers)
    assert all(math.isfinite(trial.after) and trial.before > 0 for trial in done.trials)
