"""Repair without training: refit what W_O makes of the heads that stay, in closed form.

When heads go, W_O loses some of its inputs. What they carried is partly known to the heads that stay, so W_O is fitted
anew, layer by layer, to give what the dense model's W_O gives: ridge regression towards the old weights, with a bias that
takes up the removed heads' mean. Only W_O and its bias change, so a repaired model prunes like any other.

A first fit takes the dense model's own activations: one pass serves any choice of heads (`Refit.quick`). Each further
sweep takes the inputs that W_O really gets, behind layers that are repaired already, so errors do not add up on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from headprune.attention import AttentionLayer, check_heads
from headprune.repair.places import Place
from headprune.repair.refit import Progress, Refit
from headprune.repair.weights import LayerRepair, Repair, Weights, add_biases, added_biases

__all__ = ["LayerRepair", "Place", "Refit", "Repair", "Weights", "add_biases", "added_biases", "repair"]


def repair(
    model: nn.Module,
    drop: Mapping[str, Sequence[int]],
    batches: Sequence[Any],
    *,
    layers: Sequence[AttentionLayer],
    sweeps: int = 0,
    ridge: float | None = None,
    values: bool = True,
    progress: Progress | None = None,
) -> Repair:
    """Refit the output projections of a model in place, so that the heads in ``drop`` can go.

    Every W_O from the first layer on that loses a head is fitted to give the dense model's outputs on the kept heads'
    outputs, by least squares over all tokens but padding. The columns of removed heads become zero: the model answers as
    it will when they are pruned (`headprune.prune` is still to come).

    Minimised is ``mean_t |y_t - W x_t - b|^2 + ridge * v * |W - W_old|^2``, y being the dense W_O's output at token t, x the
    kept heads' outputs, v their mean variance. Statistics are sums over tokens (float64), so memory does not grow with the
    data. This is the reconstruction of He et al. (2017, arXiv:1707.06168, section 3.1) and, towards the old weights, the
    refit of SparseGPT's kind (Frantar and Alistarh 2023, arXiv:2301.00774) for whole heads.

    Args:
        model: The dense model; or one pruned before, which is then what is fitted to.
        drop: ``{layer_name: [head, ...]}`` that will go.
        batches: What the model is called with, labels or not; or pairs ``(inputs, labels)``, as where inputs are a tuple.
            Never those that results are reported on.
        layers: From `headprune.find_attention`.
        sweeps: Passes with the pruned model's own activations, behind one with the dense model's.
        ridge: Strength of the pull towards the old weights; by default what is best by cross-validation, for each layer.
        values: Whether the value projections are refitted too (only without sweeps), which takes up to four passes more.
        progress: Called with (passes done, passes in all, note).

    Raises:
        HeadPruneError: An unknown layer or head, or no examples.
    """
    checked = check_heads(drop, layers)
    refit = Refit(model, layers, batches, ridge=ridge, values=values and not sweeps, progress=progress)
    weights = refit.fitted(checked, sweeps)
    refit.apply(weights)
    return refit.report(weights)
