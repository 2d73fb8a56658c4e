"""Every row of `tests.support.bad_inputs`: one line that says what is wrong and where, the exit code, and nothing written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as tf

import headprune as hp
from tests.support.bad_files import DATA, MODELS, PYTHON, SAVED, Call
from tests.support.bad_inputs import DOCUMENTS, FILES, GONE, LATER, TYPED, Row
from tests.support.commands import all_options, invoke
from tests.support.documents import opened, write_run
from tests.support.folders import sentences, write_jsonl
from tests.support.zoo import bert


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def put(folder: Path, make: dict[str, Any]) -> None:
    """Change a folder as a row says."""
    for name, given in make.items():
        path = folder / name
        if given is None:
            path.unlink(missing_ok=True)
        elif isinstance(given, tuple):
            where, value = given
            document = opened(path)
            inner = document
            for step in where[:-1]:
                inner = inner[step]
            if value is GONE:
                del inner[where[-1]]
            else:
                inner[where[-1]] = value
            path.write_text(json.dumps(document))
        elif isinstance(given, int | bytes):
            path.write_bytes(path.read_bytes()[:given] if isinstance(given, int) else given)
        else:
            path.write_text(given)


def check(row: Row, here: Path, **places: Path) -> None:
    """Try a row, then again for a JSON document: what the first one leaves must not change what is said."""
    if "gguf" in row.typed:
        pytest.importorskip("gguf")  # without it, that is what is said first
    before = contents(here)
    typed = [a.format(here=here, **places) if "{" in a else a for a in row.typed]
    result = invoke(*typed)
    assert result.exit_code == row.code, (result.stdout, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    assert not result.stdout.strip()
    lines = [line for line in result.stderr.splitlines() if line.startswith("headprune: ")]
    if row.code == 1 or lines:
        (said,) = lines
        assert result.stderr.rstrip().endswith(said)  # it is the last, and has no second line
        assert "unexpected" not in said, said
        assert len(said) < 1000 + sum(map(len, row.typed))
    else:
        said = " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())
        assert "Error" in said
    assert said.isprintable()
    assert re.search(row.says, said), said
    assert contents(here) == before
    if row.make is None:
        result = invoke(typed[0], "--json", *typed[1:])
        assert result.exit_code == row.code
        document = json.loads(result.stdout)
        assert set(document) == {"error", "hint"}
        assert document["error"]
        assert contents(here) == before


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights must not be loaded."""
    for place in ("transformers.PreTrainedModel.from_pretrained", "headprune.checkpoint.loading._fill"):
        monkeypatch.setattr(place, Mock(side_effect=AssertionError("weights were loaded")))


def named(value: Any) -> str:
    return value.name.encode("ascii", "replace").decode()[:90] if isinstance(value, Row) else ""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that are not what is asked for."""
    root = tmp_path_factory.mktemp("files")
    (root / "nothing").mkdir()
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for split in ("train", "validation", "test"):
        write_jsonl(root / "same" / f"{split}.jsonl", [{"text": "good film", "label": 1}] * 8)
    write_jsonl(root / "few.jsonl", sentences(2, 0))
    return root


@pytest.mark.parametrize("row", TYPED, ids=named)
def test_what_is_typed(row: Row, here: Path, files: Path, bert_folder: Path, data_folder: Path, unloaded: None) -> None:
    check(row, here, bert=bert_folder, data=data_folder, files=files)


@pytest.mark.parametrize("row", LATER, ids=named)
def test_what_only_the_model_tells(
    row: Row, here: Path, files: Path, bert_folder: Path, llama_folder: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for step in ("app.workflow.pruning.score", "app.workflow.results.evaluate", "plan_search.arrange"):
        monkeypatch.setattr(f"headprune.{step}", Mock(side_effect=AssertionError("the long work began")))
    check(row, here, bert=bert_folder, llama=llama_folder, data=data_folder, files=files)


def test_every_option_is_in_the_table() -> None:
    """A new option gets a row, or a reason here."""
    any_text = {
        "--subset", "--split", "--choose-split", "--report-split", "--label-column", "--teacher", "--train-limit", "--text"
    }  # fmt: skip
    tried = {a.partition("=")[0] for row in [*TYPED, *LATER] for a in row.typed if a.startswith("-")}
    for name, flags, takes_value in all_options():
        assert not takes_value or (tried | any_text) & flags, (name, flags)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's documents, without a run."""
    return write_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="session")
def pruned_folder(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path) -> Path:
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    example = {"input_ids": torch.arange(10, 20)[None], "attention_mask": torch.ones(1, 10, dtype=torch.long)}
    hp.prune(model, {"L0": [0, 1]}, example)
    tokenizer = tf.AutoTokenizer.from_pretrained(bert_folder)
    about = {"task": "sequence-classification", "from": str(bert_folder)}
    return hp.checkpoint.save(model, tmp_path_factory.mktemp("saved") / "pruned-6", processor=tokenizer, about=about)


def quick(row: Row) -> bool:
    """One of each kind."""
    return all(isinstance(given, int) for given in row.make.values())


STARTS = {"run_folder": DOCUMENTS, "": DATA, "bert_folder": MODELS, "pruned_folder": SAVED}
CHANGED = [
    pytest.param(start, row, id=named(row), marks=[] if start == "run_folder" or quick(row) else pytest.mark.slow)
    for start, table in STARTS.items()
    for row in table
]


@pytest.mark.parametrize(("start", "row"), CHANGED)
def test_what_lies_in_a_folder(
    start: str, row: Row, here: Path, bert_folder: Path, llama_folder: Path, data_folder: Path,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run's documents, data, a model or what headprune saved, with something changed."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here.parent / "cache")
    made = here / "made"
    if start:
        shutil.copytree(request.getfixturevalue(start), made)
    else:
        made.mkdir()
    if start == "run_folder":
        request.getfixturevalue("unloaded")
    put(made, row.make)
    check(row, here, made=made, pruned=made, bert=bert_folder, llama=llama_folder, data=data_folder)


def test_these_documents_are_right_as_they_are(here: Path, run_folder: Path) -> None:
    """Else every change to them would be refused for another reason."""
    shutil.copytree(run_folder, here / "made")
    assert invoke("report", "made").exit_code == 0
    assert len(hp.HeadScores.load("made/scores.json").flat()) == 4


@pytest.mark.parametrize(("name", "call", "says"), PYTHON, ids=[name for name, *_ in PYTHON])
def test_python(name: str, call: Call, says: str, here: Path) -> None:
    if "gguf" in name:
        pytest.importorskip("gguf")
    model, example = bert()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(hp.HeadPruneError, match=says) as error:
        call(hp, model, example)
    assert "\n" not in str(error.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not contents(here)
