"""Mixtures of texts that repair is fitted to as well, against mixtures made one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import headprune as hp
from headprune.reference.mixtures import blocks, crossed
from headprune.repairing import repair
from headprune.rows import Rows
from tests.support import zoo
from tests.support.checks import state
from tests.support.problems import small
from tests.support.repairs import classifier, made, refit_of

PLACES = 12


def texts(lengths: list[int], left: bool = False) -> dict[str, Tensor]:
    """Every token tells its row and its place; padding is zeros."""
    ids, mask = torch.zeros(2, len(lengths), PLACES, dtype=torch.long)
    for row, length in enumerate(lengths):
        own = slice(PLACES - length, None) if left else slice(0, length)
        ids[row, own] = torch.arange(1, PLACES + 1)[own] + 100 * (row + 1)
        mask[row, own] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(lengths))}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_the_first_half_of_one_and_the_second_of_another(shift: int, left: bool) -> None:
    lengths = [12, 7, 9, 12, 4, 3, 12, 2, 10, 12, 11, 5, 6]
    found = crossed(texts(lengths, left), shift, Rows())
    assert found is not None
    mixed, rows = found
    assert mixed.keys() == {"input_ids", "attention_mask"}
    for text, mask, row in zip(mixed["input_ids"], mixed["attention_mask"], rows.tolist(), strict=True):
        own = [r for r in range(len(lengths)) if r % 2 == row % 2 and r // 8 == row // 8]
        other = own[(own.index(row) + shift) % len(own)]
        assert other != row
        both = min(lengths[row], lengths[other])
        first = PLACES - both if left else 0
        cut = first + both // 2
        for place in range(PLACES):
            source = row if place < cut else other
            start = PLACES - lengths[source] if left else 0
            real = start <= place < start + lengths[source]
            assert int(mask[place]) == real
            assert int(text[place]) == (100 * (source + 1) + place + 1 if real else 0)
    # Everyone who has enough others in the block begins one.
    enough = [
        r
        for r in range(len(lengths))
        if len([o for o in range(len(lengths)) if o % 2 == r % 2 and o // 8 == r // 8]) > shift
    ]
    assert rows.tolist() == enough


def test_blocks_are_of_one_parity() -> None:
    for size in range(1, 30):
        number = blocks(size)
        for b in number.unique():
            rows = torch.nonzero(number == b).flatten()
            assert len(rows) <= 4
            assert len(set((rows % 2).tolist())) == 1
        assert int(number.max()) < size  # so that numbers of batches one after another differ


@pytest.mark.parametrize(
    "batch",
    [
        {"pixel_values": torch.zeros(8, 3, 4, 4)},
        {"input_ids": torch.ones(8, 5, dtype=torch.long), "bbox": torch.zeros(8, 5, 4)},
        {"input_ids": torch.ones(8, 5, dtype=torch.long), "position_ids": torch.zeros(1, 5)},
        {"input_ids": torch.ones(2, 5, dtype=torch.long)},
        {"input_ids": torch.ones(1, 5, dtype=torch.long)},
        (torch.zeros(8, 5), torch.zeros(8)),
        torch.zeros(8, 5),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_not(batch: Any) -> None:
    assert crossed(batch, 1, Rows()) is None


def test_a_causal_mask_is_no_padding() -> None:
    batch = {
        "input_ids": torch.ones(8, 8, dtype=torch.long),
        "attention_mask": torch.ones(8, 8, dtype=torch.long).tril(),
    }
    assert crossed(batch, 1, Rows()) is not None
    assert crossed(batch, 1, Rows({("input_ids",): 0, ("attention_mask",): None})) is None


def test_statistics_are_of_examples_and_mixtures() -> None:
    model, batches = classifier(3)
    layers = hp.find_attention(model, batches[0])
    refit = refit_of(model, layers, batches, values=False)
    found = refit.reference.moments
    assert {m.shift for m in refit.reference.runner.mixtures} == {1, 2}
    # The same examples and mixtures, all given as examples.
    everything = refit_of(
        model, layers, refit.reference.runner.everything, values=False, mixtures=False
    ).reference.moments
    for name, moments in found.items():
        torch.testing.assert_close(moments.xx.sum(0), everything[name].xx.sum(0))
        torch.testing.assert_close(moments.xy.sum(0), everything[name].xy.sum(0))
        torch.testing.assert_close(moments.yy.sum(), everything[name].yy.sum())


def test_no_mixture_is_of_two_folds() -> None:
    """What is fitted to one half of the examples has seen nothing of the other."""
    model, batches = classifier(3)
    refit = refit_of(model, hp.find_attention(model, batches[0]), batches)
    runner = refit.reference.runner
    folds = {}
    for index, batch in enumerate(batches):
        folds |= {
            (index, tuple(text.tolist())): int(f)
            for text, f in zip(batch["input_ids"], runner.fold(index), strict=True)
        }
    assert set(folds.values()) == {0, 1}
    for number, mixed in enumerate(runner.mixtures):
        for text, fold in zip(mixed.inputs["input_ids"].tolist(), runner.fold(len(batches) + number), strict=True):
            parents = [
                f
                for (index, own), f in folds.items()
                if index == mixed.batch and (own[:2] == tuple(text[:2]) or own[-2:] == tuple(text[-2:]))
            ]
            assert len(parents) == 2
            assert set(parents) == {int(fold)}


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_other_models_have_none(name: str) -> None:
    model, example, layers = made(name)
    refit = refit_of(model, layers, [example])
    assert not refit.reference.runner.mixtures


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_a_model_that_does_not_take_them_has_none(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = classifier(3)
    forward = model.forward

    def particular(**inputs: Any) -> Any:
        if "labels" not in inputs:
            raise error("All examples must end alike")
        return forward(**{k: v for k, v in inputs.items() if k != "labels"})

    labelled = [{**b, "labels": torch.zeros(len(b["input_ids"]), dtype=torch.long)} for b in batches]
    layers = hp.find_attention(model, batches[0])
    monkeypatch.setattr(model, "forward", particular)
    refit = refit_of(model, layers, labelled)
    assert not refit.reference.runner.mixtures


def test_many_examples_have_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = classifier(3)
    count = sum(len(b["input_ids"]) for b in batches)
    layers = hp.find_attention(model, batches[0])
    for room, shifts in ((2 * count - 1, set()), (2 * count, {1}), (9 * count, {1, 2})):
        monkeypatch.setattr("headprune.reference.dense._MOST_EXAMPLES", room)
        refit = refit_of(model, layers, batches)
        assert {m.shift for m in refit.reference.runner.mixtures} == shifts


def test_it_can_be_left_out_and_is_told() -> None:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    before = state(model)
    drop = {layers[0].name: [0]}
    found = repair(model, drop, batches, layers=layers, mixtures=False)
    assert found.mixtures == 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    found = repair(model, drop, batches, layers=layers)
    assert found.mixtures > 0
    assert found.to_json()["mixtures"] == found.mixtures


def test_two_batches_of_other_sizes_give_the_same_mixtures() -> None:
    """As long as these are multiples of eight, as the command line's are."""
    whole = zoo.text(32, 9, seed=3)
    found = crossed(whole, 1, Rows())
    assert found is not None
    parts = [crossed({k: v[i : i + 8] for k, v in whole.items()}, 1, Rows()) for i in range(0, 32, 8)]
    assert torch.equal(found[0]["input_ids"], torch.cat([p[0]["input_ids"] for p in parts if p is not None]))


def test_memory_that_ran_out_is_not_taken_for_a_model_that_does_not_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = classifier(3)
    refit = refit_of(model, hp.find_attention(model, batches[0]), batches)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        refit.reference.runner.with_mixtures(1)
