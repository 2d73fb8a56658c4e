"""How much the model's answers depend on every token: random projections of them, padding left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.batches import Rows
from headprune.divergence import gives_several, logits_of, part_of, real_tokens, regresses
from headprune.errors import HeadPruneError
from headprune.inputs import tensors


def probe_of(model: nn.Module, output: Any, batch: Any, first: int, rows: Rows, alone: int | None = None) -> Tensor:
    """A number whose gradient, squared, is on average the Fisher information of the answers to a batch.

    Args:
        output: The model's.
        first: The number of the batch's first example; noise goes by it.
        rows: How examples lie in the batch.
        alone: The only example whose answers are looked at; all, by default.
    """
    seeds = range(first, first + rows.size(batch))

    def drawn(like: Tensor) -> Tensor:
        mask = real_tokens(model, batch, "decoder", rows, like.shape[1]) if like.ndim > 2 else None
        found = noise(like, mask, seeds)
        if alone is not None and len(found) == len(seeds):
            found[torch.arange(len(found), device=found.device) != alone] = 0
        return found

    # A tensor without dimensions is a loss: it goes by the labels, and says nothing of single examples.
    logits, start = (part_of(output, name) for name in ("logits", "start_logits"))
    every = [t for t in tensors(output) if t.ndim and t.is_floating_point() and t.requires_grad]
    if not every and not any(isinstance(t, Tensor) and t.requires_grad for t in (logits, start)):
        raise HeadPruneError(
            "The model's answers do not depend on any head by what can be differentiated.",
            'Score by ablation, and search with strategy="one-shot".',
        )
    if start is not None:  # where an answer starts and ends: tokens are the classes, and padding is none
        chances = logits_of(output, batch if isinstance(batch, Mapping) else {}).log_softmax(-1)
        draws = drawn(chances.movedim(1, -1)).movedim(-1, 1)
    elif isinstance(logits, Tensor) and gives_several(model):  # each label is a yes or no of its own
        chance = widened(logits).detach().sigmoid()
        return (drawn(logits) * (chance * (1 - chance)).sqrt() * widened(logits)).sum()
    elif isinstance(logits, Tensor) and logits.shape[-1] > 1 and not regresses(model):
        chances = widened(logits).log_softmax(-1)
        draws = drawn(chances)
    else:
        chances = None
    if chances is not None:
        root = chances.detach().exp().sqrt()
        return (across(root, draws) * root * chances.masked_fill(root == 0, 0.0)).sum()
    return torch.stack([(drawn(widened(t)) * widened(t)).sum() for t in every]).sum()


def across(root: Tensor, draw: Tensor) -> Tensor:
    """Noise ``[..., classes]`` without its part along the square roots of the classes' probabilities, which would change nothing.

    The rest gets the length that it has on average. So with two classes nothing is left to chance but a sign.
    """
    rest = draw - root * (root * draw).sum(-1, keepdim=True)
    length = rest.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    classes = (draw != 0).sum(-1, keepdim=True)  # without padding
    scaled: Tensor = rest * ((classes - 1).clamp(min=0).to(rest).sqrt() / length)
    return scaled


def noise(like: Tensor, mask: Tensor | None, seeds: Sequence[int]) -> Tensor:
    """Random numbers ``[examples, ...]``: the same for an example in any batch, none at padding."""
    if not like.ndim or len(like) != len(seeds):
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(seeds[0])).to(like)
    found = torch.zeros(like.shape)
    places = None if mask is None else mask.cpu()  # at once: every copy waits for a GPU
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        if places is not None:
            real = places[row]
            found[row, real] = torch.randn(int(real.sum()), *like.shape[2:], generator=generator)
        else:
            found[row] = torch.randn(like.shape[1:], generator=generator)
    return found.to(like)


def widened(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
