"""Energy of forward passes, where the machine counts it: RAPL (Linux, processors) and NVML (NVIDIA GPUs)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headprune import latency
from headprune.inputs import Example, model_device, move
from headprune.running import evaluating

POWERCAP = Path("/sys/class/powercap")
ROUNDS, SECONDS = 6, 0.5  # NVML counts anew about every 100 ms

Counter = Callable[[], float]
"""Joules since some time in the past."""


@dataclass(frozen=True)
class EnergyRow:
    """Energy of one forward pass on one input, of everything that the counter counts: the models, but also what else runs.

    Attributes:
        counter: ``"RAPL"`` or ``"NVML"``.
        joules: By model: the median over rounds.
        ratios: By model, but for the first (dense): the dense model's energy over this one's, with its 95 % interval, as
            (ratio, low, high).
    """

    batch: int
    length: int
    counter: str
    joules: dict[str, float]
    ratios: dict[str, tuple[float, float, float]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def energy(
    models: Mapping[str, nn.Module],
    example: Example,
    *,
    seconds: float = SECONDS,
    counter: Counter | None = None,
) -> EnergyRow | None:
    """Energy of models' forward passes, measured in turn.

    Args:
        models: The dense model first; all on one device.
        seconds: How long a model runs in each round.
        counter: Instead of the machine's own.

    Returns:
        The energies; None where nothing counts it, or the counter stands still.
    """
    device = model_device(next(iter(models.values())))
    name, count = ("given", counter) if counter else counter_of(device)
    if count is None:
        return None
    used: dict[str, list[float]] = {name: [] for name in models}
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(evaluating(model))
        runs = {name: latency.timer(model, move(example, device)) for name, model in models.items()}
        for i in range(ROUNDS):
            for model_name in runs if i % 2 == 0 else reversed(list(runs)):
                used[model_name].append(_joules(runs[model_name], count, seconds))
    if any(min(joules) <= 0 for joules in used.values()):
        return None
    first = next(iter(used))
    ratios = {other: latency.speedup(used[first], joules) for other, joules in used.items() if other != first}
    return EnergyRow(
        *latency.example_shape(example), name, {model: float(np.median(joules)) for model, joules in used.items()},
        {model: (found.ratio, found.low, found.high) for model, found in ratios.items()},
    )  # fmt: skip


def _joules(run: Callable[[], float], count: Counter, seconds: float) -> float:
    """Joules of one pass, over as many as fill some seconds."""
    passes, begin, end = 0, count(), time.perf_counter() + seconds
    while not passes or time.perf_counter() < end:
        run()
        passes += 1
    return (count() - begin) / passes


def counter_of(device: torch.device, powercap: Path = POWERCAP) -> tuple[str, Counter | None]:
    """What counts the energy of a device, by its name; None where nothing does, or it may not be read."""
    if device.type == "cuda":
        return "NVML", _nvml(device)
    return "RAPL", _rapl(powercap) if device.type == "cpu" else None


def _rapl(powercap: Path) -> Counter | None:
    """The processors' packages together. A counter that is full begins again at 0."""
    zones = []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            if (zone / "name").read_text().startswith("package"):
                zones.append((zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())))
                zones[-1][0].read_text()  # mostly only root may
        except (OSError, ValueError):
            return None
    if not zones:
        return None
    last = [int(path.read_text()) for path, _ in zones]
    total = 0

    def count() -> float:
        nonlocal total
        for i, (path, full) in enumerate(zones):
            now = int(path.read_text())
            total += (now - last[i]) % (full + 1)
            last[i] = now
        return total / 1e6

    return count


def _nvml(device: torch.device) -> Counter | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, or a GPU that does not count
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
