"""What `headprune prune` costs, stage by stage, in forward passes of the dense model over the scoring examples.

    python benchmarks/passes.py                          # the demo's ViT; and minilm-rt, where ../shared/real/minilm-rt is
    python benchmarks/passes.py minilm --keep 36         # one of them, with other budgets

A stage is what the command line shows as one line; its cost is CPU time of this process, divided by that of one forward pass
over the scoring examples (measured by the same clock, so that a busy machine changes little). Beside it stands how many passes were really
run. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import real
import torch
import transformers as tf
from real import MINILM, say
from torch import nn
from typer.testing import CliRunner

from headprune.app import demo
from headprune.app.console import Console
from headprune.cli import app


class Meter:
    """Meters every stage that the command tells of, and what comes between two of them."""

    def __init__(self) -> None:
        self.stages: dict[str, list[float]] = {}  # CPU seconds, and examples that were run through the model
        self.since, self.examples, self.track = time.process_time(), 0.0, Console.track

    def close(self, label: str) -> None:
        now, stage = time.process_time(), self.stages.setdefault(label, [0.0, 0.0])
        stage[0] += now - self.since
        stage[1] += self.examples
        self.since, self.examples = now, 0.0

    def count(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, tf.PreTrainedModel) and getattr(output, "logits", None) is not None:
            self.examples += len(output.logits)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count while the context lasts."""
        meter = self

        @contextmanager
        def track(console: Console, label: str) -> Iterator[Any]:
            meter.close("between stages")
            with meter.track(console, label) as progress:
                yield progress
            meter.close(label)

        handle = nn.modules.module.register_module_forward_hook(self.count)
        Console.track = track  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Console.track = self.track  # type: ignore[method-assign]
            handle.remove()
            self.close("between stages")


def measured(name: str, model: Path, data: Path, examples: int, keep: list[str], methods: list[str]) -> dict[str, Any]:
    """A whole `headprune prune`, by stage."""
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder, meter.running():
        asked = ["prune", model, "-d", data, "-L", examples, "-o", Path(folder) / "run", "-q", "--dtype", "float32"]
        asked += [word for k in keep for word in ("--keep", k)] + [word for m in methods for word in ("-m", m)]
        result = CliRunner().invoke(app, [*map(str, asked)])
        assert result.exit_code == 0, result.output
        found = json.loads((Path(folder) / "run" / "metrics.json").read_text())
    unit = one_pass(name, examples)
    stages = {label: (seconds / unit, run / examples) for label, (seconds, run) in meter.stages.items()}
    say(f"\n{name}, {examples:,} examples, keep {', '.join(keep)}: a pass takes {unit:.2f} s of CPU time\n")
    say("| stage | passes' time | forward passes |\n|:--|--:|--:|")
    for label, (cost, run) in (*stages.items(), ("all", tuple(map(sum, zip(*stages.values(), strict=True))))):
        say(f"| {label} | {cost:.1f} | {run:.1f} |")
    accuracy = {b["kept"]: b["pruned"]["metrics"].get("accuracy") for b in found["budgets"]}
    return {"examples": examples, "keep": keep, "pass_seconds": unit, "stages": stages, "accuracy": accuracy}


def one_pass(name: str, examples: int) -> float:
    """CPU seconds of one forward pass over the scoring examples: the least of three."""
    loaded, parts = real.load(name, limit=examples)
    batches, times = list(parts.score.batches()), []
    for _ in range(3):
        started = time.process_time()
        with torch.inference_mode():
            for batch in batches:
                loaded.model(**batch)
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="digits, minilm [both]")
    parser.add_argument("--keep", action="append", help="Heads to keep; repeatable.")
    parser.add_argument("--limit", "-L", type=int, help="Scoring examples [1024; 1000 of the digits].")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    if "digits" in (given.which or ["digits"]):
        model, data, _ = demo.prepare(demo.HOME, lambda done, total: None)
        keep = given.keep or [*map(str, demo.KEEP)]
        found["digits"] = measured("digits", model, data, given.limit or 1000, keep, ["ablation", "gradient"])
    if "minilm" in (given.which or ["minilm"]) and MINILM.exists():
        data = MINILM / "data"
        found["minilm"] = measured("minilm", MINILM, data, given.limit or 1024, given.keep or ["36"], ["gradient"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
