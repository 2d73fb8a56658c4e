"""Which integers of a module count heads, and what they become: one that only looks like a head count must stay."""

from typing import Any

import pytest

from headprune.attention import AttentionLayer
from headprune.surgery.features import Counts, groups_left

PLAIN = AttentionLayer("a", 0, "encoder", 12, 12, 64)
GROUPED = AttentionLayer("a", 0, "decoder", 12, 4, 64, tuple(tuple(range(3 * g, 3 * g + 3)) for g in range(4)))


def after(layer: AttentionLayer, left: tuple[int, int], fields: dict[str, Any]) -> dict[str, int]:
    counts = Counts(layer, *left, is_width=lambda name: name != "d_model", beside=False)
    return counts.changed(fields)


@pytest.mark.parametrize(("field", "before", "now"), [
    ("num_heads", 12, 5), ("n_head", 12, 5), ("num_attention_heads", 12, 5), ("h", 12, 5), ("heads", 12, 5),
    ("all_head_size", 768, 320), ("embed_dim", 768, 320), ("inner_dim", 768, 320),
    # Numbers that are as large by chance, or that count something else.
    ("head_dim", 64, None), ("attention_head_size", 64, None), ("num_layers", 12, None), ("max_position_embeddings", 768, None),
    ("window_size", 12, None), ("d_model", 768, None), ("num_heads", 8, None), ("dropout", 0.1, None), ("is_causal", True, None),
    ("_num_heads", 12, None),
])  # fmt: skip
def test_plain_attention_with_5_of_12_heads(field: str, before: Any, now: int | None) -> None:
    assert after(PLAIN, (5, 5), {field: before}) == ({} if now is None else {field: now})


@pytest.mark.parametrize(("field", "before", "now"), [
    ("num_heads", 12, 6), ("num_key_value_heads", 4, 2), ("n_kv_heads", 4, 2), ("num_key_value_groups", 3, None),
    ("kv_dim", 256, 128), ("hidden_size", 768, 384), ("value_width", 256, 128),
    ("num_layers", 4, None), ("kv_dim", 300, None), ("inner_dim", 256, None), ("inner_dim", 800, None), ("num_kv_heads", 5, None),
    ("num_key_value_groups", 5, None), ("num_kv_heads", 3, None), ("num_heads", 4, None),
])  # fmt: skip
def test_two_whole_groups_go(field: str, before: int, now: int | None) -> None:
    assert after(GROUPED, (6, 2), {field: before}) == ({} if now is None else {field: now})


def test_a_head_of_every_group_goes() -> None:
    fields = {"num_heads": 12, "num_key_value_heads": 4, "num_key_value_groups": 3, "n_rep": 3}
    assert after(GROUPED, (8, 4), fields) == {"num_heads": 8, "num_key_value_groups": 2, "n_rep": 2}


def test_a_number_that_stays_hides_none_behind_it() -> None:
    fields = {"dropout": 0.1, "_num_heads": 12, "head_dim": 64, "max_length": 12, "num_heads": 12, "inner_dim": 768}
    assert after(PLAIN, (5, 5), fields) == {"num_heads": 5, "inner_dim": 320}


def test_a_module_beside_the_attention_calls_key_value_heads_its_heads() -> None:
    beside = Counts(GROUPED, 6, 2, is_width=lambda name: True, beside=True)
    assert beside.changed({"num_heads": 4, "n_head": 12, "heads": 5}) == {"num_heads": 2, "n_head": 6}


def test_a_layer_that_loses_all_its_heads() -> None:
    fields = {"num_heads": 12, "num_key_value_heads": 4, "num_key_value_groups": 3}
    assert after(GROUPED, (0, 0), fields) == {"num_heads": 0, "num_key_value_heads": 0, "num_key_value_groups": 1}


def test_groups_are_counted_while_they_have_a_head() -> None:
    assert groups_left(GROUPED, [0, 4, 5, 11]) == 3
    assert groups_left(GROUPED, []) == 0
    assert groups_left(PLAIN, [1, 2]) == 2
    assert groups_left(AttentionLayer("a", 0, "decoder", 12, 1, 64), [1, 2]) == 1  # all share one key/value head
