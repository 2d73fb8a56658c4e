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

import export_gguf
import smollm2

from headprune.app.data import load_parts
from headprune.app.documents import Cut, Metrics, Run
from headprune.app.models import dummy_input, load_model
from headprune.files import write_json
from headprune.trace import find_attention

ROOT = Path(__file__).parent.parent
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
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
    missing = subprocess.run(
        [python, "-c", "import headprune"], cwd="/", env=_clean(), capture_output=True, check=False
    )
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
    """A model that `headprune prune` made.

    Attributes:
        kind: One of `KINDS`.
        folder: With the model; ``metrics`` and ``run`` are what the run says of it.
    """

    model: str
    kind: str
    folder: Path
    metrics: Metrics
    run: Run

    @property
    def reported(self) -> dict[str, float]:
        """The metrics of the pruned model on the reporting part."""
        return self.metrics.budgets[0].pruned.metrics

    def exported(self, to: str) -> tuple[Path | None, str]:
        """The model for another engine, written by `headprune export`; None and the reason where that is refused."""
        file = self.folder.with_name(f"{self.folder.name}.{to}")
        if not file.exists():
            made = _headprune("export", self.folder, "--to", to, "-o", file, "--dtype", "float32")
            if made.returncode:
                return None, (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        return file, ""

    def examples(self) -> list[dict[str, Any]]:
        """The reporting part as it lies in the data: its texts and labels."""
        loaded = load_model(str(self.folder), device="cpu")
        parts = load_parts(self.run.options.data, loaded)
        assert self.run.parts.same(Cut.of(parts)), "the data is not what it was"
        lines = (Path(self.run.options.data.dataset) / f"{parts.report.split}.jsonl").read_text().splitlines()
        return [json.loads(lines[row]) for row in parts.report.rows]


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
        metrics = Metrics.read(output / "metrics.json")
        found.append(Made(model, kind, output / metrics.budgets[0].checkpoint, metrics, Run.read(output / "run.json")))
    return found


def _plans(work: Path, model: str, dense: Path) -> dict[str, Path]:
    """A plan file for every kind."""
    found = {kind: work / "plans" / f"{model}-{kind}.json" for kind in KINDS}
    if all(path.is_file() for path in found.values()):
        return found
    loaded = load_model(str(dense), device="cpu")
    layers = find_attention(loaded.model, dummy_input(loaded, 2, 8))

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
    for kind, drop in drops.items():
        write_json(found[kind], "plan", {"drop": {name: heads for name, heads in drop.items() if heads}})
    return found


def _smollm2(work: Path) -> tuple[Path, Path]:
    """SmolLM2's folder, and one of texts: IMDB's reviews."""
    folder, data = work / "SmolLM2-135M", work / "reviews"
    if not (data / "test.jsonl").is_file():
        model, tokenizer = export_gguf.load()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        reviews = smollm2._shuffled_reviews()
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
