"""Language models: the next token, or the masked ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.app.data.encoders.text import PerTokenEncoder, TextEncoder
from headprune.batches import Rows
from headprune.conventions import logits_in
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import call, model_device
from headprune.label_use import find_label_use
from headprune.running import quiet

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
            convention = find_label_use(self.model, [example], Rows()).convention
        shifted = convention is not None and convention.ahead == 0
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
