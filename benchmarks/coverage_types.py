"""What headprune can do on every model type of the installed transformers, built tiny and random, offline.

    python benchmarks/coverage_types.py                      # writes docs/coverage.md
    python benchmarks/coverage_types.py --only bert t5       # prints these
    python benchmarks/coverage_types.py --check              # fails if a type of that table works no longer; the whole job on every eighth
    python benchmarks/coverage_types.py --json 5.0.json      # under another transformers: the rows, for …
    python benchmarks/coverage_types.py --rows now.json --others 5.0.json   # the table from such files, nothing is run

Nothing here is fitted to a list of models: `tiny.py` shrinks any config by what its fields are called, and what cannot be built is said.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # of the code in saved folders
warnings.filterwarnings("ignore")

import tiny
import torch
import torch.nn.functional as F
import transformers
from rich.progress import track
from torch import nn
from torch.overrides import TorchFunctionMode

import headprune as hp
from headprune.checkpoint import StockCounts, load_call
from headprune.checkpoint.probe import difference
from headprune.errors import first_line
from headprune.evaluation import evaluate
from headprune.inputs import call, tensors
from headprune.latency import flops
from headprune.running import exact_attention
from headprune.surgery import answers

STATUSES = ("exact", "in part", "masked", "refused", "no attention", "not built", "too slow", "WRONG", "CRASH")
LOADS = ("stock", "both")  # where a folder loads with headprune and with transformers
LIMIT = 40  # seconds for one type
CHECKED = 8  # --check does the whole job on every eighth type: on all of them it takes twenty minutes
JOB = "find, profile, break down, score, search, count FLOPs, repair, prune, save, load, evaluate"
BROKEN = re.compile("CRASH|WRONG")


class TookTooLongError(BaseException):
    """Not an Exception, so that no attempt swallows it."""


def why(error: BaseException) -> str:
    """An error in a line, without this machine's paths."""
    text = re.sub(r"(['\"]| )/\S*/", r"\1…/", f"{type(error).__name__}: {first_line(error)}")
    return re.sub(r"…/m\d+", "…", text)[:160]


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Stop a type that would take all day; what it prints goes nowhere."""

    def stop(*_: Any) -> None:
        raise TookTooLongError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        signal.alarm(0)


def other_input(example: dict[str, Any], seed: int = 7) -> dict[str, Any]:
    """Same form, other content: what the proof has not seen."""
    generator = torch.Generator().manual_seed(seed)
    made = dict(example)
    for name, value in example.items():
        if value.is_floating_point():
            made[name] = torch.randn(value.shape, generator=generator)
        elif "input_ids" in name:
            made[name] = value[:, torch.randperm(value.shape[1], generator=generator)]
    return made


def close(a: Any, b: Any) -> bool:
    pairs = list(zip(answers(a), answers(b), strict=True))
    return all((x - y).abs().max() <= 1e-4 * y.abs().max().clamp(min=1e-30) for x, y in pairs)


def randomise(model: nn.Module, example: dict[str, Any]) -> None:
    """Every matrix large enough for each head to matter, as far as the outputs stay finite: models start near zero."""
    for scale in (1.0, 0.3, 0.1):
        fill(model, scale)
        with contextlib.suppress(Exception):
            if all(torch.isfinite(t).all() for t in answers(answer(model, example))):
                return


def fill(model: nn.Module, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.is_floating_point() and (p.ndim >= 2 or name.endswith("bias")):
                p.copy_(torch.randn(p.shape, generator=generator) * scale / max(p.shape[-1], 1) ** 0.5)


class Without(TorchFunctionMode):
    """Brute force: zeros in place of one head's result wherever a module computes softmax attention.

    Where one module computes several attentions (``name#2``), only in the one that is meant.
    """

    def __init__(self, model: nn.Module, layer: hp.AttentionLayer, head: int, several: bool) -> None:
        super().__init__()
        self.heads, self.head, self.running, self.used = layer.num_heads, head, False, 0
        self.number, self.seen = int(layer.name.partition("#")[2] or 1), 0
        self.several = several
        module = model.get_submodule(layer.module)
        module.register_forward_pre_hook(lambda *_: self.look(True))
        module.register_forward_hook(lambda *_: self.look(False))

    def look(self, running: bool) -> None:
        self.running, self.seen = running, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        fused = func is F.scaled_dot_product_attention
        if not self.running or not (fused or func in (F.softmax, torch.softmax, torch.Tensor.softmax)):
            return out
        if not fused and (kwargs or {}).get("dim", args[1] if len(args) > 1 else None) not in (-1, out.ndim - 1):
            return out
        dims = [d for d in range(1, out.ndim - 1) if out.shape[d] == self.heads] if out.ndim > 3 else []
        if not dims and not (out.ndim == 3 and out.shape[0] % self.heads == 0):
            return out
        self.seen += 1
        if self.several and self.seen != self.number:
            return out
        self.used += 1
        out = out.clone()
        own = out.select(dims[0], self.head) if dims else out.view(-1, self.heads, *out.shape[1:])[:, self.head]
        own.zero_()
        return out


def answer(model: nn.Module, example: dict[str, Any]) -> Any:
    """The model's output, with the same random numbers each time, since some models draw some."""
    torch.manual_seed(0)
    with torch.no_grad():
        return call(model, example)


def mask_is_right(model: nn.Module, layer: hp.AttentionLayer, layers: list[Any], example: dict[str, Any]) -> bool:
    """Whether masking head 0 does what zeros in place of its attention do, and leaves nothing of that attention."""
    several = sum(other.module == layer.module for other in layers) > 1
    brute = copy.deepcopy(model)
    with exact_attention(brute), Without(brute, layer, 0, several) as without:
        expected = answer(brute, example)
    if not without.used:
        raise RuntimeError(f"{layer.name}: the brute force found no attention to compare the mask with")
    with hp.mask(model, {layer.name: [0]}, layers=layers):
        masked = answer(model, example)
    if close(masked, expected):
        return True
    # A head may have other ways to W_O, such as Nystromformer's convolution of its values: the mask closes these too.
    brute = copy.deepcopy(model)
    with hp.mask(brute, {layer.name: [0]}, layers=layers), Without(brute, layer, 0, several):
        both = answer(brute, example)
    return close(masked, both) and not close(expected, answer(model, example))


def examine(model_type: str, whole: Container[str]) -> dict[str, Any]:
    """One row of the table; with what came of the whole job, if the type is one of ``whole``."""
    row = {"type": model_type, "layers": 0, "mask": 0, "prune": 0, "groups": "", "why": "", "status": "not built"}
    started = time.monotonic()
    try:
        with limited(LIMIT):
            try:
                model, _, example = tiny.build(model_type)
            except Exception as error:
                return {**row, "why": why(error), "loss": loss_of(model_type)}
            row["status"] = "CRASH"
            randomise(model, example)
            row.update(trial(model, example))
    except TookTooLongError as error:
        row.update(status="too slow", why=str(error))
    except Exception as error:
        row.update(status="CRASH", why=why(error))
    if row["layers"] and model_type in whole:
        gc.freeze()  # what other types left in memory: a pass under the profiler collects garbage first
        try:
            with limited(LIMIT):
                row["job"] = job(model, example)
        except TookTooLongError as error:
            row["job"] = f"too slow: {error}"
        gc.unfreeze()
    return {**row, "loss": loss_of(model_type), "seconds": round(time.monotonic() - started, 1)}


def loss_of(model_type: str) -> str:
    """How a causal language model of this type compares logits with labels, and whether `evaluate` gives its own loss of a batch and of
    each of its examples.

    The token that the labels are of (``"next"``, ``"same"``), ``"own"`` where the loss is none of its logits' cross-entropies;
    ``"WRONG …"``; "" where there is no such model, or it was not built.
    """
    try:
        with limited(LIMIT):
            found = tiny.causal_lm(model_type)
            if found is None:
                return ""
            model, example = found
            randomise(model, example)
            labels = example["input_ids"].masked_fill(example["attention_mask"] == 0, -100)
            batch = {**example, "labels": labels}
            with torch.no_grad():
                own = call(model, batch).loss
    except (Exception, TookTooLongError):
        return ""
    if own is None:
        return ""
    try:
        measured = evaluate(model, [batch])
        with torch.no_grad():
            each = [float(call(model, {k: v[i : i + 1] for k, v in batch.items()}).loss) for i in range(len(labels))]
    except Exception as error:
        return f"WRONG: {why(error)}"
    for mine, owns in ((measured.metrics["loss"], float(own)), *zip(measured.loss, each, strict=True)):
        if abs(mine - owns) > 1e-5 * max(1.0, owns):
            return f"WRONG: {mine:.6f}, its own is {owns:.6f}"
    if "accuracy" not in measured.metrics:
        return "own"
    return "same" if measured.tokens.sum() == int((labels != -100).sum()) else "next"


def trial(model: nn.Module, example: dict[str, Any]) -> dict[str, Any]:
    """Mask and prune every layer, and look whether that was exact."""
    try:
        layers = hp.find_attention(model, example)
    except hp.HeadPruneError as error:
        return {"status": "no attention", "why": error.args[0][:160]}
    row: dict[str, Any] = {
        "layers": len(layers),
        "groups": ", ".join(map(str, sorted({len(a.units[0]) for a in layers if a.groups}))),
    }
    reasons = []
    for layer in layers:
        if not layer.maskable or not layer.prunable:
            reasons.append(layer.reason)
        if layer.maskable and not mask_is_right(model, layer, layers, example):
            return {**row, "status": "WRONG", "why": f"masking {layer.name} is not exact"}
    maskable = [layer for layer in layers if layer.maskable]
    able = {layer.name: first_unit(layer) for layer in maskable if layer.prunable}
    # All layers together; where that fails, one by one.
    done: list[nn.Module] = []
    if able and not (failed := removal_fails(model, able, layers, example, done)):
        pruned = len(able)
    else:
        pruned = 0
        for name, drop in able.items():
            failed = removal_fails(model, {name: drop}, layers, example, done)
            pruned += not failed
            reasons.append(failed)
    if done:
        row["folder"] = folder_of(done[0], example)
        if row["folder"] == "both" and (other := uniform_folder(model, layers, example)):
            row["folder"] = other
    if wrong := [r for r in reasons if r.startswith("WRONG")]:
        return {**row, "status": "WRONG", "why": wrong[0]}
    status = "exact" if pruned == len(layers) else "in part" if pruned else "masked" if maskable else "refused"
    return {
        **row, "status": status, "mask": len(maskable), "prune": pruned,
        "why": "; ".join(dict.fromkeys(r for r in reasons if r))[:300],
    }  # fmt: skip


def job(model: nn.Module, example: dict[str, Any]) -> str:
    """All that a user does with a model, on two batches of two examples: what headprune refuses, by step, or "".

    What ends in another error than `HeadPruneError` is a "CRASH", a loaded model that gives other answers "WRONG".
    """
    told: list[str] = []

    def step(name: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except hp.HeadPruneError as error:
            told.append(f"{name}: {why(error)}")
        except Exception as error:
            last = next(f for f in reversed(traceback.extract_tb(error.__traceback__)) if "headprune" in f.filename)
            told.append(f"CRASH {name}: {why(error)} ({Path(last.filename).name}:{last.lineno})")
        return None

    inputs = [example, other_input(example), other_input(example, 8)]
    pairs = [(each, torch.arange(2)) for each in inputs]
    layers = step("find", lambda: hp.find_attention(model, example))
    if not layers:
        return "; ".join(told)
    given: dict[str, Any] = {"layers": layers, "loss_fn": some_loss}
    step("profile", lambda: hp.profile_heads(model, inputs[:1], layers))
    step("breakdown", lambda: hp.breakdown(model, example, layers=layers, min_seconds=0.0))
    ends = [*layers[:1], *layers[1:][-1:]]  # a pass for every head of many layers takes minutes
    step("score by ablation", lambda: hp.score(model, pairs[:2], "ablation", **{**given, "layers": ends}))
    scores = step("score by gradient", lambda: hp.score(model, pairs[:2], "gradient", **given))
    given.update(scores=scores or (), choose=pairs[2:], effort="low")
    found = step("search", lambda: hp.search(model, pairs[:2], 0.75, budgets="flops 99%", **given))
    drop = dict(found[0].drop) if found else {a.name: first_unit(a) for a in layers if a.prunable}
    step("repair", lambda: hp.repair(model, drop, inputs[:2], layers=layers))
    if not drop or step("prune", lambda: hp.prune(model, drop, example, layers=layers)) is None:
        return "; ".join(told)
    step("FLOPs of the pruned", lambda: flops(model, example))
    with tempfile.TemporaryDirectory() as here:
        folder = step("save", lambda: hp.save(model, Path(here) / "m"))
        loaded = folder and step("load", lambda: hp.load(folder))
    if loaded:
        if not close(answer(loaded, example), answer(model, example)):
            told.append("WRONG: the loaded model gives other answers")
        step("evaluate", lambda: hp.evaluate(loaded, pairs, loss_fn=some_loss))
    return "; ".join(told)


def some_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """A loss of each example, of any output: how far the first tensor that can be shared out among them is from noise."""
    those = [t for t in tensors(output) if t.is_floating_point() and t.ndim]
    some = next((t for t in those if len(t) % len(labels) == 0), those[0].expand(len(labels), *those[0].shape))
    each = some.reshape(len(labels), -1)
    return (each - torch.randn(each.shape, generator=torch.Generator().manual_seed(0))).square().mean(1)


def first_unit(layer: Any) -> list[int]:
    """One head or group; all, where there is one alone."""
    return list(layer.units[0]) if len(layer.units) > 1 else list(range(layer.num_heads))


def folder_of(pruned: nn.Module, example: dict[str, Any]) -> str:
    """Who loads a pruned model's folder with the same answers: ``"stock"`` (headprune, and transformers without any option),
    ``"both"`` (transformers with ``trust_remote_code=True``), or who does not and why.
    """
    expected, found = answer(pruned, example), []
    with tempfile.TemporaryDirectory() as here:
        folder = Path(here) / f"m{id(pruned)}"
        try:
            hp.save(pruned, folder)
        except Exception as error:
            return f"not saved: {why(error)}"
        load = {"trust_remote_code": True}
        # sdpa is what a model takes by itself, in all parts that have it.
        if pruned.config._attn_implementation == "eager":
            load["attn_implementation"] = "eager"
        ways = {
            "headprune": lambda: hp.load(folder),
            "transformers": lambda: transformers.AutoModel.from_pretrained(folder, **load),
        }
        for name, loaded in ways.items():
            try:
                if not close(answer(loaded().eval(), example), expected):
                    found.append(f"WRONG: {name} gives other answers")
            except Exception as error:
                found.append(f"not {name}: {why(error)}")
        stock = not load_call(folder).remote
        load.pop("trust_remote_code")
        try:
            loaded = transformers.AutoModel.from_pretrained(folder, **load).eval()
            # Where a layer's only head went, one stays with zero output: a stock class can hold that.
            if not close(answer(loaded, example), expected):
                found.append("WRONG: a stock class loads it, and gives other answers")
        except Exception as error:  # as it should be
            if stock:
                found.append(f"WRONG: no stock class loads it: {why(error)}")
    return "; ".join(found) or ("stock" if stock else "both")


def uniform_folder(model: nn.Module, layers: list[Any], example: dict[str, Any]) -> str:
    """`folder_of` a prune that leaves a number of heads that the stock class can have; "" if there is none."""
    able = [layer for layer in layers if layer.prunable and len(layer.units) > 1]
    counts = StockCounts.of(model, layers)
    for gone in range(1, max((len(layer.units) for layer in able), default=0)) if counts else ():
        drop = {a.name: sorted(h for unit in a.units[: min(gone, len(a.units) - 1)] for h in unit) for a in able}
        if counts.config_without(drop) is None:
            continue
        pruned = copy.deepcopy(model)
        try:
            hp.prune(pruned, drop, example, layers=layers)
        except hp.PruneError:
            return ""
        return folder_of(pruned, example)
    return ""


def removal_fails(
    model: nn.Module, drop: dict[str, list[int]], layers: list[Any], example: dict[str, Any], done: list[nn.Module]
) -> str:
    """Why this cannot be pruned, or ""; then the pruned model is added to ``done``."""
    pruned = copy.deepcopy(model)
    try:
        hp.prune(pruned, drop, example, layers=layers)
    except hp.PruneError as error:
        return str(error.args[0].split(": ", 1)[1].removesuffix(" The model is unchanged."))
    unseen = other_input(example)

    def right(dtype: torch.dtype) -> bool:
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in unseen.items()}
        dense, cut = copy.deepcopy(model).to(dtype), copy.deepcopy(pruned).to(dtype)
        with hp.mask(dense, drop, layers=layers):
            return close(answer(cut, inputs), answer(dense, inputs))

    # Some models make much of rounding: there, float64 decides.
    if not any(map(right, (torch.float32, torch.float64))):
        return f"WRONG: pruning {', '.join(drop)} is not exact"
    done.append(pruned)
    return ""


ALONE = "not run there by transformers alone"


def on_device(device: str, small: bool) -> list[str]:
    """Types (four to try it) masked and pruned on another device, against the CPU; those that 200 seconds are enough for."""
    types, start = tiny.model_types(), time.monotonic()
    chosen = types[:: max(1, len(types) // (4 if small else 150))]
    with multiprocessing.get_context("spawn").Pool(2 if small else 6, torch.set_num_threads, (1,)) as pool:
        each = pool.imap_unordered(partial(of_type, device=device), chosen)
        found = dict(takewhile(lambda _: time.monotonic() - start < 200, each))
    bad = [f"- {name}: {what}" for name, what in found.items() if what.startswith("**") or what == ALONE]
    counts = ", ".join(f"{count} {what}" for what, count in Counter(found.values()).items())
    about = "One head of every layer masked, then one group of every layer pruned (with the proof on the device), and the answers compared with the CPU's"
    return [f"{len(found)} of {len(types)} model types, evenly spread, tiny: {counts}. {about}.", "", *bad]


def of_type(model_type: str, device: str) -> tuple[str, str]:
    """A type, and what became of it."""
    found = "not built"
    try:
        with limited(LIMIT):
            model, _, example = tiny.build(model_type)
            randomise(model, example)
            found = "**CRASH**"
            found = on_both(model, example, device)
    except (TookTooLongError, hp.HeadPruneError) as error:
        found = "too slow" if isinstance(error, TookTooLongError) else "refused"
    except Exception as error:
        print(model_type, found, f"{type(error).__name__}: {error}"[:200], flush=True)
    return model_type, found


def on_both(model: nn.Module, example: dict[str, Any], device: str) -> str:
    there, moved = copy.deepcopy(model).to(device), {name: value.to(device) for name, value in example.items()}

    def numbers(model: nn.Module, example: dict[str, Any]) -> list[torch.Tensor]:
        return [t.cpu() for t in answers(answer(model, example)) if t.is_floating_point()]

    def apart() -> float:
        return difference(numbers(there, moved), numbers(model, example))

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


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    counts = {s: sum(r["status"] == s for r in rows) for s in STATUSES}
    have = [r for r in rows if r["layers"]]
    losses, folders = [r.get("loss", "") for r in rows], [r["folder"] for r in rows if r.get("folder")]
    return {
        **counts, "attention": len(have), "masked_all": sum(r["mask"] == r["layers"] for r in have),
        "causal": sum(map(bool, losses)), "next": losses.count("next"), "same": losses.count("same"), "own": losses.count("own"),
        "saved": len(folders), "both": folders.count("both") + folders.count("stock"), "stock": folders.count("stock"),
    }  # fmt: skip


def outcome_of(job: str) -> str:
    """What came of the whole job, in a word."""
    slow = "too slow" if job.startswith("too slow") else "refused" if job else "works"
    return "broken" if BROKEN.search(job) else slow


def table(report: dict[str, Any], others: list[dict[str, Any]]) -> str:
    rows, counts = report["rows"], summary(report["rows"])
    jobs = [outcome_of(r["job"]) for r in rows if "job" in r]
    lines = [
        "# Coverage",
        "",
        f"Made by `python benchmarks/coverage_types.py` with transformers {report['transformers']} and torch {report['torch']} in "
        f"{report['seconds']:.0f} s on two processes: every type that `AutoModel` builds, tiny and random, offline. Nothing in the "
        "script or in headprune knows the types by name (but the two declared stand-ins in `headprune/pruned/modules.py`).",
        "",
        f"- {len(rows)} types; {len(rows) - counts['not built']} were built, {counts['attention']} of those have softmax attention.",
        f"- **Masked exactly in every layer: {counts['masked_all']} of {counts['attention']}.**",
        f"- **Pruned exactly in every layer: {counts['exact']} of {counts['attention']}**; in some layers: {counts['in part']} more; the "
        "rest is refused, with the reason below.",
        f"- Wrong: {counts['WRONG']}. Crashed: {counts['CRASH']}. Took longer than {LIMIT} s: {counts['too slow']}.",
        f"- **Causal language models: `evaluate` gives the model's own loss, to 1e-5, in {counts['next'] + counts['same'] + counts['own']} of "
        f"{counts['causal']}**, on padded texts. Logits are compared with the next token in {counts['next']}, with the token in their own "
        f"place in {counts['same']}; in {counts['own']} the loss is another, and asked of the model.",
        f"- **Saved pruned, {counts['both']} of {counts['saved']} load both by `headprune.load` and by transformers' "
        "`from_pretrained(…, trust_remote_code=True)`**, with the same answers (to 1e-4 of the largest). Of these, "
        f'**{counts["stock"]} need no option** once every layer keeps the same number of heads, one that the class can have ("stock").',
        f"- **The whole job ({JOB}): all of it works on {jobs.count('works')} of {len(jobs)} types**; a step is refused, in a line, on "
        f"{jobs.count('refused')}; ended in another error, or gave other answers: {jobs.count('broken')}; took longer than {LIMIT} s: "
        f"{jobs.count('too slow')}.",
        "",
        "A mask is right if it does what zeros in place of the head's attention do (set by a `TorchFunctionMode` that knows nothing of "
        "the trace). A prune is right if the pruned model answers as the masked one, on the proof's inputs and on one that the proof "
        "has not seen; one head, or one key/value group, goes from every layer at once. A type that is not built here may still work: "
        "it needs inputs, sizes or packages that this script does not guess or have.",
        "",
    ]
    if others:
        lines += [
            "## Other versions of transformers",
            "",
            "| transformers | types | with attention | masked | pruned | in part | wrong, crashed |",
            "|---|---|---|---|---|---|---|",
        ]
        for other in (report, *others):
            n = summary(other["rows"])
            lines.append(
                f"| {other['transformers']} | {len(other['rows'])} | {n['attention']} | {n['masked_all']} | {n['exact']} | {n['in part']} | {n['WRONG'] + n['CRASH']} |"
            )
        now = {r["type"]: r for r in rows}
        for other in others:
            differ = [
                f"{r['type']} ({r['status']}; {now[r['type']]['status']} in {report['transformers']})"
                for r in other["rows"]
                if r["type"] in now
                and r["status"] != now[r["type"]]["status"]
                and "not built" not in (r["status"], now[r["type"]]["status"])
            ]
            lines += ["", f"What differs in {other['transformers']}: {', '.join(differ) or 'nothing'}."]
        lines.append("")
    lines += [
        "## Types",
        "",
        "| type | status | layers | masked | pruned | group | folder | why not | refused of the whole job |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['type']} | {r['status']} | {r['layers']} | {r['mask']} | {r['prune']} | {r['groups']} | {r.get('folder', '').replace('|', '/')} | {r['why'].replace('|', '/')} | {r.get('job', '').replace('|', '/')} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def earlier(text: str) -> dict[str, list[str]]:
    """The cells of an earlier table, by type."""
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {c[0]: c for c in cells if len(c) == 9 and c[4].isdigit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="these types")
    parser.add_argument("--output", type=Path, default=Path("docs/coverage.md"))
    parser.add_argument("--json", type=Path, help="write the rows here, and no table")
    parser.add_argument("--rows", type=Path, help="rows of an earlier --json, instead of running")
    parser.add_argument(
        "--others", type=Path, nargs="*", default=[], help="rows of runs under other versions of transformers"
    )
    parser.add_argument("--check", action="store_true", help="compare with the output file instead of writing it")
    options = parser.parse_args()
    if options.rows:
        others = [json.loads(path.read_text()) for path in options.others]
        options.output.write_text(table(json.loads(options.rows.read_text()), others))
        return
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    types = options.only or tiny.model_types()
    whole = types[::CHECKED] if options.check else types
    started = time.monotonic()
    # A process serves a few dozen types, since each leaves its modules in memory.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=50) as pool:
        each = pool.imap_unordered(partial(examine, whole=whole), types)
        rows = list(track(each, "model types", len(types), disable=not sys.stderr.isatty()))
    rows.sort(key=lambda row: str(row["type"]))
    report = {
        "transformers": transformers.__version__, "torch": torch.__version__, "seconds": time.monotonic() - started, "rows": rows,
    }  # fmt: skip
    if options.only:
        print(json.dumps(rows, indent=1))
        return
    print(json.dumps({"types": len(rows), **summary(rows), "seconds": round(time.monotonic() - started)}))
    if options.json:
        options.json.write_text(json.dumps(report))
    elif options.check:
        before = earlier(options.output.read_text())
        worse = {
            r["type"]: r["status"]
            for r in rows
            if (r["type"] in before and r["prune"] < int(before[r["type"]][4])) or r["status"] in ("WRONG", "CRASH")
        }
        # A machine that is busy with something else is no regression.
        lost = [name for name, status in worse.items() if status != "too slow"]
        print(
            f"worse than {options.output}: {', '.join(lost) or 'none'}; too slow this time: {', '.join(set(worse) - set(lost)) or 'none'}"
        )
        unsaved = {
            r["type"]: r["folder"]
            for r in rows
            if r.get("folder", "both") not in LOADS and r["type"] in before and before[r["type"]][6] in LOADS
        }
        print(f"folders that no longer load in both ways: {unsaved or 'none'}")
        wrong = {r["type"]: r["loss"] for r in rows if r["loss"].startswith("WRONG")}
        print(f"evaluate gives another loss than the model: {wrong or 'none'}")
        broken = {r["type"]: r["job"] for r in rows if BROKEN.search(r.get("job", ""))}
        print(f"the whole job ends in another error: {broken or 'none'}")
        new = [name for name in broken if name in before and not BROKEN.search(before[name][8])]
        sys.exit(1 if lost or wrong or unsaved or new else 0)
    else:
        options.output.write_text(table(report, [json.loads(path.read_text()) for path in options.others]))


if __name__ == "__main__":
    main()
