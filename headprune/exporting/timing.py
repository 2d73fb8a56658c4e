"""Exported files timed against each other, as `headprune.benchmark` times models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.errors import HeadPruneError
from headprune.exporting.engines import Session, session
from headprune.latency import MIN_RUNS, LatencyRow, bench_calls, example_shape
from headprune.running import Progress


def time_onnx(
    files: Mapping[str, Path | str],
    example: Mapping[str, Tensor],
    *,
    threads: int | None = None,
    min_runs: int = MIN_RUNS,
    min_seconds: float | None = None,
) -> LatencyRow:
    """Time ONNX files in onnxruntime (or OpenVINO models in OpenVINO) against each other on one input, on the CPU.

    Args:
        files: By name; the others are compared with the first, usually the dense model.
        example: The inputs by name; others than the files take are left out.
        threads: By default as many as torch uses.
        min_runs, min_seconds: As in `headprune.benchmark`.

    Returns:
        The `LatencyRow` that `headprune.benchmark` gives.

    Raises:
        HeadPruneError: A file that does not run, or needs an input that the example lacks.
    """
    sessions = {name: session(Path(file), threads, exact=False) for name, file in files.items()}
    calls = {name: _call(name, loaded, example) for name, loaded in sessions.items()}
    return bench_calls(calls, *example_shape(example), min_runs=min_runs, min_seconds=min_seconds)


def bench_files(
    files: Mapping[str, Path],
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    progress: Progress | None = None,
) -> list[LatencyRow]:
    """`time_onnx` on made-up inputs of several sizes; lengths only where the files leave any free."""
    sessions = {name: session(file, exact=False) for name, file in files.items()}
    first = next(iter(sessions.values()))
    free = {size for _, shape in first.inputs.values() for size in shape[1:] if isinstance(size, str)}
    inputs = [(b, n, _all_made_up(sessions.values(), b, n)) for n in (lengths if free else [0]) for b in batches]
    rows = []
    for done, (batch, length, example) in enumerate(inputs):
        calls = {name: _call(name, loaded, example) for name, loaded in sessions.items()}
        rows.append(bench_calls(calls, batch, length))
        if progress:
            progress(done + 1, len(inputs))
    return rows


def _all_made_up(sessions: Iterable[Session], batch: int, length: int) -> dict[str, Tensor]:
    """Inputs for all files: one may take token types that another does not know."""
    made: dict[str, Tensor] = {}
    for loaded in sessions:
        made = made_up(loaded, batch, length) | made
    return made


def made_up(loaded: Session, batch: int, length: int) -> dict[str, Tensor]:
    """Inputs that a file takes: masks of ones, other whole numbers 0, noise.

    Raises:
        HeadPruneError: The file fixes another batch.
    """
    made: dict[str, Tensor] = {}
    for name, (dtype, sizes) in loaded.inputs.items():
        shape = [size if isinstance(size, int) else length if d else batch for d, size in enumerate(sizes)]
        if shape and shape[0] != batch:
            raise HeadPruneError(f"The file takes {shape[0]} rows of {name}.", f"Use --batch-sizes {shape[0]}.")
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        made[name] = noise.to(dtype) if dtype.is_floating_point else torch.full(shape, "mask" in name, dtype=dtype)
    return made


def _call(name: str, loaded: Session, example: Mapping[str, Any]) -> Callable[[], object]:
    """A function that runs a file once; it has run when this returns."""
    if missing := [key for key in loaded.inputs if key not in example]:
        raise HeadPruneError(f"The file {name!r} takes {', '.join(missing)} too.", "Pass all that it takes.")
    given = {key: example[key].to(dtype) for key, (dtype, _) in loaded.inputs.items()}
    loaded.run(given)
    return lambda: loaded.run(given)
