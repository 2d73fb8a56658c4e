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
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # of the code in saved folders
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout need not be installed

import torch
import transformers as tf
from document import replace_section

import headprune as hp

warnings.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parent.parent
TYPES = {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LITTLE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LITTLE_LLAMA = {**LITTLE, "num_key_value_heads": 2, "vocab_size": 1000}
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
LLAMA_1B = {**LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}
LLAMA_8B = {**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
SHAPES: dict[str, tuple[Any, dict[str, int], dict[str, int]]] = {  # model, sizes, sizes to try the script
    "BERT-base": (tf.BertForSequenceClassification, {"max_position_embeddings": 4096}, LITTLE),
    "ViT-B": (tf.ViTForImageClassification, {}, {**LITTLE, "image_size": 32, "patch_size": 8}),
    "Llama-1B": (tf.LlamaForCausalLM, LLAMA_1B, LITTLE_LLAMA),
    "Llama-8B": (tf.LlamaForCausalLM, LLAMA_8B, LITTLE_LLAMA),
}
Options = argparse.Namespace


class Part(NamedTuple):
    """A part of a benchmark.

    Attributes:
        run: Gives the lines of the document.
        seconds: That it takes on a GPU, about; it is not begun when fewer are left.
    """

    title: str
    run: Callable[[Options], list[str]]
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
        replace_section(ROOT / "docs" / "scale.md", section, _document(parts, known, heading))
        return
    end = time.monotonic() + options.seconds
    todo = [name for name in dict.fromkeys(options.only or parts) if "lines" not in known.get(name, {})]
    for name in todo:
        if end - time.monotonic() < parts[name].seconds and not options.small:
            print(f"{name}: not begun, it takes about {parts[name].seconds:.0f} s", flush=True)
            continue
        known[name] = _run(parts[name], options)
        options.work.write_text(json.dumps(known))
        print(f"== {name}", *_lines(known[name]), sep="\n", flush=True)
    missing = [name for name in parts if "lines" not in known.get(name, {})]
    print(f"still to run: {', '.join(missing)}" if missing else "all parts are done", flush=True)


def _run(part: Part, options: Options) -> dict[str, Any]:
    torch.set_float32_matmul_precision("highest")  # whatever the part before has set
    try:
        found: dict[str, Any] = {"lines": part.run(options)}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    torch.cuda.empty_cache()
    cuda = options.device.startswith("cuda")
    where = torch.cuda.get_device_name(0) if cuda else f"the CPU ({platform.machine()}), to try the script"
    where += f", torch {torch.__version__}, transformers {tf.__version__}, Python {platform.python_version()}, headprune {hp.__version__}"
    return found | {"where": where}


def _lines(found: Mapping[str, Any]) -> list[str]:
    return found["lines"] if "lines" in found else [f"**Failed**: {found['error']}"]


def _document(parts: Mapping[str, Part], known: Mapping[str, Any], heading: str) -> str:
    lines = [f"## {heading}", ""]
    for name in (name for name in parts if name in known):
        lines += [f"### {parts[name].title}", "", *_lines(known[name]), ""]
    places = {found["where"]: [n for n in known if known[n]["where"] == found["where"]] for found in known.values()}
    measured = "; ".join(f"{', '.join(names)}: {place}" for place, names in places.items()) or "nothing yet"
    missing = ", ".join(name for name in parts if "lines" not in known.get(name, {})) or "nothing"
    return "\n".join([*lines, f"Measured on: {measured}. Not run yet: {missing}."])


# -- models and inputs -----------------------------------------------------------------------------


def built(shape: str, options: Options, kind: str = "float32", attention: str = "sdpa", initial: bool = False) -> Any:
    """A model of a common shape, made on the device; its random weights are large enough for heads to matter, or ``initial`` ones."""
    cls, sizes, little = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device(options.device), torch.no_grad():
        config = cls.config_class(**(little if options.small else sizes))
        model = cls._from_config(config, attn_implementation=attention, dtype=TYPES[kind])
        for p in () if initial else model.parameters():
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
