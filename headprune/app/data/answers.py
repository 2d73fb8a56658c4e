"""The right answers of a part's examples as texts, and how a model answers with texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.app.data.parts import Part
from headprune.app.models import LoadedModel
from headprune.app.options import MetricOptions
from headprune.divergence import part_of
from headprune.errors import HeadPruneError
from headprune.evaluation import Texts
from headprune.generation import Generation
from headprune.inputs import call, unlabelled

_LONGEST = 30  # tokens of an answer in a context, as transformers' example script for SQuAD has it


def texts_of(part: Part, loaded: LoadedModel, options: MetricOptions) -> Texts:
    """How a model answers a part's examples with texts.

    Raises:
        HeadPruneError: Its task has no such answers.
    """
    rows = [part.row(i) for i in part.order()]
    if loaded.task.name == "question-answering":
        return Spans(loaded.processor, rows, part.columns)
    if loaded.task.name not in ("seq2seq", "speech-seq2seq"):
        hint = "Choose another metric (docs/metrics.md lists them by task)."
        raise HeadPruneError(f"A model for {loaded.task.name} gives no texts to compare.", hint)
    target = part.columns.get("target") or part.columns["transcript"]
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    return Generation(
        tokenizer,
        [str(row[target]) for row in rows],
        max_new_tokens=options.max_new_tokens,
        num_beams=options.num_beams,
    )


class Spans:
    """The most likely answer within each context, by the sum of its start's and its end's logit.

    Args:
        rows: The dataset's rows, in the order of the batches.
        columns: Their columns, by what they hold.
    """

    def __init__(self, tokenizer: Any, rows: list[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
        self.tokenizer = tokenizer
        question, context = columns["text"].split(",")
        self.pairs = [(row[question], row[context]) for row in rows]
        self.references: Sequence[Any] = [list(row[columns["answers"]]["text"]) for row in rows]

    def read(self, model: nn.Module, batch: Any, first: int) -> list[str]:
        output = call(model, unlabelled(batch))
        starts, ends = (part_of(output, f"{name}_logits").double().cpu() for name in ("start", "end"))
        return [self._best(first + i, *logits) for i, logits in enumerate(zip(starts, ends, strict=True))]

    def _best(self, example: int, start: Tensor, end: Tensor) -> str:
        question, context = self.pairs[example]
        most = int(start.numel())
        coded = self.tokenizer(
            question, context, truncation="only_second", max_length=most, return_offsets_mapping=True
        )
        inside = torch.tensor([owner == 1 for owner in coded.sequence_ids()])
        hidden = float("-inf")
        start, end = (logits[: len(inside)].masked_fill(~inside, hidden) for logits in (start, end))
        both = start[:, None] + end[None, :]
        allowed = torch.ones_like(both).triu() - torch.ones_like(both).triu(_LONGEST)
        best = int(both.masked_fill(allowed == 0, hidden).argmax())
        first, last = coded["offset_mapping"][best // len(inside)], coded["offset_mapping"][best % len(inside)]
        return str(context[first[0] : last[1]])
