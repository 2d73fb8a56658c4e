"""GGUF files: what is written, what llama.cpp answers, and what is refused before anything is written."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from typer.testing import CliRunner

import headprune as hp
from headprune.cli import app
from headprune.errors import HeadPruneError
from headprune.exporting import deci, export, llama_cpp
from headprune.exporting.gguf import TEXTS
from headprune.exporting.vocabulary import vocabulary_of
from headprune.pruned import add_biases
from tests.support.zoo import randomise

written = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
run = pytest.mark.skipif(not llama_cpp.is_installed(), reason="xllamacpp, which bundles llama.cpp, is not installed")
CORPUS = [*TEXTS, "the cat sat on the mat and the dog sat on the log", "one two three, 10 20 30: it's"] * 3
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def bytewise(cut: Any = None, *, ignore_merges: bool = False, bos: bool = False) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of bytes and a few merges, as GPT-2, SmolLM2, Llama 3 and Qwen2 have them."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = cut or pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>", "<|begin|>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    if ignore_merges:
        data = json.loads(raw.to_str())
        data["model"]["ignore_merges"] = True
        raw = Tokenizer.from_str(json.dumps(data))
    if bos:
        from tokenizers.processors import TemplateProcessing

        raw.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", bos_token="<|begin|>")


def pieces() -> tf.PreTrainedTokenizerFast:
    """A tokenizer as transformers makes it of a SentencePiece model (Llama 2, Mistral 7B): bytes where no piece fits."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    found.train_from_iterator([t[:60] for t in CORPUS], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(found.to_str())["model"]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    joined = ["".join(m) for m in model["merges"]]
    single = [t for t in model["vocab"] if t not in set(joined)]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys(["<unk>", "<s>", "</s>", *byte_tokens, *joined, *single]))}
    # As in transformers: all pairs that make a piece, the piece with the highest score (the lowest id) first.
    merges = [
        (t[:n], t[n:]) for t in vocabulary for n in range(1, len(t))
        if len(t) > 1 and t not in byte_tokens and t[0] != "<" and t[:n] in vocabulary and t[n:] in vocabulary
    ]  # fmt: skip
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    from tokenizers.processors import TemplateProcessing

    raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def settings(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 331, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3,
        "intermediate_size": 64, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 0, **more,
    }  # fmt: skip


def llama(**more: Any) -> Any:
    return randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**settings(**more))))


def mistral(**more: Any) -> Any:
    return randomise(tf.MistralForCausalLM(tf.MistralConfig(**settings(head_dim=16, sliding_window=None, **more))))


def qwen2(**more: Any) -> Any:
    return randomise(tf.Qwen2ForCausalLM(tf.Qwen2Config(**settings(tie_word_embeddings=True, **more))))


def scaled(kind: str, **more: Any) -> Callable[[], Any]:
    rope = {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64, **more}
    return lambda: llama(rope_parameters=rope)


DENSE: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama biased": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama, all heads share keys": lambda: llama(num_key_value_heads=1),
    "llama, a head of its own for each": lambda: llama(num_key_value_heads=6, head_dim=8, rms_norm_eps=1e-3),
    "mistral": mistral,
    "qwen2": qwen2,
    "linear positions": scaled("linear"),
    "llama 3 positions": scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn positions": scaled("yarn"),
}
# Heads that go, by layer.
PRUNED: dict[str, dict[str, list[int]]] = {
    "whole groups": {"L0": [2, 3], "L2": [0, 1, 4, 5]},
    "one of each group": {"L0": [0, 2, 5], "L1": [4, 5]},
    "an emptied layer": {"L0": [0, 1], "L1": [0, 1, 2, 3, 4, 5]},
    "emptied layers, the first too": {"L0": [0, 1, 2, 3, 4, 5], "L2": [0, 1, 2, 3, 4, 5]},
    "emptied layers, one after the other": {"L1": [0, 1, 2, 3, 4, 5], "L2": [0, 1, 2, 3, 4, 5]},
}


def pruned(model: Any, heads: dict[str, list[int]]) -> Any:
    example = {"input_ids": torch.arange(3, 33).view(2, 15)}
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[int(name[1:])].name: list(h) for name, h in heads.items()}, example)
    return model


def biased(model: Any) -> Any:
    """With the biases of W_O that a repair adds."""
    names = [name for name, m in model.named_modules() if name.endswith("o_proj") and getattr(m, "bias", None) is None]
    add_biases(model, names)
    generator = torch.Generator().manual_seed(5)
    for name in names:
        bias = model.get_submodule(name).bias
        bias.data = torch.randn(bias.shape, generator=generator)
    return model


def proved(model: Any, path: Path, tokenizer: Any = None, **more: Any) -> Any:
    """Write a file; where llama.cpp is installed, it was tried."""
    done = export(model, path, processor=tokenizer or bytewise(), **more)
    assert path.is_file()
    assert not list(path.parent.glob(".*"))
    assert done.proved == llama_cpp.is_installed()
    assert done.facts["rendition"] < 1e-4
    if done.proved and done.facts["dtype"] == "float32":
        assert done.facts["proof"]["largest_difference"] < 1e-3
    return done


@written
@pytest.mark.parametrize("name", DENSE)
def test_dense_models_give_their_answers(name: str, tmp_path: Path) -> None:
    done = proved(DENSE[name](), tmp_path / "model.gguf")
    assert done.facts["heads"] == [6, 6, 6]


@written
@pytest.mark.parametrize("repaired", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize("heads", PRUNED)
@pytest.mark.parametrize("build", [llama, mistral, qwen2])
def test_pruned_models_give_their_answers(build: Callable[[], Any], heads: str, repaired: bool, tmp_path: Path) -> None:
    model = pruned(build(), PRUNED[heads])
    kept = [6 - len(PRUNED[heads].get(f"L{i}", [])) for i in range(3)]
    done = proved(biased(model) if repaired else model, tmp_path / "model.gguf")
    assert done.facts["heads"] == [max(kept[0], 1), *kept[1:]]


@written
def test_a_repaired_model_saved_and_loaded_gives_its_answers(tmp_path: Path) -> None:
    model = llama()
    batches = [{"input_ids": torch.randint(331, (4, 20), generator=torch.Generator().manual_seed(i))} for i in range(3)]
    plan = {"model.layers.0.self_attn": [0, 1], "model.layers.1.self_attn": list(range(6))}
    hp.repair(model, plan, batches)
    hp.prune(model, plan, batches[0])
    hp.save(model, tmp_path / "folder")
    proved(hp.load(tmp_path / "folder"), tmp_path / "model.gguf")


@written
@run
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_half_the_size_and_as_near_as_rounding_allows(dtype: str, tmp_path: Path) -> None:
    model = pruned(llama(), PRUNED["whole groups"])
    whole, half = (proved(model, tmp_path / f"{d}.gguf", dtype=d) for d in ("float32", dtype))
    saved = sum(p.numel() * 2 for p in model.parameters() if p.ndim > 1)
    assert abs(whole.facts["bytes"] - half.facts["bytes"] - saved) < 2000
    assert 1e-4 < half.facts["proof"]["largest_difference"] < half.facts["proof"]["allowed"] < 2


@written
@run
def test_llama_cpp_writes_the_same_tokens(tmp_path: Path) -> None:
    model, tokenizer = biased(pruned(llama(), PRUNED["an emptied layer"])), bytewise()
    proved(model, tmp_path / "model.gguf", tokenizer)
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    # llama.cpp tells a token only once it is whole text.
    halves = [i for i in range(331) if i >= len(tokenizer) or i < 2 or not tokenizer.decode([i]).isascii()]
    own = model.generate(ids, max_new_tokens=40, do_sample=False, suppress_tokens=halves, pad_token_id=0)[0]
    request = {
        "prompt": TEXTS[0], "n_predict": 40, "temperature": 0, "n_probs": 1, "logit_bias": [[i, False] for i in halves],
    }  # fmt: skip
    _, (answer,) = llama_cpp.complete(tmp_path / "model.gguf", [request])
    assert llama_cpp.generated(answer) == own[ids.shape[1] :].tolist()


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": bytewise,
    "smollm": lambda: bytewise(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "llama-bpe": lambda: bytewise(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        ),
        ignore_merges=True,
        bos=True,
    ),
    "dbrx": lambda: bytewise(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    ),
    "qwen2": lambda: bytewise(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA_3.replace("{1,3}", "")), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        )
    ),
    "default": pieces,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_are_known_by_how_they_cut_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    made = vocabulary_of(tokenizer, 700)
    assert made.pre == name
    assert made.add_bos == (name in ("llama-bpe", "default"))
    assert len(made.tokens) == len(made.types) == len(set(made.tokens)) == 700
    assert made.tokens[len(tokenizer)] == f"[PAD{len(tokenizer)}]"
    assert made.special["eos"] == tokenizer.eos_token_id


@written
@run
@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_reads_texts_as_the_same_tokens(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    done = proved(llama(vocab_size=len(tokenizer) + 3, num_hidden_layers=1), tmp_path / "model.gguf", tokenizer)
    assert done.facts["proof"]["prompts"] == 6  # three of tokens, three texts


def test_files_of_qwen2_say_that_text_is_not_normalised() -> None:
    tokenizer = TOKENIZERS["qwen2"]()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert "NFC" in vocabulary_of(tokenizer, 400).notes[0]


def wordwise() -> tf.PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


def ended() -> tf.PreTrainedTokenizerFast:
    from tokenizers.processors import TemplateProcessing

    tokenizer = bytewise()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|begin|>", special_tokens=[("<|begin|>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "size", "message"),
    [
        (lambda: None, 400, "no tokenizer"),
        (wordwise, 400, "WordLevel"),
        (bytewise, 100, "only 100 embeddings"),
        (lambda: bytewise(pre_tokenizers.ByteLevel(add_prefix_space=True)), 400, "none of the ways"),
        (lambda: bytewise(ignore_merges=True), 400, "looks up whole words"),
        (ended, 400, "bos and eos tokens only"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(tokenizer: Callable[[], Any], size: int, message: str) -> None:
    with pytest.raises(HeadPruneError, match=message):
        vocabulary_of(tokenizer(), size)


def sliding() -> Any:
    return randomise(tf.MistralForCausalLM(tf.MistralConfig(**settings(sliding_window=16))))


def third_layer_slides() -> Any:
    config = tf.Qwen2Config(**settings(use_sliding_window=True, sliding_window=16, max_window_layers=2))
    return randomise(tf.Qwen2ForCausalLM(config))


def granite() -> Any:
    return randomise(tf.GraniteForCausalLM(tf.GraniteConfig(**settings(residual_multiplier=0.5))))


def uneven_groups() -> Any:
    model = llama()
    attention = model.model.layers[1].self_attn
    attention.q_proj.weight.data, attention.o_proj.weight.data = (
        attention.q_proj.weight.data[:40], attention.o_proj.weight.data[:, :40],
    )  # fmt: skip
    return model


def half_rotated() -> Any:
    model = llama()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:2]
    return model


def dynamic() -> Any:
    return scaled("dynamic")()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another family": (lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_head=4, n_layer=1)), "no model.embed_tokens"),
    "a norm of queries": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**settings())), "Layer 0: self_attn.k_norm.weight has"),
    "more norms": (lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**settings())), "Layer 0: "),
    "experts": (lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**settings(num_local_experts=2))), "Layer 0: mlp"),
    "another activation": (lambda: llama(hidden_act="gelu"), "Layer 0 of LlamaForCausalLM does not compute"),
    "other scales": (granite, "Layer 0 of GraniteForCausalLM does not compute"),
    "a sliding window": (sliding, "Layer 0 sees 16 tokens back"),
    "a sliding window in one layer": (third_layer_slides, "Layer 2 sees 16 tokens back"),
    "positions that change with length": (dynamic, "'dynamic' change with"),
    "half of a head rotated": (half_rotated, "4 of a head's 8 features are rotated"),
    "groups of different sizes": (uneven_groups, "Layer 1: 5 query heads do not share 3 key/value heads evenly"),
    "half precision in memory": (lambda: llama().bfloat16(), "bfloat16 on cpu"),
}  # fmt: skip


@written
@pytest.mark.parametrize("name", REFUSED)
def test_what_deci_cannot_express_is_refused_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, message = REFUSED[name]
    monkeypatch.setattr("headprune.exporting.gguf._write", lambda *_: pytest.fail("something was written"))
    with pytest.raises(HeadPruneError, match=message) as caught:
        export(build().eval(), tmp_path / "model.gguf", processor=bytewise())
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "gguf" else real(name, *more))
    with pytest.raises(HeadPruneError, match=r'pip install "headprune\[gguf\]"'):
        export(llama(), tmp_path / "model.gguf", processor=bytewise())


@written
def test_without_llama_cpp_the_file_is_written_and_said_to_be_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    done = export(llama(), tmp_path / "model.gguf", processor=bytewise())
    assert not done.proved
    assert "not tried in llama.cpp" in done.summary
    assert (tmp_path / "model.gguf").is_file()


@written
@run
def test_a_file_that_answers_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the writer had left the weights' rotary order as it is."""
    (tmp_path / "model.gguf").write_text("an earlier file")
    monkeypatch.setattr(deci, "verify", lambda *_: 0.0)
    real = deci.Stored.read
    monkeypatch.setattr(deci.Stored, "read", lambda self: real(deci.Stored(self.tensor, 0, self.added)))
    with pytest.raises(HeadPruneError, match="log-probabilities are"):
        export(llama(), tmp_path / "model.gguf", processor=bytewise(), overwrite=True)
    assert (tmp_path / "model.gguf").read_text() == "an earlier file"
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


@written
@run
def test_a_file_that_llama_cpp_does_not_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(HeadPruneError, match="does not run the file"):
        llama_cpp.complete(tmp_path / "model.gguf", [])


def test_the_rendition_sees_a_wrong_order_of_rotated_features() -> None:
    model = llama()
    decoder = deci.decoder_of(model)
    ids = torch.arange(3, 40)
    assert deci.verify(model, decoder, ids) < 1e-4
    name = "blk.1.attn_k.weight"
    decoder.tensors[name] = deci.Stored(decoder.tensors[name].tensor)
    with pytest.raises(HeadPruneError, match="Layer 1 of"):
        deci.verify(model, decoder, ids)


def test_the_rendition_sees_a_last_norm_that_is_one_percent_off() -> None:
    model = llama()
    decoder = deci.decoder_of(model)
    ids = torch.arange(3, 40)
    assert 0 < deci.sensitivity(decoder, ids).max() < 1e-4
    decoder.tensors["output_norm.weight"] = deci.Stored(model.model.norm.weight * 1.01)
    with pytest.raises(HeadPruneError, match="After its last layer"):
        deci.verify(model, decoder, ids)


@written
def test_a_file_that_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(HeadPruneError, match="exists"):
        export(llama(), tmp_path / "model.gguf", processor=bytewise())
    assert (tmp_path / "model.gguf").read_text() == "mine"


@written
def test_weights_too_large_for_half_precision_are_refused(tmp_path: Path) -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e5
    with pytest.raises(HeadPruneError, match=r"blk.1.ffn_up.weight .* too large for torch.float16"):
        export(model, tmp_path / "model.gguf", processor=bytewise(), dtype="float16")


@written
def test_the_command_writes_a_pruned_folder(tmp_path: Path) -> None:
    model = pruned(llama(), PRUNED["an emptied layer"])
    hp.save(model, tmp_path / "small.1", processor=bytewise())
    result = CliRunner().invoke(app, ["export", str(tmp_path / "small.1"), "--to", "gguf", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert Path(document["path"]) == tmp_path / "small.1.gguf"
    assert document["facts"]["heads"] == [4, 0, 6]
    again = CliRunner().invoke(app, ["export", str(tmp_path / "small.1"), "--to", "gguf"])
    assert again.exit_code == 1
    assert "--overwrite" in again.output
    unknown = CliRunner().invoke(app, ["export", str(tmp_path / "small.1"), "--to", "tflite"])
    assert unknown.exit_code == 1
    assert "gguf" in unknown.output


def test_other_models_are_left_as_they_were() -> None:
    model: nn.Module = llama().train()
    deci.decoder_of(model)
    assert model.training
