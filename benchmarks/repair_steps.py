"""Whether repair keeps the right steps: its decision against what every step does to thousands of unseen examples.

    python benchmarks/repair_steps.py --json steps.json            # all six models; an interrupted run goes on
    python benchmarks/repair_steps.py --json steps.json --only digits

Of each model, at four numbers of heads and for three draws of the examples, `headprune.repair` is given a scoring and a choosing part. Every
step that it tries is measured on unseen examples too. A decision is right if the step is kept and the mean divergence (KL) from the
dense model's answers fell there, or it is left out and it rose. Counted are the steps that change it by more than 5 %.

The repair is made once more with a last step that moves W_O alone; what both leave on the unseen examples is compared.

The models: a ViT on images of glyphs, a GPT on a Markov chain with repetitions, a BERT on texts of ten topics, and a RoBERTa that adds up
numbers (regression), all trained here on made-up data (a minute or two each, kept in .headprune/); the demo's ViT; minilm-rt, where it is.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import real
import torch
import transformers as tf
from real import LeftOutError, about, say
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads
from headprune.divergence import Fidelity
from headprune.repairing import Calibration, RepairWeights, calibrate, checked_repair

Batch = dict[str, Tensor]
DRAWS = 3
END = "end"  # the row of what is left after all steps
MATTERS = 0.05  # of the divergence without the step: a change below is left uncounted


# -- made-up data ------------------------------------------------------------------------------


def glyphs(count: int, seed: int) -> Batch:
    """Images ``[count, 1, 16, 16]`` of one of ten glyphs somewhere, half of another one, and noise."""
    g = torch.Generator().manual_seed(seed)
    shapes = (torch.rand(10, 7, 7, generator=torch.Generator().manual_seed(7)) < 0.5).float()
    labels, others = torch.randint(0, 10, (2, count), generator=g)
    images = 0.3 * torch.randn(count, 1, 16, 16, generator=g)
    places = torch.randint(0, 10, (count, 4), generator=g).tolist()
    for image, label, other, (x, y, a, b) in zip(images, labels, others, places, strict=True):
        image[0, a : a + 3, b : b + 7] += shapes[other, :3]
        image[0, x : x + 7, y : y + 7] += shapes[label]
    return {"pixel_values": images, "labels": labels}


def topics(count: int, seed: int) -> Batch:
    """Texts ``[count, 24]`` of words that vote for one of ten topics; a word behind "not" votes for the topic five further."""
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(0, 10, (count,), generator=g)
    other = torch.randint(0, 10, (count, 24), generator=g)
    spoken = torch.where(torch.rand(count, 24, generator=g) < 0.45, topic[:, None], other)
    negated = torch.rand(count, 24, generator=g) < 0.25
    negated[:, 0] = False
    word = 10 + torch.where(negated, (spoken + 5) % 10, spoken) * 8 + torch.randint(0, 8, (count, 24), generator=g)
    word[:, :-1][negated[:, 1:]] = 2  # "not"
    mask = (torch.arange(24) < torch.randint(10, 25, (count, 1), generator=g)).long()
    return {"input_ids": word * mask, "attention_mask": mask, "labels": topic}


def chains(count: int, seed: int) -> Batch:
    """Sequences ``[count, 48]`` of a Markov chain of second order over 24 tokens, in which a stretch is repeated."""
    g = torch.Generator().manual_seed(seed)
    chances = torch.softmax(3 * torch.randn(24, 24, 24, generator=torch.Generator().manual_seed(5)), -1)
    tokens = torch.randint(0, 24, (count, 48), generator=g)
    for t in range(2, 48):
        tokens[:, t] = torch.multinomial(chances[tokens[:, t - 2], tokens[:, t - 1]], 1, generator=g)[:, 0]
    for row, a, b in zip(tokens, *torch.randint(0, 12, (2, count), generator=g).tolist(), strict=True):
        row[24 + b : 36 + b] = row[a : a + 12].clone()
    return {"input_ids": tokens, "labels": tokens}


def sums(count: int, seed: int) -> Batch:
    """Texts ``[count, 20]`` of words that have a number each, to be added up: "minus" turns the next one, behind "little" all count less."""
    g = torch.Generator().manual_seed(seed)
    numbers = torch.cat([torch.zeros(4), torch.randn(40, generator=torch.Generator().manual_seed(5))])
    words = torch.randint(4, 44, (count, 20), generator=g)
    words[torch.rand(count, 20, generator=g) < 0.15] = 2  # "minus"
    words[torch.rand(count, 20, generator=g) < 0.05] = 3  # "little"
    mask = (torch.arange(20) < torch.randint(8, 21, (count, 1), generator=g)).long()
    words = torch.where(mask == 1, words, 1)
    each = numbers[words]
    each[:, 1:][words[:, :-1] == 2] *= -1
    total = torch.where((words == 3).cumsum(1) > 0, 0.3 * each, each).sum(1) / 4
    return {"input_ids": words, "attention_mask": mask, "labels": total + 0.15 * torch.randn(count, generator=g)}


# -- models ------------------------------------------------------------------------------------

_USUAL = {"initializer_range": 0.1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 10}
MADE_UP: dict[str, tuple[Callable[[int, int], Batch], int, Callable[[], Any]]] = {
    "vit": (glyphs, 1024, lambda: tf.ViTForImageClassification(tf.ViTConfig(
        image_size=16, num_channels=1, patch_size=4, num_hidden_layers=4, num_attention_heads=6, hidden_size=96,
        intermediate_size=192, **_USUAL))),
    "bert": (topics, 512, lambda: tf.BertForSequenceClassification(tf.BertConfig(
        vocab_size=90, hidden_size=64, num_attention_heads=4, num_hidden_layers=6, intermediate_size=128, max_position_embeddings=24,
        **_USUAL))),
    "gpt": (chains, 128, lambda: tf.GPT2LMHeadModel(tf.GPT2Config(
        vocab_size=24, n_positions=48, n_embd=64, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0))),
    "numbers": (sums, 400, lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(
        vocab_size=44, hidden_size=64, num_attention_heads=4, num_hidden_layers=5, intermediate_size=128, max_position_embeddings=24,
        pad_token_id=1, **{**_USUAL, "num_labels": 1}))),
}  # fmt: skip
"""What makes the data, scoring examples (as many choose), and the model."""
KEEPS = {
    "vit": (18, 12, 7, 4), "bert": (16, 12, 8, 4), "gpt": (12, 8, 5, 3), "numbers": (15, 10, 5, 3),
    "digits": (18, 12, 7, 4), "minilm": (54, 36, 18, 9),
}  # fmt: skip
COUNTS = {"digits": 320, "minilm": 1024}
"""Scoring examples of a draw; draws have none in common."""


def split(batch: Batch, size: int = 64) -> list[Batch]:
    """In batches of ``size``."""
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, len(batch["labels"]), size)]


def trained(name: str, steps: int = 3000) -> nn.Module:
    """Trained on made-up data, unless an earlier run did."""
    make, _, build = MADE_UP[name]
    torch.manual_seed(0)
    model, path = build(), Path(".headprune") / "steps" / f"{name}.pt"
    if path.is_file():
        model.load_state_dict(torch.load(path))
        return model.eval()
    say(f"training {name}")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    batches = split(make(32768, 10**6))  # some six times: trained models know theirs
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        model(**batches[step % len(batches)]).loss.backward()
        optimizer.step()
        schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()


def subject(name: str) -> tuple[nn.Module, Callable[[int], tuple[list[Batch], list[Batch], list[Batch]]]]:
    """The model; of a draw's number the scoring and the choosing part, and unseen examples."""
    if name in COUNTS:
        loaded, parts = real.load(name, batch_size=64)
        choose, unseen = list(parts.choose.batches()), list(parts.report.batches())
        return loaded.model, lambda draw: (real.drawn(parts.score, draw, COUNTS[name]), choose, unseen)
    make, size, _ = MADE_UP[name]
    others = split(make(2000 if name == "gpt" else 4000, 3), 100)
    return trained(name), lambda draw: (split(make(size, 100 + draw)), split(make(size, 200 + draw)), others)


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


def cases(name: str, model: nn.Module, draw: int, parts: Sequence[list[Batch]]) -> Iterator[dict[str, Any]]:
    """Every step that repair tries, at every number of heads."""
    score, choose, unseen = parts
    layers = hp.find_attention(model, {k: v for k, v in score[0].items() if k != "labels"})
    look = {"strategy": "compensated", "effort": "low", "scores": ()}
    plans = hp.search(model, score[:8], list(KEEPS[name]), choose=choose[:2], layers=layers, **look)
    calibration, narrow = (calibrate(model, layers, score, others=choose) for _ in range(2))
    vars(narrow)["linears"] = ()  # but for the W_O that lose heads
    there = Fidelity(model, unseen)

    def left(calibration: Calibration, found: RepairWeights, drop: Heads) -> float:
        return float(there.each(partial(calibration.applied, found.by_module, drop)).mean())

    for plan in plans:
        both = Both(model, choose, there)
        found = checked_repair(calibration, plan.drop, both)
        alone = left(narrow, checked_repair(narrow, plan.drop, Fidelity(model, choose)), plan.drop)
        case = {"model": name, "draw": draw, "kept": plan.kept}
        yield {**case, "step": END, "left": left(calibration, found, plan.drop), "outputs_alone": alone}
        for trial in found.trials:
            yield {
                **case, "step": trial.step, "taken": trial.kept,
                "choose": [trial.before, trial.after],
                "unseen": [both.known_there[trial.before], both.known_there[trial.after]],
                "passes": (len(both.known_there) - 1) / len(found.trials),
            }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often decisions are right, of the steps that matter; and the divergence that is left, over that with W_O alone moved
    (geometric mean), and in how many cases it is less."""
    ends = [r["left"] / r["outputs_alone"] for r in rows if r["step"] == END]
    rows = [r for r in rows if r["step"] != END]
    matter = [r for r in rows if abs(r["unseen"][1] - r["unseen"][0]) > MATTERS * r["unseen"][0]]
    right = [r["taken"] == (r["unseen"][1] < r["unseen"][0]) for r in matter]
    return {
        "steps": len(rows), "matter": len(matter), "right": sum(right), "share": round(sum(right) / max(1, len(right)), 3),
        "left_out": sum(not r["taken"] for r in rows), "most_passes": round(max((r["passes"] for r in rows), default=0.0), 2),
        "left": round(geometric_mean(ends), 3) if ends else None, "less": f"{sum(end < 1 for end in ends)} of {len(ends)}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where every step is added, one JSON document a line")
    parser.add_argument("--only", nargs="+", choices=list(KEEPS), help="these models")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--quick", action="store_true", help="a few batches, to try this script")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.utils.logging.set_verbosity_error()
    rows = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json.is_file() else []
    for name in options.only or KEEPS:
        try:
            model, drawn = subject(name)
        except LeftOutError as error:
            say(f"{name}: {error}")
            continue
        for draw in range(options.draws):
            if any((r["model"], r["draw"]) == (name, draw) for r in rows):
                continue
            parts = [part[:2] if options.quick else part for part in drawn(draw)]
            found = list(cases(name, model, draw, parts))
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
