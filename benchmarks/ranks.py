"""What two processes save: the time of scoring minilm-rt with one process, and with two, one thread each, in turn; docs/scale.md.

    python benchmarks/ranks.py                                # writes section `ranks` of docs/scale.md; about ten minutes on two idle cores
    python benchmarks/ranks.py --sentences 32 --rounds 1      # prints a quick look, writes nothing

All three processes load the model and the examples once, and then take turns: the others sleep. What is timed is `headprune.score`
with everything in it (trace of the layers apart), by the two methods that `headprune score` takes by default; for two processes until both
are through. The scores of all must be equal to the bit.
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

from document import replace_section

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
METHODS = ("ablation", "gradient")


def worker(options: argparse.Namespace) -> None:
    """Score when told to: a method's name on stdin, seconds and the scores on stdout."""
    import torch
    from accelerate import Accelerator

    import headprune as hp
    from headprune.app.data import DataOptions, load_parts
    from headprune.app.models import load_model
    from headprune.parallel import launched
    from headprune.store import digest

    torch.set_num_threads(1)
    loaded = load_model(str(options.minilm), device="cpu")
    data = DataOptions(str(options.minilm / "data"), limit=options.sentences, report_limit=1)
    batches = list(load_parts(data, loaded).score.batches())
    layers, accelerator = hp.find_attention(loaded.model, batches[0]), Accelerator(cpu=True)
    print(json.dumps({"batches": len(batches), "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        found = hp.score(loaded.model, batches, line.strip(), layers=layers, accelerator=accelerator)
        print(json.dumps([time.perf_counter() - began, found.flat().tolist()]), flush=True)


def started(count: int, options: argparse.Namespace) -> list[subprocess.Popen[str]]:
    """Processes that score together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = [sys.executable, __file__, "--worker", "--minilm", str(options.minilm), "--sentences", str(options.sentences)]
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1"}
    if count > 1:
        common |= {"WORLD_SIZE": str(count), "MASTER_PORT": port}
    return [
        subprocess.Popen(
            own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **common, **({"RANK": str(r), "LOCAL_RANK": str(r)} if count > 1 else {})},
        )
        for r in range(count)
    ]  # fmt: skip


def told(processes: list[subprocess.Popen[str]], line: str = "") -> list[Any]:
    """Tell all processes a method, and wait for their answers."""
    for process in processes if line else ():
        print(line, file=process.stdin, flush=True)
    return [json.loads(process.stdout.readline()) for process in processes]  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, default=MINILM, help="the model's folder, with its data in data/")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    workers = {count: started(count, options) for count in (1, 2)}
    facts, _ = [told(processes)[0] for processes in workers.values()]
    rows = []
    for method in METHODS:
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(options.rounds + 1):  # the first one warms up
            found = {count: told(workers[count], method) for count in ((1, 2) if turn % 2 else (2, 1))}
            if len({str(scores) for answers in found.values() for _, scores in answers}) > 1:
                raise SystemExit(f"The scores by {method} depend on the number of processes.")
            for count in (1, 2) if turn else ():
                seconds[count].append(max(took for took, _ in found[count]))
        one, two = (statistics.median(seconds[count]) for count in (1, 2))
        ratios = sorted(b / a for a, b in zip(seconds[1], seconds[2], strict=True))
        cells = f"{one:.2f} | {two:.2f} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append(f"| `{method}` | {cells} |")
        print(rows[-1], file=sys.stderr)
    for process in [process for processes in workers.values() for process in processes]:
        process.stdin.close()  # type: ignore[union-attr]
    text = "\n".join([
        "### Two processes, measured", "",
        f"Scoring minilm-rt (72 heads, {options.sentences} sentences in {facts['batches']} batches) by one process, and by two, one thread each, in turn; medians of "
        f"{options.rounds} rounds, and the ratio of a round's two times. The scores are equal to the bit. Made by "
        f"`{shlex.join(['python', 'benchmarks/ranks.py', *sys.argv[1:]])}` with torch {facts['torch']}.", "",
        "| method | one process, s | two, s | two ÷ one | from … to |", "|---|---:|---:|---:|---:|", *rows,
    ])  # fmt: skip
    print(text)
    if len(sys.argv) == 1:
        replace_section(ROOT / "docs" / "scale.md", "ranks", text)


if __name__ == "__main__":
    main()
