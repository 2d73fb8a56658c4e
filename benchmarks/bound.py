"""How near pruned models come to the most that their plans can gain (Amdahl's law), on this machine; its last line is one JSON document.

    python benchmarks/bound.py --minilm ../shared/real/minilm-rt                       # prints
    python benchmarks/bound.py --minilm ../shared/real/minilm-rt --into docs/benchmarks.md

The dense model's passes are broken down into their parts (`headprune.breakdown`), and a plan's bound is worked out: only the removed
heads' share of the projections and of attention itself is saved. Beside it stands what the pruned model gained, timed in turn with the dense one
(`headprune.benchmark`). Both are ratios of times of one process, made in turn in each of some repeats, of which the medians are shown. Models are minilm-rt with
the plan of reports/minilm-rt, and a BERT of the base shape (12 layers of 12 heads of 64, random weights) that loses half of its
heads, drawn at random, so that layers keep different numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as tf
from document import replace_section
from torch import nn

import headprune as hp

ROOT = Path(__file__).parent.parent
GOAL = 0.9
Case = tuple[str, nn.Module, list[hp.AttentionLayer], dict[str, dict[str, list[int]]]]


def drawn(layers: list[hp.AttentionLayer], share: float) -> dict[str, list[int]]:
    """A share of all heads, drawn at random."""
    heads = [(a.name, h) for a in layers for h in range(a.num_heads)]
    chosen = random.Random(0).sample(heads, round(share * len(heads)))
    return {a.name: sorted(h for name, h in chosen if name == a.name) for a in layers}


def even(layers: list[hp.AttentionLayer], share: float) -> dict[str, list[int]]:
    """The same number of heads of every layer."""
    return {a.name: list(range(round(share * a.num_heads))) for a in layers}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The models with their plans."""
    if "minilm" in options.only:
        model = tf.AutoModelForSequenceClassification.from_pretrained(options.minilm).eval()
        layers = hp.find_attention(model, example(2, 9))
        plan = hp.PruningPlan.load(ROOT / "reports" / "minilm-rt" / "plan.json")
        yield "minilm-rt", model, layers, {f"{plan.kept} of {plan.total} heads (the report's plan)": dict(plan.drop)}
    if "base" in options.only:
        torch.manual_seed(0)
        config = tf.BertConfig(attn_implementation="sdpa")
        model = tf.BertForSequenceClassification(config).eval()
        layers = hp.find_attention(model, example(2, 9))
        half = {
            "72 of 144 heads, drawn at random": drawn(layers, 0.5),
            "6 of 12 heads in every layer": even(layers, 0.5),
        }
        yield "BERT of the base shape", model, layers, half


def example(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1000, 2000, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def measured(case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each input of a model."""
    name, model, layers, plans = case
    pruned = {label: copy.deepcopy(model) for label in plans}
    for label, drop in plans.items():
        hp.prune(pruned[label], drop, example(2, 9), layers=layers)
    for batch, length in options.shapes:
        inputs = example(batch, length)
        found = []
        for _ in range(options.repeat):
            parts = hp.breakdown(model, inputs, layers=layers, min_seconds=options.seconds)
            times = hp.benchmark({"dense": model, **pruned}, inputs, min_runs=options.runs, min_seconds=options.seconds)
            found.append((parts, times))
        for label, drop in plans.items():
            pairs = [(b.bound(drop), t.speedups[label].ratio) for b, t in found]
            row = {
                "model": name,
                "plan": label,
                "batch": batch,
                "length": length,
                "shares": {part: median(b.shares[part] for b, _ in found) for part in found[0][0].parts},
                "bound": median(b for b, _ in pairs),
                "achieved": median(a for _, a in pairs),
                "ratio": median(a / b for b, a in pairs),
                "ratios": [a / b for b, a in pairs],
                "load": os.getloadavg()[0],
            }
            print(
                f"{name}, {label}, batch {batch} x {length}: {row['achieved']:.2f}x of at most {row['bound']:.2f}x, "
                f"{row['ratio']:.2f} of it ({min(row['ratios']):.2f} to {max(row['ratios']):.2f}); load {row['load']:.1f}",
                flush=True,
            )
            yield row


def section(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The section of a document."""
    parts = list(rows[0]["shares"])
    lines = [
        "## Where the time goes, and how much of what pruning can gain is gained",
        "",
        "Shares of the dense model's forward pass (`headprune.breakdown`); the most that the plan can gain by Amdahl's law, if the removed heads' share",
        "of the attention projections and of attention itself is saved and nothing else; and what it gained, timed in turn. Medians of "
        f"{options.repeat} repeats; in brackets the smallest and the largest achieved ÷ bound. Above 1, the pruned model gained more than in proportion.",
        "",
        f"Made by `python benchmarks/bound.py {options.command}`: {about()}, load {min(r['load'] for r in rows):.1f} to {max(r['load'] for r in rows):.1f}.",
        "",
        f"| model, plan | batch x tokens | {' | '.join(parts)} | bound | achieved | achieved ÷ bound |",
        f"|---|---|{'---:|' * (len(parts) + 3)}",
    ]
    for row in rows:
        shares = " | ".join(f"{100 * row['shares'][part]:.0f} %" for part in parts)
        lines.append(
            f"| {row['model']}, {row['plan']} | {row['batch']} x {row['length']} | {shares} | {row['bound']:.2f}x | {row['achieved']:.2f}x "
            f"| {row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f}) |"
        )
    largest = max(r["batch"] * r["length"] for r in rows)
    at_largest = [r for r in rows if r["batch"] * r["length"] == largest]
    met = all(r["ratio"] >= GOAL for r in at_largest)
    lines += ["", f"The goal is {GOAL} at the largest batch: {'met' if met else 'not met'}."]
    return "\n".join(lines)


def about() -> str:
    names = [
        line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")
    ]
    return (
        f"headprune {hp.__version__}, torch {torch.__version__}, transformers {tf.__version__}; {names[0] if names else platform.processor()}, "
        f"{os.cpu_count()} cores, torch on {torch.get_num_threads()} thread(s)"
    )


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def shape(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    return int(batch), int(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, default=ROOT.parent / "shared" / "real" / "minilm-rt")
    parser.add_argument("--only", nargs="+", default=["minilm", "base"], choices=["minilm", "base"])
    parser.add_argument(
        "--shapes", nargs="+", type=shape, default=[(1, 26), (32, 26), (1, 104), (32, 104)], help="batch x tokens"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--runs", type=int, default=7, help="rounds of a benchmark, at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="of every model in a benchmark, at least")
    parser.add_argument("--into", type=Path, help="the document whose section `bound` is written")
    options = parser.parse_args()
    options.command = "--minilm PATH" if "minilm" in options.only else "--only base"
    torch.manual_seed(0)
    rows = [row for case in cases(options) for row in measured(case, options)]
    if options.into:
        replace_section(options.into, "bound", section(rows, options))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
