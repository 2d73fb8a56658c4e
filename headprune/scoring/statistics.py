"""Heuristics that need no gradient: how a head attends, how much it says, how large its weights are.

They cost one forward pass or none. They are baselines: nothing in them knows the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError
from headprune.gates import RowsError
from headprune.loss import inputs_of
from headprune.scoring.base import Estimate, Problem, Samples, method
from headprune.scoring.gradient import in_singles, separate
from headprune.scoring.maps import attention_maps
from headprune.trace.graphs import is_matrix

Measure = Callable[[Any, int], Tensor]
"""(batch, its examples) to ``[examples, heads + 1]``, float64: the heads' values, and the loss."""


@method("entropy", unit="negative entropy of a query's attention (nats), mean")
def entropy(problem: Problem) -> Estimate:
    """Minus the entropy of the attention of a head, as Clark et al. (2019) plot it: focused heads come first.

    Section 3.3 of "What Does BERT Look At?" (BlackboxNLP 2019, arXiv:1906.04341) has the mean entropy of each head's
    attention, ``H = -sum_j a_ij ln a_ij``; Voita et al. (2019) compare heads by how certain they are. A score of
    0 looks at one token, one of -ln(n) at n tokens alike. Queries that are padding do not count.
    """
    return Estimate.mean_of(_of_maps(problem, "entropy", lambda weights: -torch.special.entr(weights).sum(dim=-1)))


@method("confidence", unit="largest attention weight of a query, mean")
def confidence(problem: Problem) -> Estimate:
    """Voita et al. (2019): the mean over queries of a head's largest attention weight.

    Section 4 of "Analyzing Multi-Head Self-Attention" (ACL 2019, arXiv:1905.09418), which leaves out the end-of-sentence
    symbol. Which token that is differs from model to model, so here only queries that are padding are left out.
    The mean is taken within each example first.
    """
    return Estimate.mean_of(_of_maps(problem, "confidence", lambda weights: weights.amax(dim=-1)))


@method("output-norm", unit="L2 norm of what the head adds to a token's residual stream, mean")
def output_norm(problem: Problem) -> Estimate:
    """The mean over tokens of ``||W_O[:, h] x_h||``, x_h being a head's output, after Kobayashi et al. (2020).

    "Attention is Not Only a Weight" (EMNLP 2020, arXiv:2004.10102) measures ``||alpha_ij f(x_j)||``, section 3; this is
    the norm of the sum over j. Where W_O has no columns of single heads, it is that of the head's own features.
    """
    readers = {layer.name: _Reader(problem.model, layer) for layer in problem.layers}
    own = [name for name, reader in readers.items() if not reader.projects]
    details = {"norm_before_output_projection": own} if own else {}

    def measure(batch: Any, size: int) -> Tensor:
        found: dict[str, list[Tensor]] = {name: [] for name in readers}
        with ExitStack() as stack:
            for layer in problem.layers:

                def take(hidden: Tensor, layer: AttentionLayer = layer) -> None:
                    norms = readers[layer.name].norms(hidden, size)
                    found[layer.name].append(_mean(norms, real_tokens(problem, layer, batch, norms.shape[-1])))

                stack.callback(readers[layer.name].hook(problem.model, take))
            losses = problem.losses(batch)
        return _row(problem, found, losses)

    return Estimate.mean_of(_samples(problem, "output-norm", _separable(problem), measure), **details)


@method("weight-norm", unit="Frobenius norm of the head's columns of W_O")
def weight_norm(problem: Problem) -> Estimate:
    """Magnitude: ``||W_O[:, h]||_F``, the smallest weights being pruned first as in Han et al. (2015), without any data.

    "Learning both Weights and Connections" (NeurIPS 2015, arXiv:1506.02626) does so for single weights.
    """
    norms = [part.norm() for layer in problem.layers for part in _columns(problem.model, layer)]
    values = torch.stack([norm.cpu().double() for norm in norms])
    problem.progress(1, 1)
    stderr = torch.full_like(values, float("nan"))
    return Estimate(values, stderr, examples=0, details={"stderr": "it does not look at data"})


def _separable(problem: Problem) -> Sequence[tuple[Any, int]]:
    """Batches whose examples can be told apart at W_O: where tokens come before the batch, only one by one."""
    try:
        return separate(problem)
    except (RuntimeError, HeadPruneError):  # the loss has no gradient, by which it would be seen
        return in_singles(problem)


def _samples(problem: Problem, name: str, batches: Sequence[tuple[Any, int]], measure: Measure) -> Samples:
    """What ``measure`` finds in every batch, kept in the store as it comes."""
    parts = []
    for i, (batch, size) in enumerate(batches):
        parts.append(problem.store.get(f"{name}-{i}", partial(_measured, problem, measure, batch, size)))
        problem.progress(i + 1, len(batches))
    table = torch.cat(parts)
    return Samples(table[:, :-1], table[:, -1])


def _measured(problem: Problem, measure: Measure, batch: Any, size: int) -> Tensor:
    with torch.no_grad():
        try:
            return measure(batch, size)
        except RowsError:
            if size == 1:
                raise
            return torch.cat([measure(row, 1) for row in problem.rows.singles(batch)])


def _of_maps(problem: Problem, name: str, statistic: Callable[[Tensor], Tensor]) -> Samples:
    """The mean over queries of a statistic of attention weights: ``[..., queries, keys]`` to ``[..., queries]``."""

    def measure(batch: Any, size: int) -> Tensor:
        def keep(layer: AttentionLayer, weights: Tensor) -> Tensor:
            looks = weights.sum(dim=-1) > 0  # a query that sees nothing is neither focused nor not
            real = real_tokens(problem, layer, batch, weights.shape[2])
            return _mean(statistic(weights), looks & real if real is not None else looks)

        with attention_maps(problem.model, problem.layers, size, keep) as found:
            losses = problem.losses(batch)
        return _row(problem, found, losses)

    return _samples(problem, name, problem.batches, measure)


def _row(problem: Problem, found: Mapping[str, Sequence[Tensor]], losses: Tensor) -> Tensor:
    """Values ``[examples, heads]`` of every layer's calls, averaged over the calls, and the losses behind them."""
    columns = [torch.stack([call.cpu().double() for call in found[layer.name]]).mean(dim=0) for layer in problem.layers]
    return torch.cat([*columns, losses.cpu().double()[:, None]], dim=1)


def _mean(values: Tensor, counted: Tensor | None) -> Tensor:
    """``[examples, heads]`` of ``[examples, heads, tokens]``: the mean over tokens that count, 0 where none does."""
    if counted is None:
        return values.mean(dim=-1)
    return torch.where(counted, values, 0.0).sum(dim=-1) / counted.sum(dim=-1).clamp(min=1)


def real_tokens(problem: Problem, layer: AttentionLayer, batch: Any, tokens: int) -> Tensor | None:
    """Which of a layer's queries are no padding, ``[examples, 1, tokens]``; None where the batch does not say."""
    inputs = inputs_of(problem.model, batch)
    if not isinstance(inputs, Mapping):
        return None
    masks = [problem.rows.table(inputs, "attention_mask")]
    if layer.kind != "encoder" and getattr(getattr(problem.model, "config", None), "is_encoder_decoder", False):
        labels = inputs.get("labels")
        masks = [
            problem.rows.table(inputs, "decoder_attention_mask"),
            labels != IGNORED if isinstance(labels, Tensor) else None,
            *(masks if "decoder_input_ids" not in inputs else ()),  # BART reads its input again, if it has no other
        ]
    fitting = (m for m in masks if isinstance(m, Tensor) and m.ndim == 2 and m.shape[1] == tokens)
    mask = next(fitting, None)
    return None if mask is None else mask[:, None] != 0


class _Reader:
    """Reads what the heads of a layer give, at W_O's input; without columns of W_O, where a gate would be."""

    def __init__(self, model: nn.Module, layer: AttentionLayer) -> None:
        self.name, output, gate = layer.name, layer.output_projection, layer.gate
        self.projects = output is not None and not layer.concatenates
        self.returned = layer.concatenates
        place = output if self.projects else gate or output
        assert place is not None
        self.module, self.features = place.module, place.features
        self.dim = gate.dim if gate is not None and gate.module == self.module else -1
        # ||W x|| = ||R x|| where W = QR, and R is only as wide as a head.
        parts = _columns(model, layer) if self.projects else []
        self.factors = [torch.linalg.qr(part, mode="r")[1] for part in parts]

    def hook(self, model: nn.Module, take: Callable[[Tensor], None]) -> Callable[[], None]:
        """Give ``take`` every hidden state from now on; returns what ends this."""
        module = model.get_submodule(self.module)
        if self.returned:

            def after(module: nn.Module, args: Any, output: Any) -> None:
                take(output[0] if isinstance(output, tuple) else output)

            return module.register_forward_hook(after).remove

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            take(args[0] if args else next(iter(kwargs.values())))

        return module.register_forward_pre_hook(before, with_kwargs=True).remove

    def norms(self, hidden: Tensor, size: int) -> Tensor:
        """``[examples, heads, tokens]``."""
        rows = _wide(hidden).movedim(self.dim, -1).flatten(0, -2)
        if len(rows) % size:
            raise RowsError(f"Layer {self.name}: {len(rows)} rows cannot be told apart as {size} examples.")
        heads = [rows[:, list(own)] for own in self.features]
        if self.factors:
            heads = [x @ r.to(x.device, x.dtype).T for x, r in zip(heads, self.factors, strict=True)]
        return torch.stack([x.norm(dim=-1).view(size, -1) for x in heads], dim=1)


def _columns(model: nn.Module, layer: AttentionLayer) -> list[Tensor]:
    """Each head's columns of W_O, ``[out, head_dim]``."""
    place = layer.output_projection
    if place is None or layer.concatenates:
        raise HeadPruneError(f"Layer {layer.name}: no columns of an output projection belong to single heads.")
    module = model.get_submodule(place.module)
    weight: Any = getattr(module, "weight", None)
    plain = isinstance(weight, nn.Parameter) and weight.is_floating_point() and not weight.is_meta
    if not plain or not is_matrix(weight):
        raise HeadPruneError(
            f"Layer {layer.name}: {place.module} ({type(module).__name__}) has no plain weight matrix (quantised?).",
            "Load the model without quantisation, or choose another method.",
        )
    # nn.Linear and convolutions store [out, in, …], transformers' Conv1D [in, out].
    matrix = _wide(weight.detach()).flatten(1)
    matrix = matrix if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) else matrix.T
    if max(map(max, place.features)) >= matrix.shape[1]:
        raise HeadPruneError(
            f"Layer {layer.name} is not as it was traced: its output projection has only {matrix.shape[1]} inputs.",
            "The model was pruned since; call find_attention again.",
        )
    return [matrix[:, list(own)] for own in place.features]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
