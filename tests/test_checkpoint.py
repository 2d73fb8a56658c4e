"""A saved model, however it is loaded, answers bit by bit as the one in memory; or the load says what is wrong."""

import copy
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

import headprune as hp
from tests.support import stays
from tests.support.checks import same, state
from tests.support.commands import run, stderr_of
from tests.support.even import even, mistral
from tests.support.folders import tokenizer
from tests.support.stays import by_transformers, changed, edit, files, like, logits, needs_code, sidecar
from tests.support.zoo import ZOO, bert, labelled, randomise

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


def test_a_command_finds_what_a_killed_save_left(tmp_path: Path) -> None:
    """Between the two renames nothing lies at the path: `headprune inspect` said that there is no such model."""
    folder = hp.save(changed("bert", "uneven")[0], tmp_path / "m", processor=tokenizer())
    folder.rename(tmp_path / ".m.old")
    assert "BertForSequenceClassification" in run("inspect", folder).stdout
    folder.rename(tmp_path / ".m.old")
    hp.load(folder)


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

CASTS = [("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("gpt2", torch.bfloat16), ("t5", torch.bfloat16),
         ("llama", torch.float16), ("vit", torch.float64), ("whisper", torch.bfloat16)]  # fmt: skip


@pytest.mark.parametrize("loaded_so", [False, True])
@pytest.mark.parametrize(("name", "dtype"), CASTS)
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
