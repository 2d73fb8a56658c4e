"""Whether headprune is right on a GPU, and how fast it scores there: parts that resume, at most 20 minutes on one GPU in all.

    python3 benchmarks/gpu_correct.py --work $OUT/gpu_correct.json               # on the GPU, twice if ten minutes are the limit
    python benchmarks/gpu_correct.py --work gpu_correct.json --document          # the section of docs/scale.md, from what came back
    python benchmarks/gpu_correct.py --work try.json --device cpu --small        # to try the script

Needs no network: weights are random, but for minilm-rt where ``--minilm`` names its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_parts import ROOT, TYPES, Part, built, main, table, texts, unlabelled
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import headprune as hp

warnings.filterwarnings("ignore")
# Of the largest value. What the CPU is off by in the same type, three times over, is allowed as well.
ALLOWED = {"float32": 1e-4, "TF32": 1e-3, "bfloat16": 0.05, "float16": 0.01}
METHODS = ("gradient", "ablation", "mean-ablation", "entropy", "output-norm")
FAMILIES = ("bert", "llama", "gpt2", "t5", "vit", "distilbert", "qwen3")


def off(found: Tensor, true: Tensor) -> float:
    """Largest difference, as a share of the largest true value."""
    return float((found.double().cpu() - true.double().cpu()).abs().max() / true.double().abs().max().clamp(min=1e-30))


def fine(good: bool) -> str:
    return "yes" if good else "**NO**"


# -- the same as on the CPU ------------------------------------------------------------------------


def alike(kind: str, options: argparse.Namespace) -> list[str]:
    """Scores, plans, repair, prune, save and load on the device, against float64 and the same type on the CPU."""
    rows: list[Row] = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "TF32" else "highest")
    try:
        for family in FAMILIES[: 2 if options.small else None]:
            rows += [(family, *row) for row in compared(family, kind, options.device)]
    finally:
        torch.set_float32_matmul_precision(before)
    models = ", ".join(dict.fromkeys(row[0] for row in rows))
    allowed = " TF32 is allowed, and headprune turns it off where answers are compared or fitted to: only the last row shows it."
    return [f"Of {models}: {ABOUT}{allowed if kind == 'TF32' else ''}", "", *table(HEADS, worst(rows))]


Row = tuple[str, str, float, str, bool]  # model, measure, on the device, on the CPU, within tolerance
ABOUT = "the largest difference from float64 on the CPU, as a share of the largest value; beside it what the same type is off by on the CPU."
HEADS = ["", "models", "on the device, at most", "on the CPU", "of", "all within tolerance"]


def worst(rows: list[Row]) -> list[list[str]]:
    """Of every measure the model that is farthest off."""
    found = []
    for what in dict.fromkeys(row[1] for row in rows):
        each = [row for row in rows if row[1] == what]
        model, _, most, beside, _ = max(each, key=lambda row: row[2])
        found.append([what, str(len(each)), f"{most:.1e}", beside, model, fine(all(row[4] for row in each))])
    return found


def compared(family: str, kind: str, device: str) -> Iterator[tuple[str, float, str, bool]]:
    from tests.support import zoo

    model, allowed = zoo.ZOO[family]()[0], ALLOWED[kind]
    truth, here, there = (
        copy.deepcopy(model).to(*where) for where in ((torch.float64,), (TYPES[kind],), (device, TYPES[kind]))
    )

    def data(like: Any) -> list[dict[str, Tensor]]:
        pixels = [torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        given = [{"pixel_values": pixels[i]} if family == "vit" else zoo.text(8, 12, seed=i) for i in range(4)]
        made = [zoo.labelled(model, each, seed=i) for i, each in enumerate(given)]
        return [{k: v.to(like.dtype) if v.is_floating_point() else v for k, v in batch.items()} for batch in made]

    def row(what: str, there: float, here: float, most: float) -> tuple[str, float, str, bool]:
        return what, there, f"{here:.1e}", there <= max(most, 3 * here)

    example = unlabelled(data(here)[0])
    if family == "t5":
        example["decoder_input_ids"] = example["input_ids"][:, :5]
    layers = hp.find_attention(here, example)
    differs = hp.find_attention(there, example) != layers
    yield "trace: other layers", float(differs), "", not differs
    for method in METHODS:
        true, *found = (hp.score(m, data(m), method, layers=layers).flat() for m in (truth, there, here))
        yield row(method, *(off(each, true) for each in found), allowed)
    # One plan for all: a search may rank two heads that hardly differ the other way round.
    plans = [
        hp.search(m, data(m)[:2], keep="50%", choose=data(m)[2:3], strategy="compensated", layers=layers)[0]
        for m in (here, there)
    ]
    gone = [{(name, head) for name, heads in plan.drop.items() for head in heads} for plan in plans]
    others = len(gone[0] - gone[1]) / max(len(gone[0]), 1)
    yield "search: share of other heads removed", others, "", others <= (0 if kind == "float32" else 0.5)
    for each in (truth, here, there):
        hp.repair(each, dict(plans[0].drop), data(each)[:3], layers=layers, answers=False, ridge=0.1)
    before = {n: p.double() for n, p in model.named_parameters()}
    changed = {n: p for n, p in truth.named_parameters() if n not in before or not torch.equal(p, before[n])}
    if changed:  # else every step was left out
        each = (max(off(m.get_parameter(n), p) for n, p in changed.items()) for m in (there, here))
        yield row("repair: weights that changed", *each, 10 * allowed)
    proof = hp.prune(there, dict(plans[0].drop), example, layers=layers)
    yield "prune: proof", proof.difference, f"at most {proof.tolerance:.0e}", proof.difference <= proof.tolerance
    with tempfile.TemporaryDirectory() as folder:
        hp.save(there, Path(folder) / "x")
        losses = [hp.evaluate(m, data(here)).metrics["loss"] for m in (there, hp.load(Path(folder) / "x"))]
    apart = abs(losses[0] - losses[1]) / max(abs(losses[1]), 1e-30)
    yield "save, load on the CPU: loss", apart, "", apart < allowed


# -- tests, many model types, attention kernels ----------------------------------------------------


def tests(options: argparse.Namespace) -> list[str]:
    """tests/test_otherdevice.py on the device itself."""
    asked = f"{sys.executable} -m pytest -q -p no:cacheprovider tests/test_otherdevice.py -n {0 if options.small else 6}".split()
    asked += ["-k", "test_scores_equal_the_cpus"] if options.small else []
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if options.device.startswith("cuda"):
        env["HEADPRUNE_TEST_DEVICE"] = "cuda"
    done = subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True, timeout=330, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    failed = [f"- **{line}**" for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [
        f"`HEADPRUNE_TEST_DEVICE=cuda python -m pytest tests/test_otherdevice.py`: {lines[-1].strip('= ')}.",
        "",
        *failed,
    ]


def coverage(options: argparse.Namespace) -> list[str]:
    """Masked and pruned on the device, against the CPU; the proof runs on the device."""
    import tiny

    types, found, start = tiny.model_types(), dict[str, str](), time.monotonic()
    chosen = types[:: max(1, len(types) // (4 if options.small else 150))]
    with multiprocessing.get_context("spawn").Pool(2 if options.small else 6, torch.set_num_threads, (1,)) as pool:
        each = pool.imap_unordered(partial(of_type, device=options.device), chosen)
        while len(found) < len(chosen) and time.monotonic() - start < 200:
            name, told = each.next()
            found[name] = told
    bad = [f"- {name}: {what}" for name, what in found.items() if what.startswith("**") or what == ALONE]
    counts = ", ".join(f"{count} {what}" for what, count in Counter(found.values()).items())
    about = "One head of every layer masked, then one group of every layer pruned (with the proof on the device), and the answers compared with the CPU's"
    return [f"{len(found)} of {len(types)} model types, evenly spread, tiny: {counts}. {about}.", "", *bad]


ALONE = "not run there by transformers alone"


def of_type(name: str, device: str) -> tuple[str, str]:
    """A model type, and what became of it."""
    import tiny
    from coverage_types import TookTooLongError, limited, randomise

    found = "not built"
    try:
        with limited(40):
            model, _, example = tiny.build(name)
            randomise(model, example)
            found = "**CRASH**"
            found = on_both(model, example, device)
    except (TookTooLongError, hp.HeadPruneError) as error:
        found = "too slow" if isinstance(error, TookTooLongError) else "refused"
    except Exception as error:
        print(name, found, f"{type(error).__name__}: {error}"[:200], flush=True)
    return name, found


def on_both(model: Any, example: dict[str, Tensor], device: str) -> str:
    from headprune.surgery import answers

    there = copy.deepcopy(model).to(device)

    def apart() -> float:
        found = []
        for each in (there, model):
            torch.manual_seed(0)
            with torch.no_grad():
                found.append(answers(each(**{k: v.to(next(each.parameters()).device) for k, v in example.items()})))
        return max((off(a, b) for a, b in zip(*found, strict=True) if b.numel()), default=0.0)

    layers = hp.find_attention(model, example)
    try:
        dense = apart()
    except RuntimeError:  # it keeps tensors that .to() does not move
        return ALONE
    if hp.find_attention(there, example) != layers:
        return "**other layers are found on the device**"
    if dense > 1e-2:  # it draws random numbers, or is chaotic
        return "not comparable"
    drop = {a.name: [0] for a in layers if a.maskable}
    with hp.mask(model, drop, layers=layers), hp.mask(there, drop, layers=layers):
        masked = apart()
    able = {a.name: list(a.units[0]) for a in layers if a.maskable and a.prunable and len(a.units) > 1}
    for each in (there, model) if able else ():
        hp.prune(each, able, example, layers=layers)
    return "as on the CPU" if max(masked, apart()) <= max(1e-3, 10 * dense) else "**WRONG**"


def kernels(options: argparse.Namespace) -> list[str]:
    """The same scores and proofs by every kernel of scaled_dot_product_attention, and by eager attention."""
    # Flash attention takes no mask: texts without padding.
    data = {padded: texts(8, 32, 2, options.device, padded) for padded in (True, False)}
    eager = built("BERT-base", options, attention="eager")
    layers, rows = hp.find_attention(eager, unlabelled(data[True][0])), []

    def scores(model: Any, padded: bool) -> list[Tensor]:
        return [hp.score(model, data[padded], method, layers=layers).flat() for method in ("gradient", "ablation")]

    true = {padded: scores(eager, padded) for padded in data}
    for kind in ("float32", "bfloat16"):
        models = {name: built("BERT-base", options, kind, name) for name in ("eager", "sdpa")}
        worst = 0.0
        for kernel in ("eager", "MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
            padded, model = kernel != "FLASH_ATTENTION", models["eager" if kernel == "eager" else "sdpa"]
            try:
                with contextlib.nullcontext() if kernel == "eager" else sdpa_kernel([getattr(SDPBackend, kernel)]):
                    apart = [off(a, b) for a, b in zip(scores(model, padded), true[padded], strict=True)]
                    proof = hp.prune(
                        copy.deepcopy(model), {a.name: [0] for a in layers}, unlabelled(data[padded][0]), layers=layers
                    )
            except (RuntimeError, hp.HeadPruneError) as error:
                rows.append([f"{kind}, {kernel}", str(error).splitlines()[0][:120], "", "", ""])
                continue
            worst = max(apart) if kernel == "eager" else worst
            told = fine(max(apart) <= max(ALLOWED[kind], 3 * worst))
            rows.append([f"{kind}, {kernel}", *(f"{each:.1e}" for each in (*apart, proof.difference)), told])
    about = "Scores by each kernel against eager attention in float32, as a share of the largest; and the proof of a prune by that kernel."
    return [about, "", *table(["", "gradient", "ablation", "proof", "within tolerance"], rows)]


# -- speed -----------------------------------------------------------------------


def speed(options: argparse.Namespace) -> list[str]:
    """Replayed ablation against a plain loop; few examples against all."""
    import ablation

    lines = ablation.replayed(options.device, small=options.small)
    if options.device.startswith("cuda"):
        lines += ["", copied(options)]
    if options.minilm:
        count = 32 if options.small else 512
        lines += ["", *ablation.few(options.minilm, options.device, count, 0.08)]
    return lines


def copied(options: argparse.Namespace) -> str:
    """What goes from the device to the CPU while heads are scored, and the memory it takes."""
    model, data = built("BERT-base", options, "bfloat16"), texts(32, 128, 4, options.device)
    layers, told = hp.find_attention(model, unlabelled(data[0])), []
    for method in ("gradient", "ablation"):
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as result:
            hp.score(model, data, method, layers=layers)
        copies = sum(event.count for event in result.key_averages() if event.key.startswith("Memcpy DtoH"))
        more = (torch.cuda.max_memory_allocated() - held) / 2**20
        told.append(f"{method} {copies} copies, {more:,.0f} MiB at most beside the weights")
    about = "Copies from the GPU to the CPU, BERT-base in bfloat16, 4 batches of 32 x 128, 144 heads"
    return f"{about}: {'; '.join(told)}."


PARTS = {
    **{f"alike-{kind}": Part(f"The same as on the CPU: {kind}", partial(alike, kind), 60) for kind in TYPES},
    "tests": Part("Tests", tests, 200),
    "coverage": Part("Model types", coverage, 250),
    "kernels": Part("Attention kernels", kernels, 40),
    "speed": Part("How fast it scores", speed, 200),
}

if __name__ == "__main__":
    main(PARTS, __doc__ or "", "gpu-correct", "On a GPU: the same as on the CPU, and how fast it scores")
