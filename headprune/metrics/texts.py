"""Metrics of texts: exact match and F1 of answers as SQuAD computes them, error rates (jiwer), BLEU and chrF (sacrebleu), ROUGE-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from headprune.metrics.base import TEXTS, Answers, Metric, by_sums, library, ratio


def _mean_of(name: str, value: Callable[[str, str], float]) -> Metric:
    """The mean over examples of a value of (prediction, reference), the best over the references."""

    def sums(answers: Answers) -> np.ndarray:
        pairs = zip(answers.predictions, map(_listed, answers.references), strict=True)
        return np.array([[max(value(text, right) for right in rights), 1.0] for text, rights in pairs])

    return Metric(name, (TEXTS,), chance=0.0, **by_sums(sums, ratio))


def _listed(reference: Any) -> list[str]:
    return [reference] if isinstance(reference, str) else list(reference)


# -- SQuAD (Rajpurkar et al. 2016), as its evaluation script does --------------------------------------------


def normalised(text: str) -> str:
    """A text in lower case without punctuation, articles and superfluous spaces.

    >>> normalised("The  Cat's hat!")
    'cats hat'
    """
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _exact(text: str, reference: str) -> float:
    return float(normalised(text) == normalised(reference))


def _words_f1(text: str, reference: str) -> float:
    words, right = normalised(text).split(), normalised(reference).split()
    if not words or not right:
        return float(words == right)
    common = (Counter(words) & Counter(right)).total()
    return 2 * common / (len(words) + len(right))


# -- libraries ------------------------------------------------------------------------------------------


@cache
def _rouge() -> Any:
    return library("rouge_score.rouge_scorer", "rouge_l", "rouge-score").RougeScorer(["rougeL"])


def _rouge_l(text: str, reference: str) -> float:
    return float(_rouge().score(reference, text)["rougeL"].fmeasure)


def _errors(process: str, clean: Callable[[str], str], answers: Answers) -> np.ndarray:
    """``[examples, 2]``: wrong, missing and superfluous words or characters of cleaned texts, and those of the reference."""
    count, rows = getattr(library("jiwer", "An error rate", "jiwer"), process), []
    for text, reference in zip(answers.predictions, answers.references, strict=True):
        if not isinstance(reference, str):
            raise ValueError("an example has several references")
        edits = count(clean(reference), clean(text))
        changed = edits.substitutions + edits.deletions
        rows.append([changed + edits.insertions, changed + edits.hits])
    return np.array(rows, dtype=float)


def _basic(text: str) -> str:
    """A text without case and punctuation, as Whisper's authors compare texts (Radford et al. 2022, appendix C)."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    return str(BasicTextNormalizer()(text)).strip()


def _error_rate(name: str, process: str, clean: Callable[[str], str] = str) -> Metric:
    return Metric(name, (TEXTS,), higher=False, chance=1.0, **by_sums(partial(_errors, process, clean), ratio))


def _sacrebleu(kind: str) -> Metric:
    """BLEU or chrF of a corpus, from 0 to 100, by sacrebleu's own statistics of each sentence."""

    @cache
    def metric() -> Any:
        return getattr(library("sacrebleu.metrics", kind.lower(), "sacrebleu"), kind)()

    def sums(answers: Answers) -> np.ndarray:
        references = [_listed(reference) for reference in answers.references]
        most = max(map(len, references))
        streams = [[each[min(i, len(each) - 1)] for each in references] for i in range(most)]
        return np.array(metric()._extract_corpus_statistics(list(answers.predictions), streams), dtype=float)

    def of(total: np.ndarray) -> float:
        return float(metric()._aggregate_and_compute([total.tolist()]).score)

    return Metric(kind.lower(), (TEXTS,), width=100.0, percent=False, chance=0.0, **by_sums(sums, of))


METRICS = [
    _mean_of("exact_match", _exact),
    _mean_of("squad_f1", _words_f1),
    _mean_of("rouge_l", _rouge_l),
    _error_rate("wer", "process_words"),
    _error_rate("wer_normalised", "process_words", _basic),
    _error_rate("cer", "process_characters"),
    _sacrebleu("BLEU"),
    _sacrebleu("CHRF"),
]
