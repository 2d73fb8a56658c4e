"""What `headprune prune` costs, stage by stage, in forward passes of the dense model over the scoring examples.

    python benchmarks/passes.py                          # the demo's ViT; and minilm-rt, where ../shared/real/minilm-rt is
    python benchmarks/passes.py minilm --keep 36         # one of them, with other budgets

A stage is what the command line shows as one line; its cost is CPU time of this process, divided by that of one forward pass
over the scoring examples (measured before, and after, by the same clock, so that a busy machine changes little). Beside it
stands how many passes were really run. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from scores import MINILM, say
from torch import nn

from headprune.app import demo
from headprune.app.data import DataOptions
from headprune.app.runs import RunFolder
from headprune.app.workflow import Goal, Options, PruneRun, open_scene, prune_run
from headprune.budgets import budget_of
from headprune.inputs import tensors

Progress = Callable[..., None]


class Meter:
    """Stands in for the console: every stage that a run tells of is metered, and what comes between two of them."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float, float]] = []  # (label, CPU seconds, examples run through the model)
        self.examples = 0.0
        self._since = time.process_time(), 0.0

    def say(self, text: str) -> None:
        """A line for the user."""

    @contextmanager
    def track(self, label: str) -> Iterator[Progress]:
        """A stage."""
        self._close("between stages")
        yield lambda done, total, note="": None
        self._close(label)

    @contextmanager
    def counting(self, kind: type[nn.Module]) -> Iterator[None]:
        """Count the examples that models of a kind are run on."""

        def count(module: nn.Module, args: Any, output: Any) -> None:
            if type(module) is kind:
                logits = getattr(output, "logits", None)
                self.examples += len(logits if logits is not None else tensors(output)[0])

        handle = nn.modules.module.register_module_forward_hook(count)
        try:
            yield
        finally:
            handle.remove()
            self._close("between stages")

    def _close(self, label: str) -> None:
        seconds, examples = self._since
        self._since = time.process_time(), self.examples
        self.stages.append((label, self._since[0] - seconds, self._since[1] - examples))


def one_pass(model: nn.Module, batches: list[Any]) -> float:
    """CPU seconds of one forward pass: the least of three."""
    found = []
    for _ in range(3):
        started = time.process_time()
        with torch.inference_mode():
            for batch in batches:
                model(**batch)
        found.append(time.process_time() - started)
    return min(found)


def measured(name: str, options: Options, keep: list[str], methods: list[str]) -> dict[str, Any]:
    """A whole `headprune prune`, by stage."""
    meter = Meter()
    scene = open_scene(options, meter)
    scene.model.eval()
    batches = list(scene.parts.score.batches())
    unit, examples = one_pass(scene.model, batches), len(scene.parts.score)
    meter.stages.clear()
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder, meter.counting(type(scene.model)):
        goal = Goal(tuple(budget_of(f"keep {k}") for k in keep))
        found = prune_run(PruneRun(options, goal, methods), RunFolder(Path(folder) / "run"), meter)
    seconds = time.process_time() - started
    unit = min(unit, one_pass(scene.model, batches))
    stages: dict[str, list[float]] = {}
    for label, spent, run in meter.stages:
        both = stages.setdefault(label, [0.0, 0.0])
        both[0] += spent / unit
        both[1] += run / examples
    say(f"\n{name}, {examples:,} examples, keep {', '.join(keep)}: a pass takes {unit:.2f} s of CPU time\n")
    say("| stage | passes' time | forward passes |\n|:--|--:|--:|")
    for label, (cost, run) in stages.items():
        say(f"| {label} | {cost:.1f} | {run:.1f} |")
    total = [sum(each[i] for each in stages.values()) for i in range(2)]
    say(f"| all | {total[0]:.1f} | {total[1]:.1f} |")
    return {
        "examples": examples, "keep": keep, "pass_seconds": unit, "cpu_seconds": seconds, "passes_time": total[0],
        "forward_passes": total[1], "stages": {k: {"passes_time": a, "forward_passes": b} for k, (a, b) in stages.items()},
        "accuracy": {b.kept: b.pruned.metrics.get("accuracy") for b in found.budgets},
        "strategy": found.budgets[0].strategy, "method": found.budgets[0].method,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="[both]")
    parser.add_argument("--keep", action="append", help="Heads to keep; repeatable.")
    parser.add_argument("--limit", "-L", type=int, help="Scoring examples [1024; 1000 of the digits].")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    which = given.which or ["digits", *(["minilm"] if MINILM.exists() else [])]
    torch.set_num_threads(1)
    found = {}
    if "digits" in which:
        model, data, _ = demo.prepare(demo.HOME, lambda done, total: None)
        options = Options(
            str(model), DataOptions(str(data), limit=given.limit or 1000, seed=given.seed), seed=given.seed
        )
        found["digits"] = measured("digits", options, given.keep or list(demo.KEEP), ["ablation", "gradient"])
    if "minilm" in which:
        data = DataOptions(str(MINILM / "data"), limit=given.limit or 1024, seed=given.seed)
        options = Options(str(MINILM), data, seed=given.seed)
        found["minilm"] = measured("minilm-rt", options, given.keep or ["36"], ["gradient"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
