"""minilm-rt pruned, written as ONNX and for OpenVINO: the same answers, sizes, and how fast; writes docs/deploy.md.

    python benchmarks/export_onnx.py ../shared/real/minilm-rt              # section `onnx`; some minutes
    python benchmarks/export_onnx.py ../shared/real/minilm-rt --print      # and leaves the document as it is

Heads go by their gradient scores on 128 sentences, from the lowest up. The name is not onnx.py, which would hide the package of that
name from every script of this folder. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from document import replace_section
from torch import nn

import headprune as hp
from headprune.app.models import load_model
from headprune.attention import Heads
from headprune.exporting import export, time_onnx
from headprune.latency import shaped

DOCUMENT = Path(__file__).parent.parent / "docs" / "deploy.md"
ENGINES = {"onnxruntime": "onnx", "OpenVINO": "openvino"}


def batches(model_folder: Path, tokenizer: Any, count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences with labels, 16 a batch."""
    lines = (model_folder / "data" / "train.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    found = []
    for start in range(0, count, 16):
        part = rows[start : start + 16]
        made = tokenizer([r["text"] for r in part], return_tensors="pt", padding=True, truncation=True, max_length=64)
        found.append({**made, "labels": torch.tensor([r["label"] for r in part])})
    return found


def variants(dense: nn.Module, examples: list[dict[str, torch.Tensor]]) -> Iterator[tuple[str, nn.Module]]:
    """(what was done, model), one at a time."""
    yield "dense", dense
    layers = hp.find_attention(dense, examples[0])
    plan = hp.plan(hp.score(dense, examples, "gradient"), keep="50%")
    middle: Heads = {layers[i].name: list(range(layers[i].num_heads)) for i in (2, 3)}
    for name, drop in {"50 % of heads": plan, "50 % of heads, repaired": plan, "2 of 6 layers emptied": middle}.items():
        model = copy.deepcopy(dense)
        if "repaired" in name:
            hp.repair(model, drop, examples, layers=layers)
        hp.prune(model, drop, examples[0], layers=layers)
        yield name, model


def section(rows: list[dict[str, Any]], batch: int, length: int, threads: int) -> str:
    lines = [
        "| minilm-rt | heads | onnxruntime: off | OpenVINO: off | ONNX file | PyTorch | onnxruntime | OpenVINO |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [f"{r['off'][e]:.0e}" for e in ENGINES]
        speeds = []
        for engine in ("PyTorch", *ENGINES):
            median, ratio = r["median"][engine], r["ratio"].get(engine)
            gain = f", {ratio['ratio']:.2f} x ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""
            speeds.append(f"{median:.1f} ms{gain}")
        lines.append(
            f"| {r['model']} | {r['heads']} | {' | '.join(cells)} | {r['megabytes']:.1f} MB | {' | '.join(speeds)} |"
        )
    about = (
        f"Float32. Off: the largest difference on all shapes tried, as a share of the largest logit. Times: medians of a batch of {batch} x {length} tokens, "
        f"{threads} thread(s), and how many times as fast as dense in the same engine (timed in turn; 95 % intervals). "
        f"{rows[0]['engines']}, torch {torch.__version__}; {os.cpu_count()} cores, load average meanwhile {os.getloadavg()[1]:.0f}."
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the folder of minilm-rt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="print the section, and leave the document as it is")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(str(options.model), device="cpu")
    examples = batches(options.model, loaded.processor, 128)
    timed = shaped(examples[0], options.batch, options.length)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        models: dict[str, nn.Module] = {}
        files: dict[str, dict[str, Path]] = {engine: {} for engine in ENGINES}
        for name, model in variants(loaded.model, examples):
            row: dict[str, Any] = {"model": name, "off": {}, "engines": []}
            row["heads"] = sum(layer.num_heads for layer in hp.find_attention(model, examples[0]))
            for engine, to in ENGINES.items():
                path = Path(folder, f"{len(models)}{'.onnx' if to == 'onnx' else '-openvino'}")
                done = export(model, path, to)
                files[engine][name] = path
                row["off"][engine] = done.facts["proof"]["largest_difference"]
                row["engines"].append(done.facts["proof"]["engine"])
                if to == "onnx":
                    row["megabytes"] = done.facts["bytes"] / 1e6
            row["engines"] = ", ".join(row["engines"])
            models[name] = model
            rows.append(row)
            print(json.dumps(row), flush=True)
        latencies = {"PyTorch": hp.benchmark(models, timed)}
        latencies |= {engine: time_onnx(own, timed, threads=options.threads) for engine, own in files.items()}
    for row in rows:
        row["median"] = {engine: found.timings[row["model"]].median for engine, found in latencies.items()}
        row["ratio"] = {
            engine: found.to_json()["speedups"][row["model"]]
            for engine, found in latencies.items() if row["model"] in found.speedups
        }  # fmt: skip
    text = section(rows, options.batch, options.length, options.threads)
    print(f"\n{text}\n")
    if not options.print:
        replace_section(DOCUMENT, "onnx", text)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
