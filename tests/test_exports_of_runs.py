"""`headprune prune --export`: pruned models for other engines, in the run and its report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import headprune as hp
from headprune.errors import HeadPruneError
from headprune.exporting import FORMATS, Exported, exporter
from tests.support.commands import PRUNE, run

pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture
def formats() -> Any:
    """Two formats: one that writes how many parameters a model has, one that can express nothing."""

    @exporter("count", ".count")
    def count(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
        """A number."""
        path.write_text(str(sum(p.numel() for p in model.parameters())))
        return Exported(path, "count", False, "a number", notes=("It is only a number.",))

    @exporter("none", ".none")
    def none(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
        """Nothing."""
        raise HeadPruneError("It has no place for heads.", "Use another.")

    yield
    del FORMATS["count"], FORMATS["none"]


def test_pruned_models_are_exported(formats: Any, bert_folder: Path, data_folder: Path, here: Path) -> None:
    exports = ("--export", "none", "--export", "count")
    found = run(*PRUNE, 4, "-k", 6, bert_folder, "-d", data_folder, "-o", "run", *exports, "--json")
    metrics = json.loads(found.stdout)
    made = {(m["format"], m["checkpoint"]): m for m in metrics["exports"]}
    assert list(made) == [(f, c) for f in ("none", "count") for c in ("pruned-6", "pruned-4")]
    for keep in (4, 6):
        file = here / "run" / f"pruned-{keep}.count"
        model = hp.load(here / "run" / f"pruned-{keep}")
        assert file.read_text() == str(sum(p.numel() for p in model.parameters()))
        assert made["count", f"pruned-{keep}"]["file"] == file.name
        assert made["none", f"pruned-{keep}"]["file"] is None  # and the rest of the run is there
    report = (here / "run" / "report.md").read_text()
    assert "| 4 heads | none | not written: It has no place for heads. |" in report
    assert "| 6 heads | count | `pruned-6.count`: a number |" in report
    assert report.count("It is only a number.") == 1


def test_a_format_that_is_not_there_is_refused_before_the_work(
    bert_folder: Path, data_folder: Path, here: Path
) -> None:
    error = run(*PRUNE, 4, bert_folder, "-d", data_folder, "-o", "run", "--export", "tflite", code=1).stderr
    assert "no export format 'tflite'" in error
    assert not (here / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
def test_onnx_is_timed_and_gives_the_reported_accuracy(bert_folder: Path, data_folder: Path, here: Path) -> None:
    import onnxruntime
    import transformers as tf

    found = run(*PRUNE, 4, bert_folder, "-d", data_folder, "-o", "run", "--export", "onnx", "--json")
    metrics = json.loads(found.stdout)
    (engine,) = metrics["engines"]
    assert [set(row["timings"]) for row in engine["rows"]] == [{"dense", "4 heads"}] * len(metrics["latency"]["rows"])
    assert "onnx, timed as above" in (here / "run" / "report.md").read_text()
    tokenizer = tf.AutoTokenizer.from_pretrained(here / "run" / "pruned-4")
    session = onnxruntime.InferenceSession(here / "run" / "pruned-4.onnx")
    right = []
    for row in map(json.loads, (data_folder / "test.jsonl").read_text().splitlines()):
        inputs = tokenizer(row["text"], return_tensors="np")
        (logits, *_) = session.run(None, {i.name: np.asarray(inputs[i.name]) for i in session.get_inputs()})
        right.append(int(logits[0].argmax()) == row["label"])
    assert np.mean(right) == pytest.approx(metrics["budgets"][0]["pruned"]["metrics"]["accuracy"])
