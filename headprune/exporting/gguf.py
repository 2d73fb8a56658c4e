"""GGUF files, which llama.cpp and what is built on it run: Ollama, LM Studio, llama-cpp-python and others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune import __version__
from headprune.errors import HeadPruneError
from headprune.exporting import deci, llama_cpp
from headprune.exporting.base import Exported, Request, exporter
from headprune.exporting.vocabulary import Vocabulary, vocabulary_of

TEXTS = (
    "Once upon a time",
    "The year 2024 had 366 days, hadn't it?\n\n  Two  spaces, a tab\tand “quotes”: naïve café – 東京, привет, 1234567 🙂.",
    "def area(r):\n    return 3.14159 * r ** 2  # I'LL SAY\n",
)
TOKENS = 96  # drawn at random, to compare answers on
_ROUNDED = 4  # times what rounding does to them is allowed where weights are stored in half


@dataclass(frozen=True)
class Probe:
    """An input, and what the model answers.

    Attributes:
        prompt: A text, or ids.
        ids: The same as tokens, ``[tokens]``.
        answer: Log-probabilities of the token that follows, ``[vocabulary]``.
    """

    prompt: str | list[int]
    ids: Tensor
    answer: Tensor


@exporter("gguf", ".gguf", needs=("gguf",), tokenizer=True)
def gguf(request: Request) -> Exported:
    """A file for llama.cpp and what is built on it (Llama-like decoders, heads of any number in every layer)."""
    decoder = deci.decoder_of(request.model)
    vocabulary = vocabulary_of(request.processor, decoder.vocabulary)
    dtype = getattr(torch, request.dtype)
    _check_range(decoder, dtype)
    probes = _probes(request, decoder)
    rendition = max(deci.verify(request.model, decoder, probe.ids) for probe in probes)
    _write(request, decoder, vocabulary, dtype)
    facts: dict[str, Any] = {
        "architecture": "deci", "heads": decoder.heads, "kv_heads": decoder.kv_heads, "dtype": request.dtype,
        "bytes": request.path.stat().st_size, "tokenizer": vocabulary.pre, "rendition": rendition,
    }  # fmt: skip
    summary = f"{facts['bytes'] / 1e6:,.0f} MB, {request.dtype}; "
    proved = llama_cpp.is_installed()
    if proved:
        facts["proof"] = proof = _prove(request, decoder, vocabulary, probes, dtype)
        summary += (
            f"tried in llama.cpp ({proof['engine']}): log-probabilities within {proof['largest_difference']:.1g} of the model's "
            f"on {proof['prompts']} prompts"
        )
    else:
        summary += "not tried in llama.cpp (it is, once xllamacpp is installed: pip install xllamacpp)"
    return Exported(request.path, "gguf", proved, summary, facts, (*decoder.notes, *vocabulary.notes))


def _check_range(decoder: deci.Decoder, dtype: torch.dtype) -> None:
    """Refuse weights that are no numbers, or would not be any more once they are rounded."""
    for name, stored in decoder.tensors.items():
        value = stored.read()
        if not bool(torch.isfinite(value).all()):
            raise HeadPruneError(f"{name} holds numbers that are not finite.", "Save the model again.")
        if value.ndim > 1 and not bool(torch.isfinite(value.to(dtype)).all()):
            raise HeadPruneError(f"{name} holds numbers too large for {dtype}.", "Use --dtype bfloat16 or float32.")


def _probes(request: Request, decoder: deci.Decoder) -> list[Probe]:
    """Texts and random tokens of several lengths, as many as fit."""
    size = min(decoder.vocabulary, len(request.processor))
    drawn = torch.randint(size, (min(TOKENS, decoder.context - 1),), generator=torch.Generator().manual_seed(0))
    made: list[tuple[str | list[int], Tensor]] = [
        (drawn[:n].tolist(), drawn[:n]) for n in sorted({1, 7, len(drawn)}) if n
    ]
    for text in TEXTS:
        ids = torch.tensor(request.processor(text)["input_ids"], dtype=torch.long)
        if 0 < len(ids) < decoder.context:
            made.append((text, ids))
    model: Any = request.model
    with torch.inference_mode():
        return [Probe(p, ids, model(input_ids=ids[None]).logits[0, -1].log_softmax(-1)) for p, ids in made]


def _write(request: Request, decoder: deci.Decoder, vocabulary: Vocabulary, dtype: torch.dtype) -> None:
    """The file, one tensor in memory at a time."""
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType

    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    writer = GGUFWriter(request.path, "deci")
    writer.add_type("model")
    writer.add_name(request.name)
    writer.add_string("headprune.version", __version__)
    writer.add_file_type(LlamaFileType["ALL_F32" if dtype == torch.float32 else f"MOSTLY_{kinds[dtype]}"])
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
    vocabulary.write(writer)
    for name, stored in decoder.tensors.items():
        # Norms and biases stay in float32: llama.cpp adds and multiplies by nothing else.
        kind = dtype if stored.tensor.ndim > 1 else torch.float32
        size = stored.tensor.numel() * kind.itemsize
        writer.add_tensor_info(
            name, tuple(stored.tensor.shape), np.dtype("f4" if kind.itemsize == 4 else "f2"), size,
            raw_dtype=GGMLQuantizationType[kinds[kind]],
        )  # fmt: skip
    with _closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for stored in decoder.tensors.values():
            value = stored.read().to(dtype if stored.tensor.ndim > 1 else torch.float32).contiguous()
            raw = value.view(torch.int16) if value.dtype == torch.bfloat16 else value  # numpy has no bfloat16
            writer.write_tensor_data(raw.numpy())


@contextmanager
def _closing(writer: Any) -> Iterator[None]:
    try:
        yield
    finally:
        writer.close()


def _prove(
    request: Request, decoder: deci.Decoder, vocabulary: Vocabulary, probes: list[Probe], dtype: torch.dtype
) -> dict[str, Any]:
    """Run the file in llama.cpp, and compare.

    Raises:
        HeadPruneError: It reads a text as other tokens, or its answers differ by more than rounding.
    """
    asked = min(decoder.vocabulary, llama_cpp.MOST)
    # It tells the log-probabilities of a token only where that token is text, so a letter is made to come; they are those before.
    letter = next((i for i, t in enumerate(vocabulary.tokens) if len(t) == 1 and t.isascii() and t.isalpha()), None)
    bias = [] if letter is None else [[letter, 1e4]]
    requests = [
        {"prompt": p.prompt, "n_predict": 1, "temperature": 0, "n_probs": asked, "logit_bias": bias} for p in probes
    ]
    version, answers = llama_cpp.complete(request.path, requests, context=max(len(p.ids) for p in probes) + 8)
    largest, allowed = 0.0, max(deci.TOLERANCE, _rounding(decoder, probes, dtype))
    for probe, answer in zip(probes, answers, strict=True):
        counted = answer.get("usage", {}).get("prompt_tokens")
        if counted != len(probe.ids):
            raise HeadPruneError(
                f"llama.cpp reads {probe.prompt!r} as {counted} tokens, the tokenizer as {len(probe.ids)}.",
                "Its tokenizer of this kind differs; report it, with the tokenizer's name.",
            )
        own = llama_cpp.log_probabilities(answer, decoder.vocabulary)
        gap = (own - probe.answer).abs()[~own.isnan()].max().item()
        if not gap <= allowed:
            raise HeadPruneError(
                f"llama.cpp's log-probabilities are {gap:.2g} off after {_shown(probe.prompt)} (allowed: {allowed:.2g}).",
                "Report it, with the model's name and xllamacpp's version.",
            )
        largest = max(largest, gap)
    return {
        "engine": f"xllamacpp {version}", "prompts": len(probes), "largest_difference": largest, "allowed": allowed,
    }  # fmt: skip


def _rounding(decoder: deci.Decoder, probes: list[Probe], dtype: torch.dtype) -> float:
    """What rounding may do to the log-probabilities of the last tokens, at most."""
    largest = 0.0
    with torch.inference_mode():
        for probe in probes:
            if dtype == torch.float32:
                own = deci.NOISE * deci.sensitivity(decoder, probe.ids)[-1]
            else:
                *_, last = deci.layers_of(decoder, probe.ids, dtype)
                own = _ROUNDED * (deci.log_probabilities(decoder, last[-1:], dtype)[0] - probe.answer).abs().max()
            largest = max(largest, own.item())
    return largest


def _shown(prompt: str | list[int]) -> str:
    return repr(prompt) if isinstance(prompt, str) else f"{len(prompt)} random tokens"
