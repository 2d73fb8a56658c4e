"""Mixtures of the examples, which repair is fitted to as well, or in their place.

A mixture is the first half of one text and the second half of another, or an image with a little of another one in it.
A model was often trained on its calibration examples and overfits them; its answers to mixtures are more like those to
unseen examples. So of many texts, mixtures are fitted to in their place; of few, both, since more is better there
(`ENOUGH`). A repeated last step is fitted to mixtures of other pairs each time, of texts to them alone: what a step
has left of the errors that it was fitted to says little of others.

(Like CutMix, Yun et al. 2019, arXiv:1905.04899, but for texts, and mixup, Zhang et al. 2018, arXiv:1710.09412; the
dense model gives the targets, so no labels are mixed. In our benchmark, the fits of single layers gain nothing by
images' mixtures, so the last step alone has them; swapping halves of images made repair worse, and a language model,
not trained on its examples, did not change.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headprune.batches import Rows
from headprune.inputs import LABELS, by_path, map_tensors

ENOUGH = 1024  # to fit to: examples and mixtures of them
BLOCK = 4  # examples that are mixed only with one another, so that they can be left out together
_SHARE = 0.2  # of the other image in a mixture
_TEXT = {"input_ids", "attention_mask", "token_type_ids"}


@dataclass(frozen=True)
class Mixed:
    """A batch of mixtures.

    Attributes:
        inputs: In the form of the examples' batches, without labels.
        firsts: Numbers of the examples that give the first halves, ``[mixtures]``.
        shift: How far apart the two examples are in their block.
    """

    inputs: Any
    firsts: Tensor
    shift: int


def blocks_of(examples: int, draw: int = 0) -> Tensor:
    """The number of every example's block, ``[examples]``; all of a block have one parity, so they are in one fold.

    Args:
        draw: 0 for blocks of neighbours; every other number has blocks of its own, drawn at random.
    """
    place, generator = torch.arange(examples), torch.Generator().manual_seed(draw)
    for parity in (0, 1) if draw else ():
        own = place[parity::2]
        place[parity::2] = own[torch.randperm(len(own), generator=generator)]
    return place // 2 // BLOCK * 2 + place % 2


def mixes_only(examples: int) -> bool:
    """Whether there are enough examples to fit to mixtures of them alone."""
    return 2 * examples > ENOUGH


def mixtures_of_each(examples: int, draw: int = 0) -> int:
    """How many mixtures are made of each of so many texts; those of the first draw stand beside them, later ones alone."""
    return 2 if (2 if draw else 3) * examples <= ENOUGH else 1


def mixed_texts(batches: Sequence[Any], rows: Rows, blocks: Tensor, times: int, padding: int) -> list[Mixed]:
    """Mix every text's first half with the second half of each of the next ``times`` texts in its block.

    Both are cut in the middle of the shorter one. Which texts are mixed depends on their numbers alone, not on batches.

    Args:
        batches: Calibration examples, with labels or without.
        rows: How examples lie in the batches.
        blocks: `blocks_of` the examples.
        padding: The token to pad with.

    Returns:
        Batches on the CPU, shift by shift, one for each batch of first texts; empty if it is not known how to cut.
    """
    texts: list[dict[str, Tensor]] = []
    for batch in batches:
        cut = _texts(batch, rows)
        if cut is None:
            return []
        texts += cut
    masks = [batch["attention_mask"] for batch in batches if "attention_mask" in batch]
    side = "left" if any(bool((mask[:, 0] == 0).any()) for mask in masks) else "right"
    result = []

    def padded(name: str, parts: list[Tensor]) -> Tensor:
        value = padding if name == "input_ids" else 0
        return pad_sequence(parts, batch_first=True, padding_value=value, padding_side=side)

    for shift, firsts, others in _pairs(batches, rows, blocks, times):
        mixed = [_mixed(texts[one], texts[other]) for one, other in zip(firsts, others, strict=True)]
        inputs = {name: padded(name, [text[name] for text in mixed]) for name in mixed[0]}
        result.append(Mixed(inputs, torch.tensor(firsts), shift))
    return result


def mixed_images(batches: Sequence[Any], rows: Rows, blocks: Tensor) -> list[Mixed]:
    """Blend every image with a little of the next one in its block; none of many, since they are enough.

    Args:
        batches: Calibration examples, with labels or without.
        rows: How examples lie in the batches.
        blocks: `blocks_of` the examples.

    Returns:
        Batches on the examples' device, one for each batch; empty if they are not images of one size alone.
    """
    inputs = [_unlabelled(batch) for batch in batches]
    images = [image for each in inputs for image in by_path(each).items()]
    if len(images) != len(batches) or len({(path, own.shape[1:]) for path, own in images}) > 1:
        return []
    (path, first), every = images[0], [own for _, own in images]
    if first.ndim != 4 or not all(own.is_floating_point() for own in every) or rows.dim(path) != 0:
        return []
    if mixes_only(sum(map(len, every))):
        return []
    whole = torch.cat(every)

    def blended(firsts: list[int], others: list[int]) -> Any:
        return map_tensors(inputs[0], lambda _: torch.lerp(whole[firsts], whole[others], _SHARE))

    return [
        Mixed(blended(firsts, others), torch.tensor(firsts), shift)
        for shift, firsts, others in _pairs(batches, rows, blocks, 1)
    ]


def _unlabelled(batch: Any) -> Any:
    """A batch in the same form, without labels."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name not in LABELS}
    return batch[:1] if isinstance(batch, tuple | list) else batch


def _pairs(
    batches: Sequence[Any], rows: Rows, blocks: Tensor, times: int
) -> Iterator[tuple[int, list[int], list[int]]]:
    """The numbers of the examples to mix, shift by shift and batch by batch: the shift, the first ones, the others."""
    block = blocks.tolist()
    members: dict[int, list[int]] = {}
    for number, of in enumerate(block):
        members.setdefault(of, []).append(number)
    for shift in range(1, times + 1):
        end = 0
        for batch in batches:
            first, end = end, end + rows.size(batch)
            firsts = [number for number in range(first, end) if len(members[block[number]]) > shift]
            near = [members[block[number]] for number in firsts]
            others = [own[(own.index(n) + shift) % len(own)] for n, own in zip(firsts, near, strict=True)]
            if firsts:
                yield shift, firsts, others


def _texts(batch: Any, rows: Rows) -> list[dict[str, Tensor]] | None:
    """The tokens of every example without padding, by input name; None if the batch is not just token ids and masks."""
    if not isinstance(batch, Mapping):
        return None
    inputs = {k: v for k, v in batch.items() if k not in LABELS}
    if not all(isinstance(v, Tensor) and v.ndim == 2 for v in inputs.values()):
        return None
    if "input_ids" not in inputs or not inputs.keys() <= _TEXT or len({v.shape for v in inputs.values()}) > 1:
        return None
    if any(rows.table(inputs, name) is None for name in inputs):
        return None
    inputs = {name: value.cpu() for name, value in inputs.items()}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) != 0
    return [{name: value[i, real[i]] for name, value in inputs.items()} for i in range(len(real))]


def _mixed(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    cut = min(len(one["input_ids"]), len(other["input_ids"])) // 2
    return {name: torch.cat([one[name][:cut], other[name][cut:]]) for name in one}
