"""A pruned model is saved, loaded, trained on and pruned again as often as anyone likes, by whatever loaded it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

import headprune as hp
from headprune.pruned import ghosts
from tests.support.documents import opened
from tests.support.stays import by_transformers, cases, changed, like, logits

OLD = Path(__file__).parent / "support" / "saved_by_transformers"


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(("name", "kind"), cases())
def test_saved_loaded_and_saved_is_bit_equal(name: str, kind: str, tmp_path: Path) -> None:
    """Every file, the probe and the record of what went included."""
    model, example = changed(name, kind)
    again = hp.load(hp.save(model, tmp_path / "a"))
    assert torch.equal(logits(again, example), logits(model, example))
    hp.save(again, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize(("name", "kind"), cases(quick=["bert", "llama"]))
def test_what_transformers_loaded_is_saved_and_pruned_again(name: str, kind: str, tmp_path: Path) -> None:
    """It is made of the classes in the folder's code: headprune did not know its own, and wrote folders that no one could read."""
    model, example = changed(name, kind)
    loaded = by_transformers(model, hp.save(model, tmp_path / "a"))
    assert torch.equal(logits(loaded, example), logits(model, example))
    hp.save(loaded, tmp_path / "b", example=example)
    one, two = files(tmp_path / "a"), files(tmp_path / "b")
    for file in ("config.json", "model.safetensors", "modeling_headprune.py"):
        assert one[file] == two[file], file
    assert b'"removed"' in one["headprune.json"]
    assert torch.equal(logits(hp.load(tmp_path / "b"), example), logits(model, example))

    for number, each in enumerate((hp.load(tmp_path / "a"), loaded)):
        layers = hp.find_attention(each, example)
        assert {a.name for a in layers if a.name in ghosts(model)} == ghosts(model)
        layer = [a for a in layers if len(a.units) > 1 and a.prunable][-1]
        hp.prune(each, {layer.name: list(layer.units[0])}, example)
        folder = hp.save(each, tmp_path / f"further{number}")
        for reloaded in (hp.load(folder), by_transformers(model, folder)):
            assert torch.equal(logits(reloaded, example), logits(each, example))


def test_the_record_of_what_went_outlives_transformers(tmp_path: Path) -> None:
    """A folder that was loaded by transformers and saved again said that nothing had been removed."""
    model, _ = changed("bert", "emptied")
    loaded = by_transformers(model, hp.save(model, tmp_path / "a"))
    hp.save(loaded, tmp_path / "b")
    one, two = (opened(tmp_path / name / "headprune.json") for name in "ab")
    # The probe's bytes are others: it also says what the model's attributes are.
    assert one.pop("files").keys() == two.pop("files").keys()
    assert one == two
    base = tf.AutoModel.from_pretrained(tmp_path / "a", trust_remote_code=True)
    hp.save(base, tmp_path / "base")
    assert '"encoder.layer.0.attention.self"' in (tmp_path / "base" / "headprune.json").read_text()


def rows(example: dict[str, Any], causal: bool) -> list[dict[str, torch.Tensor]]:
    """Eight examples with labels; of a decoder the labels are its tokens."""
    batch = {k: v for k, v in like(example, 7, 8).items() if not k.startswith("decoder_")}
    if "decoder_input_ids" in example:
        labels = torch.randint(3, 90, (8, 5), generator=torch.Generator().manual_seed(3))
    else:
        labels = batch["input_ids"] if causal else torch.arange(8) % 2
    return [{**{k: v[i] for k, v in batch.items()}, "labels": labels[i]} for i in range(8)]


def trainer(model: Any, example: dict[str, Any], folder: Path) -> tf.Trainer:
    """Four steps, with a checkpoint after each."""
    arguments = tf.TrainingArguments(
        str(folder), max_steps=4, save_steps=1, eval_steps=1, eval_strategy="steps", save_strategy="steps",
        per_device_train_batch_size=4, load_best_model_at_end=True, learning_rate=1e-2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", seed=0,
    )  # fmt: skip
    data = rows(example, causal="Causal" in type(model).__name__ or "LMHead" in type(model).__name__)
    return tf.Trainer(model, arguments, train_dataset=data, eval_dataset=data)


@pytest.mark.parametrize(("name", "kind"), cases(quick=["bert"]))
def test_trainer(name: str, kind: str, tmp_path: Path) -> None:
    """The best checkpoint is loaded at the end; a training goes on from a checkpoint as if it had not stopped; both load back."""
    model, example = changed(name, kind)
    whole = trainer(copy.deepcopy(model), example, tmp_path / "whole")
    whole.train()
    best = Path(whole.state.best_model_checkpoint)
    trained = logits(whole.model.eval(), example)
    assert not torch.equal(trained, logits(model, example))
    for loaded in (hp.load(best), by_transformers(model, best)):
        assert torch.equal(logits(loaded, example), trained)
    whole.save_model(str(tmp_path / "saved"))
    assert torch.equal(logits(hp.load(tmp_path / "saved"), example), trained)

    last, halfway = logits(hp.load(tmp_path / "whole" / "checkpoint-4"), example), tmp_path / "whole" / "checkpoint-2"
    for start in (copy.deepcopy(model), hp.load(halfway)):
        resumed = trainer(start, example, tmp_path / "resumed")
        resumed.train(resume_from_checkpoint=str(halfway))
        assert torch.equal(logits(hp.load(tmp_path / "resumed" / "checkpoint-4"), example), last)


def test_trainer_on_what_transformers_loaded(tmp_path: Path) -> None:
    """Its checkpoints are transformers' own; headprune says how to load them."""
    model, example = changed("bert", "emptied")
    training = trainer(by_transformers(model, hp.save(model, tmp_path / "m")), example, tmp_path / "t")
    training.train()
    best = Path(training.state.best_model_checkpoint)
    assert torch.equal(logits(by_transformers(model, best), example), logits(training.model.eval(), example))
    with pytest.raises(hp.HeadPruneError, match=r"saved by transformers.*from_pretrained"):
        hp.load(best)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
@pytest.mark.parametrize("version", ["5.0.0", "5.17.0"])
@pytest.mark.filterwarnings("error:headprune")
def test_folders_of_older_transformers_load(version: str, name: str) -> None:
    """Written by `tests.support.saved_by_transformers`: emptied, repaired with added biases, uneven."""
    given = load_file(OLD / version / f"{name}.safetensors")
    expected = given.pop("logits")
    model = hp.load(OLD / version / name)
    torch.testing.assert_close(logits(model, given), expected)
    if (OLD / version / name / "modeling_headprune.py").exists():
        torch.testing.assert_close(logits(by_transformers(model, OLD / version / name), given), expected)
