"""What is saved answers the same in a fresh process, or is refused."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

import headprune as hp
from headprune.app.models import load_model
from headprune.errors import HeadPruneError
from headprune.inputs import call
from headprune.surgery import answers
from tests.support.checks import pruned
from tests.support.zoo import ZOO, TorchEncoder, bert, gpt2, randomise

TRANSFORMERS = [name for name in ZOO if name not in ("mha", "torch_transformer")]

FRESH = """
import sys, torch, headprune as hp
torch.set_num_threads(1)  # as in conftest: other sums would round otherwise
from headprune.inputs import call
from headprune.surgery import answers
for folder in sys.argv[1:]:
    with torch.no_grad():
        torch.save(answers(call(hp.load(folder), torch.load(folder + "-x"))), folder + "-y")
"""


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_same_answers_after_loading(name: str, tmp_path: Path) -> None:
    model, example = pruned(name)
    again = hp.load(hp.save(model, tmp_path / "m"))
    with torch.no_grad():
        for x, y in zip(answers(call(model, example)), answers(call(again, example)), strict=True):
            assert torch.equal(x, y)
    assert not again.training


def test_same_answers_in_a_fresh_process(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("bert", "t5", "llama")]
    made = [pruned(folder.name) for folder in folders]
    for folder, (model, example) in zip(folders, made, strict=True):
        hp.save(model, folder)
        torch.save(example, f"{folder}-x")
    subprocess.run([sys.executable, "-c", FRESH, *folders], check=True)
    with torch.no_grad():
        for folder, (model, example) in zip(folders, made, strict=True):
            for x, y in zip(answers(call(model, example)), torch.load(f"{folder}-y"), strict=True):
                assert torch.equal(x, y), folder.name


def test_twice_pruned(tmp_path: Path) -> None:
    model, example = pruned("t5")
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: [1]}, example)
    again = hp.load(hp.save(model, tmp_path / "m"))
    with torch.no_grad():
        assert torch.equal(again(**example).logits, model(**example).logits)
    more = hp.find_attention(again, example)
    hp.prune(again, {more[0].name: [0]}, example)


def test_a_loaded_model_prunes_on(tmp_path: Path) -> None:
    model, example = pruned("bert")
    again = hp.load(hp.save(model, tmp_path / "m"))
    layers = hp.find_attention(again, example)
    hp.prune(again, {layers[0].name: [0]}, example)
    third = hp.load(hp.save(again, tmp_path / "n"))
    with torch.no_grad():
        assert torch.equal(third(**example).logits, again(**example).logits)


def test_dense_models_stay_stock(tmp_path: Path) -> None:
    model, example = bert()
    hp.save(model, tmp_path / "m")
    stock = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(stock(**example).logits, model(**example).logits)


def test_stock_load_call_a_pruned_model_fails_aloud(tmp_path: Path) -> None:
    model, _ = pruned("bert")
    hp.save(model, tmp_path / "m")
    with pytest.raises(RuntimeError, match="mismatch"):
        tf.BertForSequenceClassification.from_pretrained(tmp_path / "m")


def test_own_classes_need_an_instance(tmp_path: Path) -> None:
    dense = randomise(TorchEncoder())
    x = torch.randn(2, 5, 32)
    model = copy.deepcopy(dense)
    layers = hp.find_attention(model, x)
    hp.prune(model, {layers[0].name: [0, 1, 2, 3], layers[1].name: [2]}, x)
    hp.save(model, tmp_path / "m")
    with pytest.raises(hp.HeadPruneError, match="cannot build"):
        hp.load(tmp_path / "m")
    again = hp.load(tmp_path / "m", model=TorchEncoder())
    with torch.no_grad():
        assert torch.equal(again(x), model.eval()(x))


def test_half_precision_and_tied_weights(tmp_path: Path) -> None:
    model, example = gpt2()
    model.to(torch.bfloat16)
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: [0]}, example)
    again = hp.load(hp.save(model, tmp_path / "m"))
    assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr()
    assert again.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(again(**example).logits, model(**example).logits)


def test_what_is_tied_by_its_config_alone_is_refused(tmp_path: Path) -> None:
    """transformers loads such a checkpoint as it is stored. It was scored, pruned and saved, and then the folder did not load."""
    model, _ = gpt2()
    model.save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    twin = {"lm_head.weight": model.transformer.wte.weight.detach().clone()}  # which says the same twice
    save_file({**load_file(str(file)), **twin}, str(file), metadata={"format": "pt"})
    loaded: Any = load_model(str(tmp_path / "dense"), with_processor=False).model
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    head = model.transformer.wte.weight.detach() + 1.0
    save_file({**load_file(str(file)), "lm_head.weight": head}, str(file), metadata={"format": "pt"})
    with pytest.raises(HeadPruneError, match=r"dense has weights of its own for lm_head.weight") as told:
        load_model(str(tmp_path / "dense"), with_processor=False)
    assert "tie_word_embeddings to false" in (told.value.hint or "")
    model.lm_head.weight = nn.Parameter(head)
    with pytest.raises(HeadPruneError, match="The model has weights of its own"):
        hp.save(model, tmp_path / "saved")
    model.config.tie_word_embeddings = False
    hp.save(model, tmp_path / "saved")
    assert torch.equal(hp.load(tmp_path / "saved").lm_head.weight, head)


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    model, _ = bert()
    hp.save(model, tmp_path / "m")
    stamp = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(hp.HeadPruneError, match="exists"):
        hp.save(model, tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == stamp
    hp.save(model, tmp_path / "m", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_a_failed_save_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = bert()
    hp.save(model, tmp_path / "m")
    monkeypatch.setattr(
        "headprune.checkpoint.saving.write_json", lambda *a: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        hp.save(model, tmp_path / "m", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
    monkeypatch.undo()
    hp.load(tmp_path / "m")


@pytest.mark.parametrize("damage", ["folder", "sidecar", "weights", "swapped"])
def test_damage_is_told(damage: str, tmp_path: Path) -> None:
    model, _ = pruned("bert")
    folder = hp.save(model, tmp_path / "m")
    if damage == "folder":
        folder = tmp_path / "nowhere"
    elif damage == "sidecar":
        (folder / "headprune.json").write_text("{")
    elif damage == "weights":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    else:  # weights of the same shapes, but others
        with torch.no_grad():
            model.classifier.weight.mul_(2)
        other = hp.save(model, tmp_path / "n")
        (other / "model.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(hp.HeadPruneError):
        hp.load(folder)


def test_the_sidecar_names_what_went(tmp_path: Path) -> None:
    model, example = bert()
    hp.prune(model, {"bert.encoder.layer.0.attention.self": [1, 2]}, example)
    sidecar = json.loads((hp.save(model, tmp_path / "m") / "headprune.json").read_text())
    assert sidecar["removed"] == [{"bert.encoder.layer.0.attention.self": [1, 2]}]


def test_frequencies_are_not_rounded(tmp_path: Path) -> None:
    """Rotary frequencies are buffers that no file holds: casting the whole model would round them."""
    ZOO["llama"]()[0].save_pretrained(tmp_path / "dense")
    model = tf.LlamaForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    example = {"input_ids": torch.randint(3, 90, (2, 40))}
    hp.prune(model, {"model.layers.0.self_attn": [0, 1]}, example)
    again = hp.load(hp.save(model, tmp_path / "m"))
    assert again.model.rotary_emb.inv_freq.dtype == model.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again(**example).logits, model(**example).logits)


def test_mixed_precision(tmp_path: Path) -> None:
    """T5 keeps one projection in float32 when the rest is float16."""
    ZOO["t5"]()[0].save_pretrained(tmp_path / "dense")
    model = tf.T5ForConditionalGeneration.from_pretrained(tmp_path / "dense", dtype=torch.float16)
    types = {n: p.dtype for n, p in model.named_parameters()}
    assert len(set(types.values())) == 2
    example = ZOO["t5"]()[1]
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: [0]}, example)
    again = hp.load(hp.save(model, tmp_path / "m"))
    assert {n: p.dtype for n, p in again.named_parameters()} == types


def test_the_attention_implementation_is_kept(tmp_path: Path) -> None:
    model, example = bert("eager")
    hp.prune(model, {"bert.encoder.layer.0.attention.self": [1]}, example)
    assert hp.load(hp.save(model, tmp_path / "m")).config._attn_implementation == "eager"


def test_the_fingerprint_sees_every_number() -> None:
    from headprune.fingerprint import fingerprint

    model = torch.nn.Linear(768, 768)
    before = fingerprint(model)
    for i in range(0, 768 * 768, 99991):
        with torch.no_grad():
            model.weight.view(-1)[i] += 1e-3
        now = fingerprint(model)
        assert now != before
        before = now


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_folders_of_0_1_load(name: str) -> None:
    """They repeat the prunes: an emptied layer, a model pruned twice; key/value groups, and a bias that repair added."""
    here = Path(__file__).parent / "support" / "saved_by_0_1"
    given = load_file(here / f"{name}.safetensors")
    expected = given.pop("logits")
    with torch.no_grad():
        torch.testing.assert_close(hp.load(here / name)(**given).logits, expected)


def test_a_command_finds_what_a_killed_save_left(tmp_path: Path) -> None:
    """Between the two renames nothing lies at the path: `headprune inspect` said that there is no such model."""
    from headprune.app.models import load_model, pruned_in

    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    folder.rename(tmp_path / ".m.old")
    assert load_model(str(folder), with_processor=False).name == "m"
    folder.rename(tmp_path / ".m.old")
    assert pruned_in(folder) == folder


def test_what_stands_for_a_run_folder_is_said(tmp_path: Path) -> None:
    """`headprune prune RUN --keep 4` pruned the pruned model once more, without a word."""
    from headprune.app.models import load_model

    folder = hp.save(pruned("bert")[0], tmp_path / "run" / "pruned-4")
    (tmp_path / "run" / "run.json").write_text("{}")
    loaded = load_model(str(tmp_path / "run"), with_processor=False)
    assert [("run folder" in note, "pruned-4" in note) for note in loaded.notes] == [(True, True)]
    assert not load_model(str(folder), with_processor=False).notes


def test_a_part_does_not_stand_for_the_whole_tensor() -> None:
    """Where a part that begins at the same byte came first, the rest of the tensor counted for nothing."""
    from headprune.fingerprint import fingerprint

    whole, model = torch.arange(6.0), torch.nn.Module()
    model.register_buffer("first", whole[:2])
    model.register_buffer("whole", whole)
    before = fingerprint(model)
    whole[5] = 9.0
    assert fingerprint(model) != before
