"""Tiny models with weights that matter, one per architecture, each with an example input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

Made = tuple[nn.Module, Any]


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough that every head changes the output well above rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 1.5 / p.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model.eval()


def text(rows: int = 3, length: int = 9, seed: int = 1, decoder: int = 0) -> dict[str, torch.Tensor]:
    """Token ids with the last row padded."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(3, 90, (rows, length), generator=generator)}
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, length - 2 :] = 0
    batch["attention_mask"] = mask
    if decoder:
        batch["decoder_input_ids"] = torch.randint(3, 90, (rows, decoder), generator=generator)
    return batch


def sizes(attention: str, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3,
        "intermediate_size": 48, "attn_implementation": attention, "pad_token_id": 0, **more,
    }  # fmt: skip


def bert(attention: str = "sdpa", **more: Any) -> Made:
    return randomise(tf.BertForSequenceClassification(tf.BertConfig(**sizes(attention, **more)))), text()


def distilbert(attention: str = "sdpa") -> Made:
    config = tf.DistilBertConfig(
        vocab_size=100, dim=32, n_heads=4, n_layers=3, hidden_dim=48, attn_implementation=attention
    )
    return randomise(tf.DistilBertForSequenceClassification(config)), text()


def gpt2(attention: str = "sdpa") -> Made:
    config = tf.GPT2Config(
        vocab_size=100, n_embd=32, n_head=4, n_layer=3, bos_token_id=1, eos_token_id=2, attn_implementation=attention
    )
    return randomise(tf.GPT2LMHeadModel(config)), text()


def llama(attention: str = "sdpa", **more: Any) -> Made:
    own = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, **more}
    config = tf.LlamaConfig(**sizes(attention, **own))
    return randomise(tf.LlamaForCausalLM(config)), text()


def qwen3(attention: str = "sdpa") -> Made:
    config = tf.Qwen3Config(**sizes(attention, num_key_value_heads=2, head_dim=16))
    return randomise(tf.Qwen3ForCausalLM(config)), text()


def vit(attention: str = "sdpa") -> Made:
    config = tf.ViTConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=48, image_size=8, patch_size=4,
        num_channels=1, num_labels=5, attn_implementation=attention,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    return randomise(tf.ViTForImageClassification(config)), {
        "pixel_values": torch.randn(3, 1, 8, 8, generator=generator)
    }


def t5(attention: str = "sdpa", **more: Any) -> Made:
    if not tf.T5ForConditionalGeneration._supports_sdpa:  # transformers 5.0
        attention = "eager"
    own = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48, **more}
    config = tf.T5Config(**own, decoder_start_token_id=0, attn_implementation=attention)
    return randomise(tf.T5ForConditionalGeneration(config)), text(decoder=5)


def whisper(attention: str = "sdpa") -> Made:
    config = tf.WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=10,
        max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        attn_implementation=attention,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    return randomise(tf.WhisperForConditionalGeneration(config)), {
        "input_features": torch.randn(3, 8, 20, generator=generator),
        "decoder_input_ids": torch.randint(3, 90, (3, 5), generator=generator),
    }


def albert() -> Made:
    """Whose only layer runs three times."""
    config = tf.AlbertConfig(
        vocab_size=100, embedding_size=16, hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=48,
        attn_implementation="sdpa",
    )  # fmt: skip
    return randomise(tf.AlbertForSequenceClassification(config)), text()


def swin(attention: str = "sdpa") -> Made:
    """Which cuts windows out of every picture: [pictures * windows, heads, queries, keys]."""
    config = tf.SwinConfig(
        image_size=16, patch_size=2, num_channels=1, embed_dim=16, depths=[2], num_heads=[4], window_size=4, num_labels=3,
        attn_implementation=attention,
    )  # fmt: skip
    pixels = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return randomise(tf.SwinForImageClassification(config)), {"pixel_values": pixels}


def wav2vec2(kind: Any, **more: Any) -> nn.Module:
    """Sound, of which convolutions make frames; ``kind`` is the class of its head."""
    config = tf.Wav2Vec2Config(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24, conv_dim=(8, 8),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", classifier_proj_size=8, pad_token_id=0, **more,
    )  # fmt: skip
    return randomise(kind(config))


class TorchEncoder(nn.Module):
    """PyTorch's own encoder, behind a classifier."""

    def __init__(self, batch_first: bool = True, bias: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=batch_first, bias=bias)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1 if self.batch_first else 0))


class TorchAttention(nn.Module):
    """PyTorch's own attention, with a key and a value more, which are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, add_bias_kv=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def mha(attention: str = "sdpa") -> Made:
    generator = torch.Generator().manual_seed(1)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 4:] = True
    return randomise(TorchEncoder()), (torch.randn(3, 6, 32, generator=generator), padding)


def torch_transformer(attention: str = "sdpa") -> Made:
    generator = torch.Generator().manual_seed(1)
    model = randomise(nn.Transformer(32, 4, 2, 2, 48, batch_first=True))
    return model, (torch.randn(3, 6, 32, generator=generator), torch.randn(3, 5, 32, generator=generator))


ZOO: dict[str, Callable[..., Made]] = {
    "bert": bert, "distilbert": distilbert, "gpt2": gpt2, "llama": llama, "qwen3": qwen3, "vit": vit,
    "t5": t5, "mha": mha, "torch_transformer": torch_transformer,
}  # fmt: skip


def labelled(model: nn.Module, example: Any, seed: int = 2) -> dict[str, torch.Tensor]:
    """The example with labels of the right form."""
    generator = torch.Generator().manual_seed(seed)
    rows = next(iter(example.values())).shape[0]
    if "ForCausalLM" in type(model).__name__ or "LMHead" in type(model).__name__:
        labels = example["input_ids"].masked_fill(example["attention_mask"] == 0, -100)
    elif "ConditionalGeneration" in type(model).__name__:
        labels = torch.randint(3, 90, (rows, 5), generator=generator)
        labels[0, 3:] = -100
        return {**{k: v for k, v in example.items() if k != "decoder_input_ids"}, "labels": labels}
    else:
        labels = torch.randint(0, model.config.num_labels, (rows,), generator=generator)
    return {**example, "labels": labels}
