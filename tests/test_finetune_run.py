"""`headprune finetune`, as it is typed, and stopped."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import headprune as hp
from tests.support.commands import run, stderr_of
from tests.support.documents import opened
from tests.support.folders import sentences
from tests.support.stays import edit
from tests.support.zoo import randomise, vit


@pytest.fixture(scope="module")
def pruned_run(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, data_folder: Path) -> Path:
    """A run folder as `headprune prune --keep 4` leaves it, as far as finetune reads it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run("score", bert_folder, "-d", data_folder, "-L", 20, "-b", 8, "-m", "random", "-o", folder, "-q")
    _prune_by_hand(folder, bert_folder, {0: [1, 2], 1: [0, 3]})
    return folder


def _prune_by_hand(
    folder: Path, source: Path, removed: dict[int, list[int]], task: str = "SequenceClassification"
) -> None:
    model: Any = getattr(tf, f"AutoModelFor{task}").from_pretrained(source)
    if task == "ImageClassification":
        processor, example = tf.AutoImageProcessor.from_pretrained(source), {"pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        processor, ids = tf.AutoTokenizer.from_pretrained(source), torch.arange(10, 22).reshape(2, 6)
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    hp.prune(model, {f"L{layer}": heads for layer, heads in removed.items()}, example)
    about = {"task": re.sub(r"(?<=[a-z])(?=[A-Z])", "-", task).lower(), "from": str(source)}
    hp.save(model, folder / "pruned-4", processor=processor, about=about, example=example)


@pytest.fixture
def pruned_here(pruned_run: Path, here: Path) -> Path:
    shutil.copytree(pruned_run, here / "run")
    return here / "run"


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_what_is_fine_tuned_is_stored_as_the_pruned_model_is(
    half: torch.dtype, here: Path, bert_folder: Path, data_folder: Path
) -> None:
    """It is trained in float32; stored so, it would be larger than the dense model in half precision was."""
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    model.to(half).save_pretrained("half")
    tf.AutoTokenizer.from_pretrained(bert_folder).save_pretrained("half")
    run("score", "half", "-d", data_folder, "-L", 20, "-m", "random", "-o", "run", "-q")
    _prune_by_hand(here / "run", here / "half", {0: [1]})
    result = run("finetune", "run", "--learning-rate", 1e-3, "--json")
    assert {p.dtype for p in hp.load(here / "run" / "pruned-4-finetuned").parameters()} == {half}
    assert "trained and measured in float32" in " ".join(json.loads(result.stdout)["notes"])
    if half == torch.bfloat16:
        run("finetune", "run", "--dtype", "bfloat16", "-o", "narrow", "-q")
        assert {p.dtype for p in hp.load(here / "narrow").parameters()} == {half}


def test_finetune(pruned_here: Path, bert_folder: Path) -> None:
    source = pruned_here / "pruned-4"
    result = run("finetune", pruned_here, "--epochs", 4, "--learning-rate", 5e-3, "--patience", 9, "--json")
    output = pruned_here / "pruned-4-finetuned"
    document = json.loads(result.stdout)
    assert document["folder"] == str(output)
    written = json.loads((output / "finetune.json").read_text())
    assert {**written, "folder": str(output)} == {
        **document,
        **{k: written[k] for k in ("headprune", "schema", "checksum")},
    }
    assert document["teacher"] == str(bert_folder)
    assert "60 examples to train on (train), of which 20 also scored" in result.stderr
    assert not list(pruned_here.glob(".*"))  # the work folder is gone, and what was in it
    model, before = hp.load(output), hp.load(source)
    assert [p.shape for p in model.parameters()] == [p.shape for p in before.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    # What was saved is what is reported: measured here, apart from the tool's own evaluation.
    tokenizer = tf.AutoTokenizer.from_pretrained(output)
    rows = sentences(40, 3)
    for name, m in (("finetuned", model), ("pruned", before)):
        right = [int(m(**tokenizer(r["text"], return_tensors="pt")).logits.argmax() == r["label"]) for r in rows]
        assert document["models"][name]["metrics"]["accuracy"] == pytest.approx(np.mean(right))
    gain = document["models"]["finetuned"]["metrics"]["accuracy"] - document["models"]["pruned"]["metrics"]["accuracy"]
    assert document["changes"]["gain"]["value"] == pytest.approx(gain)
    for file in ("finetune.md", "README.md"):
        assert f"{100 * np.mean(right):.1f} %" in (output / file).read_text()
    assert str(bert_folder.parent) not in (output / "README.md").read_text()  # it may be published
    # A fine-tuned model is a model: it can be fine-tuned again, and the dense one is still known.
    assert "exists" in stderr_of("finetune", source, code=1)
    again = run("finetune", output, "-d", document["data"]["dataset"], "-o", "again", "--json", "-q")
    assert json.loads(again.stdout)["teacher"] == str(bert_folder)
    run("finetune", source, "--overwrite", "--train-limit", 8, "-q")
    assert json.loads((output / "finetune.json").read_text())["training"]["examples"] == 8


def test_a_language_model_and_hidden_states(here: Path, llama_folder: Path, data_folder: Path) -> None:
    run("score", llama_folder, "-d", data_folder, "-L", 20, "-m", "random", "-o", "run", "-q")
    _prune_by_hand(here / "run", llama_folder, {0: [0, 1], 1: [2, 3]}, "CausalLM")
    options = ("--learning-rate", 3e-3, "--epochs", 2, "--hidden-states", "--alpha", 0.5)
    document = json.loads(run("finetune", "run", *options, "--json", "-q").stdout)
    assert document["metric"] == "perplexity"
    assert document["changes"]["gain"]["value"] < 0
    assert "hidden states" in (here / "run" / "pruned-4-finetuned" / "finetune.md").read_text()


def test_images_are_read_when_they_are_needed(here: Path) -> None:
    import datasets
    from PIL import Image

    config = tf.ViTConfig(**{**vit()[0].config.to_dict(), "num_channels": 3})
    folder = here / "vit"
    randomise(tf.ViTForImageClassification(config)).save_pretrained(folder)
    tf.ViTImageProcessor(size={"height": 8, "width": 8}, do_resize=False).save_pretrained(folder)
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)) for _ in range(48)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=5)})
    labels = rng.integers(0, 5, 48).tolist()
    data = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    (here / "data").mkdir()
    data.to_parquet(str(here / "data" / "train.parquet"))
    run("score", folder, "-d", here / "data", "-L", 12, "-b", 4, "-m", "random", "-o", "run", "-q")
    _prune_by_hand(here / "run", folder, {0: [0, 1]}, "ImageClassification")
    parts = json.loads(run("finetune", "run", "--json", "-q").stdout)["parts"]
    assert sum(parts[name]["examples"] for name in ("train", "choose", "report")) == 48


@pytest.mark.usefixtures("saved_every_step")
def test_control_c_then_no_resume(pruned_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: tf.Trainer, *_: Any) -> None:
        if self.state.global_step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("headprune.app.finetune._Trainer.store_flos", stop)
        assert "interrupted" in stderr_of("finetune", "run", "--epochs", 3, code=130)
    assert (pruned_here / "pruned-4-finetuned" / ".unfinished" / "training").is_dir()
    result = run("finetune", "run", "--epochs", 3, "--no-resume", "--json")
    assert json.loads(result.stdout)["training"]["resumed"] is None
    assert not list(pruned_here.rglob(".*"))


@pytest.mark.parametrize("part", ["weights", "config"])
def test_a_dense_model_that_changed_since(part: str, pruned_here: Path, bert_folder: Path, here: Path) -> None:
    """It would teach, and be measured as the model that was pruned."""
    source = here / "m"
    shutil.copytree(bert_folder, source)
    edit(pruned_here / "run.json", options={**opened(pruned_here / "run.json")["options"], "model": str(source)})
    about = {**opened(pruned_here / "pruned-4" / "headprune.json")["about"], "from": str(source)}
    edit(pruned_here / "pruned-4" / "headprune.json", about=about)
    if part == "weights":
        model = tf.AutoModelForSequenceClassification.from_pretrained(source)
        model.classifier.weight.data[0, 0] += 1e-3
        model.save_pretrained(source)
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    error = stderr_of("finetune", pruned_here / "pruned-4", "--epochs", 1, code=1)
    assert f"The {part} of {source} changed since the model was pruned" in error
    assert "--teacher" in error
