"""What a busy machine costs, and what OpenMP's threads cost that soon sleep while they wait (`headprune.cli.app.wait_asleep`).

    python benchmarks/busy.py                                # about fifteen minutes on 2 cores, on which nothing else should run
    python benchmarks/busy.py --rounds 1 --no-demo           # a short look

The demo, trained anew each time, runs alone and beside two processes that never rest, in turn. Small and larger work is done in pairs
of processes, one whose threads spin (PyTorch's own setting) and one whose threads sleep, alone and beside the two. The last line is JSON:
ratios of a pair's times, as the median of the rounds and their range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_NUM_THREADS")
_SECONDS = 2.0  # of each kind of work


def _environment() -> dict[str, str]:
    """This process's, without what would decide how threads wait."""
    own = {k: v for k, v in os.environ.items() if k not in _SETTINGS}
    return own | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _demo() -> float:
    """Seconds of the demo, from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, "-m", "headprune", "demo", "-q"]
        subprocess.run(command, cwd=folder, env=_environment(), check=True, capture_output=True)
        return time.monotonic() - began


def _works() -> dict[str, Callable[[], Any]]:
    """Passes of models and the matrix work of a refit, small and larger."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    vit = tf.ViTForImageClassification(
        tf.ViTConfig(
            image_size=8, num_channels=1, patch_size=2, num_hidden_layers=4, num_attention_heads=6, hidden_size=96,
            intermediate_size=192,
        )
    ).eval()  # fmt: skip
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    bert = tf.BertForSequenceClassification(tf.BertConfig(vocab_size=1000, **sizes)).eval()
    images, ids = torch.randn(32, 1, 8, 8), torch.randint(1000, (16, 32))
    small, large = (torch.eye(n) * n + torch.randn(n, n) @ torch.randn(n, n).T / n for n in (96, 1024))
    return {
        "digits' ViT": lambda: vit(pixel_values=images),
        "minilm's BERT": lambda: bert(input_ids=ids),
        "minilm's BERT, back too": lambda: bert(input_ids=ids).logits.sum().backward(),
        "one sentence": lambda: bert(input_ids=ids[:1]),
        "solve 96": lambda: torch.linalg.solve(small, small[:, :64]),
        "solve 1024": lambda: torch.linalg.solve(large, large),
    }


def _child(sleeps: bool) -> None:
    """Print the seconds that a round of each kind of work takes."""
    if sleeps:
        from headprune.cli.app import wait_asleep

        wait_asleep()
    found = {}
    for name, work in _works().items():
        work()
        rounds, began = 0, time.monotonic()
        while (took := time.monotonic() - began) < _SECONDS:
            work()
            rounds += 1
        found[name] = took / rounds
    print(json.dumps(found))


def _pair(first: bool) -> dict[str, float]:
    """Time of threads that sleep / of threads that spin, for each kind of work."""
    times = {}
    for sleeps in (first, not first):
        command = [sys.executable, __file__, "--child", "sleep" if sleeps else "spin"]
        done = subprocess.run(command, env=_environment(), check=True, capture_output=True, text=True)
        times[sleeps] = json.loads(done.stdout.splitlines()[-1])
    return {name: times[True][name] / times[False][name] for name in times[True]}


def _told(values: list[float]) -> list[float]:
    """Median, lowest, highest."""
    return [round(x, 3) for x in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="processes that never rest")
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--child", choices=("spin", "sleep"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child == "sleep")
        return
    pairs: dict[str, list[dict[str, float]]] = {"alone": [], "busy": []}
    demos: dict[str, list[float]] = {"alone": [], "busy": []}
    for turn in range(options.rounds):
        for place, count in (("alone", 0), ("busy", options.busy)):
            with _busy(count):
                pairs[place].append(_pair(turn % 2 == 0))
                if not options.no_demo:
                    demos[place].append(_demo())
            print(
                turn + 1, place, {k: round(v, 3) for k, v in pairs[place][-1].items()}, *demos[place][-1:], flush=True
            )
    found: dict[str, Any] = {
        f"sleep / spin, {place}": {name: _told([r[name] for r in rounds]) for name in rounds[0]}
        for place, rounds in pairs.items()
    }
    if not options.no_demo:
        found["demo alone, s"] = _told(demos["alone"])
        found["demo busy / alone"] = _told([b / a for a, b in zip(demos["alone"], demos["busy"], strict=True)])
    print(json.dumps({"cores": os.cpu_count(), "busy": options.busy, "rounds": options.rounds, **found}))


if __name__ == "__main__":
    main()
