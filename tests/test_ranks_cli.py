"""Commands that several processes run together, as torchrun starts them: one prints and writes, and the results are one's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from tests.support.folders import common, sentences, tokenizer, write_jsonl
from tests.support.interrupted import ROOT, Processes
from tests.support.zoo import randomise

pytestmark = pytest.mark.slow
COSTS = {
    "seconds",
    "passes",
    "latency",
    "time",
    "generation",
    "environment",
    "when",
    "resumed",
    "commands",
    "command",
    "checksum",
    "checksums",
}
PRUNE = ["prune", "m", "-d", "d", "-k", "4", "-k", "2", "-b", "4", "-m", "gradient", "-m", "ablation"]
TUNE = ["finetune", "reports/m-1/pruned-4", "--epochs", "2", "--learning-rate", "1e-3", "-o", "tuned"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model ``m`` with two layers of four heads, and data ``d`` whose last batches are ragged."""
    folder = tmp_path_factory.mktemp("tiny") / "w"
    config = tf.BertConfig(**common(hidden_size=16, intermediate_size=8))
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(folder / "m")
    tokenizer().save_pretrained(folder / "m")
    for split, count, seed in (("train", 13, 1), ("validation", 9, 2), ("test", 11, 3)):
        write_jsonl(folder / "d" / f"{split}.jsonl", sentences(count, seed))
    return folder


@pytest.fixture(scope="module")
def alone(processes: Processes, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has pruned and trained."""
    here = tmp_path_factory.mktemp("alone") / "w"
    shutil.copytree(tiny, here)
    for command in (PRUNE, TUNE):
        (done,) = processes.run({"cwd": str(here), "size": 1, "arguments": command})
        assert done["status"] == 0, done["stderr"]
    return here


def same(a: Any, b: Any, where: str) -> None:
    """Two documents say the same but for times, numbers within 1e-6."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() - COSTS == b.keys() - COSTS, where
        for key in a.keys() - COSTS:
            same(a[key], b[key], f"{where} {key}")
    elif isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b), where
        a, b = ([v for v in each if not (isinstance(v, str) and "forward passes" in v)] for each in (a, b))
        for i, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{where} {i}")
    elif isinstance(a, float) and isinstance(b, float):
        assert a == pytest.approx(b, abs=1e-6), where
    else:
        assert a == b, where


def same_folders(one: Path, other: Path, most: float = 1e-6) -> None:
    """Documents that say the same, checkpoints within ``most``, and the same files."""
    names = [str(p.relative_to(one)) for p in sorted(one.rglob("*")) if p.is_file()]
    assert names == [str(p.relative_to(other)) for p in sorted(other.rglob("*")) if p.is_file()]
    for name in names:
        if name.endswith(".json"):
            same(json.loads((one / name).read_text()), json.loads((other / name).read_text()), name)
        if name.endswith(".safetensors"):
            a, b = load_file(one / name), load_file(other / name)
            assert a.keys() == b.keys()
            for key, value in a.items():
                assert torch.allclose(value.double(), b[key].double(), rtol=0, atol=most, equal_nan=True), (name, key)


@pytest.mark.parametrize("size", [2, 3])
def test_what_several_processes_prune_and_train(
    processes: Processes, tiny: Path, alone: Path, tmp_path: Path, size: int
) -> None:
    here = tmp_path / "w"
    shutil.copytree(tiny, here)
    first, *others = processes.run({"cwd": str(here), "size": size, "arguments": PRUNE})
    assert [d["status"] for d in (first, *others)] == [0] * size, first["stderr"]
    assert f"{size} processes share out the work." in first["stderr"]
    assert "Report: reports/m-1/report.md" in first["stdout"]
    assert [(d["stdout"], d["stderr"]) for d in others] == [("", "")] * (size - 1)
    same_folders(alone / "reports", here / "reports")
    first, *others = processes.run({"cwd": str(here), "size": size, "arguments": TUNE})
    assert [d["status"] for d in (first, *others)] == [0] * size, first["stderr"]
    one, several = (json.loads((folder / "tuned" / "finetune.json").read_text()) for folder in (alone, here))
    assert one["training"]["best"] == several["training"]["best"]
    assert len(one["training"]["history"]) == 3
    for before, after in zip(one["training"]["history"], several["training"]["history"], strict=True):
        assert after == pytest.approx(before, abs=1e-5)  # of steps in float32


@pytest.mark.parametrize(("lost", "stop", "size"), [(1, 2, 3), (2, 1, 1), (0, 3, 2), (0, 9, 3)])
def test_a_lost_rank_ends_the_run_in_a_line_and_a_rerun_goes_on(
    processes: Processes, tiny: Path, alone: Path, tmp_path: Path, lost: int, stop: int, size: int
) -> None:
    """With another number of processes; whichever rank is killed, before whichever of its files."""
    here = tmp_path / "w"
    shutil.copytree(tiny, here)
    done = processes.run(
        {"cwd": str(here), "size": 3 if size != 3 else 2, "arguments": PRUNE, "rank": lost, "stop": stop}
    )
    assert done[lost]["status"] == -9
    left = [d for rank, d in enumerate(done) if rank != lost]
    assert {d["status"] for d in left} == {1}
    said = [d["stderr"] for d in left]
    line = f"headprune: Rank {lost} is gone, so the others cannot continue. What was finished is kept: run the same command again"
    assert sum(text.count(line) for text in said) == 1, said
    assert not any("Traceback" in text for text in said)
    done = processes.run({"cwd": str(here), "size": size, "arguments": PRUNE})
    assert [d["status"] for d in done] == [0] * size, done[0]["stderr"]
    same_folders(alone / "reports", here / "reports")


def test_a_lost_rank_ends_the_training_in_a_line_and_a_rerun_goes_on(
    processes: Processes, tiny: Path, alone: Path, tmp_path: Path
) -> None:
    """The first one, while the others average gradients; then one process alone continues."""
    here = tmp_path / "w"
    shutil.copytree(alone, here)
    shutil.rmtree(here / "tuned")
    first, *others = processes.run({"cwd": str(here), "size": 3, "arguments": TUNE, "rank": 0, "stop": 3})
    assert first["status"] == -9
    assert {d["status"] for d in others} == {1}
    said = "".join(d["stderr"] for d in others)
    assert said.count("headprune: Rank 0 is gone, so the others cannot continue.") == 1, said
    assert "Traceback" not in said
    (again,) = processes.run({"cwd": str(here), "size": 1, "arguments": TUNE})
    assert again["status"] == 0, again["stderr"]
    assert "Continuing from step" in again["stderr"]
    one, several = (json.loads((folder / "tuned" / "finetune.json").read_text()) for folder in (alone, here))
    for before, after in zip(one["training"]["history"], several["training"]["history"], strict=True):
        assert after == pytest.approx(before, abs=1e-5)


def test_a_mistake_is_told_once(processes: Processes, tiny: Path, tmp_path: Path) -> None:
    here = tmp_path / "w"
    shutil.copytree(tiny, here)
    for command, status in (
        (["score", "m", "-d", "nowhere.jsonl"], 1),
        (["score", "m", "-d", "d", "-o", "m"], 1),
        (["score", "m", "--nonsense"], 2),
    ):
        first, other = processes.run({"cwd": str(here), "size": 2, "arguments": command})
        assert (first["status"], other["status"]) == (status, status)
        assert first["stderr"]
        assert "Traceback" not in first["stderr"]
        assert (other["stdout"], other["stderr"]) == ("", "")


def test_other_commands_are_run_once(processes: Processes, tiny: Path) -> None:
    first, other = processes.run({"cwd": str(tiny), "size": 2, "arguments": ["methods"]})
    assert "ablation" in first["stdout"]
    assert (first["status"], other["status"], other["stdout"]) == (0, 0, "")


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],  # on a port that is free
        [
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "--main_process_port",
            "0",
        ],  # which is torchrun, on a CPU too
        ["accelerate.commands.launch", "--cpu", "--num_processes", "2"],  # which starts one
    ],
    ids=["torchrun", "accelerate", "accelerate on the CPU"],
)
def test_launchers(tiny: Path, tmp_path: Path, launcher: list[str]) -> None:
    here = tmp_path / "w"
    shutil.copytree(tiny, here)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *launcher, "-m", "headprune", "score", "m", "-d", "d", "-m", "gradient"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: reports/m-1/report.md") == 1
    said = " ".join(done.stderr.split())
    if "--cpu" in launcher:
        assert "accelerate launch --cpu starts one process" in said
    else:
        assert said.count("2 processes share out the work.") == 1
