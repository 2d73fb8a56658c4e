"""What is tried where headprune is not installed: environments without it, and models that its command line prunes for them.

`clients.py` and `without_headprune.py` use it. Everything lies under one work folder, so that a second run finds what is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import export_files
import smollm2
import torch
import transformers

import headprune as hp
from headprune.plans import PruningPlan

ROOT = Path(__file__).parent.parent
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
BASE = ("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0")
ONNXRUNTIME, OPENVINO, LLAMA_CPP = "onnxruntime==1.32.0", "openvino==2026.4.1", "xllamacpp==2026.10.11549"
KINDS = ("uniform", "uneven", "emptied", "repaired")
MODELS = ("minilm-rt", "SmolLM2-135M")
WAYS = {"transformers": "", "onnxruntime": "onnx", "openvino": "openvino", "llama.cpp": "gguf"}
"""To run a model, with the format that `headprune export` writes for each."""
LENGTHS = {"minilm-rt": 128, "SmolLM2-135M": 24}  # tokens of a text, at most
# Enough to tell models apart, and little enough for two cores: -L is what repairs look at.
_SIZES = {"minilm-rt": ("-L", 64, "-b", 8), "SmolLM2-135M": ("-L", 12, "-b", 1)}


def environment(work: Path, name: str, packages: tuple[str, ...], over: Path | None = None) -> Path:
    """The Python of an environment with just these packages, and with those of the environment ``over`` which it stands on."""
    home = work / "environments" / name
    python, done = home / "bin" / "python", home / "installed.json"
    if done.is_file() and json.loads(done.read_text()) == list(packages):
        return python
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    if over is not None:
        own, other = (next((p / "lib").glob("python*/site-packages")) for p in (home, over.parent.parent))
        (own / "over.pth").write_text(f"{other}\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    assert run(python, "-c", "import headprune").returncode, "headprune is installed there"
    done.write_text(json.dumps(list(packages)))
    return python


def run(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in an environment that leads to no checkout of headprune, and asks no hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, cwd="/", env=kept, capture_output=True, text=True, errors="replace", check=False)


def reason(failed: subprocess.CompletedProcess[str]) -> str:
    """The last line of what a command said, as a cell of a table."""
    last = (failed.stderr.strip().splitlines() or ["no reason given"])[-1]
    return last.removeprefix("headprune: ")[:160].replace("|", "\\|")


@dataclass(frozen=True)
class Pruned:
    """A model that `headprune prune` made.

    Attributes:
        kind: One of `KINDS`.
        folder: With the model.
        reported: The metrics that the run says it has on the reporting part.
        examples: The reporting part as it lies in the data: its texts and labels.
    """

    model: str
    kind: str
    folder: Path
    reported: dict[str, float]
    examples: list[dict[str, Any]]

    def exported(self, to: str) -> tuple[Path, str]:
        """The model as `headprune export` writes it for another engine, and why it does not."""
        file = self.folder.with_name(f"{self.folder.name}.{to}")
        if file.exists():
            return file, ""
        done = _headprune("export", self.folder, "--to", to, "-o", file, "--dtype", "float32")
        return file, reason(done) if done.returncode else ""

    def evaluated(self, python: Path, way: str, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """What `evaluate_elsewhere.py` says, or ``{"why": …}`` where it says nothing."""
        file, why = self.exported(WAYS[way]) if WAYS[way] else (self.folder, "")
        if why:
            return {"why": f"refused: {why}"}
        given, child = self.folder.with_name("given.json"), Path(__file__).with_name("evaluate_elsewhere.py")
        given.write_text(json.dumps(examples), encoding="utf-8")
        done = run(python, child, way, file, self.folder, given, LENGTHS[self.model])
        return {"why": f"**fails**: {reason(done)}"} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def pruned(work: Path, model: str) -> list[Pruned]:
    """A model pruned in every way of `KINDS`, by the command line."""
    dense, data = work / model, work / f"{model}-data"
    if not (data / "test.jsonl").is_file():
        _write(model, dense, data)
    models = []
    for kind, plan in _plans(work, dense).items():
        output = work / "runs" / f"{model}-{kind}"
        if not (output / "metrics.json").is_file():
            more = (*_SIZES[model], "--max-length", LENGTHS[model], *([] if kind == "repaired" else ["--no-repair"]))
            done = _headprune("prune", dense, "-d", data, "--plan", plan, "-o", output, "-q", *more)
            if done.returncode:
                raise RuntimeError(done.stderr)
        (budget,) = json.loads((output / "metrics.json").read_text())["budgets"]
        examples = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
        models.append(Pruned(model, kind, output / budget["checkpoint"], budget["pruned"]["metrics"], examples))
    return models


def _write(model: str, dense: Path, data: Path) -> None:
    """The dense model's folder, and one of data."""
    data.mkdir(parents=True)
    if model == "minilm-rt":
        dense.symlink_to(MINILM)
        rows = {file.stem: file.read_text().splitlines()[:400] for file in (MINILM / "data").glob("*.jsonl")}
    else:
        for part in export_files.load():
            part.save_pretrained(dense)
        texts = smollm2._shuffled_reviews()
        counts = {"train": 20, "validation": 20, "test": 8}
        rows = {s: [json.dumps({"text": next(texts)[:300]}) for _ in range(n)] for s, n in counts.items()}
    for split, lines in rows.items():
        (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def _plans(work: Path, dense: Path) -> dict[str, Path]:
    """A plan file for every kind."""
    kind = "SequenceClassification" if "minilm" in dense.name else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(dense)
    layers = hp.find_attention(model, {"input_ids": torch.tensor([[5, 6, 7, 8]])})

    def without(share: float, layer: Any) -> list[int]:
        return sorted(head for unit in layer.units[: round(share * len(layer.units))] for head in unit)

    uneven = {layer.name: without((layer.index % 3) / 3, layer) for layer in layers}
    empty = {layer.name: list(range(layer.num_heads)) for layer in (layers[len(layers) // 2], layers[-1])}
    drops = {"uniform": {layer.name: without(1 / 3, layer) for layer in layers}, "uneven": uneven, "emptied": empty}
    drops["repaired"] = uneven | dict([*empty.items()][:1])
    files = {kind: work / "plans" / f"{dense.name}-{kind}.json" for kind in KINDS}
    for kind, file in files.items():
        PruningPlan({name: heads for name, heads in drops[kind].items() if heads}).save(file)
    return files


def _headprune(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line of this checkout."""
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
