"""A benchmark on a lent GPU, in parts: each is run once and stored, so that a second call goes on where the first was stopped.

``--work DIR`` holds one JSON file a part. ``--pack FILE`` is one file with all of them, read at the start and written after every part,
for machines that give back only a few files. A part that fails is written too, with its error, and tried again by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # of the code in saved folders
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout need not be installed

import torch
import transformers
from document import replace_section

import headprune as hp

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "gpu.md"
Found = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of a benchmark.

    Attributes:
        run: Gives what was found, as JSON holds it.
        told: What a document says of it, in lines.
        seconds: That it takes on a GPU, about; it is not begun when fewer are left.
    """

    name: str
    title: str
    run: Callable[[argparse.Namespace], Found]
    told: Callable[[Found], list[str]]
    seconds: float


def parser(about: str) -> argparse.ArgumentParser:
    """The options that both benchmarks have."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--work", type=Path, required=True, help="a folder, with a JSON file for each part that is done")
    made.add_argument("--pack", type=Path, help="one file with all parts, read first and written after every part")
    made.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    made.add_argument("--small", action="store_true", help="tiny models and few rounds: to try the script")
    made.add_argument("--only", nargs="+", help="names of parts")
    made.add_argument("--seconds", type=float, default=570, help="no part is begun that would end later")
    made.add_argument("--minilm", type=Path, help="the folder of minilm-rt, which holds its data too")
    made.add_argument(
        "--document", action="store_true", help="write the section of docs/gpu.md from what is there; run nothing"
    )
    return made


def run(parts: list[Part], options: argparse.Namespace, section: str, heading: str) -> None:
    """Run the parts that are missing, or write the document."""
    options.work.mkdir(parents=True, exist_ok=True)
    _unpack(options)
    if options.document:
        replace_section(DOCUMENT, section, "\n".join(_document(parts, options, heading)))
        return
    names = [part.name for part in parts]
    if unknown := set(options.only or ()) - set(names):
        sys.exit(f"no parts {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    end = time.monotonic() + options.seconds
    print(json.dumps(environment(options.device)), flush=True)
    for part in parts:
        file = options.work / f"{part.name}.json"
        done = file.exists() and "error" not in json.loads(file.read_text())
        if done or (options.only and part.name not in options.only):
            continue
        left = end - time.monotonic()
        if left < part.seconds and not options.small:
            print(f"{part.name}: not begun, {left:.0f} s are left and it takes about {part.seconds:.0f}", flush=True)
            continue
        _do(part, options, file)
    missing = [p.name for p in parts if not _known(options, p)]
    print(f"still to run: {', '.join(missing)}" if missing else "all parts are done", flush=True)


def _do(part: Part, options: argparse.Namespace, file: Path) -> None:
    start = time.monotonic()
    found: Found
    try:
        found = part.run(options)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    noted = {"seconds": round(time.monotonic() - start, 1), "environment": environment(options.device)}
    if taken := found.keys() & noted.keys():
        raise KeyError(f"The part {part.name} must not use the names {sorted(taken)}")
    found |= noted
    written = file.with_suffix(".part")
    written.write_text(json.dumps(found, indent=1))
    os.replace(written, file)
    if options.pack:
        every = {f.stem: json.loads(f.read_text()) for f in sorted(options.work.glob("*.json"))}
        options.pack.write_text(json.dumps(every))
    print(f"== {part.name}: {found['seconds']} s", flush=True)
    print("\n".join(_told(part, found)), flush=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _unpack(options: argparse.Namespace) -> None:
    if options.pack and options.pack.exists():
        for name, found in json.loads(options.pack.read_text()).items():
            if not (options.work / f"{name}.json").exists():
                (options.work / f"{name}.json").write_text(json.dumps(found))


def _known(options: argparse.Namespace, part: Part) -> Found | None:
    file = options.work / f"{part.name}.json"
    found: Found = json.loads(file.read_text()) if file.exists() else {"error": ""}
    return None if "error" in found else found


def _told(part: Part, found: Found) -> list[str]:
    return [f"**Failed**: {found['error']}"] if "error" in found else part.told(found)


def _document(parts: list[Part], options: argparse.Namespace, heading: str) -> list[str]:
    lines = [f"## {heading}", ""]
    places: list[str] = []
    for part in parts:
        file = options.work / f"{part.name}.json"
        if not file.exists():
            lines += [f"### {part.title}", "", "Not run yet.", ""]
            continue
        found = json.loads(file.read_text())
        lines += [f"### {part.title}", "", *_told(part, found), ""]
        about = found["environment"]
        places.append(
            f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, Python {about['python']}, "
            f"headprune {about['headprune']} (code {about['code']})"
        )
    lines.append(f"Measured on {'; '.join(dict.fromkeys(places)) or 'nothing yet'}.")
    return lines


def environment(device: str) -> Found:
    """Where this runs, and the GPU's clocks and power now."""
    from headprune.fingerprint import versions

    on_gpu = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(0) if on_gpu else f"the CPU ({platform.machine()}), to try the script",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "headprune": hp.__version__,
        "code": versions()[1],
        "gpu": gpu_state() if on_gpu else {},
        "load": os.getloadavg()[0],
    }


_ASKED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active", "driver_version")


def gpu_state() -> Found:
    """Clocks in MHz, power in W, temperature in °C, as nvidia-smi gives them; {} where it does not."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        line = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(_ASKED, (value.strip() for value in line.split(",")), strict=False))


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table; the first column is text, the others are numbers."""
    return [
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
