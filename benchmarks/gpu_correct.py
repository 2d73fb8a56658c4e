"""Whether headprune is right on a GPU, and how fast it scores there: parts that resume, at most 20 minutes on one GPU in all.

    python3 benchmarks/gpu_correct.py --work $OUT/gpu_correct.json               # on the GPU, twice if ten minutes are the limit
    python benchmarks/gpu_correct.py --work gpu_correct.json --document          # the section of docs/scale.md, from what came back
    python benchmarks/gpu_correct.py --work try.json --device cpu --small        # to try the script

Needs no network: weights are random, but for minilm-rt where ``--minilm`` names its folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from document import table
from gpu_parts import ROOT, TYPES, Options, Part, built, main, texts
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import headprune as hp
from headprune.inputs import unlabelled

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


def alike(kind: str, options: Options) -> list[str]:
    """Scores, plans, repair, prune, save and load on the device, against float64 and the same type on the CPU."""
    torch.set_float32_matmul_precision("high" if kind == "TF32" else "highest")
    families, found, rows = FAMILIES[: 2 if options.small else None], dict[str, list[Any]](), []
    for family in families:
        for what, *measured in compared(family, kind, options.device):
            found.setdefault(what, []).append((*measured, family))
    for what, each in found.items():
        most, beside, _, farthest = max(each, key=lambda row: row[0])
        rows.append([what, str(len(each)), f"{most:.1e}", beside, farthest, fine(all(row[2] for row in each))])
    about = f"Of {', '.join(families)}: the largest difference from float64 on the CPU, as a share of the largest value; beside it what the same type is off by on the CPU."
    if kind == "TF32":
        about += " TF32 is allowed, and headprune turns it off where answers are compared or fitted to: only the last row shows it."
    heads = ["", "models", "on the device, at most", "on the CPU", "of", "all within tolerance"]
    return [about, "", *table(heads, rows)]


def compared(family: str, kind: str, device: str) -> Iterator[tuple[str, float, str, bool]]:
    """Of every measure: how far off the device is, the same type on the CPU (or a tolerance), and whether that is fine."""
    from tests.support import zoo

    model, allowed, dtype = zoo.ZOO[family]()[0], ALLOWED[kind], TYPES[kind]
    truth, here, there = deepcopy(model).double(), deepcopy(model).to(dtype), deepcopy(model).to(device, dtype)

    def data(like: Any) -> list[dict[str, Tensor]]:
        made = []
        for seed in range(4):
            pixels = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).to(like.dtype)
            given = {"pixel_values": pixels} if family == "vit" else zoo.text(8, 12, seed=seed)
            made.append(zoo.labelled(model, given, seed=seed))
        return made

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
    how = {"keep": "50%", "strategy": "compensated", "layers": layers}
    drops = [dict(hp.search(m, data(m)[:2], choose=data(m)[2:3], **how)[0].drop) for m in (here, there)]
    gone = [{(name, head) for name, heads in drop.items() for head in heads} for drop in drops]
    others = len(gone[0] - gone[1]) / max(len(gone[0]), 1)
    yield "search: share of other heads removed", others, "", others <= (0 if kind == "float32" else 0.5)
    for each in (truth, here, there):
        hp.repair(each, drops[0], data(each)[:3], layers=layers, answers=False, ridge=0.1)
    before = {n: p.double() for n, p in model.named_parameters()}
    changed = {n: p for n, p in truth.named_parameters() if n not in before or not torch.equal(p, before[n])}
    if changed:  # else every step was left out
        each = (max(off(m.get_parameter(n), p) for n, p in changed.items()) for m in (there, here))
        yield row("repair: weights that changed", *each, 10 * allowed)
    proof = hp.prune(there, drops[0], example, layers=layers)
    yield "prune: proof", proof.difference, f"at most {proof.tolerance:.0e}", proof.difference <= proof.tolerance
    with tempfile.TemporaryDirectory() as folder:
        hp.save(there, f"{folder}/x")
        losses = [hp.evaluate(m, data(here)).metrics["loss"] for m in (there, hp.load(f"{folder}/x"))]
    apart = abs(losses[0] - losses[1]) / max(abs(losses[1]), 1e-30)
    yield "save, load on the CPU: loss", apart, "", apart < allowed


# -- tests, many model types, attention kernels ----------------------------------------------------


def tests(options: Options) -> list[str]:
    """tests/test_otherdevice.py on the device itself."""
    asked = f"{sys.executable} -m pytest -q -p no:cacheprovider tests/test_otherdevice.py -n {0 if options.small else 6}".split()
    asked += ["-k", "test_scores_equal_the_cpus"] if options.small else []
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    env |= {"HEADPRUNE_TEST_DEVICE": "cuda"} if options.device.startswith("cuda") else {}
    done = subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True, timeout=330, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    failed = [f"- **{line}**" for line in lines if line.startswith(("FAILED", "ERROR"))]
    told = f"`HEADPRUNE_TEST_DEVICE=cuda python -m pytest tests/test_otherdevice.py`: {lines[-1].strip('= ')}."
    return [told, "", *failed]


def coverage(options: Options) -> list[str]:
    """Masked and pruned on the device, against the CPU; the proof runs on the device."""
    from coverage_types import on_device

    return on_device(options.device, options.small)


def kernels(options: Options) -> list[str]:
    """The same scores and proofs by every kernel of scaled_dot_product_attention, and by eager attention."""
    # Flash attention takes no mask: texts without padding.
    data = {padded: texts(8, 32, 2, options.device, padded) for padded in (True, False)}
    examples = {padded: unlabelled(batches[0]) for padded, batches in data.items()}
    eager, rows = built("BERT-base", options, attention="eager"), []
    layers = hp.find_attention(eager, examples[True])
    drop = {a.name: [0] for a in layers}

    def scores(model: Any, padded: bool) -> list[Tensor]:
        return [hp.score(model, data[padded], method, layers=layers).flat() for method in ("gradient", "ablation")]

    true = {padded: scores(eager, padded) for padded in data}
    for kind in ("float32", "bfloat16"):
        models = {name: built("BERT-base", options, kind, name) for name in ("eager", "sdpa")}
        eagers = 0.0
        for kernel in ("eager", "MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
            padded, model = kernel != "FLASH_ATTENTION", models.get(kernel, models["sdpa"])
            try:
                with nullcontext() if kernel == "eager" else sdpa_kernel([getattr(SDPBackend, kernel)]):
                    apart = [off(a, b) for a, b in zip(scores(model, padded), true[padded], strict=True)]
                    proof = hp.prune(deepcopy(model), drop, examples[padded], layers=layers)
            except (RuntimeError, hp.HeadPruneError) as error:
                rows.append([f"{kind}, {kernel}", str(error).splitlines()[0][:120], "", "", ""])
                continue
            eagers = max(apart) if kernel == "eager" else eagers
            told = fine(max(apart) <= max(ALLOWED[kind], 3 * eagers))
            rows.append([f"{kind}, {kernel}", *(f"{each:.1e}" for each in (*apart, proof.difference)), told])
    about = "Scores by each kernel against eager attention in float32, as a share of the largest; and the proof of a prune by that kernel."
    return [about, "", *table(["", "gradient", "ablation", "proof", "within tolerance"], rows)]


# -- speed -----------------------------------------------------------------------


def speed(options: Options) -> list[str]:
    """Replayed ablation against a plain loop; few examples against all."""
    import ablation

    lines = ablation.replayed(options.device, small=options.small)
    if options.device.startswith("cuda"):
        lines += ["", copied(options)]
    if options.minilm:
        lines += ["", *ablation.few(options.minilm, options.device, 32 if options.small else 512)]
    return lines


def copied(options: Options) -> str:
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
