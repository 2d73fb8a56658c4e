"""Whether pruned models of every type go to ONNX where their dense models do, with the same answers in onnxruntime.

    python benchmarks/coverage_onnx.py --rows onnx.jsonl               # tries the types that are not in that file, one process; 2 hours
    python benchmarks/coverage_onnx.py --rows onnx.jsonl --only bert   # these, again
    python benchmarks/coverage_onnx.py --rows onnx.jsonl --write       # writes docs/coverage-onnx.md, runs nothing

Types are those that docs/coverage.md calls exact. Each is pruned unevenly, and its last layer emptied, as far as it can be; dense and
pruned are exported by `headprune.exporting.export`, which compares onnxruntime's answers. A row is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage_types as coverage  # first: it says offline before transformers is imported
import tiny
import torch
import transformers
from document import replace_section
from torch import nn

import headprune as hp
from headprune.attention import AttentionLayer, Heads
from headprune.exporting import export
from headprune.exporting.base import Exported
from headprune.input_specs import record

TYPES = Path(__file__).parent.parent / "docs" / "coverage.md"
DOCUMENT = TYPES.with_name("coverage-onnx.md")
LIMIT = 150  # seconds of computing for a type, dense and pruned, on a machine that may be busy


def exact_types() -> list[str]:
    """Those that docs/coverage.md calls exact."""
    cells = [[c.strip() for c in line.split("|")[1:3]] for line in TYPES.read_text().splitlines()]
    return [c[0] for c in cells if c[1:] == ["exact"]]


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Stop a type that would take all day; collect no garbage meanwhile, which takes a quarter of the time."""

    def stop(*_: Any) -> None:
        raise coverage.TookTooLongError(f"took more than {seconds} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    gc.disable()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.enable()
        gc.collect()


def examine(model_type: str) -> dict[str, Any]:
    """One row: what became of the dense model and of the pruned one; "" is a file that gives the model's answers."""
    row: dict[str, Any] = {"type": model_type, "dense": "not tried", "pruned": "not tried", "emptied": 0, "layers": 0}
    started = time.process_time()
    step = "dense"
    try:
        with (
            limited(LIMIT), tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()),
        ):  # fmt: skip
            model, _, example = tiny.build(model_type)
            coverage.randomise(model, example)
            record(model, example)
            try:
                done = export(model, Path(folder, "dense.onnx"), "onnx")
            except hp.HeadPruneError as error:
                row["dense"] = coverage.why(error).removeprefix("HeadPruneError: ")
                return row
            row |= {"dense": "", "free": free(done)}
            step = "pruned"
            layers = hp.find_attention(model, example)
            pruned, emptied = cut(model, layers, example)
            row |= {"layers": len(layers), "emptied": emptied}
            done = export(pruned, Path(folder, "pruned.onnx"), "onnx")
            row |= {"pruned": "", "pruned_free": free(done), "off": done.facts["proof"]["largest_difference"]}
    except (Exception, coverage.TookTooLongError) as error:
        row[step] = coverage.why(error)
    finally:
        row["seconds"] = round(time.process_time() - started, 1)
    return row


def free(done: Exported) -> list[str]:
    """The sizes that a file leaves free."""
    return sorted({d for shape in done.facts["inputs"].values() for d in shape if isinstance(d, str)})


def cut(model: nn.Module, layers: list[AttentionLayer], example: Any) -> tuple[nn.Module, int]:
    """The model pruned, and how many layers it lost whole: the last one, and of the others one unit, two, one, …; less where refused."""
    uneven: dict[str, Heads] = {}
    for number, layer in enumerate(layers):
        many = min(1 + number % 2, max(len(layer.units) - 1, 1))
        uneven[layer.name] = [h for unit in layer.units[:many] for h in unit]
    last = {**uneven, layers[-1].name: list(range(layers[-1].num_heads))}
    plans = [last, uneven, {layer.name: coverage.first_unit(layer) for layer in layers}]
    for plan in plans:
        pruned = copy.deepcopy(model)
        try:
            hp.prune(pruned, plan, example, layers=layers)
        except hp.PruneError:
            continue
        return pruned, sum(len(plan[layer.name]) == layer.num_heads for layer in layers)
    raise RuntimeError("not pruned as in docs/coverage.md")


def section(rows: list[dict[str, Any]]) -> str:
    """What docs/coverage-onnx.md says."""
    takes = [r for r in rows if r["dense"] == ""]
    both = [r for r in takes if r["pruned"] == ""]
    emptied = sum(bool(r["emptied"]) for r in both)
    loose = [r for r in both if r["free"]]
    lines = [
        "# Pruned models as ONNX",
        "",
        f"Made by `python benchmarks/coverage_onnx.py` with transformers {transformers.__version__} and torch {torch.__version__}: every "
        "type that is pruned exactly, dense and pruned (unevenly, and its last layer emptied where it can be), by `headprune export --to onnx`. "
        "A file counts if onnxruntime gives the model's answers, to 1e-4 of the largest, on every shape tried.",
        "",
        f"- {len(rows)} of {len(exact_types())} types were tried, in a random order; of {len(takes)} the dense model goes to ONNX.",
        f"- **Of these {len(takes)}, {len(both)} go pruned ({len(both) / max(len(takes), 1):.1%})**; {emptied} of them with a layer that has no "
        f"heads; {len(loose)} with the batch or lengths free, {sum(r['free'] == r['pruned_free'] for r in both)} with as much free as the dense model.",
        "",
        "| type | dense goes, pruned does not, since |", "|---|---|",
        *(f"| {r['type']} | {said(r['pruned'])} |" for r in takes if r["pruned"]), "",
        "| dense models that do not go, since | types |", "|---|---|",
    ]  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for r in rows:
        if r["dense"]:
            reasons.setdefault(said(r["dense"]), []).append(r["type"])
    lines += [f"| {reason} | {', '.join(types)} |" for reason, types in sorted(reasons.items())]
    return "\n".join(lines)


def said(reason: str) -> str:
    return reason.replace("|", "/").replace("\n", " ")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by type, the latest of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="a file of JSON lines, added to")
    parser.add_argument("--only", nargs="*", help="these types, whether they are in the file or not")
    parser.add_argument("--write", action="store_true", help="write docs/coverage-onnx.md from the file")
    options = parser.parse_args()
    if options.write:
        replace_section(DOCUMENT, "onnx", section(sorted(read(options.rows).values(), key=lambda r: r["type"])))
        return
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.nice(15)
    done = read(options.rows)
    types = options.only or [t for t in exact_types() if t not in done]
    random.Random(0).shuffle(types)  # so that those of an unfinished run stand for all
    counts: Counter[str] = Counter()
    # A process serves a few dozen types, since each leaves its modules in memory.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=30) as pool, options.rows.open("a") as out:
        for row in pool.imap_unordered(examine, types):
            out.write(json.dumps(row) + "\n")
            out.flush()
            counts["takes"] += not row["dense"]
            counts["both"] += not row["dense"] and not row["pruned"]
            if row["dense"] or row["pruned"]:
                print(json.dumps(row), flush=True)
    print(json.dumps({"types": len(types), **counts}))


if __name__ == "__main__":
    main()
