"""Mixtures of texts that repair is fitted to as well, against mixtures made one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import headprune as hp
from headprune.batches import Rows
from headprune.reference.mixtures import block_of, mixed_texts
from headprune.repairing import repair
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


@pytest.mark.parametrize("size", [13, 8, 5, 1])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_the_first_half_of_one_and_the_second_of_another(shift: int, left: bool, size: int) -> None:
    """In whatever batches they come."""
    lengths = [12, 7, 9, 12, 4, 3, 12, 2, 10, 12, 11, 5, 6]
    whole = texts(lengths, left)
    batches = [{k: v[i : i + size] for k, v in whole.items()} for i in range(0, len(lengths), size)]
    found = [m for m in mixed_texts(batches, Rows(), 3, 0) if m.shift == shift]
    firsts = torch.cat([m.firsts for m in found]).tolist()
    each = [
        (text[mask.bool()].tolist(), mask)
        for m in found
        for text, mask in zip(m.inputs["input_ids"], m.inputs["attention_mask"], strict=True)
    ]
    assert all(m.inputs.keys() == {"input_ids", "attention_mask"} for m in found)

    def tokens(row: int) -> list[int]:
        return [int(t) for t in whole["input_ids"][row] if t]

    for (text, mask), row in zip(each, firsts, strict=True):
        own = [r for r in range(len(lengths)) if r % 2 == row % 2 and r // 8 == row // 8]
        other = own[(own.index(row) + shift) % len(own)]
        assert other != row
        half = min(lengths[row], lengths[other]) // 2
        assert text == tokens(row)[:half] + tokens(other)[half:]
        assert mask.tolist() == sorted(mask.tolist(), reverse=not left)
    # Everyone who has enough others in the block begins one.
    enough = [
        r
        for r in range(len(lengths))
        if len([o for o in range(len(lengths)) if o % 2 == r % 2 and o // 8 == r // 8]) > shift
    ]
    assert firsts == enough


def test_blocks_are_of_one_parity() -> None:
    number = block_of(torch.arange(30))
    for b in number.unique():
        rows = torch.nonzero(number == b).flatten()
        assert len(rows) <= 4
        assert len(set((rows % 2).tolist())) == 1


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
    assert mixed_texts([batch], Rows(), 1, 0) == []


def test_a_causal_mask_is_no_padding() -> None:
    batch = {
        "input_ids": torch.ones(8, 8, dtype=torch.long),
        "attention_mask": torch.ones(8, 8, dtype=torch.long).tril(),
    }
    assert mixed_texts([batch], Rows(), 1, 0)
    assert not mixed_texts([batch], Rows({("input_ids",): 0, ("attention_mask",): None}), 1, 0)


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
    """What is fitted to one half of the examples has seen nothing of the other: every token tells its row."""
    whole = texts([12, 7, 9, 12, 4, 3, 12, 2, 10, 12, 11, 5, 6])
    for mixed in mixed_texts([{k: v[i : i + 5] for k, v in whole.items()} for i in (0, 5, 10)], Rows(), 3, 0):
        for text, first in zip(mixed.inputs["input_ids"], mixed.firsts.tolist(), strict=True):
            assert {(int(token) // 100 - 1) % 2 for token in text if token} == {first % 2}
    model, batches = classifier(3)
    runner = refit_of(model, hp.find_attention(model, batches[0]), batches).reference.runner
    for i, mixed in enumerate(runner.mixtures, start=len(batches)):
        assert torch.equal(runner.fold(i), mixed.firsts % 2)


@pytest.mark.parametrize("size", [32, 10, 7])
def test_the_batch_size_changes_nothing(size: int) -> None:
    """Neither the weights of a repair nor the plans of a search."""
    model, batches = small()
    whole = {k: torch.cat([b[k] for b in batches] * 4)[:32] for k in batches[0]}
    whole["input_ids"] = torch.randint(5, 100, whole["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    parts = [{k: v[i : i + size] for k, v in whole.items()} for i in range(0, 32, size)]
    layers = hp.find_attention(model, batches[0])
    drop = {layers[0].name: [0], layers[1].name: [1]}
    found = refit_of(model, layers, parts).fitted(drop)
    for name, (weight, _) in refit_of(model, layers, [whole]).fitted(drop).by_module.items():
        torch.testing.assert_close(found.by_module[name][0], weight, rtol=1e-4, atol=1e-5)


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


def test_it_is_told() -> None:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    found = repair(model, {layers[0].name: [0]}, batches, layers=layers)
    assert found.mixtures > 0
    assert found.to_json()["mixtures"] == found.mixtures


def test_memory_that_ran_out_is_not_taken_for_a_model_that_does_not_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = classifier(3)
    refit = refit_of(model, hp.find_attention(model, batches[0]), batches)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        refit.reference.runner.with_mixtures(1)
