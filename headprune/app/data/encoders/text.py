"""Texts: classes of texts and of words, answers to questions, texts from texts, and language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.app.data.encoders.base import CLASS_COLUMNS, Encoder, padded_labels
from headprune.batches import Rows
from headprune.conventions import SAME, logits_in
from headprune.divergence import IGNORED, gives_several, regresses
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import call, model_device
from headprune.label_use import find_label_use
from headprune.running import quiet

# Usual names, the clearest first; a tuple is a pair of texts.
_TEXT_COLUMNS: tuple[str | tuple[str, str], ...] = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("text_a", "text_b"),
    ("question", "sentence"), ("question", "passage"), "text", "sentence", "content", "review", "tweet", "document",
    "tokens", "words", "article",
)  # fmt: skip
_SOURCE_COLUMNS = ("article", "document", "dialogue", "source", "input", "question", "text")
_TARGET_COLUMNS = ("highlights", "summary", "target", "output", "answer", "label", "labels")


class TextEncoder(Encoder):
    """Shared by everything that tokenizes."""

    usual_columns = _TEXT_COLUMNS

    def setup(self) -> None:
        self.text = self.text_columns()

    def text_columns(self) -> tuple[str, ...]:
        given = self.options.text_column
        if given is not None:
            return tuple(self.column("text", "--text-column", name.strip(), ()) for name in given.split(","))
        for usual in self.usual_columns:
            pair = usual if isinstance(usual, tuple) else (usual,)
            if all(name in self.available for name in pair):
                self.columns["text"] = ",".join(pair)
                return pair
        raise HeadPruneError(
            f"No column looks like the text: the columns are {', '.join(self.available)}.",
            "Name it with --text-column (two for pairs: --text-column premise,hypothesis).",
        )

    def tokens(self, example: Mapping[str, Any]) -> dict[str, list[int]]:
        texts = [example[name] for name in self.text]
        if any(not isinstance(t, str) for t in texts):
            raise HeadPruneError(f"column {self.text[0]!r} holds no text.", "Name another with --text-column.")
        return dict(self.shortened(partial(self.processor, *texts)))


class PerTokenEncoder(TextEncoder):
    """A label for every token."""

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        from transformers import DataCollatorForTokenClassification

        return dict(DataCollatorForTokenClassification(self.processor, label_pad_token_id=IGNORED)(features))


class SequenceClassification(TextEncoder):
    def setup(self) -> None:
        super().setup()
        self.label = self.label_column()
        if gives_several(self.model):
            self.notes.append("Accuracy is that of single labels: a text counts once for each label that it may have.")

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        return {**self.tokens(example), **self.labels(example, self._target)}

    def _target(self, label: Any) -> Any:
        if isinstance(label, list) or gives_several(self.model):
            return self.classes.several(label, any_number=regresses(self.model))
        return self.classes.number(label)


class TokenClassification(PerTokenEncoder):
    def setup(self) -> None:
        super().setup()
        self.label = self.label_column(CLASS_COLUMNS[::-1])

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | str:
        words = example[self.text[0]]
        if not words:
            return "empty"
        coded = self.shortened(partial(self.processor, words, is_split_into_words=True))
        return {**coded, **self.labels(example, lambda tags: self._targets(tags, len(words), coded.word_ids()))}

    def _targets(self, tags: Any, words: int, owners: Sequence[int | None]) -> list[int | float]:
        """A label for each token: that of its word for the word's first token, by which the word counts once."""
        if not isinstance(tags, list) or len(tags) != words:
            many = len(tags) if isinstance(tags, list) else "no"
            raise HeadPruneError(f"{words} words, but {many} labels.", "Check the two columns.")
        pairs = zip(owners, [None, *owners], strict=False)
        return [
            IGNORED if word is None or word == previous else self.classes.number(tags[word]) for word, previous in pairs
        ]


class QuestionAnswering(Encoder):
    """SQuAD's columns: question, context, answers {text, answer_start}."""

    def setup(self) -> None:
        self.question = self.column("question", "--text-column", None, ("question",))
        self.context = self.column("context", "--text-column", None, ("context", "passage"))
        self.label = self.label_column(("answers", "answer"), "answers")
        self.notes.append("Accuracy is the share of the answers' starts and ends that are found, each by itself.")

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | str:
        answers = None if self.label is None else example[self.label]
        if self.label is not None and not (answers and answers["text"]):
            return "without an answer"
        coded = self.shortened(
            partial(self.processor, example[self.question], example[self.context], return_offsets_mapping=True),
            how="only_second",
        )
        offsets, sequence = coded.pop("offset_mapping"), coded.sequence_ids()
        if answers is None:
            return dict(coded)
        start = answers["answer_start"][0]
        end = start + len(answers["text"][0])
        inside = [
            i for i, (s, (a, b)) in enumerate(zip(sequence, offsets, strict=True)) if s == 1 and a < end and b > start
        ]
        if not inside:
            return "with the answer behind the cut"
        return {**coded, "start_positions": inside[0], "end_positions": inside[-1]}


class Seq2Seq(TextEncoder):
    def text_columns(self) -> tuple[str, ...]:
        return (self.column("source", "--text-column", self.options.text_column, _SOURCE_COLUMNS),)

    def setup(self) -> None:
        super().setup()
        usual = [name for name in _TARGET_COLUMNS if name not in self.text]
        self.target = self.column("target", "--label-column", self.options.label_column, usual)

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        target = self.shortened(partial(self.processor, text_target=str(example[self.target])))
        return {**self.tokens(example), "labels": list(target["input_ids"])}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super().collate([{k: v for k, v in f.items() if k != "labels"} for f in features])
        return {**batch, "labels": padded_labels([f["labels"] for f in features])}


_CHATS = "Chats were written out by the tokenizer's chat template; what every speaker says is predicted."


class CausalLM(PerTokenEncoder):
    """Plain texts, or chats: a column of lists of ``{"role": …, "content": …}``, written out by the tokenizer's chat template."""

    usual_columns = (*TextEncoder.usual_columns, "messages", "conversations", "conversation")

    def setup(self) -> None:
        super().setup()
        # Padding on the left would have the first word predicted from it, and shift every position after it.
        self.processor.padding_side = "right"
        self.shifted = self._wants_next_tokens()

    def _wants_next_tokens(self) -> bool:
        """Whether labels must be the next tokens, since the model compares logits with labels in their own place.

        Raises:
            HeadPruneError: A model that sees the tokens that it would be asked for.
        """
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.config.get_text_config().vocab_size
        # Marks of images and the like are mostly the first or the last of a vocabulary.
        ids = torch.randint(vocabulary // 4, max(vocabulary // 2, 2), (1, 8), generator=generator)
        ids = ids.to(model_device(self.model))
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        with quiet(self.model), torch.no_grad():
            if _sees_ahead(self.model, ids):
                raise HeadPruneError(
                    f"{type(self.model).__name__}, as it is set up, sees the tokens behind each one: its perplexity on plain "
                    "text would mean nothing.",
                    "Use --task masked-lm, if it is a masked language model (or is_decoder in its config).",
                )
            shifted = find_label_use(self.model, [example], Rows()).convention == SAME
        if shifted:
            self.notes.append("This model's own loss does not shift labels: they are the next tokens.")
        return shifted

    def tokens(self, example: Mapping[str, Any]) -> dict[str, list[int]]:
        value = example[self.text[0]]
        if len(self.text) > 1 or not _is_chat(value):
            return super().tokens(example)
        text = self._written(value)
        if _CHATS not in self.notes:
            self.notes.append(_CHATS)
        # The template writes the special tokens: the tokenizer's own would come twice.
        return dict(self.shortened(partial(self.processor, text, add_special_tokens=False)))

    def _written(self, chat: list[Mapping[str, Any]]) -> str:
        """A chat as text."""
        if not getattr(self.processor, "chat_template", None):
            raise HeadPruneError(
                f"column {self.text[0]!r} holds chats, and the tokenizer has no chat template.",
                "Set its chat_template, or write the chats out into a column of texts.",
            )
        try:
            return str(self.processor.apply_chat_template(chat, tokenize=False))
        except Exception as error:  # templates raise what they like, mostly about the order of roles
            raise HeadPruneError(
                f"the tokenizer's chat template refuses the chat: {first_line(error)}",
                "Correct this chat, or leave it out.",
            ) from error

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | str:
        coded = self.tokens(example)
        if len(coded["input_ids"]) < 2:
            return "of less than two tokens"
        coded.pop("token_type_ids", None)
        ids = list(coded["input_ids"])
        return {**coded, "labels": [*ids[1:], IGNORED] if self.shifted else ids}


def _sees_ahead(model: nn.Module, ids: Tensor) -> bool:
    """Whether logits depend on tokens behind their own: by another last token of a text ``[1, tokens]``."""
    other = torch.cat([ids[:, :-1], ids[:, -1:] ^ 1], dim=1)
    before, after = (
        logits_in(call(model, {"input_ids": t, "attention_mask": torch.ones_like(t)})) for t in (ids, other)
    )
    if before is None or after is None or before.ndim != 3 or before.shape[1] < ids.shape[1]:
        return False
    most = 1e-5 if before.dtype in (torch.float32, torch.float64) else 1e-3
    return bool((after - before)[:, :-1].abs().max() > most * before.abs().max())


def _is_chat(value: Any) -> bool:
    """Whether this is a list of what somebody said, as chat templates take it."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, Mapping) and {"role", "content"} <= {*m} for m in value)
    )


class MaskedLM(PerTokenEncoder):
    def setup(self) -> None:
        super().setup()
        if self.processor.mask_token_id is None:
            raise HeadPruneError("The tokenizer has no mask token.", "Use a masked language model's tokenizer.")
        self.notes.append("15 % of each text's tokens were masked, drawn by seed and row; only they are predicted.")

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | str:
        coded = self.tokens(example)
        ids = coded["input_ids"]
        special = set(self.processor.all_special_ids)
        open_ = [i for i, token in enumerate(ids) if token not in special]
        if not open_:
            return "without a token to mask"
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + row)
        count = max(1, round(0.15 * len(open_)))
        masked = {open_[i] for i in torch.randperm(len(open_), generator=generator)[:count].tolist()}
        labels = [token if i in masked else IGNORED for i, token in enumerate(ids)]
        coded["input_ids"] = [self.processor.mask_token_id if i in masked else t for i, t in enumerate(ids)]
        return {**coded, "labels": labels}

    def identity(self, feature: dict[str, Any]) -> Any:
        """The text before it was masked."""
        pairs = zip(feature["input_ids"], feature["labels"], strict=True)
        return [token if label == IGNORED else label for token, label in pairs]
