"""Map a decoder to llama.cpp's architecture ``deci``, in which every layer has its own numbers of query and key/value heads.

There is no list of supported families. Instead, each weight must have a place in the file, and `render` (llama.cpp's graph,
src/models/deci.cpp, in PyTorch) must give the model's answers from the tensors that will be written. A family that uses Llama's weight
names but computes something else is refused; the error names the layer.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headprune.errors import HeadPruneError
from headprune.running import attributes_kept

TOLERANCE = 1e-3  # for log-probabilities in nats, and for a layer's output relative to its largest value
NOISE = 10  # or this many times `sensitivity`, if that is more, to allow for float32 rounding

_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # others change with the input's length
# A layer's tensors in the file; a layer without attention has only the last four.
_PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_PLACES = {"token_embd.weight", "output_norm.weight", "output.weight", *(f"{part}.weight" for part in _PARTS)}
_PLACES |= {f"{part}.bias" for part in _PARTS if "norm" not in part}


def _misfit(what: str) -> HeadPruneError:
    return HeadPruneError(what, "GGUF is for Llama, Mistral, Qwen2 and decoders that compute as these do.")


@dataclass
class Decoder:
    """The content of a decoder's GGUF file.

    Attributes:
        heads, kv_heads, feed_forward: By layer; a layer without attention has 0 heads.
        shifts: By layer, the constant by which its output exceeds the model's: the attention output of a next layer without heads.
        rope_scale: Factor on rotated queries and keys (YaRN's attention factor).
        tensors: The model's tensors, by their name in the file (`read` gives them as they are written).
        notes: Remarks for the user.
    """

    width: int
    vocabulary: int
    context: int
    head_dim: int
    eps: float
    rope_base: float
    rope_scale: float
    heads: list[int] = field(default_factory=list)
    kv_heads: list[int] = field(default_factory=list)
    feed_forward: list[int] = field(default_factory=list)
    shifts: dict[int, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self, name: str) -> Tensor:
        """A tensor as it is written, in float32.

        transformers rotates feature i of a head together with feature i + head_dim / 2, llama.cpp's "norm" kind rotates neighbours. So
        the features of queries and keys are reordered.
        """
        value = self.tensors[name].detach().float()
        if ".attn_q." in name or ".attn_k." in name:
            pairs = value.view(-1, 2, self.head_dim // 2, *value.shape[1:])
            value = pairs.transpose(1, 2).reshape(value.shape)
        return value


def decoder_of(model: Any) -> Decoder:
    """Map a model to the content of a GGUF file.

    Raises:
        HeadPruneError: ``deci`` has no place for one of its weights or settings; the error names the layer.
    """
    body: Any = getattr(model, "model", None)
    config: Any = getattr(model, "config", None)
    missing = [f"model.{n}" for n in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(body, n)]
    missing += ["config.max_position_embeddings"] if not hasattr(config, "max_position_embeddings") else []
    if missing:
        raise _misfit(f"{type(model).__name__} cannot be written for llama.cpp: it has no {missing[0]}.")
    _check_window(config, len(body.layers))
    vocabulary, width = body.embed_tokens.weight.shape
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base, scale, factors = _rope(config, body.rotary_emb, head_dim)
    decoder = Decoder(width, vocabulary, config.max_position_embeddings, head_dim, _epsilon(body), base, scale)
    constants = _place(decoder, model, len(body.layers))
    if not torch.allclose(factors, torch.ones_like(factors), rtol=1e-5):
        decoder.tensors["rope_freqs.weight"] = factors
    for index in range(len(body.layers)):
        _set_layer_sizes(decoder, index, constants.get(index))
    return decoder


def verify(model: Any, decoder: Decoder, ids: Tensor) -> Tensor:
    """Compare a model's answers with llama.cpp's graph on the tensors that will be written.

    Args:
        ids: Tokens, ``[tokens]``.

    Returns:
        The model's log-probabilities of the token after ``ids``, ``[vocabulary]``.

    Raises:
        HeadPruneError: They differ by more than rounding; the error names the first layer that differs.
    """
    with attributes_kept(model):
        output = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    expected: Tensor = output.logits[0].log_softmax(-1)
    layers, rendered = render(decoder, ids)
    for index, (layer, own) in enumerate(zip(layers, (output.hidden_states or ())[1:-1], strict=False)):
        target = own[0] + decoder.shifts.get(index, torch.zeros(()))
        if not (layer - target).abs().max() <= TOLERANCE * target.abs().max():
            why = "does not compute what deci does: another scale, activation or kind of positions"
            raise _misfit(f"Layer {index} of {type(model).__name__} {why}.")
    gaps = (rendered - expected).abs().amax(-1)
    if not (gaps <= TOLERANCE).all() and not (gaps <= (NOISE * sensitivity(decoder, ids)).clamp(min=TOLERANCE)).all():
        why = f"does not compute what deci does: log-probabilities are {gaps.max():.2g} off"
        raise _misfit(f"After its last layer {type(model).__name__} {why}.")
    return expected[-1]


def render(
    decoder: Decoder, ids: Tensor, dtype: torch.dtype = torch.float32, nudge: float = 0.0
) -> tuple[list[Tensor], Tensor]:
    """Run llama.cpp's graph of a file, in PyTorch.

    Args:
        ids: ``[tokens]``.
        dtype: The type that matrices are stored in; llama.cpp also rounds the other factor of a product to it.
        nudge: Relative change, randomly up or down, of every number of the embeddings.

    Returns:
        The output of every layer, ``[tokens, width]`` each; and log-probabilities, ``[tokens, vocabulary]``.
    """

    def read(name: str) -> Tensor:
        value = decoder.read(name)
        return value.to(dtype).float() if value.ndim > 1 else value

    def linear(name: str, x: Tensor) -> Tensor:
        bias = read(f"{name}.bias") if f"{name}.bias" in decoder.tensors else None
        return F.linear(x.to(dtype).float(), read(f"{name}.weight"), bias)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], read(f"{name}.weight"), decoder.eps)

    x = read("token_embd.weight")[ids]
    if nudge:
        x = x * (1 + nudge * (2 * torch.randint(2, x.shape, generator=torch.Generator().manual_seed(0)) - 1))
    frequencies = _plain_frequencies(decoder.rope_base, decoder.head_dim)
    turned = torch.arange(len(ids))[:, None] * (frequencies / decoder.tensors.get("rope_freqs.weight", torch.ones(())))
    angles, layers = (turned.cos() * decoder.rope_scale, turned.sin() * decoder.rope_scale), []
    for index, (heads, kv_heads) in enumerate(zip(decoder.heads, decoder.kv_heads, strict=True)):
        block = f"blk.{index}."
        if heads:
            normed = norm(f"{block}attn_norm", x)
            q, k, v = (
                linear(f"{block}attn_{name}", normed).view(len(ids), count, decoder.head_dim).transpose(0, 1)
                for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            )
            k, v = (t.repeat_interleave(heads // kv_heads, dim=0) for t in (_rotate(k, *angles), v))
            attended = F.scaled_dot_product_attention(_rotate(q, *angles)[None], k[None], v[None], is_causal=True)[0]
            x = x + linear(f"{block}attn_output", attended.transpose(0, 1).flatten(1))
        normed = norm(f"{block}ffn_norm", x)
        gate, up = (linear(f"{block}ffn_{name}", normed) for name in ("gate", "up"))
        x = x + linear(f"{block}ffn_down", F.silu(gate) * up)
        layers.append(x)
    head = "output" if "output.weight" in decoder.tensors else "token_embd"
    return layers, linear(head, norm("output_norm", x)).log_softmax(-1)


def sensitivity(decoder: Decoder, ids: Tensor) -> Tensor:
    """The largest change of a log-probability when the last bits of all embeddings change, ``[tokens]``.

    Two correct float32 computations differ by a few times that: mostly by 1e-5 nats, by more if a model is badly conditioned
    (as some are without the attention of their first layer).
    """
    plain, nudged = (render(decoder, ids, nudge=nudge)[1] for nudge in (0.0, 2.0**-22))
    return (plain - nudged).abs().amax(-1)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of neighbouring features of ``[heads, tokens, head_dim]``."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


def _place(decoder: Decoder, model: Any, layers: int) -> dict[int, Tensor]:
    """Give every weight its name in the file; returns the biases of attention modules without heads, by layer."""
    import gguf

    names, constants = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DECI, layers), {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        match = re.match(r"model\.layers\.(\d+)\.", name)
        layer, own = (int(match[1]), name[match.end() :]) if match else (-1, name)
        if not tensor.numel():  # placeholder for the weights of an attention without heads
            continue
        if match and own == "self_attn.bias":
            constants[layer] = tensor
            continue
        place = names.get_name(name, (".weight", ".bias")) or ""
        if place.removeprefix(f"blk.{layer}.") not in _PLACES or place in decoder.tensors:
            where = f"Layer {layer}: " if match else ""
            raise _misfit(f"{where}{own} has no place in llama.cpp's deci.")
        decoder.tensors[place] = tensor
    head = decoder.tensors.get("output.weight")
    if head is not None and head.data_ptr() == decoder.tensors["token_embd.weight"].data_ptr():
        del decoder.tensors["output.weight"]  # llama.cpp then uses the embeddings
    return constants


def _set_layer_sizes(decoder: Decoder, index: int, constant: Tensor | None) -> None:
    """Record one layer's numbers of heads and features; an attention without heads becomes a constant.

    Args:
        constant: The bias of an attention module without heads; None if it has none.
    """
    tensors, block = decoder.tensors, f"blk.{index}."
    output = tensors.get(f"{block}attn_output.weight")
    if output is None or not bool(output.any()):
        bias = tensors.get(f"{block}attn_output.bias") if constant is None else constant
        for name in [n for n in tensors if n.startswith(f"{block}attn_") and (index or "norm" not in n)]:
            del tensors[name]
        _add_constant(decoder, index, bias if bias is not None and bool(bias.any()) else None)
    attends = f"{block}attn_output.weight" in tensors
    rows = {part: tensors[f"{block}{part}.weight"].shape[0] for part in _PARTS if f"{block}{part}.weight" in tensors}
    if lost := [part for part in _PARTS if (attends or part.startswith("ffn")) and part not in rows]:
        raise _misfit(f"Layer {index} has no {lost[0]}.weight, which llama.cpp's deci needs.")
    queries, keys, values = (rows[f"attn_{name}"] if attends else 0 for name in "qkv")
    width = decoder.head_dim
    heads, kv_heads = queries // width, keys // width
    whole = (heads * width, kv_heads * width, kv_heads * width) == (queries, keys, values)
    if attends and (not whole or not kv_heads or heads % kv_heads):
        have = f"{queries} query, {keys} key and {values} value features"
        message = f"Layer {index}: {have} are not heads of {width} features that share key/value heads evenly, as llama.cpp needs."
        raise HeadPruneError(message, "Prune as many query heads from every key/value group, or whole groups.")
    decoder.heads.append(heads)
    decoder.kv_heads.append(kv_heads)
    decoder.feed_forward.append(rows["ffn_gate"])


def _add_constant(decoder: Decoder, index: int, bias: Tensor | None) -> None:
    """Represent an attention without heads, which adds W_O's bias (if any) to every token."""
    tensors = decoder.tensors
    if index == 0:
        # llama.cpp sizes its buffers by layer 0, so one head with zero output stays there.
        zero = torch.zeros(decoder.head_dim, decoder.width)
        tensors |= {f"blk.0.attn_{name}.weight": zero for name in "qkv"}
        tensors["blk.0.attn_output.weight"] = zero.T.contiguous()
        if bias is not None:
            tensors["blk.0.attn_output.bias"] = bias
        decoder.notes.append("Layer 0 has no heads; llama.cpp needs one there, so one with zero output was written.")
    elif bias is not None:
        # deci passes the input of a layer without attention on unchanged, so the previous layer's feed-forward bias adds the constant.
        below = f"blk.{index - 1}.ffn_down.bias"
        shift = decoder.shifts[index - 1] = bias.detach().float()
        tensors[below] = tensors[below].detach().float() + shift if below in tensors else shift


def _epsilon(body: Any) -> float:
    """The epsilon that all norms share, since deci has only one."""
    norms = {name: module for name, module in body.named_modules() if "norm" in name}
    epsilons = {name: getattr(m, "variance_epsilon", getattr(m, "eps", math.nan)) for name, m in norms.items()}
    first: float = next(iter(epsilons.values()))
    for name, epsilon in epsilons.items():
        if epsilon != first:  # NaN differs from itself
            raise _misfit(f"model.{name} is no RMS norm, or has another epsilon ({epsilon}) than others ({first}).")
    return first


def _rope(config: Any, rotary: Any, head_dim: int) -> tuple[float, float, Tensor]:
    """Rotary embedding in llama.cpp's terms: base, factor on rotated queries and keys, and divisors of the plain frequencies,
    ``[head_dim / 2]``."""
    kind, frequencies = getattr(rotary, "rope_type", "default"), getattr(rotary, "inv_freq", None)
    settings: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if kind not in _STATIC_ROPE or frequencies is None or "rope_theta" not in settings:
        message = f"Rotary positions of the kind {kind!r} change with length, or differ between layers; a GGUF file has fixed ones for all."
        kinds = ", ".join(sorted(_STATIC_ROPE))
        raise HeadPruneError(message, f"Set rope_parameters in config.json to one of {kinds}, if the model takes it.")
    if 2 * len(frequencies) != head_dim:
        raise _misfit(f"{2 * len(frequencies)} of a head's {head_dim} features are rotated; deci rotates all.")
    base, scale = float(settings["rope_theta"]), float(getattr(rotary, "attention_scaling", 1.0))
    return base, scale, _plain_frequencies(base, head_dim) / frequencies.float().cpu()


def _plain_frequencies(base: float, head_dim: int) -> Tensor:
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _check_window(config: Any, layers: int) -> None:
    """Refuse sliding-window attention, which ``deci`` does not have."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    sliding = [i for i in range(layers) if not kinds or kinds[i] == "sliding_attention"]
    if window is not None and sliding and window < config.max_position_embeddings:
        message = f"Layer {sliding[0]} sees {window} tokens back (a sliding window); llama.cpp's deci sees all."
        hint = f"If its inputs stay shorter, load it, set model.config.max_position_embeddings to {window}, save it, and export that."
        raise HeadPruneError(message, hint)
