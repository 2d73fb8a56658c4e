"""Whether headprune still gives the very same results: writes them down, or compares with what was written.

    python tools/golden.py compare                          # with tests/golden.json; about three minutes
    python tools/golden.py write                            # after a change of results that CHANGELOG tells
    python tools/golden.py compare --only gpt2 llama        # these alone

A result is a score, an order's plans, a repaired weight (as a hash), a metric or a figure of a report, never a time. On the kind of machine
that it was written on, every result must be the same to the last bit. On others the sum of two numbers may be rounded otherwise: there,
numbers may differ by a thousandth, and hashes, and what was trained, are not compared. Without minilm-rt beside the checkout, its
results are left aside. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
GOLDEN = ROOT / "tests" / "golden.json"
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
sys.path.insert(0, str(ROOT))

import torch
import transformers
from torch import nn

import headprune as hp
from headprune import scoring
from tests.support import saved_by_transformers, textbook, zoo

Results = dict[str, Any]
Batches = list[Any]
TOLERANCE = 1e-3
TRAINED = "demo"  # its model is trained anew, so that what is rounded otherwise grows


def hashed(model: nn.Module) -> str:
    """Of all weights, by name."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return "sha256:" + found.hexdigest()[:16]


def measured(model: nn.Module, batches: Batches, loss_fn: Any) -> Results:
    return dict(hp.evaluate(model, batches, loss_fn=loss_fn).metrics)


def pipeline(make: Callable[[], tuple[nn.Module, Batches, Batches]], keeps: list[int], loss_fn: Any = None) -> Results:
    """Scores by every method, searched plans, and each plan repaired, pruned, saved and loaded again."""
    model, batches, other = make()
    found: Results = {"weights": hashed(model), "dense": measured(model, other, loss_fn), "scores": {}}
    settings = scoring.Settings(permutations=4, steps=8)
    for method in sorted(scoring.METHODS):
        scores = hp.score(model, batches, method, loss_fn=loss_fn, settings=settings)
        found["scores"][method] = {
            "values": {name: value.tolist() for name, value in scores.values.items()},
            "stderr": {name: value.tolist() for name, value in scores.stderr.items()},
        }
    for plan in hp.search(model, batches, keeps, choose=other, loss_fn=loss_fn):
        pruned = make()[0]
        repair = hp.repair(pruned, plan, batches, choose=other)
        did: Results = {"drop": plan.drop, "method": plan.method, "steps": [trial.to_json() for trial in repair.trials]}
        did["repaired"] = hashed(pruned)
        hp.prune(pruned, plan)
        did |= {"pruned": hashed(pruned), "metrics": measured(pruned, other, loss_fn)}
        if isinstance(pruned, transformers.PreTrainedModel):
            with tempfile.TemporaryDirectory() as folder:
                hp.save(pruned, Path(folder) / "saved")
                did["loaded"] = hashed(hp.load(Path(folder) / "saved"))
        found[f"keep {plan.kept}"] = did
    return found


def rows(name: str) -> Callable[[], tuple[nn.Module, Batches, Batches]]:
    """One of the zoo's models with labelled batches, and others."""

    def make() -> tuple[nn.Module, Batches, Batches]:
        model, example = getattr(zoo, name)()
        draws = [
            zoo.text(rows=4, length=12, seed=s, decoder=5 if "decoder_input_ids" in example else 0) for s in range(8)
        ]
        batches = [zoo.labelled(model, draw, seed=i) for i, draw in enumerate(draws)]
        return model, batches[:5], batches[5:]

    return make


def d2l() -> Results:
    """The book's class, by pairs and a loss of its own."""

    def make() -> tuple[nn.Module, Batches, Batches]:
        model, _ = textbook.made("d2l without lengths")
        generator = torch.Generator().manual_seed(3)
        batches = [(textbook.hidden(seed), torch.randint(0, 3, (3,), generator=generator)) for seed in range(8)]
        return model, batches[:5], batches[5:]

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, labels, reduction="none")

    return pipeline(make, [6, 3], loss)


def command(folder: str, *words: str) -> None:
    """A headprune command, run in a folder."""
    line = [sys.executable, "-m", "headprune", *words, "-o", "run", "-q"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"headprune {' '.join(words)} failed:\n{done.stdout}{done.stderr}")


def of_report(folder: Path) -> Results:
    """The figures of a run folder, without times."""
    scores, metrics = (json.loads((folder / name).read_text()) for name in ("scores.json", "metrics.json"))
    return {
        "scores": {s["method"]: {"values": s["values"], "stderr": s["stderr"]} for s in scores["scores"]},
        "dense": metrics["dense"]["metrics"],
        "compared": metrics["planning"]["compared"],
        "curve": [{k: v for k, v in point.items() if "second" not in k} for point in metrics["curve"]],
        **{
            budget["name"]: {
                key: budget.get(key) for key in ("kept", "method", "drop", "change", "random", "over_random")
            }
            | {"metrics": budget["pruned"]["metrics"]}
            for budget in metrics["budgets"]
        },
        **{f"saved {path.parent.name}": sha(path) for path in sorted(folder.glob("**/model.safetensors"))},
        "heads": [
            [{k: h[k] for k in ("entropy", "distance", "sink", "role")} for h in layer["heads"]]
            for layer in json.loads((folder / "heads.json").read_text())["layers"]
        ],
    }


def sha(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def demo() -> Results:
    """All of the demo, by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command(folder, "demo")
        return of_report(Path(folder) / "run")


def minilm() -> Results:
    """A real BERT, by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        parts = (
            "--split",
            "train",
            "--choose-split",
            "validation",
            "--report-split",
            "test",
            "--limit",
            "128",
            "--report-limit",
            "128",
        )
        command(folder, "prune", str(MINILM), "-d", f"{MINILM}/data", *parts, "--keep", "36", "--effort", "low")
        return of_report(Path(folder) / "run")


def older_folders() -> Results:
    """Folders in the repository, as earlier versions saved them, loaded by this one."""
    with tempfile.TemporaryDirectory() as unpacked:
        homes = [
            ROOT / "tests" / "support" / "saved_by_0_1",
            *sorted(saved_by_transformers.unpacked(Path(unpacked)).iterdir()),
        ]
        return {
            f"{home.name}/{folder.name}": hashed(hp.load(folder))
            for home in homes
            for folder in sorted(home.iterdir())
            if (folder / "headprune.json").is_file()
        }


SUBJECTS: dict[str, Callable[[], Results]] = {
    "gpt2": lambda: pipeline(rows("gpt2"), [6, 3]),
    "llama": lambda: pipeline(rows("llama"), [6, 4]),
    "t5": lambda: pipeline(rows("t5"), [12, 6]),
    "d2l": d2l,
    "older folders": older_folders,
    "minilm": minilm,
    TRAINED: demo,
}


def machine() -> str:
    """What decides how sums are rounded: BLAS libraries choose their kernels by the processor, whose name alone may be any Xeon's."""
    cpu = Path("/proc/cpuinfo")
    told = dict(re.findall(r"(?m)^(.*\S)\s*: (.+)$", cpu.read_text())) if cpu.is_file() else {}
    keys = ("model name", "cpu family", "model", "stepping")
    maker = ", ".join(f"{key} {told[key]}" for key in keys if key in told) or platform.processor()
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{platform.system()} {platform.machine()}, {maker}, {kernels}, torch {torch.__version__}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that is not a mapping or a list."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}/{key}")
    elif isinstance(value, list):
        yield f"{path}/length", len(value)
        for i, each in enumerate(value):
            yield from leaves(each, f"{path}/{i}")
    elif value is not None:  # a key that says nothing is as good as none
        yield path, value


def same(was: Any, now: Any, to_the_bit: bool) -> bool:
    if was != was and now != now:  # NaN
        return True
    if to_the_bit or not isinstance(was, str | float):
        return bool(was == now)
    if isinstance(was, float):
        return isinstance(now, float) and math.isclose(was, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return was.startswith("sha256:") or was == now


def differences(was: Results, now: Results, to_the_bit: bool) -> list[str]:
    before, after = dict(leaves(was)), dict(leaves(now))
    return [
        f"{path}: {before.get(path, 'nothing')} before, {after.get(path, 'nothing')} now"
        for path in dict.fromkeys([*before, *after])
        if path not in before or path not in after or not same(before[path], after[path], to_the_bit)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="where the results are")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    known: Results = json.loads(options.golden.read_text()) if options.golden.is_file() else {"results": {}}
    to_the_bit, failed = known.get("machine") == machine(), False
    for name in options.only:
        if name == "minilm" and not MINILM.is_dir():
            print("minilm: left aside, ../shared/real/minilm-rt is not there")
            continue
        if options.what == "compare" and name == TRAINED and not to_the_bit:
            print(f"{name}: left aside on another kind of machine ({machine()}; written on {known.get('machine')})")
            continue
        now = json.loads(json.dumps(SUBJECTS[name]()))
        if options.what == "write":
            known["results"][name] = now
            print(f"{name}: {len(list(leaves(now)))} results written", flush=True)
            continue
        differ = differences(known["results"][name], now, to_the_bit)
        failed |= bool(differ)
        print(f"{name}: {f'{len(differ)} DIFFER' if differ else 'the same'} of {len(list(leaves(now)))}", flush=True)
        print("".join(f"  {line}\n" for line in differ[:20]), end="")
    if options.what == "write":
        known["machine"] = machine()
        options.golden.write_text(json.dumps(known, indent=1) + "\n")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
