"""What repair leaves alone or refuses, and what it says then; conditions that models come in."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from tests.support import brute
from tests.support.checks import hooks, same, state
from tests.support.errors import refuses
from tests.support.plain import WIDTH, Attention, Bare, Pair, noise
from tests.support.plain import model_of as plain_of
from tests.support.problems import small
from tests.support.zoo import randomise


class Scaled(nn.Module):
    """As an adapter's wrapper: it has a weight, which is not all that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.base(x)  # type: ignore[no-any-return]


class Adapted(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.o = Scaled()  # type: ignore[assignment]


class SharedOutput(nn.Module):
    """Two attention modules of PyTorch's own with the same output weight, which stand-ins hide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in "ab")
        self.second.out_proj.weight = self.first.out_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x)[0]
        return x + self.second(x, x, x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "notes", "why"), [
    (Pair, 2, "shares them with another module"), (SharedOutput, 2, "shares them with another module"),
    (Adapted, 0, ""), (Bare, 1, "it has no output projection"), (Attention, 1, "no plain linear layer"),
])  # fmt: skip
def test_weights_that_are_not_w_o_s_alone_stay(kind: Any, notes: int, why: str) -> None:
    """Shared ones, an adapter's wrapper (what it wraps is refitted), none, and parametrised ones."""
    model, x = randomise(kind()) if kind in (Pair, SharedOutput) else plain_of(kind), noise(4, 6, WIDTH)
    layers = hp.find_attention(model, x)
    if kind is Attention:
        nn.utils.parametrizations.weight_norm(model[0].o)  # type: ignore[index, arg-type]
    before, given = state(model), {"choose": [brute.repeated(x)], "layers": layers, "ridge": 0.1, "values": False}
    done = hp.repair(model, {layers[0].name: [1]}, [x], **given)  # type: ignore[arg-type]
    told = [note for note in done.notes if "keeps its old weights" in note]
    assert len(told) == notes
    assert all(why in note for note in told)
    changed = {n for n, p in model.state_dict().items() if not torch.equal(p, before[n])}
    assert changed == ({"0.o.base.weight", "0.o.base.bias"} if kind is Adapted else set())


def test_weights_not_in_memory_are_left_alone() -> None:
    model, example = brute.model_of("bert")
    layers = hp.find_attention(model, example)
    done = hp.repair(model.to("meta"), {"L1": [1]}, [example], layers=layers)
    assert (done.layers, len(done.notes)) == ({}, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_told(value: float) -> None:
    model, example = brute.model_of("bert")
    layers = hp.find_attention(model, example)
    model.bert.encoder.layer[1].attention.self.value.bias.data[3] = value  # type: ignore[union-attr, index]
    refuses(f"^Layer {layers[1].name} .*not finite", hp.repair, model, {"L1": [1]}, [example], layers=layers)
    assert hooks(model) == 0


def test_a_layer_that_does_not_matter_has_nothing_to_be_fitted_to() -> None:
    model, batches = small()
    model.classifier.weight.data.zero_()  # type: ignore[union-attr, operator]
    _, done = brute.repaired(model, {"L0": [1], "L1": [0]}, *batches)
    assert (done.layers, done.trials) == ({}, ())


class Packed(Attention):
    """Tokens of all examples behind one another, and how many each has."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        return self.o(self.attend(x[None], attn_mask=owner[:, None] == owner))[0]  # type: ignore[no-any-return]


def test_examples_packed_into_one_tensor_are_refused_in_a_line_or_compared() -> None:
    model = randomise(Packed())
    packed = {"x": noise(12, WIDTH), "lengths": torch.tensor([3, 5, 4])}
    layers = hp.find_attention(model, packed)
    refuses("examples", hp.repair, model, {"L0": [0]}, [packed], layers=layers)
    several = [({"x": noise(12, WIDTH) + i, "lengths": torch.tensor([12])}, torch.zeros(1)) for i in range(4)]
    done = hp.repair(model, {"L0": [0]}, several, layers=layers)
    assert all(trial.before > 0 for trial in done.trials)
    assert done.trials


class Spoken(Attention):
    """The model decides how long its answer is, as of speech."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return {"frames": out[:, : 1 + int(out.abs().sum() * 10) % 5], "mean": out.mean(1)}


def test_answers_whose_length_the_model_decides_are_compared_where_they_can_be() -> None:
    model = randomise(Spoken())
    _, done = brute.repaired(model, {"L0": [0]}, *noise(5, 6, WIDTH).split(1), choose=None, values=False)  # type: ignore[no-untyped-call]
    assert all(math.isfinite(trial.after) and trial.before > 0 for trial in done.trials)
    assert done.trials


# -- conditions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [
    ("llama", torch.bfloat16), ("llama", torch.float16), ("mha", torch.float16), ("classifier", torch.bfloat16),
])  # fmt: skip
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """All steps; the weights are about those of double precision."""
    model, example = brute.classifier(3) if name == "classifier" else brute.model_of(name)
    batches = example if name == "classifier" else [example]
    drop = brute.some_heads(hp.find_attention(model, batches[0]))
    wide, _ = brute.repaired(model, drop, *batches, ridge=0.1, choose=[brute.batch_of(brute.repeated(batches[0]))])
    if name == "mha":
        batches = [tuple(t.to(dtype) if t.is_floating_point() else t for t in example)]
    for ridge in (0.1, None):
        mended, done = brute.repaired(model.to(dtype), drop, *batches, ridge=ridge)
        assert done.trials[0].kept or ridge is None
        assert {p.dtype for p in mended.parameters()} == {dtype}
        assert all(p.isfinite().all() for p in mended.parameters())
        for key, p in mended.named_parameters() if ridge else ():
            assert (p - wide.get_parameter(key)).abs().max() < 0.2 * max(1.0, float(p.abs().max()))


@pytest.mark.parametrize("name", ["bert", "llama", "xlnet"])
def test_a_repair_that_is_interrupted_leaves_the_model_to_the_bit(name: str) -> None:
    """Whenever it is: while it measures, and while new weights are tried. And one that ends changes nothing but weights."""
    model, example = brute.model_of(name)
    layers, batch = hp.find_attention(model, example), brute.batch_of(example)
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 2 == 0)
    model.train()
    before, pointers = state(model), {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}
    modes, passes = [m.training for m in model.modules()], list[int]()

    def count(module: nn.Module, *args: Any) -> None:
        passes.append(1)
        if len(passes) == last[0]:
            raise KeyboardInterrupt

    last = [-1]
    given: dict[str, Any] = {"choose": [brute.batch_of(brute.repeated(example))], "layers": layers}
    handle = model.register_forward_pre_hook(count)
    hp.repair(copy.deepcopy(model), brute.some_heads(layers), [batch], **given)
    every = len(passes)
    for stop in (*range(2, every, every // 4), every):
        passes[:], last[0] = [], stop
        with pytest.raises(KeyboardInterrupt):
            hp.repair(model, brute.some_heads(layers), [batch], **given)
        assert same(model, before)
        assert hooks(model) == 1
    handle.remove()
    done = hp.repair(model, brute.some_heads(layers), [batch], **given)
    assert not same(model, before)
    now = {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}
    assert now.items() >= pointers.items()
    for key in now.keys() - pointers.keys():
        assert key.removesuffix(".bias") in done.biases
        assert now[key][1] == now[key.replace("bias", "weight")][1]
    assert [m.training for m in model.modules()] == modes
    assert hooks(model) == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("name", "drop"), [
    ("t5", {"L0": [1], "L3": [0, 2], "L2": [0, 1, 2, 3]}),
    ("llama", {"L0": [0, 1], "L1": [0, 1, 2, 3, 4, 5], "L2": [0, 3, 5]}), ("xlnet", {"L0": [2], "L1": [1, 3]}),
])  # fmt: skip
@torch.no_grad()
def test_repaired_pruned_saved_loaded_and_again(name: str, drop: Any, tmp_path: Path) -> None:
    """It answers as it will when it is pruned: a stub, a ghost, a head of every group."""
    model, example = brute.model_of(name)
    model = model.float()
    for _ in range(2):
        done = hp.repair(model, drop, [example], choose=[brute.repeated(example)], ridge=0.3)
        assert done.trials[0].kept
        whole = model(**example).logits
        hp.prune(model, drop, example)
        torch.testing.assert_close(model(**example).logits, whole, rtol=1e-3, atol=1e-3)
        loaded = hp.load(hp.save(model, tmp_path / "m", overwrite=True))
        torch.testing.assert_close(loaded(**example).logits, model(**example).logits, rtol=1e-6, atol=1e-6)
        left = next(a for a in hp.find_attention(model, example) if a.num_heads > 1 and len(a.units) > 1)
        drop = {left.name: list(left.units[0])}
