"""A pruned model is saved as its checkpoint was stored, and what is reported is the saved folder's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import headprune as hp
from headprune.app.data import DataOptions, load_parts
from headprune.app.models import load_model
from headprune.app.precision import holds, narrow, widen
from headprune.app.workflow import saving
from headprune.cli import app
from headprune.evaluation import evaluate
from tests.support.folders import tokenizer
from tests.support.zoo import ZOO

HALVES = [torch.bfloat16, torch.float16]


def stored(folder: Path, target: Path, kind: Any, dtype: torch.dtype) -> Path:
    kind.from_pretrained(folder, dtype=dtype).save_pretrained(target)
    tokenizer().save_pretrained(target)
    return target


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.name != "headprune.safetensors")


def pruned(model: Path, data: Path, *more: str, output: str = "run") -> tuple[Any, Path]:
    """What a run's metrics say, and its checkpoint: half of the heads stay."""
    quick = ["-m", "gradient", "--strategy", "one-shot", "--limit", "24", "-o", output]
    result = CliRunner().invoke(app, ["prune", str(model), "-d", str(data), "--keep", "50%", *quick, *more])
    assert result.exit_code == 0, (result.stderr, result.exception)
    metrics = json.loads((Path(output) / "metrics.json").read_text())
    return metrics, Path(output) / metrics["budgets"][0]["checkpoint"]


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_precision_checkpoint_stays_one(
    dtype: torch.dtype, bert_folder: Path, data_folder: Path, here: Path
) -> None:
    """Repaired weights are rounded before they are measured, so that what is reported is what a user loads."""
    dense = stored(bert_folder, here / "dense", tf.BertForSequenceClassification, dtype)
    metrics, folder = pruned(dense, data_folder)
    name = str(dtype).removeprefix("torch.")
    assert {t.dtype for t in load_file(folder / "model.safetensors").values() if t.numel()} == {dtype}
    assert size(folder) < size(dense)
    for told, where in ((metrics["budgets"][0], folder), (metrics["dense"], dense)):
        assert told["dtype"] == name
        assert told["weights"] == sum(t.nbytes for t in load_file(where / "model.safetensors").values())
    assert metrics["budgets"][0]["repair"] is not None
    assert json.loads((folder / "config.json").read_text())["dtype"] == name

    loaded = load_model(str(folder), device="cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}  # to compute with
    parts = load_parts(DataOptions(str(data_folder), limit=24), loaded)
    again = evaluate(loaded.model, parts.report.batches())
    assert again.metrics == pytest.approx(metrics["budgets"][0]["pruned"]["metrics"], rel=1e-6)
    assert f"Weights are saved in {name}, as the dense checkpoint is" in Path("run/report.md").read_text()

    _, further = pruned(folder, data_folder, "--no-repair", output="further")
    assert {t.dtype for t in load_file(further / "model.safetensors").values() if t.numel()} == {dtype}


def test_a_dtype_that_was_chosen_is_saved(bert_folder: Path, data_folder: Path, here: Path) -> None:
    dense = stored(bert_folder, here / "dense", tf.BertForSequenceClassification, torch.bfloat16)
    metrics, folder = pruned(dense, data_folder, "--dtype", "float32", "--no-repair")
    assert {t.dtype for t in load_file(folder / "model.safetensors").values() if t.numel()} == {torch.float32}
    assert metrics["budgets"][0]["dtype"] == "float32"
    assert "Weights are saved in" not in Path("run/report.md").read_text()


def test_a_config_that_names_another_type_than_the_weights_have(bert_folder: Path, here: Path) -> None:
    dense = stored(bert_folder, here / "dense", tf.BertForSequenceClassification, torch.float32)
    assert load_model(str(dense), device="cpu").stored is None
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert load_model(str(dense), device="cpu").stored is None  # rounding them would change the model


def scene_of(model: nn.Module, example: Any, half: torch.dtype) -> Any:
    loaded = SimpleNamespace(stored=half, processor=None, task=SimpleNamespace(name="t"), source="s")
    options = SimpleNamespace(placing=lambda: None, trust_remote_code=False)
    return SimpleNamespace(loaded=loaded, model=model, example=example, options=options)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["vit", "t5", "llama"])
@pytest.mark.filterwarnings("error:headprune")
def test_the_saved_folder_answers_as_the_rounded_model(name: str, half: torch.dtype, tmp_path: Path) -> None:
    """With pixels, which half precision takes as such; and with weights that T5 keeps in float32."""
    model, example = ZOO[name]()
    hp.prune(model, {hp.find_attention(model, example)[0].name: [0, 1]}, example)
    narrow(model, half)
    widen(model)
    assert holds(model, half)
    scene = scene_of(model, example, half)
    found = saving.save(scene, model, tmp_path / "m", 1e-4)
    assert (found.dtype, found.note) == (str(half).removeprefix("torch."), "")
    again = saving.load(scene, tmp_path / "m")
    with torch.no_grad():
        torch.testing.assert_close(again(**example).logits, model(**example).logits, rtol=1e-4, atol=1e-5)


def test_what_does_not_work_in_half_precision_is_saved_in_full(tmp_path: Path) -> None:
    model, example = ZOO["bert"]()
    hp.prune(model, {"bert.encoder.layer.0.attention.self": [0]}, example)
    with torch.no_grad():
        model.classifier.weight.mul_(1e6)  # more than float16 holds
    found = saving.save(scene_of(model, example, torch.float16), model, tmp_path / "m", 1e-4)
    assert found.dtype == "float32"
    assert "Saved in float32: in float16" in found.note
    with torch.no_grad():
        assert torch.equal(hp.load(tmp_path / "m")(**example).logits, model(**example).logits)
