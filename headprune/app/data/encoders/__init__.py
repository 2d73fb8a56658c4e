"""One class for each task: it makes features of a dataset's rows, and batches of features.

A new task is a subclass of `Encoder` and a line in `ENCODERS`, beside its entry in `headprune.app.options.TASKS`.
"""

from headprune.app.data.encoders.base import Encoder
from headprune.app.data.encoders.media import AudioClassification, ImageClassification, SpeechSeq2Seq
from headprune.app.data.encoders.text import (
    CausalLM,
    MaskedLM,
    QuestionAnswering,
    Seq2Seq,
    SequenceClassification,
    TokenClassification,
)
from headprune.app.options import Task

__all__ = ["ENCODERS", "Encoder", "encoder_of"]

ENCODERS: dict[str, type[Encoder]] = {
    "sequence-classification": SequenceClassification,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
    "masked-lm": MaskedLM,
    "causal-lm": CausalLM,
    "seq2seq": Seq2Seq,
    "image-classification": ImageClassification,
    "audio-classification": AudioClassification,
    "speech-seq2seq": SpeechSeq2Seq,
}


def encoder_of(task: Task) -> type[Encoder]:
    """A task's encoder; of a base model, the one that classifies what it takes, for data without labels."""
    return ENCODERS[task.name if task.name in ENCODERS else _BASE[task.modality]]


_BASE = {"text": "sequence-classification", "image": "image-classification", "audio": "audio-classification"}
