"""Whether repair keeps the right steps: its decision against what every step does to thousands of unseen examples.

    python benchmarks/repair_steps.py --json steps.json            # all five models; an interrupted run goes on
    python benchmarks/repair_steps.py --json steps.json --only vit digits

Of each model, at four numbers of heads and for three draws of the examples, `headprune.repair` is given a scoring and a choosing part. Every
step that it tries is measured on unseen examples too. A decision is right if the step is kept and the mean divergence (KL) from the
dense model's answers fell there, or it is left out and it rose. Counted are the steps that change it by more than 5 %.

The models: a ViT on images of glyphs, a GPT on sequences of a Markov chain with repetitions, and a BERT on texts of ten topics, all
trained here on made-up data (a minute or two each, kept in .headprune/); minilm-rt, where it is; the demo's ViT. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as tf
from scores import MINILM, LeftOutError, about, say
from torch import Tensor, nn

import headprune as hp
from headprune.app import demo
from headprune.app.data import DataOptions, load_parts
from headprune.app.models import load_model
from headprune.divergence import Fidelity
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

SIDE, GLYPH = 16, 7


def glyphs(count: int, seed: int) -> Batch:
    """Images ``[count, 1, 16, 16]`` of one of ten glyphs somewhere, half of another one, and noise."""
    g = torch.Generator().manual_seed(seed)
    shapes = (torch.rand(10, GLYPH, GLYPH, generator=torch.Generator().manual_seed(7)) < 0.5).float()
    labels, others = (torch.randint(0, 10, (count,), generator=g) for _ in range(2))
    images = 0.3 * torch.randn(count, 1, SIDE, SIDE, generator=g)
    places = torch.randint(0, SIDE - GLYPH + 1, (count, 4), generator=g).tolist()
    for image, label, other, (x, y, a, b) in zip(images, labels, others, places, strict=True):
        image[0, a : a + GLYPH // 2, b : b + GLYPH] += shapes[other, : GLYPH // 2]
        image[0, x : x + GLYPH, y : y + GLYPH] += shapes[label]
    return {"pixel_values": images, "labels": labels}


def topics(count: int, seed: int) -> Batch:
    """Texts ``[count, 24]`` of words that vote for one of ten topics; a word behind "not" votes for the topic five further."""
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(0, 10, (count,), generator=g)
    spoken = torch.where(
        torch.rand(count, 24, generator=g) < 0.45, topic[:, None], torch.randint(0, 10, (count, 24), generator=g)
    )
    negated = torch.rand(count, 24, generator=g) < 0.25
    negated[:, 0] = False
    word = 10 + torch.where(negated, (spoken + 5) % 10, spoken) * 8 + torch.randint(0, 8, (count, 24), generator=g)
    word[:, :-1][negated[:, 1:]] = 2  # "not"
    length = torch.randint(10, 25, (count, 1), generator=g)
    mask = (torch.arange(24) < length).long()
    return {"input_ids": word * mask, "attention_mask": mask, "labels": topic}


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


def trained(name: str, model: Any, make: Callable[[int, int], Batch], steps: int, rate: float = 2e-3) -> nn.Module:
    """Trained on fresh examples, unless an earlier run did."""
    path = HOME / f"{name}.pt"
    if path.is_file():
        model.load_state_dict(torch.load(path))
        return model.eval()
    say(f"training {name}")
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    batches = split(make(32768, 10**6), 64)  # some six times: trained models know theirs
    model.train()
    for step in range(steps):
        loss = model(**batches[step % len(batches)]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            say(f"  step {step}: loss {loss.item():.3f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()


def made_up(
    name: str, model: Any, make: Callable[[int, int], Batch], sizes: tuple[int, int], keeps: tuple[int, ...], steps: int
) -> Subject:
    """Trained on made-up data, with ``sizes`` examples to score and to choose by."""
    unseen = split(make(4000 if name != "gpt" else 2000, 3), 100)

    def parts(draw: int) -> tuple[list[Batch], list[Batch], list[Batch]]:
        return split(make(sizes[0], 100 + draw), 64), split(make(sizes[1], 200 + draw), 64), unseen

    return Subject(trained(name, model, make, steps), parts, keeps)


# -- subjects ----------------------------------------------------------------------------------


def vit() -> Subject:
    torch.manual_seed(0)
    config = tf.ViTConfig(
        image_size=SIDE, num_channels=1, patch_size=4, num_hidden_layers=4, num_attention_heads=6, hidden_size=96,
        intermediate_size=192, num_labels=10, initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return made_up("vit", tf.ViTForImageClassification(config), glyphs, (1024, 1024), (18, 12, 7, 4), 3000)


def bert() -> Subject:
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=90, hidden_size=64, num_attention_heads=4, num_hidden_layers=6, intermediate_size=128, num_labels=10,
        initializer_range=0.1, max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return made_up("bert", tf.BertForSequenceClassification(config), topics, (512, 512), (16, 12, 8, 4), 2500)


def gpt() -> Subject:
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=24, n_positions=48, n_embd=64, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return made_up("gpt", tf.GPT2LMHeadModel(config), chains, (128, 64), (12, 8, 5, 3), 3000)


def minilm() -> Subject:
    if not MINILM.is_dir():
        raise LeftOutError("minilm-rt is not there; benchmarks/build_minilm_rt.py builds it")
    return _loaded(MINILM, MINILM / "data", 1024, (54, 36, 18, 9))


def digits() -> Subject:
    model, data, _ = demo.prepare(demo.HOME, lambda done, total: None)
    return _loaded(model, data, 320, (18, 12, 7, 4))


def _loaded(model: Path, data: Path, count: int, keeps: tuple[int, ...]) -> Subject:
    """Draws have no scoring example in common."""
    loaded = load_model(str(model), device="cpu")
    parts = load_parts(DataOptions(str(data), limit=10**6, report_limit=10**6, batch_size=64), loaded)
    choose, unseen = list(parts.choose.batches()), list(parts.report.batches())

    def of_draw(draw: int) -> tuple[list[Batch], list[Batch], list[Batch]]:
        own = slice(draw * count, (draw + 1) * count)
        score = replace(parts.score, rows=parts.score.rows[own], features=parts.score.features[own])
        return list(score.batches()), choose, unseen

    return Subject(loaded.model, of_draw, keeps)


SUBJECTS: dict[str, Callable[[], Subject]] = {"vit": vit, "bert": bert, "gpt": gpt, "digits": digits, "minilm": minilm}


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
    print(json.dumps({**about("repair_steps.py"), "all": summary(rows), "models": models}))


if __name__ == "__main__":
    main()
