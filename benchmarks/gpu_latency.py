"""The whole command on a GPU, and what pruning heads makes faster there: parts that resume, at most 25 minutes on one GPU in all.

    python3 benchmarks/gpu_latency.py --work .gpu/latency --pack $OUT/gpu_latency.json --minilm .gpu/minilm-rt    # on the GPU
    python benchmarks/gpu_latency.py --work .gpu/latency --document                                              # docs/gpu.md
    python benchmarks/gpu_latency.py --work /tmp/try --device cpu --small                                         # to try the script

Weights are random, but minilm-rt's. Times are by CUDA events, models in turn, each median of rounds; the dense model stands twice in every
turn, and by how much its two medians differ is said. Clocks and power are noted with every part.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from gpu_parts import ROOT, Found, Part, gpu_state, parser, run, synchronize, table
from torch import Tensor, nn

import headprune as hp
from headprune.latency import in_turn, speedup
from headprune.timing.decoding import generation

warnings.filterwarnings("ignore")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARES = (0.75, 0.5, 0.25, 0.0)  # of the heads, that stay
INNER = 5  # passes between two events: a pass of a millisecond is timed to better than 1 %


# -- models ----------------------------------------------------------------------------------------


def made(shape: str, small: bool, device: str, dtype: torch.dtype) -> nn.Module:
    """A model of a common shape with random weights, made on the device."""
    torch.manual_seed(0)
    little = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config: Any
    if shape == "BERT-base":
        sizes: dict[str, Any] = little if small else {}
        config, kind = tf.BertConfig(**sizes, max_position_embeddings=4096), tf.BertForSequenceClassification
    elif shape == "ViT-B":
        sizes = {**little, "image_size": 32, "patch_size": 8} if small else {}
        config, kind = tf.ViTConfig(**sizes), tf.ViTForImageClassification
    else:
        large = {
            "Llama-1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192},
            "Llama-8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
        }[shape]  # fmt: skip
        sizes = {**little, "num_key_value_heads": 2, "vocab_size": 1000} if small else {**large, "vocab_size": 128256}
        config, kind = tf.LlamaConfig(**sizes, max_position_embeddings=8192), tf.LlamaForCausalLM
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model: nn.Module = kind._from_config(config, attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(before)
    return model.eval().to(device, dtype)


def given(model: Any, batch: int, tokens: int, device: str) -> dict[str, Tensor]:
    """An input without padding, and so without a mask."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, tf.ViTForImageClassification):
        size, dtype = model.config.image_size, next(model.parameters()).dtype
        return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator).to(device, dtype)}
    ids = torch.randint(5, 1000, (batch, tokens), generator=generator)
    return {"input_ids": ids.to(device)}


def even(layers: list[Any], share: float) -> dict[str, list[int]]:
    """What goes where every layer keeps a share of its heads: whole groups, where heads share keys and values."""
    drop = {}
    for layer in layers:
        units = [list(unit) for unit in layer.units]
        gone = units[round(share * len(units)) :]
        drop[layer.name] = sorted(h for unit in gone for h in unit)
    return {name: heads for name, heads in drop.items() if heads}


def uneven(layers: list[Any], share: float) -> dict[str, list[int]]:
    """As many heads in all as `even` leaves, drawn at random over all layers."""
    units = [(a.name, list(unit)) for a in layers for unit in a.units]
    count = sum(round(share * len(a.units)) for a in layers)
    random.Random(0).shuffle(units)
    drop: dict[str, list[int]] = {}
    for name, unit in units[count:]:
        drop.setdefault(name, []).extend(unit)
    return {name: sorted(heads) for name, heads in drop.items()}


def pruned(model: nn.Module, drop: dict[str, list[int]], layers: list[Any], device: str) -> nn.Module:
    """A copy without these heads, proved."""
    other = copy.deepcopy(model)
    hp.prune(other, drop, given(other, 2, 16, device), layers=layers)
    return other


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- timing ----------------------------------------------------------------------------------------


def arm(call: Callable[[], object], device: str) -> Callable[[], float]:
    """A function that gives the milliseconds of a pass, as a mean over a few between two events."""

    def on_gpu() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(INNER):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / INNER

    def on_cpu() -> float:
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)

    return on_gpu if device.startswith("cuda") else on_cpu


def passes(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], object]:
    keep = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}

    def call() -> object:
        with torch.inference_mode():
            return model(**inputs, **keep)

    return call


def graphed(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], object]:
    """The same pass, replayed from a CUDA graph."""
    call = passes(model, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(calls: dict[str, Callable[[], object]], options: argparse.Namespace) -> dict[str, Found]:
    """Medians, ratios to the first, and by how much the first and its twin differ."""
    arms = {name: arm(call, options.device) for name, call in calls.items()}
    rounds, seconds = (2, 0.0) if options.small else (15, 0.1)
    times = in_turn(arms, rounds, seconds)
    first = next(iter(times))
    found = {}
    for name, took in times.items():
        ratio = speedup(times[first], took)
        found[name] = {"ms": statistics.median(took), "ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
    return found


# -- the whole command -----------------------------------------------------------------------------


def command(name: str) -> Callable[[argparse.Namespace], Found]:
    """``headprune prune --keep 50%`` as a user runs it, in a process of its own."""

    def measured(options: argparse.Namespace) -> Found:
        with tempfile.TemporaryDirectory() as there:
            here = Path(there)
            if name == "minilm":
                if options.minilm is None:
                    raise RuntimeError("--minilm names no folder")
                model, data, more = options.minilm.resolve(), (options.minilm / "data").resolve(), []
            else:
                model, data, more = _folder(name, options, here)
            small = ["-L", "16", "-b", "8"] if options.small else []
            asked = [
                sys.executable,
                str(ROOT / "cli.py"),
                "prune",
                str(model),
                "-d",
                str(data),
                "--keep",
                "50%",
                "--device",
                options.device.split(":")[0],
            ]
            asked += [*more, *small, "-o", str(here / "run"), "-q"]
            start = time.monotonic()
            done = subprocess.run(asked, cwd=here, capture_output=True, text=True, timeout=560, check=False)
            took = time.monotonic() - start
            if done.returncode:
                raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}")
            text = (here / "run" / "report.md").read_text()
            _keep(here / "run", name, options)
            return {
                "took": took,
                "command": " ".join(["headprune", *asked[2:]]).replace(str(here), "…"),
                "finding": _first_sentence(text),
            }

    return measured


def _first_sentence(report: str) -> str:
    lines = [line for line in report.splitlines() if line.strip() and not line.startswith(("#", "!", "|", "<"))]
    return lines[0] if lines else ""


def _keep(folder: Path, name: str, options: argparse.Namespace) -> None:
    """The report without weights, packed into one file, since few files come back."""
    place = options.pack.parent if options.pack else options.work
    weights = shutil.ignore_patterns("pruned-*", "*.safetensors", ".*")
    with tempfile.TemporaryDirectory() as there:
        shutil.copytree(folder, Path(there) / name, ignore=weights)
        shutil.make_archive(str(place / f"report-{name}"), "gztar", there, name)


def _folder(name: str, options: argparse.Namespace, here: Path) -> tuple[Path, Path, list[str]]:
    """A model's folder with a tokenizer, data, and further options."""
    from tests.support.folders import WORDS, tokenizer, write_jsonl

    dtype = torch.float32 if name == "bert-base" else torch.bfloat16
    model = made({"bert-base": "BERT-base", "llama-1b": "Llama-1B"}[name], options.small, options.device, dtype)
    words, folder, data = tokenizer(), here / name, here / "data"
    words.model_max_length = 1024
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    del model
    forget()
    rng = random.Random(0)
    classes = name == "bert-base"
    long = 120 if classes else (60 if options.small else 1100)
    for split, count in (("train", 1200), ("validation", 600)) if classes else (("train", 140), ("validation", 70)):
        rows = []
        for _ in range(48 if options.small else count):
            text = rng.choices(WORDS, k=rng.randint(long // 2, long) if classes else long)
            row: dict[str, object] = {"text": " ".join(text)}
            rows.append({**row, "label": int(text.count("good") > text.count("bad"))} if classes else row)
        write_jsonl(data / f"{split}.jsonl", rows)
    if classes:
        return folder, data, []
    return folder, data, ["-L", "64", "--max-length", "32" if options.small else "1024", "-b", "4"]


def command_told(found: Found) -> list[str]:
    return [f"{found['took']:.0f} s from start to report: `{found['command']}`. {found['finding']}"]


def eight(options: argparse.Namespace) -> Found:
    """An 8B-shaped decoder, scored, repaired and pruned in one process."""
    device, times = options.device, {}

    def clocked(name: str, work: Callable[[], Any]) -> Any:
        synchronize(device)
        start = time.perf_counter()
        found = work()
        synchronize(device)
        times[name] = time.perf_counter() - start
        return found

    model = clocked("made", lambda: made("Llama-8B", options.small, device, torch.bfloat16))
    tokens, count = (16, 4) if options.small else (1024, 8)
    batches = []
    for i in range(count):
        ids = torch.randint(5, 1000, (1, tokens), generator=torch.Generator().manual_seed(i)).to(device)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    example = {k: v[:, :16] for k, v in batches[0].items() if k != "labels"}
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    size = sum(p.nbytes for p in model.parameters())
    layers = clocked("traced", lambda: hp.find_attention(model, example))
    scores = clocked("scored by gradient", lambda: hp.score(model, batches, "gradient", layers=layers))
    plan = hp.plan(scores, keep="75%")
    clocked("repaired", lambda: hp.repair(model, plan, batches, layers=layers))
    proof = clocked("pruned, with proof", lambda: hp.prune(model, plan, example, layers=layers))
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
    return {
        "times": times,
        "weights": size,
        "peak": peak,
        "proof": proof.difference,
        "kept": plan.kept,
        "total": plan.total,
        "windows": count,
        "tokens": tokens,
    }


def eight_told(found: Found) -> list[str]:
    times = ", ".join(f"{name} {took:.1f} s" for name, took in found["times"].items())
    return [
        f"Llama-8B's shape in bfloat16, {found['windows']} windows of {found['tokens']} tokens, {found['kept']} of {found['total']} heads kept: {times}. "
        f"Its weights take {found['weights'] / 2**30:.1f} GiB, and at most {found['peak'] / 2**30:.1f} GiB were allocated. Proof: {found['proof']:.1e}."
    ]


# -- latency ---------------------------------------------------------------------------------------

GRID: dict[str, list[tuple[str, list[tuple[int, int]]]]] = {
    "BERT-base": [
        ("bfloat16", [(1, 128), (8, 128), (32, 128), (128, 128), (32, 512), (8, 2048), (4, 4096)]),
        ("float16", [(1, 128), (32, 128), (128, 128)]),
        ("float32", [(1, 128), (32, 128), (128, 128)]),
    ],
    "ViT-B": [("bfloat16", [(1, 0), (32, 0), (128, 0)]), ("float16", [(128, 0)]), ("float32", [(1, 0), (64, 0)])],
    "Llama-1B": [("bfloat16", [(1, 128), (8, 1024), (1, 4096), (32, 512)]), ("float16", [(8, 1024)]), ("float32", [(4, 512)])],
    "Llama-8B": [("bfloat16", [(1, 128), (1, 2048), (8, 1024)])],
}  # fmt: skip


def latency(shape: str) -> Callable[[argparse.Namespace], Found]:
    """Dense and pruned models of a shape in turn, with the most that each plan can gain."""

    def measured(options: argparse.Namespace) -> Found:
        rows = []
        grid = [("float32", [(2, 16)])] if options.small else GRID[shape]
        shares = (0.5, 0.0) if options.small or shape == "Llama-8B" else SHARES
        for kind, inputs in grid:
            model = made(shape, options.small, options.device, TYPES[kind])
            layers = list(hp.find_attention(model, given(model, 2, 16, options.device)))
            drops = {f"{share:.0%}": even(layers, share) for share in shares}
            if shape != "Llama-8B":
                drops["50% uneven"] = uneven(layers, 0.5)
            others = {name: pruned(model, drop, layers, options.device) for name, drop in drops.items()}
            models = {"dense": model, **others, "dense again": model}
            for batch, tokens in inputs:
                fed = given(model, batch, tokens, options.device)
                before = gpu_state() if options.device.startswith("cuda") else {}
                found = timed({name: passes(m, fed) for name, m in models.items()}, options)
                broken = hp.breakdown(model, fed, layers=layers, min_seconds=0.05 if options.small else 0.3)
                for name, drop in drops.items():
                    found[name]["bound"] = broken.bound(drop)
                rows.append({
                    "dtype": kind, "batch": batch, "tokens": tokens, "shares": broken.shares, "models": found, "gpu": [before, gpu_state() if before else {}],
                })  # fmt: skip
                print(
                    shape,
                    kind,
                    batch,
                    tokens,
                    {n: f"{f['ms']:.3f} ms {f['ratio']:.2f}x" for n, f in found.items()},
                    flush=True,
                )
            del model, others, models
            forget()
        return {"shape": shape, "rows": rows}

    return measured


def latency_told(found: Found) -> list[str]:
    names = [n for n in found["rows"][0]["models"] if n not in ("dense", "dense again")]
    rows, twins, gained = [], [], []
    largest = max(r["batch"] * max(r["tokens"], 1) for r in found["rows"])
    for r in found["rows"]:
        models = r["models"]
        twins.append(abs(models["dense again"]["ratio"] - 1))
        tokens = f" x {r['tokens']}" if r["tokens"] else ""
        cells = [f"{models[n]['ratio']:.2f} of {models[n]['bound']:.2f}" for n in names]
        if r["batch"] * max(r["tokens"], 1) == largest:
            gained += [models[n]["ratio"] / models[n]["bound"] for n in names]
        rows.append(
            [
                f"{r['dtype']}, {r['batch']}{tokens}",
                f"{models['dense']['ms']:.3f} ms",
                *cells,
                f"{r['shares']['launch overhead']:.0%}",
            ]
        )
    clocks = sorted({state["clocks.sm"] for r in found["rows"] for state in r["gpu"] if "clocks.sm" in state})
    lines = [
        f"{found['shape']}: the dense model's time; how many times as fast each pruned model is, of how many at most (Amdahl's law, `headprune.breakdown`); "
        "and the share of the dense pass in which the GPU waits for launches.", "",
        *table(["type, batch x tokens", "dense", *names, "launch overhead"], rows), "",
        f"The dense model timed twice in the same turns differs by at most {max(twins):.1%}. Achieved ÷ bound at the largest input: "
        f"{min(gained):.2f} to {max(gained):.2f} (the goal is 0.9).",
    ]  # fmt: skip
    return [*lines, *([f"SM clock during the rounds: {clocks[0]} to {clocks[-1]} MHz."] if clocks else [])]


def modes(options: argparse.Namespace) -> Found:
    """Eager, compiled, and replayed from CUDA graphs."""
    cuda = options.device.startswith("cuda")
    rows = []
    kind = "float32" if options.small else "bfloat16"
    for shape, inputs in {"BERT-base": [(1, 128), (32, 128)], "Llama-1B": [(1, 128), (8, 512)]}.items():
        model = made(shape, options.small, options.device, TYPES[kind])
        layers = list(hp.find_attention(model, given(model, 2, 16, options.device)))
        models = {
            "dense": model,
            "50%": pruned(model, even(layers, 0.5), layers, options.device),
            "none": pruned(model, even(layers, 0.0), layers, options.device),
        }
        for batch, tokens in [(2, 16)] if options.small else inputs:
            fed = given(model, batch, tokens, options.device)
            ways: dict[str, Callable[[nn.Module], Callable[[], object]]] = {"eager": lambda m, f=fed: passes(m, f)}
            if cuda:
                ways["CUDA graph"] = lambda m, f=fed: graphed(m, f)
            if cuda and shape == "BERT-base":  # others take minutes to compile
                ways["compiled"] = lambda m, f=fed: passes(torch.compile(m, dynamic=False), f)
            for way, prepared in ways.items():
                row: Found = {"shape": shape, "batch": batch, "tokens": tokens, "way": way}
                try:
                    row["models"] = timed({name: prepared(m) for name, m in models.items()}, options)
                except Exception as error:  # a model may not be captured
                    row["why"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:160]
                rows.append(row)
                print(row, flush=True)
        del model, models
        forget()
    return {"rows": rows}


def modes_told(found: Found) -> list[str]:
    rows = []
    for r in found["rows"]:
        name = f"{r['shape']}, {r['batch']} x {r['tokens']}, {r['way']}"
        if "why" in r:
            rows.append([name, r["why"], "", ""])
            continue
        m = r["models"]
        rows.append([name, f"{m['dense']['ms']:.3f} ms", f"{m['50%']['ratio']:.2f}", f"{m['none']['ratio']:.2f}"])
    return [
        "How many times as fast as dense, run in the same way.",
        "",
        *table(["", "dense", "half of the heads", "none"], rows),
    ]


def writing(options: argparse.Namespace) -> Found:
    """Decoders: the prompt, then tokens with the cache."""
    rows = []
    kind = "float32" if options.small else "bfloat16"
    model = made("Llama-1B", options.small, options.device, TYPES[kind])
    layers = list(hp.find_attention(model, given(model, 2, 16, options.device)))
    models = {
        "dense": model,
        **{f"{s:.0%}": pruned(model, even(layers, s), layers, options.device) for s in (0.75, 0.5, 0.25)},
    }
    for batch, tokens in [(1, 16)] if options.small else [(1, 512), (16, 512), (64, 1024)]:
        fed = given(model, batch, tokens, options.device)
        row = generation(models, fed, new=4 if options.small else 32, min_seconds=0.01 if options.small else 0.5)
        if row is None:
            raise RuntimeError("the model wrote nothing")
        rows.append(row.to_json())
        print(rows[-1], flush=True)
    return {"rows": rows}


def writing_told(found: Found) -> list[str]:
    rows = [
        [
            f"{r['batch']} x {r['length']}, {name} of the heads" if name != "dense" else f"{r['batch']} x {r['length']}, dense",
            f"{r['prefill'][name]['median']:.2f} ms", f"{r['token'][name]['median']:.2f} ms", f"{r['tokens_per_second'][name]:.0f}",
            f"{r['cache'][name]:.0f}",
        ]
        for r in found["rows"] for name in r["prefill"]
    ]  # fmt: skip
    return [
        "Llama-1B's shape.",
        "",
        *table(["", "prompt", "a step", "tokens per second", "cache, bytes per token"], rows),
    ]


def counts(options: argparse.Namespace) -> Found:
    """A model with the same number of heads in every layer, for every such number: whether some numbers suit tensor cores."""
    rows = []
    kind = "float32" if options.small else "bfloat16"
    for shape, batch, tokens in (("BERT-base", 32, 128), ("BERT-base", 8, 1024)):
        model = made(shape, options.small, options.device, TYPES[kind])
        fed = given(model, *((2, 16) if options.small else (batch, tokens)), options.device)
        layers = list(hp.find_attention(model, given(model, 2, 16, options.device)))
        number = layers[0].num_heads
        models = {str(number): model}
        for kept in range(number - 1, 0, -1):
            models[str(kept)] = pruned(
                model, {a.name: list(range(kept, number)) for a in layers}, layers, options.device
            )
        rows.append(
            {
                "shape": shape,
                "batch": batch,
                "tokens": tokens,
                "models": timed({n: passes(m, fed) for n, m in models.items()}, options),
            }
        )
        print(rows[-1], flush=True)
        del model, models
        forget()
    return {"rows": rows}


def counts_told(found: Found) -> list[str]:
    lines: list[str] = []
    for r in found["rows"]:
        times = {int(n): f["ms"] for n, f in r["models"].items()}
        most, least = max(times), min(times)
        each = (times[most] - times[least]) / (most - least)  # ms a head, if each gained the same
        rows = [
            [str(n), f"{ms:.3f} ms", f"{1000 * (ms - times[most] + each * (most - n)):+.0f} µs"]
            for n, ms in sorted(times.items(), reverse=True)
        ]
        lines += [
            f"{r['shape']}, {r['batch']} x {r['tokens']}; beside each time, how far it is from a straight line between the first and the last.",
            "",
        ]
        lines += [*table(["heads in every layer", "time", "from the line"], rows), ""]
    return lines


PARTS = [
    Part("command-minilm", "`headprune prune`: minilm-rt", command("minilm"), command_told, 100),
    Part("command-bert-base", "`headprune prune`: a BERT-base", command("bert-base"), command_told, 130),
    Part("latency-bert", "Latency: BERT-base", latency("BERT-base"), latency_told, 110),
    Part("latency-vit", "Latency: ViT-B", latency("ViT-B"), latency_told, 60),
    Part("latency-1b", "Latency: a 1B decoder", latency("Llama-1B"), latency_told, 120),
    Part("writing", "Decoders: prompt, tokens per second, cache", writing, writing_told, 90),
    Part("eight", "An 8B decoder in one run", eight, eight_told, 150),
    Part("latency-8b", "Latency: an 8B decoder", latency("Llama-8B"), latency_told, 120),
    Part("modes", "Eager, compiled, CUDA graphs", modes, modes_told, 150),
    Part("counts", "Head counts", counts, counts_told, 60),
    Part(
        "command-llama-1b",
        "`headprune prune`: a 1B decoder, 64 windows of 1,024 tokens",
        command("llama-1b"),
        command_told,
        400,
    ),
]

if __name__ == "__main__":
    run(PARTS, parser(__doc__ or "").parse_args(), "gpu-latency", "The whole command, and latency")
