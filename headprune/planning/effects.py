"""First-order effect on the model's answers of removing each unit and refitting W_O, for all units at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headprune.attention import Heads, Layers
from headprune.gates import gated
from headprune.inputs import call, doubled, gathered, inputs_of, tensors
from headprune.offload import is_offloaded, on_disk
from headprune.planning.order import Unit
from headprune.planning.strategies import spread
from headprune.repairing import Calibration, OutputProjection, RepairWeights, fit_layers
from headprune.repairing.directions import inputs_of_heads
from headprune.repairing.examples import probe_of
from headprune.repairing.mixtures import mixes_only
from headprune.repairing.projections import FOLDS, Moments, Values, centred
from headprune.running import frozen
from headprune.scoring.gradient import finite

_FIRST_RIDGE = 0.3  # for layers that have lost no head: cross-validation has not chosen a ridge yet; see RIDGES


@dataclass(frozen=True)
class _Removals:
    """How removing each of some units changes the output of one W_O: a unit's features f by ``-(x - mean) P[:, f] W[f]``, summed.

    Attributes:
        columns: Positions of these units among all units.
        owners: 1 where a feature is a unit's own, ``[features, units]``, float64.
        kept: Indices of the inputs that are not removed yet, ``[in]``.
        weight: W, the features' rows of W_O, ``[features, out]``.
        fits: The inputs' mean ``[in]`` and P ``[in, features]``: of one refit, or of a refit to each fold of the examples.
    """

    columns: list[int]
    owners: Tensor
    kept: Tensor
    weight: Tensor
    fits: list[tuple[Tensor, Tensor]]

    def near(self, x: Tensor) -> _Removals:
        """A copy on the device of W_O's inputs ``x``, in float64 if they are, else in float32."""
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        if all(t.device == x.device and t.dtype == kind for t in (self.weight, *(left for _, left in self.fits))):
            return self
        fits = [(mean.to(x.device, kind), left.to(x.device, kind)) for mean, left in self.fits]
        owners = doubled(self.owners.to(x.device))
        return _Removals(self.columns, owners, self.kept.to(x.device), self.weight.to(x.device, kind), fits)


def effects(
    calibration: Calibration, layers: Layers, drop: Heads, units: Sequence[Unit], examples: int | None = None
) -> Tensor:
    """First-order change of the answers to every example if a unit is removed too, ``[examples, units]``, float64.

    The model is the repaired one without the heads in ``drop``. If unit u is removed, the refit changes W_O by
    ``dW_u = -H^-1[:, u] (H^-1[u, u])^-1 W[u]``. H is the ridge regression's Hessian over the kept inputs and, where
    values are refitted too, over what heads could read along further directions. This is the optimal brain surgeon for
    a block (Hassibi and Stork 1992; for heads and layers Kurtic et al. 2023, ZipLM, arXiv:2302.04089, equation 2).
    ZipLM judges it by the layer's squared error; here it is followed through the model: the effect on example i is
    ``sum_t <g_t, x_t dW_u>`` over its tokens. g_t is the slope (gradient) at W_O's output of a random projection of the
    answers; its square is the Fisher information in expectation. So the effect is the gate gradient of Michel et al.
    (2019), but with the removal compensated by the other heads. If a layer's W_O cannot be refitted, it is just that.

    A refit makes up for more on the tokens that it was fitted to than on others, and in some layers more than in others. So
    each half of the examples is measured by refits to the other half, unless mixtures of them alone are fitted to.

    Args:
        calibration: The dense model, and how kept heads are refitted. With an infinite ridge nothing is compensated.
        layers: The layers that `Unit.layer` indexes.
        drop: Heads that are removed already, ``{layer_name: [head, ...]}``.
        units: The units that may be removed next.
        examples: About how many examples to use; all by default.

    Raises:
        HeadPruneError: Some effects are not finite.
    """
    weights = fit_layers(calibration, drop)
    every = {p.name: _removals(calibration, p, layers, drop, weights, units) for p in calibration.projections}
    removals = {name: removal for name, removal in every.items() if removal}
    fitted = {layer.name for projection in calibration.projections for layer in projection.layers}
    others = [i for i, unit in enumerate(units) if layers[unit.layer].name not in fitted]
    in_files = is_offloaded(calibration.model)

    def effects_on_batch(index: int) -> Tensor:
        batch = calibration.runner.batches[index]
        size = calibration.runner.rows.size(batch)
        out = torch.zeros(size, len(units), dtype=torch.float64)
        if others:
            out[:, others] = _gated(calibration, layers, index, [units[i] for i in others])
        parts, fold = dict[str, Tensor](), calibration.runner.fold(index)
        for name, calls in calibration.slopes(index).items():
            for x, slope in calls if name in removals else ():
                near = removals[name].near(x)
                removals[name] = removals[name] if in_files else near
                seen = _effects(near, fold, x, slope)
                parts[name] = parts[name] + seen if name in parts else seen
        if parts:
            columns = [removals[name].columns for name in parts]
            split = torch.split(gathered(list(parts.values()), dim=1), list(map(len, columns)), dim=1)
            for own, part in zip(columns, split, strict=True):
                out[:, own] += part
        return out

    with torch.inference_mode(False), calibration.applied(weights.by_module, drop):
        runner = calibration.runner
        chosen = spread(len(runner.batches), runner.examples, examples)
        batches = [runner.batches[index] for index in chosen]
        per_batch = runner.share("a look", [partial(effects_on_batch, index) for index in chosen], batches)
    return finite(torch.cat(per_batch))


def _gated(calibration: Calibration, layers: Layers, index: int, units: Sequence[Unit]) -> Tensor:
    """Minus the gate gradients on a batch, ``[examples, units]``."""
    runner, model = calibration.runner, calibration.model
    names = {layers[unit.layer].name: layers[unit.layer] for unit in units}
    rows = []
    # One example at a time: at these layers it is not known which rows belong to which example.
    for row, one in enumerate(runner.rows.singles(runner.batches[index])):
        gates = {name: torch.ones(a.num_heads, dtype=torch.float64, requires_grad=True) for name, a in names.items()}
        with torch.enable_grad(), runner.deterministic_eval(), frozen(model), gated(model, layers, gates):
            output = call(model, inputs_of(model, one))
            # If the answers depend on none of these layers, the effects are 0; if on no layer, `probe_of` raises.
            slopes: Sequence[Tensor | None] = [None] * len(gates)
            if not calibration.projections or any(t.requires_grad for t in tensors(output)):
                probe = probe_of(model, output, one, runner.first(index) + row, runner.rows)
                slopes = torch.autograd.grad(probe, list(gates.values()), allow_unused=True)
        of = {name: gate * 0 if s is None else s for (name, gate), s in zip(gates.items(), slopes, strict=True)}
        rows.append(torch.stack([of[layers[u.layer].name][list(u.heads)].sum() for u in units]))
    runner.count(3 * len(rows))
    return -torch.stack(rows).detach()


def _removals(
    calibration: Calibration,
    projection: OutputProjection,
    layers: Layers,
    drop: Heads,
    weights: RepairWeights,
    units: Sequence[Unit],
) -> _Removals | None:
    """How removing each unit that ends in one W_O changes it; None without such units."""
    features = {layer.name: layer.output_projection.features for layer in projection.layers if layer.output_projection}
    columns = [i for i, unit in enumerate(units) if layers[unit.layer].name in features]
    if not columns:
        return None
    heads = [[(layers[units[i].layer].name, h) for h in units[i].heads] for i in columns]
    own = [[f for name, h in unit for f in features[name][h]] for unit in heads]
    rows = [f for these in own for f in these]
    owners = torch.eye(len(own), dtype=torch.float64)[[u for u, these in enumerate(own) for _ in these]]
    values, kept, blocks = calibration.values.get(projection.name), projection.kept(drop), own
    if values is not None:  # what a unit's heads could read along further directions is removed too
        kept = inputs_of_heads(projection, values, projection.heads(drop), values.head_dim).flatten()
        starts = [[len(projection.weight) + h * values.head_dim for _, h in unit] for unit in heads]
        blocks = [
            [*own[u], *(at + j for at in those for j in range(values.head_dim))] for u, those in enumerate(starts)
        ]
    place = {int(feature): i for i, feature in enumerate(kept)}
    # As wide as they are used, and in files if the model's weights are, since those of all layers are there at once.
    wide = any(weight.dtype == torch.float64 for weight in calibration.model.parameters())
    kind, in_files = torch.float64 if wide else torch.float32, is_offloaded(calibration.model)

    def held(t: Tensor) -> Tensor:
        return on_disk(*t.shape, dtype=kind).copy_(t) if in_files else t.to(kind)

    fits = []
    for inverse, mean in _inverses(calibration, projection, drop, weights):
        if inverse is None:  # nothing is compensated: only the own weights become zero
            left = torch.zeros(len(kept), len(rows))
            left[[place[f] for f in rows], range(len(rows))] = 1.0
        else:
            at = [[place[f] for f in block] for block in blocks]
            own_columns = [
                torch.linalg.inv(inverse[block][:, block])[:, : len(o)] for block, o in zip(at, own, strict=True)
            ]
            left = torch.cat([inverse[:, block] @ part for block, part in zip(at, own_columns, strict=True)], dim=1)
        fits.append((mean.to(kind), held(left)))
    current = weights.by_module[projection.name][0] if projection.name in weights.by_module else projection.weight.cpu()
    return _Removals(columns, owners, kept, held(current[rows]), fits)


def _inverses(
    calibration: Calibration, projection: OutputProjection, drop: Heads, weights: RepairWeights
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """The inverse Hessian over the kept inputs, None where nothing is fitted, and their mean: of each fold's examples, or of all."""
    statistics, examples = calibration.statistics, calibration.runner.examples
    every = statistics.moments.get(projection.name)
    whole = examples < FOLDS or (statistics.mixtures and mixes_only(examples))
    ridge = weights.ridges.get(projection.name, _FIRST_RIDGE if calibration.ridge is None else calibration.ridge)
    for moments in [every] if every is None or whole else [every.of_fold(fold) for fold in range(FOLDS)]:
        if moments is None or not moments.seen or not math.isfinite(ridge):
            yield None, torch.zeros(1, dtype=torch.float64)
        else:
            mixes = weights.mixes.get(projection.name, {})
            hessian, mean = _hessian(calibration, projection, moments, drop, mixes, ridge)
            yield torch.linalg.inv(hessian), mean


def _hessian(
    calibration: Calibration,
    projection: OutputProjection,
    moments: Moments,
    drop: Heads,
    mixes: Mapping[int, Tensor],
    ridge: float,
) -> tuple[Tensor, Tensor]:
    """Hessian of the ridge regression on the kept dense inputs, widened by head_dim further directions per head.

    Args:
        moments: The sums to fit to.
        drop: The removed heads.
        mixes: How the heads' new values are made (`headprune.repairing.results.RepairWeights.mixes`).

    Returns:
        The matrix ``[inputs, inputs]``, and the inputs' subtracted mean ``[inputs]``.
    """
    values = calibration.values.get(projection.name)
    if values is None:
        xx, xy, _ = (sums.sum(0) for sums in moments.rows_of(projection.kept(drop)))
    else:
        heads, rank = projection.heads(drop), calibration.statistics.directions.rank(projection.name)
        every = inputs_of_heads(projection, values, heads, rank).flatten()
        xx, xy, _ = (sums.sum(0) for sums in moments.rows_of(every))
        turns = _turns(values, heads, rank, mixes).to(xx.device)
        xx, xy = _turned(turns, _turned(turns, xx).T), _turned(turns, xy)
    a, _, mean, _ = centred(xx, xy, projection.has_bias)
    strength = ridge * float(a.diagonal().mean()) if len(a) else 0.0
    # If no input varies, the matrix would be singular.
    matrix = a + max(strength, 1e-12) * torch.eye(len(a)).to(a)
    return matrix, mean if projection.has_bias else mean * 0


def _turns(values: Values, heads: Sequence[int], rank: int, mixes: Mapping[int, Tensor]) -> Tensor:
    """By head, the matrix from old values and all directions to current values and the first head_dim ones."""
    width = values.head_dim
    turns = torch.eye(width + rank, 2 * width, dtype=torch.float64).repeat(len(heads), 1, 1)
    for i, h in enumerate(heads):
        if h in mixes:
            turns[i, :, :width] = mixes[h]
    return turns


def _turned(turns: Tensor, rows: Tensor) -> Tensor:
    """Rows of heads' inputs ``[heads * wide + 1, ...]`` as rows of their turned inputs; the last one, of the 1, stays."""
    own = turns.mT @ rows[:-1].reshape(len(turns), -1, rows.shape[-1])
    return torch.cat([own.flatten(0, 1), rows[-1:]])


def _effects(removals: _Removals, fold: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """Effects ``[examples, units]``, float64, at a call of a W_O: ``x`` [rows, ..., in], ``slope`` [rows, ..., out].

    Args:
        fold: Of every example, ``[examples]``: it is measured by the refit to the other fold, if there is one for each.
    """
    size = len(fold)
    known = x.shape[0] % size == 0
    # Tokens flattened into rows, or windows cut out of every example: rows of one example stay together. If rows belong
    # to no single example, every example gets an equal share of the sum.
    x, slope = (t.reshape(size if known else 1, -1, t.shape[-1]).to(removals.weight) for t in (x, slope))
    outer = slope @ removals.weight.mT
    out = outer.new_zeros(size, outer.shape[-1])
    for i, (mean, left) in enumerate(removals.fits):
        own = (torch.arange(size) if len(removals.fits) == 1 else (fold != i).nonzero()[:, 0]).to(x.device)
        rows = own if known else slice(None)
        found = (((x[rows][..., removals.kept] - mean) @ left) * outer[rows]).sum(1)
        out[own] = found if known else found / size
    return -doubled(out) @ removals.owners
