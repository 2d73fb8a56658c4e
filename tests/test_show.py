"""`headprune show`, heads.json, its pictures and its section of the report."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image

import headprune as hp
from tests.support.commands import run
from tests.support.documents import METRICS
from tests.support.folders import common, tokenizer
from tests.support.reports import reported
from tests.support.zoo import randomise

NASTY = "good [bold]film[/] $x$ \x1b[31m <b> |a|"
LABELS = ("[bold]", "$x", "$y_{", "<b>", "|a|")


def shown(*arguments: Any) -> dict[str, Any]:
    """The document that a command prints."""
    document: dict[str, Any] = json.loads(run("show", *arguments, "--json", "-q").stdout)
    return document


@pytest.mark.drawn
def test_a_text_and_one_head_of_it(bert_folder: Path, tmp_path: Path) -> None:
    """All heads, and what they do; of one head, for each token the largest weights first, as shares."""
    pictures = tmp_path / "all.png", tmp_path / "one.png"
    everything = run("show", bert_folder, "--text", "good film", "-o", pictures[0], "-q").stdout
    assert all(text in everything for text in ("L0", "H3", "Roles on 1 example, 4 tokens"))
    one = run("show", bert_folder, "--text", "good dull fun", "--head", "l1.h2", "-o", pictures[1], "-q").stdout
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    weights = list(hp.attention_weights(model, dict(tokenizer()("good dull fun", return_tensors="pt"))).values())
    tokens = ["[CLS]", "good", "dull", "fun", "[SEP]"]
    lines = [line.split() for line in one.splitlines()]
    for token, row in zip(tokens, weights[1][0, 2], strict=True):
        best = int(row.argmax())
        line = next(line for line in lines if line[:1] == [token] and line[2:])
        assert line[1] == tokens[best]
        assert abs(float(line[2].rstrip("%")) - 100 * float(row[best])) < 0.8
    assert all(Image.open(picture).size[0] > 100 for picture in pictures)
    for head, message in (("L9.H1", "is no head"), ("L1.H9", "has no head 9")):
        assert message in run("show", bert_folder, "--text", "good", "--head", head, code=1).stderr


def test_the_document(bert_folder: Path, data_folder: Path) -> None:
    """Profiles over data, samples within 1/510 of the weights, small."""
    heads = shown(bert_folder, "-d", data_folder)
    assert heads["examples"] > 20
    assert [len(layer["heads"]) for layer in heads["layers"]] == [4, 4]
    assert all(p["role"] and p["because"] for layer in heads["layers"] for p in layer["heads"])
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    for sample in heads["samples"]:
        ids = torch.tensor([tokenizer().convert_tokens_to_ids(sample["positions"]["input"]["labels"])])
        weights = hp.attention_weights(model, {"input_ids": ids}).values()
        for layer, whole in zip(sample["layers"], weights, strict=True):
            held = np.frombuffer(base64.b64decode(layer["weights"]), np.uint8).reshape(layer["shape"])
            assert np.abs(held / 255 * layer["scale"] - whole[0].numpy()).max() <= 1 / 510 + 1e-5
    assert len(json.dumps(heads)) < 100_000


@pytest.mark.drawn
def test_a_text_is_never_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it steer the terminal, the picture's formulas or the report's tables."""
    folder, words = tmp_path / "nasty", tokenizer()
    words.add_tokens(list(LABELS))
    randomise(tf.BertForSequenceClassification(tf.BertConfig(**common()))).save_pretrained(folder)
    words.save_pretrained(folder)
    for head in ([], ["--head", "L0.H1"]):
        assert "\x1b" not in run("show", folder, "--text", NASTY, "-q", "-o", tmp_path / "a.png", *head).stdout
    document = shown(folder, "--text", f"{' '.join(LABELS)} \u202e")
    assert document["samples"][0]["positions"]["input"]["labels"][1 : 1 + len(LABELS)] == list(LABELS)
    document["samples"][0]["title"] = NASTY
    heads = {k: v for k, v in document.items() if k not in ("kind", "schema")}
    written = reported(tmp_path / "r", METRICS, heads=heads)
    assert "one example (`good [bold]film[/] $x$ �[31m <b> |a|`)" in written
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    for head in ([], ["--head", "L0.H1"]):
        coloured = run("show", folder, "--text", " ".join(LABELS), "-q", *head).stdout
        assert "\x1b[38;2;" in coloured
        plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
        assert "\x1b" not in plain
        assert all(label in plain for label in LABELS)


@pytest.mark.drawn
@pytest.mark.parametrize(("side", "rows"), [(8, None), (32, 6)])
def test_an_image(side: int, rows: int | None, tmp_path: Path) -> None:
    """A grid of patches behind [CLS]; rows of a large one are held for a few patches only."""
    folder, file, patches = tmp_path / "vit", tmp_path / "image.png", (side // 4) ** 2
    config = tf.ViTConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, image_size=side, patch_size=4,
        num_channels=3, num_labels=2,
    )  # fmt: skip
    randomise(tf.ViTForImageClassification(config)).save_pretrained(folder)
    tf.ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)).save(file)
    for head in ([], ["--head", "L0.H1"]):
        run("show", folder, "--image", file, "-o", tmp_path / "a.png", "-q", *head)
    document = shown(folder, "--image", file)
    (sample,) = document["samples"]
    assert sample["positions"]["input"]["grid"] == [side // 4, side // 4]
    assert sample["positions"]["input"]["image"].startswith("data:image/png;base64,")
    assert len(sample["positions"]["input"]["labels"]) == 1 + patches
    assert sample["layers"][0]["shape"] == [2, rows or 1 + patches, 1 + patches]
    assert document["unit"] == "patches"
    assert "No such file" in run("show", folder, "--image", tmp_path / "b.png", code=1).stderr
    file.write_text("no image")
    assert "cannot be read as an image" in run("show", folder, "--image", file, code=1).stderr


def test_encoder_and_decoder(tmp_path: Path) -> None:
    """The decoder reads the model's own answer; cross-attention goes from it to the text."""
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "d_ff": 16}
    config = tf.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=29)
    randomise(tf.T5ForConditionalGeneration(config)).save_pretrained(tmp_path / "t5")
    tokenizer().save_pretrained(tmp_path / "t5")
    (sample,) = shown(tmp_path / "t5", "--text", "good dull fun")["samples"]
    assert set(sample["positions"]) == {"source", "target"}
    expected = [("source", "source"), ("target", "target"), ("target", "source")]
    assert [(a["queries"], a["keys"]) for a in sample["layers"]] == expected


@pytest.mark.drawn
def test_a_run_says_what_the_heads_do(scored: Path) -> None:
    """`score` writes heads.json, its picture and the section; `report` writes the same again."""
    heads, report = json.loads((scored / "heads.json").read_text()), scored / "report.md"
    assert [len(layer["heads"]) for layer in heads["layers"]] == [4, 4]
    assert (scored / "heads.png").exists()
    text = report.read_text()
    assert "## What the heads do" in text
    run("report", scored)
    assert report.read_text() == text
    (scored / "heads.json").unlink()
    run("report", scored)
    assert "What the heads do" not in report.read_text()
    assert not (scored / "heads.png").exists()
