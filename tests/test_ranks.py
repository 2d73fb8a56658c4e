"""Processes that share out the work: the same results as one, to the bit or nearly; and nobody waits for ever."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file

import headprune as hp
from headprune import parallel
from tests.support import shared
from tests.support.commands import run
from tests.support.folders import tiny_world
from tests.support.interrupted import ROOT, Processes, without_costs


def numbers(document: Any) -> Any:
    return json.loads(json.dumps(document))  # as a file would hold it


# -- alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [None, [3.0, 1, 1, 4, 1, 5, 9, 2, 6]])
@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_every_task_is_done_once_and_nobody_has_much_more_to_do(size: int, costs: list[float] | None) -> None:
    parts = parallel.shares(9, size, costs)
    assert sorted(i for own in parts for i in own) == list(range(9))
    assert all(own == sorted(own) for own in parts)
    loads = [sum((costs or [1.0] * 9)[i] for i in own) for own in parts]
    assert max(loads) - min(loads) <= max(costs or [1.0])


def test_what_is_no_accelerator_is_refused() -> None:
    model, batches = shared.small()
    with pytest.raises(hp.HeadPruneError, match="accelerator= is a str"):
        hp.score(model, batches, "gradient", accelerator="cpu")  # type: ignore[arg-type]


class RowError(hp.HeadPruneError):
    """Made in another way than its message says."""

    def __init__(self, row: int, batch: object) -> None:
        super().__init__(f"Row {row} is wrong.", f"Not so in {batch}.")


OTHERS = [
    hp.HeadPruneError("What is wrong.", "What to try."),
    OSError(errno.ENOSPC, "No space left on device", "/data/part.npy"),  # which file it was got lost
    KeyError("labels"),
]


@pytest.mark.parametrize("error", [*OTHERS, RowError(3, "others")], ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: Exception) -> None:
    """Or, where its class is made otherwise, says the same."""
    there = pickle.loads(pickle.dumps(parallel._Failure(error))).error
    kind = hp.HeadPruneError if isinstance(error, RowError) else type(error)
    assert (type(there), str(there), getattr(there, "hint", "")) == (kind, str(error), getattr(error, "hint", ""))
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("many")
    assert "1 validation error for int" in str(pickle.loads(pickle.dumps(parallel._Failure(caught.value))).error)


@pytest.mark.parametrize(("names", "expected"), [
    ({}, None), ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, (1, 3, 0)),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4, 0)), ({"WORLD_SIZE": "1"}, None),
])  # fmt: skip
def test_what_launchers_say(monkeypatch: pytest.MonkeyPatch, names: dict[str, str], expected: Any) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", **names}.items():
        monkeypatch.setenv(name, value)
    assert parallel.place() == expected


def test_half_of_what_launchers_say_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(hp.HeadPruneError, match="torchrun"):
        parallel.place()


# -- together ----------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux tells a process's threads there")
def test_no_thread_of_gloos_outlives_the_ranks(processes: Processes, tmp_path: Path) -> None:
    """It released tensors while the interpreter ended, and one run in ten of `torchrun … score` aborted after all its results."""
    assert processes.call(tmp_path, 2, "tests.support.shared:threads_left") == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_what_ranks_do_together(processes: Processes, tmp_path: Path, size: int) -> None:
    """Results in order, from whoever made them; sums; the first failure is raised in all, and they can go on."""
    kinds = ["order", "sums", "fails", "strange", "asked"]
    results = processes.call(tmp_path, size, "tests.support.shared:together", kinds=kinds)
    for rank, (order, sums, fails, strange, (refusal, folder)) in enumerate(results):
        in_turn, by_cost, none = order
        assert order == results[0][0]
        assert (in_turn, [i for i, *_ in by_cost], none) == ([(i, i % size, 1) for i in range(7)], list(range(7)), [])
        assert {other for _, other, _ in by_cost[:6]} == set(range(1, size))  # rank 0 has the one that costs most
        whole, part, gathered, first = sums
        assert torch.equal(whole, torch.full((3, 2), size * (size + 1) / 2, dtype=torch.float64))
        assert torch.equal(part, whole[:, 1])
        assert (gathered, first) == (list(range(size)), 0)
        assert fails == ("Task 2 fails.", "Give it up.", list(range(size)))
        # A class that others do not know is told in words.
        assert strange == ("" if rank == 1 else "RuntimeError: ") + "StrangeError: so be it"
        # A fine-tuning whose ranks had other learning rates trained to the end, and then asked to be reported.
        assert refusal.startswith("Rank 1 was given options other than rank 0's.")
        assert not folder


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "status", "message"), [
    ("alone", 70, "Only here. Look there."), ("steps", 0, "The ranks are out of step: rank 0 is at “other”"),
    ("gone", -9, "Rank 1 is gone, so the others cannot continue. What was finished is kept"),
])  # fmt: skip
def test_one_rank_ends_the_others(processes: Processes, tmp_path: Path, kind: str, status: int, message: str) -> None:
    """One that fails, calls something else, or is killed: the others say so, and wait for nobody."""
    call = {"size": 3, "call": "tests.support.shared:together", "given": {"kinds": [kind]}}
    done = processes.run({"cwd": str(tmp_path), **call})
    assert [d["status"] for d in done] == [0, status, 0]
    assert done[0]["waited"] < 30
    for rank in (0, 2):
        assert torch.load(tmp_path / f"given-{rank}.pt")[0].startswith(message)


# -- scores ------------------------------------------------------------------------------------

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("gradient", {}), ("ablation", {}), ("ablation", {"examples": 7, "keep": 4}), ("ablation", {"count": 2}), ("mean-ablation", {}),
    ("resample-ablation", {}), ("shapley", {"permutations": 20}), ("integrated-gradients", {}), ("l0", {"steps": 20}),
    ("entropy", {}), ("output-norm", {}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_scores_are_those_of_one_process_to_the_bit(processes: Processes, tmp_path: Path, size: int) -> None:
    """Also where there are fewer batches than ranks, which are shared by layers then; by time they are alike on all ranks."""
    one = numbers(shared.scored(METHODS))
    by_time = ("ablation", {"seconds": 0.05, "keep": 4})
    results = processes.call(tmp_path, size, "tests.support.shared:scored", methods=[*METHODS, by_time])
    for *scores, timed in results:
        assert numbers(scores) == one
        assert numbers(timed) == numbers(results[0][-1])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [(1, 5), (2, 5), (3, 5)])
def test_a_killed_rank_and_another_number_of_them(processes: Processes, tmp_path: Path, size: int, count: int) -> None:
    """What three ranks had finished when one was killed is used by however many come after."""
    one = numbers(shared.scores_by("ablation", count=count))
    given = {"methods": [("ablation", {"count": count, "work": str(tmp_path / "work")})]}
    call = {"cwd": str(tmp_path), "size": 3, "call": "tests.support.shared:scored", "given": given}
    done = processes.run({**call, "rank": 2, "stop": 1})
    assert [d["status"] for d in done] in ([70, -9, 70], [70, 70, -9])
    assert all("is gone, so the others cannot continue." in d["stderr"] for d in done if d["status"] == 70)
    assert list((tmp_path / "work").rglob("*.part"))
    for (scores,) in processes.call(tmp_path, size, "tests.support.shared:scored", **given):
        assert numbers(scores) == one


# -- search, repair and evaluation ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), [("auto", 2), ("greedy", 3)])
def test_plans_repair_and_evaluation_are_those_of_one_process(
    processes: Processes, tmp_path: Path, strategy: str, size: int
) -> None:
    one = shared.pruned(strategy)
    assert any(trial["kept"] for trial in one["repair"]["trials"])
    for result in processes.call(tmp_path, size, "tests.support.shared:pruned", strategy=strategy):
        passes = result["repair"]["passes"]
        assert (result["size"], result["plans"], passes) == (size, one["plans"], one["repair"]["passes"])
        for name in ("weights", "losses"):
            torch.testing.assert_close(result[name], one[name], rtol=0, atol=1e-6)
        assert result["metrics"] == pytest.approx(one["metrics"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "options"), [
    (2, {}), (3, {"dropout": 0.0, "alpha": 1.0, "hidden": True}), (3, {"alpha": 0.0, "steps": 5}),
], ids=["dropout", "hidden states", "labels alone"])  # fmt: skip
def test_a_training_is_that_of_one_process(processes: Processes, tmp_path: Path, size: int, options: Any) -> None:
    """Whatever the last batch has, and with the same dropout. Weights may differ where a gradient is zero but for rounding, as
    a key's bias has: Adam divides by its size."""
    one = shared.finetuned(**options, work=str(tmp_path / "one"))
    for result in processes.call(tmp_path, size, "tests.support.shared:finetuned", **options, work="work"):
        assert (result["largest"], result["best"]) == (6 / size, one["best"])
        assert [pytest.approx(each, abs=1e-6) for each in one["history"]] == list(result["history"])
        assert ((result["weights"] - one["weights"]).abs() > 1e-6).double().mean() < 0.01
    assert one["moved"] > 1e-4 or not one["best"]


# -- an Accelerator ------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_accelerator_shares_out_and_nothing_else_does(processes: Processes, tmp_path: Path) -> None:
    call = "tests.support.shared:accelerated"
    one = numbers(shared.accelerated("scores")[0])
    for scores, metrics in processes.call(tmp_path, 2, call, what="scores"):
        assert numbers(scores) == one
        assert set(metrics) >= {"loss", "accuracy"}
    calls = processes.call(tmp_path, 2, call, what="nothing")
    assert calls[0] == calls[1] == shared.accelerated("nothing")
    for said in processes.call(tmp_path, 2, call, what="other"):
        assert "Rank 1 was given batches other than rank 0's." in said
    for said in processes.call(tmp_path, 2, call, what="wrapped"):
        assert "accelerator.unwrap_model" in said


def test_accelerate_on_a_cpu_starts_one_process(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    for name, value in {"ACCELERATE_USE_CPU": "1", "MASTER_PORT": "1", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    told = run("score", "m", "-d", "d", "-m", "weight-norm", "--dry-run").stderr
    assert "accelerate launch --cpu starts one process" in " ".join(told.split())


# -- commands ------------------------------------------------------------------------------------

PRUNE = ["prune", "m", "-d", "d", "-k", "4", "-k", "2", "-b", "4", "-m", "gradient", "-m", "ablation"]
TUNE = ["finetune", "reports/m-1/pruned-4", "--epochs", "2", "--learning-rate", "1e-3", "-o", "tuned"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model ``m`` with two layers of four heads, and data ``d`` whose last batches are ragged."""
    return tiny_world(tmp_path_factory.mktemp("tiny") / "w", (13, 9, 11))


@pytest.fixture
def here(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(tiny, tmp_path / "w"))


@pytest.fixture(scope="module")
def alone(processes: Processes, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has pruned and trained."""
    here = tmp_path_factory.mktemp("alone") / "w"
    shutil.copytree(tiny, here)
    for command in (PRUNE, TUNE):
        (done,) = processes.run({"cwd": str(here), "size": 1, "arguments": command})
        assert done["status"] == 0, done["stderr"]
    return here


def leaves(value: Any, where: str = "") -> dict[str, Any]:
    """Every text and number of a document, by its place."""
    if not value or not isinstance(value, dict | list):
        return {where: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, each in pairs for k, v in leaves(each, f"{where} {key}").items()}


def same_folders(one: Path, other: Path, most: float = 1e-6) -> None:
    """Documents that say the same, checkpoints within ``most``, and the same files."""
    names = [str(p.relative_to(one)) for p in sorted(one.rglob("*")) if p.is_file()]
    assert names == [str(p.relative_to(other)) for p in sorted(other.rglob("*")) if p.is_file()]
    for name in names:
        if name.endswith(".json"):
            a, b = (leaves(without_costs(json.loads((folder / name).read_text()))) for folder in (one, other))
            assert a == {k: pytest.approx(v, abs=1e-6) if isinstance(v, float) else v for k, v in b.items()}, name
        if name.endswith(".safetensors"):
            torch.testing.assert_close(*map(load_file, (one / name, other / name)), rtol=0, atol=most, equal_nan=True)


def same_training(one: Path, other: Path) -> None:
    """Their histories, within what steps in float32 add up to."""
    files = (folder / "tuned" / "finetune.json" for folder in (one, other))
    before, after = (json.loads(file.read_text())["training"] for file in files)
    assert before["best"] == after["best"]
    assert len(before["history"]) == 3
    assert after["history"] == [pytest.approx(each, abs=1e-5) for each in before["history"]]


def says_who_is_gone(done: list[dict[str, Any]], lost: int) -> None:
    assert done[lost]["status"] == -9
    left = [d for rank, d in enumerate(done) if rank != lost]
    assert {d["status"] for d in left} == {1}
    said = "".join(d["stderr"] for d in left)
    line = f"headprune: Rank {lost} is gone, so the others cannot continue. What was finished is kept: run the same command again"
    assert said.count(line) == 1, said
    assert "Traceback" not in said


@pytest.mark.slow
def test_what_several_processes_prune_and_train(processes: Processes, here: Path, alone: Path) -> None:
    first, *others = processes.run({"cwd": str(here), "size": 3, "arguments": PRUNE})
    assert [d["status"] for d in (first, *others)] == [0] * 3, first["stderr"]
    assert "3 processes share out the work." in first["stderr"]
    assert "Report: reports/m-1/report.md" in first["stdout"]
    assert [(d["stdout"], d["stderr"]) for d in others] == [("", "")] * 2
    same_folders(alone / "reports", here / "reports")
    first, other = processes.run({"cwd": str(here), "size": 2, "arguments": ["prune", "--keep", "3", "--dry-run"]})
    assert (first["status"], other["status"]) == (0, 0), first["stderr"]
    assert "orders that were made for reports/m-1" in first["stderr"]
    first, *others = processes.run({"cwd": str(here), "size": 2, "arguments": TUNE})
    assert [d["status"] for d in (first, *others)] == [0] * 2, first["stderr"]
    same_training(alone, here)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "stop", "size"), [(2, 1, 1), (0, 9, 3)])
def test_a_lost_rank_ends_the_run_in_a_line_and_a_rerun_goes_on(
    processes: Processes, here: Path, alone: Path, lost: int, stop: int, size: int
) -> None:
    """With another number of processes; whichever rank is killed, before whichever of its files."""
    killed = {"cwd": str(here), "size": 3 if size != 3 else 2, "arguments": PRUNE, "rank": lost, "stop": stop}
    says_who_is_gone(processes.run(killed), lost)
    done = processes.run({"cwd": str(here), "size": size, "arguments": PRUNE})
    assert [d["status"] for d in done] == [0] * size, done[0]["stderr"]
    same_folders(alone / "reports", here / "reports")


@pytest.mark.slow
def test_a_lost_rank_ends_the_training_and_a_rerun_goes_on(processes: Processes, alone: Path, tmp_path: Path) -> None:
    """The first one, while the others average gradients; then one process alone continues."""
    here = tmp_path / "w"
    shutil.copytree(alone, here)
    shutil.rmtree(here / "tuned")
    says_who_is_gone(processes.run({"cwd": str(here), "size": 3, "arguments": TUNE, "rank": 0, "stop": 4}), 0)
    (again,) = processes.run({"cwd": str(here), "size": 1, "arguments": TUNE})
    assert again["status"] == 0, again["stderr"]
    assert "Continuing from step" in again["stderr"]
    same_training(alone, here)


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "status", "says"), [
    ("score m -d nowhere.jsonl", 1, "headprune: "), ("score m -d d -o m", 1, "headprune: "), ("score m --nonsense", 2, "nonsense"),
    ("methods", 0, "ablation"),
])  # fmt: skip
def test_one_process_speaks(processes: Processes, here: Path, typed: str, status: int, says: str) -> None:
    first, other = processes.run({"cwd": str(here), "size": 2, "arguments": typed.split()})
    assert says in first["stdout"] + first["stderr"]
    assert "Traceback" not in first["stderr"]
    assert (first["status"], other["status"], other["stdout"], other["stderr"]) == (status, status, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["torch.distributed.run --standalone --nproc-per-node", "accelerate.commands.launch --multi_gpu --main_process_port 0 --num_processes"]
)  # fmt: skip
def test_launchers(here: Path, launcher: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *f"{launcher} 2 -m headprune score m -d d -m gradient".split()]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: reports/m-1/report.md") == 1
    assert " ".join(done.stderr.split()).count("2 processes share out the work.") == 1
