"""Folders for stock classes: what a class can represent is written and tried, anything else is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from tests.support.commands import run
from tests.support.even import MADE, even


def off(model: Any, other: Any, example: Any) -> float:
    """The largest difference of logits, as a share of their largest value."""
    with torch.no_grad():
        a, b = (m(**example).logits.float() for m in (model, other))
    return float((a - b).abs().max() / a.abs().max())


def check(model: Any, example: Any, folder: Path, tolerance: float = 1e-6) -> Any:
    """A stock class gives the answers without any option, and so does headprune."""
    assert not {"auto_map", "headprune"} & json.loads((folder / "config.json").read_text()).keys()
    plain = type(model).from_pretrained(folder).eval()
    assert off(model, plain, example) <= tolerance
    assert off(model, hp.load(folder), example) <= tolerance
    return plain


def test_models_that_their_class_can_state(tmp_path: Path) -> None:
    model, example = even("qwen3")
    done = hp.export(model, tmp_path / "m", "stock")
    assert done.proved
    assert done.notes == ()
    assert done.summary.endswith("of the largest")
    assert check(model, example, done.path).config.num_attention_heads == 2
    half = hp.export(model, tmp_path / "half", "stock", dtype="bfloat16")
    assert check(model, example, half.path, 0.05).dtype == torch.bfloat16
    dense, example = MADE["bert"]()
    check(dense, example, hp.export(dense, tmp_path / "n", "stock").path)


def test_on_the_command_line(bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's heads are as wide as the hidden size divided by their number, so none can go; the line says what to do."""
    import transformers as tf

    monkeypatch.chdir(tmp_path)
    model: Any = tf.BertForSequenceClassification.from_pretrained(bert_folder).eval()
    example = {"input_ids": torch.tensor([[3, 4, 5]])}
    tokenizer = tf.AutoTokenizer.from_pretrained(bert_folder)
    hp.save(model, "dense", processor=tokenizer)
    told = run("export", "dense", "--to", "stock")
    assert "loads with AutoModelForSequenceClassification.from_pretrained(folder)" in told.stdout
    check(model, example, Path("dense-stock"))
    assert tf.pipeline("text-classification", "dense-stock")("yes")
    hp.prune(model, {hp.find_attention(model, example)[0].name: [0]}, example)
    hp.save(model, "pruned", processor=tokenizer)
    refused = run("export", "pruned", "--to", "stock", code=1).stderr
    assert "--strategy uniform" in refused
    assert "trust_remote_code=True" in refused
    assert not list(tmp_path.glob("pruned-stock*"))
