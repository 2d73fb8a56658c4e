"""The model card in every folder: what it says is so, and nobody's words are lost. And pushing to the Hub."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import huggingface_hub
import pytest
import torch
import transformers as tf
from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects
from torch import nn

import headprune as hp
from tests.support.commands import run, stderr_of
from tests.support.folders import common
from tests.support.stays import changed, edit, files, like
from tests.support.zoo import ZOO, randomise

THEIRS = """---
license: apache-2.0
language: en
tags: [movies, custom_code]
model-index: [{name: x, results: []}]
---
# My model

It reached 99 %.
"""
FIRST = "bert.encoder.layer.0.attention.self"


def pruned(path: Path, card: str | bytes | None = None) -> Any:
    """BERT without the first two heads of its first layer and all of its second; from a folder with this card."""
    model, example = ZOO["bert"]()
    if card is not None:
        model.save_pretrained(path)
        (path / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
        model = tf.AutoModelForSequenceClassification.from_pretrained(path)
    hp.prune(model, {FIRST: [0, 1], FIRST.replace("0", "1"): [0, 1, 2, 3]}, example)
    return model


def of(folder: Path) -> tuple[dict[str, Any], str]:
    """A card's metadata and its text."""
    card = ModelCard.load(folder / "README.md")
    return card.data.to_dict(), card.text


# -- what a card says -----------------------------------------------------------------------------


def test_a_card_says_what_is_known(tmp_path: Path) -> None:
    data, text = of(hp.save(pruned(tmp_path), tmp_path / "m"))
    assert data == {
        "library_name": "transformers", "pipeline_tag": "text-classification", "tags": ["headprune", "pruning", "custom_code"],
    }  # fmt: skip
    for line in (
        "# `BertForSequenceClassification`: 6 of 12 attention heads", f"| L0 | `{FIRST}` | 2 of 4 |",
        f"| L1 | `{FIRST.replace('0', '1')}` | 0 of 4 |", "None: no weight was refitted", "Not measured when this folder was saved.",
        'AutoModelForSequenceClassification.from_pretrained("path/to/this/folder", trust_remote_code=True)',
    ):  # fmt: skip
        assert line in text
    # Every prune counts from the first model, also of one that transformers loaded.
    loads = [hp.load, lambda m: tf.AutoModelForSequenceClassification.from_pretrained(m, trust_remote_code=True)]
    for number, load in enumerate(loads):
        model = load(tmp_path / "m")
        hp.prune(model, {FIRST: [0]})
        _, text = of(hp.save(model, tmp_path / str(number)))
        assert ": 5 of 12 attention heads" in text
        assert f"| L0 | `{FIRST}` | 1 of 4 |" in text
    edit(tmp_path / "m" / "headprune.json", heads=None)  # of an older version: the first number of heads is not known
    _, text = of(hp.save(hp.load(tmp_path / "m"), tmp_path / "older"))
    assert f"`{FIRST}` | 2 removed |" in text
    assert " of 12" not in text


def test_the_auto_class_that_people_use(tmp_path: Path) -> None:
    """BART's class fills masks too, and the report said to load it with AutoModelForMaskedLM. Dense models and modules have cards too."""
    data, text = of(hp.save(nn.Linear(3, 2), tmp_path / "own", example=torch.ones(1, 3)))
    assert (data["library_name"], data.get("pipeline_tag")) == ("headprune", None)
    assert 'headprune.load("path/to/this/folder", model=YourModel())' in text
    bart = tf.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    bert = tf.BertConfig(**common(num_hidden_layers=1))
    for model, auto in (
        (tf.BartForConditionalGeneration(bart), "ForSeq2SeqLM"), (tf.BertForMaskedLM(bert), "ForMaskedLM"), (tf.BertModel(bert), ""),
        (ZOO["llama"]()[0], "ForCausalLM"),
    ):  # fmt: skip
        data, text = of(hp.save(randomise(model), tmp_path / type(model).__name__))
        assert data["tags"] == ["headprune"]
        assert "No attention head was removed" in text
        assert f'AutoModel{auto}.from_pretrained("path/to/this/folder")' in text


def test_repair_is_told(tmp_path: Path) -> None:
    model, example = ZOO["llama"]()
    plan = {"model.layers.0.self_attn": [0, 1]}
    hp.repair(model, plan, [like(example, seed) for seed in range(3)])
    model.save_pretrained(tmp_path / "dense")  # repaired, but not pruned yet: it has a bias that its class has not
    hp.prune(model, plan, example)
    folder = hp.save(model, tmp_path / "m")
    again = hp.load(folder)
    hp.prune(again, plan)
    for each in (tmp_path / "dense", folder, hp.save(again, tmp_path / "n")):
        assert "`headprune.repair` was applied" in of(each)[1]
    assert "No attention head was removed" in of(tmp_path / "dense")[1]


# -- other people's words -------------------------------------------------------------------------


def test_a_source_cards_words_are_kept_and_its_results_are_not(tmp_path: Path) -> None:
    folder = hp.save(pruned(tmp_path / "dense", THEIRS), tmp_path / "m")
    data, text = of(folder)
    assert (data["license"], data["language"], data["tags"][-1]) == ("apache-2.0", "en", "movies")
    assert not {"model-index", "base_model"} & data.keys()  # a folder of this machine has no name on the Hub
    assert "[README-source.md](README-source.md)" in text
    again = hp.load(folder)  # and from there on
    hp.prune(again, {FIRST: [0]})
    further = hp.save(again, tmp_path / "n")
    assert [(f / "README-source.md").read_text() for f in (folder, further)] == [THEIRS] * 2
    assert of(further)[0]["license"] == "apache-2.0"


MARKUP = THEIRS.replace("apache-2.0", '"mit\\n---\\n# Not a title"').replace("movies", '"a: b"').encode()
STRANGE = [b"---\n: [\n---\n", b"no metadata", b"---\n- a\n---\n", b"\xff", b"---\ntags: 3\nlicense: {a: b}\n---\n"]


@pytest.mark.parametrize("card", [*STRANGE, MARKUP])
def test_a_card_of_any_kind(card: bytes, tmp_path: Path) -> None:
    """Metadata is no place for markup or YAML."""
    folder = hp.save(pruned(tmp_path / "dense", card), tmp_path / "m")
    assert (folder / "README-source.md").read_bytes() == card
    data, text = of(folder)
    assert data["tags"][0] == "headprune"
    assert "# Not a title" not in text
    if b"Not a title" in card:
        assert (data["license"], data["tags"][-1]) == ("mit\n---\n# Not a title", "a: b")


def test_a_model_from_the_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    there = tmp_path / "models--some--bert"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text("a" * 40)
    pruned(there / "snapshots" / ("a" * 40), THEIRS.replace("language", "base_model: google/bert\nlanguage"))
    model = tf.AutoModelForSequenceClassification.from_pretrained("some/bert", cache_dir=tmp_path)
    data, text = of(hp.save(model, tmp_path / "m"))
    assert (data["base_model"], data["license"]) == ("some/bert", "apache-2.0")
    assert "[`some/bert`](https://huggingface.co/some/bert)" in text
    assert not (tmp_path / "m" / "README-source.md").exists()
    assert of(hp.save(hp.load(tmp_path / "m"), tmp_path / "n"))[0]["base_model"] == "some/bert"
    model.config._name_or_path = "never/loaded"
    assert "base_model" not in of(hp.save(model, tmp_path / "o"))[0]


def test_somebody_elses_card_is_left_alone(tmp_path: Path) -> None:
    model = pruned(tmp_path)
    model.save_pretrained(tmp_path / "n")
    (tmp_path / "m").mkdir()
    for folder, words in (("m", THEIRS), ("n", (tmp_path / "n" / "README.md").read_text() + "\nMore.\n")):
        (tmp_path / folder / "README.md").write_text(words)
        hp.prune(model, {"bert.encoder.layer.2.attention.self": [0]})
        model.save_pretrained(tmp_path / folder)
        assert (tmp_path / folder / "README.md").read_text() == words


def test_a_runs_figures_are_those_of_metrics_json(
    here: Path, bert_folder: Path, data_folder: Path, brief: None
) -> None:
    shutil.copytree(bert_folder, "dense")
    Path("dense/README.md").write_text(THEIRS)
    keep = ("-k", "50%", "-k", 4, "-k", 2)
    run("prune", "dense", "-d", data_folder, *keep, "-s", "one-shot", "-L", 24, "-o", "r", "-q")
    metrics = json.loads(Path("r/metrics.json").read_text())
    assert [b["kept"] for b in metrics["budgets"]] == [4, 2]  # 50 % and 4 are one budget
    for b in metrics["budgets"]:
        folder, dense, model, change = Path("r") / b["checkpoint"], metrics["dense"], b["pruned"], b["change"]
        data, text = of(folder)
        assert data["license"] == "apache-2.0"
        assert (folder / "README-source.md").read_text() == THEIRS
        assert f"{b['kept']} of {b['total']} attention heads" in text
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
        dense_row, row = (next(r for r in rows if r[0] == name) for name in (f"{b['total']} (dense)", str(b["kept"])))
        assert sum(int(r[2].split(" of ")[0]) for r in rows if r[0] in ("L0", "L1")) == b["kept"]
        value = 100 * model["metrics"]["accuracy"]
        assert row[1] == f"{value:.1f} % ({100 * model['low']:.1f} % to {100 * model['high']:.1f} %)"
        assert dense_row[1].startswith(f"{100 * dense['metrics']['accuracy']:.1f} %")
        assert row[2].startswith(f"{100 * change['value']:+.2f} points ({100 * change['low']:+.2f} to")
        assert row[3] == change["verdict"]
        assert [r[-1].split(" ")[0] for r in (dense_row, row)] == [f"{m['parameters']:,}" for m in (dense, b)]
        losses, costs = ({r[0]: r for r in some} for some in (rows, [r for r in rows if r[1] == b["name"]]))
        assert losses[row[0]][3] == f"{model['metrics']['loss']:.4g}"
        for timed in metrics["latency"]["rows"]:
            faster, cells = timed["speedups"][b["name"]], costs[f"batch {timed['batch']} x {timed['length']} tokens"]
            assert cells[2] == f"{timed['timings'][b['name']]['median']:.2f}"
            assert f"{faster['ratio']:.2f}x ({faster['low']:.2f} to {faster['high']:.2f})" in cells[4]
        assert "`headprune.repair` was applied" in text
        assert f"{100 * b['repair']['without']['metrics']['accuracy']:.1f} %" in losses[row[0]]
        assert str(data_folder) not in text  # it may be published
    first, second, figures = Path("r/pruned-4"), Path("again"), "examples of `"
    model = hp.load(hp.save(hp.load(first), second))
    assert of(first) == of(second)
    model.save_pretrained(second)  # into its own folder
    assert figures in of(second)[1]
    hp.prune(model, {FIRST: [int(next(h for h in range(4) if h not in metrics["budgets"][0]["drop"].get(FIRST, [])))]})
    model.save_pretrained(second)  # another model: the figures are not its
    assert figures not in of(second)[1]


# -- the Hub --------------------------------------------------------------------------------------


class Hub:
    """What `huggingface_hub.HfApi` is asked for when it makes a repository and uploads a folder; its arguments are checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.files: dict[str, bytes] = {}
        self.refuse, self.cache, self.api = 0, cache, create_autospec(huggingface_hub.HfApi)
        answers = {"create_repo": self.create, "upload_folder": self.upload, "hf_hub_download": self.download}
        self.api.return_value.configure_mock(**{f"{name}.side_effect": answer for name, answer in answers.items()})
        monkeypatch.setattr(huggingface_hub, "HfApi", self.api)

    def create(self, repo: str, **_: Any) -> Any:
        if self.refuse:
            raise HfHubHTTPError("no", response=Mock(status_code=self.refuse, headers={}))
        return SimpleNamespace(repo_id=repo)

    def upload(self, *, repo_id: str, folder_path: Path, ignore_patterns: list[str], **_: Any) -> Any:
        content = files(Path(folder_path))
        self.files |= {name: content[name] for name in filter_repo_objects(content, ignore_patterns=ignore_patterns)}
        return SimpleNamespace(pr_url=None, commit_url=f"https://hub/{repo_id}/commit/c")

    def download(self, _: str, name: str, **__: Any) -> str:
        if name not in self.files:
            raise EntryNotFoundError.__new__(EntryNotFoundError)
        (self.cache / name).write_bytes(self.files[name])
        return str(self.cache / name)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Hub:
    return Hub(monkeypatch, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = hp.save(pruned(tmp_path / "dense", "---\ndatasets: [nyu-mll/glue]\n---\n"), tmp_path / "m")
    (folder / ".lock").write_text("")  # which is not pushed
    return folder


def test_a_folder_is_pushed_whole(hub: Hub, folder: Path) -> None:
    content = {name: text for name, text in files(folder).items() if name != ".lock"}
    said = run("push", folder, "me/smaller", "--dry-run").stdout
    assert not hub.api.called
    for line in ("Nothing was uploaded.", "datasets: ['nyu-mll/glue']", "license: not in the card"):
        assert line in said
    assert json.loads(run("push", folder, "me/smaller", "--dry-run", "--json").stdout)["files"].keys() == content.keys()
    done = run("push", folder, "me/smaller", "--private", "--json")
    assert json.loads(done.stdout)["url"].endswith("/me/smaller/commit/c")
    hub.api.return_value.create_repo.assert_called_once_with("me/smaller", private=True, exist_ok=True)
    assert hub.files == content
    assert {"modeling_headprune.py", "README.md", "headprune.json", "headprune.safetensors"} <= hub.files.keys()
    hub.files["README.md"] = b"---\nlicense: mit\n---\n# Ours\n"  # which people wrote there
    run("push", folder, "me/smaller")
    assert hub.files["README.md"].endswith(b"# Ours\n")


def test_a_model_pushes_what_it_saves(hub: Hub, tmp_path: Path) -> None:
    model, _ = changed("bert", "uneven")
    model.push_to_hub("me/smaller", tags=["mine"], commit_message="first")
    model.save_pretrained(tmp_path / "m")
    assert ModelCard(hub.files["README.md"].decode()).data.tags == ["headprune", "pruning", "custom_code", "mine"]
    assert {**files(tmp_path / "m"), "README.md": hub.files["README.md"]} == hub.files
    model.push_to_hub("me/smaller")  # the card is ours, so the next push replaces it
    assert b"mine" not in hub.files["README.md"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        model.push_to_hub("me/smaller", colour="red")
    model.save_pretrained(tmp_path / "n", push_to_hub=True, repo_id="me/smaller", commit_message="x", private=True)
    assert hub.files == files(tmp_path / "n")
    uploads = hub.api.return_value.upload_folder.call_args_list
    assert [upload.kwargs.get("commit_message") for upload in uploads] == ["first", None, "x"]


REFUSALS = [("refuse", 401, "you are not logged in. Run `hf auth login`"), ("refuse", 403, "your token may not write there"),
            ("HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE is set"), ("ENDPOINT", "http://127.0.0.1:9", "Check the name and the network"),
            ("name", "me//smaller/", "no name of a repository")]  # fmt: skip


@pytest.mark.parametrize(("what", "value", "why"), REFUSALS)
def test_refusals_are_one_line(what: str, value: Any, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "refuse":
        Hub(monkeypatch, folder).refuse = value
    else:  # as huggingface_hub itself refuses
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_made_up")
        monkeypatch.setattr(constants, what, value, raising=False)
    done = run("push", folder, value if what == "name" else "me/smaller", code=1)
    assert why in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_damaged_folder_is_not_pushed(hub: Hub, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    assert "not those that were saved" in stderr_of("push", folder, "me/smaller", code=1)
    assert "no folder" in stderr_of("push", folder / "none", "me/smaller", code=1)
    assert not hub.api.called
