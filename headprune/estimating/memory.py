"""How much memory a run will hold: counted, but for what a pass takes, which was measured."""

from __future__ import annotations

from torch import nn

from headprune.estimating.rates import Sampler
from headprune.estimating.rehearsal import Rehearsal
from headprune.inputs import model_device
from headprune.reference.directions import room
from headprune.reference.moments import FOLDS


def weights_of(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers; shared ones once."""
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def statistics_of(rehearsal: Rehearsal) -> int:
    """Bytes of the sums that repair rests on (`headprune.reference.moments.Moments`), where there will be any, and of the dense weights beside them."""
    calibration = rehearsal.calibration
    share = room(calibration.projections, calibration.values) if calibration.values else 0
    found = 0
    for p in calibration.projections:
        own = calibration.values.get(p.name)
        inputs, outputs = p.weight.shape
        wide = inputs + 1
        if own is not None:
            wide += len(own.owner) * min(share * own.head_dim, own.weight.shape[0])
        sums = FOLDS * (wide * wide + wide * outputs) if calibration.sums else 0
        found += 8 * (sums + 2 * inputs * outputs)
    return found


def memory_of(sampler: Sampler, rehearsal: Rehearsal | None, copies: int) -> dict[str, int]:
    """Bytes by what they are for; of a GPU, what is on it."""
    weights = weights_of(sampler.model)
    device = model_device(sampler.model)
    now = sampler.held if device.type == "cpu" else 0
    found = {"the process with the model": now or weights, "a pass": sampler.peak}
    if copies:
        found["further models"] = copies * weights
    if rehearsal is not None and "calibration" in vars(rehearsal):
        found["statistics for repair" if rehearsal.repair else "dense weights"] = statistics_of(rehearsal)
    return found
