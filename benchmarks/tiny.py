"""A tiny random model of any transformers type, and an input that it takes; no list of models.

A type's default config is shrunk by what its fields are called and by which of them are equal (whatever equals the hidden
size stays equal to it). The usual inputs are then made for the arguments that the model's ``forward`` names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from headprune.errors import first_line
from headprune.inputs import call
from headprune.surgery import answers

HEADS, HEAD_DIM, VOCABULARY, IMAGE, TOKENS = 4, 16, 160, 32, 10
WIDTH = HEADS * HEAD_DIM
LARGEST = 40_000_000  # parameters; a model that stays larger has sizes that the rules do not know

# What is never touched: shapes of kernels, numbers that are no size.
_KEEP = re.compile(
    r"kernel|stride|padding|dilation|sampling|sample_rate|ratio|groups$|seed|version|base$|theta|factor|_steps|epsilon|"
    r"type_vocab|window_layers|scale|temperature|num_labels|_act|pool|level|channels_in|^num_channels$|^in_chans$|lags|"
    r"cardinality|embedding_dimension|hop|durations|positional_encoding|out_position|_topk$|rel_2d|max_rel|"
    r"decoder_config|out_features|out_indices|quantization|grid_pinpoints|hub|down_ops|bins$|tokens_per_|box|thickness|"
    r"num_blocks|conv_stride|_stages|prompt_(length|types)|segment_types|spectrogram|upsample|num_buckets|max_distance|iters$"
)
_TOKEN = re.compile(
    r"(token|pad|bos|eos|sep|cls|mask|boi|eoi|image|video|audio|start|end)_?(token)?_?(id|idx|index)s?$|_token_id$"
)
_LAYERS = re.compile(
    r"(^|_)(layers?|depth|blocks)$|^depth$|num_blocks$|layers_per_|num_self_attends_per_block|^num_hidden_layers|^conf_num_hidden_layers|_hidden_layers$|num_layers_per_stack|repeats$"
)
_DEPTHS = re.compile(r"^(depths?|blocks_per_stage|stage_num_blocks|num_block_repeats|block_sizes|n_attn_blocks)$")
_KV = re.compile(r"(kv|key_value).*heads?$|heads?_?kv$|query_groups|^multi_query_group_num$")
_HEADS = re.compile(r"heads?$|^num_attention_heads|attn_heads|attention_heads")
_HEAD_DIM = re.compile(
    r"head_dim$|head_size$|^d_kv$|^dim_head$|^d_head$|^kv_channels$|^key_value_proj_dim$|attention_head_dim$|head_width$"
)
_FF = re.compile(
    r"intermediate|ffn|feed_?forward|^d_ff$|^dff$|^dim_ff$|mlp_dim|^d_inner$|^n_inner$|linear_units|mlp_hidden|ff_dim"
)
_RANK = re.compile(r"rank$|lora|latent_dim|state_size|d_state|bottleneck")
_WIDTHS = re.compile(
    r"(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|_dim|_size|width|channels|units|features|d_latents|dims)$"
)
_LENGTH = re.compile(
    r"max_position|n_positions|max_source|max_target|context_length|max_seq|^n_ctx$|max_length|block_size|chunk|window|max_.*positions|num_queries|num_latents|num_query|num_proposals|query_num|seq_length|num_patches"
)
_EXPERTS = re.compile(
    r"experts(_per|$)|expert_num|num_local_experts|^n_group$|^topk_group$|moe_topk|moe_k$|experts_per_tok"
)


def model_types() -> list[str]:
    """Every type that ``AutoModel`` builds."""
    return [t for t in sorted(CONFIG_MAPPING.keys()) if CONFIG_MAPPING[t] in MODEL_MAPPING]


def build(model_type: str) -> tuple[nn.Module, PretrainedConfig, dict[str, Any]]:
    """A tiny model of this type in evaluation mode, its config, and an example that it takes.

    Raises:
        RuntimeError: No tiny config or input was found; it says what went wrong.
    """
    return _first(model_type, MODEL_MAPPING, example_for)


def causal_lm(model_type: str) -> tuple[nn.Module, dict[str, Any]] | None:
    """A tiny causal language model of this type, and texts of different length that it takes; None where there is none.

    Raises:
        RuntimeError: None was built; it says what went wrong.
    """
    if CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    ids = torch.randint(3, 20, (3, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 3], [4]])).long()
    example = {"input_ids": ids, "attention_mask": mask}

    @torch.no_grad()
    def texts(model: nn.Module, config: Any) -> dict[str, Any]:
        call(model, example)
        return example

    model, _, _ = _first(model_type, MODEL_FOR_CAUSAL_LM_MAPPING, texts)
    return model, example


def _first(
    model_type: str, classes: Any, example: Callable[[nn.Module, PretrainedConfig], dict[str, Any]]
) -> tuple[nn.Module, PretrainedConfig, dict[str, Any]]:
    """By the first recipe that gives a model and an ``example`` that it takes."""
    errors = []
    for recipe in _RECIPES:
        try:
            model, config = _model(model_type, recipe, classes)
            return model, config, example(model, config)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {first_line(error)}"[:300])
    raise RuntimeError(" || ".join(dict.fromkeys(errors)))


class _Recipe:
    """How to shrink: a base width and number of heads."""

    def __init__(self, heads: int, head_dim: int, layers: int) -> None:
        self.heads, self.head_dim, self.layers = heads, head_dim, layers

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


_RECIPES = tuple(_Recipe(*s) for s in ((4, 16, 2), (4, 128, 2), (4, 64, 2), (4, 48, 2), (4, 32, 4), (8, 16, 2)))


def _model(model_type: str, recipe: _Recipe, classes: Any) -> tuple[nn.Module, PretrainedConfig]:
    config = tiny_config(CONFIG_MAPPING[model_type], recipe)
    model_class: Any = classes[CONFIG_MAPPING[model_type]]
    if isinstance(model_class, tuple | list):
        model_class = model_class[0]
    with torch.device("meta"):
        try:
            size = sum(p.numel() for p in model_class(config).parameters())
        except ImportError as error:
            if "timm" not in str(error):
                raise
            _without_timm(config, recipe)
            size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        large = {k: v for k, v in _sizes(config) if v > 2 * recipe.width and v != VOCABULARY}
        raise RuntimeError(f"still {size / 1e6:.0f} million parameters; large: {large}")
    torch.manual_seed(0)
    model = model_class(config).eval()
    if getattr(config, "languages", None) and hasattr(model, "set_default_language"):
        model.set_default_language(config.languages[0])
    return model, config


def _without_timm(config: Any, recipe: _Recipe) -> None:
    """Put transformers' own ResNet where a backbone of the timm library is the default."""
    config.use_timm_backbone = False
    config.backbone = None
    given = {"out_features": ["stage2", "stage3", "stage4"], "hidden_sizes": [16, 32, 48, 64]}
    config.backbone_config = tiny_config(CONFIG_MAPPING["resnet"], recipe, given)


def _sizes(config: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in vars(config).items():
        if type(value) is int:
            yield prefix + name, value
        elif isinstance(value, PretrainedConfig):
            yield from _sizes(value, f"{prefix}{name}.")


def tiny_config(config_class: Any, recipe: _Recipe, given: dict[str, Any] | None = None) -> PretrainedConfig:
    """A config of this class, made small; ``given`` overrides what the rules say."""
    arguments = {**_shrunk(config_class(), recipe), **(given or {})}
    while True:
        try:
            made: PretrainedConfig = config_class(**arguments)
            return made
        except Exception as error:
            # A field that this class checks against another one: leave it at its default.
            named = [name for name in sorted(arguments, key=len, reverse=True) if name in str(error)]
            if not named:
                raise
            arguments.pop(named[0])


def _shrunk(config: PretrainedConfig, recipe: _Recipe) -> dict[str, Any]:
    """Constructor arguments for a smaller config of the same class."""
    fields = {
        k: v for k, v in vars(config).items() if not k.startswith("_") and k not in ("dtype", "transformers_version")
    }
    made: dict[str, Any] = {}
    wide = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "emb_dim")
    width = next((fields[k] for k in wide if type(fields.get(k)) is int), None)
    heads = next(
        (v for k, v in fields.items() if type(v) is int and v > 1 and _HEADS.search(k) and not _KV.search(k)), None
    )
    head_dim = next((v for k, v in fields.items() if type(v) is int and _HEAD_DIM.search(k)), None)
    fixed_head_dim = "head_dim" in fields and head_dim
    ids = iter(range(20, 100))
    shrink_lists = _list_divisor(fields)
    stages = next((v for k, v in fields.items() if _HEADS.search(k) and isinstance(v, list | tuple) and v), None)
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            made[name] = _sub(value, recipe)
        elif value is None:
            if (number := _missing(name, recipe)) is not None:
                made[name] = number
        elif stages and name == "embed_dim" and type(value) is int:
            made[name] = 16 * stages[0]
        elif stages and name == "hidden_size":
            if "embed_dim_per_stage" in fields:
                made[name] = 16
            continue  # mostly worked out from embed_dim
        elif name in ("mamba_n_heads", "mamba_num_heads"):
            expand = fields.get("mamba_expand", fields.get("expand", 2))
            made[name] = 4
            made["mamba_d_head" if "mamba_d_head" in fields else "mamba_head_dim"] = int(expand * recipe.width) // 4
        elif name == "attn_layer_indices":
            made[name] = [1]
        elif name == "mamba_d_ssm":
            made[name] = int(fields.get("mamba_expand", 2) * recipe.width)
        elif name == "rotary_dim":
            made[name] = min(value, recipe.head_dim) if type(value) is int else value
        elif isinstance(value, dict) and "mrope_section" in value:
            made[name] = {**value, "mrope_section": _split(recipe.head_dim // 2, len(value["mrope_section"]))}
        elif isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            new = _shrunk_list(name, list(value), shrink_lists)
            if new != list(value):
                made[name] = type(value)(new)
        elif type(value) is not int or name in ("mamba_d_head", "mamba_head_dim", "temporal_patch_size"):
            continue
        elif _TOKEN.search(name):
            small = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            if value >= VOCABULARY or name in small:
                made[name] = small.get(name, next(ids))
        elif "vocab" in name and "type_vocab" not in name and value > VOCABULARY:
            made[name] = VOCABULARY
        elif name in ("image_size", "img_size", "input_size", "crop_size") and value > 4:
            # Windows that do not fit are cut, and their tables with them: let them fit in the last stage.
            window = fields.get("window_size")
            fits = stages and type(window) is int and type(fields.get("patch_size")) is int
            made[name] = min(value, fields["patch_size"] * window * 2 ** (len(stages) - 1)) if fits else IMAGE
        elif stages and name in ("patch_size", "window_size"):
            continue
        elif name in ("patch_size", "patch_dim"):
            made[name] = min(value, 8)
        elif width is not None and value == width and value >= 256 and name.endswith("groups"):
            made[name] = recipe.width
        elif _KEEP.search(name) or value <= 2:
            continue
        elif _EXPERTS.search(name):
            made[name] = min(value, 2) if "per_tok" in name or "topk" in name or "group" in name else min(value, 4)
        elif _LAYERS.search(name):
            made[name] = _layers(config, name, recipe)
        elif _KV.search(name):
            made[name] = recipe.heads if value == heads or "query_groups" in name else max(1, recipe.heads // 2)
        elif _HEADS.search(name):
            made[name] = recipe.heads
        elif _HEAD_DIM.search(name):
            made[name] = recipe.head_dim
        elif width is not None and value == width:
            made[name] = recipe.width
        elif heads and head_dim and value == heads * head_dim and fixed_head_dim:
            made[name] = recipe.heads * recipe.head_dim
        elif _FF.search(name):
            made[name] = min(value, recipe.width + recipe.width // 2)
        elif _RANK.search(name):
            made[name] = min(value, recipe.head_dim)
        elif _LENGTH.search(name):
            made[name] = min(value, 64)
        elif _WIDTHS.search(name) and value > recipe.width:
            made[name] = recipe.width
    allowed = _arguments(type(config))
    return {k: v for k, v in made.items() if k in allowed}


def _sub(config: PretrainedConfig, recipe: _Recipe) -> Any:
    """A small copy of a sub-config that keeps what its owner set, such as a backbone's ``out_features``."""
    try:
        default = vars(type(config)())
        own = {
            k: v for k, v in vars(config).items()
            if not k.startswith("_") and type(v) in (bool, str) and v != default.get(k) and k != "transformers_version"
        }  # fmt: skip
        if (kept := getattr(config, "out_features", None)) and kept != getattr(type(config)(), "out_features", None):
            own["out_features"] = kept
        try:
            return tiny_config(type(config), recipe, own)
        except Exception:
            return tiny_config(type(config), recipe)
    except Exception:
        return config


def _missing(name: str, recipe: _Recipe) -> int | None:
    """A number for a field that has none by default, but that some models demand."""
    if _HEAD_DIM.search(name) and "rope" not in name and not name.startswith(("global", "swa", "local", "linear")):
        return recipe.head_dim
    if _KV.search(name) and not name.startswith(("global", "swa", "local", "linear")):
        return recipe.heads // 2
    usual = {
        "prediction_length": 8, "vocab_size": VOCABULARY, "num_experts_per_tok": 2, "num_experts": 4, "n_routed_experts": 4,
        "num_local_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "sliding_window": 8,
        "n_shared_experts": 1,
    }  # fmt: skip
    return usual.get(name)


def _arguments(config_class: Any) -> set[str]:
    names: set[str] = set()
    for base in config_class.__mro__:
        names.update(getattr(base, "__annotations__", {}))
        names.update(inspect.signature(base.__init__).parameters if "__init__" in vars(base) else ())
    return names


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (1 if i < total % parts else 0) for i in range(parts)]


def _layers(config: Any, name: str, recipe: _Recipe) -> int:
    """Two layers, or as many as are needed for every kind of layer to be there."""
    listed = [getattr(config, n, None) for n in ("layer_types", "layers_block_type")]
    kinds = next((value for value in listed if isinstance(value, list | tuple)), None)
    if kinds and name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        seen = [kinds.index(k) + 1 for k in set(kinds)]
        return min(len(kinds), max(recipe.layers, *seen)) if seen else recipe.layers
    return recipe.layers


def _list_divisor(fields: dict[str, Any]) -> int:
    """By what to divide stages' widths, so that the narrowest has about 16 features a head."""
    widths = [
        v
        for k, v in fields.items()
        if isinstance(v, list | tuple) and _WIDTHS.search(k.removesuffix("s")) and v and all(type(i) is int for i in v)
    ]
    smallest = min((min(w) for w in widths), default=0)
    divisor = 1
    while smallest // (2 * divisor) >= 16 and all(i % (2 * divisor) == 0 for w in widths for i in w):
        divisor *= 2
    return divisor


def _shrunk_list(name: str, value: list[int], divisor: int) -> list[int]:
    if _KEEP.search(name):
        return value
    if name in ("image_size", "input_size"):
        return [IMAGE] * len(value)
    if _DEPTHS.search(name):
        return [min(v, 3 if name == "depth" else 2) for v in value]
    if name in ("conv_dim", "tdnn_dim"):
        return [32] * len(value)
    if "per_stage" in name and "embed_dim" in name:
        return [v // (value[0] // 16) for v in value]
    if _WIDTHS.search(name.removesuffix("s")) and "patch" not in name:
        return [v // divisor for v in value]
    return value


# -- inputs -----------------------------------------------------------------------------------

_GRIDS = ("grid_thw", "image_grid_thw", "grid_hws", "image_grid_hws", "grid_hw", "target_sizes", "spatial_shapes")


def example_for(model: nn.Module, config: Any) -> dict[str, Any]:
    """The first of the usual inputs that the model takes and answers with finite numbers.

    Raises:
        RuntimeError: None fits.
    """
    errors = []
    for example in candidates(model, config):
        try:
            with torch.no_grad():
                found = answers(call(model, example))
            if all(torch.isfinite(t).all() for t in found):
                return example
            errors.append("outputs are not finite")
        except Exception as error:
            if type(error).__name__ == "TookTooLongError":
                raise
            errors.append(f"{'+'.join(example)}: {type(error).__name__}: {first_line(error)}"[:150])
    raise RuntimeError(f"no usual input fits ({' / '.join(errors[:4])})")


def _number(config: Any, *names: str, default: int) -> int:
    """The first of these fields, in the config or a sub-config of it."""
    for name in names:
        for holder in (config, *(v for v in vars(config).values() if isinstance(v, PretrainedConfig))):
            value = getattr(holder, name, None)
            if isinstance(value, list | tuple) and value and type(value[0]) is int:
                return value[0]
            if type(value) is int and value > 0:
                return value
    return default


def candidates(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Inputs of the usual forms for the arguments that ``forward`` names, the likeliest first."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    parameters = inspect.signature(model.forward).parameters
    vocabulary = _number(config, "vocab_size", "src_vocab_size", default=VOCABULARY)
    ids = torch.randint(3, max(5, min(vocabulary, 20)), (2, TOKENS), generator=generator)
    size = _number(config, "image_size", "img_size", "input_size", "crop_size", default=IMAGE)
    channels = _number(config, "num_channels", "in_chans", "in_channels", default=3)
    pixels = noise(2, channels, size, size)
    mels = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_feat_size", "input_dim")
    bins = _number(config, *mels, default=80)
    width = _number(config, "hidden_size", "d_model", "n_embd", "embed_dim", default=WIDTH)
    frames = 2 * _number(config, "max_source_positions", default=32)
    words = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    boxes = torch.tensor([1, 1, 5, 5]).expand(2, TOKENS, 4).clone()
    usual: dict[str, Any] = {
        **words, "decoder_input_ids": ids[:, :6], "pixel_values": pixels, "bbox": boxes,
        "hidden_states": noise(2, TOKENS, width), "inputs_embeds": noise(2, TOKENS, width),
        "visual_feats": noise(2, 4, _number(config, "visual_feat_dim", default=width)), "visual_pos": torch.rand(2, 4, 4, generator=generator),
        "input_values": noise(2, 4000), "input_features": noise(2, bins, frames),
        "pixel_mask": torch.ones(2, size, size, dtype=torch.long),
        "image": pixels, "images": pixels, "query_embeds": noise(2, 6, width), "encoder_hidden_states": noise(2, 5, _number(config, "encoder_hidden_size", default=width)),
        "decoder_input_values": noise(2, 6, width), "inputs": noise(2, TOKENS, _number(config, "d_model", default=width)),
        "states": noise(2, 6, _number(config, "state_dim", default=17)), "actions": noise(2, 6, _number(config, "act_dim", default=4)),
        "rewards": noise(2, 6, 1), "returns_to_go": noise(2, 6, 1), "timesteps": torch.arange(6).repeat(2, 1),
        "qformer_input_ids": ids, "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long), "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        "feature_lens": torch.tensor([frames, frames]), "input_features_mask": torch.ones(2, frames, dtype=torch.long),
    }  # fmt: skip
    if "image_embeddings" in parameters:
        usual["image_embeddings"] = noise(2, TOKENS, width)
    required = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n != "self"
    ]
    forms: list[dict[str, Any]] = [
        words, {**words, "decoder_input_ids": ids[:, :6]}, {"input_ids": ids}, {"pixel_values": pixels}, {**words, "pixel_values": pixels},
        {**words, "bbox": boxes}, {"input_ids": ids, "bbox": boxes, "pixel_values": pixels, "attention_mask": words["attention_mask"]},
        {"pixel_values": noise(2, 4, channels, size, size)}, {"pixel_values_videos": noise(2, 4, channels, size, size)},
        {"pixel_values": noise(2, channels, 4, size, size)},
        {"pixel_values": noise(2, _number(config, "num_frames", "frames_per_clip", default=8), channels, size, size)},
        {"pixel_values_videos": noise(2, _number(config, "frames_per_clip", "num_frames", default=8), channels, size, size)},
        {"input_features": noise(2, bins, frames), "decoder_input_ids": ids[:, :6]}, {"input_features": noise(2, frames, bins)},
        {"input_features": noise(2, frames, bins), "decoder_input_ids": ids[:, :6]},
        {"input_features": noise(2, bins, frames)}, {"input_features": noise(2, 1, 64, bins)},
        {"input_values": noise(2, 4000)}, {"input_values": noise(2, 1, 4000)}, {"input_values": noise(2, frames, bins)},
        {"input_values": noise(2, 1024, bins)},
        {"input_values": noise(2, 4000), "decoder_input_ids": ids[:, :6]},
        {"inputs_embeds": noise(2, TOKENS, width)}, {"hidden_states": noise(2, TOKENS, width)},
        {"past_values": noise(2, _number(config, "context_length", default=32), _number(config, "num_input_channels", "input_size", default=1))},
        {"pixel_values": noise(2, channels, 2 * size, 2 * size)}, {"pixel_values": noise(2, channels, 64, 64)}, {"pixel_values": noise(2, channels, 224, 224)},
        {"pixel_values": noise(2, channels, 64, 64), **words},
        {"pixel_values": noise(2, channels, 64, 64), "task_inputs": ids[:, :8]},
        {n: usual[n] for n in required if n in usual},
        {"input_ids": ids, "input_features": noise(2, 1, 64, bins)}, {"input_ids": ids, "input_features": noise(2, bins, 64)},
        {"input_ids": ids, "input_features": noise(2, bins, frames)},
        {"input_features": noise(2, 32, bins), "attention_mask": torch.ones(2, 32, dtype=torch.long)},
        {"input_features": noise(2, bins, frames), "input_features_mask": torch.ones(2, frames, dtype=torch.long)},
        {"input_features": noise(2, frames, bins), "input_features_mask": torch.ones(2, frames, dtype=torch.long)},
        {"input_features": noise(2, frames, bins), "audio_mel_mask": torch.ones(2, frames, dtype=torch.bool)},
        {"audio_mel": noise(2, frames, bins), "audio_mel_mask": torch.zeros(2, frames, dtype=torch.bool)},
        {**words, "visual_feats": usual["visual_feats"], "visual_pos": usual["visual_pos"]},
        {**words, "bbox": boxes.float() / 10, "decoder_input_ids": ids[:, :6]},
        {**words, "pixel_values": noise(2, 1, channels, size, size), "image_attention_mask": torch.ones(2, TOKENS, 1, dtype=torch.long)},
        {**words, "pixel_values": noise(2, _number(config, "num_frames", default=8), channels, size, size)},
        {"input_values": noise(2, TOKENS, width), "decoder_input_values": noise(2, 6, width)},
        {"inputs": noise(2, TOKENS, width)}, {"states": usual["states"], "actions": usual["actions"], "rewards": usual["rewards"], "returns_to_go": usual["returns_to_go"], "timesteps": usual["timesteps"], "attention_mask": torch.ones(2, 6, dtype=torch.long)},
        {"pixel_values": noise(2, 2, channels, size, size)},
        {"pixel_values": noise(2, channels, size, size), "qformer_input_ids": ids, **words},
        {"query_embeds": usual["query_embeds"], "encoder_hidden_states": usual["encoder_hidden_states"]}, {"query_embeds": usual["query_embeds"]},
        {"query_embeds": usual["query_embeds"], "query_length": 6},
        {"past_values": noise(2, 64), "past_values_padding": torch.zeros(2, 64, dtype=torch.long), "freq": torch.zeros(2, 1, dtype=torch.long)},
        {"past_values": [noise(64), noise(64)]},
    ]  # fmt: skip
    if "past_time_features" in parameters:
        lags = list(getattr(config, "lags_sequence", [1]))
        length, ahead = int(config.context_length) + max(lags), int(config.prediction_length)
        kinds = int(getattr(config, "num_time_features", 0) or 0)
        forms.append({
            "past_values": noise(2, length), "past_time_features": noise(2, length, kinds), "past_observed_mask": torch.ones(2, length),
            "future_values": noise(2, ahead), "future_time_features": noise(2, ahead, kinds),
        })  # fmt: skip
    patch = _number(config, "patch_size", default=8)
    temporal = _number(config, "temporal_patch_size", default=1)
    for t in dict.fromkeys((temporal, 1)):
        flat = noise(32, channels * t * patch * patch)
        grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
        for name in ("hidden_states", "pixel_values", "pixel_values_videos"):
            for grids in _GRIDS:
                forms.append({name: flat, grids: grid if "thw" in grids else grid[:, 1:]})
        about = {name: usual[name] for name in ("pixel_attention_mask", "spatial_shapes")}
        patches = {"pixel_values": flat.reshape(2, 16, -1), **about}
        forms += [patches, {**words, **patches}]
        positions = torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(2, 1, 1)
        for name in ("pixel_position_ids", "image_position_ids", "position_ids"):
            forms.append({"pixel_values": flat.reshape(2, 16, -1), name: positions})
        merged = {"merge_sizes": torch.tensor([1, 1]), "grid_thw": grid}
        forms += [
            {"pixel_values": flat, **merged},
            {"hidden_states": flat, **merged},
            {"pixel_values": flat.reshape(32, channels, patch, patch) if t == 1 else flat, "grid_thw": grid},
        ]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    seen = set()
    for form in forms:
        # What forward does not name is left out; a form without what it demands is skipped.
        kept = {k: v for k, v in form.items() if k in parameters or (anything and len(parameters) <= 3)}
        key = tuple((k, tuple(v.shape) if isinstance(v, Tensor) else str(type(v))) for k, v in kept.items())
        if kept and key not in seen and next(iter(form)) in kept and all(n in kept for n in required):
            seen.add(key)
            yield kept
