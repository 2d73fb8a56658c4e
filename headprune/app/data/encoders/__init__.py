"""One class a task: rows of a dataset become features, and features become batches.

A new task is a subclass of `Encoder` and a line in `ENCODERS`, beside its entry in `headprune.app.models.TASKS`.
"""

from headprune.app.data.encoders.audio import AudioClassification, SpeechSeq2Seq
from headprune.app.data.encoders.base import LABEL_KEYS, Encoder
from headprune.app.data.encoders.image import ImageClassification
from headprune.app.data.encoders.language import CausalLM, MaskedLM
from headprune.app.data.encoders.text import QuestionAnswering, Seq2Seq, SequenceClassification, TokenClassification

__all__ = ["ENCODERS", "LABEL_KEYS", "Encoder"]

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
