"""Whether pruned models of every type go to ONNX where their dense models do, with the same answers in onnxruntime.

    python benchmarks/coverage_onnx.py --rows onnx.jsonl               # tries the types that are not in that file, one process; 2 hours
    python benchmarks/coverage_onnx.py --rows onnx.jsonl --only bert   # these, again
    python benchmarks/coverage_onnx.py --rows onnx.jsonl --write       # writes docs/coverage-onnx.md, runs nothing

Types are those that docs/coverage.md calls exact. Each is pruned unevenly, and its last layer emptied, as far as it can be; dense and
pruned are exported by `headprune.export`, which compares onnxruntime's answers. A row is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import coverage_types as coverage  # first: it says offline before transformers is imported
import tiny
import torch
import transformers
from document import replace_section

import headprune as hp

TYPES = Path(__file__).parent.parent / "docs" / "coverage.md"
LIMIT = 300  # seconds for a type, dense and pruned


def exact_types() -> list[str]:
    """Those that docs/coverage.md calls exact."""
    cells = [[c.strip() for c in line.split("|")[1:3]] for line in TYPES.read_text().splitlines()]
    return [c[0] for c in cells if c[1:] == ["exact"]]


def examine(model_type: str) -> dict[str, Any]:
    """One row: what became of the dense model and of the pruned one; "" is a file that gives the model's answers."""
    row: dict[str, Any] = {"type": model_type, "dense": "not tried", "pruned": "not tried", "emptied": 0}
    step = "dense"
    try:
        with coverage.limited(LIMIT):
            model, _, example = tiny.build(model_type)
            coverage.randomise(model, example)
            layers = hp.find_attention(model, example)
            with tempfile.TemporaryDirectory() as folder:
                hp.export(model, Path(folder, "dense.onnx"), "onnx")
                row["dense"], step = "", "pruned"
                pruned, row["emptied"] = cut(model, layers, example)
                hp.export(pruned, Path(folder, "pruned.onnx"), "onnx")
                row["pruned"] = ""
    except (Exception, coverage.TookTooLongError) as error:
        row[step] = coverage.why(error).removeprefix("HeadPruneError: ")
    return row


def cut(model: Any, layers: list[hp.AttentionLayer], example: Any) -> tuple[Any, int]:
    """The model pruned, and how many layers it lost whole: the last one, and of the others one unit, two, one, …; less where refused."""
    uneven = {
        a.name: [h for unit in a.units[: min(1 + i % 2, max(len(a.units) - 1, 1))] for h in unit]
        for i, a in enumerate(layers)
    }
    last = {**uneven, layers[-1].name: list(range(layers[-1].num_heads))}
    for plan in (last, uneven, {layer.name: coverage.first_unit(layer) for layer in layers}):
        pruned = copy.deepcopy(model)
        with contextlib.suppress(hp.PruneError):
            hp.prune(pruned, plan, example, layers=layers)
            return pruned, sum(len(plan[a.name]) == a.num_heads for a in layers)
    raise RuntimeError("not pruned as in docs/coverage.md")


def section(rows: list[dict[str, Any]]) -> str:
    """What docs/coverage-onnx.md says."""
    takes = [r for r in rows if r["dense"] == ""]
    both = [r for r in takes if r["pruned"] == ""]
    reasons: dict[str, list[str]] = {}
    for r in rows:
        if r["dense"]:
            reasons.setdefault(r["dense"].replace("|", "/"), []).append(r["type"])
    return "\n".join([
        "# Pruned models as ONNX", "",
        f"Made by `python benchmarks/coverage_onnx.py` with transformers {transformers.__version__} and torch {torch.__version__}: every type that is pruned exactly, dense and "
        "pruned (unevenly, and its last layer emptied where it can be), by `headprune export --to onnx`. A file counts if onnxruntime gives the model's answers, to 1e-4 of the "
        "largest, on every shape tried.", "",
        f"- {len(rows)} of {len(exact_types())} types were tried, in a random order; of {len(takes)} the dense model goes to ONNX.",
        f"- **Of these {len(takes)}, {len(both)} go pruned ({len(both) / max(len(takes), 1):.1%})**; {sum(bool(r['emptied']) for r in both)} of them with a layer that has no heads.",
        "", "| type | dense goes, pruned does not, since |", "|---|---|",
        *(f"| {r['type']} | {r['pruned'].replace('|', '/')} |" for r in takes if r["pruned"]), "",
        "| dense models that do not go, since | types |", "|---|---|",
        *(f"| {reason} | {', '.join(types)} |" for reason, types in sorted(reasons.items())),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="a file of JSON lines, added to")
    parser.add_argument("--only", nargs="*", help="these types, whether they are in the file or not")
    parser.add_argument("--write", action="store_true", help="write docs/coverage-onnx.md from the file")
    options = parser.parse_args()
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    known = {row["type"]: row for row in map(json.loads, lines)}
    if options.write:
        replace_section(TYPES.with_name("coverage-onnx.md"), "onnx", section([known[name] for name in sorted(known)]))
        return
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.nice(15)
    types = options.only or [t for t in exact_types() if t not in known]
    random.Random(0).shuffle(types)  # so that those of an unfinished run stand for all
    # A process serves a few dozen types, since each leaves its modules in memory.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=30) as pool, options.rows.open("a") as out:
        for row in pool.imap_unordered(examine, types):
            print(json.dumps(row), file=out, flush=True)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
