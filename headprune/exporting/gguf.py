"""Export to GGUF files, for llama.cpp and programs built on it: Ollama, LM Studio, llama-cpp-python and others."""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune import __version__
from headprune.errors import HeadPruneError
from headprune.exporting import deci, engines
from headprune.exporting.formats import Exported, exporter

TEXTS = (
    "Once upon a time",
    "The year 2024 had 366 days, hadn't it?\n\n  Two  spaces, a tab\tand “quotes”: naïve café – 東京, привет, 1234567 🙂.",
    "def area(r):\n    return 3.14159 * r ** 2  # I'LL SAY\n",
)
TOKENS = 96  # random tokens to compare answers on
_ROUNDED = 4  # tolerance for weights in half precision, as a multiple of the change that rounding them causes
_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # gguf's names


_LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {_LLAMA: "Llama's words", _LLAMA.replace("{1,3}", ""): "Qwen's words", _TEKKEN: "Tekken's words"}
_PIECES = "default"  # SentencePiece: llama.cpp splits the text itself
# (How text is split before bytes are merged, whether whole words are looked up in the vocabulary first) -> llama.cpp's name.
PRE_TOKENIZERS = {
    ("GPT-2's words", False): "gpt-2",
    ("digits, GPT-2's words", False): "smollm",
    ("Llama's words, bytes", True): "llama-bpe",
    ("Llama's words, bytes", False): "dbrx",
    ("Qwen's words, bytes", False): "qwen2",
    ("Tekken's words, bytes", True): "tekken",
}

Prompt = tuple[str | list[int], Tensor, Tensor]
"""(text or token ids, its tokens ``[tokens]``, the model's log-probabilities of the next token ``[vocabulary]``)."""


@exporter("gguf", ".gguf", needs=("gguf",), tokenizer=True)
def gguf(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
    """A file for llama.cpp and what is built on it (Llama-like decoders, heads of any number in every layer)."""
    from gguf import GGUFWriter

    decoder, kind = deci.decoder_of(model), getattr(torch, dtype)
    writer = GGUFWriter(path, "deci")
    writer.add_name(name)
    pre, notes = _add_vocabulary(writer, processor, decoder.vocabulary)
    for weight, value in decoder.tensors.items():
        if not bool(torch.isfinite(value.to(kind) if value.ndim > 1 else value).all()):
            raise HeadPruneError(f"{weight} holds numbers too large for {kind}, or infinite.", "Use --dtype float32.")
    prompts = _prompts(model, processor, decoder)
    _write(writer, decoder, kind)
    size, proved = path.stat().st_size, importlib.util.find_spec("xllamacpp") is not None
    facts: dict[str, Any] = {"architecture": "deci", "heads": decoder.heads, "kv_heads": decoder.kv_heads}
    facts |= {"dtype": dtype, "bytes": size, "tokenizer": pre}
    tried = "not tried in llama.cpp (it is, once xllamacpp is installed: pip install xllamacpp)"
    if proved:
        facts["proof"] = proof = _prove(path, processor, decoder, prompts, kind)
        off = f"log-probabilities within {proof['largest_difference']:.1g} of the model's on {proof['prompts']} prompts"
        tried = f"tried in llama.cpp ({proof['engine']}): {off}"
    return Exported(path, "gguf", proved, f"{size / 1e6:,.0f} MB, {dtype}; {tried}", facts, (*decoder.notes, *notes))


def _prompts(model: nn.Module, tokenizer: Any, decoder: deci.Decoder) -> list[Prompt]:
    """Prompts that fit into the context: texts, and random tokens of several lengths."""
    size = min(decoder.vocabulary, len(tokenizer))
    drawn = torch.randint(size, (min(TOKENS, decoder.context - 1),), generator=torch.Generator().manual_seed(0))
    inputs: list[tuple[str | list[int], Tensor]] = [(drawn[:n].tolist(), drawn[:n]) for n in (1, 7, TOKENS)]
    inputs += [(text, torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long)) for text in TEXTS]
    fitting = [(text, ids) for text, ids in inputs if 0 < len(ids) < decoder.context]
    return [(text, ids, deci.verify(model, decoder, ids)) for text, ids in fitting]


def _write(writer: Any, decoder: deci.Decoder, dtype: torch.dtype) -> None:
    """Write the GGUF file; only one converted tensor is in memory at a time."""
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType
    from gguf.quants import quantize

    writer.add_type("model")
    writer.add_string("headprune.version", __version__)
    writer.add_file_type(LlamaFileType["ALL_F32" if dtype == torch.float32 else f"MOSTLY_{_KINDS[dtype]}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(len(decoder.heads))
    writer.add_context_length(decoder.context)
    writer.add_embedding_length(decoder.width)
    writer.add_vocab_size(decoder.vocabulary)
    writer.add_feed_forward_length(decoder.feed_forward)
    writer.add_head_count(decoder.heads)
    writer.add_head_count_kv(decoder.kv_heads)
    writer.add_key_length(decoder.head_dim)
    writer.add_value_length(decoder.head_dim)
    writer.add_layer_norm_rms_eps(decoder.eps)
    writer.add_rope_dimension_count(decoder.head_dim)
    writer.add_rope_freq_base(decoder.rope_base)
    if decoder.rope_scale != 1:
        writer.add_rope_scaling_attn_factors(decoder.rope_scale)
    # Norms and biases stay in float32: llama.cpp supports no other type for them.
    kinds = {n: GGMLQuantizationType[_KINDS[dtype] if t.ndim > 1 else "F32"] for n, t in decoder.tensors.items()}
    for name, tensor in decoder.tensors.items():
        size = tensor.numel() * (dtype.itemsize if tensor.ndim > 1 else 4)
        writer.add_tensor_info(name, tensor.shape, np.dtype("f4"), size, raw_dtype=kinds[name])
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, kind in kinds.items():
            writer.write_tensor_data(quantize(decoder.read(name).contiguous().numpy(), kind))


def _prove(
    path: Path, tokenizer: Any, decoder: deci.Decoder, prompts: list[Prompt], dtype: torch.dtype
) -> dict[str, Any]:
    """Run the file in llama.cpp, and compare its answers with the model's; returns the facts of the proof.

    Raises:
        HeadPruneError: llama.cpp splits a text into other tokens, or its answers differ by more than rounding.
    """
    # llama.cpp lists log-probabilities only if the generated token is text, so a bias forces a letter; the list ignores the bias.
    letters = [i for t, i in tokenizer.get_vocab().items() if len(t) == 1 and t.isascii() and t.isalpha()]
    likeliest, bias = min(decoder.vocabulary, 4096), [[i, 1e4] for i in letters[:1]]
    settings = {"n_predict": 1, "temperature": 0, "n_probs": likeliest, "logit_bias": bias}
    requests = [{"prompt": text, **settings} for text, *_ in prompts]
    version, answers = engines.complete(path, requests, context=max(len(ids) for _, ids, *_ in prompts) + 8)
    largest, allowed = 0.0, max(deci.TOLERANCE, *(_rounding(decoder, prompt, dtype) for prompt in prompts))
    for (text, ids, expected), answer in zip(prompts, answers, strict=True):
        shown = repr(text) if isinstance(text, str) else f"{len(text)} random tokens"
        counted = answer.get("usage", {}).get("prompt_tokens")
        if counted != len(ids):
            message = f"llama.cpp reads {shown} as {counted} tokens, the tokenizer as {len(ids)}."
            raise HeadPruneError(message, "Its tokenizer of this kind differs; report it, with the tokenizer's name.")
        likely = engines.log_probabilities(answer)
        gap = (torch.tensor(list(likely.values())) - expected[list(likely)]).abs().max().item()
        if not gap <= allowed:
            message = f"llama.cpp's log-probabilities are {gap:.2g} off after {shown} (allowed: {allowed:.2g})."
            raise HeadPruneError(message, "Report it, with the model's name and xllamacpp's version.")
        largest = max(largest, gap)
    proof = {"engine": f"xllamacpp {version}", "prompts": len(prompts)}
    return {**proof, "largest_difference": largest, "allowed": allowed}


def _rounding(decoder: deci.Decoder, prompt: Prompt, dtype: torch.dtype) -> float:
    """The largest difference in the log-probabilities after the last token that rounding may explain."""
    _, ids, expected = prompt
    if dtype == torch.float32:
        return float(deci.NOISE * deci.sensitivity(decoder, ids)[-1])
    return float(_ROUNDED * (deci.render(decoder, ids, dtype)[1][-1] - expected).abs().max())


def _add_vocabulary(writer: Any, tokenizer: Any, size: int) -> tuple[str, list[str]]:
    """Add a tokenizer to a GGUF file that is not yet written.

    Args:
        writer: A `gguf.GGUFWriter`.
        tokenizer: A fast tokenizer of transformers.
        size: Of the model's vocabulary; ids that the tokenizer lacks become padding tokens.

    Returns:
        llama.cpp's name of the pre-tokenizer, and notes for the user.

    Raises:
        HeadPruneError: llama.cpp has no tokenizer of this kind.
    """
    from gguf import SpecialVocab

    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise HeadPruneError("There is no tokenizer with a tokenizer.json.", "Save one into the model's folder.")
    data = json.loads(backend.to_str())
    model = data["model"]
    if model["type"] != "BPE":
        raise HeadPruneError(f"The tokenizer is a {model['type']} model.", "Use one of byte-pair encoding (BPE).")
    tokens, types = _tokens(tokenizer, bool(model["byte_fallback"]), size)
    pre, spaced = _pre_tokenizer(data)
    pieces, ends = pre == _PIECES, _ends(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        special = SpecialVocab(folder, not pieces, ("bos", "eos", "unk", "pad"), size)
    special.add_special_token = ends
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pieces:
        writer.add_token_scores(_scores(tokens, model["merges"]))
    special.add_to_gguf(writer, quiet=True)
    writer.add_add_space_prefix(spaced)
    normalises = (data["normalizer"] or {}).get("type") == "NFC"
    return pre, ["llama.cpp does not normalise text (NFC), as the tokenizer does."] if normalises else []


def _tokens(tokenizer: Any, bytewise: bool, size: int) -> tuple[list[str], list[int]]:
    """The tokens' texts and gguf types, by id."""
    from gguf import TokenType

    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    if max(texts) >= size:
        hint = "Use the model's own tokenizer, or resize its embeddings (model.resize_token_embeddings)."
        raise HeadPruneError(f"The tokenizer has a token {max(texts)}, the model only {size} embeddings.", hint)
    tokens, types, added = [f"[PAD{i}]" for i in range(size)], [TokenType.UNUSED] * size, tokenizer.added_tokens_decoder
    for index, text in texts.items():
        tokens[index], types[index] = text, TokenType.NORMAL
        if index in added:
            types[index] = TokenType.CONTROL if added[index].special else TokenType.USER_DEFINED
        elif bytewise and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            types[index] = TokenType.BYTE
    if bytewise and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
    return tokens, types


def _pre_tokenizer(data: dict[str, Any]) -> tuple[str, bool]:
    """llama.cpp's name of the pre-tokenizer, and whether it puts a space before the text."""
    kinds = [step["type"] for step in _steps(data["normalizer"], "normalizers")]
    cuts, model = _steps(data["pre_tokenizer"], "pretokenizers"), data["model"]
    if model["byte_fallback"]:
        if kinds in (["Prepend", "Replace"], ["Replace"]) and not cuts:
            return _PIECES, "Prepend" in kinds
        if not kinds and [step["type"] for step in cuts] == ["Metaspace"] and not cuts[0]["split"]:
            return _PIECES, cuts[0]["prepend_scheme"] != "never"
    steps = ([] if kinds in ([], ["NFC"]) else kinds) + [_step_name(step) for step in cuts]
    looked_up = bool(model["ignore_merges"])
    if pre := PRE_TOKENIZERS.get((", ".join(steps), looked_up)):
        return pre, False
    way = f"{', '.join(steps) or 'nothing'}{' and looks up whole words' if looked_up else ''}"
    hint = f"Known are the tokenizers of {', '.join(PRE_TOKENIZERS.values())} and SentencePiece's."
    raise HeadPruneError(f"The tokenizer cuts text by {way}, which is none of the ways written for llama.cpp.", hint)


def _steps(step: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    return [] if step is None else list(step[parts]) if step["type"] == "Sequence" else [step]


def _step_name(step: dict[str, Any]) -> str:
    """A pre-tokenizer step in the words of `PRE_TOKENIZERS`; its JSON if it is not one of these."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": words}:
            return "GPT-2's words" if words else "bytes"
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": inverted}:
            # The regex matches words: both Isolated and inverted Removed keep matches as separate pieces.
            if regex in _WORDS and (behavior, inverted) in (("Isolated", False), ("Removed", True)):
                return _WORDS[regex]
    return json.dumps(step, ensure_ascii=False)


def _ends(tokenizer: Any) -> dict[str, bool]:
    """Whether the tokenizer adds bos and eos tokens; tested on a text, since post-processors have many forms."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    for bos, eos in product((False, True), repeat=2):
        if whole == [tokenizer.bos_token_id] * bos + bare + [tokenizer.eos_token_id] * eos:
            return {"bos": bos, "eos": eos}
    message = f"The tokenizer makes {whole} of a text whose tokens are {bare}: llama.cpp adds bos and eos tokens only."
    raise HeadPruneError(message, "Use a tokenizer without such a post-processor.")


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """SentencePiece scores: llama.cpp merges the neighbours whose joint piece has the highest score.

    Only the order of scores matters, and tokenizer.json has the order of merges; all merges into one piece must be consecutive.
    """
    pieces = [piece for piece, _ in groupby(left + right for left, right in merges)]
    order = {piece: place for place, piece in enumerate(pieces)}
    if len(order) < len(pieces):
        message = "The merges into a piece don't lie together, as SentencePiece's do."
        raise HeadPruneError(message, "Use another tokenizer.")
    return [-float(order.get(token, len(order))) for token in tokens]
