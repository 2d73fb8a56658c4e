"""Examples that are varied for the proof: other shapes and contents, and the user's own example never changed."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headprune.inputs import first_rows, scrambled, tensors, variants
from tests.support.zoo import text


@st.composite
def examples(draw: st.DrawFn) -> Any:
    """Ids with a mask, ids alone, features in a tuple with a mask, or a bare tensor."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    features = torch.randn(rows, length, 4)
    ids = {**text(rows, length), "labels": torch.zeros(rows, length, dtype=torch.long)}
    padding = torch.zeros(rows, length, dtype=torch.bool)
    return draw(st.sampled_from([ids, {"input_ids": ids["input_ids"]}, (features, padding), (features,), features]))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@given(examples())
def test_variants_differ_in_shape_or_padding(example: Any) -> None:
    before = copy.deepcopy(example)
    for made in variants(example):
        assert type(made) is type(example)
        shapes = [t.shape for t in tensors(made)] != [t.shape for t in tensors(example)]
        assert shapes or not same(made, example)
    assert same(example, before)


def test_a_mask_longer_than_the_ids_stays_as_it_was() -> None:
    example = {"input_ids": torch.full((2, 6), 7), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    shorter = variants(example)[0]
    assert isinstance(shorter, dict)
    assert not shorter["attention_mask"][0, -1]
    assert bool((example["attention_mask"] == 1).all())


@given(examples())
def test_scrambled_has_other_content_in_the_same_places(example: Any) -> None:
    before = copy.deepcopy(example)
    for made in scrambled(example, 90):
        assert [(t.shape, t.dtype) for t in tensors(made)] == [(t.shape, t.dtype) for t in tensors(example)]
        if isinstance(example, dict):
            assert torch.equal(made["input_ids"] < 5, example["input_ids"] < 5)  # padding and ends stay where they are
            assert int(made["input_ids"].max()) < 90
    assert same(example, before)


@pytest.mark.parametrize("rows", [1, 2])
def test_first_rows_of_what_is_nested(rows: int) -> None:
    example = {
        "x": torch.arange(12).view(4, 3),
        "pair": (torch.arange(4), [torch.ones(4, 2)]),
        "scale": torch.tensor(2.0),
        "flag": True,
    }
    made = first_rows(example, rows)
    assert torch.equal(made["x"], example["x"][:rows])
    assert (len(made["pair"][0]), made["pair"][1][0].shape) == (rows, (rows, 2))
    assert (made["scale"], made["flag"]) == (2.0, True)
