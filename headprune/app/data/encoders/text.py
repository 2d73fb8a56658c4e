"""Texts: classes of texts and of words, answers to questions, texts from texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from headprune.app.data.encoders.base import CLASS_COLUMNS, Encoder, padded_labels
from headprune.divergence import IGNORED, gives_several, regresses
from headprune.errors import HeadPruneError

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
