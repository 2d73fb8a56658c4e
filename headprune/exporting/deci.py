"""A decoder as llama.cpp's architecture ``deci`` computes it: every layer has its own numbers of query and key/value heads.

What a model must be for that is found out by trying: its weights must all have a place, and a plain rendition of llama.cpp's
graph (src/models/deci.cpp), computed from the very tensors that will be written, must give the model's answers. So no list of
families is needed, and a family whose weights have Llama's names but which computes otherwise is refused, by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.errors import HeadPruneError

TOLERANCE = 1e-3  # of log-probabilities, in nats, and of a layer's output, as a part of its largest number
NOISE = 10  # times `sensitivity`, where that is more: what float32 leaves open

_FITTING = "GGUF is for Llama, Mistral, Qwen2 and decoders that compute as these do."
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # others change with the input's length


@dataclass(frozen=True)
class Stored:
    """A tensor of the file, read when it is needed.

    Attributes:
        tensor: As the model has it.
        heads: For query and key weights: how many heads, whose features change their order. transformers rotates feature i
            of a head together with feature i + head_dim / 2, llama.cpp's "norm" kind rotates neighbours.
        added: What is added: the constant output of an emptied attention in the next layer.
    """

    tensor: Tensor
    heads: int = 0
    added: Tensor | None = None

    def read(self) -> Tensor:
        """In float32."""
        value = self.tensor.detach().float()
        if self.heads:
            pairs = value.view(self.heads, 2, value.shape[0] // self.heads // 2, *value.shape[1:])
            value = pairs.transpose(1, 2).reshape(value.shape)
        return value if self.added is None else value + self.added


@dataclass
class Decoder:
    """What the file says.

    Attributes:
        heads, kv_heads, feed_forward: By layer; 0 heads is a layer without attention.
        shifts: By layer: what its output has more than the model's, since the next layer's attention is a constant.
        rope_factors: What llama.cpp divides the plain rotary frequencies by, ``[head_dim / 2]``; None if all are 1.
        rope_scale: What rotated queries and keys are multiplied by (YaRN's attention factor).
        tensors: By their name in the file.
        notes: What a reader should know.
    """

    width: int
    vocabulary: int
    context: int
    head_dim: int
    eps: float
    rope_base: float
    rope_factors: Tensor | None
    rope_scale: float
    heads: list[int] = field(default_factory=list)
    kv_heads: list[int] = field(default_factory=list)
    feed_forward: list[int] = field(default_factory=list)
    shifts: list[Tensor | None] = field(default_factory=list)
    tensors: dict[str, Stored] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def decoder_of(model: Any) -> Decoder:
    """What a file for llama.cpp has to say of a model.

    Raises:
        HeadPruneError: ``deci`` has no place for one of its weights or settings; the error names the layer.
    """
    body: Any = getattr(model, "model", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [f"model.{name}" for name in parts if not hasattr(body, name)]
    missing += (
        [] if hasattr(getattr(model, "config", None), "max_position_embeddings") else ["config.max_position_embeddings"]
    )
    if missing:
        raise HeadPruneError(
            f"{type(model).__name__} cannot be written for llama.cpp: it has no {missing[0]}.", _FITTING
        )
    _check_window(model.config, len(body.layers))
    left = dict(model.state_dict(keep_vars=True))
    base, factors, scale, head_dim = _rope(model.config, body.rotary_emb)
    decoder = Decoder(
        width=body.embed_tokens.weight.shape[1], vocabulary=body.embed_tokens.weight.shape[0],
        context=model.config.max_position_embeddings, head_dim=head_dim, eps=_eps(body.norm, "model.norm"),
        rope_base=base, rope_factors=factors, rope_scale=scale,
    )  # fmt: skip
    embedding = left.pop("model.embed_tokens.weight")
    decoder.tensors["token_embd.weight"] = Stored(embedding)
    decoder.tensors["output_norm.weight"] = Stored(left.pop("model.norm.weight"))
    head = left.pop("lm_head.weight", None)
    if head is not None and head.data_ptr() != embedding.data_ptr():
        decoder.tensors["output.weight"] = Stored(head)
    if factors is not None:
        decoder.tensors["rope_freqs.weight"] = Stored(factors)
    for index, layer in enumerate(body.layers):
        _add_layer(decoder, index, layer, _taken(left, f"model.layers.{index}."))
    if left:
        raise HeadPruneError(f"{sorted(left)[0]} has no place in llama.cpp's deci.", _FITTING)
    if decoder.rope_scale != 1:
        decoder.notes.append("llama.cpp scales rotated queries and keys through deci.rope.scaling.attn_factor.")
    return decoder


def verify(model: Any, decoder: Decoder, ids: Tensor) -> float:
    """Compute a model's answers as llama.cpp will, from the tensors that will be written, and compare.

    Args:
        ids: Tokens, ``[tokens]``.

    Returns:
        The largest difference of a log-probability, in nats.

    Raises:
        HeadPruneError: They differ by more than rounding; the error names the layer where they begin to.
    """
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0])

    with torch.inference_mode():
        handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
        try:
            own = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        finally:
            for handle in handles:
                handle.remove()
        for index, (output, theirs) in enumerate(zip(layers_of(decoder, ids), outputs, strict=True)):
            shift = decoder.shifts[index]
            expected = theirs if shift is None else theirs + shift
            if not _near(output, expected):
                raise HeadPruneError(
                    f"Layer {index} of {type(model).__name__} does not compute what llama.cpp's deci would: a scale, an activation "
                    "or positions of another kind.",
                    _FITTING,
                )
        gaps = (log_probabilities(decoder, output) - own).abs().amax(-1)
        gap: float = gaps.max().item()
        fits = gap <= TOLERANCE or bool((gaps <= (NOISE * sensitivity(decoder, ids)).clamp(min=TOLERANCE)).all())
    if not fits:
        raise HeadPruneError(
            f"After its last layer {type(model).__name__} does not compute what llama.cpp's deci would: log-probabilities are "
            f"{gap:.2g} off.",
            _FITTING,
        )
    return gap


def layers_of(
    decoder: Decoder, ids: Tensor, dtype: torch.dtype = torch.float32, nudge: float = 0.0
) -> Iterator[Tensor]:
    """The output of every layer, ``[tokens, width]``, as llama.cpp's graph has it.

    Args:
        ids: ``[tokens]``.
        dtype: What matrices are stored in. llama.cpp rounds what they are multiplied with to it, too.
        nudge: What part of itself every number of the embeddings is changed by, up or down.
    """
    tensors = _Rounded(decoder, dtype)
    x = tensors.read("token_embd.weight")[ids]
    if nudge:
        x = x * (1 + nudge * (2 * torch.randint(2, x.shape, generator=torch.Generator().manual_seed(0)) - 1))
    angles = _angles(decoder, len(ids))
    for index, (heads, kv_heads) in enumerate(zip(decoder.heads, decoder.kv_heads, strict=True)):
        block = f"blk.{index}."
        if heads:
            normed = tensors.norm(f"{block}attn_norm", x)
            q, k, v = (
                tensors.linear(f"{block}attn_{name}", normed).view(len(ids), count, decoder.head_dim).transpose(0, 1)
                for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            )
            k, v = (t.repeat_interleave(heads // kv_heads, dim=0) for t in (_rotated(k, *angles), v))
            attended = F.scaled_dot_product_attention(_rotated(q, *angles)[None], k[None], v[None], is_causal=True)[0]
            x = x + tensors.linear(f"{block}attn_output", attended.transpose(0, 1).flatten(1))
        normed = tensors.norm(f"{block}ffn_norm", x)
        gate, up = (tensors.linear(f"{block}ffn_{name}", normed) for name in ("gate", "up"))
        x = x + tensors.linear(f"{block}ffn_down", F.silu(gate) * up)
        yield x


def sensitivity(decoder: Decoder, ids: Tensor) -> Tensor:
    """How much log-probabilities change at most where every number of the embeddings changes by its last bits, ``[tokens]``.

    Two right computations in float32 differ by a few times that: mostly by 1e-5 nats, by more where a model is badly conditioned
    (some are, without the attention of their first layer).
    """
    plain, nudged = (
        log_probabilities(decoder, [*layers_of(decoder, ids, nudge=nudge)][-1]) for nudge in (0.0, 2.0**-22)
    )
    return (plain - nudged).abs().amax(-1)


def log_probabilities(decoder: Decoder, last: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """From the last layer's output, ``[tokens, vocabulary]``."""
    tensors = _Rounded(decoder, dtype)
    name = "output" if "output.weight" in decoder.tensors else "token_embd"
    return tensors.linear(name, tensors.norm("output_norm", last)).log_softmax(-1)


@dataclass(frozen=True)
class _Rounded:
    """A decoder's tensors, its matrices as they are stored."""

    decoder: Decoder
    dtype: torch.dtype

    def read(self, name: str) -> Tensor:
        value = self.decoder.tensors[name].read()
        return self._rounded(value) if value.ndim > 1 else value

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.read(f"{name}.bias") if f"{name}.bias" in self.decoder.tensors else None
        return F.linear(self._rounded(x), self.read(f"{name}.weight"), bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.read(f"{name}.weight"), self.decoder.eps)

    def _rounded(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).float()


def _angles(decoder: Decoder, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, ``[tokens, head_dim / 2]``."""
    frequencies = _plain_frequencies(decoder.rope_base, decoder.head_dim)
    if decoder.rope_factors is not None:
        frequencies = frequencies / decoder.rope_factors
    turned = torch.arange(tokens)[:, None] * frequencies
    return turned.cos() * decoder.rope_scale, turned.sin() * decoder.rope_scale


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Neighbouring features of ``[heads, tokens, head_dim]`` rotated together."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _taken(left: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the entries under a prefix out of a dict."""
    return {name.removeprefix(prefix): left.pop(name) for name in list(left) if name.startswith(prefix)}


def _add_layer(decoder: Decoder, index: int, layer: Any, own: dict[str, Tensor]) -> None:
    """Note one layer's tensors and numbers."""
    block = f"blk.{index}"
    attention, norm = _taken(own, "self_attn."), own.pop("input_layernorm.weight", None)
    named = {"ffn_norm.weight": "post_attention_layernorm.weight"}
    for part in ("gate", "up", "down"):
        named |= {f"ffn_{part}.{kind}": f"mlp.{part}_proj.{kind}" for kind in ("weight", "bias")}
    for name, theirs in named.items():
        if (value := own.pop(theirs, None)) is not None:
            decoder.tensors[f"{block}.{name}"] = Stored(value)
    lost = [n for n in named if n.endswith("weight") and f"{block}.{n}" not in decoder.tensors]
    unknown = [f"{name} has no place in llama.cpp's deci" for name in own]
    unknown += [f"{named[name]} is missing" for name in lost] + ["input_layernorm.weight is missing"] * (norm is None)
    if unknown:
        raise HeadPruneError(f"Layer {index}: {unknown[0]}.", _FITTING)
    for name in ("input_layernorm", "post_attention_layernorm"):
        if (eps := _eps(getattr(layer, name), f"Layer {index}: {name}")) != decoder.eps:
            raise HeadPruneError(
                f"Layer {index}: {name} has an epsilon of {eps:g}, the last norm {decoder.eps:g}; deci has one for all.",
                _FITTING,
            )
    decoder.feed_forward.append(decoder.tensors[f"{block}.ffn_gate.weight"].tensor.shape[0])
    decoder.shifts.append(None)
    assert norm is not None
    output = attention.get("o_proj.weight")
    if output is not None and bool(output.any()):
        _add_attention(decoder, index, norm, attention)
    else:
        _add_constant(decoder, index, norm, attention.get("o_proj.bias", attention.get("bias")))


def _add_attention(decoder: Decoder, index: int, norm: Tensor, own: dict[str, Tensor]) -> None:
    """Note an attention that has heads."""
    block, width = f"blk.{index}", decoder.head_dim
    places = {f"{part}_proj.{kind}": f"{block}.attn_{name}.{kind}"
              for part, name in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")) for kind in ("weight", "bias")}  # fmt: skip
    if unknown := sorted(set(own) - set(places)):
        raise HeadPruneError(f"Layer {index}: self_attn.{unknown[0]} has no place in llama.cpp's deci.", _FITTING)
    if lost := [n for n in places if n.endswith("weight") and n not in own]:
        raise HeadPruneError(f"Layer {index}: self_attn.{lost[0]} is missing.", _FITTING)
    queries, keys, values = (own[f"{n}_proj.weight"].shape[0] for n in "qkv")
    heads, kv_heads = queries // width, keys // width
    if (heads * width, kv_heads * width, kv_heads * width) != (queries, keys, values):
        raise HeadPruneError(
            f"Layer {index}: {queries} query, {keys} key and {values} value features are not whole heads of {width}.",
            _FITTING,
        )
    if not kv_heads or heads % kv_heads:
        raise HeadPruneError(
            f"Layer {index}: {heads} query heads do not share {kv_heads} key/value heads evenly, as llama.cpp needs.",
            "Prune the same number of query heads from every key/value group, or whole groups.",
        )
    decoder.tensors[f"{block}.attn_norm.weight"] = Stored(norm)
    for name, place in places.items():
        if name in own:
            decoder.tensors[place] = Stored(own[name], {"q": heads, "k": kv_heads}.get(name[0], 0))
    decoder.heads.append(heads)
    decoder.kv_heads.append(kv_heads)


def _add_constant(decoder: Decoder, index: int, norm: Tensor, bias: Tensor | None) -> None:
    """Note an attention whose heads are all gone, so that it adds W_O's bias, if there is one, to every token."""
    block, constant = f"blk.{index}", bias is not None and bool(bias.any())
    if index == 0:
        # llama.cpp takes what it allocates from layer 0, so one head stays there, with zero output.
        zero = torch.zeros(decoder.head_dim, decoder.width)
        decoder.tensors[f"{block}.attn_norm.weight"] = Stored(norm)
        for name in "qkv":
            decoder.tensors[f"{block}.attn_{name}.weight"] = Stored(zero)
        decoder.tensors[f"{block}.attn_output.weight"] = Stored(zero.T.contiguous())
        if constant:
            decoder.tensors[f"{block}.attn_output.bias"] = Stored(bias)  # type: ignore[arg-type]
        decoder.notes.append("Layer 0 has no heads; llama.cpp needs one there, so one with zero output was written.")
    elif constant:
        # A layer without attention hands its input on as it is: the layer below adds the constant, after its feed-forward part.
        below = f"blk.{index - 1}.ffn_down.bias"
        shift: Tensor = bias.detach().float()  # type: ignore[union-attr]
        held = decoder.tensors.get(below, Stored(torch.zeros(decoder.width)))
        decoder.tensors[below] = Stored(held.tensor, added=shift)
        decoder.shifts[index - 1] = shift
    decoder.heads.append(int(index == 0))
    decoder.kv_heads.append(int(index == 0))


def _eps(norm: Any, where: str) -> float:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if eps is None:
        raise HeadPruneError(f"{where} is a {type(norm).__name__}, which is no RMS norm.", _FITTING)
    return float(eps)


def _rope(config: Any, rotary: Any) -> tuple[float, Tensor | None, float, int]:
    """(base, factors, scale, features of a head): rotary positions as llama.cpp states them."""
    kind = getattr(rotary, "rope_type", "default")
    settings = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = getattr(rotary, "inv_freq", None)
    if kind not in _STATIC_ROPE or frequencies is None or "rope_theta" not in settings:
        raise HeadPruneError(
            f"Rotary positions of the kind {kind!r} change with the input's length, or differ between layers; a GGUF file has fixed "
            "ones for all.",
            "Set rope_parameters in config.json to one of "
            + ", ".join(sorted(_STATIC_ROPE))
            + ", if the model works with it.",
        )
    if 2 * len(frequencies) != head_dim:
        raise HeadPruneError(
            f"{2 * len(frequencies)} of a head's {head_dim} features are rotated; llama.cpp's deci rotates all.",
            _FITTING,
        )
    factors = _plain_frequencies(settings["rope_theta"], head_dim) / frequencies.float().cpu()
    plain = torch.allclose(factors, torch.ones_like(factors), rtol=1e-5)
    scale = float(getattr(rotary, "attention_scaling", 1.0))
    return float(settings["rope_theta"]), None if plain else factors, scale, head_dim


def _plain_frequencies(base: float, head_dim: int) -> Tensor:
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _check_window(config: Any, layers: int) -> None:
    """Refuse attention that sees only so many tokens back: ``deci`` has no such thing."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    sliding = [i for i in range(layers) if not kinds or kinds[i] == "sliding_attention"]
    if window is not None and sliding and window < config.max_position_embeddings:
        raise HeadPruneError(
            f"Layer {sliding[0]} sees {window} tokens back (a sliding window); llama.cpp's deci sees all.",
            f"If its inputs stay shorter, load it, set model.config.max_position_embeddings to {window}, save it, and export that.",
        )
