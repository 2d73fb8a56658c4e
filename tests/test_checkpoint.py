"""A saved model, however it is loaded, answers bit by bit as the one in memory; or the load says what is wrong. Its card, and pushing it to the Hub."""

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
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
from safetensors.torch import load_file, save_file
from torch import nn

import headprune as hp
from tests.support import stays
from tests.support.checks import same, state
from tests.support.commands import run, stderr_of
from tests.support.even import even, mistral
from tests.support.folders import common, tokenizer
from tests.support.stays import by_transformers, changed, edit, files, like, logits, needs_code, sidecar
from tests.support.zoo import ZOO, bert, labelled, randomise, sizes

Loads = Callable[[Any, Path, Path], Any]

# -- every model, saved and loaded in every way ---------------------------------------------------

# What each gives is loaded: of a model, of where `hp.save` put it, and with a folder of its own.


def saved_twice(model: Any, saved: Path, folder: Path) -> Any:
    """Every file the same, the probe and the record of what went included."""
    second = hp.save(hp.load(saved), folder / "b")
    assert files(saved) == files(second)
    return hp.load(second)


def from_pretrained(model: Any, saved: Path, folder: Path) -> Any:
    if needs_code(saved):  # a stock class would give what is missing random weights
        with pytest.raises(RuntimeError, match="mismatch"):
            type(model).from_pretrained(saved)
    elif model.can_generate() and "Causal" in type(model).__name__:  # sizes of a static cache come out of the config
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
        prompt, plain = torch.tensor([[5, 6, 7]]), by_transformers(saved)
        assert torch.equal(*(plain.generate(prompt, cache_implementation=c, **how) for c in ("dynamic", "static")))
    return by_transformers(saved)


def saved_by_itself(model: Any, saved: Path, folder: Path) -> Any:
    model.save_pretrained(folder / "b")
    if needs_code(saved):
        assert files(saved) == files(folder / "b")
    return hp.load(folder / "b")


def through_transformers(model: Any, saved: Path, folder: Path) -> Any:
    """What the folder's own code made is saved, and is the same: headprune did not know its own classes."""
    again = hp.save(by_transformers(saved), folder / "b")
    kept = ("heads", "removed", "repaired", "structure", "fingerprint", "class")
    if needs_code(again):  # a stock class has no record of what went
        assert [sidecar(saved)[key] for key in kept] == [sidecar(again)[key] for key in kept]
    return hp.load(again)


def in_shards(model: Any, saved: Path, folder: Path) -> Any:
    hp.save(model, folder / "m", max_shard_size="15KB")
    assert len(list((folder / "m").glob("model-*.safetensors"))) > 1
    return hp.load(folder / "m")


def pickled(model: Any, saved: Path, folder: Path) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: list[Loads] = [saved_twice, from_pretrained, saved_by_itself, through_transformers, in_shards, pickled]
SUBJECTS = {
    **{f"{name} {kind}": partial(changed, name, kind) for name in stays.MODELS for kind in stays.KINDS},
    **{f"{name} even": partial(even, name, shifted=name != "t5") for name in ("qwen3", "llama", "gemma", "mistral", "vit", "t5")},
    **{f"{name} dense": ZOO[name] for name in ZOO if name not in ("mha", "torch_transformer")},
}  # fmt: skip
# Quick ones: two ways for each family, all ways for four models.
FEW = {"bert emptied", "llama repaired", "t5 emptied", "t5 even"}
QUICK = FEW | {f"{name} emptied" for name in stays.MODELS} | {"qwen3 even", "vit even", "bert dense"}


def conformance() -> Iterator[Any]:
    """Every model with the ways in which it is loaded; those that are not quick are slow tests."""
    for name in SUBJECTS:
        ways = [
            way for way in WAYS if "dense" not in name or way not in (saved_by_itself, pickled)
        ]  # transformers' own
        quick = len(ways) if name in FEW else 2 if name in QUICK else 0
        for chosen, marks in ((ways[:quick], ()), (ways[quick:], pytest.mark.slow)):
            if chosen:
                yield pytest.param(name, chosen, id=f"{name}-{len(chosen)}", marks=marks)


@pytest.mark.parametrize(("name", "ways"), conformance())
@pytest.mark.filterwarnings("error:headprune")
def test_every_way_of_loading(name: str, ways: list[Loads], tmp_path: Path) -> None:
    model, example = SUBJECTS[name]()
    before, config, rng = state(model), str(model.config), torch.get_rng_state()
    saved = hp.save(model.train(), tmp_path / "m")
    assert model.training
    assert torch.equal(rng, torch.get_rng_state())
    assert same(model, before)
    assert str(model.config) == config
    expected = logits(model.eval(), example)
    for way in ways:
        loaded = way(model, saved, tmp_path / way.__name__)
        assert not loaded.training, way.__name__
        assert torch.equal(logits(loaded, example), expected), way.__name__
    for folder in (folder.parent for folder in tmp_path.rglob("headprune.json")):
        stock = name.endswith(" even") and not (name == "t5 even" and folder == tmp_path / "saved_by_itself" / "b")
        assert needs_code(folder) != (stock or "dense" in name)
        assert (folder / "modeling_headprune.py").exists() == needs_code(folder)


# headprune cannot be imported there; then it is, and is new to the process.
ELSEWHERE = r"""
import re, sys, torch, transformers as tf
from pathlib import Path
torch.set_num_threads(1)  # as in conftest: other sums would round otherwise
sys.modules["headprune"] = None
def check(model, folder):
    with torch.no_grad():
        assert torch.equal(model.eval()(**example).logits, expected), folder
for folder in sys.argv[1:]:
    example, expected, attention = torch.load(folder + "-x")
    call = re.search(r'= (\w+)\.from_pretrained\("[\w/]+"(, trust_remote_code=True)?\)', (Path(folder) / "README.md").read_text())
    load = lambda folder: getattr(tf, call[1]).from_pretrained(folder, trust_remote_code=bool(call[2]), attn_implementation=attention)
    check(model := load(folder), folder)
    model.save_pretrained(folder + "-again", max_shard_size="40KB")
    again = load(folder + "-again").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items()), folder
    tf.AutoModel.from_pretrained(folder, trust_remote_code=True)
del sys.modules["headprune"]
import headprune
for folder in sys.argv[1:]:
    example, expected, _ = torch.load(folder + "-x")
    check(headprune.load(folder), folder)
"""


FRESH = [*sorted(FEW), "gpt2 uneven", "qwen3 even", "vit emptied", "whisper uneven"]


@pytest.mark.slow
def test_in_a_fresh_process(tmp_path: Path) -> None:
    """By transformers alone, never as a stock model with random weights; and by headprune."""
    folders = []
    for name in FRESH:
        model, example = SUBJECTS[name]()
        folder = str(hp.save(model, tmp_path / name.replace(" ", "-")))
        torch.save((example, logits(model, example), model.config._attn_implementation), f"{folder}-x")
        folders.append(folder)
    where = str(Path(hp.__file__).parent.parent)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": where}
    subprocess.run([sys.executable, "-c", ELSEWHERE, *folders], check=True, cwd=tmp_path, env=environment)


OLDER = ["0.1/bert", "0.1/llama", *(f"{v}/{n}" for v in ("5.0.0", "5.17.0") for n in ("bert", "llama", "t5"))]


@pytest.mark.parametrize("home", OLDER)
def test_older_folders_load(home: str, older: Path) -> None:
    """Of 0.1 (they repeat the prunes), and of older versions of transformers (`tests.support.saved_by_transformers`)."""
    folder = older / home
    given = load_file(f"{folder}.safetensors")
    expected = given.pop("logits")
    torch.testing.assert_close(logits(hp.load(folder), given), expected)
    if (folder / "modeling_headprune.py").exists():
        loaded = tf.AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
        torch.testing.assert_close(logits(loaded, given), expected)


# -- what goes on from a folder -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), stays.cases(quick=["bert", "llama"]))
def test_pruned_again(name: str, kind: str, tmp_path: Path) -> None:
    model, example = changed(name, kind)
    folder = hp.save(model, tmp_path / "a")
    ghosts = sidecar(folder)["structure"]["ghosts"]
    for number, loaded in enumerate((hp.load(folder), by_transformers(folder))):
        layers = hp.find_attention(loaded, example)
        layer = [a for a in layers if len(a.units) > 1 and a.prunable and a.name not in ghosts][-1]
        plan = {layer.name: list(layer.units[0])}
        hp.prune(loaded, plan, example)
        further = hp.save(loaded, tmp_path / str(number))
        assert sidecar(further)["removed"] == [*sidecar(folder)["removed"], plan]
        for again in (hp.load(further), by_transformers(further)):
            assert torch.equal(logits(again, example), logits(loaded, example))


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
    more = {"data_collator": tf.default_data_collator, "processing_class": tokenizer()}
    return tf.Trainer(model, arguments, train_dataset=data, eval_dataset=data, **more)


TRAINED = [
    *(f"{name} {kind}" for name in stays.MODELS for kind in stays.KINDS if name != "sliding"),
    "t5 even",
    "llama even",
]
QUICKLY = {"bert emptied", "t5 even"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICKLY)) for n in TRAINED])
def test_trainer(name: str, tmp_path: Path) -> None:
    """The best checkpoint is loaded at the end; a training goes on from a checkpoint as if it had not stopped; both load back.

    What Trainer saves is stock only if the class has the very tensors of the model in memory, into which they are loaded.
    """
    model, example = SUBJECTS[name]()
    whole = trainer(copy.deepcopy(model), example, tmp_path / "whole")
    whole.train()
    best = Path(whole.state.best_model_checkpoint)
    trained = logits(whole.model.eval(), example)
    assert not torch.equal(trained, logits(model, example))
    whole.save_model(str(tmp_path / "saved"))
    assert needs_code(best) == (name != "llama even")
    for loaded in (hp.load(best), by_transformers(best), hp.load(tmp_path / "saved")):
        assert torch.equal(logits(loaded, example), trained)
    whole.create_model_card(model_name="mine")  # Trainer's own card stays
    card = (tmp_path / "whole" / "README.md").read_text()
    whole.save_model()
    assert (tmp_path / "whole" / "README.md").read_text() == card

    last, halfway = logits(hp.load(tmp_path / "whole" / "checkpoint-4"), example), tmp_path / "whole" / "checkpoint-2"
    for start in (copy.deepcopy(model), hp.load(halfway)):
        trainer(start, example, tmp_path / "resumed").train(resume_from_checkpoint=str(halfway))
        assert torch.equal(logits(hp.load(tmp_path / "resumed" / "checkpoint-4"), example), last)


def test_what_transformers_saved_says_how_it_loads(tmp_path: Path) -> None:
    """Checkpoints of a model that transformers loaded are its own."""
    model, example = changed("bert", "emptied")
    training = trainer(by_transformers(hp.save(model, tmp_path / "m")), example, tmp_path / "t")
    training.train()
    best = Path(training.state.best_model_checkpoint)
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(best, trust_remote_code=True).eval()
    assert torch.equal(logits(loaded, example), logits(training.model.eval(), example))
    with pytest.raises(hp.HeadPruneError, match=r"saved by transformers.*from_pretrained.*trust_remote_code"):
        hp.load(best)


def test_a_base_model_and_a_head_on_it_keep_the_record(tmp_path: Path) -> None:
    hp.save(changed("bert", "emptied")[0], tmp_path / "a")
    hp.save(tf.AutoModel.from_pretrained(tmp_path / "a", trust_remote_code=True), tmp_path / "base")
    assert "encoder.layer.0.attention.self" in sidecar(tmp_path / "base")["removed"][0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_collected_outputs_are_each_layers_own(attention: str, tmp_path: Path) -> None:
    """An emptied layer has an entry in attentions, so that what other layers attend to is at their own places.

    It is of no heads; where the model was pruned with eager attention, of the one head that stays with zero output.
    """
    model, example = bert(attention)
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: list(range(layers[0].num_heads)), layers[1].name: [0]}, example)
    model = hp.load(hp.save(model, tmp_path / "m"))
    assert model.config._attn_implementation == attention
    model.set_attn_implementation("eager")
    out = model(**example, output_attentions=True, output_hidden_states=True)
    heads = [weights.shape[1] for weights in out.attentions]
    assert heads == [int(attention == "eager"), layers[1].num_heads - 1, *(a.num_heads for a in layers[2:])]
    hidden = model(**example, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(hidden, out.hidden_states, strict=True))


def test_a_folder_with_code_becomes_a_stock_one(tmp_path: Path) -> None:
    """Loaded by its own code, pruned until it is even, and saved over the old files."""
    model, example = ZOO["qwen3"]()
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: [0, 1]}, example)
    folder = hp.save(model, tmp_path / "m")
    remote = by_transformers(folder)
    hp.prune(remote, {layer.name: [0, 1] for layer in layers[1:]}, example)
    remote.save_pretrained(folder)
    assert not (folder / "modeling_headprune.py").exists()
    assert torch.equal(logits(remote, example), logits(by_transformers(folder), example))


# -- which models a stock class can represent -----------------------------------------------------

# name, heads or groups that go from every layer, whether others go from every second one, the layers, and why it cannot; "" if it can
STOCK = [
    pytest.param("plain_llama", 2, True, "", "", marks=pytest.mark.slow),
    pytest.param("llava", 1, True, "language_model", "", marks=pytest.mark.slow),
    ("plain_llama", 1, True, "", "multiple of the number"),  # 3 of 4
    ("t5", 1, True, "", "shared by 2 layers, and they keep different heads"),
    ("t5", 1, False, "encoder", r"keep different shares|is \["),
    ("bert", 2, True, "", "query.weight is"),
    pytest.param("gpt2", 2, False, "", "c_attn.weight is", marks=pytest.mark.slow),
    pytest.param("whisper", 2, True, "", "weight is", marks=pytest.mark.slow),
    ("clip", 2, True, "", "weight is"),
    pytest.param("llava", 1, True, "", "weight is|cannot represent", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "units", "shifted", "within", "why"), STOCK)
def test_stock_classes(name: str, units: int, shifted: bool, within: str, why: str, tmp_path: Path) -> None:
    model, example = even(name, units, shifted=shifted, within=within)
    folder = hp.save(model, tmp_path / "m")
    assert needs_code(folder) == bool(why)
    for loaded in (hp.load(folder), by_transformers(folder)):
        for key, value in loaded(**example).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert torch.equal(value, model(**example)[key]), key
    if why:
        with pytest.raises(hp.HeadPruneError, match=why):
            hp.export(model, tmp_path / "stock", "stock")


def test_uneven_and_emptied_models_are_refused_by_name(tmp_path: Path) -> None:
    for drop, why in (({"model.layers.1.self_attn": [0, 1]}, r"layers\.0\.\S+ and \S+layers\.1\.\S+ keep different shares of their heads \(all, 1/2\)"),
                      ({"model.layers.1.self_attn": [0, 1, 2, 3]}, "has no heads left")):  # fmt: skip
        model, example = ZOO["qwen3"]()
        hp.prune(model, drop, example)
        with pytest.raises(hp.HeadPruneError, match=why):
            hp.export(model, tmp_path / "stock", "stock")


def repaired(model: Any, example: Any, **more: Any) -> None:
    plan = {a.name: sorted(a.units[0]) for a in hp.find_attention(model, example)}
    hp.repair(model, plan, [labelled(model, example, seed) for seed in range(2)], **more)
    for name, module in model.named_modules():
        if name.endswith("o_proj") and module.bias is not None:
            module.bias.data.normal_()
    hp.prune(model, plan, example)


def test_biases_of_a_repair(tmp_path: Path) -> None:
    """Llama's config can give W_O a bias; with it come those of queries, keys and values, of zeros. Mistral's has no place for it."""
    model, example = ZOO["llama"]()
    repaired(model, example)
    plain = tf.LlamaForCausalLM.from_pretrained(hp.save(model, tmp_path / "m")).eval()
    assert plain.config.attention_bias
    assert not plain.model.layers[0].self_attn.q_proj.bias.any()
    assert torch.equal(logits(plain, example), logits(model, example))
    model, example = mistral()
    repaired(model, example)
    assert "o_proj.bias has no place (a repair gave it)" in sidecar(hp.save(model, tmp_path / "n"))["why_not_stock"]
    model, example = mistral()
    repaired(model, example, biases=False)
    assert not needs_code(hp.save(model, tmp_path / "o"))


def test_a_repair_without_a_prune_is_saved_too(tmp_path: Path) -> None:
    """A stock class would leave the added bias out without a word."""
    model, example = ZOO["llama"]()
    done = hp.repair(model, {"model.layers.0.self_attn": [0, 1]}, [like(example, seed) for seed in range(3)])
    model.save_pretrained(tmp_path / "m")
    assert done.biases
    for loaded in (hp.load(tmp_path / "m"), by_transformers(tmp_path / "m")):
        assert torch.equal(logits(loaded, example), logits(model, example))


def test_answers_are_compared_not_only_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that has all the tensors of the model, and computes something else with them."""
    read = tf.Qwen3Config.from_dict
    for change in ({"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}, {"rms_norm_eps": 0.3}):
        model, _ = even("qwen3")
        other = lambda data, change=change, **more: read({**data, **change}, **more)  # noqa: E731
        monkeypatch.setattr(tf.Qwen3Config, "from_dict", other)
        with pytest.raises(hp.HeadPruneError, match=r"computes another \S+inv_freq|gives other answers"):
            hp.export(model, tmp_path / "stock", "stock")


# -- what a save refuses, and what it leaves ------------------------------------------------------


def test_nothing_is_overwritten_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = bert()
    before = files(hp.save(model, tmp_path / "m"))
    with pytest.raises(hp.HeadPruneError, match="exists"):
        hp.save(model, tmp_path / "m")
    monkeypatch.setattr(type(model.config), "save_pretrained", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        hp.save(model, tmp_path / "m", overwrite=True)
    assert files(tmp_path / "m") == before
    monkeypatch.undo()
    hp.save(model, tmp_path / "m", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
    with pytest.raises(hp.HeadPruneError, match="no model"):  # it went with all that was in it
        hp.save(model, tmp_path, overwrite=True)
    with pytest.raises(hp.HeadPruneError, match="cannot be replaced"):
        hp.save(model, ".", overwrite=True)
    assert files(tmp_path / "m")


def test_a_command_finds_what_a_killed_save_left(tmp_path: Path) -> None:
    """Between the two renames nothing lies at the path: `headprune inspect` said that there is no such model."""
    folder = hp.save(changed("bert", "uneven")[0], tmp_path / "m", processor=tokenizer())
    folder.rename(tmp_path / ".m.old")
    assert "BertForSequenceClassification" in run("inspect", folder).stdout
    folder.rename(tmp_path / ".m.old")
    hp.load(folder)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("drop", [{1: [0]}, {3: [0]}, {1: [0], 3: [0]}, {1: [0, 1], 3: [2]}], ids=str)
def test_layers_that_shared_their_weights(adapters: bool, drop: dict[int, list[int]], tmp_path: Path) -> None:
    """Zamba2's hybrid layers: where the first lost heads, the saved weights were refused as ones that the config ties."""
    config = tf.Zamba2Config(
        **sizes("sdpa", num_hidden_layers=4), num_key_value_heads=4, mamba_d_state=8, mamba_headdim=8, mamba_ngroups=1,
        n_mamba_heads=8, chunk_size=8, num_mem_blocks=1, hybrid_layer_ids=[1, 3],
        layers_block_type=["mamba", "hybrid"] * 2, adapter_rank=4, use_shared_attention_adapter=adapters,
    )  # fmt: skip
    model, example = randomise(tf.Zamba2ForCausalLM(config)), {"input_ids": torch.randint(5, 90, (2, 9))}
    plan = {f"model.layers.{i}.shared_transformer.self_attn": heads for i, heads in drop.items()}
    hp.prune(model, plan, example)
    hp.save(model, tmp_path / "z")
    for loaded in (hp.load(tmp_path / "z"), by_transformers(tmp_path / "z")):
        with torch.no_grad():
            torch.testing.assert_close(loaded(**example).logits, model(**example).logits)


def test_what_is_tied_by_its_config_alone_is_refused(tmp_path: Path) -> None:
    """transformers loads such a checkpoint as it is stored. It was scored, pruned and saved, and then the folder did not load."""
    model, _ = ZOO["gpt2"]()
    model.save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    twin = model.transformer.wte.weight.detach().clone()
    for head, code in ((twin, 0), (twin + 1, 1)):  # one that says the same twice, and one that does not
        save_file({**load_file(file), "lm_head.weight": head}, file, metadata={"format": "pt"})
        said = stderr_of("inspect", tmp_path / "dense", code=code)
        assert (
            "dense has weights of its own for lm_head.weight" in said and "tie_word_embeddings to false" in said
        ) == bool(code)
    model.lm_head.weight = nn.Parameter(head)
    with pytest.raises(hp.HeadPruneError, match="The model has weights of its own"):
        hp.save(model, tmp_path / "saved")
    model.config.tie_word_embeddings = False
    assert torch.equal(hp.load(hp.save(model, tmp_path / "saved")).lm_head.weight, head)


# -- types of numbers -----------------------------------------------------------------------------

BOTH = [(name, torch.bfloat16, loaded_so) for name in ("llama", "gpt2", "t5") for loaded_so in (False, True)]
CASTS = [
    ("qwen3", torch.bfloat16, False),
    ("llama", torch.float16, True),
    ("vit", torch.float64, True),
    ("whisper", torch.bfloat16, False),
]


@pytest.mark.parametrize(("name", "dtype", "loaded_so"), [*BOTH, *CASTS])
@pytest.mark.filterwarnings("error:headprune")
def test_types_of_numbers_are_kept(name: str, dtype: torch.dtype, loaded_so: bool, tmp_path: Path) -> None:
    """``model.bfloat16()`` rounds rotary frequencies in memory, `from_pretrained` does not; T5 keeps one projection in float32."""
    model, example = stays.MODELS[name]()
    example = {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}
    if loaded_so:
        model.save_pretrained(tmp_path / "dense")
        model = type(model).from_pretrained(tmp_path / "dense", dtype=dtype).eval()
    else:
        model.to(dtype)
    layer = hp.find_attention(model, example)[0]
    hp.prune(model, {layer.name: list(layer.units[0])}, example)
    again = hp.load(hp.save(model, tmp_path / "m"))
    for tensors in ("named_parameters", "named_buffers"):
        assert {n: t.dtype for n, t in getattr(again, tensors)()} == {n: t.dtype for n, t in getattr(model, tensors)()}
    assert torch.equal(logits(again, example), logits(model, example))
    if name == "gpt2":
        assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr()


def test_a_stock_folder_keeps_half_precision(tmp_path: Path) -> None:
    model, example = even("qwen3")
    model.to(torch.bfloat16)
    plain = by_transformers(hp.save(model, tmp_path / "m"))
    assert type(plain) is tf.Qwen3ForCausalLM
    assert plain.dtype == torch.bfloat16
    assert stays.off(logits(plain, example), logits(model, example)) < 0.05


@pytest.fixture
def half_bert(bert_folder: Path, here: Path, brief: None) -> Path:
    tf.BertForSequenceClassification.from_pretrained(bert_folder, dtype=torch.bfloat16).save_pretrained(here / "dense")
    tokenizer().save_pretrained(here / "dense")
    return here / "dense"


def pruned_by_command(model: Path, data: Path, *more: str, output: str = "run") -> tuple[Any, Path]:
    """What a run's metrics say, and its checkpoint: half of the heads stay."""
    run("prune", model, "-d", data, "--keep", "50%", "-m", "gradient", "-s", "one-shot", "-L", 24, "-o", output, *more)
    metrics = json.loads((Path(output) / "metrics.json").read_text())
    return metrics, Path(output) / metrics["budgets"][0]["checkpoint"]


def test_a_weight_of_the_models_own_without_entries(tmp_path: Path) -> None:
    """DINOv3 without registers has a parameter [1, 0, hidden], which was taken for one whose heads are gone, and stayed on the meta device."""
    config = tf.DINOv3ViTConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, image_size=16, patch_size=8, num_register_tokens=0
    )  # fmt: skip
    model, example = randomise(tf.DINOv3ViTModel(config)), {"pixel_values": torch.randn(2, 3, 16, 16)}
    hp.prune(model, {"L0": [1]}, example)
    loaded = hp.load(hp.save(model, tmp_path / "m"))
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))
    assert torch.equal(loaded(**example)[0], model.eval()(**example)[0])


def test_a_half_precision_checkpoint_stays_one(half_bert: Path, data_folder: Path) -> None:
    """Repaired weights are rounded before they are measured, so that what is reported is what a user loads."""
    metrics, folder = pruned_by_command(half_bert, data_folder)
    budget = metrics["budgets"][0]
    for told, where in ((budget, folder), (metrics["dense"], half_bert)):
        weights = load_file(where / "model.safetensors")
        assert {t.dtype for t in weights.values() if t.numel()} == {torch.bfloat16}
        assert (told["dtype"], told["weights"]) == ("bfloat16", sum(t.nbytes for t in weights.values()))
    assert budget["repair"] is not None
    assert "Weights are saved in bfloat16, as the dense checkpoint is" in Path("run/report.md").read_text()
    _, further = pruned_by_command(folder, data_folder, "--no-repair", output="further")
    assert {t.dtype for t in load_file(further / "model.safetensors").values() if t.numel()} == {torch.bfloat16}
    metrics, folder = pruned_by_command(half_bert, data_folder, "--dtype", "float32", "--no-repair", output="full")
    assert {t.dtype for t in load_file(folder / "model.safetensors").values() if t.numel()} == {torch.float32}
    assert metrics["budgets"][0]["dtype"] == "float32"


def test_what_does_not_work_in_half_precision_is_saved_in_full(half_bert: Path, data_folder: Path) -> None:
    """Weights that are more than float16 holds; and a config that names another type than the weights have rounds none."""
    for config, large in (("float16", 1e6), ("float16", 1.0)):
        model = tf.BertForSequenceClassification.from_pretrained(half_bert, dtype=torch.float32)
        model.classifier.weight.data.mul_(large)
        model.save_pretrained(half_bert)
        edit(half_bert / "config.json", dtype=config)
        _, folder = pruned_by_command(half_bert, data_folder, "--no-repair", "--overwrite")
        assert {t.dtype for t in load_file(folder / "model.safetensors").values() if t.numel()} == {torch.float32}


# -- the model card in every folder: what it says is so, and nobody's words are lost -----------------------------

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


@pytest.mark.usefixtures("here", "brief")
def test_a_runs_figures_are_those_of_metrics_json(bert_folder: Path, data_folder: Path) -> None:
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
        assert losses[row[0]][2] == f"{model['metrics']['loss']:.4g}"
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
