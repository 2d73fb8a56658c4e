"""Repair of output projections and values against brute force: the same regression on the stacked tokens, by another solver."""

import copy
import functools
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune import repairing
from headprune.attention import Heads
from headprune.divergence import Fidelity
from headprune.inputs import tensors
from headprune.repairing import (
    calibrate,
    checked_repair,
    directions,
    examples,
    fit_layers,
    gauss_newton,
    kronecker,
    mixtures,
    steps,
)
from headprune.repairing import layers as layer_steps
from headprune.repairing.coordinates import choose_coordinates
from headprune.repairing.examples import probe_of
from headprune.repairing.steps import ALL_FITTED, BLENDED, best_length, better, drop_columns, refit_answers
from tests.support import brute
from tests.support.checks import hooks, same, state
from tests.support.plain import WIDTH, Attention, noise
from tests.support.problems import small
from tests.support.zoo import randomise, sizes, text

ROWS = {"llama": 16}  # of fewer examples nothing can be learnt that serves others
MODELS = ("numbers", "labels", "bert", "gpt2", "llama", "vit", "t5", "mha", "torch_transformer", "albert")
GIVEN = ("bert", "t5", "tokens first")


def check_regression(model: nn.Module, example: Any, drop: Any, ridge: float | None) -> None:
    """W_O is what the regression gives, nothing else has changed, and the result says so."""
    layers = hp.find_attention(model, example)
    mended, done = brute.repaired(model, drop, example, ridge=ridge, values=False, mixtures=False, answers=False)
    assert [(t.step, t.kept) for t in done.trials] == [("output projections", True)]
    assert done.layers.keys() == drop.keys()
    tokens, changed = brute.tokens_of(model, layers, [example]), set()
    for layer in (a for a in layers if a.name in drop):
        assert layer.output_projection
        changed |= {f"{layer.output_projection.module}.{part}" for part in ("weight", "bias")}
        kept = brute.columns_of(layer, brute.kept_heads(layer, drop))
        gone = brute.columns_of(layer, drop[layer.name])
        (weight, bias), (found, found_bias) = brute.output_of(model, layer), brute.output_of(mended, layer)
        has_bias = found_bias is not None
        assert (layer.output_projection.module in done.biases) == (bias is None and has_bias)
        start = weight.new_zeros(weight.shape[1]) if bias is None else bias
        own = replace(tokens[layer.name], x=tokens[layer.name].x[:, kept])
        facts = done.layers[layer.name]
        assert facts.ridge == (brute.best_ridge(own, weight[kept], start, has_bias) if ridge is None else ridge)
        expected = brute.ridge_regression(own, weight[kept], start, facts.ridge, has_bias)
        torch.testing.assert_close(found[kept], expected[0], rtol=1e-6, atol=1e-7)
        assert found_bias is None or torch.allclose(found_bias, expected[1], rtol=1e-6, atol=1e-7)
        assert gone
        assert not found[gone].any()
        assert facts.before == pytest.approx(own.error(own.x @ weight[kept] + start), rel=1e-6)
        assert facts.after == pytest.approx(own.error(own.x @ expected[0] + expected[1]), rel=1e-6, abs=1e-9)
        assert facts.after <= facts.before
    before, now = state(model), state(mended)
    assert {name for name in now if name not in before or not torch.equal(now[name], before[name])} <= changed


@pytest.mark.parametrize(("name", "ridge"), [*((name, None) for name in MODELS), *((n, 1e-3) for n in GIVEN)])
def test_the_fit_is_the_regression(name: str, ridge: float | None) -> None:
    model, example = brute.model_of(name, ROWS.get(name, 6))
    check_regression(model, example, brute.some_heads(hp.find_attention(model, example)), ridge)


@pytest.mark.parametrize("given", ["mask", "labels"])
def test_a_decoder_and_its_encoder_have_padding_of_their_own(given: str) -> None:
    """As long as each other, so that the shapes do not tell."""
    model, example = brute.model_of("t5")[0], text(6, 6, decoder=6)
    real = torch.arange(6) < torch.tensor([3, 6, 6, 2, 6, 6])[:, None]
    if given == "mask":
        example["decoder_attention_mask"] = real.long()
    else:
        example["labels"] = example.pop("decoder_input_ids").masked_fill(~real, -100)
    check_regression(model, example, brute.some_heads(hp.find_attention(model, example)), 0.1)


@pytest.mark.parametrize(("drop", "name"), [({}, "bert"), ({"L0": []}, "llama")])
def test_nothing_removed_nothing_changed(drop: Any, name: str) -> None:
    model, example = brute.model_of(name)
    mended, done = brute.repaired(model, drop, example)
    assert same(mended, state(model))
    assert done == hp.Repair({}, 6, 0, 0, notes=done.notes)


# -- batches and padding --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ridge"), [
    ("bert", None), ("gpt2", 0.1), ("llama", 0.1), ("t5", 0.1), ("vit", None), ("mha", 0.1), ("xlnet", None),
    ("xlnet, square", 0.1), ("answering", None),
])  # fmt: skip
def test_batches_and_padding_do_not_matter(name: str, ridge: float | None) -> None:
    """All three steps; of cross-attention, the values' tokens are the encoder's."""
    model, example = brute.model_of(name)
    drop, choose = brute.some_heads(hp.find_attention(model, example)), [brute.batch_of(brute.repeated(example))]

    def weights(*batches: Any) -> tuple[nn.Module, hp.Repair]:
        return brute.repaired(model, drop, *batches, ridge=ridge, choose=choose)

    whole, done = weights(example)
    assert done.trials[0].kept
    others = [[brute.rows_of(example, i) for i in ([0], [1, 2], [3, 4, 5])]]
    if name in ("bert", "gpt2", "t5", "answering"):
        others.append([brute.padded(example, 4)])
    if name == "llama":  # whose positions only count relatively
        others.append([brute.padded(example, 3, left=True)])
    for batches in others:
        mended, other = weights(*batches)
        brute.alike(mended, whole, 1e-5)
        assert [t.kept for t in other.trials] == [t.kept for t in done.trials]
        assert {n: f.ridge for n, f in other.layers.items()} == {n: f.ridge for n, f in done.layers.items()}


# -- mixtures ------------------------------------------------------------------------------------------

LENGTHS = [12, 7, 9, 12, 4, 3, 12, 2, 10, 12, 11, 5, 6]


def texts(left: bool = False, seed: int = 0) -> dict[str, Tensor]:
    generator, places = torch.Generator().manual_seed(seed), torch.arange(12)
    lengths = torch.tensor(LENGTHS)[:, None]
    real = places >= 12 - lengths if left else places < lengths
    ids = torch.randint(3, 100, real.shape, generator=generator)
    return {"input_ids": ids * real, "attention_mask": real.long()}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("size", "enough"), [(13, 39), (5, 39), (5, 38), (13, 25)])
def test_the_first_half_of_one_and_the_second_of_another(
    size: int, enough: int, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same block of four and the same fold; W_O is fitted to them too (of many, to them alone), on whichever side padding is."""
    monkeypatch.setattr(mixtures, "ENOUGH", enough)
    model, _ = brute.classifier(2)
    layer, drop = hp.find_attention(model, texts(left))[0], {"bert.encoder.layer.0.attention.self": [1]}
    whole, seen = texts(left), list[dict[str, Tensor]]()
    batches = [brute.rows_of(whole, slice(i, i + size)) for i in range(0, 13, size)]
    model.register_forward_pre_hook(lambda module, args, given: seen.append(given), with_kwargs=True)
    choose = [brute.repeated(whole)]
    mended, done = brute.repaired(model, drop, *batches, choose=choose, ridge=0.1, values=False, answers=False)
    assert done.trials[0].kept

    expected, known = {shift: list[list[int]]() for shift in ((1, 2) if enough == 39 else (1,))}, tokens_of(whole)
    for shift, own in expected.items():
        for row, first in enumerate(known):
            block = [other for other in range(13) if other % 2 == row % 2 and other // 8 == row // 8]
            if len(block) > shift:
                second = known[block[(block.index(row) + shift) % len(block)]]
                half = min(len(first), len(second)) // 2
                own.append(first[:half] + second[half:])
    every = [text for own in expected.values() for text in own]
    assert done.mixtures == done.to_json()["mixtures"] == len(every)
    once = {str(given["input_ids"]): given for given in seen if all(text in every for text in tokens_of(given))}
    mixed = list(once.values())
    for row in (row for given in mixed for row in given["attention_mask"].tolist()):
        assert row == sorted(row, reverse=not left)
    assert [text for given in mixed for text in tokens_of(given)] == every
    kept, (old, bias) = brute.columns_of(layer, brute.kept_heads(layer, drop)), brute.output_of(model, layer)
    all_tokens = brute.tokens_of(model, [layer], [*(batches if enough >= 2 * 13 else ()), *mixed])[layer.name]
    own_tokens = replace(all_tokens, x=all_tokens.x[:, kept])
    weight, free = brute.ridge_regression(own_tokens, old[kept], bias, 0.1)  # type: ignore[arg-type]
    torch.testing.assert_close(brute.output_of(mended, layer)[0][kept], weight)
    torch.testing.assert_close(brute.output_of(mended, layer)[1], free)


@pytest.mark.parametrize("size", [13, 5])
def test_other_pairs_for_every_repeat_of_the_last_step(size: int) -> None:
    """First beside the examples, later alone, two of each. A mixture is left out with both of its texts, of one fold; every run of the
    model is counted; the same draw gives the same pairs."""
    model, _ = brute.classifier(2)
    score, choose = texts(), texts(seed=1)
    firsts = torch.arange(3, 29).split(13)  # by which short texts are told apart
    for own, tokens in zip((score, choose), firsts, strict=True):
        own["input_ids"][:, 0] = tokens
    split = [[brute.rows_of(own, slice(i, i + size)) for i in range(0, 13, size)] for own in (score, choose)]
    ran = [0.0]
    model.register_forward_hook(lambda module, args, output: ran.append(len(output.logits)))
    found = calibrate(model, hp.find_attention(model, score), split[0], others=split[1])
    known = {tuple(tokens_of(own)[row]): (part, row) for part, own in enumerate((score, choose)) for row in range(13)}
    pairs: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for draw in (0, 1, 2, 1):
        _ = found.answers
        before, seen = sum(ran), found.runner.seen
        answers = found.answers_to_mixtures(draw)
        assert not isinstance(answers, str)
        assert sum(ran) - before == found.runner.seen - seen
        groups, rows = iter(answers.left_out.tolist()), list[tuple[tuple[int, int], ...]]()
        of_group: dict[tuple[int, int], int] = {}
        for batch, logits in zip(answers.batches, answers.known, strict=True):
            torch.testing.assert_close(logits, brute.logits(model, batch).double())
            for words in tokens_of(batch):
                from_texts = sources(words, known)
                rows.append(from_texts)
                group = next(groups)
                assert {of_group.setdefault(one, group) for one in from_texts} == {group}
                assert len({(part, row % 2) for part, row in from_texts}) == 1
        assert {one for own in rows if len(own) == 1 for one in own} == (set() if draw else set(known.values()))
        assert len(rows) == (2 * 26 if draw == 0 else 2 * (13 + 11))  # a block of two has no second one
        mixed = {own for own in rows if len(own) == 2}
        assert pairs.setdefault(draw, mixed) == mixed
    assert all(pairs[one] != pairs[other] for one, other in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("fails", [1, 3])
@pytest.mark.parametrize("error", [KeyError, torch.OutOfMemoryError])
def test_without_an_answer_to_other_pairs_the_first_ones_stay(error: type[Exception], fails: int) -> None:
    """The model takes some batches, but not all. Memory that ran out is told."""
    model, batches = brute.classifier(3)
    found = calibrate(model, hp.find_attention(model, batches[0]), batches[:3], others=batches[3:])
    known, runs = found.answers[0], [0]
    before = len(found.runner.mixtures)

    def particular(*_: Any) -> None:
        runs[0] += 1
        if runs[0] == fails:
            raise error("All examples must end alike")

    handle = model.register_forward_pre_hook(particular)
    with pytest.raises(error) if error is torch.OutOfMemoryError else nullcontext():
        assert found.answers_to_mixtures(1) is known
    handle.remove()
    assert len(found.runner.mixtures) == before
    assert found.answers_to_mixtures(2) is not known


@pytest.mark.parametrize(("count", "enough", "seed", "least"), [(40, 1024, 95, 0.95), (64, 127, 93, 0.9)])
def test_a_last_step_is_repeated_with_other_mixtures(
    count: int, enough: int, seed: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few texts where it took away a twentieth, of many where it took away a tenth; both times one step lies between."""
    monkeypatch.setattr(mixtures, "ENOUGH", enough)
    model, (score,) = brute.classifier(2, rows=(count,))
    drop = {"bert.encoder.layer.0.attention.self": [0, 1], "bert.encoder.layer.1.attention.self": [2]}
    seen: set[tuple[int, ...]] = set()

    def spy(module: Any, args: Any, given: dict[str, Tensor]) -> None:
        if torch.is_grad_enabled():  # as where something is fitted
            seen.update(map(tuple, tokens_of(given)))

    model.register_forward_pre_hook(spy, with_kwargs=True)
    _, done = brute.repaired(model, drop, score, choose=[brute.text(110, 7, seed=seed)])
    steps = [trial.after / trial.before for trial in done.trials if trial.step == "answers"]
    assert [step < least for step in steps] == [True] * (len(steps) - 1) + [False]
    assert any(0.9 < step < 0.95 for step in steps)
    repeated = set(seen)
    seen.clear()
    for name in ("_AGAIN", "_AGAIN_OF_FEW"):
        monkeypatch.setattr(f"headprune.repairing.steps.{name}", 0)
    brute.repaired(model, drop, score, choose=[brute.text(110, 7, seed=seed)])
    assert repeated > seen


def tokens_of(batch: dict[str, Tensor]) -> list[list[int]]:
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    return [ids[real].tolist() for ids, real in rows]


def sources(text: list[int], known: dict[tuple[int, ...], tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Which text, or which two in order, this one is from: the first half of one and the second of another."""
    if tuple(text) in known:
        return (known[tuple(text)],)
    for one, first in known.items():
        for other, second in known.items():
            half = min(len(one), len(other)) // 2
            if [*one[:half], *other[half:]] == text:
                return first, second
    raise AssertionError(text)


@pytest.mark.parametrize("kind", ["some", "many"])
def test_a_little_of_another_image(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same block; the last step alone is fitted to them, beside the images, of the choosing examples too; of many there are none."""
    monkeypatch.setattr(
        "headprune.repairing.steps.better", lambda before, after: True
    )  # what is random here teaches nothing
    if kind == "many":
        monkeypatch.setattr(mixtures, "ENOUGH", 2 * 24 - 1)
    model, example = brute.model_of("vit")
    images, seen = draw(48, *example["pixel_values"].shape[1:]), list[Tensor]()
    score, choose = ([{"pixel_values": own} for own in part.split(5)] for part in (images[:24], images[24:]))
    model.register_forward_pre_hook(lambda module, args, given: seen.append(given["pixel_values"]), with_kwargs=True)
    drop = {hp.find_attention(model, example)[0].name: [1]}

    def blends(first: int) -> list[Tensor]:
        result = []
        for row in range(24):
            block = [other for other in range(24) if other % 2 == row % 2 and other // 8 == row // 8]
            second = block[(block.index(row) + 1) % 4]
            result.append(0.8 * images[first + row] + 0.2 * images[first + second])
        return result

    def ran(image: Tensor) -> bool:
        return any(torch.allclose(image, own, atol=1e-6) for batch in seen for own in batch)

    _, done = brute.repaired(model, drop, *score, choose=choose, answers=False)
    assert done.mixtures == 0
    assert not any(map(ran, blends(0)))
    _, done = brute.repaired(model, drop, *score, choose=choose)
    assert done.mixtures == 0
    assert [all(map(ran, blends(first))) for first in (0, 24)] == [kind == "some"] * 2
    assert done.answers is not None
    assert done.answers.examples == (96 if kind == "some" else 48)
    assert (BLENDED in " ".join(done.notes)) == (kind == "some")


@pytest.mark.parametrize("form", ["a tensor", "a pair", "a dict and labels", "not only an image"])
def test_images_are_mixed_in_any_form_of_batch(form: str) -> None:
    model, example = brute.model_of("vit")
    images, labels = draw(24, *example["pixel_values"].shape[1:]), torch.arange(24) % 2
    batch = {
        "a tensor": images, "a pair": (images, labels), "a dict and labels": {"pixel_values": images, "labels": labels},
        "not only an image": {"pixel_values": images, "bool_masked_pos": None, "head_mask": labels},
    }[form]  # fmt: skip
    runner = calibrate(model, hp.find_attention(model, example), [batch]).runner
    runner.add_mixtures(images=True)
    assert len(runner.mixtures) == (form != "not only an image")
    for mixed in runner.mixtures:
        others = [row + 2 if row % 8 < 6 else row - 6 for row in range(24)]
        torch.testing.assert_close(tensors(mixed.inputs), [0.8 * images + 0.2 * images[others]])
        assert runner.size(1) == 24
        torch.testing.assert_close(runner.dense_answers[1], brute.logits(model, tensors(mixed.inputs)[0]))


@pytest.mark.parametrize("which", ["scoring", "choosing"])
@pytest.mark.parametrize("raises", [True, False])
def test_mixtures_of_images_without_an_answer_are_left_out(raises: bool, which: str) -> None:
    """The model answers those of the first batch, but not two of the last."""
    model, example = brute.model_of("vit")
    images = draw(48, *example["pixel_values"].shape[1:]).clamp(-2, 2)
    images[:, 0, 0, 0] = 9
    images[20 if which == "scoring" else 44, 0, 0, 0] = -9
    score, choose = ([{"pixel_values": own} for own in part.split(8)] for part in (images[:24], images[24:]))

    def particular(module: Any, args: Any, given: dict[str, Tensor], output: Any) -> None:
        refused = given["pixel_values"][:, 0, 0, 0].abs() < 6
        if raises and refused.any():
            raise ValueError("too dark")
        output.logits = output.logits.masked_fill(refused[:, None], math.inf)

    layers = hp.find_attention(model, example)
    model.register_forward_hook(particular, with_kwargs=True)
    found = calibrate(model, layers, score, others=choose)
    answers, _ = found.answers
    assert not isinstance(answers, str)
    assert answers.examples == (48 if which == "scoring" else 72)


@pytest.mark.parametrize("kind", ["vit", "llama", "places", "causal", "two"])
def test_others_have_none(kind: str) -> None:
    """Pictures, several answers a text, what it is not known how to cut, and texts that are alone in their block."""
    if kind in ("vit", "llama"):
        model, example = brute.model_of(kind)
    else:
        model, (example,) = brute.classifier(2, rows=(12,))
    if kind == "places":
        example["position_ids"] = torch.arange(7)[None].expand(12, 7)
    if kind == "causal":
        example["attention_mask"] = torch.ones(12, 1, 7, 7)
    _, done = brute.repaired(model, {"L0": list(hp.find_attention(model, example)[0].units[0])}, example, answers=False)
    assert bool(done.mixtures) == (kind == "two")


@pytest.mark.parametrize("error", [ValueError, KeyError, torch.OutOfMemoryError])
def test_a_model_that_does_not_take_them_has_none(error: type[Exception]) -> None:
    """Memory that ran out is no such model."""
    model, batches = brute.classifier(3)
    example_ids = {tuple(row.tolist()) for batch in batches for row in batch["input_ids"]}

    def particular(module: Any, args: Any, given: dict[str, Tensor]) -> None:
        if len(given["input_ids"]) > 4 and not {tuple(row.tolist()) for row in given["input_ids"]} <= example_ids:
            raise error("All examples must end alike")

    layers = hp.find_attention(model, batches[0])
    model.register_forward_pre_hook(particular, with_kwargs=True)
    if error is torch.OutOfMemoryError:
        with pytest.raises(torch.OutOfMemoryError):
            hp.repair(model, {"L0": [1]}, batches, layers=layers)
    else:
        assert hp.repair(model, {"L0": [1]}, batches, layers=layers).mixtures == 0


# -- values: planted heads, the weights it makes, and modules whose values must stay as they are ------------


@torch.no_grad()
def test_a_head_takes_the_values_of_one_that_attends_alike() -> None:
    """Three rounds come close, on examples that it was not fitted to; W_O alone does not."""
    model, _ = small()
    attention: Any = model.bert.encoder.layer[0].attention  # type: ignore[union-attr, index]
    for p in (attention.self.query, attention.self.key):
        p.weight[8:16], p.bias[8:16] = p.weight[:8], p.bias[:8]
    attention.output.dense.weight[:, :8] = 0  # head 0 attends as head 1 does, and is of no use
    batches, other = [text(20, 7, seed=s) for s in (1, 2, 3)], text(10, 7, seed=9)
    drop, far = {"L0": [1]}, {}
    for values in (False, True):
        mended, done = brute.repaired(model, drop, *batches, ridge=1e-9, values=values)
        assert [facts.values for facts in done.layers.values()] == [values]
        far[values] = float((brute.logits(mended, other) - brute.logits(model, other)).abs().max())
    assert far[True] < 0.03
    assert far[False] > 0.5
    assert [facts.ridge for facts in brute.repaired(model, drop, *batches)[1].layers.values()] == [0.03]


def check_values(model: nn.Module, example: Any, ridge: float = 0.01) -> None:
    """Of the first layer: the model's error is as promised, and W_O is the regression on what the new values give."""
    layer = hp.find_attention(model, example)[0]
    drop = {layer.name: list(layer.units[1 % len(layer.units)])}
    mended, done = brute.repaired(model, drop, example, ridge=ridge, mixtures=False)
    assert layer.values
    facts = done.layers[layer.name]
    assert (facts.values, facts.ridge) == (True, ridge)
    before, after = (brute.tokens_of(m, [layer], [example])[layer.name] for m in (model, mended))
    assert before.error(after.y) == pytest.approx(facts.after, rel=1e-5, abs=1e-9)
    _, alone = brute.repaired(model, drop, example, ridge=ridge, mixtures=False, values=False)
    assert facts.before == pytest.approx(alone.layers[layer.name].before, rel=1e-6)
    assert facts.after < alone.layers[layer.name].after
    # W_O, for the inputs that there are now; the pull goes by those that there were.
    kept = brute.columns_of(layer, brute.kept_heads(layer, drop))
    (old, bias), (found, found_bias) = brute.output_of(model, layer), brute.output_of(mended, layer)
    has_bias, start = found_bias is not None, torch.zeros(old.shape[1]).double() if bias is None else bias
    x, share = before.x[:, kept], before.share
    mean = (share * x).sum(0) if has_bias else 0
    variance = float((share * (x - mean) ** 2).sum(0).mean())
    tokens = replace(before, x=after.x[:, kept])
    weight, free = brute.ridge_regression(tokens, old[kept], start, ridge, has_bias, variance)
    torch.testing.assert_close(found[kept], weight, rtol=1e-6, atol=1e-7)
    assert found_bias is None or torch.allclose(found_bias, free, rtol=1e-6, atol=1e-7)
    # Of a fused projection only the values of heads that stay have changed.
    (old, _), (now, _) = (brute.matrix(m, layer.values.module) for m in (model, mended))
    changed = {f for f in range(old.shape[1]) if not torch.equal(old[:, f], now[:, f])}
    assert changed == {f for h in brute.kept_heads(layer, drop) for f in layer.values.features[h]}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "mha"])
def test_the_model_gives_what_the_fit_promised(name: str) -> None:
    check_values(*brute.model_of(name))


@pytest.mark.parametrize("kv", [1, 4])
def test_values_are_refitted_where_that_is_better_on_examples_held_out(kv: int) -> None:
    """What has one key/value head has no other values to take over."""
    more = {"num_hidden_layers": 2, "num_key_value_heads": kv, "head_dim": 4}
    model = randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes("sdpa", **more)))).double()
    example = text(20, 9)
    _, done = brute.repaired(model, {"L0": [1], "L1": [1]}, example)
    _, alone = brute.repaired(model, {"L0": [1], "L1": [1]}, example, values=False)
    assert [facts.values for facts in done.layers.values()] == [kv == 4] * 2
    for name, facts in alone.layers.items():
        assert kv == 4 or done.layers[name].after == pytest.approx(facts.after)
    assert [t.step for t in done.trials if t.step != "answers"] == ["output projections", "values"][: 1 + (kv == 4)]


def test_an_infinite_ridge_leaves_weights_alone() -> None:
    model, example = brute.model_of("bert")
    mended, done = brute.repaired(model, {"L1": [1]}, example, ridge=float("inf"))
    assert not any(trial.kept for trial in done.trials)
    changed = [n for n, p in mended.named_parameters() if not torch.equal(p, model.get_parameter(n))]
    assert changed == ["bert.encoder.layer.1.attention.output.dense.weight"]  # the columns of head 1


@pytest.mark.parametrize("ridge", [None, 1e-9])
def test_heads_that_give_nothing_and_layers_without_heads(ridge: float | None) -> None:
    """A head's values are all zero: nothing to attend to but what is made anew. And a layer with a bias at most."""
    model, example = brute.model_of("bert")
    attention: Any = model.bert.encoder.layer[0].attention  # type: ignore[union-attr, index]
    for weight in (attention.self.value.weight, attention.self.value.bias, attention.output.dense.weight.T):
        weight.data[:8] = 0
    drop = {"L0": [1], "L1": [0, 1, 2, 3]}
    mended, done = brute.repaired(model, drop, example, ridge=ridge, mixtures=False, answers=False)
    assert any(trial.kept for trial in done.trials)
    assert all(p.isfinite().all() for p in mended.parameters())
    layer = hp.find_attention(model, example)[1]
    weight, bias = brute.output_of(mended, layer)
    assert not weight.any()
    tokens = brute.tokens_of(model, [layer], [example])[layer.name]
    torch.testing.assert_close(bias, (tokens.share * tokens.y).sum(0))
    assert not done.layers[layer.name].values


class Writing(nn.Module):
    """A block whose feed-forward layer may write into its input."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.ReLU(inplace=in_place), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return (x if self.layers[0].inplace else x.relu()) + self.layers(x)


class Mixing(Attention):
    """Linformer's: its values go through a linear layer over the tokens, which may be another module's."""

    def build(self) -> None:
        self.v = nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        over_tokens = vars(self).get("shared") or self.over_tokens
        q, k, _ = super().split(x)
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return q, k, over_tokens(v.mT).mT


def writing(in_place: bool) -> nn.Module:
    return nn.Sequential(Writing(in_place), Writing(in_place), nn.Linear(WIDTH, 3))


class Sharing(nn.Sequential):
    """Gives its layers what they share."""

    def forward(self, x: Tensor) -> Tensor:
        vars(self[0])["shared"] = vars(self[2])["shared"] = self.over_tokens
        return self[3](self[2](self[1](self[0](x))))


def mixing(shared: bool) -> nn.Module:
    model = (Sharing if shared else nn.Sequential)(Mixing(), nn.LayerNorm(WIDTH), Mixing(), nn.Linear(WIDTH, 3))
    over_tokens = nn.Linear(6, 6, bias=False)
    for place in [model] if shared else [model[0], model[2]]:
        place.over_tokens = over_tokens
    return model


@pytest.mark.parametrize("make", [writing, mixing])
def test_how_a_model_is_written_does_not_change_its_repair(make):
    """Modules that compute the same again while W_O's outputs are held do not run again; these models have some that only seem so."""
    example, plain, found, trials = noise(256, 6, WIDTH), randomise(make(False)), [], []
    other = make(True).eval()
    weights = state(plain)
    other.load_state_dict({**weights, "over_tokens.weight": weights.get("0.over_tokens.weight")}, strict=False)
    torch.testing.assert_close(other(example), plain(example))
    for model in (plain, other):
        mended, done = brute.repaired(model, {"L0": [0, 1, 2], "L1": [1, 2, 3]}, example)
        assert [trial.step for trial in done.trials][:2] == ["output projections", "values"]
        trials.append([trial.after for trial in done.trials])
        found.append({n: w for n, w in state(mended).items() if n in weights})
    assert trials[1] == pytest.approx(trials[0], rel=1e-4)
    for name, weight in found[1].items():
        torch.testing.assert_close(weight, found[0][name], rtol=1e-5, atol=1e-5)


class Turned(nn.Module):
    """A linear layer of one's own, whose weight is ``[in, out]``; square, so that its shape does not tell."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.detach().T.clone()), nn.Parameter(linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_a_weight_may_lie_the_other_way_round() -> None:
    """It was taken for nn.Linear's, so that zeros came into W_O's rows and repair made the model worse."""
    x, plain = noise(256, 6, WIDTH).double(), randomise(nn.Sequential(Attention(), nn.Linear(WIDTH, 3))).double()
    turned = copy.deepcopy(plain)
    turned[0].o = Turned(turned[0].o)
    (one, done), (other, again) = (brute.repaired(model, {"L0": [1, 2]}, x) for model in (plain, turned))
    assert [trial.after for trial in again.trials] == pytest.approx([trial.after for trial in done.trials])
    assert any(trial.kept for trial in done.trials)
    torch.testing.assert_close(other(x), one(x))


def test_a_mixture_of_experts_that_reports_its_routers_is_repaired():
    """transformers reads the routers' logits off modules inside of the feed-forward layer."""
    config = tf.MixtralConfig(**sizes("sdpa"), num_key_value_heads=4, num_local_experts=2, output_router_logits=True)
    model, example = randomise(tf.MixtralForCausalLM(config)), text(8)
    assert brute.repaired(model, {"L0": [1]}, example)[1].trials


# -- modules -----------------------------------------------------------------------------------------


class Changed(Attention):
    """Something is done to the values."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().split(x)
        return q, k, self.values(v)

    def values(self, v: Tensor) -> Tensor:
        raise NotImplementedError


class Scaled(Changed):
    """A factor for every head behind the values, of which every token also gets some of the one before."""

    def values(self, v: Tensor) -> Tensor:
        v = v * torch.tensor([0.5, -1.0, 2.0, 3.0]).to(v)[:, None, None]
        return v + 0.5 * F.pad(v, (0, 0, 1, 0))[..., :-1, :]


class Normed(Changed):
    """A norm without weights behind every head's values, which does not care how they are turned."""

    def values(self, v: Tensor) -> Tensor:
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)


class Lengths(Attention):
    """How long the values are also goes past W_O, which does not care how they are turned."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.qkv(x).chunk(3, -1)[2].square().mean(-1, keepdim=True))  # type: ignore[no-any-return]


class Stretched(Changed):
    """A factor for every feature behind the values."""

    def values(self, v: Tensor) -> Tensor:
        return v * torch.linspace(0.5, 2, v.shape[-1]).to(v)


class Tied(Attention):
    """Values are keys."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, _ = super().split(x)
        return q, k, k


class Handed(Changed):
    """Its values are added to an earlier layer's, as in value residual learning (arXiv:2410.17897)."""

    earlier: Tensor

    def values(self, v: Tensor) -> Tensor:
        return v + self.earlier


class Stack(nn.Module):
    """Two attentions and a classifier of every token."""

    def __init__(self, first: type[Attention], second: type[Attention] = Attention) -> None:
        super().__init__()
        self.first, self.second, self.head = first(), second(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.second, Handed):
            self.second.earlier = self.first.split(x)[2]
        x = F.layer_norm(x + self.first(x), (WIDTH,))
        return self.head(x + self.second(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Attention, Scaled])
def test_what_is_linear_in_its_values_is_as_promised(kind: type[Attention]) -> None:
    check_values(randomise(Stack(kind)).double(), noise(20, 5, WIDTH).double())


@pytest.mark.parametrize("kind", [Normed, Lengths, Stretched, Tied, Handed])
def test_values_that_are_not_for_w_o_alone_stay(kind: type[Attention]) -> None:
    """Nor those that a later layer reads: W_O's inputs there would change, which nobody has fitted it to."""
    stack = Stack(Attention, Handed) if kind is Handed else Stack(kind)
    model, x = randomise(stack).double(), noise(6, 5, WIDTH).double()
    drop: brute.Drop = {"first": [1], "second": [0]}
    mended, done = brute.repaired(model, drop, x, ridge=0.1)
    alone, _ = brute.repaired(model, drop, x, ridge=0.1, values=False)
    assert hooks(mended) == 0
    assert any(note.startswith("first keeps its old values") for note in done.notes)
    assert [t.step for t in done.trials] == ["output projections", "values"][: 1 + (kind is not Handed)]  # the second's
    assert not done.layers["first"].values
    assert done.layers["first"].after < done.layers["first"].before
    assert same(mended.first, state(alone.first))  # type: ignore[arg-type]


# -- formulas that public names do not reach alone; the dense model, measured once and never changed --


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_values_and_outputs_end_where_the_slopes_are_zero(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole squared error and both pulls, by autograd; every round is a gain, and the heads of a group share values."""
    (model, example), ridge = brute.model_of(name), 1.0
    layers = hp.find_attention(model, example)
    found = calibrate(model, layers, [example], mixtures=False)
    projection = found.projections[0]
    own, statistics = found.values[projection.name], found.statistics
    heads, rank = list(range(1, layers[0].num_heads)), statistics.directions.rank(projection.name)
    moments, width = statistics.moments[projection.name], own.head_dim
    index = directions.inputs_of_heads(projection, own, heads, rank).flatten()
    xx, xy, _ = (m.sum(0) for m in moments.rows_of(index))
    groups = [own.owner[h] for h in heads]
    kept = sorted(set(groups))
    old_out = projection.weight[own.columns[heads]]
    old_mix = torch.eye(width + rank, width).double().expand(len(kept), -1, -1)
    tokens, (mean, mean_y) = xx[-1, -1], (xx[-1, :-1] / xx[-1, -1], xy[-1] / xx[-1, -1])
    a = xx[:-1, :-1] / tokens - torch.outer(mean, mean)
    c = xy[:-1] / tokens - torch.outer(mean, mean_y)
    spread = a.diagonal().view(len(heads), -1)
    pulls = spread[:, :width].mean(), spread.mean() * old_out.square().sum(2).mean() * len(heads) / len(kept)

    def objective(mix: Tensor, out: Tensor) -> Tensor:
        w = torch.cat([mix[kept.index(g)] @ out[i] for i, g in enumerate(groups)])
        error = moments.yy.sum() / tokens - mean_y.square().sum() - 2 * (w * c).sum() + (w * (a @ w)).sum()
        pull = pulls[0] * (out - old_out).square().sum() + pulls[1] * (mix - old_mix).square().sum()
        return error + ridge * pull

    def fitted(rounds: int) -> list[Tensor]:
        monkeypatch.setattr(layer_steps, "_ROUNDS", rounds)
        monkeypatch.setattr(layer_steps, "_STEPS", 30)
        along = statistics.directions.along[projection.name]
        fit = layer_steps.fit_values(moments, projection, own, heads, along, ridge)
        mixes = [fit.mixes[heads[groups.index(g)]] for g in kept]
        assert all(torch.equal(fit.mixes[h], mixes[kept.index(g)]) for h, g in zip(heads, groups, strict=True))
        assert fit.facts.after <= fit.facts.before
        return [torch.stack(mixes).requires_grad_(), fit.weight[own.columns[heads]].requires_grad_()]

    # Without any round W_O is fitted already.
    losses = [float(objective(old_mix, old_out)), *(float(objective(*fitted(rounds))) for rounds in (1, 2, 4))]
    assert losses == sorted(losses, reverse=True)
    start = [t.clone().requires_grad_() for t in (old_mix, old_out)]
    at_first = torch.autograd.grad(objective(*start), start)
    at_last = torch.autograd.grad(objective(*(end := fitted(200))), end)
    for first, last in zip(at_first, at_last, strict=True):
        assert last.abs().max() < 1e-4 * first.abs().max()


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_is_the_ridge_regression(some: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With strengths that are compared on some rows only, gradients far below 1, and noise in what is lacking."""
    monkeypatch.setattr(gauss_newton, "_MOST_TRIED", 100 if some else 1000)
    j = draw(200, 300) * torch.logspace(0, -2, 300) * 1e-25
    y = 1e25 * j @ draw(300, seed=1)
    lacking = (y + y.std() * draw(200, seed=2)).view(100, 2)
    unit = float(j.square().sum(1).mean())
    kernel, its_unit = gauss_newton.kernel_of(j.to(dtype))
    torch.testing.assert_close(kernel.double(), j @ j.T / unit, rtol=1e-3, atol=1e-5)
    assert its_unit == pytest.approx(unit, rel=1e-5)
    found = next(gauss_newton.kernel_ridge(kernel, lacking, torch.arange(100), 1.05))
    expected = j.T @ torch.linalg.solve(j @ j.T / unit + found[1] * torch.eye(200).double(), lacking.flatten())
    torch.testing.assert_close(j.T @ found[0], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert found[2] < float(lacking.square().mean().sqrt())
    nothing = torch.eye(200).to(dtype)  # but noise
    assert not list(gauss_newton.kernel_ridge(nothing, draw(100, 2), torch.arange(100), 1.05))


def test_the_strength_is_a_tenth_of_the_best_at_least() -> None:
    """Where the error says little about it: the longer the step, the less its gradients tell."""
    j = draw(60, 300) * torch.logspace(0, -2, 300)
    kernel, _ = gauss_newton.kernel_of(j)
    y = (j @ draw(300, seed=1) + draw(60, seed=2))[:, None]
    (_, best, _), *others = gauss_newton.kernel_ridge(kernel, y, torch.arange(60), 1.0)
    assert not others
    both = [strength for _, strength, _ in gauss_newton.kernel_ridge(kernel, y, torch.arange(60), 2.0)]
    assert both == pytest.approx([best / 10, best])  # the best is there for a step that is more careful


def test_coordinates_are_what_gradients_are_longest_along() -> None:
    """They are orthonormal, and the longest products of eigenvectors."""

    def made(rows: int, wide: int) -> tuple[Tensor, Tensor]:
        return draw(rows, 3, wide) * torch.logspace(0, -1, wide), draw(2, rows, 3, 5)

    parts = [{"a": made(rows, 4), "b": made(rows, 6)} for rows in (7, 4)]
    each = {n: torch.cat([torch.einsum("nti,pnto->npio", *part[n]).flatten(0, 1) for part in parts]) for n in "ab"}
    gradients = torch.cat([g.flatten(1) for g in each.values()], dim=1)
    some = choose_coordinates(parts, 11)
    axes = [some.matrices(one) for one in torch.eye(11, dtype=torch.float64)]
    flat = torch.stack([torch.cat([axis[name].flatten() for name in each]) for axis in axes])
    torch.testing.assert_close(flat @ flat.T, torch.eye(11, dtype=torch.float64))
    along = torch.cat([some.of(part) for part in parts])
    torch.testing.assert_close(along, gradients @ flat.T)
    lengths = []
    for name, own in each.items():
        left, right = (torch.linalg.svd(torch.cat([p[name][i].flatten(0, -2) for p in parts]))[2] for i in (0, 1))
        lengths.append((left @ own @ right.T).square().sum(0).flatten())
    best = torch.cat(lengths).sort(descending=True).values
    torch.testing.assert_close(along.square().sum(), best[:11].sum())


@pytest.mark.parametrize(("before", "after", "kept"), [
    ([4.0] * 200, [1.0] * 200, True), ([1.0] * 200, [4.0] * 200, False), ([1.0] * 8, [1.0] * 8, False),
    ([4.0, 5.0, 4.0, 5.0] * 2, [1.0, 1.0, 2.0, 1.0] * 2, True), ([1.0] * 8, [math.nan] * 8, False),
    ([100.0] + [1.0] * 199, [0.0] + [1.2] * 199, True),  # the mean falls by one example: with many, it decides
    ([100.0] + [1.0] * 49, [0.0] + [1.2] * 49, False),  # with few, so much by one alone may be chance
    ([1.5] * 8, [40.0] + [0.7] * 7, False),  # seven gain, and one is lost: the mean decides
    ([4.0], [1.0], False),  # one alone says nothing about chance
])  # fmt: skip
def test_what_counts_as_better(before: list[float], after: list[float], kept: bool) -> None:
    assert better(torch.tensor(before).double(), torch.tensor(after).double()) is kept


# -- the calibration ----------------------------------------------------------------------------------

DROP: Heads = {"bert.encoder.layer.0.attention.self": [1], "bert.encoder.layer.1.attention.self": [0, 2]}


def calibrated(classes: int = 3, **given: Any) -> repairing.Calibration:
    model, batches = brute.classifier(classes)
    return calibrate(model, hp.find_attention(model, batches[0]), batches, **given)


def sums(found: repairing.Calibration) -> dict[str, Tensor]:
    moments = found.statistics.moments.items()
    return {f"{name} {key}": value for name, own in moments for key, value in vars(own).items()}


def test_weights_are_applied_and_taken_out_to_the_bit() -> None:
    """Also within others, and with a removed head masked."""
    found = calibrated()
    model, before = found.model, state(found.model)
    first, second = fit_layers(found, {**DROP, "bert.encoder.layer.1.attention.self": [1]}), fit_layers(found, DROP)
    assert first.mixes
    assert first.ridges.keys() == first.fits.keys()
    with found.applied(second.by_module, DROP):
        alone = state(model)
    with found.applied(first.by_module):
        assert not same(model, before)
        with found.applied(second.by_module):
            assert same(model, alone)
        assert same(model, before)  # the dense model, whichever weights there were
    assert same(model, before)


def test_a_repair_does_not_depend_on_what_was_tried_before() -> None:
    alone = checked_repair(calibrated(), DROP)
    found = calibrated()
    fit_layers(found, {"bert.encoder.layer.0.attention.self": [0]})
    with found.applied(fit_layers(found, DROP).by_module):
        pass
    again = checked_repair(found, DROP)
    assert again.trials == alone.trials
    torch.testing.assert_close(dict(again.by_module), dict(alone.by_module), rtol=0, atol=0)


def test_where_nothing_is_refitted_nothing_is_measured() -> None:
    """The sums of all layers were gathered for a search without repair: at 8 billion parameters 17 GB."""
    found, passes = calibrated(repair=False), list[object]()
    handle = found.model.register_forward_pre_hook(lambda *given: passes.append(given))
    assert found.statistics.moments == found.statistics.directions.along == {}
    handle.remove()
    assert not passes
    assert found.statistics.passes == found.cost == 0


@pytest.mark.parametrize("shares", [2, 1, 0])
def test_as_many_directions_as_there_is_room_for(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2 * 2 * 8 * (24 + 3 * 8 * shares + 1) ** 2
    monkeypatch.setattr(directions, "_MOST", room - (not shares))
    found = calibrated(mixtures=False)
    weights = fit_layers(found, DROP)
    assert {m.xx.shape for m in found.statistics.moments.values()} == {(2, 25 + 24 * shares, 25 + 24 * shares)}
    assert {len(m) for mixes in weights.mixes.values() for m in mixes.values()} <= {8 + 8 * shares}
    assert any("would take too much memory" in note for note in found.notes) == (not shares)
    assert bool(weights.mixes) == bool(shares)
    monkeypatch.setattr(directions, "_MOST_AT_ONCE", 1)  # a layer at a time
    parts = sums(calibrated(mixtures=False))
    assert all(torch.equal(value, parts[name]) for name, value in sums(found).items())


def test_many_examples_are_seen_in_part_and_have_fewer_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    for enough, count, beside in ((63, 1, False), (64, 1, True), (95, 1, True), (96, 2, True)):  # there are 32 examples
        monkeypatch.setattr(mixtures, "ENOUGH", enough)
        found = calibrated()
        assert found.statistics.passes == pytest.approx(found.cost)
        assert {mixed.shift for mixed in found.runner.mixtures} == set(range(1, count + 1))
        assert (0 in found.runner.fitted) == beside
    # Examples stand beside their mixtures, along fewer directions if room is short.
    for room, directions_of_each in ((127, 1), (128, 2)):
        monkeypatch.setattr(examples, "MOST_ROWS", room)
        answers, _ = calibrated().answers
        assert (answers.examples, answers.count) == (64, directions_of_each)
    monkeypatch.setattr(examples, "MOST_ROWS", 24)
    assert 1 <= calibrated(mixtures=False).answers[0].examples <= 24


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_one_example_is_both_folds_by_its_tokens(name: str) -> None:
    """As a search may have it. Where there is but one token, nothing says that other weights are better."""
    model, example = brute.model_of(name)
    layers, one = hp.find_attention(model, example), brute.rows_of(example, [0])
    found, padded, single = (
        fit_layers(calibrate(model, layers, [batch], mixtures=False), {"L1": [1]} | brute.some_heads(layers))
        for batch in (one, brute.padded(one, 3), {k: v[:, :1] for k, v in one.items()})
    )
    assert min(found.ridges.values()) < math.inf
    assert set(single.ridges.values()) == {math.inf}
    for name, (weight, _) in found.by_module.items():
        torch.testing.assert_close(padded.by_module[name][0], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("best", [0.001, 0.003, 0.04, 0.24, 0.7, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("shape", ["parabola", "steep", "infinite"])
def test_the_length_of_a_step_is_found_wherever_it_is(best: float, shape: str) -> None:
    """By few looks, also where the error explodes or is not finite far out."""
    looks: list[float] = []

    def error(length: float) -> float:
        looks.append(length)
        x = length / best
        if shape == "infinite" and x > 3:
            return math.nan
        return 2.0 - (
            2 * x - x**2 if shape == "parabola" else 3 * x - 2 * x**1.5
        )  # both have their least value, 1, at x = 1

    found = best_length(functools.cache(error), 2.0)
    assert error(found) < 1.15  # at least 85 % of what can be gained
    assert len(looks) <= 12


def test_no_length_of_a_step_that_leads_astray_is_long() -> None:
    assert best_length(lambda length: 1 + length, 1.0) < 0.001


def kfac(inputs: Tensor, slopes: Tensor, random: Tensor, wide: int) -> tuple[Tensor, float, float]:
    """K-FAC's step from tokens' inputs ``[tokens, in]``, slopes of the divergence and of a random projection ``[tokens, out]``; and its
    slope and curvature. Of a side that is wider than ``wide``, moments have a diagonal only."""
    a, b = (torch.stack([torch.outer(v, v) for v in vs]).mean(0) for vs in (inputs, random))
    a, b = (m if len(m) <= limit else m.diag().diag() for m, limit in ((a, wide + 1), (b, wide)))
    left, right = (m + 0.1 * m.diagonal().mean() * torch.eye(len(m)).to(m) for m in (a, b))
    gradient = inputs.T @ slopes / len(inputs)
    step = -torch.linalg.inv(left) @ gradient @ torch.linalg.inv(right)
    return step, float((step * gradient).sum()), float(torch.trace(step.T @ a @ step @ b))


def linear_layers(model: nn.Module) -> set[str]:
    """All but a head that shares its weights with the embeddings."""
    tied = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    kinds = (nn.Linear, tf.pytorch_utils.Conv1D)
    return {name for name, module in model.named_modules() if isinstance(module, kinds) and module.weight is not tied}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_many_answers_come_nearer_on_other_texts(name: str, joint: bool) -> None:
    """By K-FAC's step, whose direction and length are computed here token by token; and those of other texts too, if it is fitted to both."""
    (model, _), example, other = brute.model_of(name), text(40, 9, seed=1), text(100, 9, seed=2)
    layers = hp.find_attention(model, example)
    drop = {a.name: [h for unit in a.units[1:] for h in unit] for a in layers}
    _, done = brute.repaired(model, drop, example, choose=[other], values=False)
    trial = next(t for t in done.trials if t.step == "answers")
    assert (trial.kept, done.answers is not None) == (True, True)
    assert trial.after < trial.before
    assert ALL_FITTED in done.notes
    more = [text(30, 9, seed=3)] if joint else []
    dense_model = calibrate(model, layers, [example], values=False, others=more)
    start = fit_layers(dense_model, drop)
    found: Any = refit_answers(dense_model, drop, start)
    runner = dense_model.runner

    def seen_on(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        dense, real = brute.logits(model, batch), batch["attention_mask"] != 0
        with torch.inference_mode(False), dense_model.applied(start.by_module, drop):
            return real, runner.slopes_of(batch, found.by_module, lambda out: [
                (dense.softmax(-1) * (dense.log_softmax(-1) - out.logits.log_softmax(-1)))[real].sum(), probe_of(model, out, batch, 0, runner.rows)
            ])  # fmt: skip

    assert (found.others, found.answers.examples) == (30 * joint, 40 + 30 * joint)
    if joint:  # judged by the step without them
        alone = refit_answers(calibrate(model, layers, [example], values=False), drop, start)
        for module, (weight, _) in found.on_fold(0).by_module.items():
            torch.testing.assert_close(weight, alone.by_module[module][0])
    every = [seen_on(batch) for batch in (example, *more)]
    moved, steps, slope, curvature = [], [], 0.0, 0.0
    places = {p.name: p for p in (*dense_model.linears, *dense_model.projections)}
    assert set(found.by_module) == set(places) == linear_layers(model)
    wide = max(max(p.weight.shape) for p in dense_model.projections)
    assert any(max(p.weight.shape) > wide for p in places.values())
    for module, (new, new_bias) in found.by_module.items():
        place = places[module]
        weight, bias = start.by_module.get(module, place.dense)
        parts = []
        for real, seen in every:
            x, _, (g, s) = seen[module][0]
            x = torch.cat([x[..., place.kept(drop)], x.new_ones(*x.shape[:-1], int(place.has_bias))], -1)
            parts.append([t[real] for t in (x, g, s)])
        _, own_slope, own_curvature = kfac(*parts[0], wide)
        slope, curvature = slope + own_slope, curvature + own_curvature
        rows, slopes = (torch.cat(each) for each in list(zip(*parts, strict=True))[:2])
        steps.append(kfac(rows, slopes, parts[0][2], wide)[0].flatten())
        own = [(new - weight)[place.kept(drop)]]
        own += [(new_bias - bias)[None]] if place.has_bias else []
        moved.append(torch.cat(own).flatten())
    length = -slope / curvature / len(steps)
    torch.testing.assert_close(torch.cat(moved), length * torch.cat(steps), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_slopes_of_all_linear_layers_add_up_to_their_gradients(tied: bool) -> None:
    """Where the decoder's texts are as long as the encoder's, but end elsewhere: cross-attention's keys are of the encoder's tokens."""
    (model, _), example = brute.model_of("t5"), text(6, 9, decoder=9)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    example["decoder_attention_mask"] = example["attention_mask"].flip(0)
    layers = hp.find_attention(model, example)
    drop = brute.some_heads(layers)
    found = calibrate(model, layers, [example], values=False)
    dense, real = brute.logits(model, example), example["decoder_attention_mask"] != 0
    start = drop_columns(found, drop)
    places = {p.name: (p, p.kept(drop)) for p in found.linears}
    with torch.no_grad():
        sums, _ = kronecker._Look(found, drop, start, places, found.runner)._sums([0])
    with found.applied(start.by_module, drop):
        now = brute.run(model, example).logits.log_softmax(-1)
        (dense.softmax(-1) * (dense.log_softmax(-1) - now))[real].sum().backward()
    assert ("lm_head" in places) != tied
    for module, (_, kept) in places.items():
        gradient: Any = model.get_submodule(module).weight.grad
        torch.testing.assert_close(sums[module].xg.sum(0)[: len(kept)], gradient.T[kept])


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_step_is_as_long_as_other_texts_ask_for(name: str, joint: bool, monkeypatch: Any) -> None:
    """Without these texts in it; what is tried is what is told, and no length beside it does better."""
    (model, _), example, other = brute.model_of(name), text(40, 9, seed=1), text(100, 9, seed=2)
    layers = hp.find_attention(model, example)
    drop = {a.name: [h for unit in a.units[1:] for h in unit] for a in layers}
    found = calibrate(model, layers, [example], values=False, others=[other] if joint else [])
    start = fit_layers(found, drop)
    alone: Any = refit_answers(calibrate(model, layers, [example], values=False), drop, start)
    before: Any = {p.name: p.dense for p in found.linears} | dict(start.by_module)
    lengths: list[float] = []

    def told(error: Any, before: float) -> float:
        lengths.append(best_length(error, before))
        return lengths[-1]

    monkeypatch.setattr(steps, "best_length", told)
    trials = [t for t in checked_repair(found, drop, Fidelity(model, [other])).trials if t.step == "answers"]
    ways = [alone.by_module, alone.careful().by_module]  # all linear layers, or W_O alone
    assert len(lengths) == len(ways) * len(trials)  # also where none is kept

    def error(way: Any, length: float) -> float:
        moved = {
            module: tuple(None if old is None else old + length * (new - old) for old, new in zip(before[module], weights, strict=True))
            for module, weights in way.items()
        }  # fmt: skip
        dense, real = brute.logits(model, other), other["attention_mask"] != 0
        with torch.inference_mode(False), found.applied(moved, drop):
            now = brute.logits(model, other).log_softmax(-1)
        each = (dense.softmax(-1) * (dense.log_softmax(-1) - now)).sum(-1)
        return float(((each * real).sum(1) / real.sum(1)).mean())

    tried = [error(way, length) for way, length in zip(ways, lengths, strict=False)]
    assert trials[0].kept
    assert trials[0].before == pytest.approx(error(ways[0], 0.0), rel=1e-4)
    assert trials[0].after == pytest.approx(min(tried), rel=1e-4)
    for way, length, least in zip(ways, lengths, tried, strict=False):
        assert least < min(error(way, length / 4), error(way, 4 * length))
