"""Whether repair keeps the right steps: its decision against what every step does to thousands of unseen examples.

    python benchmarks/repair_steps.py --json steps.json            # all three models; an interrupted run goes on
    python benchmarks/repair_steps.py --json steps.json --only gpt digits

Of each model, at four numbers of heads and for three draws of the examples, `headprune.repair` is given a scoring and a choosing part. Every
step that it tries is measured on unseen examples too. A decision is right if the step is kept and the mean divergence (KL) from the
dense model's answers fell there, or it is left out and it rose. Counted are the steps that change it by more than 5 %.

The models: a GPT on sequences of a Markov chain with repetitions, trained here on made-up data (a minute or two, kept in .headprune/); minilm-rt,
where it is; the demo's ViT. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import real
import torch
import transformers as tf
from real import LeftOutError, about, say
from torch import Tensor, nn

import headprune as hp
from headprune.fidelity import Fidelity
from headprune.reference import calibrate, measure
from headprune.repairing import Refit, checked

Batch = dict[str, Tensor]
HOME = Path(".headprune") / "steps"
DRAWS = 3
MATTERS = 0.05  # of the divergence without the step: a change below is left uncounted


@dataclass(frozen=True)
class Subject:
    """A model with examples.

    Attributes:
        parts: Of a draw's number the scoring and the choosing part, and unseen examples.
        keeps: Numbers of heads.
    """

    model: nn.Module
    parts: Callable[[int], tuple[list[Batch], list[Batch], list[Batch]]]
    keeps: tuple[int, ...]


# -- made-up data ------------------------------------------------------------------------------


def chains(count: int, seed: int) -> Batch:
    """Sequences ``[count, 48]`` of a Markov chain of second order over 24 tokens, in which a stretch is repeated."""
    rows, length = 24, 48
    g = torch.Generator().manual_seed(seed)
    chances = torch.softmax(3 * torch.randn(rows, rows, rows, generator=torch.Generator().manual_seed(5)), -1)
    found = torch.randint(0, rows, (count, length), generator=g)
    for t in range(2, length):
        found[:, t] = torch.multinomial(chances[found[:, t - 2], found[:, t - 1]], 1, generator=g)[:, 0]
    start, behind = torch.randint(0, 12, (count,), generator=g), torch.randint(24, 36, (count,), generator=g)
    for row, a, b in zip(found, start.tolist(), behind.tolist(), strict=True):
        row[b : b + 12] = row[a : a + 12].clone()
    return {"input_ids": found, "labels": found}


def split(batch: Batch, size: int) -> list[Batch]:
    """In batches of ``size``."""
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, len(batch["labels"]), size)]


# -- subjects ----------------------------------------------------------------------------------


def gpt() -> Subject:
    """Trained on fresh sequences, unless an earlier run did."""
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=24, n_positions=48, n_embd=64, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model, path = tf.GPT2LMHeadModel(config), HOME / "gpt.pt"
    if path.is_file():
        model.load_state_dict(torch.load(path))
    else:
        say("training gpt")
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=3000)
        batches = split(chains(32768, 10**6), 64)  # some six times: trained models know theirs
        for step in range(3000):
            model.train()(**batches[step % len(batches)]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    unseen = split(chains(2000, 3), 100)

    def parts(draw: int) -> tuple[list[Batch], list[Batch], list[Batch]]:
        return split(chains(128, 100 + draw), 64), split(chains(64, 200 + draw), 64), unseen

    return Subject(model.eval(), parts, (12, 8, 5, 3))


def of_parts(name: str, count: int, keeps: tuple[int, ...]) -> Subject:
    """Draws have no scoring example in common."""
    loaded, parts = real.load(name, batch_size=64)
    choose, unseen = list(parts.choose.batches()), list(parts.report.batches())
    return Subject(loaded.model, lambda draw: (real.drawn(parts.score, draw, count), choose, unseen), keeps)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt": gpt,
    "digits": partial(of_parts, "digits", 320, (18, 12, 7, 4)),
    "minilm": partial(of_parts, "minilm", 1024, (54, 36, 18, 9)),
}


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


def cases(name: str, subject: Subject, draw: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Every step that repair tries, at every number of heads."""
    model, (score, choose, unseen) = subject.model, subject.parts(draw)
    if quick:
        score, choose, unseen = score[:2], choose[:2], unseen[:2]
    layers = hp.find_attention(model, {k: v for k, v in score[0].items() if k != "labels"})
    plans = hp.search(
        model,
        score[:8],
        list(subject.keeps),
        choose=choose[:2],
        strategy="compensated",
        effort="low",
        layers=layers,
        scores=(),
    )
    refit = Refit(measure(calibrate(model, layers, score)))
    there = Fidelity(model, unseen)
    for plan in plans:
        both = Both(model, choose, there)
        found = checked(refit, plan.drop, both)
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
            subject = SUBJECTS[name]()
        except LeftOutError as error:
            say(f"{name}: {error}")
            continue
        for draw in range(options.draws):
            if any((r["model"], r["draw"]) == (name, draw) for r in rows):
                continue
            found = list(cases(name, subject, draw, options.quick))
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
