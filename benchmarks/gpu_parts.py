"""A benchmark on a lent GPU, in parts: each is run once and stored, so that a second call goes on where the first was stopped.

``--work FILE`` holds the parts that are done; it is read first and written after every part. A part that fails is written too, with its
error, and tried again by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # of the code in saved folders
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout need not be installed

import torch
import transformers as tf
from document import replace_section

import headprune as hp

ROOT = Path(__file__).resolve().parent.parent
TYPES = {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LITTLE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
LITTLE_LLAMA = {**LITTLE, "num_key_value_heads": 2, "vocab_size": 1000}
SHAPES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {  # config, model, sizes, sizes to try the script
    "BERT-base": (tf.BertConfig, tf.BertForSequenceClassification, {"max_position_embeddings": 4096}, LITTLE),
    "ViT-B": (tf.ViTConfig, tf.ViTForImageClassification, {}, {**LITTLE, "image_size": 32, "patch_size": 8}),
}
for _name, _wide, _layers, _inner in (("Llama-1B", 2048, 16, 8192), ("Llama-8B", 4096, 32, 14336)):
    _sizes = {**LLAMA, "hidden_size": _wide, "num_hidden_layers": _layers, "intermediate_size": _inner}
    SHAPES[_name] = (tf.LlamaConfig, tf.LlamaForCausalLM, _sizes, LITTLE_LLAMA)


@dataclass(frozen=True)
class Part:
    """A part of a benchmark.

    Attributes:
        run: Gives the lines of the document.
        seconds: That it takes on a GPU, about; it is not begun when fewer are left.
    """

    title: str
    run: Callable[[argparse.Namespace], list[str]]
    seconds: float


def main(parts: Mapping[str, Part], about: str, section: str, heading: str) -> None:
    """Run the parts that are missing, or write a section of docs/scale.md from what is there."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a JSON file with the parts that are done")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--small", action="store_true", help="tiny models and few rounds: to try the script")
    parser.add_argument("--only", nargs="+", choices=list(parts), help="these parts")
    parser.add_argument("--seconds", type=float, default=570, help="no part is begun that would end later")
    parser.add_argument("--minilm", type=Path, help="the folder of minilm-rt, which holds its data too")
    parser.add_argument("--document", action="store_true", help="write the section from what is there; run nothing")
    options = parser.parse_args()
    known = json.loads(options.work.read_text()) if options.work.exists() else {}
    if options.document:
        replace_section(ROOT / "docs" / "scale.md", section, "\n".join(_document(parts, known, heading)))
        return
    end = time.monotonic() + options.seconds
    for name in options.only or parts:
        if "lines" in known.get(name, {}):
            continue
        if end - time.monotonic() < parts[name].seconds and not options.small:
            print(f"{name}: not begun, it takes about {parts[name].seconds:.0f} s", flush=True)
            continue
        known[name] = _run(parts[name], options)
        options.work.write_text(json.dumps(known))
        print(f"== {name}", *_lines(known[name]), sep="\n", flush=True)
    missing = [name for name in parts if "lines" not in known.get(name, {})]
    print(f"still to run: {', '.join(missing)}" if missing else "all parts are done", flush=True)


def _run(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    try:
        found: dict[str, Any] = {"lines": part.run(options)}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    where = f"the CPU ({platform.machine()}), to try the script"
    if options.device.startswith("cuda"):
        where = torch.cuda.get_device_name(0)
        torch.cuda.empty_cache()
    versions = f"torch {torch.__version__}, transformers {tf.__version__}, Python {platform.python_version()}"
    return found | {"where": f"{where}, {versions}, headprune {hp.__version__}"}


def _lines(found: Mapping[str, Any]) -> list[str]:
    return found.get("lines") or [f"**Failed**: {found['error']}" if "error" in found else "Not run yet."]


def _document(parts: Mapping[str, Part], known: Mapping[str, Any], heading: str) -> list[str]:
    lines = [f"## {heading}", ""]
    for name, part in parts.items():
        lines += [f"### {part.title}", "", *_lines(known[name]), ""] if name in known else []
    places, missing = dict.fromkeys(found["where"] for found in known.values()), [n for n in parts if n not in known]
    return [
        *lines,
        f"Measured on {'; '.join(places) or 'nothing yet'}. Not run yet: {', '.join(missing) or 'nothing'}.",
    ]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table; the first column is text, the others are numbers."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---", *["---:"] * (len(heads) - 1)], *rows)]


# -- models and inputs -----------------------------------------------------------------------------


def built(
    shape: str, options: argparse.Namespace, kind: str = "float32", attention: str = "sdpa", weights: str = "large"
) -> Any:
    """A model of a common shape, made on the device; its random weights are large enough for heads to matter, or ``"initial"`` ones."""
    config, cls, large, small = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device(options.device), torch.no_grad():
        sizes = config(**(small if options.small else large))
        model = cls._from_config(sizes, attn_implementation=attention, dtype=TYPES[kind])
        for p in model.parameters() if weights == "large" else ():
            if p.ndim > 1:
                p.normal_(std=1.2 / p.shape[-1] ** 0.5)
    return model.eval()


def texts(rows: int, tokens: int, batches: int, device: str, padded: bool = True) -> list[dict[str, Any]]:
    """Labelled batches; every second text of a batch is padded by a quarter."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(batches):
        ids = torch.randint(5, 1000, (rows, tokens), generator=generator)
        batch = {"input_ids": ids, "labels": torch.randint(0, 2, (rows,), generator=generator)}
        if padded:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][1::2, tokens - tokens // 4 :] = 0
        found.append({name: value.to(device) for name, value in batch.items()})
    return found


def unlabelled(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}
