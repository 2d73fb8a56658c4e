"""What headprune can do on every model type of the installed transformers, built tiny and random, offline.

    python benchmarks/coverage.py                      # writes docs/coverage.md
    python benchmarks/coverage.py --only bert t5       # prints these
    python benchmarks/coverage.py --check              # fails if a type of docs/coverage.md that worked stopped working

Nothing here is fitted to a list of models: a config class is made small by the usual names of its fields, a forward is tried with the
usual inputs, and what cannot be built is said. "exact" means: masked logits equal pruned logits, checked by headprune's own proof and
again here on an input that the proof has not seen.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import inspect
import io
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import torch
import transformers
from rich.progress import track
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import headprune as hp
from headprune.errors import first_line
from headprune.inputs import call
from headprune.surgery import answers

# Sizes by the usual names of fields; the longest match wins. Lists (stages of a backbone) are cut to two entries.
SIZES = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32, "hidden_dim": 32, "emb_dim": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "depth": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_ff": 48, "d_inner": 48,
    "n_inner": 48, "mlp_dim": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "vocab_size": 128, "max_position_embeddings": 64, "n_positions": 64, "head_dim": 8, "d_kv": 8,
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "image_size": 32, "patch_size": 8, "num_labels": 3, "embedding_size": 32, "projection_dim": 32,
    "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
LIMIT = 5  # seconds to build a type; larger ones have sizes that this script does not know to shrink


class TookTooLongError(Exception):
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Stop a build that would take all day."""

    def stop(*_: Any) -> None:
        raise TookTooLongError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def fields_of(config_class: Any) -> set[str]:
    names = set(inspect.signature(config_class.__init__).parameters)
    if dataclasses.is_dataclass(config_class):
        names |= {f.name for f in dataclasses.fields(config_class)}
    return names | set(getattr(config_class, "__annotations__", {}))


def small(config_class: Any) -> dict[str, Any]:
    """Constructor arguments that make a config small, its sub-configs included."""
    names = fields_of(config_class)
    made = {name: value for name, value in SIZES.items() if name in names}
    for name, sub in (getattr(config_class, "sub_configs", None) or {}).items():
        if inspect.isclass(sub) and name in names and hasattr(sub, "model_type") and sub.model_type:
            made[name] = small(sub)
    return made


def build(model_type: str) -> tuple[nn.Module, Any]:
    """A tiny random model of this type, and its config."""
    config_class = CONFIG_MAPPING[model_type]
    arguments = small(config_class)
    while True:
        try:
            config = config_class(**arguments)
            break
        except Exception as error:
            # A field that this class checks against another one: leave it at its default.
            named = [name for name in arguments if name in str(error)]
            if not named:
                raise
            arguments.pop(named[0])
    model_class = MODEL_MAPPING[config_class]
    if isinstance(model_class, tuple | list):
        model_class = model_class[0]
    torch.manual_seed(0)
    return model_class(config).eval(), config


def candidates(config: Any) -> Iterator[dict[str, Any]]:
    """Inputs of the usual forms, the likeliest first."""
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", 128) or 128)
    ids = torch.randint(3, max(4, min(vocabulary, 120)), (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    size = getattr(getattr(config, "vision_config", config), "image_size", 32) or 32
    size = size if isinstance(size, int) else size[0]
    channels = getattr(getattr(config, "vision_config", config), "num_channels", 3) or 3
    pixels = torch.randn(2, channels, size, size, generator=generator)
    words = {"input_ids": ids, "attention_mask": mask}
    yield words
    yield {**words, "decoder_input_ids": ids[:, :5]}
    yield {"pixel_values": pixels}
    yield {**words, "pixel_values": pixels}
    yield {"input_ids": ids}
    bins = getattr(config, "num_mel_bins", 80) or 80
    frames = 2 * int(getattr(config, "max_source_positions", 32) or 32)
    yield {"input_features": torch.randn(2, bins, frames, generator=generator), "decoder_input_ids": ids[:, :5]}
    yield {"input_features": torch.randn(2, frames, bins, generator=generator)}
    yield {"input_values": torch.randn(2, 4000, generator=generator)}
    yield {"pixel_values": torch.randn(2, 4, channels, size, size, generator=generator)}
    yield {"inputs_embeds": torch.randn(2, 8, int(getattr(config, "hidden_size", 32) or 32), generator=generator)}


def example_for(model: nn.Module, config: Any) -> dict[str, Any]:
    errors = []
    for example in candidates(config):
        try:
            with torch.no_grad():
                found = answers(call(model, example))
            if all(torch.isfinite(t).all() for t in found):
                return example
            errors.append("its outputs are not finite")
        except TookTooLongError:
            raise
        except Exception as error:
            errors.append(f"{type(error).__name__}: {first_line(error)}")
    raise RuntimeError(f"no usual input fits ({errors[0]})")


def other_input(example: dict[str, Any]) -> dict[str, Any]:
    """Same form, other content: what the proof has not seen."""
    generator = torch.Generator().manual_seed(7)
    made = dict(example)
    for name, value in example.items():
        if value.is_floating_point():
            made[name] = torch.randn(value.shape, generator=generator)
        elif "input_ids" in name:
            made[name] = value[:, torch.randperm(value.shape[1], generator=generator)]
    return made


def close(a: Any, b: Any) -> bool:
    pairs = list(zip(answers(a), answers(b), strict=True))
    return all((x - y).abs().max() <= 1e-4 * y.abs().max().clamp(min=1e-30) for x, y in pairs)


def randomise(model: nn.Module) -> None:
    """Every matrix large enough for each head to matter; small models are initialised near zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2 and p.is_floating_point():
                p.copy_(torch.randn(p.shape, generator=generator) / max(p.shape[-1], 1) ** 0.5)


def mask_is_right(model: nn.Module, layer: Any, layers: list[Any], example: dict[str, Any]) -> bool:
    """Brute force: masking head 0 equals setting its columns of W_O to zero."""
    with torch.no_grad(), hp.mask(model, {layer.name: [0]}, layers=layers):
        masked = call(model, example)
    zeroed = copy.deepcopy(model)
    module = zeroed.get_submodule(layer.output_projection.module)
    columns = list(layer.output_projection.features[0])
    with torch.no_grad():
        if isinstance(module, nn.Linear):
            module.weight[:, columns] = 0
        else:
            module.weight[columns] = 0
        return close(masked, call(zeroed, example))


def examine(model_type: str) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"type": model_type, "layers": 0, "mask": 0, "prune": 0, "groups": "", "why": ""}
    try:
        with limited(LIMIT), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            model, config = build(model_type)
            randomise(model)
            example = example_for(model, config)
    except Exception as error:
        return {**row, "status": "not built", "why": f"{type(error).__name__}: {first_line(error)}"[:160]}
    try:
        with limited(6 * LIMIT), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return {**row, **trial(model, example)}
    except TookTooLongError as error:
        return {**row, "status": "too slow", "why": str(error)}
    except Exception as error:
        return {**row, "status": "CRASH", "why": f"{type(error).__name__}: {first_line(error)}"[:160]}


def trial(model: nn.Module, example: dict[str, Any]) -> dict[str, Any]:
    try:
        layers = hp.find_attention(model, example)
    except hp.HeadPruneError as error:
        return {"status": "no attention", "why": error.args[0][:160]}
    if not layers:
        return {"status": "no attention"}
    reasons, masks, prunes = [], 0, 0
    for layer in layers:
        if not layer.maskable:
            reasons.append(layer.reason)
            continue
        if not mask_is_right(model, layer, layers, example):
            return {"status": "WRONG", "layers": len(layers), "why": f"masking {layer.name} is not exact"}
        masks += 1
        if not layer.prunable:
            reasons.append(layer.reason)
            continue
        units = layer.units
        drop = {layer.name: list(units[0])} if len(units) > 1 else {layer.name: list(range(layer.num_heads))}
        pruned = copy.deepcopy(model)
        try:
            hp.prune(pruned, drop, example, layers=layers)
        except hp.PruneError as error:
            reasons.append(error.args[0].split(": ", 1)[1].removesuffix(" The model is unchanged."))
            continue
        unseen = other_input(example)
        with torch.no_grad(), hp.mask(model, drop, layers=layers):
            expected = call(model, unseen)
        with torch.no_grad():
            if not close(call(pruned, unseen), expected):
                return {"status": "WRONG", "layers": len(layers), "why": f"pruning {layer.name} is not exact"}
        prunes += 1
    status = "exact" if prunes == len(layers) else "in part" if prunes else "masked" if masks else "refused"
    groups = sorted({len(layer.units[0]) for layer in layers if layer.groups})
    return {
        "status": status, "layers": len(layers), "mask": masks, "prune": prunes, "groups": ", ".join(map(str, groups)),
        "why": "; ".join(dict.fromkeys(r for r in reasons if r))[:200],
    }  # fmt: skip


def table(rows: list[dict[str, Any]], seconds: float) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    have = [r for r in rows if r["status"] not in ("not built", "no attention", "too slow")]
    lines = [
        "# Coverage",
        "",
        f"Made by `python benchmarks/coverage.py` with transformers {transformers.__version__} and torch {torch.__version__} in "
        f"{seconds:.0f} s: every model type, tiny and random. Of {len(rows)} types {len(have)} could be built and have softmax "
        f"attention; heads can be masked exactly in all layers of {sum(r['mask'] == r['layers'] for r in have)} and pruned exactly "
        f"in all layers of {counts.get('exact', 0)} (in some layers of {counts.get('in part', 0)} more). Wrong: "
        f"{counts.get('WRONG', 0)}. Crashed: {counts.get('CRASH', 0)}.",
        "",
        "“exact”: one head, or one key/value group, of each layer was removed, and the outputs equal the masked model's, on the proof's "
        "inputs and on one that the proof has not seen. A type that is not built here may still work: it needs inputs or fields that "
        "this script does not guess.",
        "",
        "| type | status | layers | masked | pruned | group | why not |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['type']} | {r['status']} | {r['layers']} | {r['mask']} | {r['prune']} | {r['groups']} | {r['why'].replace('|', '/')} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def worked(text: str) -> dict[str, int]:
    """Layers pruned, by type, in an earlier table."""
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {c[0]: int(c[4]) for c in cells if len(c) == 7 and c[4].isdigit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="these types")
    parser.add_argument("--output", type=Path, default=Path("docs/coverage.md"))
    parser.add_argument("--check", action="store_true", help="compare with the output file instead of writing it")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    types = options.only or sorted(CONFIG_MAPPING.keys())
    types = [t for t in types if CONFIG_MAPPING[t] in MODEL_MAPPING]
    started = time.monotonic()
    rows = []
    for model_type in track(types, description="model types", disable=not sys.stderr.isatty()):
        rows.append(examine(model_type))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if options.only:
        print(json.dumps(rows, indent=1))
        return
    if options.check:
        before = worked(options.output.read_text())
        lost = [r["type"] for r in rows if r["prune"] < before.get(r["type"], 0) or r["status"] in ("WRONG", "CRASH")]
        print(f"{len(rows)} types; worse than {options.output}: {', '.join(lost) or 'none'}")
        sys.exit(1 if lost else 0)
    options.output.write_text(table(rows, time.monotonic() - started))
    summary = {s: sum(r["status"] == s for r in rows) for s in sorted({r["status"] for r in rows})}
    print(json.dumps({"types": len(rows), **summary, "seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
