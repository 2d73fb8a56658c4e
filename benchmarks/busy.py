"""How much longer the demo takes beside two processes that never rest; the last line is JSON.

    python benchmarks/busy.py                 # three rounds, about twelve minutes on 2 cores, on which nothing else should run

The demo is trained anew each time, alone and beside the two, in turn: ratios are of one round.
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
from pathlib import Path

ROOT = Path(__file__).parent.parent


def demo(busy: int) -> float:
    """Seconds of the demo, from nothing, beside so many processes that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            command = [sys.executable, "-m", "headprune", "demo", "-q"]
            own = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            subprocess.run(command, cwd=folder, env=own, check=True, capture_output=True)
            return time.monotonic() - began
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = [(demo(0), demo(2)) for _ in range(parser.parse_args().rounds)]
    alone, ratios = [one for one, _ in rounds], [busy / one for one, busy in rounds]
    print(json.dumps({
        "seconds alone": [round(one, 1) for one in alone],
        "busy / alone": {"median": round(statistics.median(ratios), 2), "from": round(min(ratios), 2), "to": round(max(ratios), 2)},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
