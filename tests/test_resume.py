"""Scoring runs that are interrupted, and continue."""

import copy
import errno
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headprune as hp
from headprune.scoring import METHODS, Settings
from headprune.scoring.resume import DiskStore, Work, digest
from tests.support.interrupted import Processes
from tests.support.problems import split
from tests.support.zoo import bert, labelled, text

KEPT = [m for m in METHODS if m not in ("random", "weight-norm")]


def setting() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    model, _ = bert()
    return model, split(labelled(model, text(8, 7)), 2)


class Interrupted(BaseException):
    pass


def stopping_after(calls: int) -> Any:
    def progress(done: int, total: int, note: str = "") -> None:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Interrupted

    return progress


@pytest.mark.parametrize("method", KEPT)
def test_an_interrupted_run_gives_what_a_whole_one_gives(method: str, tmp_path: Path) -> None:
    model, batches = setting()
    settings = Settings(
        examples=5 if method == "ablation" else None, steps=8 if method in ("l0", "dsp") else None, permutations=4
    )
    whole = hp.score(model, batches, method, settings=settings)
    for stop in (2, 5, 9):
        try:
            hp.score(model, batches, method, settings=settings, work=tmp_path, progress=stopping_after(stop))
        except Interrupted:
            continue
        break
    said: list[str] = []
    parts = list(tmp_path.glob("*/*.npy"))
    resumed = hp.score(model, batches, method, settings=settings, work=Work(tmp_path, said.append))
    assert torch.equal(resumed.flat(), whole.flat())
    assert torch.equal(resumed.flat_stderr().nan_to_num(), whole.flat_stderr().nan_to_num())
    assert parts
    assert "continuing with" in said[0]


def test_other_models_data_seeds_and_options_are_never_mixed_in(tmp_path: Path) -> None:
    model, batches = setting()
    hp.score(model, batches, "ablation", work=tmp_path)
    with torch.no_grad():
        other = bert()[0]
        other.classifier.weight[0, 0] += 1e-3
    changed = [dict(b) for b in batches]
    changed[2] = {**changed[2], "labels": 1 - changed[2]["labels"]}
    said: list[str] = []
    for arguments, options in (
        ((other, batches), {}), ((model, changed), {}), ((model, batches), {"seed": 1}),
        ((model, batches), {"settings": Settings(normalise=True)}), ((model, batches), {"distil": True}),
        ((model, batches[:3]), {}),
    ):  # fmt: skip
        said.clear()
        kept = hp.score(*arguments, "ablation", work=Work(tmp_path, said.append), **options)
        assert "not used" in said[0], options
        assert torch.equal(kept.flat(), hp.score(*arguments, "ablation", **options).flat())
    said.clear()
    hp.score(model, batches, "ablation", work=Work(tmp_path, said.append), settings=Settings(max_memory=1 << 30))
    assert "continuing with" in said[0]  # how much memory there is changes no number


def test_damaged_parts_are_computed_again(tmp_path: Path) -> None:
    model, batches = setting()
    whole = hp.score(model, batches, "ablation", work=tmp_path)
    parts = sorted(tmp_path.glob("*/*.npy"))
    parts[0].write_bytes(parts[0].read_bytes()[:-7])
    parts[1].write_bytes(b"")
    assert torch.equal(hp.score(model, batches, "ablation", work=tmp_path).flat(), whole.flat())


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = setting()
    original, calls = os.replace, []

    def full(a: Any, b: Any) -> None:
        calls.append(b)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(a, b)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(hp.HeadPruneError, match=r"No space left on device.*run the same command again"):
        hp.score(model, batches, "ablation", work=tmp_path)
    monkeypatch.setattr(os, "replace", original)
    assert len(list(tmp_path.glob("*/*.npy"))) == 2
    assert not list(tmp_path.glob("*/*.tmp"))
    resumed = hp.score(model, batches, "ablation", work=tmp_path)
    assert torch.equal(resumed.flat(), hp.score(model, batches, "ablation").flat())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_command_goes_on(
    how: int, processes: Processes, here: Path, bert_folder: Path, data_folder: Path
) -> None:
    arguments = ["score", str(bert_folder), "-d", str(data_folder), "-b", "1", "-m", "ablation"]
    job = {"cwd": str(here), "arguments": arguments}
    unfinished = here / "reports" / f"{bert_folder.name}-1" / ".unfinished"
    (killed,) = processes.run({**job, "stop": 5, "signal": how})
    parts = len(list(unfinished.glob("*/*.npy")))
    assert parts > 1
    assert not (unfinished.parent / "scores.json").exists()
    if how == signal.SIGINT:
        assert killed["status"] == 130
        assert "same command" in killed["stderr"]
    else:
        assert killed["status"] == -how
    done, fresh = processes.run(job, {**job, "arguments": [*arguments, "-o", "fresh"]})
    assert (done["status"], fresh["status"]) == (0, 0), (done["stderr"], fresh["stderr"])
    assert f"continuing with {parts} finished parts" in " ".join(done["stderr"].split())
    assert done["renames"] < fresh["renames"]
    assert not unfinished.exists()
    a, b = (hp.HeadScores.load(p / "scores.json") for p in (unfinished.parent, here / "fresh"))
    assert torch.equal(a.flat(), b.flat())


def test_no_resume(here: Path, bert_folder: Path, data_folder: Path) -> None:
    from typer.testing import CliRunner

    from headprune.cli import app

    left = here / "out" / ".unfinished" / "ablation-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "0.npy").write_bytes(b"")
    base = ["score", str(bert_folder), "-d", str(data_folder), "-m", "ablation", "-o", "out"]
    result = CliRunner().invoke(app, [*base, "--dry-run"])
    assert result.exit_code == 0, result.stderr
    result = CliRunner().invoke(app, base)
    assert "not used" in " ".join(result.stderr.split()), result.stderr
    assert not (here / "out" / ".unfinished").exists()
    (here / "out2" / ".unfinished" / "ablation-0").mkdir(parents=True)
    result = CliRunner().invoke(app, [*base[:-1], "out2", "--no-resume"])
    assert "not used" not in " ".join(result.stderr.split())


def test_a_flipped_bit_in_a_part_is_never_a_score(tmp_path: Path) -> None:
    """A part is numbers, and every bit of theirs makes another number: only a checksum tells."""
    model, batches = setting()
    whole = hp.score(model, batches, "ablation", work=tmp_path)
    for number, part in enumerate(sorted(tmp_path.glob("*/*.npy"))):
        content = bytearray(part.read_bytes())
        content[-33 - number % 8] ^= 0x40  # in the last of its numbers, or in one before
        part.write_bytes(bytes(content))
    assert torch.equal(hp.score(model, batches, "ablation", work=tmp_path).flat(), whole.flat())


def test_a_part_under_another_parts_name_is_not_used(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.keep("a", torch.ones(2))
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    assert store.known("b") is None


# -- what tells one computation from another ---------------------------------------------------------


def with_inner(scale: float) -> Any:
    """A loss whose scale only code within it names."""
    own = {"SCALE": scale}
    exec("def loss(out, labels):\n    return sum((lambda x: SCALE * x)(x) for x in out)", own)
    return own["loss"]


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.by * out


class Inheriting(Scaled):
    pass


class Other:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.by + out


def calling(base: type) -> Any:
    return type("Loss", (base,), {"__module__": __name__})(2.0)


A, B = torch.zeros(2), torch.ones(2)
FIRST, SECOND = {"x": A}, {"x": B}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param([FIRST, SECOND, FIRST], [FIRST, SECOND, SECOND], id="which batch comes again"),
        pytest.param([[1], 2], [[1, 2]], id="where a list ends"),
        pytest.param({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}, id="where a dict ends"),
        pytest.param(nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), id="settings of a loss module"),
        pytest.param(nn.Sequential(nn.ReLU()), nn.Sequential(nn.SiLU()), id="classes within a loss module"),
        pytest.param(with_inner(1.0), with_inner(2.0), id="globals of a lambda"),
        pytest.param(calling(Scaled), calling(Other), id="inherited code"),
        pytest.param(np.array(["a", "b"]), np.array(["a", "c"]), id="texts of NumPy's"),
        pytest.param(np.array(["a", 1], dtype=object), np.array(["a", 2], dtype=object), id="objects of NumPy's"),
        pytest.param(np.float32(1), np.float32(2), id="a number of NumPy's"),
    ],
)
def test_what_computes_otherwise_has_another_name(one: Any, other: Any) -> None:
    assert digest(one) == digest(copy.deepcopy(one)), "the same work would not be found again"
    assert digest([one]) != digest([other])


def test_another_activation_is_another_model() -> None:
    """Without weights of its own, and set no attribute apart: only the class tells."""
    relu, silu = (nn.Sequential(nn.Linear(2, 2), make()) for make in (nn.ReLU, nn.SiLU))
    silu.load_state_dict(relu.state_dict())
    assert digest(relu) != digest(silu)
