"""Repaired weights: put in and taken out to the bit, saved, loaded, and under inference mode."""

from pathlib import Path

import pytest
import torch

import headprune as hp
from headprune.attention import check_heads
from headprune.inputs import call
from headprune.pruned import added_biases
from headprune.repairing import Weights, repair
from headprune.surgery import answers
from tests.support import zoo
from tests.support.checks import hooks, same, state
from tests.support.interrupted import Processes
from tests.support.problems import small
from tests.support.repairs import MODELS, batch_of, close, refit_of, some, xlnet


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
    refit = refit_of(model, layers, [batch_of(example)])
    drop = some(layers) or {layers[0].name: [1]}
    weights = refit.fitted(drop)

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
        assert added == {f"{n}.bias" for n in refit.reference.weights.new_biases if n in weights.by_module}
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
    expected = refit_of(model, layers, [batch_of(example)]).fitted(some(layers))
    with torch.inference_mode():
        made_here = (
            {k: v.clone() for k, v in example.items()}
            if isinstance(example, dict)
            else tuple(t.clone() for t in example)
        )
        refit = refit_of(model, layers, [batch_of(made_here)])
        weights = refit.fitted(some(layers))
        refit.reference.weights.write(weights.by_module)
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
    refit = refit_of(model, layers, [example])  # three examples: `repair` would leave it out
    weights = refit.fitted(check_heads(drop, layers))
    refit.reference.weights.write(weights.by_module)
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
        repair(model, drop, [example], layers=layers)
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


def test_weights_applied_within_others_leave_these() -> None:
    model, batches = small(heads=4, layers=2)
    layers = hp.find_attention(model, batches[0])
    refit = refit_of(model, layers, batches)
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
