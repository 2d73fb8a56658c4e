"""What ablation and gradients cost, and whether an estimate from few examples holds.

    python benchmarks/ablation.py                       # all, and the section of docs/benchmarks.md; about a quarter of an hour
    python benchmarks/ablation.py --only replay         # prints one part: replay, gradient, few
    python benchmarks/ablation.py --device cuda         # on a GPU, where replay stacks more

Every ratio is of times taken in turn in this one run. minilm-rt is looked for beside the checkout (``--minilm`` names
another folder); without it the parts that need real effects are left out, and it is said.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import torch
import transformers
from document import replace_section
from scipy.stats import t as student
from torch import Tensor, nn

import headprune as hp
from headprune.app.data import DataOptions, load_parts
from headprune.app.models import load_model
from headprune.gates import gated
from headprune.losses import ExampleLoss
from headprune.running import evaluating, exact_attention
from headprune.scoring import Settings
from headprune.scoring.ablation import exact, one_by_one
from headprune.scoring.base import Problem
from headprune.scoring.gradient import gate_gradients
from headprune.scoring.replay import Replay
from headprune.scoring.sampled import State, estimate, inclusion

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
DRAWS = 200
BATCHES = 6  # of the replayed model: what a replay costs once weighs more than on real data, which has some tens


def silent(done: int, total: int, note: str = "") -> None:
    pass


def problem_of(model: nn.Module, batches: list[Any]) -> Problem:
    losses = ExampleLoss(model)
    kept = losses.prepare(batches)
    layers = hp.find_attention(model, {k: v for k, v in kept[0].items() if k != "labels"})
    return Problem(model, layers, [(b, losses.rows.size(b)) for b in kept], losses, 0, silent, rows=losses.rows)


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def in_turn(device: str, rounds: int, *runs: Callable[[], Any]) -> list[list[float]]:
    """Times of each run, taken in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for mine, run in zip(times, runs, strict=True):
            mine.append(timed(run, device)[0])
    return times


def ratio(a: list[float], b: list[float]) -> str:
    each = [x / y for x, y in zip(a, b, strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


# -- replay against the plain loop -------------------------------------------------------------


def plain_loop(problem: Problem) -> Tensor:
    """Effects ``[examples, heads]`` of ablation, by one forward pass of the whole model per head and batch."""
    found = []
    with torch.no_grad():
        for row in torch.cat(one_by_one(problem)):
            changed = {k: g for k, g in problem.split(row).items() if bool((g != 1).any())}
            with gated(problem.model, problem.layers, changed):
                found.append(torch.cat([problem.losses(b).cpu().double() for b, _ in problem.batches]))
        dense = torch.cat([problem.losses(b).cpu().double() for b, _ in problem.batches])
    return torch.stack(found, dim=1) - dense[:, None]


def replay(problem: Problem) -> Tensor:
    """The same, replayed."""
    return exact(problem, Replay(problem)).effects


def replayed(device: str) -> list[str]:
    """12 layers x 12 heads, width 384, as design.md's prototype was measured."""
    lines = [
        "| batches | plain loop, s | replayed, s | replayed / plain | largest difference |",
        "|---|---|---|---|---|",
    ]
    for rows, tokens in ((4, 64), (16, 16)):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            num_hidden_layers=12, num_attention_heads=12, hidden_size=384, intermediate_size=1536, vocab_size=1000
        )
        model = transformers.BertForSequenceClassification(config).eval().to(device)
        generator = torch.Generator().manual_seed(0)
        batches = [
            {
                "input_ids": torch.randint(0, 1000, (rows, tokens), generator=generator).to(device),
                "attention_mask": torch.ones(rows, tokens, dtype=torch.long, device=device),
                "labels": torch.randint(0, 2, (rows,), generator=generator).to(device),
            }
            for _ in range(BATCHES)
        ]
        with evaluating(model), exact_attention(model):
            problem = problem_of(model, batches)
            plain, fast = partial(plain_loop, problem), partial(replay, problem)
            difference = (plain() - fast()).abs().max().item()
            slow, quick = in_turn(device, 2, plain, fast)
            notes = "; ".join(Replay(problem).notes) or "Every layer was replayed"
        lines.append(
            f"| {BATCHES} of {rows} x {tokens} | {statistics.median(slow):.1f} | {statistics.median(quick):.1f} "
            f"| {ratio(quick, slow)} | {difference:.0e} |"
        )
    return [
        *lines,
        "",
        f"144 heads. The replayed time includes everything: studying the model, and comparing with plain forward passes. {notes}. Counted in "
        "operations, a replay of whole blocks would take at least 0.54 of the plain loop. This replay can take less: it starts inside a block, "
        "after the attention, and after the last attention it computes only the one token that this classifier reads.",
    ]


# -- gradients ---------------------------------------------------------------------------------


def batches_of(folder: Path, examples: int) -> tuple[nn.Module, list[Any]]:
    loaded = load_model(str(folder))
    parts = load_parts(DataOptions(str(folder / "data"), limit=examples), loaded)
    return loaded.model, list(parts.score.batches())


def bertology(model: nn.Module, problem: Problem) -> Tensor:
    """transformers' run_bertology.py for v5: eager attention, one gate per head, gradients of the weights too."""
    gates = {a.name: torch.ones(a.num_heads, requires_grad=True) for a in problem.layers}
    total = torch.zeros(problem.heads)
    for batch, _ in problem.batches:
        with gated(model, problem.layers, gates):
            model(**batch).loss.backward()
        total += torch.cat([g.grad.abs() for g in gates.values()])
    model.zero_grad()
    return total


def gradients(folder: Path, device: str) -> list[str]:
    model, batches = batches_of(folder, 256)
    model.to(device)
    batches = [{k: v.to(device) for k, v in b.items()} for b in batches]
    with evaluating(model), exact_attention(model):
        problem = problem_of(model, batches)

        def forward() -> None:
            with torch.no_grad():
                for batch, _ in problem.batches:
                    problem.losses(batch)

        def old() -> None:
            model.set_attn_implementation("eager")
            bertology(model, problem)
            model.set_attn_implementation("sdpa")

        in_turn(device, 1, forward, lambda: gate_gradients(problem), old)  # for warm-up
        plain, ours, theirs = in_turn(device, 5, forward, lambda: gate_gradients(problem), old)
    return [
        f"minilm-rt, 72 heads, {problem.examples} sentences, batches of 32. Timed in turn; median (minimum to maximum) of 5 rounds:",
        "",
        "| | ratio |",
        "|---|---|",
        f"| gradient pass / plain forward pass | {ratio(ours, plain)} |",
        f"| run_bertology's loop for v5 (eager, gradients of weights) / plain forward pass | {ratio(theirs, plain)} |",
        f"| gradient pass / run_bertology's loop | {ratio(ours, theirs)} |",
    ]


# -- few examples ------------------------------------------------------------------------------


def few(folder: Path, device: str, examples: int, share: float) -> list[str]:
    model, batches = batches_of(folder, examples)
    model.to(device)
    wanted = Settings(examples=round(share * examples))
    layers = hp.find_attention(model, {k: v[:2] for k, v in batches[0].items() if k != "labels"})
    few_time, _ = timed(lambda: hp.score(model, batches, "ablation", layers=layers, settings=wanted), device)
    with evaluating(model), exact_attention(model):
        problem = problem_of(model, [{k: v.to(device) for k, v in b.items()} for b in batches])
        whole_time, effects = timed(lambda: exact(problem, Replay(problem)).effects, device)
        expected = -gate_gradients(problem).effects
    full, n = effects.mean(0), len(effects)
    exact_variance = effects.var(0) / n
    lines = [
        f"minilm-rt, 72 heads, {n} sentences of the training part. Exact ablation (replayed) took {whole_time:.0f} s. Gradients on all sentences "
        f"and ablation on {share:.0%} of them took {few_time:.1f} s: **{few_time / whole_time:.2f} of that time**.",
        "",
        f"{DRAWS} draws of the sample, compared with the exact scores of all {n}:",
        "",
        "| examples ablated | mean variance / variance of exact scores | stated / actual variance | 95 % interval: coverage | coverage, worst head |",
        "|---|---|---|---|---|",
    ]
    for part in (0.04, 0.08, 0.16):
        values, variances, covered = [], [], []
        for draw in range(DRAWS):
            state = State.empty(expected, seed=draw)
            state = state.grown(torch.full((len(full),), part * n, dtype=torch.float64))
            pi = inclusion(state.size, part * n)
            seen = state.uniforms < pi
            state.effects[seen] = effects[seen]
            value, variance = estimate(state)
            quantile = float(student.ppf(0.975, max(1, int((seen & (pi < 1)).sum()) - 1)))
            values.append(value)
            variances.append(variance)
            covered.append((value - full).abs() <= quantile * variance.sqrt())
        actual = (torch.stack(values) - full).square().mean(0)
        cover = torch.stack(covered).double().mean(0)
        lines.append(
            f"| {part:.0%} | {actual.mean() / exact_variance.mean():.2f} | {torch.stack(variances).mean() / actual.mean():.1f} "
            f"| {cover.mean():.1%} | {cover.min():.0%} |"
        )
    return [
        *lines,
        "",
        "The variance is that of the estimate around the exact score of all examples, as a mean over heads. The variance of exact scores is "
        "the variance over examples divided by their number. If their ratio is below 1, estimating changes the scores less than taking other "
        "examples would.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=("replay", "gradient", "few"), default=None)
    parser.add_argument("--minilm", type=Path, default=ROOT.parent / "shared" / "real" / "minilm-rt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.08)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    wanted = given.only or ("replay", "gradient", "few")
    parts = []
    if "replay" in wanted:
        parts += ["### Exact ablation, replayed", "", *replayed(given.device), ""]
    for name, title, run in (
        ("gradient", "### Gradients", lambda: gradients(given.minilm, given.device)),
        ("few", "### Ablation of few examples", lambda: few(given.minilm, given.device, given.examples, given.share)),
    ):
        if name in wanted:
            parts += [title, "", *(run() if given.minilm.is_dir() else ["Left out: minilm-rt is not there."]), ""]
    where = f"{given.device}, {given.threads} thread{'s' if given.threads > 1 else ''}"
    parts += [
        f"`python benchmarks/ablation.py`, torch {torch.__version__}, transformers {transformers.__version__}, {where}."
    ]
    text = "\n".join(parts)
    print(text)
    if given.only is None and given.device == "cpu":
        replace_section(DOCUMENT, "ablation", text)


if __name__ == "__main__":
    main()
