"""A model's answers as texts: those that it generates, or parts of a context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.batches import is_out_of_memory
from headprune.divergence import part_of
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import call, model_device, unlabelled, writes

_DEFAULT_LENGTHS = (None, 20)  # transformers' own, which no one chose
# A generation_config may ask for several texts, and for scores beside their tokens.
_ONE_TEXT = {"do_sample": False, "num_return_sequences": 1, "return_dict_in_generate": False}
_LONGEST = 30  # tokens of an answer in a context, as transformers' example script for SQuAD has it


class Generation:
    """Texts that an encoder-decoder generates, by greedy or beam search, for metrics such as ``wer`` and ``bleu``.

    Everything that is not given is as in the model's own ``generation_config``; but nothing is sampled, so that two
    models can be compared, and each example gets one text. If neither says how long an answer may be, it may be half as
    long again as the longest reference.

    Args:
        tokenizer: The model's tokenizer.
        references: The right text of every example, or several of which any is right, in the order of the batches.
        max_new_tokens: Tokens of an answer, at most.
        num_beams: Beams; 1 for greedy search.
    """

    def __init__(
        self,
        tokenizer: Any,
        references: Sequence[Any],
        *,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
    ) -> None:
        self.tokenizer, self.references = tokenizer, references
        asked = {"max_new_tokens": max_new_tokens, "num_beams": num_beams}
        self.options = {name: value for name, value in asked.items() if value is not None}

    def read(self, model: nn.Module, batch: Any, first: int) -> list[str]:
        """The texts for a batch of dicts.

        Raises:
            HeadPruneError: The model generates no texts, or not from these inputs.
        """
        if not writes(model):
            raise HeadPruneError(f"{type(model).__name__} generates no texts.", "Choose a metric that needs none.")
        generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
        inputs = {k: v for k, v in unlabelled(batch).items() if not k.startswith("decoder_")}
        try:
            tokens = generate(**inputs, **_ONE_TEXT, **_words_alone(model), **self._length(model), **self.options)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            message = f"{type(model).__name__} cannot generate ({type(error).__name__}: {first_line(error)})."
            raise HeadPruneError(message, "Check --max-new-tokens, and the model's generation_config.json.") from error
        texts: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _length(self, model: nn.Module) -> dict[str, int]:
        config: Any = getattr(model, "generation_config", None)
        chosen = getattr(config, "max_new_tokens", None) or getattr(config, "max_length", None) not in _DEFAULT_LENGTHS
        if chosen or "max_new_tokens" in self.options:
            return {}
        texts = [t for each in self.references for t in ([each] if isinstance(each, str) else each)]
        longest = max(len(ids) for ids in self.tokenizer(text_target=texts)["input_ids"])
        return {"max_new_tokens": longest + longest // 2}


def _words_alone(model: nn.Module) -> dict[str, Any]:
    """For Whisper, which is asked for a text without timestamps: rules these tokens out.

    A pruned model may write two in a row, and transformers then starts again from the first one's time: if that is 0, for ever.
    """
    from transformers import SuppressTokensLogitsProcessor

    written: Any = getattr(model, "generation_config", None)
    before = getattr(written, "no_timestamps_token_id", None)  # the token before that of 0 seconds
    if before is None or getattr(written, "return_timestamps", False):
        return {}
    config: Any = model.config
    times = list(range(before + 1, config.vocab_size))
    return {"logits_processor": [SuppressTokensLogitsProcessor(times, device=str(model_device(model)))]}


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
        starts, ends = (part_of(output, f"{name}_logits").cpu().double() for name in ("start", "end"))
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
