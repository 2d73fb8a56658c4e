"""Folders from elsewhere: whatever their files say, nothing that came with them runs, and no other file is read."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from typer.testing import CliRunner

import headprune as hp
from headprune.app.data import DataOptions
from headprune.app.finetune_run import FinetuneRun, _load
from headprune.app.models import dummy_input, load_model
from headprune.app.runs import RunFolder
from headprune.app.workflow import Options
from headprune.cli import app
from headprune.files import write_json
from headprune.scoring import METHODS
from tests.support.commands import run
from tests.support.documents import RUN, opened

runner = CliRunner()


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = opened(path)
    change(document)
    path.write_text(json.dumps(document))


@pytest.fixture
def infected(here: Path, bert_folder: Path) -> Path:
    """A model whose code leaves a mark wherever it is imported."""
    folder = here / "infected"
    shutil.copytree(bert_folder, folder)
    (folder / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(here / 'ran')!r}).touch()\n"
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "class Config(BertConfig):\n    model_type = 'evil'\n"
        "class Model(BertForSequenceClassification):\n    config_class = Config\n"
    )

    def change(config: dict[str, Any]) -> None:
        config["model_type"] = "evil"
        config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}

    edit(folder / "config.json", change)
    return folder


@pytest.fixture
def sent(here: Path, bert_folder: Path, data_folder: Path, infected: Path) -> Path:
    """A run folder as someone may send it: it names a model with code, and says that the code is trusted."""
    folder = here / "sent"
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    tokens = tf.AutoTokenizer.from_pretrained(bert_folder)(
        ["good film", "a bad one"], padding=True, return_tensors="pt"
    )
    scores = hp.score(model, [{**tokens, "labels": torch.tensor([1, 0])}], method="random")
    scores.save(folder / "scores.json")
    options = Options(str(infected), DataOptions(str(data_folder), limit=10), task="sequence-classification")
    write_json(folder / "run.json", "run", {**RUN, "options": {**asdict(options), "trust_remote_code": True}})
    return folder


def test_a_run_folder_cannot_allow_code(sent: Path, here: Path) -> None:
    for source in (["--scores", str(sent)], ["-o", str(sent)]):
        result = runner.invoke(app, ["prune", "-k", "4", *source])
        assert result.exit_code == 1
        assert "add --trust-remote-code" in result.stderr
    assert not (here / "ran").exists()
    assert not RunFolder(sent).read_run().options.trust_remote_code


def test_code_runs_where_this_command_line_says_so(sent: Path, here: Path) -> None:
    result = runner.invoke(app, ["prune", "-k", "4", "--scores", str(sent), "--trust-remote-code", "-o", "out"])
    assert (here / "ran").exists()
    assert result.exit_code == 1  # its scores are another model's


def test_finetune_takes_no_trust_from_a_folder(sent: Path, here: Path, bert_folder: Path) -> None:
    """Neither for the pruned model nor for the dense one that its folder names."""
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    tokenizer = tf.AutoTokenizer.from_pretrained(bert_folder)
    about = {"task": "sequence-classification", "from": str(here / "infected")}
    hp.checkpoint.save(model, sent / "pruned-8", processor=tokenizer, about=about)
    result = runner.invoke(app, ["finetune", str(sent / "pruned-8")])
    assert result.exit_code == 1
    assert "add --trust-remote-code" in result.stderr
    assert not (here / "ran").exists()


def test_a_pruned_model_of_its_own_class_loads_where_its_code_may_run(infected: Path, here: Path) -> None:
    model = tf.AutoModelForSequenceClassification.from_pretrained(infected, trust_remote_code=True).eval()
    hp.prune(model, {"L0": [1], "L1": [0, 2]})
    folder = hp.save(model, here / "pruned")
    assert "trust_remote_code=True)" in (folder / "README.md").read_text()
    (here / "ran").unlink()
    with pytest.raises(hp.HeadPruneError, match="as code that was not run") as refused:
        hp.load(folder)
    assert "--trust-remote-code" in refused.value.hint
    assert not (here / "ran").exists()
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        again = hp.load(folder, trust_remote_code=True)
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
        loaded = load_model(str(folder), task="sequence-classification", trust_remote_code=True, with_processor=False)
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    assert type(again).__name__ == type(loaded.model).__name__ == "Model"  # not transformers' class below it
    assert hp.checkpoint.load_call(folder).code() == "headprune.load(folder, trust_remote_code=True)"
    edit(folder / "config.json", lambda config: config.pop("auto_map"))
    with pytest.raises(hp.HeadPruneError, match="cannot build"):
        hp.load(folder, trust_remote_code=True)


@pytest.mark.slow
def test_a_model_of_its_own_class_is_pruned_to_the_end(infected: Path, here: Path, data_folder: Path) -> None:
    """All of the work was done, and then the folder could not be loaded again."""
    asked = ["prune", str(infected), "-d", str(data_folder), "-k", "50%", "--trust-remote-code", "-o", "out"]
    result = runner.invoke(app, [*asked, "--limit", "40"])
    assert result.exit_code == 0, result.stderr
    assert "trust_remote_code=True" in (here / "out" / "report.md").read_text()
    assert "without headprune" not in (here / "out" / "report.md").read_text()


@pytest.mark.parametrize("about", [{}, {"from": 3}, {"from": ["x"]}, {"from": "m", "task": ["x"]}])
def test_what_a_checkpoint_says_of_itself_may_be_wrong(
    about: dict[str, Any], bert_folder: Path, tmp_path: Path
) -> None:
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    folder = hp.checkpoint.save(model, tmp_path / "pruned", about=about)
    with pytest.raises(hp.HeadPruneError):
        _load(FinetuneRun(folder), folder, None)


DAMAGES: list[tuple[str, Any]] = [
    ("model", None), ("model", ["a"]), ("data", None), ("data", []), ("seed", "0"), ("seed", True), ("seed", 10**20),
    ("device", 3), ("dtype", ["float32"]), ("task", {}), ("distil", "yes"), ("keep", 1), ("scoring", {"steps": "many"}),
    ("scoring", {"settings": 1}), ("made-up", 1), ("revision", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), DAMAGES, ids=str)
def test_damaged_options_are_told(name: str, value: Any, sent: Path) -> None:
    edit(sent / "run.json", lambda run: run["options"].update({name: value}))
    result = runner.invoke(app, ["prune", "-k", "4", "--scores", str(sent)])
    assert result.exit_code == 1
    assert "unexpected" not in result.stderr, result.stderr
    assert (re.search("run.json is (damaged|not readable)", result.stderr) is not None) != (
        "--seed is" in result.stderr
    )


def test_a_run_without_options(sent: Path) -> None:
    edit(sent / "run.json", lambda run: run.pop("options"))
    assert "run.json is damaged" in runner.invoke(app, ["prune", "-k", "4", "--scores", str(sent)]).stderr


@pytest.fixture
def checkpoint(bert_folder: Path, tmp_path: Path) -> Path:
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    return hp.checkpoint.save(model, tmp_path / "saved")


@pytest.mark.parametrize("name", [
    "os.system", "builtins.eval", "transformers.pipelines.pipeline", "transformers.AutoModel", "evil.Model",
    "transformers.models.bert.modeling_bert.BertConfig", "transformers.models.bert.modeling_bert.torch",
    "transformers.models.auto.modeling_auto.AutoModel", "transformers.models.no.such.Thing", "", "x", None, 3,
])  # fmt: skip
def test_a_checkpoint_names_a_class_that_is_not_a_model(name: Any, checkpoint: Path) -> None:
    edit(checkpoint / "headprune.json", lambda sidecar: sidecar.update({"class": name}))
    with pytest.raises(hp.HeadPruneError, match=r"cannot build|has no"):
        hp.load(checkpoint)


@pytest.mark.parametrize("place", ["../saved/model.safetensors", "/etc/passwd", "config.json", "", None, 3])
def test_a_checkpoint_names_another_file(place: Any, checkpoint: Path) -> None:
    edit(checkpoint / "headprune.json", lambda sidecar: sidecar.update({"weights": place}))
    with pytest.raises(hp.HeadPruneError, match="as its weights"):
        hp.load(checkpoint)


@pytest.mark.parametrize("file", ["headprune.json", "config.json"])
def test_attention_kernels_from_the_hub_are_code(file: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was fetched")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetched)
    key = "attention" if file == "headprune.json" else "attn_implementation"
    edit(checkpoint / file, lambda document: document.update({key: "someone/attention"}))
    with pytest.raises(hp.HeadPruneError, match="kernel someone/attention"):
        load_model(str(checkpoint), with_processor=False)
    if file == "headprune.json":
        with pytest.raises(hp.HeadPruneError, match="kernel someone/attention"):
            hp.load(checkpoint)
    (checkpoint / "headprune.json").unlink()
    if file == "config.json":
        with pytest.raises(hp.HeadPruneError, match="kernel someone/attention"):
            load_model(str(checkpoint), with_processor=False)


@pytest.mark.parametrize("name", ["pipeline", "AutoModel", "BertModel", "nothing"])
def test_an_image_processor_is_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.zoo import vit

    def no_torchvision(*_: object, **__: object) -> None:
        raise ImportError("torchvision")

    model, _ = vit()
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name}))
    monkeypatch.setattr(tf.AutoImageProcessor, "from_pretrained", no_torchvision)
    with pytest.raises(hp.HeadPruneError, match="no image processor that loads"):
        load_model(str(tmp_path))


def test_a_pickle_in_the_place_of_weights_does_not_run(bert_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(bert_folder, folder)
    (folder / "model.safetensors").unlink()
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    torch.save({"weights": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(hp.HeadPruneError, match="does not load"):
        load_model(str(folder))
    assert not mark.exists()


def test_code_beside_a_known_model_is_told(bert_folder: Path, tmp_path: Path) -> None:
    """Where transformers has a class of that name it is used, and a reader must know."""
    folder = tmp_path / "own"
    shutil.copytree(bert_folder, folder)
    edit(folder / "config.json", lambda c: c.update({"auto_map": {"AutoModelForSequenceClassification": "own.Bert"}}))
    (note,) = load_model(str(folder)).notes
    assert "code of its own, which was not run" in note
    for command in (["inspect", folder], ["show", folder, "-t", "a film"]):  # which said nothing
        assert "code of its own, which was not run" in " ".join(run(*command).stderr.split())
    assert "BertForSequenceClassification was used instead" in note
    # Of a folder that headprune wrote, the code is for those without headprune: nothing else was used instead.
    model = tf.BertForSequenceClassification.from_pretrained(bert_folder).eval()
    example = dummy_input(load_model(str(bert_folder), with_processor=False), 2, 5)
    hp.prune(model, {hp.find_attention(model, example)[0].name: [1]}, example)
    hp.save(model, tmp_path / "pruned")
    assert "auto_map" in opened(tmp_path / "pruned" / "config.json")
    assert load_model(str(tmp_path / "pruned"), with_processor=False).notes == ()
    assert "random" in METHODS  # registered by import alone, so `sent` could be made
