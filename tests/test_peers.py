"""benchmarks/peers_layerwise.py: each method against a computation of its own, with numpy, on stacked rows of W_O's inputs."""

from itertools import combinations

import numpy as np
import peers_layerwise as peers
import pytest
import torch
from baselines import METHODS, Baseline, applied

import headprune as hp
from tests.support import brute
from tests.support.problems import small

HEADS, WIDTH = 4, 8
NAMES = ("Wanda-sp", "FLAP + GRAIL", "FLAP + GRAIL, no bias", "Wanda-sp + GRAIL", "Michel + GRAIL", "OSSCAR")


def bert():
    model, batches = small(HEADS)
    return model, batches, hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})


def inputs(model, batches, block):
    """Each example's rows of W_O's input, ``[tokens, features]``."""
    output, found = model.bert.encoder.layer[block].attention.output.dense, []
    handle = output.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    handle.remove()
    real = [m.bool() for batch in batches for m in batch["attention_mask"]]
    return [row[m].numpy() for row, m in zip([r for x in found for r in x], real, strict=True)]


def columns(heads):
    return [c for h in heads for c in range(WIDTH * h, WIDTH * h + WIDTH)]


def dense(model, block):
    output = model.bert.encoder.layer[block].attention.output.dense
    return output.weight.detach().numpy(), output.bias.detach().numpy()


def ridged(rows, goal, strength, pull):
    """Least squares with a row ``sqrt(strength)`` for every unknown, which pulls it to ``pull``."""
    big = np.concatenate([rows, np.sqrt(strength) * np.eye(rows.shape[1])])
    return np.linalg.lstsq(big, np.concatenate([goal, np.sqrt(strength) * pull]), rcond=None)[0].T


def least_error(rows, weight, kept, damping):
    """OSSCAR's weights for some columns, and their error."""
    new = np.zeros_like(weight)
    new[:, kept] = ridged(rows[:, kept], rows @ weight.T, damping, weight.T[kept])
    return new[:, kept], ((rows @ (weight - new).T) ** 2).sum() + damping * ((weight - new) ** 2).sum()


def test_flap_is_that_of_the_definition():
    model, batches, layers = bert()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3)).tolist()
    scores, means = [], []
    for block in (0, 1):
        examples = inputs(model, batches, block)
        mean = moved = np.zeros(HEADS * WIDTH)
        for n, i in enumerate(order):  # as their class does it, example after example
            mean = (mean * n + examples[i].mean(0)) / (n + 1)
            if n:
                moved = moved * (n - 1) / n + ((examples[i] - mean) ** 2).sum(0) / (n + 1)
        channels = (moved * (dense(model, block)[0] ** 2).sum(0)) ** 2
        scores += list(((channels - channels.mean()) / channels.std(ddof=1)).reshape(HEADS, WIDTH).mean(1))
        means.append(mean)
    found, refitted = (METHODS[name](model, batches, layers, 3, 3) for name in ("FLAP", "FLAP + GRAIL"))
    gone = {(b, h) for b, layer in enumerate(layers) for h in found.drop.get(layer.name, [])}
    assert gone == {divmod(i, HEADS) for i in np.argsort(scores)[:5].tolist()}
    assert refitted.drop == found.drop
    for block, layer in enumerate(layers):
        weight, bias = dense(model, block)
        own = columns(h for b, h in gone if b == block)
        for outputs in (found.outputs, refitted.outputs):
            expected = bias + weight[:, own] @ means[block][own]
            np.testing.assert_allclose(outputs[layer.output_projection.module][1], expected, atol=1e-12)


@pytest.mark.parametrize("keep", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_layers_are_chosen_and_refitted_one_after_another(name, keep):
    model, batches, layers = bert()
    found, before, passed = METHODS[name](model, batches, layers, keep, 0), Baseline({}), set()
    for block, layer in enumerate(layers):
        with applied(model, layers, before):
            rows = np.concatenate(inputs(model, batches, block))
        weight, output = dense(model, block)[0], layer.output_projection.module
        passed |= {layer.name, output}
        kept = tuple(h for h in range(HEADS) if h not in found.drop.get(layer.name, []))
        own, power = columns(kept), (rows**2).sum(0)
        goal, damping, expected = rows @ weight.T, 0.01 * power.mean(), weight[:, own]
        if "FLAP" not in name and "Michel" not in name:
            assert len(kept) == keep // 2 + (block < keep % 2)
        if "Wanda" in name:
            scores = (np.abs(weight).mean(0) * np.sqrt(power)).reshape(HEADS, WIDTH).sum(1)
            assert set(kept) == set(np.argsort(scores)[HEADS - len(kept) :])
        if "GRAIL" in name and kept:
            expected = ridged(rows[:, own], goal, 1e-3 * (power[own].mean() + 1e-3), 0 * expected.T)
        if name == "OSSCAR":
            others = [columns(x) for x in combinations(range(HEADS), len(kept))]
            expected, error = least_error(rows, weight, own, damping)
            assert error == pytest.approx(min(least_error(rows, weight, x, damping)[1] for x in others))
        new = np.array(found.outputs.get(output, [weight])[0])
        np.testing.assert_allclose(new[:, own], expected, rtol=1e-3, atol=1e-4)
        drop, outputs = ({k: v for k, v in x.items() if k in passed} for x in (found.drop, found.outputs))
        before = Baseline(drop, outputs=outputs)


def test_swaps_never_cost_more_than_rounds_alone(monkeypatch):
    draws, blocks, saved = np.random.default_rng(0), [[2 * u, 2 * u + 1] for u in range(10)], []
    for keep in [*range(1, 10)] * 3:
        weight, rows = draws.normal(size=(6, 20)), draws.normal(size=(50, 20)) @ draws.normal(size=(20, 20))
        args = (torch.tensor(weight), torch.tensor(rows.T @ rows), blocks, keep)
        chosen = [peers.search(*args)]
        with monkeypatch.context() as m:
            m.setattr(peers, "TRIES", 0)
            chosen.append(peers.search(*args))
        damping = 0.01 * (rows**2).sum(0).mean()
        found, alone = (least_error(rows, weight, [c for u in x for c in blocks[u]], damping)[1] for x in chosen)
        saved.append(alone - found)
    assert min(saved) > -1e-6
    assert max(saved) > 1


def test_a_layer_that_runs_three_times_is_watched_each_time():
    model, batch = brute.model_of("albert")
    layers, expected, found = hp.find_attention(model, batch), [], []
    output = model.get_submodule(layers[0].output_projection.module)
    handle = output.register_forward_pre_hook(lambda _, args: expected.extend(args[0]))
    with torch.no_grad():
        for _ in range(2):
            model(**batch)
    handle.remove()
    peers.watch(model, [batch] * 2, layers, lambda layer, rows: found.extend(rows))
    assert len(found) == 2 * 3 * 6
    mask = batch["attention_mask"].bool()
    for row, whole, real in zip(found, expected, [*mask] * 6, strict=True):
        torch.testing.assert_close(row, whole[real])
