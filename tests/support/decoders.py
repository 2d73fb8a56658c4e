"""Tiny decoders as llama.cpp runs them, and a tokenizer of every kind that it knows."""

import json
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.zoo import randomise

CORPUS = [
    "The year 2024 had 366 days, hadn't it?\n\n  Two  spaces, a tab\tand “quotes”: naïve café – 東京, привет, 1234567 🙂.",
    "def area(r):\n    return 3.14159 * r ** 2  # I'LL SAY\n",
    "Once upon a time the cat sat on the mat and the dog sat on the log: one two three",
] * 3
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def bytewise(
    *cuts: Any, ignore_merges: bool = False, post: str = "$A", vocab_size: int = 320
) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of bytes and a few merges, as GPT-2, SmolLM2, Llama 3 and Qwen2 have them."""
    raw = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    raw.pre_tokenizer = pre_tokenizers.Sequence(list(cuts) or [pre_tokenizers.ByteLevel(add_prefix_space=False)])
    raw.decoder = decoders.ByteLevel()
    special, alphabet = ["<|end|>", "<|begin|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    raw.train_from_iterator(CORPUS, trainer)
    raw.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<|begin|>", 1)])
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", bos_token="<|begin|>")


def pieces(*, legacy: bool = False) -> Any:
    """A tokenizer as transformers makes it of a SentencePiece model (Llama 2, Mistral 7B): bytes where no piece fits."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trained.train_from_iterator([t[:60] for t in CORPUS], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    joined = ["".join(m) for m in model["merges"]]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *joined, *model["vocab"]]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    # As in transformers: all pairs that make a piece, the piece with the highest score (the lowest id) first.
    pairs = [(t[:n], t[n:]) for t in vocabulary if t[0] != "<" for n in range(1, len(t))]
    merges = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
    tokenizer = tf.LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
    if legacy:
        prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([prepend, replace])
        tokenizer.backend_tokenizer.pre_tokenizer = None
    return tokenizer


def split(pattern: str, **more: Any) -> tf.PreTrainedTokenizerFast:
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return bytewise(words, pre_tokenizers.ByteLevel(False, use_regex=False), **more)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": bytewise,
    "smollm": lambda: bytewise(pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": lambda: split(LLAMA_3, ignore_merges=True, post="<|begin|> $A"),
    "dbrx": lambda: split(LLAMA_3),
    "qwen2": lambda: split(LLAMA_3.replace("{1,3}", "")),
    "tekken": lambda: split(TEKKEN, ignore_merges=True, post="<|begin|> $A"),
    "default": pieces,
    "default, legacy": lambda: pieces(legacy=True),
}
"""By llama.cpp's name for how text is cut."""


def settings(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 331, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3,
        "intermediate_size": 64, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 0, **more,
    }  # fmt: skip


def llama(**more: Any) -> Any:
    return randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**settings(**more))))


def scaled(kind: str, **more: Any) -> Any:
    rope = {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64, **more}
    return llama(rope_parameters=rope)


def mistral(**more: Any) -> Any:
    return randomise(tf.MistralForCausalLM(tf.MistralConfig(**settings(head_dim=16, **more))))


def qwen2(**more: Any) -> Any:
    return randomise(tf.Qwen2ForCausalLM(tf.Qwen2Config(**settings(tie_word_embeddings=True, **more))))


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mistral": lambda: mistral(sliding_window=None),
    "qwen2": qwen2,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "biased llama": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama, all heads share keys": lambda: llama(num_key_value_heads=1),
    "llama, a head of its own for each": lambda: llama(num_key_value_heads=6, head_dim=8, rms_norm_eps=1e-3),
    "linear positions": lambda: scaled("linear"),
    "llama 3 positions": lambda: scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn positions": lambda: scaled("yarn"),
}
EXAMPLE = {"input_ids": torch.arange(3, 33).view(2, 15)}
