"""Baselines that do not use the loss: statistics of a head's attention, its output norm, its weight norm, and the random control.

Each costs one forward pass or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.divergence import real_tokens
from headprune.errors import HeadPruneError
from headprune.gates import RowsError, check_width, hook_heads
from headprune.inputs import doubled, gathered, is_transposed, widened
from headprune.offload import is_elsewhere, value_of
from headprune.scoring.base import Batches, Estimate, Problem, method
from headprune.scoring.gradient import in_singles, separate, whole_or_singly
from headprune.seeing.maps import Weights, attention_maps
from headprune.trace.reading import is_matrix

Measure = Callable[[Any, int], Tensor]
"""(batch, number of examples) -> ``[examples, heads + 1]``, float64: the heads' values, then the loss."""


@method("entropy", unit="negative entropy of a query's attention (nats), mean", loss=False)
def entropy(problem: Problem) -> Estimate:
    """Minus the entropy of the attention of a head, as Clark et al. (2019) plot it: focused heads come first.

    Section 3.3 of "What Does BERT Look At?" (BlackboxNLP 2019, arXiv:1906.04341) has the mean entropy of each head's
    attention, ``H = -sum_j a_ij ln a_ij``; Voita et al. (2019) compare heads by how certain they are. A head that attends
    to one token scores 0, one that attends to n tokens equally scores -ln(n). Queries that are padding do not count.
    """
    return _of_maps(problem, "entropy", lambda weights: -torch.special.entr(weights).sum(dim=-1))


@method("confidence", unit="largest attention weight of a query, mean", loss=False)
def confidence(problem: Problem) -> Estimate:
    """Voita et al. (2019): the mean over queries of a head's largest attention weight.

    Section 4 of "Analyzing Multi-Head Self-Attention" (ACL 2019, arXiv:1905.09418), which leaves out the end-of-sentence
    symbol. Which token that is differs from model to model, so here only queries that are padding are left out.
    The mean is taken within each example first.
    """
    return _of_maps(problem, "confidence", lambda weights: weights.amax(dim=-1))


@method("output-norm", unit="L2 norm of what the head adds to a token's residual stream, mean", loss=False)
def output_norm(problem: Problem) -> Estimate:
    """The mean over tokens of ``||W_O[:, h] x_h||``, x_h being a head's output, after Kobayashi et al. (2020).

    "Attention is Not Only a Weight" (EMNLP 2020, arXiv:2004.10102) measures ``||alpha_ij f(x_j)||``, section 3; this is
    the norm of the sum over j. If single heads have no columns of W_O, the score is the norm of the head's own features.
    """
    readers = {layer.name: _NormReader(problem.model, layer) for layer in problem.layers}
    own = [name for name, reader in readers.items() if not reader.projects]

    def measure(batch: Any, size: int) -> Tensor:
        norms: dict[str, list[Tensor]] = {name: [] for name in readers}

        def note(layer: AttentionLayer, hidden: Tensor) -> None:
            each = readers[layer.name].norms(hidden, size)
            norms[layer.name].append(_mean(each, real_queries(problem, layer, batch, each.shape[-1])))

        with ExitStack() as stack:
            for layer in problem.layers:
                module = readers[layer.name].module
                stack.callback(hook_heads(problem.model, layer, module, partial(note, layer)))
            losses = problem.losses(batch)
        return _table(problem, norms, losses)

    details = {"norm_before_output_projection": own} if own else {}
    try:
        batches = separate(problem)
    except (RuntimeError, HeadPruneError):  # `separate` needs a gradient of the loss, and there is none
        batches = in_singles(problem)
    return _mean_over_examples(problem, "output-norm", batches, measure, **details)


@method("weight-norm", unit="Frobenius norm of the head's columns of W_O", loss=False, passes=0)
def weight_norm(problem: Problem) -> Estimate:
    """Magnitude: ``||W_O[:, h]||_F``, the smallest weights being pruned first as in Han et al. (2015), without any data.

    "Learning both Weights and Connections" (NeurIPS 2015, arXiv:1506.02626) does so for single weights.
    """
    norms = [part.norm() for layer in problem.layers for part in _columns(problem.model, layer)]
    values = torch.stack([norm.cpu().double() for norm in norms])
    problem.progress(1, 1)
    return Estimate.without_error(values, "it does not look at data")


@method("random", unit="none (a uniform draw)", loss=False, passes=0)
def random(problem: Problem) -> Estimate:
    """Uniform draws from the seed. A method is worth its time only where it beats this.

    Budhraja et al. (2020, ACL Anthology 2020.emnlp-main.260) found random pruning often nearly as good after fine-tuning.
    """
    values = uniform(problem.heads, problem.seed)
    problem.progress(1, 1)
    return Estimate.without_error(values, "a draw estimates nothing")


def uniform(heads: int, seed: int) -> Tensor:
    """The scores of `random`, ``[heads]``."""
    return torch.rand(heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _mean_over_examples(problem: Problem, name: str, batches: Batches, measure: Measure, **details: Any) -> Estimate:
    """The mean over examples of the heads' values from ``measure``."""

    def compute(first: int, batch: Any, size: int) -> Tensor:
        with torch.no_grad():
            return whole_or_singly(problem, measure, batch, size)

    table = torch.cat(replace(problem, batches=batches).parts(name, compute, problem.progress))
    return Estimate.mean_of(table[:, :-1], table[:, -1], **details)


def _of_maps(problem: Problem, name: str, statistic: Callable[[Tensor], Tensor]) -> Estimate:
    """The mean over queries of a statistic of the attention weights: ``[..., queries, keys]`` -> ``[..., queries]``."""

    def measure(batch: Any, size: int) -> Tensor:
        def keep(weights: Weights) -> Tensor:
            blocks = [(statistic(some), some.sum(dim=-1) > 0) for _, some in weights.blocks()]
            values, counted = (torch.cat(parts, dim=-1) for parts in zip(*blocks, strict=True))
            # A query whose keys are all masked says nothing about the head.
            real = real_queries(problem, weights.layer, batch, weights.shape[2])
            return _mean(values, counted if real is None else counted & real.to(counted.device))

        with attention_maps(problem.model, problem.layers, size, keep) as kept:
            losses = problem.losses(batch)
        return _table(problem, kept, losses)

    return _mean_over_examples(problem, name, problem.batches, measure)


def _table(problem: Problem, values: Mapping[str, Sequence[Tensor]], losses: Tensor) -> Tensor:
    """Values ``[examples, heads]`` of every layer, averaged over its calls, with the losses in the last column.

    A layer that does not run on these examples adds nothing to them: 0.
    """
    losses, columns = doubled(losses)[:, None], list[Tensor]()
    for layer in problem.layers:
        none = losses.new_zeros(len(losses), layer.num_heads)
        columns.append(torch.stack([doubled(call) for call in values[layer.name]] or [none]).mean(dim=0))
    return gathered([*columns, losses], dim=1)


def _mean(values: Tensor, counted: Tensor | None) -> Tensor:
    """The mean over counted tokens: ``[examples, heads, tokens]`` -> ``[examples, heads]``; 0 if no token counts."""
    if counted is None:
        return values.mean(dim=-1)
    counted = counted.to(values.device)
    return torch.where(counted, values, 0.0).sum(dim=-1) / counted.sum(dim=-1).clamp(min=1)


def real_queries(problem: Problem, layer: AttentionLayer, batch: Any, tokens: int) -> Tensor | None:
    """Mask of a layer's real (non-padding) queries, ``[examples, 1, tokens]``; None if the batch has no mask for them."""
    real = real_tokens(problem.model, batch, layer.kind, problem.rows, tokens)
    return None if real is None else real[:, None]


class _NormReader:
    """Norms of the outputs of a layer's heads: after W_O's columns, or at the gate if single heads have no columns of W_O."""

    def __init__(self, model: nn.Module, layer: AttentionLayer) -> None:
        self.layer = layer
        self.projects = layer.output_projection is not None and not layer.concatenates
        place = layer.output_projection if self.projects else layer.mask_point
        assert place is not None
        self.module, self.features = place.module, place.features
        self.dim = layer.gate.dim if layer.gate is not None and layer.gate.module == self.module else -1
        # ||W x|| = ||R x|| with W = QR; R is [head_dim, head_dim].
        parts = _columns(model, layer) if self.projects else []
        self.factors = [torch.linalg.qr(part, mode="r")[1] for part in parts]

    def norms(self, hidden: Tensor, size: int) -> Tensor:
        """Output norms, ``[examples, heads, tokens]``, from the tensor ``hidden`` of ``size`` examples."""
        rows = widened(hidden).movedim(self.dim, -1).flatten(0, -2)
        if len(rows) % size:
            raise RowsError(f"Layer {self.layer.title}: {len(rows)} rows cannot be told apart as {size} examples.")
        heads = [rows[:, list(own)] for own in self.features]
        if self.factors:
            heads = [x @ r.to(x.device, x.dtype).T for x, r in zip(heads, self.factors, strict=True)]
        return torch.stack([x.norm(dim=-1).view(size, -1) for x in heads], dim=1)


def _columns(model: nn.Module, layer: AttentionLayer) -> list[Tensor]:
    """Each head's columns of W_O, ``[out, head_dim]``."""
    place = layer.output_projection
    if place is None or layer.concatenates:
        raise HeadPruneError(f"Layer {layer.title}: no columns of an output projection belong to single heads.")
    module = model.get_submodule(place.module)
    weight: Any = getattr(module, "weight", None)
    plain = isinstance(weight, nn.Parameter) and weight.is_floating_point()
    if not plain or not is_matrix(weight) or (weight.is_meta and not is_elsewhere(module, "weight")):
        raise HeadPruneError(
            f"Layer {layer.title}: {place.module} ({type(module).__name__}) has no plain weight matrix (quantised?).",
            "Load the model without quantisation, or choose another method.",
        )
    matrix = widened(value_of(module, "weight").detach()).flatten(1)
    matrix = matrix.T if is_transposed(module) else matrix
    check_width(layer, place, matrix.shape[1])
    return [matrix[:, list(own)] for own in place.features]
