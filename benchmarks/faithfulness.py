"""How faithful a model stays with only the first k heads of each scoring method's order, and whether needed heads come first.

    python benchmarks/faithfulness.py --json faithfulness.json                  # all; writes section `faithfulness` of docs/benchmarks.md
    python benchmarks/faithfulness.py --json faithfulness.json --only minilm --methods l0      # adds this to the file, prints

The measure is that of MIB's circuit track (Mueller et al. 2025, arXiv:2504.13151), for heads in place of edges:
f(k) = (m(k) - m(none)) / (m(all) - m(none)), with m the mean log-probability of the label when the heads after the first k are
ablated. CPR is the area under f over k / heads, CMD that of |1 - f|, both by trapezoids. What is in the ``--json`` file is not
measured again; several calls may add to it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import real
import smollm2
import torch
import transformers
from document import replace_section, table
from quality import Cache, layers_of
from real import number, say
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import headprune as hp
from headprune.gates import Fill, gated, hook_heads
from headprune.inputs import call
from headprune.scoring import METHODS, Settings

Batch = dict[str, Tensor]
TOKENS, LENGTH, PERIODS = (
    128,
    64,
    (16, 32),
)  # the induction task: vocabulary, tokens of a sequence, tokens until it repeats
HEADS, WIDTH, STEPS, RATE = 8, 128, 400, 3e-3
NEEDED = 0.5  # of a head's attention
MODELS = 5  # trained
LONG = {"l0", "dsp", "shapley", "mean-ablation", "resample-ablation"}
LONGER = LONG | {"ablation", "integrated-gradients", "entropy", "confidence", "signed-gradient", "weight-norm"}
EXCLUDED = {"minilm": LONG, "smollm2": LONGER}  # --methods names them


class Draw(NamedTuple):
    """A model, examples to score on and others to measure on; ``needed`` is 1 for the heads that are known to be needed."""

    model: nn.Module
    score: list[Batch]
    measure: list[Batch]
    needed: Tensor | None = None


# -- the measure -------------------------------------------------------------------------------


def areas(counts: Sequence[int], losses: Sequence[float]) -> tuple[float, float]:
    """(CPR, CMD) of the mean losses with ``counts`` heads, which start with 0 and end with all."""
    loss, share = (torch.tensor(each, dtype=torch.float64) for each in (losses, counts))
    faithful = (loss[0] - loss) / (loss[0] - loss[-1])
    return tuple(torch.trapezoid(y, share / share[-1]).item() for y in (faithful, (1 - faithful).abs()))  # type: ignore[return-value]


def mean_fill(model: nn.Module, layers: Sequence[hp.AttentionLayer], batches: Sequence[Batch]) -> dict[str, Fill]:
    """What `mean-ablation` puts in a head's place: the mean of its output over all real tokens, by layer."""
    rows: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
    for batch in batches:
        real_tokens = batch.get("attention_mask")

        def note(name: str, hidden: Tensor, real_tokens: Tensor | None = real_tokens) -> None:
            rows[name].append((hidden.flatten(0, 1) if real_tokens is None else hidden[real_tokens.bool()]).double())

        removers = [hook_heads(model, layer, layer.mask_point.module, partial(note, layer.name)) for layer in layers]  # type: ignore[union-attr]
        with torch.no_grad():
            call(model, {k: v for k, v in batch.items() if k != "labels"})
        for remove in removers:
            remove()
    means = {name: torch.cat(each).mean(0) for name, each in rows.items()}
    return {
        name: partial(lambda mean, hidden, _: mean.to(hidden).expand_as(hidden), mean) for name, mean in means.items()
    }


def loss_with(
    model: nn.Module, layers: Sequence[hp.AttentionLayer], heads: Sequence[int], batches: Sequence[Batch], fill: Mapping[str, Fill]
) -> float:  # fmt: skip
    """The mean loss with only these heads (numbers in the order of `HeadScores.flat`)."""
    flat = torch.zeros(sum(layer.num_heads for layer in layers)).index_fill(
        0, torch.tensor(heads, dtype=torch.long), 1.0
    )
    gates = dict(zip((x.name for x in layers), flat.split([x.num_heads for x in layers]), strict=True))
    with gated(model, layers, gates, fill):
        return hp.evaluate(model, batches).metrics["loss"]


# -- models ------------------------------------------------------------------------------------


def of_parts(name: str, draws: int, score: int, measure: int, minilm: Path | None) -> list[Draw]:
    loaded, parts = real.load(name, minilm, batch_size=64 if name == "digits" else 16)
    return [
        Draw(loaded.model, real.drawn(parts.score, i, score), real.drawn(parts.report, i, measure))
        for i in range(draws)
    ]


def smollm(minilm: Path | None) -> list[Draw]:
    model, tokenizer = smollm2.load()
    parts = [{"input_ids": w, "labels": w} for w in smollm2.text(tokenizer, 12, smollm2.LENGTH).split(2)]
    return [Draw(model, parts[i : i + 2], parts[i + 2 : i + 3]) for i in (0, 3)]


def repeated(count: int, seed: int) -> Batch:
    """Random tokens, repeated after a period that differs between examples; what cannot be known has no label."""
    random = torch.Generator().manual_seed(seed)
    periods = torch.randint(PERIODS[0], PERIODS[1] + 1, (count,), generator=random).tolist()
    ids = torch.stack([torch.randperm(TOKENS, generator=random)[:p].repeat(LENGTH // p + 1)[:LENGTH] for p in periods])
    known = torch.arange(LENGTH) > torch.tensor(periods)[:, None]
    return {"input_ids": ids, "labels": ids.where(known, -100)}


def trained(seed: int) -> nn.Module:
    """A two-layer attention-only transformer (GPT-2's, with MLPs that give 0) that does induction."""
    torch.manual_seed(seed)
    size = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_inner": 1, "vocab_size": TOKENS, "n_positions": LENGTH}
    config = transformers.GPT2Config(**size, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=False)
    model = transformers.GPT2LMHeadModel(config)
    for weight in (weight for block in model.transformer.h for weight in block.mlp.parameters()):
        weight.requires_grad_(False).zero_()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.5, betas=(0.9, 0.98))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 50, 2 * (1 - step / STEPS))
        optimizer.zero_grad()
        model(**repeated(64, (seed + 1) * 10**6 + step)).loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return model.eval()


def induction(minilm: Path | None) -> list[Draw]:
    """Some trained models. Which heads are needed, their attention tells: the previous-token heads below, the induction heads above.

    Raises:
        SystemExit: Without the other heads, a model does not do induction; or it does without one of the two kinds.
    """
    draws = []
    for seed in range(MODELS):
        model, batch = trained(seed), repeated(64, seed)
        layers = layers_of(model, batch)
        below, above = hp.attention_weights(model, {"input_ids": batch["input_ids"]}, layers).values()
        periods = [int((row == -100).sum()) - 1 for row in batch["labels"]]
        # Of the tokens before the repetition, with which later ones are compared; and of the tokens whose next one is known.
        previous = [w[:, :p, :p].diagonal(-1, 1, 2).mean(-1) for w, p in zip(below, periods, strict=True)]
        follows = [w.diagonal(1 - p, 1, 2)[:, 1:].mean(-1) for w, p in zip(above, periods, strict=True)]
        needed = torch.cat([torch.stack(each).mean(0) > NEEDED for each in (previous, follows)])
        only, *others = [
            loss_with(model, layers, kept.nonzero()[:, 0].tolist(), [batch], {})
            for kept in (needed, torch.arange(2 * HEADS) >= HEADS, torch.arange(2 * HEADS) < HEADS)
        ]
        say(f"induction {seed}: needed {needed.int().tolist()}, loss {only:.3g}, without a kind {others}")
        if only > 0.1 or min(others) < math.log(TOKENS) / 2 or needed.all():
            raise SystemExit("these are not the needed heads")
        draws.append(Draw(model, [batch], [repeated(64, 100 + seed)], needed.int()))
    return draws


CASES: dict[str, tuple[str, int, Callable[[Path | None], list[Draw]]]] = {
    "induction": (
        f"Induction: {MODELS} two-layer attention-only models, trained on random tokens that repeat after {PERIODS[0]} to {PERIODS[1]}; "
        "64 sequences to score on, 64 others measured", 16, induction,
    ),
    "digits": ("ViT on digits (the demo's): Five draws of 192 images to score on, and of 100 others measured", 12,
               partial(of_parts, "digits", 5, 192, 100)),
    "minilm": ("minilm-rt (BERT on Rotten Tomatoes): Three draws of 64 sentences to score on, and of 64 others measured", 6,
               partial(of_parts, "minilm", 3, 64, 64)),
    "smollm2": ("SmolLM2-135M-Instruct on IMDB's reviews: Two draws of 4 windows of 128 tokens to score on, and of 2 others measured", 6,
                smollm),
}  # fmt: skip


# -- measuring, and the document ---------------------------------------------------------------


def measure(key: str, options: argparse.Namespace, cache: Cache) -> list[dict[str, Any]]:
    """Every wanted row of one case, made where the file lacks it: a method on a draw."""
    _, points, load = CASES[key]
    names = options.methods or [name for name in METHODS if name not in EXCLUDED.get(key, ())]
    known: dict[tuple[int, str, frozenset[int]], float] = {}
    draws = load(options.minilm)
    layers = layers_of(draws[0].model, draws[0].score[0])
    heads = sum(layer.num_heads for layer in layers)
    counts = sorted({round(i * heads / points) for i in range(points + 1)})
    means = [mean_fill(draw.model, layers, draw.score) for draw in draws]
    for name in names:
        for i, draw in enumerate(draws):
            if cache.find(case=key, method=name, draw=i):
                continue
            scores = hp.score(draw.model, draw.score, name, layers=layers, seed=i, settings=Settings(permutations=16))
            row: dict[str, Any] = {
                "case": key,
                "method": name,
                "draw": i,
                "heads": heads,
                "counts": counts,
                "auroc": [],
            }
            order = scores.flat().argsort(descending=True, stable=True).tolist()
            for kind, fill in (("zero", {}), ("mean", means[i])):
                for count in counts:
                    each = (i, kind, frozenset(order[:count]))
                    if each not in known:
                        known[each] = loss_with(draw.model, layers, order[:count], draw.measure, fill)
                row[kind] = [known[i, kind, frozenset(order[:count])] for count in counts]
            if draw.needed is not None:
                parts = (slice(None), slice(layers[0].num_heads))
                row["auroc"] = [float(roc_auc_score(draw.needed[part], scores.flat()[part])) for part in parts]
            cache.add(row)
            say(f"{key}, draw {i + 1}, {name}: {[round(x, 3) for x in (*areas(counts, row['zero']), *row['auroc'])]}")
    return [row for row in cache.rows if row["case"] == key]


def cell(values: Sequence[float]) -> str:
    """The mean over draws, with half of its 95 % interval (Student's t)."""
    n = len(values)
    half = student.ppf(0.975, n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return f"{number(statistics.fmean(values), '.2f')} ± {number(half, '.2f')}"


def section(key: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One case's table: the best CPR with zero ablation first."""
    lines, fewer = [], []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        fewer += [f"`{method}` ({len(mine)})"] if len(mine) <= max(row["draw"] for row in rows) else []
        values = [[*areas(r["counts"], r["zero"]), *areas(r["counts"], r["mean"]), *r["auroc"]] for r in mine]
        columns = list(zip(*values, strict=True))
        lines.append((-statistics.fmean(columns[0]), [f"`{method}`", *map(cell, columns)]))
    head = ["method", *(f"{area}, {kind}" for kind in ("zero", "mean") for area in ("CPR", "CMD"))]
    head += ["AUROC", "AUROC, first layer"] if rows[0]["auroc"] else []
    ends = [f"{statistics.fmean(r[k][e] for r in rows):.3g}" for k, e in (("zero", -1), ("zero", 0), ("mean", 0))]
    counts = ", ".join(map(str, rows[0]["counts"]))
    told = f"{CASES[key][0]}. Heads kept: {counts}. Mean loss with all heads {ends[0]}; with none {ends[1]} (zero) and {ends[2]} (mean)."
    told += f" Fewer draws: {', '.join(fewer)}." if fewer else ""
    return ["", f"### {told.partition(':')[0]}", "", told.partition(": ")[2], "",
            *table(head, [line for _, line in sorted(lines)])]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="these cases")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="these methods, expensive ones too")
    parser.add_argument("--minilm", type=Path, help="where minilm-rt is")
    parser.add_argument("--json", type=Path, help="where measurements are kept, one a line")
    parser.add_argument("--cached", action="store_true", help="measure nothing; write what is in the --json file")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    cache, lines = Cache(options.json), []
    for key in options.only or CASES:
        try:
            rows = [r for r in cache.rows if r["case"] == key] if options.cached else measure(key, options, cache)
            lines += section(key, rows) if rows else ["", f"### {key}", "", "Not measured."]
        except (real.LeftOutError, ModuleNotFoundError) as error:
            lines += ["", f"### {key}", "", f"Left out: {error}."]
    text = "\n".join([*lines, "", real.about("faithfulness.py")])
    print(text)
    if not options.only and not options.methods:
        replace_section(real.ROOT / "docs" / "benchmarks.md", "faithfulness", text)


if __name__ == "__main__":
    main()
