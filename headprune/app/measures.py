"""What a model is measured by on a part of the data: which metrics, and how its answers are read where they are texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.app.data import Part
from headprune.app.models import LoadedModel, numbers_given
from headprune.app.options import MetricOptions
from headprune.divergence import part_of
from headprune.errors import HeadPruneError
from headprune.evaluation import Measurement, Texts, evaluate
from headprune.generation import Generation
from headprune.inputs import call, unlabelled
from headprune.metrics import TEXTS, metric_named
from headprune.running import Progress

_LONGEST = 30  # tokens of an answer in a context, as transformers' example script for SQuAD has it


@dataclass(frozen=True)
class Measures:
    """The metrics of a model's task, or those that were asked for.

    Attributes:
        loaded: The model, for its task and its processor.
        options: As they were typed.
    """

    loaded: LoadedModel
    options: MetricOptions

    @property
    def own(self) -> str:
        """The metric that the model's logits and labels give without further work."""
        return self.loaded.task.metric if numbers_given(self.loaded) is None else "loss"

    @property
    def further(self) -> tuple[str, ...]:
        """The metrics to measure beside the task's own: those asked for, or Spearman's correlation for one number."""
        return self.options.metric or (("spearman",) if numbers_given(self.loaded) == "1 number" else ())

    @property
    def first(self) -> str:
        """The metric that decides: the first one asked for, or the task's own."""
        return next(iter(self.further), self.own)

    @property
    def for_plans(self) -> str:
        """The metric of plans on the choosing part: `first`, unless it is of texts, which would be generated for every plan."""
        return self.own if TEXTS in metric_named(self.first).forms else self.first

    def evaluate(self, model: nn.Module, part: Part, progress: Progress | None = None) -> Measurement:
        """Measure a model on a part."""
        return evaluate(model, part.batches(), metrics=self.further, texts=self.texts(part), progress=progress)

    def texts(self, part: Part) -> Texts | None:
        """How a model answers a part's examples with texts, if a metric needs them.

        Raises:
            HeadPruneError: The model's task has no such answers.
        """
        if not any(TEXTS in metric_named(name).forms for name in self.further):
            return None
        loaded, options, rows = self.loaded, self.options, [part.row(i) for i in part.order()]
        if loaded.task.name == "question-answering":
            return Spans(loaded.processor, rows, part.columns)
        if loaded.task.name not in ("seq2seq", "speech-seq2seq"):
            hint = "Choose another metric (docs/metrics.md lists them by task)."
            raise HeadPruneError(f"A model for {loaded.task.name} gives no texts to compare.", hint)
        target = part.columns.get("target") or part.columns["transcript"]
        tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
        given = {"max_new_tokens": options.max_new_tokens, "num_beams": options.num_beams}
        return Generation(tokenizer, [str(row[target]) for row in rows], **given)


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
