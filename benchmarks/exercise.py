"""The exercise of *Dive into Deep Learning* that began this project, worked through: writes docs/exercise.md and docs/exercise.zh.md.

    python benchmarks/exercise.py                  # everything: figures.json, the pictures, both documents
    python benchmarks/exercise.py --only speed     # only the times of models; everything else stays (on an idle machine: a minute or two)
    python benchmarks/exercise.py --render         # only the documents, from docs/exercise/figures.json

Two models are looked at, scored and pruned: the book's own Transformer, trained here in about a minute (exercise_translator.py), and
minilm-rt, a real BERT (build_minilm_rt.py). Both documents are rendered from templates in docs/exercise/; what their prose claims is
checked (`claims`) whenever figures are made. Code in the documents is cut out of this file. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import exercise_examples as examples
import exercise_pictures as pictures
import exercise_translator as translator
import jinja2
import numpy as np
import real
import torch
import transformers
from scipy.stats import spearmanr
from torch import nn

import headprune as hp
from headprune.inputs import unlabelled as without_labels

ROOT = Path(__file__).parent.parent
HOME = ROOT / "docs" / "exercise"
FIGURES = HOME / "figures.json"
DOCUMENTS = {"en": ROOT / "docs" / "exercise.md", "zh": ROOT / "docs" / "exercise.zh.md"}
STAGES = ("see", "d2l", "bert", "examples", "speed")
NUMBER = 7394  # the translator's example: seven thousand three hundred ninety four
SENTENCE = "the movie is not as bad as you might expect , but it never makes you laugh ."
Batch = dict[str, torch.Tensor]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model to study, and its three parts of data.

    Attributes:
        score, choose, report: Batches of examples; no example is in two parts. On the last, every head is really removed by itself too.
        methods: Ways to score, by headprune's names; "logits" is ablation measured by the divergence from the dense answers.
        keep: How many heads stay: the first is what all methods are compared at, the second the plan that is carried out.
        draws, repaired: Random plans, and how many of them are repaired.
        repair: Options of the repair that is the same for every plan.
        read: From a measurement to the one that is reported.
        curve: At how many removed heads the loss of all together is measured.
    """

    name: str
    model: nn.Module
    layers: list[hp.AttentionLayer]
    score: list[Batch]
    choose: list[Batch]
    report: list[Batch]
    methods: tuple[str, ...]
    keep: tuple[int, int]
    draws: int
    repaired: int
    repair: dict[str, bool]
    read: Callable[[hp.Measurement], hp.Measurement]
    curve: tuple[int, ...]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


STARTED = time.monotonic()


def examples_in(batches: Sequence[Batch]) -> int:
    return sum(len(batch["labels"]) for batch in batches)


def whole_numbers(measured: hp.Measurement) -> hp.Measurement:
    """A number counts as right if all its words are: just then greedy decoding writes it."""
    right = (measured.correct == measured.tokens).astype(float)
    metrics = {"accuracy": float(right.mean()), "loss": float(measured.loss.mean())}
    return hp.Measurement(metrics, measured.loss, right, np.ones(len(right), dtype=np.int64))


# -- the first exercise: see the heads ---------------------------------------------------------------


def seen(
    model: nn.Module, layers: list[hp.AttentionLayer], example: Batch, batches: list[Batch]
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """The weights of one example ``{layer: [heads, queries, keys]}``, and what every head does over data."""
    # [see]
    weights = hp.attention_weights(model, example)  # {layer: [examples, heads, queries, keys]}
    profiles = hp.profile_heads(model, batches)  # {layer: [profile of head 0, ...]}
    # [/see]
    rows = [
        {
            "head": layer.label(h), "layer": layer.name, "index": h, "role": p.role, "because": p.because,
            "clarity": p.clarity, "entropy": p.entropy, "evenness": p.evenness, "largest": p.largest,
        }
        for layer in layers
        for h, p in enumerate(profiles[layer.name])
    ]  # fmt: skip
    return {layer.name: weights[layer.name][0].numpy() for layer in layers}, rows


def roles_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many heads have each role, and the one that shows it best."""
    groups = []
    for role in dict.fromkeys(row["role"] for row in rows):
        group = [row for row in rows if row["role"] == role]
        clearest = max(group, key=lambda row: row["clarity"])
        groups.append({"role": role, "heads": len(group), **{k: clearest[k] for k in ("head", "because", "clarity")}})
    return sorted(groups, key=lambda g: -g["heads"])


# -- the second exercise: how important a head is ----------------------------------------------------


def scored(subject: Subject) -> tuple[dict[str, hp.HeadScores], dict[str, float]]:
    """Scores by every method, and what each costs, in forward passes over the scoring part."""
    model, layers, score_part = subject.model, subject.layers, subject.score

    def one_pass() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            for batch in score_part:
                model(**without_labels(batch))
        return time.perf_counter() - started

    found, seconds = {}, {}
    one_pass()
    pace = [one_pass()]
    for name in subject.methods:
        started = time.perf_counter()
        if name == "logits":
            # [logits]
            scores = hp.score(model, score_part, "ablation", distil=True, layers=layers)
            # [/logits]
        else:
            method = name
            # [score]
            scores = hp.score(model, score_part, method, layers=layers)  # .values and .stderr: {layer: [heads]}
            # [/score]
        found[name], seconds[name] = scores, time.perf_counter() - started
        pace.append(one_pass())
        say(f"{subject.name}: {name}, {seconds[name]:.1f} s")
    return found, {name: value / float(np.median(pace)) for name, value in seconds.items()}


def in_truth(subject: Subject) -> hp.HeadScores:
    """What really happens when one head goes, on examples that no method has seen."""
    model, fresh_part, layers = subject.model, subject.report, subject.layers
    # [truth]
    truth = hp.score(model, fresh_part, "ablation", layers=layers)  # L(without the head) - L, on new examples
    # [/truth]
    say(f"{subject.name}: what really happens, one head at a time")
    return truth


def correlation(a: hp.HeadScores, b: hp.HeadScores) -> float:
    return float(spearmanr(a.flat(), b.flat()).statistic)


def masked(subject: Subject, plan: hp.PruningPlan) -> hp.Measurement:
    """The model with a plan's heads switched off, on the reporting part."""
    model, layers, report_part = subject.model, subject.layers, subject.report
    # [mask]
    with hp.mask(model, plan, layers=layers):
        after = hp.evaluate(model, report_part)
    # [/mask]
    return subject.read(after)


def repaired(subject: Subject, plan: hp.PruningPlan) -> hp.Measurement:
    """The model repaired for a plan, on the reporting part: the removed heads' columns of W_O are 0."""
    smaller = copy.deepcopy(subject.model)
    hp.repair(smaller, plan, subject.score, **subject.repair)
    return subject.read(hp.evaluate(smaller, subject.report))


def outcome(measured: hp.Measurement, dense: hp.Measurement | None = None) -> dict[str, Any]:
    """Figures of a measurement, and its paired change."""
    found: dict[str, Any] = {"accuracy": measured.metrics["accuracy"], "loss": measured.metrics["loss"]}
    if dense is not None:
        found["change"] = changed(hp.compare(dense, measured))
    return found


def changed(change: hp.Change) -> dict[str, Any]:
    names = {"value": "value", "low": "low", "high": "high", "p": "p_value", "verdict": "verdict"}
    return {short: getattr(change, name) for short, name in names.items()}


def random_plans(subject: Subject, keep: int) -> tuple[list[hp.HeadScores], list[hp.PruningPlan]]:
    """The control: random scores, and as many heads by them."""
    model, score_part, layers, draws = subject.model, subject.score, subject.layers, subject.draws
    # [random]
    drawn = [hp.score(model, score_part, "random", layers=layers, seed=seed) for seed in range(draws)]
    plans = [hp.plan(scores, keep) for scores in drawn]
    # [/random]
    say(f"{subject.name}: random plans")
    return drawn, plans


def spread_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = {what: [f[what] for f in found] for what in ("accuracy", "loss")}
    return {what: {"mean": mean(each), "low": min(each), "high": max(each)} for what, each in values.items()}


def pairs_in(subject: Subject) -> list[dict[str, Any]]:
    """What two heads of a layer do together that neither does alone: L(without both) - L(without a) - L(without b) + L."""
    model, layers = subject.model, subject.layers

    def losses(layer: hp.AttentionLayer, *heads: int) -> np.ndarray:
        found = []
        with hp.mask(model, {layer.name: list(heads)} if heads else {}, layers=layers), torch.inference_mode():
            for batch in subject.score:
                logits = model(**without_labels(batch))["logits"]
                each = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
                found.append(each.mean(dim=1).double())
        return torch.cat(found).numpy()

    dense, rows = losses(layers[0]), []
    for layer in layers:
        alone = [losses(layer, h) - dense for h in range(layer.num_heads)]
        for a, b in combinations(range(layer.num_heads), 2):
            both = losses(layer, a, b) - dense
            extra = both - alone[a] - alone[b]
            rows.append({
                "a": layer.label(a), "b": layer.label(b), "alone_a": float(alone[a].mean()),
                "alone_b": float(alone[b].mean()), "both": float(both.mean()), "extra": float(extra.mean()),
                "error": float(extra.std(ddof=1) / math.sqrt(len(extra))),
            })  # fmt: skip
    say(f"{subject.name}: pairs of heads")
    return sorted(rows, key=lambda row: -row["extra"])


def one_after_another(subject: Subject, scores: hp.HeadScores) -> dict[str, list[float]]:
    """What removing many heads adds to the loss of the scoring part, and the sum of what each adds alone."""
    model, layers = subject.model, subject.layers
    order = np.argsort(scores.flat().numpy(), kind="stable")
    heads = [(layer.name, h) for layer in layers for h in range(layer.num_heads)]
    dense = hp.evaluate(model, subject.score).loss.mean()
    real, alone = [], []
    for count in subject.curve:
        drop: dict[str, list[int]] = {}
        for i in order[:count]:
            drop.setdefault(heads[i][0], []).append(heads[i][1])
        with hp.mask(model, drop, layers=layers):
            real.append(float(hp.evaluate(model, subject.score).loss.mean() - dense))
        alone.append(float(scores.flat().numpy()[order[:count]].sum()))
    return {"removed": [float(count) for count in subject.curve], "real": real, "alone": alone}


def judged(subject: Subject) -> Figures:
    """Every method's scores against what really happens."""
    dense = subject.read(hp.evaluate(subject.model, subject.report))
    found, cost = scored(subject)
    truth, keep = in_truth(subject), subject.keep[0]
    methods = []
    for name, scores in found.items():
        plan = hp.plan(scores, keep)
        row = {
            "method": name, "cost": cost[name], "rho": correlation(scores, truth),
            "masked": outcome(masked(subject, plan), dense), "repaired": outcome(repaired(subject, plan), dense),
        }  # fmt: skip
        methods.append(row)
        right = f"{row['masked']['accuracy']:.3f}, {row['repaired']['accuracy']:.3f}"
        say(f"{subject.name}: {name}: rho {row['rho']:.2f}, {right}")
    drawn, plans = random_plans(subject, keep)
    controls = {
        "masked": spread_of([outcome(masked(subject, plan)) for plan in plans]),
        "repaired": spread_of([outcome(repaired(subject, plan)) for plan in plans[: subject.repaired]]),
        "rho": mean(correlation(scores, truth) for scores in drawn),
        "draws": subject.draws, "repaired_draws": subject.repaired,
    }  # fmt: skip
    say(f"{subject.name}: random heads")
    ablation = found["ablation"]
    values, errors = ablation.flat(), ablation.flat_stderr()
    return {
        "heads": sum(layer.num_heads for layer in subject.layers),
        "parts": {p: examples_in(getattr(subject, p)) for p in ("score", "choose", "report")},
        "dense": outcome(dense),
        "keep": keep,
        "methods": methods,
        "random": controls,
        "scores": {
            "labels": ablation.labels(), "values": values.tolist(), "errors": errors.tolist(),
            "sure": int((values.abs() > 1.96 * errors).sum()), "harmful": int((values < -1.96 * errors).sum()),
        },
        "agreement": {
            name: correlation(ablation, found[name]) for name in ("mean-ablation", "logits", "gradient") if name in found
        },
        "together": one_after_another(subject, ablation),
        "repeat": correlation(ablation, truth),
    }  # fmt: skip


def carried_out(subject: Subject, rows: Sequence[Mapping[str, Any]]) -> Figures:
    """The search, and a plan carried out: repaired, pruned, proved, measured."""
    model, layers = subject.model, subject.layers
    score_part, choose_part, report_part = subject.score, subject.choose, subject.report
    dense = subject.read(hp.evaluate(model, report_part))
    example = without_labels(subject.report[0])
    fewest, half = subject.keep
    started = time.perf_counter()
    # [search]
    plans = hp.search(model, score_part, keep=[half, fewest], choose=choose_part, layers=layers)
    # [/search]
    seconds = time.perf_counter() - started
    say(f"{subject.name}: search, {seconds:.0f} s")
    by_same_repair = outcome(repaired(subject, plans[1]), dense)
    only_masked = outcome(masked(subject, plans[1]), dense)
    done = {}
    for plan in plans:
        # [prune]
        smaller = copy.deepcopy(model)
        hp.repair(smaller, plan, score_part)  # the heads that stay take over what they can
        proof = hp.prune(smaller, plan, example)  # removes the others; proves that the answers are the masked model's
        after = hp.evaluate(smaller, report_part)
        # [/prune]
        gone = {label for layer in layers for label in map(layer.label, plan.drop.get(layer.name, ()))}
        roles: dict[str, list[int]] = {}
        for row in rows:
            counts = roles.setdefault(row["role"], [0, 0])
            counts[0] += row["head"] in gone
            counts[1] += 1
        done[str(plan.kept)] = {
            "kept": plan.kept, "gone": sorted(gone), "drop": {name: list(heads) for name, heads in plan.drop.items()},
            "left": {f"L{layer.index}": layer.num_heads - len(plan.drop.get(layer.name, ())) for layer in layers},
            "roles": roles, **outcome(subject.read(after), dense), "difference": proof.difference,
            "parameters": sum(p.numel() for p in smaller.parameters()), "inputs": proof.inputs,
        }  # fmt: skip
        say(f"{subject.name}: pruned to {plan.kept}: {done[str(plan.kept)]['accuracy']:.3f}")
    return {
        "plans": done, "fewest": str(plans[1].kept), "half": str(plans[0].kept), "strategy": plans[1].strategy,
        "repaired": by_same_repair, "masked": only_masked, "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


# -- the two models ----------------------------------------------------------------------------------


def translator_subject() -> Subject:
    started = time.perf_counter()
    model = translator.trained()
    say(f"the translator is trained, {time.perf_counter() - started:.0f} s")
    numbers = translator.parts()
    parts = {name: translator.batches(numbers[name]) for name in ("score", "choose", "report")}
    layers = hp.find_attention(model, without_labels(parts["score"][-1]))
    return Subject(
        "D2L's Transformer", model, layers, **parts,
        methods=(
            "ablation", "mean-ablation", "logits", "shapley", "integrated-gradients", "signed-gradient", "gradient", "fisher",
            "output-norm", "weight-norm", "entropy",
        ),
        keep=(8, 12), draws=20, repaired=5, repair={}, read=whole_numbers, curve=tuple(range(1, 25)),
    )  # fmt: skip


def sentences(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[Batch]:
    """Batches of sentences in their order."""
    made = []
    for start in range(0, len(rows), 32):
        some = rows[start : start + 32]
        coded = tokenizer([r["text"] for r in some], padding=True, truncation=True, max_length=64, return_tensors="pt")
        made.append({**coded, "labels": torch.tensor([r["label"] for r in some])})
    return made


def by_length(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: len(row["text"]))


def rows_of(path: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "data" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def bert_parts(path: Path, tokenizer: Any, sizes: Mapping[str, int]) -> dict[str, list[Batch]]:
    """Sentences that the model was not trained on, in batches of about equal length."""
    rows, test = {}, rows_of(path, "test")
    for name, size in sizes.items():
        rows[name], test = test[:size], test[size:]
    texts = {name: {row["text"].strip().lower() for row in part} for name, part in rows.items()}
    if any(texts[a] & texts[b] for a, b in combinations(texts, 2)):
        raise SystemExit("two parts of the data share a sentence")
    return {name: sentences(by_length(part), tokenizer) for name, part in rows.items()}


def bert(path: Path) -> tuple[nn.Module, Any, list[hp.AttentionLayer]]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return model, tokenizer, hp.find_attention(model, dict(tokenizer(["a b", "c d"], return_tensors="pt")))


def bert_subject(path: Path) -> tuple[Subject, Any]:
    model, tokenizer, layers = bert(path)
    sizes = {"score": 128, "choose": 256, "report": 768}
    return Subject(
        "BERT", model, layers, **bert_parts(path, tokenizer, sizes),
        methods=(
            "ablation", "mean-ablation", "logits", "integrated-gradients", "signed-gradient", "gradient", "fisher", "output-norm",
            "weight-norm", "entropy",
        ),
        keep=(18, 36), draws=6, repaired=3, repair={"mixtures": False, "answers": False}, read=lambda measured: measured,
        curve=tuple(range(6, 73, 6)),
    ), tokenizer  # fmt: skip


def see_translator(subject: Subject) -> Figures:
    """The first exercise on the translator: figures, and two pictures."""
    example, batches = translator.example(NUMBER), subject.score
    weights, rows = seen(subject.model, subject.layers, without_labels(example), batches)
    kinds = {"encoder": "encoder", "decoder": "decoder", "cross": "to encoder"}
    names = {layer.name: f"{kinds[layer.kind]} L{layer.index}" for layer in subject.layers}
    pictures.all_heads(HOME / "d2l-heads.png", _pictured(subject.layers, weights, rows, names))
    source, target = translator.english(NUMBER), [translator.START, *translator.french(NUMBER)]
    cross = {layer.name for layer in subject.layers if layer.kind == "cross"}
    sharpest = max((row for row in rows if row["layer"] in cross), key=lambda row: row["largest"])
    its = weights[sharpest["layer"]][sharpest["index"]]
    title = f"{sharpest['head']}, attention to the encoder"
    pictures.one_head(HOME / "d2l-head.png", its, target, source, title, "the decoder has just read")
    looks = [
        {"reads": read, "writes": write, "looks": source[int(w.argmax())], "weight": float(w.max())}
        for read, write, w in zip(target, [*target[1:], translator.END], its, strict=True)
    ]
    return {
        "english": " ".join(source), "french": " ".join(target[1:]), "number": NUMBER, "trained": translator.TRAINED,
        "largest": translator.LARGEST, "seen": {"head": sharpest["head"], "largest": sharpest["largest"], "looks": looks},
        "profiles": rows, "roles": roles_of(rows),
        "size": {
            "num_hiddens": subject.model.num_hiddens, "num_blks": len(subject.model.encoder),
            "num_heads": subject.layers[0].num_heads, "encoder": 2 * subject.layers[0].num_heads,
        },
    }  # fmt: skip


def see_bert(subject: Subject, tokenizer: Any) -> Figures:
    """The first exercise on BERT: figures, and two pictures."""
    example, some = dict(tokenizer([SENTENCE], return_tensors="pt")), subject.score
    weights, rows = seen(subject.model, subject.layers, example, [without_labels(batch) for batch in some])
    names = {layer.name: f"L{layer.index}" for layer in subject.layers}
    pictures.all_heads(HOME / "bert-heads.png", _pictured(subject.layers, weights, rows, names))
    words = tokenizer.convert_ids_to_tokens(example["input_ids"][0].tolist())
    clearest = max((row for row in rows if row["role"] != "mixed"), key=lambda row: row["clarity"])
    title = f"{clearest['head']}: {clearest['because']}"
    pictures.one_head(
        HOME / "bert-head.png", weights[clearest["layer"]][clearest["index"]], words, words, title, "token"
    )
    return {
        "size": {"layers": len(subject.layers), "hidden": subject.model.config.hidden_size}, "sentence": SENTENCE,
        "seen": {k: clearest[k] for k in ("head", "role", "because", "clarity")}, "profiles": rows,
        "profiled": examples_in(some), "roles": roles_of(rows),
    }  # fmt: skip


def study(subject: Subject, rows: Sequence[Mapping[str, Any]]) -> Figures:
    """The second exercise on one model."""
    return {**judged(subject), **carried_out(subject, rows)}


def _pictured(
    layers: Sequence[hp.AttentionLayer], weights: Mapping[str, np.ndarray], rows: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
) -> list[tuple[str, list[np.ndarray], list[str]]]:  # fmt: skip
    return [
        (names[layer.name], list(weights[layer.name]), [r["role"] for r in rows if r["layer"] == layer.name])
        for layer in layers
    ]


# -- examples ----------------------------------------------------------------------------------------


def of_examples(path: Path) -> Figures:
    """How many examples scores need, and whether they may be those of training."""
    model, tokenizer, layers = bert(path)
    held, trained = by_length(rows_of(path, "test")), rows_of(path, "train")
    trained = by_length([trained[i] for i in np.random.default_rng(0).permutation(len(trained))[:1024]])
    known = {
        name: examples.effects_of(f"bert-{name}", model, layers, sentences(rows, tokenizer))
        for name, rows in (("held", held), ("trained", trained))
    }
    found = {
        "reliability": {"bert": examples.reliability(known["held"])}, "signs": examples.signs(known["held"]),
        "signs_trained": examples.signs(known["trained"]), "sources": examples.sources(known["trained"], known["held"]),
    }  # fmt: skip
    say("BERT: reliability")
    subject = translator_subject()
    numbers = translator.parts()
    many = translator.batches(numbers["score"] + numbers["choose"] + numbers["report"])
    every = examples.effects_of("d2l", subject.model, subject.layers, many)
    found["reliability"]["d2l"] = examples.reliability(every)
    say("the translator: reliability")
    return found


# -- speed -------------------------------------------------------------------------------------------


def timed(
    model: nn.Module, layers: list[hp.AttentionLayer], drop: dict[str, list[int]], example: Batch, prove: Batch
) -> Figures:
    """What a plan can gain at most on an input, and what it gains."""
    everything = {layer.name: list(range(layer.num_heads)) for layer in layers}
    smaller = copy.deepcopy(model)
    hp.prune(smaller, drop, prove)
    plan = drop
    # [speed]
    parts = hp.breakdown(model, example, layers=layers)
    times = hp.benchmark({"dense": model, "pruned": smaller}, example)
    print(parts.shares, parts.bound(plan), times.speedups["pruned"].ratio)
    # [/speed]
    speedup = times.speedups["pruned"]
    return {
        "shares": parts.shares, "bound": parts.bound(plan), "bound_all": parts.bound(everything),
        "ratio": speedup.ratio, "low": speedup.low, "high": speedup.high, "verdict": speedup.verdict,
        "batch": len(next(iter(example.values()))), "length": next(iter(example.values())).shape[1],
    }  # fmt: skip


def speeds(path: Path, figures: Mapping[str, Any]) -> list[Figures]:
    """Times of the half plans that the other stages found."""
    rows = []
    made = translator.trained()
    number = without_labels(translator.example(NUMBER))
    layers = hp.find_attention(made, number)
    plan = figures["d2l"]["plans"][figures["d2l"]["half"]]
    for count in (1, 128):
        many = {name: value.repeat(count, 1) for name, value in number.items()}
        rows.append({"model": "d2l", "kept": plan["kept"], **timed(made, layers, plan["drop"], many, number)})
    model, _, layers = bert(path)
    generator = torch.Generator().manual_seed(0)
    plan = figures["bert"]["plans"][figures["bert"]["half"]]
    for batch, length in ((1, 26), (32, 26)):
        ids = torch.randint(1000, 2000, (batch, length), generator=generator)
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        prove = {name: value[:2, :9] for name, value in example.items()}
        rows.append({"model": "bert", "kept": plan["kept"], **timed(model, layers, plan["drop"], example, prove)})
    return rows


# -- the documents -----------------------------------------------------------------------------------


def claims(figures: Mapping[str, Any]) -> dict[str, bool]:
    """What the templates' prose says without a figure, and whether it is so."""
    d, b, x = figures["d2l"], figures["bert"], figures["examples"]
    again = x["reliability"]["bert"]
    by = {row["method"]: row for row in d["methods"]}
    scores = dict(zip(d["scores"]["labels"], d["scores"]["values"], strict=True))
    sharpest = sorted(d["profiles"], key=lambda row: row["entropy"])[: d["heads"] // 3]
    looks = {row["writes"]: row["looks"] for row in d["seen"]["looks"]}
    gone, pair = d["plans"][d["fewest"]]["gone"], d["pairs"][0]
    shares = [row["shares"] for row in figures["speed"]]
    right = {name: row["masked"]["accuracy"] for name, row in by.items()}
    losses, rights = (
        [(row["masked"][name], row["repaired"][name]) for row in d["methods"]] for name in ("loss", "accuracy")
    )
    return {
        "the translator's sharpest heads do next to nothing": sum(scores[row["head"]] for row in sharpest)
        < 0.1 * sum(scores.values()),
        "nothing is left of the plan by entropy": right["entropy"] < 0.05,
        "'ninety' is looked at for two words": looks["quatre"] == looks["vingt"] == "ninety",
        "the head that lines words up costs most": max(scores, key=lambda label: scores[label]) == d["seen"]["head"],
        "the pair costs more than its sum": pair["extra"] > 1.96 * pair["error"],
        "ablation by the answers ranks well and plans badly": by["logits"]["rho"] > 0.85
        and right["logits"] < right["ablation"] - 0.3,
        "the gradient's plan is as good as ablation's, for less": right["gradient"] > right["ablation"] - 0.01
        and by["gradient"]["cost"] < by["ablation"]["cost"] / 2,
        "ablation's plan beats every random one": right["ablation"] > d["random"]["masked"]["accuracy"]["high"],
        "repair raised the loss of no plan of the translator, lowered most, and cost one some accuracy": all(
            after <= before for before, after in losses
        )
        and sum(after < before for before, after in losses) > len(losses) / 2
        and len({pair for pair in rights if pair[1] < pair[0]}) == 1,  # two methods make this plan
        "the translator's encoder loses all its heads": all(
            row["head"] in gone for row in d["profiles"] if row["layer"].startswith("encoder.")
        ),
        "all heads of BERT that can be told from zero lower the loss": b["scores"]["sure"]
        == b["scores"]["harmful"]
        > 0,
        "BERT is overconfident on new sentences": x["signs"]["loss"] > 3 * x["signs_trained"]["loss"],
        "its removed heads cost on right answers, and gain on wrong ones": x["signs"]["right"]
        > 0
        > x["signs"]["wrong"],
        "of BERT's ablation, thousands of examples are needed": again["ablation"]["needed"] >= 1000,
        "of the gradient and the answers, less than 128": max(again[m]["needed"] for m in ("gradient", "logits")) < 128,
        "training examples do for the gradient and the answers, and less well for ablation": min(
            x["sources"][m]["trained"] for m in ("gradient", "logits")
        )
        > 0.85
        and x["sources"]["ablation"]["trained"] < x["sources"]["ablation"]["few"],
        "for one number, launch overhead takes most of the time": max(shares[0], key=shares[0].get)
        == "launch overhead",
        "in BERT, feed-forward layers take most of the time": max(shares[3], key=shares[3].get) == "feed-forward",
    }


def excerpt(name: str) -> str:
    """Lines of this file between ``# [name]`` and ``# [/name]``."""
    found = re.search(
        rf"^ *# \[{name}\]\n(.*?)^ *# \[/{name}\]$", Path(__file__).read_text(encoding="utf-8"), re.S | re.M
    )
    if found is None:
        raise ValueError(f"exercise.py holds no excerpt {name!r}")
    return textwrap.dedent(found.group(1)).rstrip()


def _percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _nats(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}"


def _signed(value: float) -> str:
    return f"{value:+.2g}" if abs(value) < 0.1 else f"{value:+.2f}"


def rendered(figures: Mapping[str, Any]) -> dict[str, str]:
    """Both documents."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HOME), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters.update(
        percent=_percent, points=_points, nats=_nats, signed=_signed, times=lambda x: f"{x:.2f}", rho=lambda x: f"{x:.2f}",
        count=lambda x: f"{x:,}", cost=lambda x: f"{x:.2g}" if x < 10 else f"{x:.0f}", small=lambda x: f"{x:.0e}",
    )  # fmt: skip
    return {
        language: environment.get_template(f"{language}.md.j2").render(**figures, excerpt=excerpt)
        for language in DOCUMENTS
    }


def draw(figures: Mapping[str, Any]) -> None:
    """The pictures that are drawn from figures alone."""
    titles = {"d2l": "D2L's Transformer", "bert": "BERT (minilm-rt)"}
    scores = {titles[k]: figures[k]["scores"] for k in titles}
    pictures.importance(
        HOME / "importance.png", {t: (s["labels"], s["values"], s["errors"]) for t, s in scores.items()}
    )
    pictures.reliability(
        HOME / "reliability.png", {titles[k]: figures["examples"]["reliability"][k] for k in titles},
        {"ablation": "ablation", "gradient": "gradient", "logits": "ablation, by the answers"},
    )  # fmt: skip
    curves = {titles[k]: figures[k]["together"] for k in titles}
    pictures.together(HOME / "together.png", {t: (c["removed"], c["alone"], c["real"]) for t, c in curves.items()})
    pictures.times(
        HOME / "time.png",
        {f"{titles[r['model']]}, {r['batch']} x {r['length']}": r["shares"] for r in figures["speed"]},
    )  # fmt: skip


def about() -> dict[str, Any]:
    return {
        "headprune": hp.__version__, "torch": torch.__version__, "transformers": transformers.__version__, "cpu": real.chip(),
        "cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def short(value: Any) -> Any:
    """Floats with six digits."""
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [short(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--render", action="store_true", help="only the documents, from the figures that are there")
    parser.add_argument("--minilm", type=Path, default=real.MINILM)
    options = parser.parse_args()
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    if not options.render:
        for stage in STAGES:
            if stage in options.only:
                stage_of(stage, figures, options.minilm)
                figures.setdefault("about", {})[stage] = about()
                HOME.mkdir(parents=True, exist_ok=True)
                FIGURES.write_text(json.dumps(short(figures), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    missing = [stage for stage in STAGES if stage not in figures.get("about", {})]
    if missing:
        raise SystemExit(f"No documents yet: {' and '.join(missing)} have not been run.")
    draw(figures)
    for language, text in rendered(figures).items():
        DOCUMENTS[language].write_text(text, encoding="utf-8")
    wrong = [claim for claim, holds in claims(figures).items() if not holds]
    print(json.dumps({"seconds": round(time.monotonic() - STARTED), "not_so": wrong}))
    if wrong:
        raise SystemExit("The documents' prose says what is not so any more: " + "; ".join(wrong))


def stage_of(stage: str, figures: Figures, minilm: Path) -> None:
    """Put the figures of a stage into ``figures``."""
    if stage == "see":
        figures.setdefault("d2l", {}).update(see_translator(translator_subject()))
        figures.setdefault("bert", {}).update(see_bert(*bert_subject(minilm)))
    elif stage == "d2l":
        subject = translator_subject()
        figures["d2l"].update(study(subject, figures["d2l"]["profiles"]), pairs=pairs_in(subject))
    elif stage == "bert":
        subject, _ = bert_subject(minilm)
        figures["bert"].update(study(subject, figures["bert"]["profiles"]))
    elif stage == "examples":
        figures["examples"] = of_examples(minilm)
    else:
        figures["speed"] = speeds(minilm, figures)


if __name__ == "__main__":
    main()
