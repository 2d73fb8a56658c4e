"""What two processes save: the time of scoring minilm-rt with one process, and with two, one thread each, in turn; docs/scale.md.

    python benchmarks/ranks.py                                # writes section `ranks` of docs/scale.md; about ten minutes on two idle cores
    python benchmarks/ranks.py --sentences 32 --rounds 1      # prints a quick look, writes nothing

The processes load the model and the examples anew each round, which is not counted. What is timed is `headprune.score`
with everything in it (checking the loss, hashing the weights, trace of the layers apart), by the two methods that `headprune score`
takes by default; for two processes until both are through. The scores of all must be equal to the bit.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from document import replace_section

from tests.support.interrupted import Processes

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
METHODS = ("ablation", "gradient")
GOAL = 0.6


def score(minilm: str, sentences: int, batch: int, method: str) -> dict[str, Any]:
    """Seconds that one rank scores, and a hash of the scores."""
    import torch

    import headprune as hp
    from headprune.app.data import load_parts
    from headprune.app.models import load_model
    from headprune.app.options import DataOptions, LoadOptions
    from headprune.files import digest
    from headprune.parallel import current, launcher_ranks

    loaded = load_model(minilm, LoadOptions(device="cpu"))
    data = DataOptions(f"{minilm}/data", limit=sentences, batch_size=batch, report_limit=1)
    batches = list(load_parts(data, loaded).score.batches())
    layers = hp.find_attention(loaded.model, batches[0])
    with launcher_ranks():
        hp.score(loaded.model, batches[:1], method, layers=layers)  # what torch loads on first use
        current().gather("begin", None)
        began = time.perf_counter()
        scores = hp.score(loaded.model, batches, method, layers=layers)
        seconds = time.perf_counter() - began
    known = digest(repr((scores.flat().tolist(), scores.flat_stderr().tolist())))
    return {"seconds": seconds, "batches": len(batches), "torch": torch.__version__, "scores": known}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every round, by method and number of processes."""
    processes, found = Processes(), {method: {1: [], 2: []} for method in METHODS}
    given = {"minilm": str(options.minilm), "sentences": options.sentences, "batch": options.batch}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(options.rounds):
            for method in METHODS:
                hashes = set()
                for count in (1, 2) if round_ % 2 else (2, 1):
                    ranks = processes.call(Path(folder), count, "benchmarks.ranks:score", **given, method=method)
                    hashes |= {rank["scores"] for rank in ranks}
                    found[method][count].append(max(rank["seconds"] for rank in ranks))
                    print(f"round {round_ + 1}, {method}, {count} process(es): {found[method][count][-1]:.2f} s", file=sys.stderr)  # fmt: skip
                if len(hashes) > 1:
                    raise SystemExit(f"The scores by {method} depend on the number of processes.")
    processes.close()
    return {"seconds": found, "batches": ranks[0]["batches"], "torch": ranks[0]["torch"]}


def section(found: dict[str, Any], options: argparse.Namespace) -> str:
    """The section of docs/scale.md."""
    rows = []
    for method, seconds in found["seconds"].items():
        one, two = (statistics.median(seconds[count]) for count in (1, 2))
        ratios = sorted(b / a for a, b in zip(seconds[1], seconds[2], strict=True))
        rows.append(
            f"| `{method}` | {one:.2f} | {two:.2f} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )
    command = shlex.join(["python", "benchmarks/ranks.py", *sys.argv[1:]])
    return "\n".join(
        [
            "### Two processes, measured",
            "",
            f"Scoring minilm-rt (72 heads, {options.sentences} sentences in {found['batches']} batches of {options.batch}) by one process, and by two, "
            f"one thread each, in turn; medians of {options.rounds} rounds, and the ratio of a round's two times. The scores are equal to the bit. "
            f"The goal was {GOAL}. Made by `{command}` with torch {found['torch']}.",
            "",
            "| method | one process, s | two, s | two ÷ one | from … to |",
            "|---|---:|---:|---:|---:|",
            *rows,
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, default=MINILM, help="the model's folder, with its data in data/")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    text = section(measure(options), options)
    print(text)
    if len(sys.argv) == 1:
        replace_section(ROOT / "docs" / "scale.md", "ranks", text)


if __name__ == "__main__":
    main()
