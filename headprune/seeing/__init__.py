"""Attention weights of any traced model, and a profile of each head: how it attends, in figures and in words.

`profile_heads` makes one pass over the data and, for decoders, one over repeated random tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from headprune.arguments import layers_for, listed
from headprune.attention import AttentionLayer, Layers
from headprune.batches import Rows, nonempty
from headprune.errors import HeadPruneError
from headprune.inputs import Example, check_model, inputs_of, is_encoder_decoder, vocabulary_size, without_labels
from headprune.running import quiet
from headprune.seeing.maps import Weights, attention_weights, collect, collect_by_example, on_device, rows_of
from headprune.seeing.roles import HeadProfile, HeadProfiles, profile_of
from headprune.seeing.sums import (
    Grid,
    LayerInput,
    Sums,
    TokenSequence,
    added,
    is_image,
    patch_grids,
    sequences_of,
    sums_of,
)

__all__ = ["HeadProfile", "attention_weights", "profile_heads"]

REPEATED = 4  # sequences of random tokens
_TOKENS = 50  # in each, before the repetition
_FEWEST = 8


def profile_heads(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[AttentionLayer] | None = None,
    *,
    separators: Iterable[int] | None = None,
    seed: int = 0,
) -> HeadProfiles:
    """Measure how every head attends over data, and name its role: previous-token head, induction head …

    One forward pass per batch. Only sums are kept, and the weights of a long input are computed in blocks, so memory does not grow
    with the square of its length. Padding counts neither as query nor as key.

    Args:
        model: Any model that headprune traces, with any attention kernel; it does not change.
        batches: A few dozen examples are enough for most figures. Labels are ignored.
        layers: Profile only these layers.
        separators: Ids of the tokens that separate texts; by default the config's ``sep_token_id``.
        seed: For the random tokens that induction is measured on.

    Returns:
        ``{layer_name: [profile of head 0, …]}``; [] for a layer whose weights cannot be seen. See `headprune.HeadProfile`. ``.top(10)``
        gives the heads that show their role most clearly.

    Raises:
        HeadPruneError: No batches, the model does not run on one, or no layer's weights can be seen.
    """
    check_model(model)
    given = nonempty(listed(batches), "look at")
    inputs = [on_device(model, without_labels(model, inputs_of(model, batch))) for batch in given]
    layers = layers_for(model, layers, inputs[0])
    ids = [getattr(getattr(model, "config", None), "sep_token_id", None)] if separators is None else separators
    marks = torch.tensor([i for i in ids if isinstance(i, int)], dtype=torch.long)
    with quiet(model), torch.no_grad():
        rows = rows_of(model, inputs)
        seen, unseen, grid = _seen_layers(model, layers, rows.take(inputs[0], [0]))
        texts = [next(iter(sequences_of(model, batch, rows).values())) for batch in inputs]  # of a pair the source
        sums = _sums(model, seen, inputs, rows, grid=grid, separators=marks, frequencies=_frequencies(texts))
        repeated = _repeated_sums(model, seen, texts, rows, seed)
        for name, more in repeated.items():
            sums[name] = added(sums[name], more)
    heads = {a.name: [profile_of(sums[a.name], h) for h in range(a.num_heads)] for a in seen}
    return HeadProfiles(
        {layer.name: heads.get(layer.name, []) for layer in layers},
        {layer.name: layer.index for layer in layers},
        unseen,
        examples=sum(map(rows.size, inputs)),
        tokens=max(profiles[0].queries for profiles in heads.values()),
        repeated=REPEATED if repeated else 0,
        grid=grid,
    )


def _sums(model: nn.Module, layers: Layers, inputs: list[Example], rows: Rows, **known: Any) -> dict[str, Sums]:
    """The sums over all queries, by layer name; ``known`` are the fields of `LayerInput` that all batches have in common."""

    def keep(batch: Example, weights: Weights) -> Sums:
        return sums_of(weights, LayerInput(sequences_of(model, batch, rows), is_image(batch), **known))

    runs = [run for batch in inputs for run in collect_by_example(model, layers, batch, rows, keep)]
    return {layer.name: reduce(added, (call for run in runs for call in run[layer.name]), {}) for layer in layers}


def _seen_layers(
    model: nn.Module, layers: Layers, example: Example
) -> tuple[list[AttentionLayer], dict[str, str], Grid | None]:
    """The layers whose weights can be seen in one example; for the others, name -> reason; and for an image, the grid of its patches.

    Raises:
        HeadPruneError: No layer's weights can be seen.
    """
    unseen: dict[str, str] = {}
    with patch_grids(model) as grid_of:
        positions = collect(model, layers, example, 1, lambda weights: weights.shape[2], unseen)
    seen = [layer for layer in layers if layer.name not in unseen]
    if not seen:
        raise HeadPruneError(next(iter(unseen.values()), "The model has no attention layer."), "Name other layers.")
    return seen, unseen, grid_of(positions[seen[0].name][0]) if is_image(example) else None


def _frequencies(texts: Sequence[TokenSequence]) -> Tensor | None:
    """How often each token occurs in the texts, by id; None without token ids."""
    tokens = [t.ids if t.real is None else t.ids[t.real] for t in texts if t.ids is not None]
    return torch.bincount(torch.cat([ids.flatten() for ids in tokens]).cpu()) if tokens else None


def _repeated_sums(
    model: nn.Module, layers: Layers, texts: Sequence[TokenSequence], rows: Rows, seed: int
) -> dict[str, Sums]:
    """The sums for induction and duplicate tokens, by layer, of a causal language model; {} for any other model.

    The input is random tokens, repeated once. Induction is the "prefix matching" of Olsson et al. (2022, arXiv:2209.11895): a head's
    attention from a token to the token that followed its first occurrence.
    """
    decoders = [layer for layer in layers if layer.kind == "decoder"]
    ids = [text.ids for text in texts if text.ids is not None]
    vocabulary = vocabulary_size(model)
    if not decoders or not ids or is_encoder_decoder(model) or vocabulary < 2 * _TOKENS:
        return {}
    # If all texts begin with one token, such as <s>, so does this input.
    firsts = torch.cat([i[:, 0] for i in ids])
    begun = len(firsts) > 1 and bool((firsts == firsts[0]).all())
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = min(_TOKENS, (most - begun) // 2) if isinstance(most, int) else _TOKENS
    if length < _FEWEST:
        return {}
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(vocabulary, generator=generator)[:length] for _ in range(REPEATED)])
    tokens = torch.cat([firsts[:1].cpu().expand(REPEATED, begun), drawn, drawn], dim=1).to(firsts.device)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    try:
        return _sums(model, decoders, [given], rows, repeated=length)
    except HeadPruneError:  # the model needs other inputs too, or accepts fewer tokens
        return {}
