"""`headprune show`, heads.json, its pictures and its section of the report."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from rich.console import Console as RichConsole

import headprune as hp
from headprune.app.documents import Heads, Positions, Sample, SampleLayer
from headprune.app.models import load_model
from headprune.app.pictures import save
from headprune.app.runs import RunFolder
from headprune.app.seeing import look_at, of_text, printable, token_labels
from headprune.app.seeing.pictures import figure_of_head, legend_of, resized
from headprune.app.seeing.terminal import all_heads, one_head
from headprune.trace import find_attention
from tests.support.commands import run
from tests.support.documents import METRICS
from tests.support.folders import tokenizer
from tests.support.reports import reported
from tests.support.zoo import randomise

NASTY = "good [bold]film[/] $x$ \x1b[31m <b> |a|"


@pytest.mark.drawn
def test_a_text(bert_folder: Path, tmp_path: Path) -> None:
    """All heads, and what they do; the picture is one."""
    picture = tmp_path / "all.png"
    shown = run("show", bert_folder, "--text", "good film", "-o", picture, "-q").stdout
    assert "L0" in shown
    assert "H3" in shown
    assert "Roles on 1 example, 4 tokens" in shown
    assert Image.open(picture).size[0] > 100


@pytest.mark.drawn
def test_one_head_is_what_the_model_computes(bert_folder: Path, tmp_path: Path) -> None:
    """For each token, the largest weights first, as shares."""
    picture = tmp_path / "one.png"
    shown = run("show", bert_folder, "--text", "good dull fun", "--head", "l1.h2", "-o", picture, "-q").stdout
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    inputs = tokenizer()("good dull fun", return_tensors="pt")
    weights = list(hp.attention_weights(model, dict(inputs)).values())[1][0, 2]
    tokens = ["[CLS]", "good", "dull", "fun", "[SEP]"]
    lines = [line.split() for line in shown.splitlines()]
    for token, row in zip(tokens, weights, strict=True):
        best = int(row.argmax())
        told = next(line for line in lines if line[:1] == [token] and line[2:])
        assert told[1] == tokens[best]
        assert abs(float(told[2].rstrip("%")) - 100 * float(row[best])) < 0.8
    assert picture.exists()


def test_the_document(bert_folder: Path, data_folder: Path) -> None:
    """Profiles over data, samples within 1/510 of the weights, small."""
    result = run("show", bert_folder, "-d", data_folder, "--json", "-q")
    heads = Heads.model_validate({k: v for k, v in json.loads(result.stdout).items() if k not in ("kind", "schema")})
    assert heads.examples > 20
    assert [len(layer.heads) for layer in heads.layers] == [4, 4]
    assert all(p.role and p.because for layer in heads.layers for p in layer.heads)
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    for sample in heads.samples:
        labels = sample.positions["input"].labels
        ids = torch.tensor([tokenizer().convert_tokens_to_ids(list(labels))])
        weights = list(hp.attention_weights(model, {"input_ids": ids}).values())
        for layer, whole in zip(sample.layers, weights, strict=True):
            assert np.abs(layer.unpacked() - whole[0].numpy()).max() <= 1 / 510 + 1e-5
    assert len(result.stdout) < 100_000


@pytest.mark.drawn
def test_a_text_is_never_markup(bert_folder: Path, tmp_path: Path) -> None:
    """Nor does it steer the terminal, the picture's formulas or the report's tables."""
    shown = run("show", bert_folder, "--text", NASTY, "-q", "-o", tmp_path / "a.png").stdout
    assert "\x1b" not in shown
    loaded = load_model(str(bert_folder))
    inputs = of_text(loaded, NASTY)
    heads = look_at(loaded, inputs, find_attention(loaded.model, inputs))
    (sample,) = heads.samples
    labels = ("[bold]", "$x", "$y_{", "<b>", "|")
    layer = SampleLayer.packed(0, np.full((1, 5, 5), 0.2, np.float32), "input", "input")
    nasty = Sample(title=NASTY, positions={"input": Positions(labels=labels)}, layers=(layer,))
    save(figure_of_head(nasty, layer, 0, NASTY), tmp_path / "b.png")
    console = RichConsole(width=100, force_terminal=True, color_system="truecolor", record=True, file=io.StringIO())
    console.print(one_head(nasty, layer, 0, True))
    console.print(all_heads(heads, sample, 100, True))
    told = console.export_text()
    assert all(label in told for label in labels)
    written = reported(tmp_path / "r", METRICS, heads=heads.changed(samples=(nasty,)))
    assert "one example (`good [bold]film[/] $x$ �[31m <b> |a|`)" in written


def test_labels_show_what_cannot_be_seen() -> None:
    assert printable("\x1b[1m\u202e") == "␛[1m�"
    assert token_labels([2, 5, 3], tokenizer()) == ("[CLS]", tokenizer().convert_ids_to_tokens(5), "[SEP]")


@pytest.mark.drawn
def test_an_image(tmp_path: Path) -> None:
    """A grid of patches behind [CLS]; rows of a large one are held for a few patches only."""
    for side, rows in ((8, None), (32, 6)):
        folder = tmp_path / f"vit-{side}"
        config = tf.ViTConfig(
            hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, image_size=side, patch_size=4,
            num_channels=3, num_labels=2,
        )  # fmt: skip
        randomise(tf.ViTForImageClassification(config)).save_pretrained(folder)
        tf.ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder)
        file = tmp_path / "image.png"
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)).save(file)
        for more in ([], ["--head", "L0.H1"]):
            run("show", folder, "--image", file, "-o", tmp_path / "a.png", "-q", *more)
        found = json.loads(run("show", folder, "--image", file, "--json", "-q").stdout)
        (sample,) = found["samples"]
        patches = (side // 4) ** 2
        assert sample["positions"]["input"]["grid"] == [side // 4, side // 4]
        assert sample["positions"]["input"]["image"].startswith("data:image/png;base64,")
        assert len(sample["positions"]["input"]["labels"]) == 1 + patches
        assert sample["layers"][0]["shape"] == [2, rows or 1 + patches, 1 + patches]
        assert found["unit"] == "patches"


def test_encoder_and_decoder(tmp_path: Path) -> None:
    """The decoder reads the model's own answer; cross-attention goes from it to the text."""
    config = tf.T5Config(
        vocab_size=30, d_model=16, d_kv=8, num_heads=2, num_layers=1, d_ff=16, decoder_start_token_id=0, eos_token_id=29
    )
    randomise(tf.T5ForConditionalGeneration(config)).save_pretrained(tmp_path / "t5")
    tokenizer().save_pretrained(tmp_path / "t5")
    found = json.loads(run("show", tmp_path / "t5", "--text", "good dull fun", "--json", "-q").stdout)
    (sample,) = found["samples"]
    assert set(sample["positions"]) == {"source", "target"}
    assert [(a["queries"], a["keys"]) for a in sample["layers"]] == [
        ("source", "source"), ("target", "target"), ("target", "source"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "nothing to look at"),
        (["--text", " "], "empty"),
        (["--text", "good", "--image", "a.png"], "two inputs"),
        (["--image", "a.png"], "takes no image"),
        (["--text", "good", "--head", "L9.H1"], "is no head"),
        (["--text", "good", "--head", "L1.H9"], "has no head 9"),
        (["--text", "good", "-o", "a.txt"], "no name of a picture"),
        (["--text", "good", "-o", "nowhere/a.png"], "no folder"),
    ],
)
def test_mistakes(more: list[str], told: str, bert_folder: Path) -> None:
    result = run("show", bert_folder, *more, code=1)
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.drawn
def test_a_run_says_what_the_heads_do(scored: Path) -> None:
    """`score` writes heads.json, its picture and the section; `report` writes the same again."""
    folder = RunFolder(scored)
    heads = folder.read_heads()
    assert heads is not None
    assert (scored / "heads.png").exists()
    text = folder.report_path.read_text()
    assert "## What the heads do" in text
    for layer in heads.layers:
        assert len(layer.heads) == 4
    run("report", scored)
    assert folder.report_path.read_text() == text
    folder.heads_path.unlink()
    run("report", scored)
    assert "What the heads do" not in folder.report_path.read_text()
    assert not (scored / "heads.png").exists()


def test_a_small_table_keeps_its_lines() -> None:
    """A line of one pixel is still there when the table shrinks; nothing is there that was not."""
    table = np.zeros((40, 40), np.float32)
    table[:, 17] = 1
    small = resized(table, 7, 7)
    assert small.max(axis=1).min() == 1
    assert small.sum() == 7
    assert np.array_equal(resized(table, 80, 80)[::2, ::2], table)


def test_a_document_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="do not have the shape"):
        SampleLayer(layer=0, queries="a", keys="a", shape=(2, 2, 2), weights="AAAA")


def test_roles_of_one_colour_share_an_entry_of_the_legend() -> None:
    found = list(legend_of(["mixed", "induction", "duplicate token", "induction", "broad"]).values())
    assert found == ["induction (2), duplicate token (1)", "broad (1)", "mixed (1)"]
