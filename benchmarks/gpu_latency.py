"""The whole command on a GPU, and what pruning heads makes faster there: parts that resume.

    python3 benchmarks/gpu_latency.py --work $OUT/gpu_latency.json --minilm .gpu/minilm-rt    # on the GPU
    python benchmarks/gpu_latency.py --work gpu_latency.json --document                       # docs/scale.md
    python benchmarks/gpu_latency.py --work try.json --device cpu --small                     # to try the script

Weights are random, but minilm-rt's; the models of commands are trained for some seconds before. Models are timed in turn
(`headprune.benchmark`: by CUDA events); the dense model stands twice in every turn, and by how much its two medians differ is said.
"""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from document import table
from gpu_parts import ROOT, Options, Part, built, main, texts
from torch.utils.benchmark import timer

import headprune as hp
from headprune.inputs import unlabelled
from headprune.latency import benchmark_generation


def fed(model: Any, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """An input without padding, and so without a mask."""
    if hasattr(model.config, "image_size"):
        size = model.config.image_size
        return {"pixel_values": torch.randn(batch, 3, size, size).to(model.device, model.dtype)}
    return unlabelled(texts(batch, tokens, 1, model.device, padded=False)[0])


def versions(shape: str, kind: str, shares: Sequence[float], options: Options) -> tuple[Any, Any, dict[str, Any], Any]:
    """The dense model and its layers; copies that keep a share of the heads in every layer, proved, by name; what went in each."""
    gc.collect()  # models of before
    model, others, drops = built(shape, options, kind), {}, {}
    layers = hp.find_attention(model, fed(model, 2, 16))
    for share in shares:
        name, other = f"{share:.0%}", deepcopy(model)
        drops[name] = {a.name: [h for unit in a.units[round(share * len(a.units)) :] for h in unit] for a in layers}
        hp.prune(other, drops[name], fed(model, 2, 16), layers=layers)
        others[name] = other
    return model, layers, others, drops


# -- the whole command -----------------------------------------------------------------------------


def command(name: str, options: Options) -> list[str]:
    """``headprune prune --keep 50%`` as a user runs it, in a process of its own; its report is packed beside ``--work``."""
    with tempfile.TemporaryDirectory() as there:
        here = Path(there)
        if name == "minilm-rt" and options.minilm is None:
            raise RuntimeError("--minilm names no folder")
        asked = [options.minilm, "-d", options.minilm / "data"] if name == "minilm-rt" else written(name, options, here)
        asked = ["prune", *asked, "--keep", "50%", "--device", options.device, "-o", here / "run", "-q"]
        asked += ["-L", 16, "-b", 8, "--report-limit", 32, "-s", "one-shot"] if options.small else []
        start = time.monotonic()
        done = subprocess.run([sys.executable, ROOT / "cli.py", *map(str, asked)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}")
        took, lines = time.monotonic() - start, (here / "run" / "report.md").read_text().splitlines()
        shutil.copytree(here / "run", here / name, ignore=shutil.ignore_patterns("pruned-*", ".*"))
        shutil.make_archive(str(options.work.parent / f"report-{name}"), "gztar", here, name)
        finding = next(line for line in lines if line.strip() and line[0] not in "#!|<")
        typed = " ".join(map(str, ["headprune", *asked])).replace(str(here), "…")
    return [f"{took:.0f} s from start to report: `{typed}`. {finding}"]


def written(name: str, options: Options, here: Path) -> list[Any]:
    """A model with a tokenizer, data in folders, and the arguments that name them; the model is trained for some seconds."""
    import made_up

    classes, small, rng = name == "BERT-base", options.small, random.Random(0)
    longest, steps = 60 if small else 120 if classes else 1000, 4 if small else 300 if classes else 150

    def rows(count: int) -> list[dict[str, Any]]:
        drawn = [{"text": made_up.text(rng, rng.randint(longest // 2, longest), not classes)} for _ in range(count)]
        return [made_up.labelled(row) for row in drawn] if classes else drawn

    model = built(name, options, initial=True)
    loss = made_up.trained(model, rows, steps, *((64, 1e-4) if classes else (4, 3e-4)))
    print(f"{name}: loss {loss:.3f} after {steps} steps", flush=True)
    model.config.pad_token_id = 0
    counts = (48, 48) if small else (1200, 600) if classes else (140, 40)
    parts = dict(zip(("train", "validation"), map(rows, counts), strict=True))
    asked = made_up.folders(here, model.to(torch.float32 if classes else torch.bfloat16), 1024, parts)
    return asked if classes else [*asked, "-L", 64, "-b", 4, "--max-length", 32 if small else 1024]


def eight(options: Options) -> list[str]:
    """An 8B-shaped decoder, scored, repaired and pruned in one process."""
    times: dict[str, float] = {}

    def clocked(name: str, work: Any, *given: Any, **more: Any) -> Any:
        start = timer()
        found = work(*given, **more)
        times[name] = timer() - start
        return found

    model = clocked("made", built, "Llama-8B", options, "bfloat16")
    drawn = texts(1, *((16, 4) if options.small else (1024, 8)), options.device)
    batches = [{**batch, "labels": batch["input_ids"]} for batch in drawn]
    example = {name: value[:, :16] for name, value in unlabelled(batches[0]).items()}
    layers = clocked("traced", hp.find_attention, model, example)
    scores = clocked("scored by gradient", hp.score, model, batches, "gradient", layers=layers)
    plan = hp.plan(scores, keep="75%")
    clocked("repaired", hp.repair, model, plan, batches, layers=layers)
    proof = clocked("pruned, with proof", hp.prune, model, plan, example, layers=layers)
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items())
    about = f"An 8B Llama in bfloat16, {plan.kept} of {plan.total} heads kept: {took}. Proof: {proof.difference:.1e}"
    return [f"{about}. At most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB were allocated."]


# -- latency ---------------------------------------------------------------------------------------

GRID: dict[str, dict[str, list[tuple[int, int]]]] = {
    "BERT-base": {
        "bfloat16": [(1, 128), (8, 128), (32, 128), (128, 128), (8, 2048), (4, 4096)],
        "float16": [(1, 128), (128, 128)],
        "float32": [(1, 128), (128, 128)],
    },
    "ViT-B": {"bfloat16": [(1, 0), (32, 0), (128, 0)], "float32": [(64, 0)]},
    "Llama-1B": {"bfloat16": [(1, 128), (8, 1024), (1, 4096)], "float32": [(4, 512)]},
    "Llama-8B": {"bfloat16": [(1, 128), (8, 1024)]},
}


class Graphed(torch.nn.Module):
    """A model's forward pass on one input, captured in a CUDA graph; calling it replays the graph."""

    def __init__(self, model: Any, given: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self.graph = model, torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                model(**given)
        torch.cuda.synchronize()
        # While a graph is captured, transformers makes a mask where there is no padding, which costs more than the launches.
        plain = mock.patch("transformers.masking_utils.is_tracing", return_value=False)
        with plain, torch.inference_mode(), torch.cuda.graph(self.graph):
            self.output = model(**given)

    def forward(self, **_: Any) -> Any:
        self.graph.replay()
        return self.output


@contextlib.contextmanager
def watched(options: Options) -> Iterator[list[str]]:
    """The GPU's clock and power while the context lasts, in a line."""
    said: list[str] = []
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "200"]
    cuda = options.device.startswith("cuda")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) if cuda else contextlib.nullcontext() as process:
        yield said
        if process:
            process.terminate()
            lines = process.communicate()[0].splitlines()[:-1]  # the last may be cut
            clocks, power = zip(*([float(x) for x in line.split(",")] for line in lines), strict=True)
            seen = f"{min(clocks):.0f} to {max(clocks):.0f} MHz; power up to {max(power):.0f} W"
            said += [f"The GPU's clock: {seen}.", ""]


def latency(shape: str, options: Options) -> list[str]:
    """Dense and pruned models of a shape in turn, with the most that each plan can gain."""
    rows, twins, runs = [], [], {"min_runs": 2 if options.small else 15, "min_seconds": 0.25}
    shares = (0.75, 0.5, 0.25, 0.0) if shape != "Llama-8B" and not options.small else (0.5, 0.0)
    with watched(options) as said:
        for kind, inputs in ({"float32": [(2, 16)]} if options.small else GRID[shape]).items():
            model, layers, others, drops = versions(shape, kind, shares, options)
            for batch, tokens in inputs:
                given = fed(model, batch, tokens)
                row = hp.benchmark({"dense": model, **others, "dense again": model}, given, **runs)
                parts = hp.breakdown(model, given, layers=layers, min_seconds=0.2)
                bounds = [f"{row.speedups[n].ratio:.2f} of {parts.bound(drop):.2f}" for n, drop in drops.items()]
                twins.append(abs(row.speedups["dense again"].ratio - 1))
                cells = [f"{row.timings['dense'].median:.3f} ms", *bounds, f"{parts.shares['launch overhead']:.0%}"]
                rows.append([f"{kind}, {batch}{f' x {tokens}' if tokens else ''}", *cells])
                print(rows[-1], flush=True)
    about = f"{shape}: the dense model's time; how many times as fast each pruned model is, of how many at most (Amdahl's law, `headprune.breakdown`); and the share of the dense pass in which the GPU waits for launches."
    lines = table(["type, batch x tokens", "dense", *others, "launch overhead"], rows)
    twice = f"The dense model timed twice in the same turns differs by at most {max(twins):.1%}."
    return [about, "", *lines, "", twice, *said]


def graphs(options: Options) -> list[str]:
    """BERT-base plain, replayed by CUDA graphs, and compiled."""
    rows, kind, cuda = [], "float32" if options.small else "bfloat16", options.device.startswith("cuda")
    model, _, others, _ = versions("BERT-base", kind, (0.5, 0.25), options)
    models, compiled = {"dense": model, **others}, partial(torch.compile, mode="reduce-overhead", dynamic=False)
    for batch, tokens in [(2, 16)] if options.small else [(1, 128), (8, 128), (32, 128), (128, 128)]:
        given, ways = fed(model, batch, tokens), {"plain": models}
        ways["CUDA graph"] = {n: Graphed(m, given) for n, m in models.items()} if cuda else models
        if (batch, tokens) in ((2, 16), (1, 128), (128, 128)):
            ways["torch.compile"] = {n: compiled(m) for n, m in models.items()}
        for way, those in ways.items():
            row = hp.benchmark(those, given, min_runs=15, min_seconds=0.3)
            speeds = [f"{row.speedups[n].ratio:.2f}" for n in others]
            rows.append([f"{kind}, {batch} x {tokens}, {way}", f"{row.timings['dense'].median:.3f} ms", *speeds])
            print(rows[-1], flush=True)
    about = "BERT-base: the dense model's time, and how many times as fast the pruned ones are. A graph waits for no launch; `torch.compile` (reduce-overhead) makes graphs too"
    return [f"{about}.", "", *table(["type, batch x tokens", "dense", *others], rows)]


def multiples(options: Options) -> list[str]:
    """BERT-base by the number of heads that every layer keeps, where the GPU is full."""
    counts = (4, 3, 2, 1) if options.small else (12, 11, 10, 9, 8, 7, 6, 5, 4)
    kind, size = ("float32", (2, 16)) if options.small else ("bfloat16", (128, 128))
    model, layers, others, drops = versions("BERT-base", kind, [n / counts[0] for n in counts[1:]], options)
    given = fed(model, *size)
    row = hp.benchmark({"dense": model, **others}, given, min_runs=30, min_seconds=0.3)
    bounds = hp.breakdown(model, given, layers=layers, min_seconds=0.5)
    cells = [f"{row.speedups[n].ratio:.3f} of {bounds.bound(drop):.3f}" for n, drop in drops.items()]
    heads = [f"BERT-base, {kind}, {size[0]} x {size[1]}", *(f"{n} heads a layer" for n in counts[1:])]
    return table(heads, [["times as fast, of at most", *cells]])


def writing(options: Options) -> list[str]:
    """Decoders: the prompt, then tokens with the cache."""
    kind, limits = ("float32", {"new": 4, "min_seconds": 0.01}) if options.small else ("bfloat16", {})
    (model, _, others, _), rows = versions("Llama-1B", kind, (0.5, 0.25), options), []
    for batch, tokens in [(1, 16)] if options.small else [(1, 512), (16, 512), (64, 1024)]:
        row = benchmark_generation({"dense": model, **others}, fed(model, batch, tokens), **limits)
        for name, step in row.token.items():
            cells = [f"{row.prefill[name].median:.2f} ms", f"{step.median:.2f} ms"]
            cells += [f"{row.tokens_per_second[name]:.0f}", f"{row.cache[name]:.0f}"]
            rows.append([f"{batch} x {tokens}, {name}", *cells])
    return table(["Llama-1B's shape", "prompt", "a step", "tokens per second", "cache, bytes per token"], rows)


PARTS = {
    "command-minilm": Part("`headprune prune`: minilm-rt", partial(command, "minilm-rt"), 100),
    "command-bert-base": Part("`headprune prune`: a BERT-base", partial(command, "BERT-base"), 130),
    "latency-bert": Part("Latency: BERT-base", partial(latency, "BERT-base"), 100),
    "graphs": Part("Without launch overhead", graphs, 100),
    "multiples": Part("Numbers of heads", multiples, 40),
    "latency-vit": Part("Latency: ViT-B", partial(latency, "ViT-B"), 60),
    "latency-1b": Part("Latency: a 1B decoder", partial(latency, "Llama-1B"), 120),
    "writing": Part("Decoders: prompt, tokens per second, cache", writing, 90),
    "eight": Part("An 8B decoder in one run", eight, 150),
    "latency-8b": Part("Latency: an 8B decoder", partial(latency, "Llama-8B"), 120),
    "command-llama-1b": Part("`headprune prune`: a 1B decoder", partial(command, "Llama-1B"), 400),
}

if __name__ == "__main__":
    main(PARTS, __doc__ or "", "gpu-latency", "On a GPU: the whole command, and latency")
