"""A tokenizer as a GGUF file holds it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headprune.errors import HeadPruneError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama": _WORDS + r"\p{N}{1,3}" + _REST,
    "qwen": _WORDS + r"\p{N}" + _REST,
    "tekken": "|".join(_CASED) + r"|\p{N}" + _CASED_REST,
}
# How text is cut before bytes are merged, and whether whole words of the vocabulary are looked up first: what llama.cpp calls it.
PRE_TOKENIZERS = {
    (("bytes with words",), False): "gpt-2",
    (("digits", "bytes with words"), False): "smollm",
    (("split llama", "bytes"), True): "llama-bpe",
    (("split llama", "bytes"), False): "dbrx",
    (("split qwen", "bytes"), False): "qwen2",
    (("split tekken", "bytes"), True): "tekken",
}


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of its tokenizer.

    Attributes:
        kind: ``"gpt2"`` (merges of bytes) or ``"llama"`` (SentencePiece's merges, which have scores).
        pre: How text is cut before that, by llama.cpp's name.
        tokens, types: By id, as many as the model's embeddings.
        merges: Of ``"gpt2"``: two tokens with a space between them, the first to merge first.
        scores: Of ``"llama"``: by id, the highest merges first.
        special: Ids of ``bos``, ``eos``, ``unk`` and ``pad``, those that there are.
        add_bos, add_eos, add_space: What is added to a text.
        template: For chats, in Jinja.
        notes: What a reader should know.
    """

    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space: bool
    template: str | None
    notes: tuple[str, ...] = ()

    def write(self, writer: Any) -> None:
        """Into a `gguf.GGUFWriter`."""
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, index in self.special.items():
            getattr(writer, f"add_{name}_token_id")(index)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        writer.add_add_space_prefix(self.add_space)
        if self.template:
            writer.add_chat_template(self.template)


def vocabulary_of(tokenizer: Any, size: int) -> Vocabulary:
    """What a file has to say of a tokenizer.

    Args:
        tokenizer: One of transformers', with a fast backend.
        size: Of the model's vocabulary; ids that the tokenizer does not have are filled up.

    Raises:
        HeadPruneError: llama.cpp has no tokenizer of this kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        what = "no tokenizer" if tokenizer is None else f"a {type(tokenizer).__name__}, which has no tokenizer.json"
        raise HeadPruneError(
            f"A GGUF file holds a tokenizer, and there is {what}.", "Save one into the model's folder."
        )
    data = json.loads(backend.to_str())
    model = data["model"]
    if model["type"] != "BPE":
        raise HeadPruneError(
            f"The tokenizer is a {model['type']} model; of llama.cpp's kinds, byte-pair encoding (BPE) is written.",
            "Export a model with a BPE tokenizer.",
        )
    tokens, types = _tokens(tokenizer, data, size)
    steps, spaced = _steps(data)
    add_bos, add_eos = _ends(tokenizer)
    merges = [m if isinstance(m, list) else m.split(" ", 1) for m in model["merges"]]
    pieces = "pieces" in steps
    pre = "default" if pieces else PRE_TOKENIZERS.get((steps, bool(model.get("ignore_merges"))))
    if pre is None:
        raise HeadPruneError(
            f"The tokenizer cuts text by {', '.join(steps) or 'nothing'}"
            f"{' and looks up whole words' if model.get('ignore_merges') else ''}, which is none of the ways written for llama.cpp.",
            "Known are the tokenizers of " + ", ".join(PRE_TOKENIZERS.values()) + " and SentencePiece's.",
        )
    special = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk", "pad")}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    normal = (data["normalizer"] or {}).get("type")
    return Vocabulary(
        "llama" if pieces else "gpt2", pre, tokens, types,
        [] if pieces else [" ".join(pair) for pair in merges], _scores(tokens, merges) if pieces else [],
        {name: index for name, index in special.items() if index is not None and index < size},
        add_bos, add_eos, spaced, template,
        ("llama.cpp does not normalise text (NFC), as the tokenizer does.",) if normal == "NFC" else (),
    )  # fmt: skip


def _tokens(tokenizer: Any, data: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Texts and types, by id."""
    tokens: list[str | None] = [None] * size
    types = [UNUSED] * size
    largest = max([*data["model"]["vocab"].values(), *(added["id"] for added in data["added_tokens"])])
    if largest >= size:
        raise HeadPruneError(
            f"The tokenizer has a token {largest}, the model only {size} embeddings.",
            "Use the model's own tokenizer, or resize its embeddings (model.resize_token_embeddings).",
        )
    bytewise = bool(data["model"].get("byte_fallback"))
    for text, index in data["model"]["vocab"].items():
        byte = bytewise and re.fullmatch(r"<0x[0-9A-F]{2}>", text)
        tokens[index], types[index] = text, BYTE if byte else NORMAL
    for added in data["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    if bytewise and tokenizer.unk_token_id is not None and tokenizer.unk_token_id < size:
        types[tokenizer.unk_token_id] = UNKNOWN
    return [f"[PAD{i}]" if text is None else text for i, text in enumerate(tokens)], types


def _steps(data: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    """How text is cut, in words; and whether a space is put before it."""
    normalizers = _listed(data["normalizer"], "normalizers")
    cuts = _listed(data["pre_tokenizer"], "pretokenizers")
    kinds = [step["type"] for step in normalizers]
    if data["model"].get("byte_fallback"):
        if kinds in (["Prepend", "Replace"], ["Replace"]) and not cuts:
            return ("pieces",), "Prepend" in kinds
        if not kinds and [step["type"] for step in cuts] == ["Metaspace"] and not cuts[0].get("split", True):
            return ("pieces",), cuts[0].get("prepend_scheme", "always") != "never"
    found = [_step(step) for step in cuts]
    if kinds not in ([], ["NFC"]):
        found.insert(0, f"normalising ({', '.join(kinds)})")
    return tuple(found), False


def _listed(step: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step[parts]) if step["type"] == "Sequence" else [step]


def _step(step: dict[str, Any]) -> str:
    """One way to cut, in words that `PRE_TOKENIZERS` knows, or in others."""
    kind = step["type"]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes with words" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") in ("Isolated", "Removed") and isinstance(step["pattern"], dict):
        pattern = step["pattern"].get("Regex")
        inverted = step["behavior"] == "Removed"  # what matches is a word: Removed keeps it where inverted
        known = next((name for name, own in _PATTERNS.items() if own == pattern), None)
        if known and bool(step.get("invert")) == inverted:
            return f"split {known}"
    return json.dumps(step, ensure_ascii=False)


def _ends(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the beginning and the end of a text are marked, found out by trying."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for before in (False, True):
        for after in (False, True):
            if whole == [bos] * before + bare + [eos] * after:
                return before, after
    raise HeadPruneError(
        f"The tokenizer makes {whole} of a text whose tokens are {bare}: llama.cpp adds bos and eos tokens only.",
        "Use a tokenizer without such a post-processor.",
    )


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """SentencePiece's scores: llama.cpp merges the neighbours whose joint piece has the highest.

    tokenizer.json has their order only, which is all that counts; all merges that make a piece must lie together in it.
    """
    order: dict[str, int] = {}
    last = None
    for left, right in merges:
        piece = left + right
        if piece != last and piece in order:
            raise HeadPruneError(
                f"The tokenizer's merges into {piece!r} do not lie together, so that they are not SentencePiece's.",
                "Export a model with another tokenizer.",
            )
        order.setdefault(piece, len(order))
        last = piece
    return [-float(order.get(token, len(order))) for token in tokens]
