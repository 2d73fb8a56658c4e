"""`headprune finetune`: which examples it trains on, its command, and commands that are stopped."""

import json
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import headprune as hp
from headprune.app import finetune as room
from headprune.app import finetune_run
from headprune.app.data import DataOptions, load_parts, load_train
from headprune.app.models import dummy_input, load_model
from headprune.app.precision import narrow, widen
from headprune.fingerprint import fingerprint
from tests.support.commands import run
from tests.support.documents import opened
from tests.support.folders import sentences, write_jsonl
from tests.support.interrupted import Processes
from tests.support.zoo import randomise, vit

# -- the data ---------------------------------------------------------------------------------


def test_what_chooses_or_is_reported_is_never_trained_on(bert_folder: Path, tmp_path: Path) -> None:
    """Neither by row nor by content, whether there is one split or three."""
    loaded = load_model(str(bert_folder))
    rows = sentences(80, 5)
    write_jsonl(tmp_path / "one.jsonl", [*rows, *rows[:40]])  # every second row has a twin
    write_jsonl(tmp_path / "three" / "train.jsonl", [*sentences(60, 6), *rows[:30]])
    write_jsonl(tmp_path / "three" / "validation.jsonl", rows[:20])
    write_jsonl(tmp_path / "three" / "test.jsonl", rows[20:40])
    for source in ("one.jsonl", "three"):
        options = DataOptions(str(tmp_path / source), limit=16, report_limit=20)
        parts = load_parts(options, loaded)
        train, notes = load_train(options, loaded, parts)
        held_out = {str(f["input_ids"]) for p in (parts.choose, parts.report) for f in p.features}
        assert not held_out & {str(f["input_ids"]) for f in train.features}
        assert {p.split for p in (parts.choose, parts.report)} != {train.split} or not set(train.rows) & {
            *parts.choose.rows, *parts.report.rows
        }  # fmt: skip
        assert set(parts.score.rows) & set(train.rows)
        assert len(set(train.rows)) == len(train) > 20
        assert notes[1].startswith("Left out")
        scored = int(re.search(r"of which (\d+) also scored", notes[0])[1])
        assert scored == len(set(train.rows) & set(parts.score.rows))
        fewer, _ = load_train(options, loaded, parts, 9)
        assert fewer.rows == train.rows[:9]
        assert fewer.content_hash() != train.content_hash()


def test_nothing_left_to_train_on(bert_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(bert_folder))
    rows = sentences(20, 5)
    for split in ("train", "validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    options = DataOptions(str(tmp_path), limit=8)
    write_jsonl(tmp_path / "train.jsonl", [*rows[:5], {"text": "a film", "label": 0}])
    parts = load_parts(options, loaded)
    parts.choose.features.extend(parts.score.features)
    with pytest.raises(hp.HeadPruneError, match="left to train on"):
        load_train(options, loaded, parts)


# -- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pruned_run(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, data_folder: Path) -> Path:
    """A run folder as `headprune prune --keep 4` leaves it, as far as finetune reads it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run("score", bert_folder, "-d", data_folder, "-L", 20, "-b", 8, "-m", "random", "-o", folder, "-q")
    _prune_by_hand(folder, bert_folder, {0: [1, 2], 1: [0, 3]})
    return folder


def _prune_by_hand(folder: Path, source: Path, removed: dict[int, list[int]]) -> None:
    loaded = load_model(str(source))
    example = dummy_input(loaded, 2, 6)
    layers = hp.find_attention(loaded.model, example)
    hp.prune(loaded.model, {layers[i].name: heads for i, heads in removed.items()}, example)
    about = {"task": loaded.task.name, "from": str(source)}
    hp.save(loaded.model, folder / "pruned-4", processor=loaded.processor, about=about)


@pytest.fixture
def pruned_here(pruned_run: Path, here: Path) -> Path:
    shutil.copytree(pruned_run, here / "run")
    return here / "run"


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_what_is_fine_tuned_is_stored_as_the_pruned_model_is(
    half: torch.dtype, bert_folder: Path, tmp_path: Path
) -> None:
    """It was stored in float32, in which it is trained: of a model in half precision that is more than the dense one took."""
    model: Any = load_model(str(bert_folder), with_processor=False).model
    assert finetune_run._stored(model) is None
    narrow(model, half)
    model.config.dtype = half
    assert finetune_run._stored(model) is None  # it is trained so
    widen(model)
    assert finetune_run._stored(model) == half
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-3)
    save = partial(hp.save, path=tmp_path / "tuned")
    assert finetune_run._saved(model, half, dummy_input(load_model(str(bert_folder)), 2, 6), save) == (half, [])
    assert next(hp.load(tmp_path / "tuned").parameters()).dtype == half
    made = finetune_run._reloaded(tmp_path / "tuned", model, half, False)  # and compared with the trained one, rounded
    assert next(made.parameters()).dtype == torch.float32
    with torch.no_grad():
        model.classifier.bias.fill_(1e6)  # beyond float16
    found, told = finetune_run._saved(
        model, half, dummy_input(load_model(str(bert_folder)), 2, 6), partial(hp.save, path=tmp_path / "other")
    )
    assert (found, len(told)) == ((None, 1) if half == torch.float16 else (half, 0))


def test_finetune(pruned_here: Path, bert_folder: Path) -> None:
    source = pruned_here / "pruned-4"
    result = run("finetune", pruned_here, "--epochs", 2, "--learning-rate", 1e-3, "--json")
    output = pruned_here / "pruned-4-finetuned"
    document = json.loads(result.stdout)
    assert document["folder"] == str(output)
    written = json.loads((output / "finetune.json").read_text())
    assert {k: v for k, v in document.items() if k != "folder"} == {
        k: v for k, v in written.items() if k not in ("headprune", "schema", "checksum")
    }
    assert document["teacher"] == str(bert_folder)
    assert "60 examples to train on (train), of which 20 also scored" in result.stderr
    assert not list(pruned_here.glob(".*"))  # the work folder is gone, and what was in it
    model, before = hp.load(output), hp.load(source)
    assert [p.shape for p in model.parameters()] == [p.shape for p in before.parameters()]
    assert fingerprint(model) != fingerprint(before)
    # What was saved is what is reported: measured here, apart from the tool's own evaluation.
    tokenizer = tf.AutoTokenizer.from_pretrained(output)
    rows = sentences(40, 3)
    for name, m in (("finetuned", model), ("pruned", before)):
        with torch.no_grad():
            right = [int(m(**tokenizer(r["text"], return_tensors="pt")).logits.argmax() == r["label"]) for r in rows]
        assert document["models"][name]["metrics"]["accuracy"] == pytest.approx(np.mean(right))
    gain = document["models"]["finetuned"]["metrics"]["accuracy"] - document["models"]["pruned"]["metrics"]["accuracy"]
    assert document["changes"]["gain"]["value"] == pytest.approx(gain)
    for file in ("finetune.md", "README.md"):
        assert f"{100 * np.mean(right):.1f} %" in (output / file).read_text()
    assert str(bert_folder.parent) not in (output / "README.md").read_text()  # it may be published
    # A fine-tuned model is a model: it can be fine-tuned again, and the dense one is still known.
    assert "exists" in run("finetune", source, code=1).stderr
    again = run("finetune", output, "-d", document["data"]["dataset"], "-o", "again", "--json", "-q")
    assert json.loads(again.stdout)["teacher"] == str(bert_folder)
    run("finetune", source, "--overwrite", "--train-limit", 8, "-q")
    assert json.loads((output / "finetune.json").read_text())["training"]["examples"] == 8


def test_a_language_model_and_hidden_states(here: Path, llama_folder: Path, data_folder: Path) -> None:
    run("score", llama_folder, "-d", data_folder, "-L", 20, "-m", "random", "-o", "run", "-q")
    _prune_by_hand(here / "run", llama_folder, {0: [0, 1], 1: [2, 3]})
    result = run(
        "finetune", "run", "--learning-rate", 3e-3, "--epochs", 2, "--hidden-states", "--alpha", 0.5, "--json", "-q"
    )
    document = json.loads(result.stdout)
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
    _prune_by_hand(here / "run", folder, {0: [0, 1]})
    document = json.loads(run("finetune", "run", "--json", "-q").stdout)
    assert document["parts"]["train"]["examples"] == 48 - sum(
        document["parts"][p]["examples"] for p in ("choose", "report")
    )


KILLED = """
import os, signal
import headprune.app.finetune as f
f.SAVE_SECONDS, f._SAVE_SHARE = 0.0, float("inf")  # saves after every step
original = f._Training.save

def stop(self):
    if self.step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self)

f._Training.save = stop
from headprune.cli import main
main()
"""


def test_sigkill(pruned_here: Path, processes: Processes) -> None:
    """Killed while it trains, the same command goes on, and gives what it would have given."""
    command = ["finetune", "run/pruned-4", "--epochs", "5", "--learning-rate", "1e-3", "--patience", "99"]
    run(*command, "-o", "whole", "-q")
    work = pruned_here.parent / "out" / ".unfinished" / "training"
    job = {"cwd": str(pruned_here.parent), "arguments": [*command, "-o", "out"]}
    (killed,) = processes.run({**job, "code": KILLED})
    assert killed["status"] == -signal.SIGKILL, killed["stderr"]
    assert {p.name for p in (pruned_here.parent / "out").iterdir()} == {".unfinished", ".lock"}
    assert work.is_dir()
    result = run(*command, "-o", "out", "--json")
    training = json.loads(result.stdout)["training"]
    assert training["resumed"] == 7
    assert "Continuing from step 7" in result.stderr
    out, whole = (hp.load(pruned_here.parent / name) for name in ("out", "whole"))
    assert [p.shape for p in out.parameters()] == [p.shape for p in hp.load(pruned_here / "pruned-4").parameters()]
    assert fingerprint(out) == fingerprint(whole)
    assert {p.name for p in pruned_here.parent.iterdir()} == {"run", "out", "whole", ".streams"}


@pytest.mark.usefixtures("saved_every_step")
def test_control_c_then_no_resume(pruned_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = room._Training.save

    def stop(self: Any) -> None:
        if self.step == 4:
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(room._Training, "save", stop)
    assert "interrupted" in run("finetune", "run", code=130).stderr
    monkeypatch.setattr(room._Training, "save", original)
    assert (pruned_here / "pruned-4-finetuned" / ".unfinished" / "training").is_dir()
    result = run("finetune", "run", "--no-resume", "--json")
    assert json.loads(result.stdout)["training"]["resumed"] is None
    assert not list(pruned_here.rglob(".*"))


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere"], "no folder nowhere"), (["{data}"], "holds no pruned model"),
    (["{bert}"], "holds no pruned model"), (["run", "--alpha", "2"], "Alpha 2"),
    (["run", "--temperature", "0"], "temperature 0"), (["run", "--epochs", "0"], "0 epochs"),
    (["run", "--learning-rate", "0"], "learning rate 0"), (["run", "--teacher", "nobody/nothing"], "no model 'nobody"),
    (["run", "--teacher", "{llama}"], "not trained for sequence"),
    (["run", "-o", "{data}"], "exists and is not empty"), (["run", "-o", "{data}", "--overwrite"], "did not write"),
    (["run", "--dtype", "float16"], "float16"), (["run", "--batch-size", "8", "--device", "cuda"], "no CUDA device"),
])  # fmt: skip
def test_mistakes_get_one_line(
    arguments: list[str], message: str, pruned_here: Path, bert_folder: Path, llama_folder: Path, data_folder: Path
) -> None:
    before = sorted(pruned_here.parent.rglob("*"))
    given = [a.format(bert=bert_folder, data=data_folder, llama=llama_folder) for a in arguments]
    result = run("finetune", *given, code=1)
    lines = [line for line in result.stderr.splitlines() if line.startswith("headprune: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert sorted(pruned_here.parent.rglob("*")) == before


def test_more_mistakes(pruned_here: Path, data_folder: Path) -> None:
    lone = pruned_here.parent / "lone"
    shutil.copytree(pruned_here / "pruned-4", lone)
    assert "Name the dataset with -d" in run("finetune", lone, code=1).stderr
    sidecar = opened(lone / "headprune.json")
    sidecar["about"]["from"] = "gone/away"
    (lone / "headprune.json").write_text(json.dumps(sidecar))
    assert "--teacher" in run("finetune", lone, "-d", data_folder, code=1).stderr
    shutil.copytree(pruned_here / "pruned-4", pruned_here / "pruned-3")
    assert "2 pruned models (pruned-3, pruned-4)" in run("finetune", pruned_here, code=1).stderr


@pytest.mark.parametrize("part", ["weights", "config"])
def test_a_dense_model_that_changed_since(part: str, pruned_here: Path, bert_folder: Path, here: Path) -> None:
    """It would teach, and be measured as the model that was pruned."""
    source = here / "m"
    shutil.copytree(bert_folder, source)
    document = opened(pruned_here / "run.json")
    document["options"]["model"] = str(source)
    (pruned_here / "run.json").write_text(json.dumps(document))
    sidecar = opened(pruned_here / "pruned-4" / "headprune.json")
    sidecar["about"]["from"] = str(source)
    (pruned_here / "pruned-4" / "headprune.json").write_text(json.dumps(sidecar))
    if part == "weights":
        model = tf.AutoModelForSequenceClassification.from_pretrained(source)
        with torch.no_grad():
            model.classifier.weight[0, 0] += 1e-3
        model.save_pretrained(source)
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    error = " ".join(run("finetune", pruned_here / "pruned-4", "--epochs", 1, code=1).stderr.split())
    assert "has changed since" in error or "is not the model that was pruned" in error
    assert "--teacher" in error
