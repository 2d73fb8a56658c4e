"""Results that are kept: found again by the same computation, and by no other; whole, or made again."""

import copy
import errno
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.app.runs import Folder, claimed
from headprune.budgets import budget_of
from headprune.budgets.base import Fit
from headprune.errors import Stopped
from headprune.scoring import METHODS, Settings
from headprune.store import Store, digest
from tests.support.checks import Interrupted, flip
from tests.support.problems import small, split
from tests.support.zoo import labelled, text

KEPT = [m for m in METHODS if m not in ("random", "weight-norm")]


def setting() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    model = small(heads=4, layers=2)[0].float()
    return model, split(labelled(model, text(8, 7)), 2)


LAYERS = hp.find_attention(setting()[0], text())


def stopping_after(calls: int) -> Any:
    def progress(done: int, total: int, note: str = "") -> None:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Interrupted

    return progress


@pytest.mark.parametrize("method", KEPT)
def test_an_interrupted_scoring_gives_what_a_whole_one_gives(method: str, tmp_path: Path) -> None:
    model, batches = setting()
    few, short = 5 if method == "ablation" else None, 8 if method in ("l0", "dsp", "integrated-gradients") else None
    settings = Settings(examples=few, steps=short, permutations=4)
    score = partial(hp.score, model, batches, method, settings=settings, layers=LAYERS)
    whole = score()
    for stop in (2, 5, 9):
        with suppress(Interrupted):
            score(work=tmp_path, progress=stopping_after(stop))
    said: list[str] = []
    assert list(tmp_path.glob("*/*.part"))
    assert score(work=Store(tmp_path, said.append)).to_json() == whole.to_json()
    assert "continuing with" in said[0]


def test_other_models_data_seeds_and_options_are_never_mixed_in(tmp_path: Path) -> None:
    model, batches = setting()
    score = partial(hp.score, method="ablation", layers=LAYERS)
    score(model, batches, work=tmp_path)
    other = setting()[0]
    other.classifier.weight.data[0, 0] += 1e-3
    changed = [dict(b) for b in batches]
    changed[2] = {**changed[2], "labels": 1 - changed[2]["labels"]}
    said: list[str] = []
    for arguments, options in (
        ((other, batches), {}), ((model, changed), {}), ((model, batches), {"seed": 1}),
        ((model, batches), {"settings": Settings(normalise=True)}), ((model, batches), {"distil": True}),
        ((model, batches[:3]), {}),
    ):  # fmt: skip
        said.clear()
        kept = score(*arguments, work=Store(tmp_path, said.append), **options)
        assert "not used" in said[0], options
        assert torch.equal(kept.flat(), score(*arguments, **options).flat())
    said.clear()
    score(model, batches, work=Store(tmp_path, said.append), settings=Settings(max_memory=1 << 30))
    assert "continuing with" in said[0]  # how much memory there is changes no number


def of_another(path: Path) -> None:
    """Whole, under the name of another part."""
    path.write_bytes(next(p for p in path.parent.glob("*.part") if p != path).read_bytes())


@pytest.mark.parametrize("damage", [flip, of_another, lambda path: path.write_bytes(path.read_bytes()[:-7])])
def test_damaged_parts_are_made_again(damage: Any, tmp_path: Path) -> None:
    model, batches = setting()
    whole = hp.score(model, batches, "ablation", work=tmp_path)
    for part in sorted(tmp_path.glob("*/*.part"))[:2]:
        damage(part)
    assert torch.equal(hp.score(model, batches, "ablation", work=tmp_path).flat(), whole.flat())


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = setting()
    original, calls = os.replace, []

    def full(a: Any, b: Any) -> None:
        calls.append(b)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(hp.HeadPruneError, match=r"No space left on device.*run the same command again"):
            hp.score(model, batches, "ablation", work=tmp_path)
    assert len(list(tmp_path.glob("*/*.part"))) == 2
    assert not list(tmp_path.glob("*/*.tmp"))
    found = hp.score(model, batches, "ablation", work=tmp_path)
    assert torch.equal(found.flat(), hp.score(model, batches, "ablation").flat())


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_full_disk_ends_a_command_that_keeps_its_work(when: str, tmp_path: Path, monkeypatch: Any) -> None:
    """That the command failed was noted on the full disk: this failed, too, and all that was finished was removed."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def work(fill: bool) -> None:
        with claimed(lambda: Folder(tmp_path), "key", "command", say=lambda _: None) as folder:
            folder.store().keyed("prune").keep("search", 1)
            if fill:
                monkeypatch.setattr(os, "replace", full)
                folder.store().keyed("prune").keep("model", 2)
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        work(fill=False)
    assert Folder(tmp_path).left_by == "key"
    if when == "at the start":
        monkeypatch.setattr(os, "replace", full)
    with pytest.raises(hp.HeadPruneError, match=r"(command|model) cannot be kept: .*No space left on device"):
        work(fill=True)
    assert Folder(tmp_path).store().keyed("prune").known("search") == 1
    assert Folder(tmp_path).left_by is None


MEASURED = hp.Measurement({"loss": 0.1, "f1": float("nan")}, np.array([0.1, np.inf]), np.zeros(2), np.arange(2))
VALUES: list[Any] = [
    None,
    [1, 2.5, "é\ud800", True, (1, (2,)), {"a": {"tuple": 3}, 4: None}],
    {"half": torch.ones(2, 3, dtype=torch.bfloat16).T, "none": torch.zeros(0, 2), "one": torch.tensor(3)},
    {"measured": MEASURED, "fit": Fit(hp.PruningPlan({"a": [1]}, notes=("x",)), budget_of("latency 80%"), None)},
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_what_is_found_is_what_was_kept(value: Any, tmp_path: Path) -> None:
    name = "any name / of any length " * 9
    kept = Store(tmp_path).get(name, lambda: value)
    found = Store(tmp_path).get(name, lambda: pytest.fail("it is kept"))
    assert digest(found) == digest(kept) == digest(value)
    assert type(found) is type(value)
    store = Store()
    assert store.get(name, lambda: value) is store.get(name, lambda: pytest.fail("it is remembered"))
    store.forget(name)
    assert store.known(name) is None


def test_what_no_file_can_hold_is_said_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(hp.HeadPruneError, match=r"times › rows › 0 › batch is a function, which no file can hold"):
        Store(tmp_path).get("times", lambda: {"rows": [{"batch": split}]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["subprocess:Popen", "pathlib:Path", "headprune.files:write_bytes", "headprune:x"])
def test_a_file_makes_only_values(name: str, tmp_path: Path) -> None:
    """Somebody else's unfinished work must not choose what runs."""
    Store(tmp_path).keep("part", 1)
    (path,) = tmp_path.iterdir()
    ran = str(tmp_path / "ran")
    fields = {"path": ran, "content": "x", "args": ["list", ["touch", ran]]}
    value = [name, ["dict", [["tuple", [key, each]] for key, each in fields.items()]]]
    head, _, tensors = path.read_bytes()[32:].partition(b"\n")
    content = json.dumps({**json.loads(head), "value": value}).encode() + b"\n" + tensors
    path.write_bytes(hashlib.sha256(content).digest() + content)
    assert Store(tmp_path).get("part", lambda: 2) == 2
    assert not (tmp_path / "ran").exists()


# -- what tells one computation from another ---------------------------------------------------------

A, B = torch.zeros(2), torch.ones(2)
FIRST, SECOND = {"x": A}, {"x": B}


@pytest.mark.parametrize(("one", "other"), [
    ([FIRST, SECOND, FIRST], [FIRST, SECOND, SECOND]),  # which batch comes again
    ([[1], 2], [[1, 2]]), ({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}),  # where a list or a dict ends
    ((1, 2), [1, 2]), (torch.zeros(2), torch.zeros(2).double()), (torch.zeros(2, 3), torch.zeros(3, 2)),
    (np.float32(1), np.float32(2)), (Settings(keep=1), Settings(keep=2)), (torch.float32, torch.float64),
], ids=str)  # fmt: skip
def test_what_computes_otherwise_has_another_name(one: Any, other: Any) -> None:
    assert digest(one) == digest(copy.deepcopy(one)), "the same work would not be found again"
    assert digest([one]) != digest([other])
    assert digest(split) != digest(split)  # code is not compared


def test_another_activation_is_another_model() -> None:
    """Without weights of its own, and set no attribute apart: only the class tells."""
    relu, silu = (nn.Sequential(nn.Linear(2, 2), make()) for make in (nn.ReLU, nn.SiLU))
    silu.load_state_dict(relu.state_dict())
    assert digest(relu) != digest(silu)


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: factor * x


class Own:
    """Of the user; compared by what it holds."""

    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize(("one", "other"), [
    (torch.relu, torch.sin), (lambda x: x + 1, lambda x: x + 2), (lambda x: x.sin(), lambda x: x.cos()), (scaled(1.0), scaled(2.0)),
    (partial(torch.add, other=1), partial(torch.add, other=2)), (A, B), ([A], [B]), ((1, 2), (2, 1)), ({"x": A}, {"x": B}),
    ({1, 2}, {1, 3}), (Own(1), Own(2)), (Own([A]), Own([B])), (b"1", b"2"), (torch.float32, torch.float64),
    (tf.GenerationConfig(num_beams=1), tf.GenerationConfig(num_beams=2)),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_another_attribute_is_another_model(one: Any, other: Any) -> None:
    """Scores were taken for those of a model with other functions, plain tensors or settings of generation, if its weights were alike."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.load_state_dict(first.state_dict())
    assert digest(first) == digest(second)
    first.own, second.own = one, one
    assert digest(first) == digest(second)
    second.own = other
    assert digest(first) != digest(second)
    first.more, second.more = [one, other, one], [one, other, other]  # which of two comes again
    assert digest([first]) != digest([second])


class Unreadable:
    """To look at it is an error."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("closed")


@pytest.mark.parametrize("value", [
    np.datetime64("2020-01-01"), np.complex64(1j), np.array([None]), torch.eye(3).to_sparse(), threading.Lock(), torch.Generator(),
    logging.getLogger(), Unreadable(), open,
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_any_attribute_can_be_told(value: Any) -> None:
    model = nn.Linear(2, 2)
    model.own, model.cycle = value, [value]
    model.cycle.append(model.cycle)
    assert digest(model)
