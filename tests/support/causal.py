"""Tiny language models, and wrappers that hide what a model's class would say about its loss."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from tests.support.folders import common
from tests.support.zoo import randomise


def tiny(**more: Any) -> dict[str, Any]:
    return common(hidden_size=16, num_attention_heads=2, intermediate_size=16, **more)


def text_config(**more: Any) -> dict[str, Any]:
    return tiny(num_key_value_heads=1, head_dim=8, **more)


VISION = {
    "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16, "image_size": 16, "patch_size": 8,
}  # fmt: skip


def gemma3() -> nn.Module:
    config = tf.Gemma3Config(
        text_config=text_config(), vision_config=VISION, mm_tokens_per_image=4, image_token_index=29
    )
    return tf.Gemma3ForConditionalGeneration(config)


def bart() -> nn.Module:
    config = tf.BartConfig(
        vocab_size=30, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, encoder_layers=1,
        encoder_attention_heads=2, encoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=0, is_decoder=True,
        is_encoder_decoder=False,
    )  # fmt: skip
    return tf.BartForCausalLM(config)


def xlnet() -> nn.Module:
    return tf.XLNetLMHeadModel(tf.XLNetConfig(vocab_size=30, d_model=16, n_head=2, n_layer=1, d_inner=16))


def regression(problem: str | None = "regression", targets: int = 3) -> nn.Module:
    config = tf.BertConfig(**tiny(num_labels=targets), problem_type=problem)
    return randomise(tf.BertForSequenceClassification(config))


@torch.no_grad()
def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> float:
    return float(model(**batch).loss)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


class OwnLoss(Wrapped):
    """A loss of the model's own, by a function of logits, labels and inputs."""

    def __init__(self, inner: nn.Module, loss: Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]) -> None:
        super().__init__(inner)
        self.loss = loss

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        out = self.inner(**inputs)
        if labels is not None:
            out.loss = self.loss(out.logits, labels, inputs)
        return out


class Labelless(Wrapped):
    """Knows of no labels, so that there is no loss to compare with."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


class Tensors(Wrapped):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits


def texts(rows: int = 4, length: int = 8, left: bool = False) -> dict[str, Tensor]:
    """Texts of different length, their padding without a label."""
    ids = torch.randint(3, 30, (rows, length), generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(rows) % (length - 3) + 4
    mask = (torch.arange(length) < lengths[:, None]).long()
    if left:
        mask = mask.flip(1)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class MyGPT(tf.GPT2LMHeadModel):
    """What users write."""


def my_gpt() -> nn.Module:
    return MyGPT(tf.GPT2Config(vocab_size=30, n_embd=16, n_head=2, n_layer=2))


def singles(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v[i : i + 1] for k, v in batch.items()} for i in range(len(batch["labels"]))]
