"""Longer inputs for the proof, by their shapes: which dimension holds tokens is found from shapes alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.longer import _Bounds, _targets, longer, position_limit, within_bounds


def ids(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % 7


def shapes(example: Any, limit: int | None = None) -> list[list[Any]]:
    return [[each.shape if isinstance(each, Tensor) else {k: tuple(v.shape) for k, v in each.items()} for each in choices]
            for choices in longer(example, limit)]  # fmt: skip


def first(example: Any) -> Any:
    return longer(example)[0][0]


@pytest.mark.parametrize(("length", "expected"), [
    (2, (64, 8, 4, 3)), (8, (64, 32, 16, 10)), (33, (66, 132, 66, 42)), (100, (200, 400, 200, 125)),
])  # fmt: skip
def test_lengths_to_try(length: int, expected: tuple[int, ...]) -> None:
    assert _targets(length) == expected


@pytest.mark.parametrize(("limit", "lengths"), [
    (None, [64, 32, 16, 10]), (20, [20, 16, 10]), (12, [12, 10]), (9, [9]), (8, []), (4, []),
])  # fmt: skip
def test_every_length_with_one_row_and_with_all(limit: int | None, lengths: list[int]) -> None:
    expected = [(rows, length) for length in lengths for rows in (1, 2)]
    assert shapes(ids(2, 8), limit) == ([expected] if expected else [])


@pytest.mark.parametrize(("length", "longest"), [(1, 0), (2, 64), (4096, 16384), (4097, 0)])
def test_what_is_one_token_or_very_long_stays(length: int, longest: int) -> None:
    found = shapes(ids(1, length))
    assert max((shape[1] for choices in found for shape in choices), default=0) == longest


def test_features_may_have_their_tokens_first() -> None:
    by_second, by_first = shapes(torch.ones(2, 8, 5))
    assert by_second == [(rows, length, 5) for length in (64, 32, 16, 10) for rows in (1, 2)]
    assert by_first == [(length, rows, 5) for length in (64, 8, 4, 3) for rows in (1, 8)]


def test_features_as_wide_as_they_are_long() -> None:
    assert shapes(torch.ones(2, 8, 8))[0][0] == (1, 64, 8)


def test_contents_are_repeated() -> None:
    example = {"input_ids": ids(2, 5), "inputs_embeds": torch.randn(2, 5, 3)}
    found = longer(example)[0][1]
    for name, value in example.items():
        for start in (0, 5, 60):
            assert torch.equal(found[name][:, start : start + 4], value[:, :4])


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("attention_mask", torch.ones(3, 8, 8), (1, 64, 64)),  # a mask for pairs of tokens of every example
    ("attention_mask", torch.ones(3, 1, 8, 8), (1, 1, 64, 64)),
    ("attention_bias", torch.ones(3, 1, 8, 8), (1, 1, 64, 64)),
    ("mask", torch.ones(8, 8), (64, 64)),
    ("bias", torch.ones(5, 5), (5, 5)),  # square, but not of the tokens
    ("pixel_values", torch.ones(3, 3, 8, 8), (1, 3, 8, 8)),
    ("bbox", torch.ones(3, 8, 4, dtype=torch.long), (1, 64, 4)),
    ("cells", torch.ones(3, 8, 8, 1, dtype=torch.long), (1, 64, 64, 1)),
    ("labels", torch.ones(3), (1,)),
    ("sizes", torch.ones(4), (4,)),
    ("temperature", torch.tensor(2.0), ()),
    ("more_embeds", torch.ones(3, 8, 5), (1, 64, 5)),
])  # fmt: skip
def test_what_comes_with_the_tokens(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    assert tuple(first({"input_ids": ids(3, 8), name: value})[name].shape) == expected


def test_a_square_of_ids_is_no_mask() -> None:
    found = first({"input_ids": ids(8, 8), "token_type_ids": ids(8, 8)})
    assert found["input_ids"].shape == found["token_type_ids"].shape == (1, 64)
    assert tuple(first({"inputs_embeds": torch.ones(5, 8, 2), "bias": torch.ones(5, 5)})["bias"].shape) == (1, 5)
    assert first((ids(8, 8),))[0].shape == (1, 64)


def test_no_added_token_is_padding_but_other_masks_stay_what_they_are() -> None:
    zeros = torch.zeros(3, 8, dtype=torch.long)
    found = first({
        "input_ids": ids(3, 8), "attention_mask": zeros, "decoder_attention_mask": zeros, "special_mask": zeros, "more_ids": zeros,
        "float_attention_mask": zeros.float(),
    })  # fmt: skip
    assert found["attention_mask"].all()
    assert found["decoder_attention_mask"].all()
    assert not found["special_mask"].any()
    assert not found["more_ids"].any()
    assert not found["float_attention_mask"].any()
    square = first({"input_ids": ids(3, 8), "attention_mask": torch.zeros(8, 8, dtype=torch.long)})["attention_mask"]
    assert not square.any()


def test_two_sequences_grow_together() -> None:
    found = shapes({"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 5)})[0]
    assert [(each["input_ids"][1], each["decoder_input_ids"][1]) for each in found[::2]] == [
        (64, 64), (36, 20), (18, 10), (12, 7),
    ]  # fmt: skip


def test_what_holds_tokens_is_found_by_its_name_or_its_shape() -> None:
    assert [s["inputs_embeds"] for s in shapes({"inputs_embeds": torch.ones(2, 8, 3)})[1][:2]] == [
        (64, 1, 3),
        (64, 8, 3),
    ]
    assert [s["inputs_embeds"] for s in shapes({"ids": ids(2, 8), "inputs_embeds": torch.ones(2, 8, 3)})[1][:1]] == [
        (64, 1, 3)
    ]
    assert first({"input_ids": [1, 2], "other": ids(2, 8)})["other"].shape == (1, 64)  # no tensor of that name
    assert first({"pixel_mask": ids(2, 6), "other": ids(2, 8)})["other"].shape == (1, 64)
    assert first({"pixel_mask": ids(2, 6), "other": ids(2, 8)})["pixel_mask"].shape == (1, 6)
    assert first((torch.ones(2, 8, dtype=torch.bool), ids(2, 8)))[0].shape == (1, 64)
    for none in (
        {"input_ids": ids(8)},
        (torch.ones(2, 8, dtype=torch.bool),),
        ids(0, 8),
        ids(2, 3, 4, 5),
        {"flag": True},
    ):
        assert longer(none) == []
    assert longer((torch.ones(2, 3, 8, 8), ids(2, 8))) == []  # images


def test_containers_stay_what_they_are() -> None:
    kept = object()
    found = first({"input_ids": ids(2, 8), "pair": (ids(2, 8), [ids(2, 8)]), "inner": {"x": ids(2, 8)}, "kept": kept})
    assert isinstance(found["pair"], tuple)
    assert isinstance(found["pair"][1], list)
    assert found["pair"][0].shape == found["pair"][1][0].shape == found["inner"]["x"].shape == (1, 64)
    assert found["kept"] is kept


@pytest.mark.parametrize(("fields", "limit"), [
    ({"max_position_embeddings": 20, "hidden_size": 8}, 20), ({"max_position_embeddings": 2}, 2), ({"max_position_embeddings": 1}, None),
    ({"max_position_embeddings": 30, "n_positions": 25}, 25), ({"max_position_embeddings": True}, None),
    ({"max_position_embeddings": 9.5}, None), ({}, None),
])  # fmt: skip
def test_the_least_limit_of_a_config(fields: dict[str, Any], limit: int | None) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(**fields))
    assert position_limit(model) == limit


def test_indexes_are_checked_where_the_device_does_not() -> None:
    table, wrong = torch.ones(5, 2), torch.tensor([5])
    with within_bounds(nn.Linear(2, 2)), pytest.raises(IndexError) as by_torch:
        F.embedding(wrong, table)
    assert "5 entries" not in str(by_torch.value)
    with (
        within_bounds(nn.Linear(2, 2, device="meta")),
        pytest.raises(IndexError, match="index 5 is out of range for 5"),
    ):
        F.embedding(wrong, table)


def test_only_what_is_out_of_range_is_refused() -> None:
    table = torch.randn(5, 3)
    with _Bounds():
        for right in ([0, 4], [-5, 4], []):
            assert len(table[torch.tensor(right, dtype=torch.long)]) == len(right)
        assert table[torch.ones(5, dtype=torch.bool)].shape == (5, 3)
        with pytest.raises(IndexError, match="index -6 is"):
            table[torch.tensor([-6, 2])]
        with pytest.raises(IndexError, match="index 3 is out of range for 3"):
            table.gather(1, torch.full((5, 1), 3))
        with pytest.raises(IndexError, match="index 4 is out of range for 3"):
            table.index_select(1, torch.tensor([4]))
        with pytest.raises(IndexError, match="index 3 is out of range for 3"):
            table[:, torch.tensor([3])]
