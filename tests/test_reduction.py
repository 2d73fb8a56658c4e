"""How a loss that is not known is averaged over examples and labels."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

from headprune.evaluation import evaluate
from tests.support.causal import Wrapped, my_gpt, singles, texts
from tests.support.zoo import randomise


def wav2vec2(reduction: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A CTC model, and sounds with 3 to 10 labels each."""
    config = tf.Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, ctc_loss_reduction=reduction, pad_token_id=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 12, (4, 10), generator=generator)
    labels[torch.arange(10) >= torch.tensor([3, 10, 5, 8])[:, None]] = -100
    sounds = torch.randn(4, 1600, generator=generator)
    return randomise(tf.Wav2Vec2ForCTC(config)), {"input_values": sounds, "labels": labels}


def prophetnet(smoothing: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """Its loss is also of the token after the next one, of which it gives no logits."""
    config = tf.ProphetNetConfig(
        vocab_size=30, hidden_size=16, encoder_ffn_dim=16, num_encoder_layers=1, num_encoder_attention_heads=2,
        decoder_ffn_dim=16, num_decoder_layers=1, num_decoder_attention_heads=2, max_position_embeddings=32, pad_token_id=0,
        eps=smoothing, decoder_start_token_id=0,
    )  # fmt: skip
    return randomise(tf.ProphetNetForConditionalGeneration(config)), texts()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_ctc_models_examples_count_alike_whatever_their_labels(reduction: str, alone: bool) -> None:
    model, batch = wav2vec2(reduction)
    with torch.no_grad():
        own = float(model(**batch).loss) / (4 if reduction == "sum" else 1)
    found = evaluate(model, singles(batch) if alone else [batch])
    assert found.metrics == {"loss": pytest.approx(own, rel=1e-4)}  # and no perplexity
    assert found.tokens.tolist() == [1] * 4


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_seq2seq_models_own_loss_is_per_label(smoothing: float, alone: bool) -> None:
    model, batch = prophetnet(smoothing)
    with torch.no_grad():
        own = float(model(**batch).loss)
    found = evaluate(model, singles(batch) if alone else [batch])
    assert found.metrics == pytest.approx({"loss": own, "perplexity": math.exp(own)}, rel=1e-4)
    assert found.tokens.tolist() == (batch["labels"] != -100).sum(1).tolist()


class Reduced(Wrapped):
    """A focal loss, averaged in some way."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__(inner)
        self.kind = kind

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        out = self.inner(**inputs)
        if labels is None:
            return out
        flat = F.cross_entropy(out.logits[:, :-1].mT, labels[:, 1:], reduction="none")
        focal, counts = ((1 - (-flat).exp()) ** 2 * flat).sum(1), (labels[:, 1:] != -100).sum(1)
        if self.kind == "labels":
            out.loss = focal.sum() / counts.sum()
        elif self.kind == "examples":
            out.loss = (focal / counts).mean()
        elif self.kind == "sum":
            out.loss = focal.sum()
        else:  # nothing of these: the longest text's
            out.loss = (focal / counts)[counts.argmax()]
        return out


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("kind", ["labels", "examples", "sum", "other"])
def test_how_a_custom_loss_is_averaged_is_measured(kind: str, equal: bool) -> None:
    """With texts of one length too. The first label is predicted by nothing, so it does not weigh."""
    model, batch = Reduced(randomise(my_gpt()), kind), texts()
    if equal:
        batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    with torch.no_grad():
        losses = [float(model(**row).loss) for row in singles(batch)]
        own = float(model(**batch).loss)
    found = evaluate(model, [batch])
    if kind == "labels":
        assert found.metrics == pytest.approx({"loss": own, "perplexity": math.exp(own)}, rel=1e-4)
        assert found.tokens.tolist() == (batch["labels"][:, 1:] != -100).sum(1).tolist()
    else:
        assert found.metrics == {"loss": pytest.approx(sum(losses) / 4, rel=1e-4)}
    assert found.loss.tolist() == pytest.approx(losses, rel=1e-4)


def test_where_it_cannot_be_measured_each_example_counts_once() -> None:
    """One label each: every mean is the same, and nothing says that the loss is one of labels."""
    model, batch = Reduced(randomise(my_gpt()), "labels"), texts()
    batch["labels"][:, [0, 1, *range(3, 8)]] = -100
    assert set(evaluate(model, [batch]).metrics) == {"loss"}


def test_a_loss_that_is_only_an_attribute_counts() -> None:
    """In older versions of transformers, ``output.loss = …`` sets no entry where there was no loss before."""

    class Attribute(Reduced):
        def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
            told = super().forward(labels, **inputs)
            out = self.inner(**inputs)
            if labels is not None:
                object.__setattr__(out, "loss", told.loss)
            return out

    model, batch = Attribute(randomise(my_gpt()), "labels"), texts()
    with torch.no_grad():
        out = model(**batch)
    assert "loss" not in out
    assert evaluate(model, [batch]).metrics["loss"] == pytest.approx(float(out.loss), rel=1e-4)
