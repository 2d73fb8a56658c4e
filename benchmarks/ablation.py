"""What ablation costs, and whether an estimate from few examples holds.

    python benchmarks/ablation.py                       # all, and the section of docs/benchmarks.md; about half an hour
    python benchmarks/ablation.py --only replayed       # prints one part: replayed, few
    python benchmarks/ablation.py --device cuda         # on a GPU, where replay stacks more

Every ratio is of times taken in turn in this one run; `headprune.score` is timed with everything that it does. minilm-rt is looked for
beside the checkout (``--minilm`` names another folder); without it the parts that need real effects are left out, and it is said.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import real
import torch
import transformers
from document import replace_section
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.benchmark import timer

import headprune as hp
from headprune.scoring import Settings


def in_turn(rounds: int, *runs: Callable[[], Any]) -> list[list[float]]:
    """Seconds of each run in every round."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for mine, run in zip(times, runs, strict=True):
            start = timer()
            run()
            mine.append(timer() - start)
    return times


def ratio(a: list[float], b: list[float]) -> str:
    each = [x / y for x, y in zip(a, b, strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def losses(model: Any, batches: list[Any]) -> Tensor:
    """The loss of each example ``[examples]``, by plain forward passes."""
    found = []
    with torch.no_grad():
        for batch in batches:
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
            found.append(cross_entropy(logits, batch["labels"], reduction="none").double().cpu())
    return torch.cat(found)


# -- replay against the plain loop -------------------------------------------------------------


def plain_loop(model: Any, layers: Any, batches: list[Any]) -> Tensor:
    """Ablation's scores ``[heads]`` by one forward pass of the whole model per head and batch."""
    dense, found = losses(model, batches), []
    for layer in layers:
        for head in range(layer.num_heads):
            with hp.mask(model, {layer.name: [head]}, layers=layers):
                found.append((losses(model, batches) - dense).mean())
    return torch.stack(found)


def replayed(device: str, small: bool = False) -> list[str]:
    """12 layers x 12 heads, width 384; a smaller model to try the script."""
    rows = []
    heads, layers_, count = (4, 2, 2) if small else (12, 12, 6)
    for size, tokens in ((4, 16),) if small else ((4, 64), (16, 16)):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            num_hidden_layers=layers_, num_attention_heads=heads, hidden_size=32 * heads, intermediate_size=128 * heads, vocab_size=1000
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config).eval().to(device)
        ids = torch.randint(0, 1000, (count, size, tokens)).to(device)
        labels = torch.randint(0, 2, (count, size)).to(device)
        batches = [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": x} for i, x in zip(ids, labels, strict=True)]  # fmt: skip
        layers = hp.find_attention(model, {"input_ids": ids[0]})
        plain = partial(plain_loop, model, layers, batches)
        fast = partial(hp.score, model, batches, "ablation", layers=layers)
        difference = (plain() - fast().flat()).abs().max().item()
        slow, quick = in_turn(2, plain, fast)
        took = f"{statistics.median(slow):.1f} | {statistics.median(quick):.1f}"
        rows.append(f"| {count} of {size} x {tokens} | {took} | {ratio(quick, slow)} | {difference:.0e} |")
    return [
        "| batches | plain loop, s | replayed, s | replayed / plain | largest difference |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"{layers_ * heads} heads. Counted in operations, a replay of whole blocks would take at least 0.54 of the plain loop. This replay can take less: it starts "
        "inside a block, after the attention.",
    ]


# -- few examples ------------------------------------------------------------------------------


def minilm(folder: Path, device: str, examples: int) -> tuple[Any, Any, list[Any]]:
    """The model, its layers, and labelled batches of the training part."""
    loaded, parts = real.load("minilm", folder, limit=examples, report_limit=1)
    loaded.model.to(device).float()
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in parts.score.batches()]
    return loaded.model, hp.find_attention(loaded.model, batches[0]), batches


def few(folder: Path, device: str, examples: int = 512, share: float = 0.08, draws: int = 10) -> list[str]:
    """Scores from few ablated examples against those from all."""
    model, layers, batches = minilm(folder, device, examples)
    score = partial(hp.score, model, batches, "ablation", layers=layers)
    start = time.perf_counter()
    full = score()
    whole, times, found = time.perf_counter() - start, [], []
    for seed in range(draws):
        start = time.perf_counter()
        found.append(score(seed=seed, settings=Settings(examples=round(share * examples))))
        times.append(time.perf_counter() - start)
    off = torch.stack([each.flat() - full.flat() for each in found])
    stated = torch.stack([each.flat_stderr() for each in found])
    took = statistics.median(times)
    return [
        f"minilm-rt, 72 heads, {examples} sentences of the training part. Exact ablation (replayed) took {whole:.0f} s. Gradients on all sentences "
        f"and ablation on {share:.0%} of them took {took:.1f} s: **{took / whole:.2f} of that time**.",
        "",
        f"{draws} draws of the sample: the mean squared difference from the scores of all {examples} is {off.square().mean() / full.flat_stderr().square().mean():.2f} of the "
        f"variance of those scores (below 1, estimating changes the scores less than taking other examples would). The difference is below 1.96 of the stated standard errors in "
        f"{(off.abs() <= 1.96 * stated).double().mean():.1%} of all heads and draws.",
    ]


PARTS = {"replayed": "Exact ablation, replayed", "few": "Ablation of few examples"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minilm", type=Path, default=real.MINILM)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name in given.only:
        left_out = ["Left out: minilm-rt is not there."] if name != "replayed" and not given.minilm.is_dir() else None
        found = left_out or (replayed(given.device) if name == "replayed" else few(given.minilm, given.device))
        lines += [f"### {PARTS[name]}", "", *found, ""]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {given.device}, 1 thread"
    text = "\n".join([*lines, f"`python benchmarks/ablation.py`, {versions}."])
    print(text)
    if given.only == list(PARTS) and given.device == "cpu":
        replace_section(real.ROOT / "docs" / "benchmarks.md", "ablation", text)


if __name__ == "__main__":
    main()
