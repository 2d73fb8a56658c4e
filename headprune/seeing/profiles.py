"""What every head does on data: one pass over it, and for decoders one over random tokens that repeat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.arguments import layers_for, listed
from headprune.attention import AttentionLayer
from headprune.batches import Rows, is_empty
from headprune.errors import HeadPruneError
from headprune.gates import RowsError
from headprune.inputs import Example, check_model, inputs_of, is_encoder_decoder, vocabulary_size, without_labels
from headprune.seeing.figures import HeadProfiles
from headprune.seeing.maps import Weights
from headprune.seeing.roles import with_role
from headprune.seeing.sequences import Grid, Sequences, finding_grid, grid_among, sequences_of
from headprune.seeing.sums import Scene, Sums
from headprune.seeing.weights import as_it_is, on_device, rows_of, together_or_singly, watched

REPEATED = 4  # sequences of random tokens
_TOKENS = 50  # in each, before they are repeated
_FEWEST = 8


def profile_heads(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[AttentionLayer] | None = None,
    *,
    separators: Iterable[int] | None = None,
    seed: int = 0,
) -> HeadProfiles:
    """How every head attends over data, in figures, and what that makes it: a head that looks at the previous token, an induction head …

    One forward pass a batch. Only sums are kept, and a long input's weights are seen in parts, so memory does not grow with the
    square of its length. Padding counts neither as query nor as key.

    Args:
        model: Any model that headprune traces, with any attention kernel; it is left as it was.
        batches: A few dozen examples are enough for most figures. Labels are not looked at.
        layers: Only these.
        separators: Ids of the tokens that separate texts; by default the config's ``sep_token_id``.
        seed: Of the random tokens that induction is measured on.

    Returns:
        ``{layer_name: [profile of head 0, …]}``; [] for a layer whose weights cannot be seen. See `headprune.HeadProfile`. ``.top(10)``
        gives the heads that show their role best, ``.plot()`` a picture of the roles.

    Raises:
        HeadPruneError: No batch; the model does not run on one; no layer's weights can be seen.
    """
    return Profiler(model, batches, layers, separators, seed).profiles()


class Profiler:
    """Profiles, and what they rest on.

    Attributes:
        layers: That are profiled, or were to be.
        unseen: Why the weights of a layer cannot be seen, by its name.
        examples, tokens: What was looked at; tokens are queries of the first layer that are no padding.
        repeated: Sequences of random tokens.
        grid: Of the images' patches, if the model sees images.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[Any], layers: Sequence[AttentionLayer] | None = None,
        separators: Iterable[int] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        check_model(model)
        self.model, self.seed = model, seed
        kept = [batch for batch in listed(batches) if not is_empty(batch)]
        if not kept:
            raise HeadPruneError("There are no examples to look at.", "Give at least one batch.")
        self.batches = [on_device(model, without_labels(model, inputs_of(model, batch))) for batch in kept]
        self.layers = list(layers_for(model, layers, self.batches[0]))
        given = (
            separators if separators is not None else [getattr(getattr(model, "config", None), "sep_token_id", None)]
        )
        self.separators = torch.tensor([i for i in given if isinstance(i, int)], dtype=torch.long)
        self.unseen: dict[str, str] = {}
        self.examples = self.tokens = self.repeated = 0
        self.grid: Grid | None = None

    def profiles(self) -> HeadProfiles:
        """The profiles by layer; see `profile_heads`."""
        with as_it_is(self.model):
            rows = rows_of(self.model, self.batches)
            layers = self._look(rows)
            sums = {layer.name: Sums(layer) for layer in layers}
            every = [sequences_of(self.model, inputs, rows) for inputs in self.batches]
            common = _counted(every)
            for inputs in self.batches:
                self.examples += rows.size(inputs)

                def seen(some: Example, size: int) -> dict[str, Sums]:
                    return self._seen(layers, some, size, rows, common)

                for part in together_or_singly(seen, rows, inputs):
                    for name, found in part.items():
                        sums[name].merge(found)
            if decoders := [layer for layer in layers if layer.kind == "decoder"]:
                self._add_repeated(sums, decoders, [s.source.ids for s in every])
        self.tokens = max((s.queries for s in sums.values()), default=0)
        figures = {name: [with_role(profile) for profile in found.figures()] for name, found in sums.items()}
        return HeadProfiles(
            {a.name: figures.get(a.name, []) for a in self.layers}, {a.name: a.index for a in self.layers}
        )

    def _look(self, rows: Rows) -> list[AttentionLayer]:
        """The layers whose weights can be seen, tried on one example; and the grid of its patches, if it is an image.

        Raises:
            HeadPruneError: There are none.
        """
        one = rows.take(self.batches[0], [0])

        def positions(layers: Sequence[AttentionLayer]) -> dict[str, list[int]]:
            return watched(self.model, layers, one, 1, lambda weights: weights.shape[2])

        modules = dict.fromkeys(layer.module for layer in self.layers)
        with finding_grid(self.model) as made:
            try:
                found = positions(self.layers)
            except HeadPruneError:
                found = {}
                for module in modules:  # one of them cannot be seen
                    group = [layer for layer in self.layers if layer.module == module]
                    try:
                        found.update(positions(group))
                    except HeadPruneError as error:
                        self.unseen.update({layer.name: str(error.args[0]) for layer in group})
        if not found:
            raise HeadPruneError(
                next(iter(self.unseen.values()), "The model has no attention layer."), "Name other layers."
            )
        if _is_pictured(one):
            self.grid = grid_among(made, next(iter(found.values()))[0])
        return [layer for layer in self.layers if layer.name in found]

    def _seen(
        self, layers: Sequence[AttentionLayer], inputs: Example, size: int, rows: Rows, common: Tensor | None
    ) -> dict[str, Sums]:
        """The sums over some examples."""
        sums, sequences = {layer.name: Sums(layer) for layer in layers}, sequences_of(self.model, inputs, rows)
        pictured = _is_pictured(inputs)

        def keep(weights: Weights) -> None:
            layer, (queries, keys) = weights.layer, weights.shape[2:]
            known = sequences.queries(layer, queries), sequences.keys(layer, keys)
            sums[layer.name].add(weights, Scene(*known, self.separators, common, self.grid, pictured))

        watched(self.model, layers, inputs, size, keep)
        return sums

    def _add_repeated(
        self, sums: dict[str, Sums], layers: Sequence[AttentionLayer], ids: Sequence[Tensor | None]
    ) -> None:
        """Add induction and duplicate-token scores of a causal language model: on random tokens, and the same again.

        Olsson et al. (2022, arXiv:2209.11895), "prefix matching": a head's attention from a token to what followed it before.
        """
        inputs = self._repeated([i for i in ids if i is not None])
        if inputs is None:
            return
        given, length = inputs

        def keep(weights: Weights) -> None:
            if (
                weights.shape[2] == given["input_ids"].shape[1] <= weights.shape[3]
                and weights.ordered
                and weights.windows == 1
            ):
                sums[weights.layer.name].add_repeated(weights, length)

        try:
            watched(self.model, layers, given, REPEATED, keep)
        except (HeadPruneError, RowsError):  # it takes more than tokens, or not so many
            return
        self.repeated = REPEATED

    def _repeated(self, ids: Sequence[Tensor]) -> tuple[dict[str, Tensor], int] | None:
        """Random tokens ``[REPEATED, …]`` of the vocabulary, repeated once, and how many there are before they are repeated.

        None for a model that reads no tokens, or whose decoder reads others than it is given.
        """
        vocabulary = vocabulary_size(self.model)
        if not ids or is_encoder_decoder(self.model) or vocabulary < 2 * _TOKENS:
            return None
        # The token that every text begins with, such as <s>, begins this one too.
        firsts = torch.cat([i[:, 0] for i in ids])
        begun = len(firsts) > 1 and bool((firsts == firsts[0]).all())
        most = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        length = min(_TOKENS, (most - begun) // 2) if isinstance(most, int) else _TOKENS
        if length < _FEWEST:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.stack([torch.randperm(vocabulary, generator=generator)[:length] for _ in range(REPEATED)])
        start = firsts[:1].cpu().expand(REPEATED, begun)
        every = torch.cat([start, drawn, drawn], dim=1).to(firsts.device)
        return {"input_ids": every, "attention_mask": torch.ones_like(every)}, length


def _is_pictured(inputs: Any) -> bool:
    """Whether a model is given images: a batch of channels, rows and columns."""
    given = inputs.values() if isinstance(inputs, Mapping) else [inputs] if isinstance(inputs, Tensor) else inputs
    return any(isinstance(t, Tensor) and t.ndim == 4 and t.is_floating_point() for t in given)


def _counted(every: Sequence[Sequences]) -> Tensor | None:
    """How often each token is in the source texts, by id."""
    parts = [
        s.source.ids if s.source.real is None else s.source.ids[s.source.real]
        for s in every
        if s.source.ids is not None
    ]
    return torch.bincount(torch.cat([part.flatten() for part in parts]).cpu()) if parts else None
