"""Processes that share out the work: the same results as one, to the bit or nearly; and nobody waits for ever."""

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

import headprune as hp
from headprune.parallel import ALONE, LostRankError, _Failure, accelerator_ranks, current, place, shares
from tests.support import shared
from tests.support.interrupted import Processes


def numbers(document: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(document))  # as a file would hold it


# -- alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [None, [3.0, 1, 1, 4, 1, 5, 9, 2, 6]])
@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_every_task_is_done_once_and_nobody_has_much_more_to_do(size: int, costs: list[float] | None) -> None:
    found = shares(9, size, costs)
    assert sorted(i for own in found for i in own) == list(range(9))
    assert all(own == sorted(own) for own in found)
    loads = [sum((costs or [1.0] * 9)[i] for i in own) for own in found]
    assert max(loads) - min(loads) <= max(costs or [1.0])


def test_a_process_that_was_not_told_of_others_is_alone() -> None:
    assert current() is ALONE
    with accelerator_ranks(None) as ranks:
        assert ranks is ALONE
    assert ALONE.share("x", [lambda: 1, lambda: 2]) == [1, 2]
    assert ALONE.gather("x", 5) == [5]


def test_what_is_no_accelerator_is_refused() -> None:
    with pytest.raises(hp.HeadPruneError, match="accelerator= is a str"), accelerator_ranks("cpu"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    "error",
    [
        hp.HeadPruneError("What is wrong.", "What to try."),
        OSError(errno.ENOSPC, "No space left on device", "/data/part.npy"),
        KeyError("labels"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: Exception) -> None:
    """Which file a disk was too full for was lost on the way."""
    there = pickle.loads(pickle.dumps(_Failure(error))).error
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert getattr(there, "hint", None) == getattr(error, "hint", None)


class RowError(hp.HeadPruneError):
    """Made in another way than its message says."""

    def __init__(self, row: int, batch: object) -> None:
        super().__init__(f"Row {row} is wrong.", f"Not so in {batch}.")


def test_an_error_that_cannot_be_made_again_is_told_in_words() -> None:
    there = pickle.loads(pickle.dumps(_Failure(RowError(3, "others")))).error
    assert (type(there), there.args[0], there.hint) == (hp.HeadPruneError, "Row 3 is wrong.", "Not so in others.")
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("many")
    assert "1 validation error for int" in str(pickle.loads(pickle.dumps(_Failure(caught.value))).error)


def test_lost_ranks_are_named() -> None:
    heads = [str(LostRankError(gone).args[0]).split(" gone")[0] for gone in ((), (1,), (1, 2), (0, 1, 2))]
    assert heads == ["A rank is", "Rank 1 is", "Rank 1 and rank 2 are", "Rank 0 and rank 1 and rank 2 are"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, (1, 3, 0)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4, 0)),
        ({"WORLD_SIZE": "1"}, None),
    ],
)
def test_what_launchers_say(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, str], expected: tuple[int, int, int] | None
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", **names}.items():
        monkeypatch.setenv(name, value)
    assert place() == expected


def test_half_of_what_launchers_say_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(hp.HeadPruneError, match="torchrun"):
        place()


# -- together ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_results_come_in_order_from_whoever_made_them(processes: Processes, tmp_path: Path, size: int) -> None:
    found = processes.call(tmp_path, size, "tests.support.shared:together", kind="order")
    assert all(each == found[0] for each in found)
    in_turn, by_cost, none = found[0]
    assert in_turn == [(i, i % size, 1) for i in range(7)]
    assert [i for i, *_ in by_cost] == list(range(7))
    assert {rank for _, rank, _ in by_cost[:6]} == set(range(1, size))  # rank 0 has the one that costs most
    assert none == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux tells a process's threads there")
def test_no_thread_of_gloos_outlives_the_ranks(processes: Processes, tmp_path: Path) -> None:
    """It released tensors while the interpreter ended, and one run in ten of `torchrun … score` aborted after all its results."""
    assert processes.call(tmp_path, 2, "tests.support.shared:threads_left") == [[], []]


@pytest.mark.slow
def test_sums_and_gathered_values(processes: Processes, tmp_path: Path) -> None:
    for rank, (whole, part, gathered, first) in enumerate(
        processes.call(tmp_path, 3, "tests.support.shared:together", kind="sums")
    ):
        assert torch.equal(whole, torch.full((3, 2), 6.0, dtype=torch.float64)), rank
        assert torch.equal(part, whole[:, 1])
        assert gathered == [0, 1, 2]
        assert first == 0


@pytest.mark.slow
def test_the_first_failure_is_raised_in_all_and_they_can_go_on(processes: Processes, tmp_path: Path) -> None:
    found = processes.call(tmp_path, 3, "tests.support.shared:together", kind="fails")
    assert found == [("Task 2 fails.", "Give it up.", [0, 1, 2])] * 3


@pytest.mark.slow
def test_an_error_that_others_cannot_know_is_told_in_words(processes: Processes, tmp_path: Path) -> None:
    found = processes.call(tmp_path, 2, "tests.support.shared:together", kind="strange")
    assert found == ["RuntimeError: StrangeError: so be it", "StrangeError: so be it"]


@pytest.mark.slow
def test_other_options_are_refused_before_the_work(processes: Processes, tmp_path: Path) -> None:
    """A fine-tuning whose ranks had other learning rates trained to the end, and then asked to be reported."""
    for said, made in processes.call(tmp_path, 2, "tests.support.shared:together", kind="asked"):
        assert said.startswith("Rank 1 was given options other than rank 0's.")
        assert not made


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_others(processes: Processes, tmp_path: Path) -> None:
    done = processes.run(
        {"cwd": str(tmp_path), "size": 3, "call": "tests.support.shared:together", "given": {"kind": "alone"}}
    )
    assert [d["status"] for d in done] == [0, 70, 0]  # the others caught it, in `_alone`
    assert "Only here." in done[1]["stderr"]
    for rank in (0, 2):
        assert torch.load(tmp_path / f"given-{rank}.pt") == "Only here. Look there."


@pytest.mark.slow
def test_ranks_out_of_step_say_so(processes: Processes, tmp_path: Path) -> None:
    for said in processes.call(tmp_path, 2, "tests.support.shared:together", kind="steps"):
        assert said.startswith("The ranks are out of step: rank 0 is at “other”")


@pytest.mark.slow
def test_a_lost_rank_ends_the_others_in_a_line(processes: Processes, tmp_path: Path) -> None:
    done = processes.run(
        {"cwd": str(tmp_path), "size": 3, "call": "tests.support.shared:together", "given": {"kind": "gone"}}
    )
    assert [d["status"] for d in done] == [0, -9, 0]
    assert done[0]["waited"] < 30
    for rank in (0, 2):
        said = torch.load(tmp_path / f"given-{rank}.pt")
        assert said.startswith("Rank 1 is gone, so the others cannot continue. What was finished is kept")


# -- scores ------------------------------------------------------------------------------------

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("gradient", {}),
    ("ablation", {}),
    ("ablation", {"examples": 7, "keep": 4}),
    ("mean-ablation", {}),
    ("resample-ablation", {}),
    ("shapley", {"permutations": 20}),
    ("integrated-gradients", {}),
    ("l0", {"steps": 20}),
    ("entropy", {}),
    ("output-norm", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), METHODS, ids=str)
def test_scores_are_those_of_one_process_to_the_bit(
    processes: Processes, tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    one = numbers(shared.scored(method, **settings))
    for size in (2, 3):
        for found in processes.call(tmp_path, size, "tests.support.shared:scored", method=method, **settings):
            assert numbers(found) == one


@pytest.mark.slow
def test_fewer_batches_than_ranks_are_shared_by_layers(processes: Processes, tmp_path: Path) -> None:
    one = numbers(shared.scored("ablation", count=2))
    found = processes.call(tmp_path, 3, "tests.support.shared:scored", method="ablation", count=2)
    assert [numbers(each) for each in found] == [one] * 3


@pytest.mark.slow
def test_scores_by_time_are_the_same_on_all_ranks(processes: Processes, tmp_path: Path) -> None:
    found = processes.call(tmp_path, 3, "tests.support.shared:scored", method="ablation", seconds=0.05, keep=4)
    assert all(numbers(each) == numbers(found[0]) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 2], ids=["by batches", "by layers"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_killed_rank_and_another_number_of_them(processes: Processes, tmp_path: Path, size: int, count: int) -> None:
    """What three ranks had finished when one was killed is used by however many come after."""
    one = numbers(shared.scored("ablation", count=count))
    given = {"method": "ablation", "count": count, "work": str(tmp_path / "work")}
    done = processes.run(
        {
            "cwd": str(tmp_path),
            "size": 3,
            "call": "tests.support.shared:scored",
            "given": given,
            "rank": 2,
            "stop": 2 if count == 2 else 1,
        }
    )
    assert [d["status"] for d in done] == [70, -9, 70] or [d["status"] for d in done] == [70, 70, -9]
    assert all("is gone, so the others cannot continue." in d["stderr"] for d in done if d["status"] == 70)
    assert list((tmp_path / "work").rglob("*.part"))
    for found in processes.call(tmp_path, size, "tests.support.shared:scored", **given):
        assert numbers(found) == one


# -- search, repair and evaluation ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "greedy"])
def test_plans_repair_and_evaluation_are_those_of_one_process(
    processes: Processes, tmp_path: Path, strategy: str
) -> None:
    one = shared.pruned(strategy)
    assert any(trial["kept"] for trial in one["repair"]["trials"])
    for size in (2, 3):
        for found in processes.call(tmp_path, size, "tests.support.shared:pruned", strategy=strategy):
            assert found["size"] == size
            assert found["plans"] == one["plans"]
            assert found["repair"]["passes"] == one["repair"]["passes"]
            assert torch.allclose(found["weights"], one["weights"], rtol=0, atol=1e-6)
            assert torch.allclose(found["losses"], one["losses"], rtol=0, atol=1e-6)
            assert found["metrics"] == pytest.approx(one["metrics"], abs=1e-6)


# -- training ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"dropout": 0.0, "alpha": 1.0, "hidden": True}, {"alpha": 0.0, "steps": 5}],
    ids=["dropout", "hidden states", "labels alone"],
)
def test_a_training_is_that_of_one_process(processes: Processes, tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever the last batch has, and with the same dropout. Weights may differ where a gradient is zero but for rounding, as
    a key's bias has: Adam divides by its size."""
    one = shared.finetuned(**options, work=str(tmp_path / "one"))
    for size in (2, 3):
        for found in processes.call(tmp_path, size, "tests.support.shared:finetuned", **options, work=f"work-{size}"):
            assert found["largest"] == 6 / size
            assert found["best"] == one["best"]
            assert [pytest.approx(each, abs=1e-6) for each in one["history"]] == list(found["history"])
            assert ((found["weights"] - one["weights"]).abs() > 1e-6).double().mean() < 0.01
    assert one["moved"] > 1e-4 or not one["best"]


# -- an Accelerator ------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_accelerator_shares_out_and_nothing_else_does(processes: Processes, tmp_path: Path) -> None:
    call = "tests.support.shared:accelerated"
    one = numbers(shared.accelerated("scores")[0])
    for found, metrics in processes.call(tmp_path, 2, call, what="scores"):
        assert numbers(found) == one
        assert set(metrics) >= {"loss", "accuracy"}
    calls = processes.call(tmp_path, 2, call, what="nothing")
    assert calls[0] == calls[1] == shared.accelerated("nothing")
    for said in processes.call(tmp_path, 2, call, what="other"):
        assert "Rank 1 was given batches other than rank 0's." in said
    for said in processes.call(tmp_path, 2, call, what="wrapped"):
        assert "accelerator.unwrap_model" in said
