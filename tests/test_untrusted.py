"""Folders from elsewhere: whatever their files say, nothing that came with them runs, and no other file is read."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import headprune as hp
from tests.support.commands import run
from tests.support.errors import refuses
from tests.support.folders import tokenizer
from tests.support.stays import changed, edit, logits, sidecar
from tests.support.zoo import vit

KERNELS = "transformers.modeling_utils.lazy_import_flash_attention"


class Evil:
    """A pickle that leaves a mark in the current folder wherever it is read."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


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
    code = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    edit(folder / "config.json", model_type="evil", auto_map=code)
    return folder


@pytest.fixture
def sent(infected: Path, scored: Path) -> Path:
    """A run folder as someone may send it: it names a model with code, and says that the code is trusted."""
    options = json.loads((scored / "run.json").read_text())["options"]
    options["loading"]["trust_remote_code"] = True
    edit(scored / "run.json", options={**options, "model": str(infected)})
    return scored


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return hp.save(changed("bert", "uneven")[0], tmp_path / "saved", processor=tokenizer())


# -- code that comes with a model -----------------------------------------------------------------


def test_a_folder_cannot_allow_code(sent: Path, bert_folder: Path) -> None:
    """Neither a run folder, nor a pruned model that names a dense one."""
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    about = {"task": "sequence-classification", "from": "infected"}
    hp.save(model, sent / "pruned-8", processor=tokenizer(), about=about)
    prune = ["prune", "-k", 4]
    for command in ([*prune, "--scores", sent], [*prune, "-o", sent], ["finetune", sent / "pruned-8"]):
        assert "add --trust-remote-code" in run(*command, code=1).stderr
    assert not Path("ran").exists()
    run(*prune, "--scores", sent, "--trust-remote-code", "-o", "out", code=1)  # its scores are another model's
    assert Path("ran").exists()


def test_a_pruned_model_of_its_own_class_loads_where_its_code_may_run(infected: Path) -> None:
    model = tf.AutoModelForSequenceClassification.from_pretrained(infected, trust_remote_code=True).eval()
    hp.prune(model, {"L0": [1], "L1": [0, 2]})
    folder = hp.save(model, Path("pruned"), processor=tokenizer())
    assert 'headprune.load("path/to/this/folder", trust_remote_code=True)' in (folder / "README.md").read_text()
    Path("ran").unlink()
    refuses(r"as code that was not run.*--trust-remote-code", hp.load, folder)
    assert "--trust-remote-code" in run("inspect", folder, code=1).stderr
    assert not Path("ran").exists()
    example = {"input_ids": torch.arange(5, 15)[None]}
    again = hp.load(folder, trust_remote_code=True)
    torch.testing.assert_close(logits(again, example), logits(model, example))
    assert type(again).__name__ == "Model"  # not transformers' class below it
    run("inspect", folder, "--trust-remote-code", "--task", "sequence-classification")
    edit(folder / "config.json", auto_map=None)
    refuses("cannot build", hp.load, folder, trust_remote_code=True)


@pytest.mark.parametrize("name", ["Mine", "BertForSequenceClassification"])
def test_a_class_of_its_own_with_transformers_config(name: str, bert_folder: Path, here: Path) -> None:
    """Its code goes along, also from one saved folder to the next; a class may be named as one of transformers."""
    shutil.copytree(bert_folder, "own")
    Path("own/more.py").write_text("from transformers import BertForSequenceClassification as Base\n")
    Path("own/mine.py").write_text(f"from .more import Base\nclass {name}(Base):\n    mine = True\n")
    edit(Path("own/config.json"), auto_map={"AutoModelForSequenceClassification": f"mine.{name}"})
    model = tf.AutoModelForSequenceClassification.from_pretrained("own", trust_remote_code=True).eval()
    hp.prune(model, {"L0": [1]})
    shutil.rmtree("own")
    for folder in ("first", "second"):
        card = (hp.save(model, folder) / "README.md").read_text()
        assert 'headprune.load("path/to/this/folder", trust_remote_code=True)' in card
        model = hp.load(folder, trust_remote_code=True)
        assert (type(model).__name__, model.mine) == (name, True)


@pytest.mark.slow
def test_a_model_of_its_own_class_is_pruned_to_the_end(infected: Path, data_folder: Path) -> None:
    """All of the work was done, and then the folder could not be loaded again."""
    run("prune", infected, "-d", data_folder, "-k", "50%", "--trust-remote-code", "-o", "out", "--limit", 40)
    assert "trust_remote_code=True" in Path("out/report.md").read_text()
    assert "without headprune" not in Path("out/report.md").read_text()


def test_code_beside_a_known_model_is_told(bert_folder: Path, here: Path) -> None:
    """Where transformers has a class of that name it is used, and a reader must know."""
    shutil.copytree(bert_folder, "own")
    edit(Path("own/config.json"), auto_map={"AutoModelForSequenceClassification": "own.Bert"})
    # Of a folder that headprune wrote, the code is for those without headprune: nothing else was used instead.
    hp.save(changed("bert", "uneven")[0], Path("pruned"), processor=tokenizer())
    for command in (["inspect"], ["show", "-t", "a film"]):
        said = " ".join(run(*command, "own").stderr.split())
        assert "code of its own, which was not run" in said
        assert "BertForSequenceClassification was used instead" in said
        assert "code of its own" not in run(*command, "pruned").stderr


@pytest.mark.parametrize("file", ["headprune.json", "config.json"])
def test_attention_kernels_from_the_hub_are_code(file: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, lambda *_, **__: pytest.fail("a kernel was fetched"))
    edit(saved / file, **{"attention" if file == "headprune.json" else "attn_implementation": "someone/attention"})
    assert "kernel someone/attention" in run("inspect", saved, code=1).stderr
    if file == "config.json":
        (saved / "headprune.json").unlink()
        assert "kernel someone/attention" in run("inspect", saved, code=1).stderr


def test_a_pickle_in_the_place_of_weights_does_not_run(bert_folder: Path, here: Path) -> None:
    shutil.copytree(bert_folder, "pickled")
    Path("pickled/model.safetensors").unlink()
    torch.save({"weights": Evil()}, "pickled/pytorch_model.bin")
    assert "does not load" in run("inspect", "pickled", code=1).stderr
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["pipeline", "AutoModel", "BertModel", "nothing"])
def test_an_image_processor_is_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_torchvision(*_: object, **__: object) -> None:
        raise ImportError("torchvision")

    vit()[0].save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name}))
    monkeypatch.setattr(tf.AutoImageProcessor, "from_pretrained", no_torchvision)
    image = Path(__file__).parent.parent / "docs" / "quality.png"
    assert "no image processor that loads" in run("show", tmp_path, "--image", image, code=1).stderr


# -- what documents say ---------------------------------------------------------------------------

SIDECARS: list[tuple[str, Any, str]] = [
    *(("class", name, "cannot build|has no") for name in (
        "os.system", "builtins.eval", "transformers.pipelines.pipeline", "transformers.AutoModel", "evil.Model",
        "transformers.models.bert.modeling_bert.BertConfig", "transformers.models.bert.modeling_bert.torch",
        "transformers.models.auto.modeling_auto.AutoModel", "transformers.models.no.such.Thing", "x", 3,
        "transformers.models.bert.tokenization_bert.BertTokenizer", "transformers.utils.logging.get_logger")),
    ("attention", "kernels-community/flash-attn", "code that would run here"), ("about", 3, "about is"), ("files", {"x": 1}, "files is"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "told"), SIDECARS, ids=str)
def test_a_checkpoint_is_data(key: str, value: Any, told: str, saved: Path) -> None:
    """No file outside it is read, nothing but a model is built, no kernel is fetched."""
    edit(saved / "headprune.json", **{key: value})
    refuses(told, hp.load, saved)


def test_a_checkpoint_leads_nowhere_else(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    edit(saved / "headprune.json", files={**sidecar(saved)["files"], "../secret": "0", "/etc/passwd": "0"})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="headprune")
        hp.load(saved)
    for name in ("../secret", "/etc/passwd", "config.json", "", 3):  # only files of the usual names are read
        edit(saved / "headprune.json", weights=name)
        hp.load(saved)
    index = {"weight_map": {"x": "../saved/model.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    (saved / "model.safetensors").rename(saved / "model-00001-of-00001.safetensors")
    hp.load(saved)
    edit(saved / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    (saved / "model.safetensors.index.json").unlink()
    (saved / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refuses(r"config\.json does not load", hp.load, saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("about", [{}, {"from": 3}, {"from": ["x"]}, {"from": "m", "task": ["x"]}])
def test_what_a_checkpoint_says_of_itself_may_be_wrong(about: dict[str, Any], saved: Path) -> None:
    edit(saved / "headprune.json", about=about)
    assert "unexpected" not in run("finetune", saved, code=1).stderr
