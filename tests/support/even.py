"""Tiny models that lose the same number of heads in every layer."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from torch import nn

import headprune as hp
from tests.support.zoo import ZOO, Made, randomise, sizes, text, whisper


def gemma() -> Made:
    return randomise(tf.GemmaForCausalLM(tf.GemmaConfig(**sizes("sdpa", num_key_value_heads=4, head_dim=6)))), text()


def mistral() -> Made:
    return randomise(tf.MistralForCausalLM(tf.MistralConfig(**sizes("sdpa", num_key_value_heads=2)))), text()


def llama(hidden: int = 32, heads: int = 4, **more: Any) -> Made:
    """Without key/value groups."""
    config = tf.LlamaConfig(**sizes("sdpa", hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=2, **more))
    return randomise(tf.LlamaForCausalLM(config)), text()


def clip() -> Made:
    text_config = {k: v for k, v in sizes("sdpa", num_hidden_layers=1).items() if k != "attn_implementation"}
    vision = {**text_config, "image_size": 8, "patch_size": 4, "num_channels": 1}
    model = randomise(tf.CLIPModel(tf.CLIPConfig(text_config=text_config, vision_config=vision, projection_dim=16)))
    return model, {**text(2), "pixel_values": torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))}


def llava() -> Made:
    """A language model that sees: heads are counted in two configs."""
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 24, "image_size": 8, "patch_size": 4, "projection_dim": 16,
    }  # fmt: skip
    words = {k: v for k, v in sizes("sdpa", num_key_value_heads=2, head_dim=8).items() if k != "attn_implementation"}
    parts = {"vision_config": vision, "text_config": {"model_type": "qwen3", **words}}
    config = tf.LlavaConfig(**parts, image_token_index=99, vision_feature_layer=-1)
    ids = torch.cat(
        [torch.full((2, 4), 99), torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(1))], 1
    )
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return randomise(tf.LlavaForConditionalGeneration(config)), example


MADE = dict(ZOO, gemma=gemma, mistral=mistral, plain_llama=llama, whisper=whisper, clip=clip, llava=llava)


def even_plan(
    model: nn.Module, example: Any, units: int = 1, *, shifted: bool = False, within: str = ""
) -> hp.attention.Heads:
    """So many heads (or groups) of every layer whose name has ``within``; ``shifted`` by one in every second layer."""
    plan = {}
    for layer in hp.find_attention(model, example):
        if within in layer.name:
            start = layer.index % 2 if shifted else 0
            plan[layer.name] = sorted(h for unit in layer.units[start : start + units] for h in unit)
    return plan


def even(name: str, units: int = 1, *, shifted: bool = False, within: str = "") -> Made:
    """A model that has lost them."""
    model, example = MADE[name]()
    hp.prune(model, even_plan(model, example, units, shifted=shifted, within=within), example)
    return model, example
