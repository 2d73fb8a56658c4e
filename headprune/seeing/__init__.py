"""Attention weights of any traced model, and a profile of each head: how it attends, in figures and in words.

`profile_heads` makes one pass over the data and, for decoders, one over repeated random tokens. Rules derive a head's role from its
figures; the first rule that holds decides. The thresholds are the papers' where they give one; docs/heads.md has the table.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headprune.arguments import layers_for, listed
from headprune.attention import AttentionLayer, Layers
from headprune.batches import Rows, nonempty
from headprune.errors import HeadPruneError
from headprune.inputs import (
    Example,
    check_model,
    inputs_of,
    is_encoder_decoder,
    positions_of,
    vocabulary_size,
    without_labels,
)
from headprune.pruned import ghosts
from headprune.running import quiet
from headprune.seeing.maps import Weights, attention_weights, collect, collect_by_example, on_device, rows_of
from headprune.seeing.sums import (
    REACH,
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

HALF = 0.5  # of the attention: Clark et al. (2019), section 3
POINTS = 0.9  # of the queries: Voita et al. (2019), section 5.1
COPIES = 0.4  # of the attention on repeated random tokens; ours
EVEN = 0.9  # of the largest possible entropy; Clark's criterion (at most 10 % of the attention per token) depends on a text's length
NEAR = 0.5  # of the distance of even attention; ours
MIXED = "mixed"
UNKNOWN = "unknown"
_FEW = 20  # a figure that only some queries have needs at least this many of them


@dataclass(frozen=True)
class HeadProfile:
    """How one head attends: means over queries that are real tokens, not padding.

    A share is the part of a query's attention (its weights sum to 1) that goes to some keys, 0 to 1. None means that the layer
    cannot have this figure: cross-attention has no previous token, an image no separator.

    Attributes:
        queries: Number of queries that the means are over.
        entropy: Entropy of a query's weights, in nats.
        evenness: Entropy relative to the largest possible, ln(keys that the query may attend to); 1 means uniform attention.
        largest: A query's largest weight.
        distance: Attention-weighted distance from the query to its keys, in tokens, or for images in patches (Euclidean).
        reach: Distance relative to that of uniform attention over the visible keys.
        previous, next, itself: Shares of the keys at -1, +1 and 0 from the query.
        first: Share of the first real token.
        separator: Share of the separators, such as [SEP]; None if too few queries see one (fewer than 20, and fewer than half).
        same: Share of other positions with the query's own token, over queries that see such a position; None if fewer than 20 do.
        sink: Share of keys that are no tokens, such as a learned attention sink.
        rare: Share of queries whose largest weight is on one of their example's two rarest tokens, by frequency in the data.
        rare_chance: The same share if the largest weight were at a random token.
        position, pointing: The most frequent relative position of the largest weight, -8 to 8 tokens from the query, and the share of
            queries that have it there.
        induction, duplicate: On random tokens repeated once, the shares of the key after the query's first occurrence, and of that
            occurrence itself. Only for causal language models.
        role: In words, by the rules of `headprune.seeing`.
        because: The figure that justifies the role, in words.
        clarity: That figure, 0 to 1; among heads with the same role, the head with the largest shows it most clearly.
    """

    queries: int
    entropy: float
    evenness: float | None = None
    largest: float = 0.0
    distance: float | None = None
    reach: float | None = None
    previous: float | None = None
    next: float | None = None
    itself: float | None = None
    first: float | None = None
    separator: float | None = None
    same: float | None = None
    sink: float | None = None
    rare: float | None = None
    rare_chance: float | None = None
    position: int | None = None
    pointing: float | None = None
    induction: float | None = None
    duplicate: float | None = None
    role: str = ""
    because: str = ""
    clarity: float = 0.0

    def __repr__(self) -> str:
        return f"HeadProfile({self.role or 'no role'}: {self.because or f'entropy {self.entropy:.2f} nats'})"


class HeadProfiles(dict[str, list[HeadProfile]]):
    """``{layer_name: [profile of head 0, …]}`` with a short repr.

    Attributes:
        layers: Layer name -> index.
        unseen: Layer name -> why the layer's weights cannot be seen.
        examples, tokens: Number of examples, and of the queries that the profiles are means over (the layers' maximum).
        repeated: Number of sequences of random tokens that induction was measured on.
        grid: The grid of the images' patches, if the inputs are images.
    """

    def __init__(
        self, profiles: Mapping[str, list[HeadProfile]], layers: Mapping[str, int], unseen: Mapping[str, str] | None = None,
        examples: int = 0, tokens: int = 0, repeated: int = 0, grid: Grid | None = None,
    ) -> None:  # fmt: skip
        super().__init__(profiles)
        self.layers, self.unseen = dict(layers), dict(unseen or {})
        self.examples, self.tokens, self.repeated, self.grid = examples, tokens, repeated, grid

    def top(self, count: int = 10) -> list[tuple[str, HeadProfile]]:
        """The heads that show their role most clearly: (label such as ``"L3.H7"``, profile)."""
        every = [(f"L{self.layers[name]}.H{h}", p) for name, heads in self.items() for h, p in enumerate(heads)]
        return sorted(every, key=lambda one: -one[1].clarity)[:count]

    def __repr__(self) -> str:
        roles = Counter(profile.role for heads in self.values() for profile in heads)
        counts = ", ".join(f"{count} {role}" for role, count in roles.most_common())
        return f"HeadProfiles({roles.total()} heads in {len(self)} layers: {counts})"

    def _repr_html_(self) -> str:
        """The notebook's table: the heads that show their role most clearly."""
        cells = ((label, html.escape(p.role), html.escape(p.because)) for label, p in self.top())
        rows = (f"<tr><th>{label}</th><td>{role}</td><td>{because}</td></tr>" for label, role, because in cells)
        return f"<table><caption>{html.escape(repr(self))}</caption>{''.join(rows)}</table>"


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
    unseen = {layer.name: layer.reason for layer in layers if layer.name in ghosts(model)}  # what is left is no head
    live = [layer for layer in layers if layer.name not in unseen]
    with patch_grids(model) as grid_of:
        positions = collect(model, live, example, 1, lambda weights: weights.shape[2], unseen)
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
    most = positions_of(model)
    length = _TOKENS if most is None else min(_TOKENS, (most - begun) // 2)
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


# -- roles ---------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A role, and the condition for it.

    Attributes:
        role: The role in words.
        short: An abbreviation of at most five letters.
        figure: The figure that justifies the role, 0 to 1: a field of `HeadProfile`, or one of `_evidence`.
        least: Threshold for the figure.
        because: Template of the figure in words.
    """

    role: str
    short: str
    figure: str
    least: float
    because: str


RULES = (
    # Olsson et al. (2022), arXiv:2209.11895; Wang et al. (2022), arXiv:2211.00593, on Olsson's sequences
    Rule("induction", "ind", "induction", COPIES, "on repeated random tokens, {share} goes to what followed the token before"),
    Rule("duplicate token", "dup", "duplicate", COPIES, "on repeated random tokens, {share} goes to the token's earlier occurrence"),
    # Clark et al. (2019), arXiv:1906.04341, section 3; Voita et al. (2019), arXiv:1905.09418, section 5
    Rule("previous token", "prev", "previous", HALF, "{share} goes to the previous token"),
    Rule("previous token", "prev", "points back", POINTS, "its largest weight is on the previous token for {share} of queries"),
    Rule("next token", "next", "next", HALF, "{share} goes to the next token"),
    Rule("next token", "next", "points on", POINTS, "its largest weight is on the next token for {share} of queries"),
    Rule("itself", "self", "itself", HALF, "{share} goes to the position itself"),
    Rule("relative position", "pos", "pointing", POINTS, "its largest weight is {place} for {share} of queries"),  # Voita et al.
    Rule("same token", "same", "same", HALF, "{share} goes to other positions with the same token, where there are any"),
    Rule("sink", "sink", "sink", HALF, "{share} goes to a key that is no token"),  # Xiao et al. (2023), arXiv:2309.17453
    Rule("separator", "sep", "separator", HALF, "{share} goes to separators"),  # Clark et al.
    Rule("first token", "first", "first", HALF, "{share} goes to the first token"),  # Clark et al.; Xiao et al.
    Rule(  # Voita et al., section 5.3
        "rare words", "rare", "rare, not by chance", HALF,
        "its largest weight is on one of the two rarest tokens for {share} of queries, by chance {chance}",
    ),
    Rule("broad", "broad", "evenness", EVEN, "its entropy is {share} of the largest possible"),  # after Clark et al., section 3.3
    Rule(  # after Dosovitskiy et al. (2020), arXiv:2010.11929, figure 7
        "near", "near", "nearness", 1 - NEAR,
        "it looks {distance:.1f} positions away on average, {reach} of what even attention would",
    ),
)  # fmt: skip

_SHARES = {
    "previous": "the previous token", "next": "the next token", "itself": "the position itself", "first": "the first token",
    "separator": "separators", "sink": "a sink",
}  # fmt: skip


def profile_of(sums: Sums, head: int) -> HeadProfile:
    """A head's figures, its role, and the figure that justifies it."""
    pairs = {figure: pair[:, head].tolist() for figure, pair in sums.items()}
    queries = int(pairs.get("entropy", (0, 0))[1])
    least = {"separator": max(min(_FEW, queries / 2) - 0.5, 0), "same": _FEW - 0.5}
    means: dict[str, Any] = {f: total / over for f, (total, over) in pairs.items() if over > least.get(f, 0)}
    even = means.pop("even", None)
    reach = means["distance"] / even if "distance" in means and even else None
    at = {step: means.pop(f"at {step}") for step in range(-REACH, REACH + 1) if f"at {step}" in means}
    if any(at.values()):
        means["position"] = max(at, key=lambda step: at[step])
        means["pointing"] = at[means["position"]]
    return _with_role(HeadProfile(queries, **{"entropy": 0.0, "evenness": 0.0, **means}, reach=reach))


def _with_role(profile: HeadProfile) -> HeadProfile:
    """A head's profile with its role and the figure that justifies it."""
    if not profile.queries:
        return replace(profile, role=UNKNOWN, because="no query in the data sees two keys")
    evidence = _evidence(profile)
    for rule in RULES:
        if (share := evidence[rule.figure]) is not None and share >= rule.least:
            return replace(profile, role=rule.role, clarity=share, because=_because(rule, share, profile))
    shares = [(share, words) for figure, words in _SHARES.items() if (share := evidence[figure]) is not None]
    most = sorted(shares, reverse=True)[:2]
    if not most:
        return replace(profile, role=MIXED, because=f"its largest weight is {percent(profile.largest)} on average")
    where = " and ".join(f"{percent(share)} to {words}" for share, words in most)
    return replace(profile, role=MIXED, clarity=most[0][0], because=f"no rule holds: {where}, the rest elsewhere")


def _evidence(profile: HeadProfile) -> dict[str, float | None]:
    """The figures that rules use, by name: the profile's, and some derived from them."""
    likelier = profile.rare is not None and profile.rare >= 2 * (profile.rare_chance or 0.0)
    return vars(profile) | {
        "points back": profile.pointing if profile.position == -1 else None,
        "points on": profile.pointing if profile.position == 1 else None,
        "rare, not by chance": profile.rare if likelier else None,
        "nearness": None if profile.reach is None else 1 - profile.reach,
    }


def _because(rule: Rule, share: float, profile: HeadProfile) -> str:
    """The figure that justifies a role, in words."""
    step = profile.position or 0
    return rule.because.format(
        share=percent(share),
        place=f"{abs(step)} tokens {'on' if step > 0 else 'back'}" if step else "on the position itself",
        chance=percent(profile.rare_chance or 0.0),
        distance=profile.distance or 0.0,
        reach=percent(profile.reach or 0.0),
    )


def percent(share: float) -> str:
    """A share as text; with a decimal, so that a share just below a threshold does not look as if it reached it.

    >>> percent(0.714), percent(0.496), percent(1.0)
    ('71.4 %', '49.6 %', '100 %')
    """
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")
