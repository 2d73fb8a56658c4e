"""The model card in every folder: what it says is so, and nobody's words are lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from huggingface_hub import ModelCard, constants
from torch import nn

import headprune as hp
from headprune.app.documents import Metrics
from headprune.checkpoint import add_figures, code, load_call
from tests.support.commands import run
from tests.support.documents import opened
from tests.support.folders import tokenizer
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


def pruned(name: str = "bert") -> Any:
    model, example = ZOO[name]()
    first, second = hp.find_attention(model, example)[:2]
    hp.prune(model, {first.name: [0, 1], second.name: list(range(second.num_heads))}, example)
    return model


def dense_folder(path: Path, card: str | None = THEIRS) -> Path:
    model, _ = ZOO["bert"]()
    model.save_pretrained(path)
    if card is not None:
        (path / "README.md").write_text(card)
    return path


def of(folder: Path) -> tuple[dict[str, Any], str]:
    """A card's metadata and its text."""
    card = ModelCard.load(folder / "README.md")
    return card.data.to_dict(), card.text


def cut_from(folder: Path) -> Any:
    model = tf.AutoModelForSequenceClassification.from_pretrained(folder)
    hp.prune(model, {hp.find_attention(model)[0].name: [0]})
    return model


def test_a_card_says_what_is_known(tmp_path: Path) -> None:
    data, text = of(hp.save(pruned(), tmp_path / "m"))
    assert data == {
        "library_name": "transformers", "pipeline_tag": "text-classification", "tags": ["headprune", "pruning", "custom_code"],
    }  # fmt: skip
    assert "# `BertForSequenceClassification`: 6 of 12 attention heads" in text
    assert "| L0 | `bert.encoder.layer.0.attention.self` | 2 of 4 |" in text
    assert "| L1 | `bert.encoder.layer.1.attention.self` | 0 of 4 |" in text
    assert "None: no weight was refitted" in text
    assert "Not measured when this folder was saved." in text
    assert 'AutoModelForSequenceClassification.from_pretrained("path/to/this/folder", trust_remote_code=True)' in text


def test_dense_folders_and_modules_of_nobodys(tmp_path: Path) -> None:
    model, _ = ZOO["llama"]()
    data, text = of(hp.save(model, tmp_path / "dense"))
    assert (data["pipeline_tag"], data["tags"]) == ("text-generation", ["headprune"])
    assert "No attention head was removed" in text
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/folder")' in text
    assert load_call(tmp_path / "dense").code() == "AutoModelForCausalLM.from_pretrained(folder)"

    own = nn.Linear(3, 2)
    data, text = of(hp.save(own, tmp_path / "own", example=torch.ones(1, 3)))
    assert (data["library_name"], data.get("pipeline_tag")) == ("headprune", None)
    assert 'headprune.load("path/to/this/folder", model=YourModel())' in text


def test_every_prune_counts_from_the_first_model(tmp_path: Path) -> None:
    model = hp.load(hp.save(pruned(), tmp_path / "m"))
    hp.prune(model, {"bert.encoder.layer.0.attention.self": [0]})
    _, text = of(hp.save(model, tmp_path / "n"))
    assert ": 5 of 12 attention heads" in text
    assert "| L0 | `bert.encoder.layer.0.attention.self` | 1 of 4 |" in text


def test_heads_that_nobody_counted_are_not_made_up(tmp_path: Path) -> None:
    """Of a folder of an older version the first number of heads is not known."""
    folder = hp.save(pruned(), tmp_path / "m")
    sidecar = opened(folder / "headprune.json")
    del sidecar["heads"]
    (folder / "headprune.json").write_text(json.dumps(sidecar))
    older = hp.load(folder)
    hp.prune(older, {"bert.encoder.layer.0.attention.self": [0]})
    _, text = of(hp.save(older, tmp_path / "older"))
    assert "`bert.encoder.layer.0.attention.self` | 3 removed |" in text
    assert " of 12" not in text


def test_a_model_that_transformers_loaded_counts_on(tmp_path: Path) -> None:
    folder = hp.save(pruned(), tmp_path / "m")
    remote = tf.AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    hp.prune(remote, {"bert.encoder.layer.0.attention.self": [0]})
    _, text = of(hp.save(remote, tmp_path / "remote"))
    assert ": 5 of 12 attention heads" in text
    assert "| L0 | `bert.encoder.layer.0.attention.self` | 1 of 4 |" in text


def test_repair_is_told(tmp_path: Path) -> None:
    model, example = ZOO["llama"]()
    layer = hp.find_attention(model, example)[0].name
    hp.repair(model, {layer: [0, 1]}, [example])
    hp.prune(model, {layer: [0, 1]}, example)
    folder = hp.save(model, tmp_path / "m")
    assert "`headprune.repair` was applied" in of(folder)[1]
    again = hp.load(folder)
    hp.prune(again, {layer: [0, 1]})
    assert "`headprune.repair` was applied" in of(hp.save(again, tmp_path / "n"))[1]


def test_a_source_cards_words_are_kept_and_its_results_are_not(tmp_path: Path) -> None:
    model = cut_from(dense_folder(tmp_path / "dense"))
    folder = hp.save(model, tmp_path / "m")
    data, text = of(folder)
    assert (data["license"], data["language"], data["tags"][-1]) == ("apache-2.0", "en", "movies")
    assert "model-index" not in data
    assert "base_model" not in data  # a folder of this machine has no name on the Hub
    assert "[README-source.md](README-source.md)" in text
    assert (folder / "README-source.md").read_text() == THEIRS

    again = hp.load(folder)  # and from there on
    hp.prune(again, {hp.find_attention(again)[1].name: [0]})
    further = hp.save(again, tmp_path / "n")
    assert (further / "README-source.md").read_text() == THEIRS
    assert of(further)[0]["license"] == "apache-2.0"


@pytest.mark.parametrize(
    "card", [b"---\n: [\n---\n", b"no metadata", b"---\n- a\n---\n", b"\xff", b"---\ntags: 3\nlicense: {a: b}\n---\n"]
)
def test_a_card_of_any_kind(card: bytes, tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense")
    (dense / "README.md").write_bytes(card)
    folder = hp.save(cut_from(dense), tmp_path / "m")
    assert (folder / "README-source.md").read_bytes() == card
    assert of(folder)[0]["tags"][0] == "headprune"


def test_a_model_from_the_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    there = tmp_path / "models--some--bert"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text("a" * 40)
    dense_folder(there / "snapshots" / ("a" * 40), THEIRS.replace("language", "base_model: google/bert\nlanguage"))
    model = tf.AutoModelForSequenceClassification.from_pretrained("some/bert", cache_dir=tmp_path)
    hp.prune(model, {hp.find_attention(model)[0].name: [0]})
    data, text = of(hp.save(model, tmp_path / "m"))
    assert (data["base_model"], data["license"]) == ("some/bert", "apache-2.0")
    assert "[`some/bert`](https://huggingface.co/some/bert)" in text
    assert not (tmp_path / "m" / "README-source.md").exists()
    assert of(hp.save(hp.load(tmp_path / "m"), tmp_path / "n"))[0]["base_model"] == "some/bert"
    model.config._name_or_path = "never/loaded"
    assert "base_model" not in of(hp.save(model, tmp_path / "o"))[0]


def test_saved_loaded_and_saved_keeps_the_card_with_its_figures(tmp_path: Path) -> None:
    first = hp.save(cut_from(dense_folder(tmp_path / "dense")), tmp_path / "a")
    add_figures(first, "On 7 examples it lost nothing.")
    assert "On 7 examples" in of(first)[1]
    second = hp.save(hp.load(first), tmp_path / "b")
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    model = hp.load(second)
    model.save_pretrained(second)  # into its own folder
    assert "On 7 examples" in of(second)[1]

    hp.prune(model, {hp.find_attention(model)[0].name: [0]})  # another model: the figures are not its
    assert "On 7 examples" not in of(hp.save(model, tmp_path / "c"))[1]
    model.save_pretrained(second)
    assert "On 7 examples" not in of(second)[1]


def test_somebody_elses_card_is_left_alone(tmp_path: Path) -> None:
    model = pruned()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README.md").write_text(THEIRS)
    model.save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "README.md").read_text() == THEIRS
    model.save_pretrained(tmp_path / "n")
    mine = (tmp_path / "n" / "README.md").read_text() + "\nMore.\n"
    (tmp_path / "n" / "README.md").write_text(mine)
    hp.prune(model, {"bert.encoder.layer.2.attention.self": [0]})
    model.save_pretrained(tmp_path / "n")
    assert (tmp_path / "n" / "README.md").read_text() == mine


def test_trainers_card_stays(tmp_path: Path) -> None:
    model = pruned()
    options = tf.TrainingArguments(str(tmp_path / "t"), report_to=[], use_cpu=True)
    trainer = tf.Trainer(model, options, processing_class=tokenizer())
    trainer.save_model()
    assert "6 of 12 attention heads" in of(tmp_path / "t")[1]
    trainer.create_model_card(model_name="mine")
    theirs = (tmp_path / "t" / "README.md").read_text()
    assert "generated_from_trainer" in theirs
    trainer.save_model()
    assert (tmp_path / "t" / "README.md").read_text() == theirs


@pytest.mark.parametrize("name", ["a|b", "`a`", "a``b", "</code><script>", "a\nb\n# c", "[x](y)", "", "\u202ea"])
def test_names_are_never_markup(name: str) -> None:
    written = code(name)
    fence = written[: len(written) - len(written.lstrip("`"))]
    assert fence
    assert written.endswith(fence)
    inside = written[len(fence) : -len(fence)]
    assert fence not in inside
    assert "\n" not in inside
    assert "|" not in inside.replace("\\|", "")


def test_metadata_is_no_place_for_markup_or_yaml(tmp_path: Path) -> None:
    card = THEIRS.replace("apache-2.0", '"mit\\n---\\n# Not a title"').replace("movies", '"a: b"')
    data, text = of(hp.save(cut_from(dense_folder(tmp_path / "dense", card)), tmp_path / "m"))
    assert data["license"] == "mit\n---\n# Not a title"
    assert "a: b" in data["tags"]
    assert "# Not a title" not in text


def test_the_figures_of_a_run_are_those_of_metrics_json(
    here: Path, bert_folder: Path, data_folder: Path, brief: None
) -> None:
    shutil.copytree(bert_folder, "dense")
    Path("dense/README.md").write_text(THEIRS)
    run("prune", "dense", "-d", data_folder, "-k", "50%", "-k", 2, "-s", "one-shot", "-L", 24, "-o", "r", "-q")
    metrics = Metrics.read(Path("r/metrics.json"))
    for b in metrics.budgets:
        data, text = of(Path("r") / b.checkpoint)
        assert data["license"] == "apache-2.0"
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
        costs = {row[0]: row[1:] for row in rows}
        assert f"{b.kept} of {b.total} attention heads" in text
        left = [int(row[2].split(" of ")[0]) for row in rows if row[0] in ("L0", "L1")]
        assert sum(left) == b.kept
        dense, model, change = metrics.dense, b.pruned, b.change
        value = 100 * model.metrics["accuracy"]
        assert costs["accuracy"][1] == f"{value:.1f} % ({100 * model.low:.1f} % to {100 * model.high:.1f} %)"
        assert costs["accuracy"][0].startswith(f"{100 * dense.metrics['accuracy']:.1f} %")
        assert costs["accuracy"][2].startswith(f"{100 * change.value:+.2f} points ({100 * change.low:+.2f} to")
        assert change.verdict in costs["accuracy"][2]
        assert costs["loss"][:2] == [f"{m.metrics['loss']:.4g}" for m in (dense, model)]
        assert costs["parameters"][:2] == [f"{dense.parameters:,}", f"{b.parameters:,}"]
        for timed in metrics.latency.rows:
            faster = timed.speedups[b.name]
            found = costs[f"ms, batch {timed.batch} x {timed.length} tokens"]
            assert found[1] == f"{timed.timings[b.name].median:.2f}"
            assert f"{faster.ratio:.2f}x ({faster.low:.2f} to {faster.high:.2f})" in found[2]
        assert b.repair is not None
        assert "`headprune.repair` was applied" in text
        assert (
            f"Without the repair, the accuracy of this model is {100 * b.repair.without.metrics['accuracy']:.1f} %"
            in text
        )
        assert str(data_folder) not in text  # it may be published
    assert (Path("r") / b.checkpoint / "README-source.md").read_text() == THEIRS


def test_a_dense_model_with_an_added_bias(tmp_path: Path) -> None:
    """Repaired, but not pruned yet."""
    model, example = ZOO["llama"]()
    hp.repair(model, {hp.find_attention(model, example)[0].name: [0, 1]}, [example])
    model.save_pretrained(tmp_path / "m")
    _, text = of(tmp_path / "m")
    assert "No attention head was removed" in text
    assert "`headprune.repair` was applied" in text


def test_a_model_that_writes_text_is_loaded_to_write_text(tmp_path: Path) -> None:
    """BART's class fills masks too, and the report said to load it with AutoModelForMaskedLM."""
    bart = tf.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    bert = tf.BertConfig(
        vocab_size=50, hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=16
    )
    for model, auto in (
        (tf.BartForConditionalGeneration(bart), "Seq2SeqLM"), (tf.BertForMaskedLM(bert), "MaskedLM"), (tf.BertModel(bert), ""),
    ):  # fmt: skip
        folder = tmp_path / type(model).__name__
        hp.save(randomise(model), folder)
        assert load_call(folder).auto_class == f"AutoModel{f'For{auto}' if auto else ''}"
