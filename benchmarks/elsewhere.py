"""What is tried where headprune is not installed: environments without it, and models that its command line prunes for them.

`clients.py` uses it. Everything lies under one work folder, so that a second run finds what is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smollm2
import torch
import transformers
from real import MINILM

import headprune as hp

ROOT = Path(__file__).parent.parent
BASE = ("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0")
ONNXRUNTIME, OPENVINO, LLAMA_CPP = "onnxruntime==1.32.0", "openvino==2026.4.1", "xllamacpp==2026.10.11549"
KINDS = ("uniform", "uneven", "emptied", "repaired")
MODELS = ("minilm-rt", "SmolLM2-135M")
# Enough to tell models apart, and little enough for two cores: -L is what repairs look at.
_SIZES = {
    "minilm-rt": ("-L", 64, "--report-limit", 400, "--max-length", 128, "-b", 8),
    "SmolLM2-135M": ("-L", 12, "--report-limit", 8, "--max-length", 24, "-b", 1),
}


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
    missing = subprocess.run([python, "-c", "import headprune"], cwd="/", env=_clean(), capture_output=True)
    assert missing.returncode, "headprune is installed there"
    done.write_text(json.dumps(list(packages)))
    return python


def run(python: Path, *arguments: object, threads: int = 1) -> subprocess.CompletedProcess[str]:
    """A command in an environment, apart from this checkout."""
    return subprocess.run(
        [str(python), *map(str, arguments)], cwd="/", env={**_clean(), "OMP_NUM_THREADS": str(threads)},
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A model that `headprune prune` made: of which model, one of `KINDS`, and its folder."""

    model: str
    kind: str
    folder: Path

    def exported(self, to: str) -> tuple[Path | None, str]:
        """The model for another engine, written by `headprune export`; None and the reason where that is refused."""
        file = self.folder.with_name(f"{self.folder.name}.{to}")
        if not file.exists():
            done = _headprune("export", self.folder, "--to", to, "-o", file, "--dtype", "float32")
            if done.returncode:
                return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return file, ""


def made(work: Path, model: str, minilm: Path = MINILM) -> list[Made]:
    """A model pruned in every way of `KINDS`, by the command line."""
    dense, data = (minilm, minilm / "data") if model == "minilm-rt" else _smollm2(work)
    found, plans = [], _plans(work, model, dense)
    for kind in KINDS:
        output = work / "runs" / f"{model}-{kind}"
        if not (output / "metrics.json").is_file():
            repair = [] if kind == "repaired" else ["--no-repair"]
            what = ["-d", data, "--plan", plans[kind], "-o", output, "-q", *_SIZES[model], *repair]
            done = _headprune("prune", dense, *what)
            if done.returncode:
                raise RuntimeError(done.stderr)
        found.append(Made(model, kind, next(p for p in output.glob("pruned-*") if p.is_dir() and not p.suffix)))
    return found


def _plans(work: Path, model: str, dense: Path) -> dict[str, Path]:
    """A plan file for every kind."""
    found = {kind: work / "plans" / f"{model}-{kind}.json" for kind in KINDS}
    if all(path.is_file() for path in found.values()):
        return found
    auto = (
        transformers.AutoModelForCausalLM if model != "minilm-rt" else transformers.AutoModelForSequenceClassification
    )
    layers = hp.find_attention(auto.from_pretrained(dense), {"input_ids": torch.ones(2, 8, dtype=torch.long)})

    def without(share: float, layer: Any) -> list[int]:
        return sorted(head for unit in layer.units[: round(share * len(layer.units))] for head in unit)

    uneven = {layer.name: without((layer.index % 3) / 3, layer) for layer in layers}
    middle, last = layers[len(layers) // 2], layers[-1]
    drops = {
        "uniform": {layer.name: without(1 / 3, layer) for layer in layers},
        "uneven": uneven,
        "emptied": {layer.name: list(range(layer.num_heads)) for layer in (middle, last)},
        "repaired": uneven | {middle.name: list(range(middle.num_heads))},
    }
    (work / "plans").mkdir(parents=True, exist_ok=True)
    for kind, drop in drops.items():
        hp.PruningPlan({name: heads for name, heads in drop.items() if heads}).save(found[kind])
    return found


def _smollm2(work: Path) -> tuple[Path, Path]:
    """SmolLM2's folder, and one of texts: IMDB's reviews."""
    folder, data = work / "SmolLM2-135M", work / "reviews"
    if not (data / "test.jsonl").is_file():
        model, tokenizer = smollm2.load(digits=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        reviews = smollm2.reviews()
        data.mkdir(exist_ok=True)
        for split in ("train", "validation", "test"):
            rows = [json.dumps({"text": next(reviews)[:300]}) for _ in range(20)]
            (data / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder, data


def _headprune(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line of this checkout."""
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _clean() -> dict[str, str]:
    """An environment that leads to no checkout of headprune, and asks no hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
