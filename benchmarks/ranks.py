"""What two processes save: the time of scoring minilm-rt with one process, and with two, one thread each, in turn; docs/scale.md.

    python benchmarks/ranks.py                                # writes section `ranks` of docs/scale.md; about ten minutes on two idle cores
    python benchmarks/ranks.py --sentences 32 --rounds 1      # prints a quick look, writes nothing

All three processes load the model and the examples once, and then take turns: the others sleep. What is timed is `headprune.score`
with everything in it (checking the loss, hashing the weights, trace of the layers apart), by the two methods that `headprune score`
takes by default; for two processes until both are through. The scores of all must be equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
METHODS = ("ablation", "gradient")
GOAL = 0.6


def worker(options: argparse.Namespace) -> None:
    """Score when told to: a method's name on stdin, seconds and a hash of the scores on stdout."""
    import torch

    import headprune as hp
    from headprune.app.data import load_parts
    from headprune.app.models import load_model
    from headprune.app.options import DataOptions, LoadOptions
    from headprune.parallel import launcher_ranks
    from headprune.store import digest

    torch.set_num_threads(1)
    loaded = load_model(str(options.minilm), LoadOptions(device="cpu"))
    data = DataOptions(str(options.minilm / "data"), limit=options.sentences, batch_size=options.batch, report_limit=1)
    batches = list(load_parts(data, loaded).score.batches())
    layers = hp.find_attention(loaded.model, batches[0])
    with launcher_ranks():
        print(json.dumps({"batches": len(batches), "torch": torch.__version__}), flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            found = hp.score(loaded.model, batches, line.strip(), layers=layers)
            seconds = time.perf_counter() - began
            print(json.dumps({"seconds": seconds, "scores": digest(found.flat(), found.flat_stderr())}), flush=True)


class Workers:
    """Processes that score together."""

    def __init__(self, count: int, options: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        own = [sys.executable, __file__, "--worker", "--minilm", str(options.minilm)]
        own += ["--sentences", str(options.sentences), "--batch", str(options.batch)]
        common = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
            "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        self.processes = [
            subprocess.Popen(
                own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(count)
        ]  # fmt: skip
        self.facts, *_ = [self._answer(process) for process in self.processes]

    def score(self, method: str) -> tuple[float, str]:
        """Seconds until all are through, and a hash of the scores."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(method + "\n")
            process.stdin.flush()
        found = [self._answer(process) for process in self.processes]
        if len({each["scores"] for each in found}) > 1:
            raise SystemExit("The processes have different scores.")
        return max(each["seconds"] for each in found), found[0]["scores"]

    def close(self) -> None:
        """End them."""
        for process in self.processes:  # all of them before the first wait: none leaves before the others are through
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("A process ended; see its error above.")
        found: dict[str, Any] = json.loads(line)
        return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every round, by method and number of processes."""
    workers = {count: Workers(count, options) for count in (1, 2)}
    found: dict[str, dict[int, list[float]]] = {method: {1: [], 2: []} for method in METHODS}
    for round_ in range(options.rounds + 1):  # the first one warms up
        for method in METHODS:
            hashes = set()
            for count in (1, 2) if round_ % 2 else (2, 1):
                seconds, scores = workers[count].score(method)
                hashes.add(scores)
                if round_:
                    found[method][count].append(seconds)
                print(f"round {round_}, {method}, {count} process(es): {seconds:.2f} s", file=sys.stderr)
            if len(hashes) > 1:
                raise SystemExit(f"The scores by {method} depend on the number of processes.")
    for each in workers.values():
        each.close()
    return {"seconds": found, **workers[1].facts}


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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    text = section(measure(options), options)
    print(text)
    if len(sys.argv) == 1:
        from document import replace_section

        replace_section(ROOT / "docs" / "scale.md", "ranks", text)


if __name__ == "__main__":
    main()
