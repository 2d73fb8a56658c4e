"""What headprune can do on every model type of the installed transformers, built tiny and random, offline.

    python benchmarks/coverage.py                      # writes docs/coverage.md
    python benchmarks/coverage.py --only bert t5       # prints these
    python benchmarks/coverage.py --check              # fails if a type of docs/coverage.md that worked stopped working

Nothing here is fitted to a list of models: a config class is made small by the usual names of its fields, a forward is tried with the
usual inputs, and what cannot be built is said. "exact" means: masked logits equal pruned logits, checked by headprune's own proof and
again here on an input that the proof has not seen.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import tiny
import torch
import transformers
from rich.progress import track
from torch import nn

import headprune as hp
from headprune.errors import first_line
from headprune.inputs import call
from headprune.surgery import answers

LIMIT = 20  # seconds for one type


class TookTooLongError(BaseException):
    """Not an Exception, so that no attempt swallows it."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Stop a type that would take all day."""

    def stop(*_: Any) -> None:
        raise TookTooLongError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def other_input(example: dict[str, Any]) -> dict[str, Any]:
    """Same form, other content: what the proof has not seen."""
    generator = torch.Generator().manual_seed(7)
    made = dict(example)
    for name, value in example.items():
        if value.is_floating_point():
            made[name] = torch.randn(value.shape, generator=generator)
        elif "input_ids" in name:
            made[name] = value[:, torch.randperm(value.shape[1], generator=generator)]
    return made


def close(a: Any, b: Any) -> bool:
    pairs = list(zip(answers(a), answers(b), strict=True))
    return all((x - y).abs().max() <= 1e-4 * y.abs().max().clamp(min=1e-30) for x, y in pairs)


def randomise(model: nn.Module) -> None:
    """Every matrix large enough for each head to matter; small models are initialised near zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2 and p.is_floating_point():
                p.copy_(torch.randn(p.shape, generator=generator) / max(p.shape[-1], 1) ** 0.5)


def mask_is_right(model: nn.Module, layer: Any, layers: list[Any], example: dict[str, Any]) -> bool:
    """Brute force: masking head 0 equals setting its columns of W_O to zero."""
    with torch.no_grad(), hp.mask(model, {layer.name: [0]}, layers=layers):
        masked = call(model, example)
    zeroed = copy.deepcopy(model)
    module = zeroed.get_submodule(layer.output_projection.module)
    columns = list(layer.output_projection.features[0])
    with torch.no_grad():
        if isinstance(module, nn.Linear):
            module.weight[:, columns] = 0
        else:
            module.weight[columns] = 0
        return close(masked, call(zeroed, example))


def examine(model_type: str) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"type": model_type, "layers": 0, "mask": 0, "prune": 0, "groups": "", "why": "", "status": "not built"}
    started = time.monotonic()
    try:
        with limited(LIMIT), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                model, _, example = tiny.build(model_type)
            except Exception as error:
                return {**row, "why": f"{type(error).__name__}: {first_line(error)}"[:160]}
            row["status"] = "CRASH"
            randomise(model)
            row.update(trial(model, example))
    except TookTooLongError as error:
        row.update(status="too slow", why=str(error))
    except Exception as error:
        row.update(status="CRASH", why=f"{type(error).__name__}: {first_line(error)}"[:160])
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def trial(model: nn.Module, example: dict[str, Any]) -> dict[str, Any]:
    """Mask and prune every layer, and look whether that was exact."""
    try:
        layers = hp.find_attention(model, example)
    except hp.HeadPruneError as error:
        return {"status": "no attention", "why": error.args[0][:160]}
    row: dict[str, Any] = {"layers": len(layers), "groups": ", ".join(map(str, sorted({len(a.units[0]) for a in layers if a.groups})))}
    reasons = []
    for layer in layers:
        if not layer.maskable or not layer.prunable:
            reasons.append(layer.reason)
        if layer.maskable and not mask_is_right(model, layer, layers, example):
            return {**row, "status": "WRONG", "why": f"masking {layer.name} is not exact"}
    maskable = [layer for layer in layers if layer.maskable]
    able = {layer.name: first_unit(layer) for layer in maskable if layer.prunable}
    # All layers together; where that fails, one by one.
    if able and not (failed := removal_fails(model, able, layers, example)):
        pruned = len(able)
    else:
        pruned = 0
        for name, drop in able.items():
            failed = removal_fails(model, {name: drop}, layers, example)
            pruned += not failed
            reasons.append(failed)
    if any(r.startswith("WRONG") for r in reasons):
        return {**row, "status": "WRONG", "why": next(r for r in reasons if r.startswith("WRONG"))}
    status = "exact" if pruned == len(layers) else "in part" if pruned else "masked" if maskable else "refused"
    return {
        **row, "status": status, "mask": len(maskable), "prune": pruned,
        "why": "; ".join(dict.fromkeys(r for r in reasons if r))[:300],
    }  # fmt: skip


def first_unit(layer: Any) -> list[int]:
    """One head or group; all, where there is one alone."""
    return list(layer.units[0]) if len(layer.units) > 1 else list(range(layer.num_heads))


def removal_fails(model: nn.Module, drop: dict[str, list[int]], layers: list[Any], example: dict[str, Any]) -> str:
    """Why this cannot be pruned, or ""."""
    pruned = copy.deepcopy(model)
    try:
        hp.prune(pruned, drop, example, layers=layers)
    except hp.PruneError as error:
        return str(error.args[0].split(": ", 1)[1].removesuffix(" The model is unchanged."))
    unseen = other_input(example)
    with torch.no_grad(), hp.mask(model, drop, layers=layers):
        expected = call(model, unseen)
    with torch.no_grad():
        return "" if close(call(pruned, unseen), expected) else f"WRONG: pruning {', '.join(drop)} is not exact"


def table(rows: list[dict[str, Any]], seconds: float) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    have = [r for r in rows if r["status"] not in ("not built", "no attention", "too slow")]
    lines = [
        "# Coverage",
        "",
        f"Made by `python benchmarks/coverage.py` with transformers {transformers.__version__} and torch {torch.__version__} in "
        f"{seconds:.0f} s: every model type, tiny and random. Of {len(rows)} types {len(have)} could be built and have softmax "
        f"attention; heads can be masked exactly in all layers of {sum(r['mask'] == r['layers'] for r in have)} and pruned exactly "
        f"in all layers of {counts.get('exact', 0)} (in some layers of {counts.get('in part', 0)} more). Wrong: "
        f"{counts.get('WRONG', 0)}. Crashed: {counts.get('CRASH', 0)}.",
        "",
        "“exact”: one head, or one key/value group, of each layer was removed, and the outputs equal the masked model's, on the proof's "
        "inputs and on one that the proof has not seen. A type that is not built here may still work: it needs inputs or fields that "
        "this script does not guess.",
        "",
        "| type | status | layers | masked | pruned | group | why not |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['type']} | {r['status']} | {r['layers']} | {r['mask']} | {r['prune']} | {r['groups']} | {r['why'].replace('|', '/')} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def worked(text: str) -> dict[str, int]:
    """Layers pruned, by type, in an earlier table."""
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {c[0]: int(c[4]) for c in cells if len(c) == 7 and c[4].isdigit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="these types")
    parser.add_argument("--output", type=Path, default=Path("docs/coverage.md"))
    parser.add_argument("--check", action="store_true", help="compare with the output file instead of writing it")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    types = options.only or tiny.model_types()
    started = time.monotonic()
    # A process serves a few dozen types, since each leaves its modules in memory.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=50) as pool:
        rows = list(track(pool.imap_unordered(examine, types), "model types", len(types), disable=not sys.stderr.isatty()))
    rows.sort(key=lambda row: str(row["type"]))
    if options.only:
        print(json.dumps(rows, indent=1))
        return
    if options.check:
        before = worked(options.output.read_text())
        lost = [r["type"] for r in rows if r["prune"] < before.get(r["type"], 0) or r["status"] in ("WRONG", "CRASH")]
        print(f"{len(rows)} types; worse than {options.output}: {', '.join(lost) or 'none'}")
        sys.exit(1 if lost else 0)
    options.output.write_text(table(rows, time.monotonic() - started))
    summary = {s: sum(r["status"] == s for r in rows) for s in sorted({r["status"] for r in rows})}
    print(json.dumps({"types": len(rows), **summary, "seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
