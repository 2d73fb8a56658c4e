"""Mixtures of texts that repair is fitted to as well, against mixtures made one by one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headprune as hp
from tests.support import brute

LENGTHS = [12, 7, 9, 12, 4, 3, 12, 2, 10, 12, 11, 5, 6]


def texts(left: bool) -> dict[str, Tensor]:
    generator, places = torch.Generator().manual_seed(0), torch.arange(12)
    lengths = torch.tensor(LENGTHS)[:, None]
    real = places >= 12 - lengths if left else places < lengths
    ids = torch.randint(3, 100, real.shape, generator=generator)
    return {"input_ids": ids * real, "attention_mask": real.long()}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("size", [13, 5])
def test_the_first_half_of_one_and_the_second_of_another(size: int, left: bool) -> None:
    """Of the same block of four and the same fold; W_O is fitted to them too, on whichever side padding is."""
    model, _ = brute.classifier(2)
    layer, drop = hp.find_attention(model, texts(left))[0], {"bert.encoder.layer.0.attention.self": [1]}
    whole, seen = texts(left), list[dict[str, Tensor]]()
    batches = [brute.rows_of(whole, slice(i, i + size)) for i in range(0, 13, size)]
    model.register_forward_pre_hook(lambda module, args, given: seen.append(given), with_kwargs=True)
    choose = [brute.repeated(whole)]
    mended, done = brute.repaired(model, drop, *batches, choose=choose, ridge=0.1, values=False, answers=False)
    assert done.trials[0].kept

    def tokens(batch: dict[str, Tensor]) -> list[list[int]]:
        return [
            ids[real.bool()].tolist() for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]

    expected, known = {1: list[list[int]](), 2: list[list[int]]()}, tokens(whole)
    for shift, own in expected.items():
        for row, first in enumerate(known):
            block = [other for other in range(13) if other % 2 == row % 2 and other // 8 == row // 8]
            if len(block) > shift:
                second = known[block[(block.index(row) + shift) % len(block)]]
                half = min(len(first), len(second)) // 2
                own.append(first[:half] + second[half:])
    assert done.mixtures == len(expected[1]) + len(expected[2])
    mixed: list[dict[str, Tensor]] = []
    for given in seen:
        every = tokens(given)
        if all(text in expected[1] + expected[2] for text in every) and not any(map(given_is(given), mixed)):
            mixed.append(given)
            mask = given["attention_mask"].tolist()
            assert mask == [sorted(row, reverse=not left) for row in mask]
    assert [text for given in mixed for text in tokens(given)] == expected[1] + expected[2]
    kept, (old, bias) = brute.columns_of(layer, brute.kept_heads(layer, drop)), brute.output_of(model, layer)
    all_tokens = brute.tokens_of(model, [layer], [*batches, *mixed])[layer.name]
    own_tokens = replace(all_tokens, x=all_tokens.x[:, kept])
    weight, free = brute.ridge_regression(own_tokens, old[kept], bias, 0.1)  # type: ignore[arg-type]
    torch.testing.assert_close(brute.output_of(mended, layer)[0][kept], weight)
    torch.testing.assert_close(brute.output_of(mended, layer)[1], free)


def given_is(batch: dict[str, Tensor]) -> Any:
    return lambda other: (
        batch["input_ids"].shape == other["input_ids"].shape and torch.equal(batch["input_ids"], other["input_ids"])
    )


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
