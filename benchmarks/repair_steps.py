"""Whether repair keeps the right steps: its decision against what every step does to thousands of unseen examples.

    python benchmarks/repair_steps.py --json steps.json            # both models; an interrupted run goes on
    python benchmarks/repair_steps.py --json steps.json --only digits

Of each model, at four numbers of heads and for three draws of the examples, `headprune.repair` is given a scoring and a choosing part. Every
step that it tries is measured on unseen examples too. A decision is right if the step is kept and the mean divergence (KL) from the
dense model's answers fell there, or it is left out and it rose. Counted are the steps that change it by more than 5 %.

The models: minilm-rt, where it is; the demo's ViT. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import real
import torch
import transformers as tf
from real import LeftOutError, about, say
from torch import Tensor, nn

import headprune as hp
from headprune.divergence import Fidelity
from headprune.repairing import calibrate, checked_repair

Batch = dict[str, Tensor]
DRAWS = 3
MATTERS = 0.05  # of the divergence without the step: a change below is left uncounted


SUBJECTS = {"digits": (320, (18, 12, 7, 4)), "minilm": (1024, (54, 36, 18, 9))}
"""Scoring examples of a draw, and numbers of heads; draws have no scoring example in common."""

# -- measuring ---------------------------------------------------------------------------------


class Both(Fidelity):
    """The choosing part, whose every look is followed by one at the unseen examples: mean divergences there, by those here."""

    def __init__(self, model: nn.Module, choose: list[Batch], unseen: Fidelity) -> None:
        super().__init__(model, choose)
        self.unseen, self.known_there = unseen, dict[float, float]()

    def each(self, changed: Any) -> Tensor:
        found = super().each(changed)
        self.known_there[float(found.mean())] = float(self.unseen.each(changed).mean())
        return found


def cases(name: str, model: nn.Module, parts: Any, draw: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Every step that repair tries, at every number of heads."""
    count, keeps = SUBJECTS[name]
    score, choose, unseen = (
        real.drawn(parts.score, draw, count),
        list(parts.choose.batches()),
        list(parts.report.batches()),
    )
    if quick:
        score, choose, unseen = score[:2], choose[:2], unseen[:2]
    layers = hp.find_attention(model, {k: v for k, v in score[0].items() if k != "labels"})
    plans = hp.search(
        model,
        score[:8],
        list(keeps),
        choose=choose[:2],
        strategy="compensated",
        effort="low",
        layers=layers,
        scores=(),
    )
    calibration = calibrate(model, layers, score)
    there = Fidelity(model, unseen)
    for plan in plans:
        both = Both(model, choose, there)
        found = checked_repair(calibration, plan.drop, both)
        for trial in found.trials:
            yield {
                "model": name, "draw": draw, "kept": plan.kept, "step": trial.step, "taken": trial.kept,
                "choose": [trial.before, trial.after],
                "unseen": [both.known_there[trial.before], both.known_there[trial.after]],
                "passes": (len(both.known_there) - 1) / len(found.trials),
            }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often decisions are right, of the steps that matter."""
    matter = [r for r in rows if abs(r["unseen"][1] - r["unseen"][0]) > MATTERS * r["unseen"][0]]
    right = [r["taken"] == (r["unseen"][1] < r["unseen"][0]) for r in matter]
    return {
        "steps": len(rows), "matter": len(matter), "right": sum(right), "share": round(sum(right) / max(1, len(right)), 3),
        "left_out": sum(not r["taken"] for r in rows), "most_passes": round(max((r["passes"] for r in rows), default=0.0), 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where every step is added, one JSON document a line")
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), help="these models")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--quick", action="store_true", help="a few batches, to try this script")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.utils.logging.set_verbosity_error()
    rows = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json.is_file() else []
    for name in options.only or SUBJECTS:
        try:
            loaded, parts = real.load(name, batch_size=64)
        except LeftOutError as error:
            say(f"{name}: {error}")
            continue
        for draw in range(options.draws):
            if any((r["model"], r["draw"]) == (name, draw) for r in rows):
                continue
            found = list(cases(name, loaded.model, parts, draw, options.quick))
            rows += found
            with options.json.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
            say(f"{name}, draw {draw}: {summary(found)}")
    models = {
        name: summary([r for r in rows if r["model"] == name]) for name in dict.fromkeys(r["model"] for r in rows)
    }
    print(json.dumps({"about": about("repair_steps.py"), "all": summary(rows), "models": models}))


if __name__ == "__main__":
    main()
