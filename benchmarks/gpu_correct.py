"""Whether headprune is right on a GPU, and how fast it scores there: parts that resume, at most 20 minutes on one GPU in all.

    python3 benchmarks/gpu_correct.py --work .gpu/correct --pack $OUT/gpu_correct.json      # on the GPU, twice if ten minutes are the limit
    python benchmarks/gpu_correct.py --work .gpu/correct --document                         # the section of docs/gpu.md, from what came back
    python benchmarks/gpu_correct.py --work /tmp/try --device cpu --small                   # to try the script

Needs no network: weights are random, but for minilm-rt where ``--minilm`` names its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from ablation import plain_loop, replay
from gpu_parts import ROOT, Found, Part, parser, run, synchronize, table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import headprune as hp
from headprune import memory
from headprune.losses import ExampleLoss
from headprune.running import evaluating, exact_attention
from headprune.scoring import Settings
from headprune.scoring.base import Problem
from headprune.scoring.gradient import gate_gradients
from headprune.scoring.replay import Recording, Replay

warnings.filterwarnings("ignore")
TYPES = {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the largest value. What the CPU is off by in the same type, three times over, is allowed as well.
ALLOWED = {"float32": 1e-3, "TF32": 1e-3, "bfloat16": 0.05, "float16": 0.01}
METHODS = ("gradient", "ablation", "mean-ablation", "entropy", "output-norm")
FAMILIES = ("bert", "gpt2", "llama", "t5", "vit")


# -- models and data -------------------------------------------------------------------------------


def small_models() -> dict[str, tuple[nn.Module, list[Any]]]:
    """Tiny models of several families with labelled batches, on the CPU in float32; their weights are large enough to matter."""
    from tests.support import zoo

    made = {}
    for name in FAMILIES:
        model, _ = zoo.ZOO[name]()
        batches = []
        for i in range(4):
            pixels = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(i))
            given = {"pixel_values": pixels} if name == "vit" else zoo.text(8, 12, seed=i)
            batches.append(zoo.labelled(model, given, seed=i))
        made[name] = model, batches
    return made


def base(
    small: bool, device: str, dtype: torch.dtype = torch.float32, width: int = 768, attention: str = "sdpa"
) -> nn.Module:
    """A BERT of 12 layers of 12 heads, random weights; a smaller one to try the script."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    large = {"hidden_size": width, "intermediate_size": 4 * width}
    config = tf.BertConfig(**(sizes if small else large), vocab_size=1000, attn_implementation=attention)
    return tf.BertForSequenceClassification(config).eval().to(device, dtype)


def texts(rows: int, tokens: int, batches: int, device: str) -> list[dict[str, Tensor]]:
    """Labelled batches; every second text of a batch is padded by a quarter."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(batches):
        mask = torch.ones(rows, tokens, dtype=torch.long)
        mask[1::2, tokens - tokens // 4 :] = 0
        ids = torch.randint(5, 1000, (rows, tokens), generator=generator)
        labels = torch.randint(0, 2, (rows,), generator=generator)
        found.append({k: v.to(device) for k, v in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))})
    return found


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in batch.items() if k != "labels"}


def cast(batches: list[Any], dtype: torch.dtype) -> list[Any]:
    return [{k: v.to(dtype) if v.is_floating_point() else v for k, v in b.items()} for b in batches]


def off(found: Tensor, true: Tensor) -> float:
    """Largest difference, as a share of the largest true value."""
    return float((found.double().cpu() - true.double().cpu()).abs().max() / true.double().abs().max().clamp(min=1e-30))


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """The user's own setting, which headprune turns off where it compares and fits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# -- the same as on the CPU ------------------------------------------------------------------------


def alike(kind: str) -> Callable[[argparse.Namespace], Found]:
    """Scores, plans, repair, prune, save and load on the device, against float64 and the same type on the CPU."""

    def measured(options: argparse.Namespace) -> Found:
        rows = []
        for name, (model, batches) in small_models().items():
            if options.small and name not in ("bert", "llama"):
                continue
            with tf32(kind == "TF32"):
                rows += _alike(name, model, batches, kind, options.device)
        bad = [r for r in rows if not r["good"]]
        return {"kind": kind, "rows": rows, "bad": len(bad)}

    return measured


def _alike(name: str, model: nn.Module, batches: list[Any], kind: str, device: str) -> list[Found]:
    dtype, allowed = TYPES[kind], ALLOWED[kind]
    here = copy.deepcopy(model).to(dtype)
    there, exact_one = copy.deepcopy(here).to(device), copy.deepcopy(here).double()
    given = cast(batches, dtype)
    layers = hp.find_attention(here, inputs_of(given[0]))
    if hp.find_attention(there, inputs_of(given[0])) != layers:
        return [{"family": name, "what": "trace", "good": False, "device": "other layers", "cpu": ""}]
    rows = []
    for method in METHODS:
        true = hp.score(exact_one, cast(batches, torch.float64), method, layers=layers).flat()
        mine, other = (hp.score(m, given, method, layers=layers).flat() for m in (here, there))
        rows.append(_row(name, method, off(other, true), off(mine, true), allowed))
    # One plan for both: a search may rank two heads that hardly differ the other way round.
    plans = [
        hp.search(m, given[:2], keep="50%", choose=given[2:3], strategy="compensated", layers=layers)[0]
        for m in (here, there)
    ]
    gone = [{(k, h) for k, heads in p.drop.items() for h in heads} for p in plans]
    shared = len(gone[0] & gone[1]) / max(len(gone[0]), 1)
    rows.append(
        {
            "family": name,
            "what": "search: removed heads in common",
            "device": f"{shared:.0%}",
            "cpu": "",
            "good": shared >= 0.5,
        }
    )
    drop = plans[0].drop
    truth, mine, other = (copy.deepcopy(m) for m in (exact_one, here, there))
    for each, data in ((truth, cast(batches, torch.float64)), (mine, given), (other, given)):
        hp.repair(each, dict(drop), data[:3], layers=layers, answers=False, ridge=0.1)
    weights = {n: p for n, p in truth.named_parameters() if p.ndim > 1}
    worst = [max(off(dict(m.named_parameters())[n], p) for n, p in weights.items()) for m in (other, mine)]
    rows.append(_row(name, "repair: weights", *worst, 10 * allowed))
    proof = hp.prune(other, dict(drop), inputs_of(given[0]), layers=layers)
    rows.append(
        {
            "family": name,
            "what": "prune: proof",
            "device": f"{proof.difference:.1e}",
            "cpu": f"at most {proof.tolerance:.0e}",
            "good": True,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        hp.save(other, Path(folder) / "x")
        back, near = hp.load(Path(folder) / "x"), hp.load(Path(folder) / "x", device=device)
        same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(other.parameters(), near.parameters(), strict=True))
        losses = [hp.evaluate(m, given).metrics["loss"] for m in (other, back)]
    difference = abs(losses[0] - losses[1]) / max(abs(losses[1]), 1e-30)
    rows.append(
        {
            "family": name,
            "what": "save, load on the CPU: loss",
            "device": f"{difference:.1e}",
            "cpu": "",
            "good": same and difference < allowed,
        }
    )
    optimiser = torch.optim.SGD(other.train().parameters(), lr=0.01)
    loss = other(**{k: v.to(device) for k, v in given[0].items()}).loss
    loss.backward()
    optimiser.step()
    rows.append(
        {
            "family": name,
            "what": "a training step of the pruned model",
            "device": f"loss {float(loss):.3f}",
            "cpu": "",
            "good": bool(loss.isfinite()),
        }
    )
    return rows


def _row(family: str, what: str, device: float, cpu: float, allowed: float) -> Found:
    return {
        "family": family,
        "what": what,
        "device": f"{device:.1e}",
        "cpu": f"{cpu:.1e}",
        "good": device <= max(allowed, 3 * cpu),
    }


def alike_told(found: Found) -> list[str]:
    rows = [
        [f"{r['family']}: {r['what']}", r["device"], r["cpu"], "yes" if r["good"] else "**NO**"] for r in found["rows"]
    ]
    return [
        f"{found['kind']}: the largest difference from float64 on the CPU, as a share of the largest value; beside it what the same type is off by on the CPU.",
        "",
        *table(["", "on the device", "on the CPU", "within tolerance"], rows),
    ]


# -- many model types ------------------------------------------------------------------------------


def coverage(options: argparse.Namespace) -> Found:
    """Masked and pruned on the device, against the CPU; the proof runs on the device."""
    import coverage_types as rows_of
    import tiny

    types = tiny.model_types()
    step = max(1, len(types) // (4 if options.small else 80))
    rows, start = [], time.monotonic()
    for name in types[::step]:
        if time.monotonic() - start > 240:
            break
        row: Found = {"type": name, "status": "not built", "why": ""}
        try:
            with rows_of.limited(30):
                with (
                    open(os.devnull, "w") as nowhere,
                    contextlib.redirect_stdout(nowhere),
                    contextlib.redirect_stderr(nowhere),
                ):
                    model, _, example = tiny.build(name)
                    rows_of.randomise(model, example)
                row.update(_covered(model, example, options.device))
        except rows_of.TookTooLongError as error:
            row.update(status="too slow", why=str(error))
        except hp.HeadPruneError as error:
            row.update(status="refused", why=str(error.args[0])[:200])
        except Exception as error:
            row.update(
                status="CRASH" if row["status"] != "not built" else "not built",
                why=f"{type(error).__name__}: {error}"[:200],
            )
        rows.append(row)
        print(row, flush=True)
    return {"rows": rows, "of": len(types)}


def _covered(model: nn.Module, example: dict[str, Tensor], device: str) -> Found:
    from headprune.surgery import answers

    def answered(m: nn.Module, where: str) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.no_grad():
            return [t.cpu() for t in answers(m(**{k: v.to(where) for k, v in example.items()}))]

    def apart(a: list[Tensor], b: list[Tensor]) -> float:
        return max((off(x, y) for x, y in zip(a, b, strict=True) if y.numel()), default=0.0)

    there = copy.deepcopy(model).to(device)
    layers, others = hp.find_attention(model, example), hp.find_attention(there, example)
    if layers != others:
        return {"status": "CRASH", "why": "other layers are found on the device"}
    maskable = [a for a in layers if a.maskable]
    dense = apart(answered(there, device), answered(model, "cpu"))
    if dense > 1e-2:  # it draws random numbers, or is chaotic: nothing can be compared
        return {"status": "not comparable", "why": f"the dense model itself is off by {dense:.1e}"}
    drop = {a.name: [0] for a in maskable}
    with hp.mask(model, drop, layers=layers), hp.mask(there, drop, layers=layers):
        masked = apart(answered(there, device), answered(model, "cpu"))
    able = {a.name: list(a.units[0]) for a in maskable if a.prunable and len(a.units) > 1}
    if able:
        hp.prune(there, able, example, layers=layers)
        hp.prune(model, able, example, layers=layers)
    pruned = apart(answered(there, device), answered(model, "cpu"))
    good = max(masked, pruned) <= max(1e-3, 10 * dense)
    return {
        "status": "as on the CPU" if good else "WRONG",
        "dense": dense,
        "masked": masked,
        "pruned": pruned,
        "layers": len(layers),
        "cut": len(able),
    }


def coverage_told(found: Found) -> list[str]:
    counts: dict[str, int] = {}
    for row in found["rows"]:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    compared = [r for r in found["rows"] if r["status"] == "as on the CPU"]
    lines = [
        f"{len(found['rows'])} of {found['of']} model types, evenly spread, tiny: {', '.join(f'{n} {s}' for s, n in counts.items())}. One head of every "
        f"layer masked, then one group of every layer pruned (with the proof on the device), and the answers compared with the CPU's: "
        f"at most {max((max(r['masked'], r['pruned']) for r in compared), default=0):.0e} of the largest value apart.",
    ]
    bad = [r for r in found["rows"] if r["status"] in ("WRONG", "CRASH")]
    return [*lines, *(["", *(f"- **{r['type']}: {r['status']}**, {r['why']}" for r in bad)] if bad else [])]


# -- attention kernels -----------------------------------------------------------------------------


def kernels(options: argparse.Namespace) -> Found:
    """The same scores and proofs by every kernel of scaled_dot_product_attention, and by eager attention."""
    rows = []
    padded = texts(8, 32, 2, options.device)
    # Flash attention takes no mask: unpadded texts.
    whole = [{k: v for k, v in b.items() if k != "attention_mask"} for b in padded]
    true_model = large_weights(base(options.small, options.device, attention="eager"))
    layers = hp.find_attention(true_model, inputs_of(padded[0]))

    def scores(model: nn.Module, batches: list[Any]) -> dict[str, Tensor]:
        return {m: hp.score(model, batches, m, layers=layers).flat() for m in ("gradient", "ablation")}

    true = {"padded": scores(true_model, padded), "whole": scores(true_model, whole)}
    for kind in ("float32", "bfloat16"):
        eager = large_weights(base(options.small, options.device, attention="eager")).to(TYPES[kind])
        model = large_weights(base(options.small, options.device)).to(TYPES[kind])
        worst = 0.0
        for kernel in ("eager", "MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
            form, data = ("whole", whole) if kernel == "FLASH_ATTENTION" else ("padded", padded)
            try:
                with contextlib.nullcontext() if kernel == "eager" else sdpa_kernel([getattr(SDPBackend, kernel)]):
                    found = scores(eager if kernel == "eager" else model, data)
                    proof = hp.prune(
                        copy.deepcopy(model), {a.name: [0] for a in layers}, inputs_of(data[0]), layers=layers
                    )
            except (RuntimeError, hp.HeadPruneError) as error:
                rows.append({"kind": kind, "kernel": kernel, "refused": str(error).splitlines()[0][:120]})
                continue
            apart = {m: off(found[m], t) for m, t in true[form].items()}
            worst = max(apart.values()) if kernel == "eager" else worst
            rows.append(
                {
                    "kind": kind,
                    "kernel": kernel,
                    **apart,
                    "proof": proof.difference,
                    "good": max(apart.values()) <= max(ALLOWED[kind], 3 * worst),
                }
            )
    return {"rows": rows}


def large_weights(model: nn.Module) -> nn.Module:
    """Weights as large as trained ones: with those of a new model no head matters more than rounding."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape).to(p.device) * 1.2 / p.shape[-1] ** 0.5)
    return model


def kernels_told(found: Found) -> list[str]:
    rows = [
        [
            f"{r['kind']}, {r['kernel']}",
            *(
                (r["refused"], "", "", "")
                if "refused" in r
                else (
                    f"{r['gradient']:.1e}",
                    f"{r['ablation']:.1e}",
                    f"{r['proof']:.1e}",
                    "yes" if r["good"] else "**NO**",
                )
            ),
        ]
        for r in found["rows"]
    ]
    return [
        "Scores by each kernel against eager attention in float32, as a share of the largest; and the proof of a prune by that kernel.",
        "",
        *table(["", "gradient", "ablation", "proof", "within tolerance"], rows),
    ]


# -- memory ----------------------------------------------------------------------------------------


def out_of_memory(options: argparse.Namespace) -> Found:
    """Ablation with less memory than its stacks take: they are halved, and the scores stay."""
    device = options.device
    model = base(options.small, device)
    batches = texts(8, 32 if options.small else 512, 2, device)
    layers = hp.find_attention(model, inputs_of(batches[0]))
    much = Settings(max_memory=1 << 40)  # stacks as large as all heads of a layer
    true = hp.score(model, batches, "ablation", layers=layers, settings=much).flat()
    seen: list[str] = []
    known = memory.is_out_of_memory

    def noted(error: BaseException) -> bool:
        found = known(error)
        if found:
            seen.append(type(error).__name__)
        return found

    memory.is_out_of_memory = noted
    try:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            kept = torch.cuda.memory_allocated()
            hp.score(model, batches[:1], "ablation", layers=layers, settings=much)
            peak = torch.cuda.max_memory_allocated()
            limit = kept + (peak - kept) // 2
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
            found = hp.score(model, batches, "ablation", layers=layers, settings=much).flat()
        else:
            limit, stacked = 0, Recording._stacked

            def short(self: Recording, gates: Any, first: str) -> Tensor:
                if len(next(iter(gates.values()))) > 2:
                    raise torch.OutOfMemoryError("pretended")
                return stacked(self, gates, first)

            Recording._stacked = short
            try:
                found = hp.score(model, batches, "ablation", layers=layers, settings=much).flat()
            finally:
                Recording._stacked = stacked
    finally:
        memory.is_out_of_memory = known
        if device.startswith("cuda"):
            torch.cuda.set_per_process_memory_fraction(1.0)
    return {"limit": limit, "errors": len(seen), "kinds": sorted(set(seen)), "off": off(found, true)}


def out_of_memory_told(found: Found) -> list[str]:
    return [
        f"Ablation scores of a BERT-base with room for half of what they take ({found['limit'] / 2**30:.1f} GiB): memory ran out {found['errors']} times "
        f"({', '.join(found['kinds'])}), stacks were halved, and the scores differ by {found['off']:.1e} of the largest."
    ]


# -- how fast --------------------------------------------------------------------------------------


def problem_of(model: nn.Module, batches: list[Any]) -> Problem:
    losses = ExampleLoss(model)
    kept = losses.prepare(batches)
    layers = hp.find_attention(model, inputs_of(kept[0]))
    return Problem(
        model, layers, [(b, losses.rows.size(b)) for b in kept], losses, 0, lambda *_: None, rows=losses.rows
    )


def in_turn(device: str, rounds: int, *runs: Callable[[], object]) -> list[list[float]]:
    """Seconds of each, taken in turn, after one round to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for own, each in zip(times, runs, strict=True):
            synchronize(device)
            start = time.perf_counter()
            each()
            synchronize(device)
            if number:
                own.append(time.perf_counter() - start)
    return times


def speed(options: argparse.Namespace) -> Found:
    """Replayed ablation against a plain loop; a gradient pass against a forward pass; few examples against all."""
    rows = []
    shapes = [(4, 16, 2)] if options.small else [(8, 128, 4), (4, 64, 6), (1, 512, 4)]
    for width in (384, 768):
        for size, tokens, count in shapes:
            model = base(options.small, options.device, width=width)
            batches = texts(size, tokens, count, options.device)
            with evaluating(model), exact_attention(model):
                problem = problem_of(model, batches)
                plain, fast = partial(plain_loop, problem), partial(replay, problem)

                def forward(problem: Problem = problem) -> None:
                    with torch.no_grad():
                        for batch, _ in problem.batches:
                            problem.losses(batch).cpu()

                difference = off(fast(), plain())
                slow, quick = in_turn(options.device, 1 if options.small else 2, plain, fast)
                rounds = 2 if options.small else 10
                once, slopes = in_turn(options.device, rounds, forward, lambda p=problem: gate_gradients(p))
                notes = Replay(problem).notes
            many = texts(8, tokens, 4 if options.small else 32, options.device)
            wanted = Settings(examples=max(2, round(0.08 * 8 * len(many))))
            layers = problem.layers
            all_of, few = in_turn(
                options.device, 1,
                lambda m=model, b=many, a=layers: hp.score(m, b, "ablation", layers=a),
                lambda m=model, b=many, a=layers, w=wanted: hp.score(m, b, "ablation", layers=a, settings=w),
            )  # fmt: skip
            rows.append({
                "width": width, "batch": size, "tokens": tokens, "plain": statistics.median(slow), "replayed": statistics.median(quick),
                "off": difference, "forward": statistics.median(once), "gradient": statistics.median(slopes), "few": few[0] / all_of[0], "notes": notes,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return {"rows": rows}


def speed_told(found: Found) -> list[str]:
    rows = [
        [
            f"12 x 12 heads, width {r['width']}, batches of {r['batch']} x {r['tokens']}", f"{r['plain']:.2f} s", f"{r['replayed']:.2f} s",
            f"{r['replayed'] / r['plain']:.2f}", f"{r['off']:.0e}", f"{r['gradient'] / r['forward']:.2f}", f"{r['few']:.2f}",
        ]
        for r in found["rows"]
    ]  # fmt: skip
    notes = sorted({note for r in found["rows"] for note in r["notes"]})
    heads = [
        "",
        "plain loop",
        "replayed",
        "replayed ÷ plain",
        "difference",
        "gradient ÷ forward pass",
        "few examples ÷ all",
    ]
    return [
        "Goals: replayed at most 0.25 of the plain loop, a gradient pass at most 2.1 forward passes, ablation of few examples (8 %) at most 0.2 of all.", "",
        *table(heads, rows), "", *(f"- {note}" for note in notes),
    ]  # fmt: skip


# -- how busy --------------------------------------------------------------------------------------


def idle(options: argparse.Namespace) -> Found:
    """The share of scoring, search and repair in which no kernel runs."""
    from torch.profiler import ProfilerActivity, profile

    cuda = options.device.startswith("cuda")
    model = base(options.small, options.device)
    batches = texts(4, 16, 3, options.device) if options.small else texts(32, 128, 8, options.device)
    layers = hp.find_attention(model, inputs_of(batches[0]))
    drop = {a.name: list(range(a.num_heads // 2)) for a in layers}
    works: dict[str, Callable[[], object]] = {
        "gradient": lambda: hp.score(model, batches, "gradient", layers=layers),
        "ablation": lambda: hp.score(model, batches, "ablation", layers=layers),
        "entropy": lambda: hp.score(model, batches, "entropy", layers=layers),
        "search": lambda: hp.search(
            model, batches, keep="50%", choose=batches[:1], strategy="compensated", layers=layers
        ),
        "repair": lambda: hp.repair(copy.deepcopy(model), drop, batches, layers=layers),
    }
    rows = []
    for name, work in works.items():
        work()
        synchronize(options.device)
        start = time.perf_counter()
        work()
        synchronize(options.device)
        wall = time.perf_counter() - start
        row: Found = {"work": name, "wall": wall, "busy": None, "kernels": 0}
        if cuda:
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                work()
                torch.cuda.synchronize()
            spans = sorted(
                (e.start_ns(), e.start_ns() + e.duration_ns())
                for e in found.profiler.kineto_results.events()
                if "CUDA" in str(e.device_type())
            )
            row.update(kernels=len(spans), busy=_union(spans) / 1e9)
        rows.append(row)
        print(row, flush=True)
    return {"rows": rows}


def _union(spans: list[tuple[int, int]]) -> int:
    """How long at least one of them lasts, of spans that are sorted."""
    total, end = 0, 0
    for first, last in spans:
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def idle_told(found: Found) -> list[str]:
    rows = [
        [
            r["work"],
            f"{r['wall']:.2f} s",
            f"{r['kernels']}",
            "not known" if r["busy"] is None else f"{max(0.0, 1 - r['busy'] / r['wall']):.0%}",
        ]
        for r in found["rows"]
    ]
    return [
        "A BERT-base, 8 batches of 32 x 128. Idle: the share of the time without the profiler in which no kernel or copy runs, by the kernels' times "
        "under it. The goal is at most 20 %.", "", *table(["", "time", "kernels and copies", "idle"], rows),
    ]  # fmt: skip


# -- the test-suite, and a real model --------------------------------------------------------------


def tests(options: argparse.Namespace) -> Found:
    """tests/test_otherdevice.py on the device itself."""
    wanted = ["-m", "not slow"] if options.small else ["-n", "6"]
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_otherdevice.py", *wanted]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if options.device.startswith("cuda"):
        env["HEADPRUNE_TEST_DEVICE"] = "cuda"
    done = subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True, timeout=330, check=False)
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[-60:]), flush=True)
    return {
        "code": done.returncode,
        "summary": lines[-1] if lines else done.stderr[-300:],
        "failed": [x for x in lines if x.startswith(("FAILED", "ERROR"))],
    }


def tests_told(found: Found) -> list[str]:
    failed = [f"- **{line}**" for line in found["failed"]]
    return [
        f"`HEADPRUNE_TEST_DEVICE=cuda python -m pytest tests/test_otherdevice.py`: {found['summary'].strip('= ')}.",
        *([""] if failed else []),
        *failed,
    ]


def minilm(options: argparse.Namespace) -> Found:
    """A real model: its scores and its repaired plans on the device, against the CPU."""
    if options.minilm is None:
        raise RuntimeError("--minilm names no folder")
    from headprune.app.data import DataOptions, load_parts
    from headprune.app.models import load_model

    found: dict[str, Any] = {}
    for where in ("cpu", options.device):
        loaded = load_model(
            str(options.minilm), device=where, dtype="float32"
        )  # on a GPU it would be float16, as stored
        parts = load_parts(DataOptions(str(options.minilm / "data"), limit=32 if options.small else 128), loaded)
        data = [list(part.batches()) for part in (parts.score, parts.choose, parts.report)]
        start = time.perf_counter()
        scores = hp.score(loaded.model, data[0], "gradient").flat()
        plans = hp.search(loaded.model, data[0], keep=[36, 18], choose=data[1], effort="low")
        rows = []
        for plan in plans:
            model = copy.deepcopy(loaded.model)
            hp.repair(model, plan, data[0])
            hp.prune(model, plan)
            rows.append(hp.evaluate(model, data[2]).metrics)
        found[where] = {
            "scores": scores,
            "drop": [p.drop for p in plans],
            "rows": rows,
            "seconds": time.perf_counter() - start,
        }
    here, there = found["cpu"], found[options.device]
    return {
        "scores": off(there["scores"], here["scores"]), "kept": [36, 18], "same plans": [a == b for a, b in zip(here["drop"], there["drop"], strict=True)],
        "cpu": here["rows"], "device": there["rows"], "took": {"cpu": here["seconds"], "device": there["seconds"]},
    }  # fmt: skip


def minilm_told(found: Found) -> list[str]:
    rows = [
        [
            f"{kept} of 72 heads",
            f"{a['accuracy']:.3f}, {a['loss']:.3f}",
            f"{b['accuracy']:.3f}, {b['loss']:.3f}",
            "yes" if same else "no",
        ]
        for kept, a, b, same in zip(found["kept"], found["cpu"], found["device"], found["same plans"], strict=True)
    ]
    took = found["took"]
    return [
        f"Gradient scores differ by {found['scores']:.1e} of the largest. Searched, repaired and pruned (`auto`, low effort, 128 sentences): {took['cpu']:.0f} s on the CPU, "
        f"{took['device']:.0f} s on the device.", "", *table(["", "CPU: accuracy, loss", "device: accuracy, loss", "same plan"], rows),
    ]  # fmt: skip


PARTS = [
    *(Part(f"alike-{kind}", f"The same as on the CPU: {kind}", alike(kind), alike_told, 60) for kind in TYPES),
    Part("tests", "Tests", tests, tests_told, 200),
    Part("coverage", "Model types", coverage, coverage_told, 250),
    Part("kernels", "Attention kernels", kernels, kernels_told, 40),
    Part("out-of-memory", "Out of memory", out_of_memory, out_of_memory_told, 30),
    Part("speed", "How fast it scores", speed, speed_told, 200),
    Part("idle", "How busy the GPU is", idle, idle_told, 90),
    Part("minilm", "minilm-rt", minilm, minilm_told, 150),
]

if __name__ == "__main__":
    run(PARTS, parser(__doc__ or "").parse_args(), "gpu-correct", "Correct, and scored fast")
