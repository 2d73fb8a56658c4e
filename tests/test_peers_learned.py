"""benchmarks/peers_learned.py: newer public methods against their definitions."""

import numpy as np
import peers_learned
import pytest
import torch
from baselines import METHODS, Baseline, applied, least
from torch import Tensor, nn

import headprune as hp
from tests.support import brute
from tests.support.problems import small


def bert(heads: int = 3) -> tuple[nn.Module, list[dict[str, Tensor]], list[hp.AttentionLayer]]:
    model, batches = small(heads)
    return model, batches, hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})


def seen(model: nn.Module, batches: list[dict[str, Tensor]], module: nn.Module, output: bool = False) -> np.ndarray:
    """What enters or leaves a module: ``[tokens, features]`` without padding."""
    rows = []

    def hook(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        rows.append(out if output else args[0])

    handle = module.register_forward_hook(hook)
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    handle.remove()
    return torch.cat([r[b["attention_mask"].bool()] for r, b in zip(rows, batches, strict=True)]).numpy()


def test_k_prune_solves_for_the_dense_residual_stream():
    """Layer by layer in numpy, in copies with other weights: W_O's output plus the residual, as before the norm behind it."""
    model, batches, layers = bert()
    dense, _, _ = bert()
    found = METHODS["K-prune"](model, batches, layers, 3, 0)
    assert set(found.outputs) == {a.output_projection.module for a in layers if len(found.drop.get(a.name, ())) < 3}
    for mine, theirs, layer in zip(model.bert.encoder.layer, dense.bert.encoder.layer, layers, strict=True):
        own, other = mine.attention.output, theirs.attention.output
        kept = [
            c for h in range(3) if h not in found.drop.get(layer.name, ()) for c in layer.output_projection.features[h]
        ]
        goal = (
            seen(dense, batches, theirs) + seen(dense, batches, other.dense, output=True) - seen(model, batches, mine)
        )
        heads = seen(model, batches, own.dense)[:, kept]
        solved = np.linalg.lstsq(heads, goal - own.dense.bias.detach().numpy(), rcond=None)[0].T
        with torch.no_grad():
            own.dense.weight.zero_()
            own.dense.weight[:, kept] = torch.from_numpy(solved)
        if kept:
            weight = found.outputs[layer.output_projection.module][0]
            np.testing.assert_allclose(heads @ weight[:, kept].numpy().T, heads @ solved.T, atol=1e-5)


@pytest.mark.parametrize("name", ["Learned masks, DDP", "Learned masks, GRASPrune"])
def test_learned_masks_beat_random_ones(name, monkeypatch):
    monkeypatch.setattr(peers_learned, "STEPS", 160)
    model, batches, layers = bert(6)
    dense = [brute.logits(model, batch) for batch in batches]

    def distance(baseline: Baseline) -> float:
        with applied(model, layers, baseline):
            return sum(brute.kl(known, brute.logits(model, batch)) for known, batch in zip(dense, batches, strict=True))

    learned = distance(METHODS[name](model, batches, layers, 5, 0))
    scores = [torch.rand(12, generator=torch.Generator().manual_seed(seed)) for seed in range(30)]
    others = sorted(distance(Baseline(least(layers, s, 5))) for s in scores)
    assert learned < others[3], (learned, others)


def test_similarity_is_that_of_the_output_without_the_head():
    model, batches, layers = bert()
    with torch.no_grad():
        block = peers_learned._stack(model, batches, layers)[0][1]
        _, spreads = peers_learned.moments(model, batches, block)
    whole = seen(model, batches, block.output, output=True)
    for gone in ([0], [1, 2]):
        with hp.mask(model, {layers[1].name: gone}):
            less = seen(model, batches, block.output, output=True)
        each = [abs(np.corrcoef(a, b)[0, 1]) for a, b in zip(whole.T, less.T, strict=True)]
        opened = torch.tensor([float(h not in gone) for h in range(3)])
        assert peers_learned.similarity(spreads, opened) == pytest.approx(np.mean(each), abs=1e-6)


def test_shares_never_exceed_the_room():
    shares, rooms = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([4, 4, 4])
    assert peers_learned.allotted(shares, rooms, 3).tolist() == [2, 1, 0]
    assert peers_learned.allotted(shares, rooms, 7).tolist() == [4, 2, 1]
    assert peers_learned.allotted(shares, rooms, 12).tolist() == [4, 4, 4]
