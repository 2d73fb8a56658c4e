"""A pruned model generates, compiles, runs in half precision, quantised and with adapters, as the dense one does."""

import copy
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

import headprune as hp
from tests.support.checks import flip
from tests.support.commands import run
from tests.support.errors import refuses
from tests.support.families import built
from tests.support.folders import tokenizer
from tests.support.stays import MODELS, by_transformers, cases, changed, edit, heads_gone, like, logits, off, sidecar
from tests.support.zoo import ZOO, TorchEncoder, bert, gpt2, labelled, llama, randomise

HALVES = {torch.bfloat16: 3e-2, torch.float16: 4e-3}  # what their rounding may change


# -- generation -----------------------------------------------------------------------------------


def prompt(example: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row, longer than the sliding windows."""
    if "input_features" in example:
        return {"input_features": example["input_features"][:1]}
    return {"input_ids": example["input_ids"][:2].reshape(1, -1)}


def generated(model: Any, given: dict[str, Tensor], **how: Any) -> list[int]:
    how |= {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    how |= {"pad_token_id": 0, "repetition_penalty": 4.0}
    # What Whisper returns starts with the start token or not.
    tokens: list[int] = model.generate(**given, **how)[0, -10:].tolist()
    return tokens


@pytest.mark.parametrize(("name", "kind"), cases(["gpt2", "llama", "qwen3", "t5", "whisper", "sliding"]))
def test_generation(name: str, kind: str) -> None:
    """With every cache, the tokens that come without one."""
    model, example = changed(name, kind)
    given, (dense, _) = prompt(example), MODELS[name]()
    alone, beams = generated(model, given, use_cache=False), generated(model, given, use_cache=False, num_beams=3)
    assert len(set(alone)) > 4
    for cache in ("dynamic", "static"):
        how: dict[str, Any] = {"cache_implementation": cache, "disable_compile": True}
        assert generated(model, given, **how) == alone, cache
        assert generated(model, given, num_beams=3, **how) == beams, cache
    assert generated(dense, given, assistant_model=model) == generated(dense, given, use_cache=False)
    assert generated(model, given, assistant_model=dense) == alone
    assert generated(model, given, prompt_lookup_num_tokens=3) == alone


# -- torch.compile --------------------------------------------------------------------------------


def test_a_compiled_model_is_saved_as_itself(tmp_path: Path) -> None:
    """Its folder was loaded by transformers with random weights, and by headprune not at all; so was that of what it wraps."""
    model, example = bert()
    compiled = torch.compile(model, backend="eager")
    heads = {f"_orig_mod.bert.encoder.layer.{i}.attention.self": gone for i, gone in enumerate(([1], [0, 1, 2, 3]))}
    hp.prune(compiled, heads, example)
    hp.save(compiled, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    for name in "ab":
        for loaded in (hp.load(tmp_path / name), by_transformers(tmp_path / name)):
            assert torch.equal(logits(loaded, example), logits(model, example))
    fresh = torch.compile(bert()[0], backend="eager")
    hp.load(tmp_path / "a", model=fresh)
    assert torch.equal(logits(fresh, example), logits(model, example))
    stock = hp.export(torch.compile(bert()[0], backend="eager"), tmp_path / "c", "stock")
    assert torch.equal(logits(by_transformers(stock.path), example), logits(bert()[0], example))
    model.classifier = torch.compile(model.classifier, backend="eager")
    with pytest.raises(hp.HeadPruneError, match=r"classifier is wrapped by torch\.compile"):
        hp.save(model, tmp_path / "d")


# The repaired models are uneven in the same way as the uneven ones.
COMPILED = [c.values for c in cases(quick=[]) if "uneven" not in c.values]


@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [
        *(pytest.param(*c, "eager", marks=() if c in (("llama", "emptied"), ("vit", "emptied")) else pytest.mark.slow) for c in COMPILED),
        pytest.param("bert", "emptied", "inductor", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_compiled_in_one_graph(name: str, kind: str, backend: str) -> None:
    """As the dense model; at a graph break `fullgraph` fails."""
    model, example = changed(name, kind)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(logits(compiled, example), logits(model, example), rtol=1e-4, atol=1e-4)


# -- half precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("name", "kind"), cases(quick=["t5", "whisper"]))
@pytest.mark.filterwarnings("error:headprune")
def test_half_precision(name: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Converted, or loaded so, saved and loaded: the answers of the dense model in half precision with the heads masked.

    What weights a repair gave is in no dense model: there it is the answers in float32. Folders of models that do not cast
    their inputs, such as Whisper's, held no answers to compare with.
    """
    model, example = changed(name, kind)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}
    folder, full = hp.save(model, tmp_path / "m"), logits(model, example)
    dense, _ = MODELS[name]()
    with hp.mask(dense.to(dtype), heads_gone(name, kind), given):
        expected = logits(dense, given) if kind != "repaired" else full
    for number, half in enumerate((model.to(dtype), by_transformers(folder, dtype=dtype))):
        answers = logits(half, given)
        assert answers.dtype == dtype
        assert off(answers, expected) < HALVES[dtype] * (1 if kind != "repaired" else 3)
        assert 0 < off(answers, full) < 3 * HALVES[dtype]
        again = hp.save(half, tmp_path / str(number), example=given)
        assert torch.equal(logits(hp.load(again), given), answers)
    # Transformers loads in the types that were saved, rotary frequencies in float32.
    assert torch.equal(logits(by_transformers(again), given), answers)


# -- int8 -----------------------------------------------------------------------------------------


def int8(model: nn.Module) -> Any:
    """The model with torchao's int8 weights in its linear layers."""
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert any(is_wrapper(p) for p in model.parameters())
    return model


def packed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Linear weights of one byte, with a scale beside them, as bitsandbytes and float8 checkpoints have them."""

    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)

    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Packed
            module.scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter((module.weight.detach() / module.scale).to(dtype), requires_grad=False)
    return model


def as_rounded(quantised: Any, model: nn.Module, example: dict[str, Tensor]) -> Tensor:
    """The answers by plain arithmetic on the numbers that a quantised model holds, each the nearest of 255 steps a row."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_wrapper(held := quantised.get_submodule(name).weight):
            found, dense = held.dequantize(), module.weight.detach()
            assert bool(((found - dense).abs() <= 0.51 * dense.abs().amax(1, keepdim=True) / 127).all()), name
            module.weight = nn.Parameter(found)
    return logits(model, example)


@pytest.mark.parametrize(("name", "kind"), cases(quick=["bert", "llama", "t5"]))
def test_int8(name: str, kind: str, tmp_path: Path) -> None:
    """A pruned model is quantised as any other: an emptied layer crashed torchao. transformers stores and loads it, too."""
    model, example = changed(name, kind)
    quantised = int8(copy.deepcopy(model))
    torch.testing.assert_close(logits(quantised, example), as_rounded(quantised, model, example), rtol=1e-4, atol=1e-4)
    assert 1e-3 < off(logits(quantised, example), logits(model, example)) < 0.3
    if name not in ("bert", "llama", "t5", "vit"):
        return
    config = tf.TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    loaded = by_transformers(hp.save(model, tmp_path / "m"), quantization_config=config)
    assert any(is_wrapper(p) for p in loaded.parameters())
    torch.testing.assert_close(logits(loaded, example), as_rounded(loaded, model, example), rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(tmp_path / "m")
    assert torch.equal(logits(by_transformers(tmp_path / "m"), example), logits(loaded, example))


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("how", ["torchao", torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(how: Any, name: str, tmp_path: Path) -> None:
    """In a sentence; scores are for whatever runs. float8 was pruned, and torchao's tensors were a traceback in repair and save."""

    def quantised(model: nn.Module) -> nn.Module:
        return int8(model) if how == "torchao" else packed(model, how)

    dense, example = MODELS[name]()
    model, drop = quantised(copy.deepcopy(dense)), heads_gone(name, "uneven")
    expected = logits(model, example)
    for work in (lambda: hp.prune(model, drop, example), lambda: hp.prune(model, heads_gone(name, "emptied"), example),
                 lambda: hp.search(model, [like(example, 1), like(example, 2)], keep="50%", distil=True)):  # fmt: skip
        refuses("quantised", work)
    assert not hp.repair(model, drop, [example]).layers
    for each in (model, quantised(changed(name, "uneven")[0])):
        refuses(r"quantised .*before you quantise", hp.save, each, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model, example), expected)
    if how == "torchao":
        assert torch.isfinite(hp.score(model, [labelled(dense, example)], method="ablation").flat()).all()
        with hp.mask(model, drop, example):
            assert not torch.equal(logits(model, example), expected)


def test_what_else_is_quantised_is_in_no_ones_way() -> None:
    """GPT-2's attention is of Conv1D, which torchao leaves alone: only its head is quantised."""
    model, example = MODELS["gpt2"]()
    assert hp.prune(int8(model), heads_gone("gpt2", "uneven"), example).difference < 1e-4


# -- adapters -------------------------------------------------------------------------------------

TARGETS = {
    "bert": ["query", "value", "intermediate.dense"], "gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "up_proj"],
    "qwen3": ["q_proj", "k_proj"], "t5": ["q", "v"], "vit": ["q_proj", "v_proj"], "whisper": ["q_proj", "v_proj", "fc1"],
}  # fmt: skip


def lora(model: Any, targets: Any) -> Any:
    """Adapters that change the answers."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()


@pytest.mark.parametrize(("name", "kind"), cases(quick=["gpt2"]))
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_adapters_around_a_pruned_model(name: str, kind: str, tmp_path: Path) -> None:
    """Stored by PEFT, put on what headprune and what transformers load, merged, saved and loaded."""
    model, example = changed(name, kind)
    folder, adapted = hp.save(model, tmp_path / "base"), lora(copy.deepcopy(model), "all-linear")
    expected, known = logits(adapted, example), sidecar(folder)
    assert off(expected, logits(model, example)) > 1e-2
    refuses("adapters are not merged", hp.save, adapted, tmp_path / "adapted")
    adapted.save_pretrained(tmp_path / "adapters")
    layers = {a.name.removeprefix("base_model.model."): a for a in hp.find_attention(adapted, example)}
    # They looked like layers with a head to prune.
    assert not any(layers[name].prunable for name in known["structure"]["ghosts"])
    for number, base in enumerate((hp.load(folder), by_transformers(folder))):
        loaded = pytest.importorskip("peft").PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        assert torch.equal(logits(loaded, example), expected)
        merged = loaded.merge_and_unload()
        assert off(logits(merged, example), expected) < 1e-4
        again = hp.save(merged, tmp_path / str(number))
        assert torch.equal(logits(hp.load(again), example), logits(merged, example))
        assert sidecar(again)["removed"] == known["removed"]


@pytest.mark.parametrize(("name", "kind"), [*cases(quick=["llama"])])
def test_a_prune_within_adapters(name: str, kind: str, tmp_path: Path) -> None:
    """What the prune (or repair) noted was on PEFT's wrapper: merged, the model no longer knew what it had lost, nor how to save itself."""
    model, example = MODELS[name]()
    adapted, plan = lora(model, TARGETS[name]), heads_gone(name, kind)
    within = {f"base_model.model.{layer}": heads for layer, heads in plan.items()}
    if kind == "repaired":
        hp.repair(adapted, within, [like(example, seed) for seed in range(3)], values=False, mixtures=False)
    with hp.mask(adapted, within, example):
        masked = logits(adapted, example)
    hp.prune(adapted, within, example)
    assert off(logits(adapted, example), masked) < 1e-4
    adapted.save_pretrained(tmp_path / "adapters")  # PEFT's own
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    merged = adapted.merge_and_unload()
    expected = logits(merged, example)
    assert off(expected, masked) < 1e-4
    hp.save(merged, tmp_path / "a")
    merged.save_pretrained(tmp_path / "b")
    assert sidecar(tmp_path / "a")["removed"] == [plan]
    for loaded in (hp.load(tmp_path / "a"), hp.load(tmp_path / "b"), by_transformers(tmp_path / "b")):
        assert torch.equal(logits(loaded, example), expected)
    hp.find_attention(hp.load(tmp_path / "a"))  # on an input made up of the form that the prune was given


# -- a loaded model is the one that was saved, or the load says by how much, where and why it differs --

CALM = pytest.mark.filterwarnings("error:headprune")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hp.save(changed("bert", "uneven")[0], tmp_path / "m", processor=tokenizer())


# -- configs --------------------------------------------------------------------------------------

# An entry of config.json, and what a load does: it refuses for other answers, or since it cannot be built; it warns; it says nothing.
EDITS: list[tuple[dict[str, Any], str]] = [
    ({"layer_norm_eps": 0.5}, "answer"), ({"hidden_act": "relu"}, "answer"), ({"hidden_act": "gelu_new"}, "answer"),
    ({"is_decoder": True}, "answer"), ({"hidden_size": 48}, "build"), ({"hidden_act": "nonsense"}, "build"),
    ({"num_attention_heads": 5}, "build"), ({"num_hidden_layers": 2}, "build"), ({"layer_norm_eps": 1e-9}, "warn"),
    ({"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}, "calm"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "effect"), EDITS, ids=str)
@CALM
def test_an_edited_config(changes: dict[str, Any], effect: str, folder: Path) -> None:
    """It loaded silently, and the outputs were off by 1.07."""
    edit(folder / "config.json", **changes)
    told = rf"{next(iter(changes))} in config\.json is .*, saved"
    if effect == "calm":
        assert hp.load(folder).config.id2label == {0: "no", 1: "yes"}
    elif effect == "warn":
        with pytest.warns(UserWarning, match=told):
            hp.load(folder)
        with pytest.warns(UserWarning, match=told):  # the command line silences other libraries' warnings
            run("inspect", folder)
    else:
        where = r"by [\d.e+-]+ of the largest value, first at bert\S+ \(\w+(, saved \w+)?\) "
        refuses(f"{where * (effect == 'answer')}.*{told}", hp.load, folder)


DENSE = ("bert", "gpt2", "vit", "t5", "whisper", "wav2vec2", "clip", "clip_vision_model")


@pytest.mark.parametrize("name", DENSE)
@CALM
def test_dense_models_have_answers_too(name: str, tmp_path: Path) -> None:
    """To an input that their config says; after a fine-tuning, others."""
    model: Any = (ZOO[name] if name in ZOO else partial(built, name))()[0]
    folder = hp.save(model, tmp_path / "m")
    assert (folder / "headprune.safetensors").stat().st_size < 500_000
    again = hp.load(folder)  # which would warn if there were none
    next(p for p in again.parameters() if p.ndim > 1).data *= 1.5
    hp.load(hp.save(again, tmp_path / "n"))
    key = next((k for k in ("hidden_act", "activation_function", "feed_forward_proj") if hasattr(model.config, k)), "")
    if key:
        edit(folder / "config.json", **{key: "relu" if getattr(model.config, key) != "relu" else "gated-gelu"})
        refuses(rf"{key} in config\.json is", hp.load, folder)


# -- classes of one's own -------------------------------------------------------------------------


class Encoder(nn.Module):
    """The activation is a module of its own; the scale a plain number."""

    def __init__(self, activation: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.body, self.activation, self.scale, self.head = TorchEncoder(), activation, scale, nn.Linear(3, 32)
        self.register_buffer("shift", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.body(x) + self.shift) * self.scale)


class Negative(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.mark.parametrize("cut", [True, False])
@CALM
def test_another_class_or_number(cut: bool, tmp_path: Path) -> None:
    """model= was believed. The error names the first module whose output is another one."""
    model, x = randomise(Encoder(nn.GELU())).eval(), torch.randn(2, 5, 32)
    model.shift += 2.0  # a buffer that no file of weights holds
    if cut:
        hp.prune(model, {"body.encoder.layers.0.self_attn": [1]}, x)
    hp.save(model, tmp_path / "m", example=None if cut else x)
    again = hp.load(tmp_path / "m", model=Encoder(nn.GELU()))
    assert "shift" not in again.state_dict()
    assert torch.equal(again(x), model(x))
    for other, told in (
        (Encoder(nn.ReLU()), r"first at activation \(ReLU, saved GELU\)"),
        (Encoder(nn.GELU(), 2.0), r"first at head \(Linear\)"),
        (Negative(nn.GELU()), r"first at its own output \(Negative, saved Encoder\).*saved with torch"),
    ):
        refuses(told, hp.load, tmp_path / "m", model=other)
    other = Negative(nn.GELU())
    other.activate, other.forward = nn.functional.gelu, lambda x: other.head(other.activate(other.body(x) + 2.1))
    del other.activation
    refuses(r"first at activation \(which is not there, saved GELU\)", hp.load, tmp_path / "m", model=other)
    refuses(r"do not fit Linear", hp.load, tmp_path / "m", model=nn.Linear(3, 3))


class Nested(nn.Linear):
    """Takes a tensor, and a list and a dict with all kinds of values."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor, more: list[Any], named: dict[str, Any]) -> Tensor:
        lengths, flag, none = more
        assert (flag, none, named["k"]) == (True, None, 0.5)
        scores = super().forward(x) @ x.transpose(1, 2) + named["mask"]
        return scores.softmax(-1) * lengths[: len(x), None, None]


@CALM
def test_inputs_of_any_form(tmp_path: Path) -> None:
    mask = torch.zeros(2, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    example = (torch.randn(2, 4, 8), [torch.tensor([3, 4]), True, None], {"mask": mask, "k": 0.5, "odd": object()})
    hp.save(Nested(), tmp_path / "m", example=example)
    hp.load(tmp_path / "m", model=Nested())  # which would warn if the input were not known


class Masks(nn.Module):
    """Two names of one buffer, and one that is equal."""

    def __init__(self) -> None:
        super().__init__()
        self.head, mask = nn.Linear(4, 4), torch.ones(4)
        for name, buffer in {"a": mask, "b": mask, "c": mask.clone()}.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.a * self.c


def test_tied_and_equal_buffers(tmp_path: Path) -> None:
    """Equal ones are stored once, but only those that were one tensor come back as one."""
    hp.save(Masks(), tmp_path / "m", example=torch.randn(2, 4))
    again = hp.load(tmp_path / "m", model=Masks())
    again.a += 1
    assert again.b.eq(2).all()
    assert again.c.eq(1).all()


@CALM
def test_rotary_frequencies_come_back(tmp_path: Path) -> None:
    """Buffers that no weights' file holds were built anew: with other frequencies outputs were off by 5.42."""
    model, example = llama()
    model.model.rotary_emb.inv_freq *= 3.0
    again = hp.load(hp.save(model, tmp_path / "m"))
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert torch.equal(logits(again, example), logits(model, example))


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.rand(3)


def test_noise_in_evaluation_tells_nothing(tmp_path: Path) -> None:
    hp.save(Noisy(3, 3), tmp_path / "m", example=torch.randn(2, 3))
    hp.load(tmp_path / "m", model=Noisy(3, 3))


# -- what is stored -------------------------------------------------------------------------------


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The form of the made-up input, and its tensors."""
    with safe_open(folder / "headprune.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["probe"])["form"], {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118


def test_nothing_of_the_example_is_stored(tmp_path: Path) -> None:
    """A checkpoint goes elsewhere; what it was pruned with need not. Tokens that control a model stay where they are."""
    model, _ = gpt2()
    model.config.image_token_id = 77
    ids = torch.randint(40, 70, (5, 30), generator=torch.Generator().manual_seed(0))
    ids[:, 3] = 77
    example = {"input_ids": ids, "attention_mask": torch.ones(5, 30).long()}
    hp.prune(model, {hp.find_attention(model, example)[0].name: [0]}, example)
    form, tensors = stored(hp.save(model, tmp_path / "m"))
    made = tensors[form["dict"]["input_ids"]["tensor"]]
    assert made.shape == (2, 16)
    assert made.max() <= ids.max()
    assert torch.equal(made == 77, ids[:2, :16] == 77)
    assert (made == ids[:2, :16]).float().mean() < 0.2
    images, pixels = ZOO["vit"]()
    hp.prune(images, {hp.find_attention(images, pixels)[0].name: [0]}, pixels)
    form, tensors = stored(hp.save(images, tmp_path / "n"))
    noise = form["dict"]["pixel_values"]
    assert noise["noise"] == [2, *pixels["pixel_values"].shape[1:]]
    assert abs(noise["std"] / pixels["pixel_values"].std() - 1) < 0.2
    assert pixels["pixel_values"].numel() not in [t.numel() for n, t in tensors.items() if n.startswith("input")]


def test_folders_without_answers(folder: Path, tmp_path: Path) -> None:
    edit(folder / "headprune.json", files={})
    (folder / "headprune.safetensors").unlink()
    with pytest.warns(UserWarning, match="saved without a probe"):
        hp.load(folder)
    hp.save(nn.Linear(3, 3), tmp_path / "unknown")
    with pytest.warns(UserWarning, match=r"holds no answers to compare with.*pass example= to headprune.save"):
        hp.load(tmp_path / "unknown", model=nn.Linear(3, 3))


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "told"), [
    ("headprune.safetensors", "is damaged: it is not what was saved"), ("model.safetensors", "are not those that were saved"),
])  # fmt: skip
def test_a_bit_is_noticed(file: str, told: str, folder: Path) -> None:
    """In a buffer that no input reaches, too. More damage is in `tests.support.bad_files`."""
    flip(folder / file)
    refuses(told, hp.load, folder)


def test_an_old_folder_that_cannot_go_undoes_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, while a file of it is open."""
    monkeypatch.setattr("os.rmdir", lambda *_, **__: tmp_path.unlink())  # fails
    saved = [hp.save(nn.Linear(3, wide), tmp_path / "m", overwrite=True) / "model.safetensors" for wide in (3, 4, 9)]
    assert b"[9,3]" in saved[-1].read_bytes()


def test_a_changed_tokenizer_is_told(folder: Path) -> None:
    """It changes every measurement, but not the model's answers to token ids."""
    hp.load(folder, as_saved=True)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"good"', '"goof"', 1))
    with pytest.warns(UserWarning, match=r"not as saved: tokenizer.json"):
        hp.load(folder)
    refuses(r"tokenizer.json is damaged", hp.load, folder, as_saved=True)
    (folder / "README.md").write_text("mine")
    path.unlink()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="headprune")
        hp.load(folder)  # a model without its tokenizer, and with a card of its own


def test_every_number_of_the_weights_counts(tmp_path: Path) -> None:
    """For `score`, too: scores and plans are of one model. A part of a tensor does not stand for all of it."""
    model, example = bert()
    batch = [{**example, "labels": torch.tensor([0, 1, 0])}]
    whole = torch.arange(6.0)
    model.register_buffer("first", whole[:2])
    model.register_buffer("whole", whole)
    for tensor in (model.classifier.weight.data, whole):
        plan = hp.plan(hp.score(model, batch, "random"), keep=6)
        tensor.view(-1)[-1] += 1e-3
        refuses("another model", hp.prune, model, plan, example)
