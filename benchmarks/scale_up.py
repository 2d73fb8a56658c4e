"""What headprune costs on models of 8, 70 and 405 billion parameters, worked out; docs/scale.md, section `scale-up`.

    python benchmarks/scale_up.py             # writes the section; a few minutes, no such model is needed

Nothing is run on these models. Of Llama 3.1's shapes, on PyTorch's meta device (no weights), FLOPs of a pass are counted by `torch.utils.flop_counter` and bytes
of weights by the tensors' sizes. How many passes a search takes is counted on a stand-in with as many layers, heads and
key/value heads, whose heads are two wide. Bytes of statistics are counted by the code that
makes them (`headprune.reference.directions.room`, `headprune.reference.moments`). Times are FLOPs divided by a speed that is assumed. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as tf
from document import replace_section

import headprune as hp
from headprune import searching
from headprune.amounts import duration, flops, size
from headprune.planning import search
from headprune.reference import directions
from headprune.reference.directions import room
from headprune.reference.moments import FOLDS
from headprune.trials import Trials

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
SHAPES = {  # Llama 3.1: hidden size, layers, heads, key/value heads, width of the feed-forward part
    "8B": (4096, 32, 32, 8, 14336),
    "70B": (8192, 80, 64, 8, 28672),
    "405B": (16384, 126, 128, 8, 53248),
}
VOCABULARY, EXAMPLES, LENGTH = 128256, 512, 512
SPEED = 4e14  # FLOPs a second that are assumed: about 40 % of what one H100 or H200 does in bfloat16
DEVICE = 141e9  # bytes of an H200


def config(name: str) -> tf.LlamaConfig:
    hidden, layers, heads, groups, wide = SHAPES[name]
    return tf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=wide, max_position_embeddings=131072, tie_word_embeddings=False,
    )  # fmt: skip


def pass_flops(name: str) -> tuple[float, int, int]:
    """FLOPs of a forward pass over all examples, parameters, and bytes of the logits of one example in float32; on the meta device."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = tf.LlamaForCausalLM(config(name)).to(torch.bfloat16).eval()
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bfloat16)  # whole, so that no value has to be looked at
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return counter.get_total_flops() * EXAMPLES, sum(p.numel() for p in model.parameters()), LENGTH * VOCABULARY * 4


def passes(name: str, one: float, share: int, keep: str = "75%", effort: str = "normal") -> float:
    """Forward passes of a search (a backward pass counts as two), counted on a stand-in with heads two wide.

    Args:
        one: FLOPs of a pass of the real model, by which the search decides what it can afford.
        share: As `statistics` has it of the real model: a stand-in has room for more.
    """
    _, layers, heads, groups, _ = SHAPES[name]
    torch.manual_seed(0)
    made = tf.LlamaConfig(
        vocab_size=64, hidden_size=2 * heads, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=16, initializer_range=0.2,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(made).eval()

    def batch() -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 64, (8, 4))
        return {"input_ids": ids, "labels": ids.clone()}

    examples, choose = [batch() for _ in range(EXAMPLES // 8)], [batch() for _ in range(16)]
    layers = hp.find_attention(model, examples[0])
    request = searching.Request(searching.budgets_of(keep, (), layers), effort=effort)
    with (
        patch.object(search, "flops_of_pass", lambda *_: one),
        patch.object(directions, "_RANKS", (share,) if share else ()),
    ):
        return searching.passes_of(request, (), Trials(model, layers, examples, choose))


def statistics(name: str) -> tuple[int, int]:
    """Bytes of the sums of all layers, and widths of a head that the heads may read instead."""
    hidden, layers, heads, groups, _ = SHAPES[name]
    head = hidden // heads
    projections = [
        SimpleNamespace(name=f"L{i}", weight=torch.empty(hidden, hidden, device="meta")) for i in range(layers)
    ]
    own = SimpleNamespace(owner=range(heads), head_dim=head, weight=torch.empty(hidden, groups * head, device="meta"))
    share = room(projections, {p.name: own for p in projections})  # type: ignore[arg-type, misc]
    wide = hidden * (1 + share) + 1
    return layers * 8 * FOLDS * (wide * wide + wide * hidden), share


def worked_out(name: str) -> dict[str, Any]:
    one, parameters, logits = pass_flops(name)
    heads = SHAPES[name][1] * SHAPES[name][2]
    sums, share = statistics(name)
    found = {
        "gradient": 3.0, "search": passes(name, one, share), "search with --effort high": passes(name, one, share, effort="high"),
        "ablation": 1 + heads / 2,  # from the head's layer on
    }  # fmt: skip
    hidden, layers = SHAPES[name][:2]
    return {
        "model": f"Llama 3.1 {name}", "parameters": parameters, "weights": 2 * parameters, "heads": heads, "pass_flops": one, "logits": logits,
        "statistics": sums, "share": share, "largest_matrix": 8 * hidden * hidden, "looks": 2 * 8 * layers * hidden * hidden,
        "ways": {way: {"passes": n, "flops": n * one} for way, n in found.items()},
    }  # fmt: skip


def section(rows: list[dict[str, Any]]) -> str:
    ways = list(rows[0]["ways"])
    lines = [
        "## 8B, 70B, 405B",
        "",
        f"**Worked out, not measured**: none of these models has been run. For {EXAMPLES} examples of {LENGTH} tokens ({EXAMPLES * LENGTH:,} tokens); a run of the command "
        f"measures controls and a curve besides. FLOPs of a pass are counted on the meta device; passes as the search counts them on stand-ins of the same layers and heads; bytes by "
        f"the code that allocates them. Times assume {SPEED / 1e12:.0f} TFLOPs a second (one H100 or H200 in bfloat16 at about 40 %), with weights that fit; they leave out "
        "least squares and copying.",
        "",
        "| | " + " | ".join(row["model"] for row in rows) + " |",
        "|:--|" + "--:|" * len(rows),
        "| parameters | " + " | ".join(f"{row['parameters'] / 1e9:,.1f} billion" for row in rows) + " |",
        "| weights in bfloat16 | " + " | ".join(size(row["weights"]) for row in rows) + " |",
        "| weights in float32, as on a CPU | " + " | ".join(size(2 * row["weights"]) for row in rows) + " |",
        "| heads | " + " | ".join(f"{row['heads']:,}" for row in rows) + " |",
        "| one pass over the examples | " + " | ".join(flops(row["pass_flops"]) for row in rows) + " |",
    ]
    for way in ways:
        cells = []
        for row in rows:
            own = row["ways"][way]
            cells.append(f"{own['passes']:,.0f} passes, {flops(own['flops'])}, {duration(own['flops'] / SPEED)}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    lines += [
        "| statistics for repair, all layers | " + " | ".join(size(row["statistics"]) for row in rows) + " |",
        "| … of which heads may read other things (widths of a head) | "
        + " | ".join(str(row["share"]) for row in rows)
        + " |",
        "| what a look at all heads holds beside them | " + " | ".join(size(row["looks"]) for row in rows) + " |",
        "| one layer's Hessian in float64 | " + " | ".join(size(row["largest_matrix"]) for row in rows) + " |",
        "",
        "A backward pass counts as two forward passes. What repair, controls and a curve take comes on top.",
        "",
        "**What breaks first, and what to use instead:**",
        "",
    ]
    for row in rows:
        whole = row["weights"] + row["statistics"] + row["looks"]
        first = []
        if row["weights"] > DEVICE:
            first.append(f"the weights do not fit on one device of {size(DEVICE)}")
        if whole > DEVICE:
            first.append(f"weights, statistics and a look together are {size(whole)}")
        ablation = row["ways"]["ablation"]["flops"] / SPEED
        first.append(
            f"ablation of every head takes {duration(ablation)}, a gradient {duration(row['ways']['gradient']['flops'] / SPEED)}"
        )
        lines.append(f"- **{row['model']}**: {'; '.join(first)}.")
    lines += [
        "- Instead of `ablation`: `gradient` or `fisher` (one pass, forward and backward), or `--examples 64` (few examples ablated, the rest estimated).",
        "- Instead of search and repair where the statistics do not fit: `--strategy one-shot --no-repair` on scores by gradient, which looks at nothing; then `headprune finetune`. "
        "`--no-repair` with another strategy keeps no sums either, but looks at all heads.",
        f"- Values are refitted only where their sums stay below 2 GiB over all layers (`headprune.reference.directions.room`): of these models in {', '.join(row['model'] for row in rows if row['share']) or 'none'}. "
        "Elsewhere W_O alone is refitted.",
        "- Fewer examples (`-L 128`) make every pass cheaper, but not the statistics smaller: these grow with the square of the hidden size and with the layers.",
        "",
        f"Written by `python benchmarks/scale_up.py`; torch {torch.__version__}, transformers {tf.__version__}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), help="prints, writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.only or SHAPES:
        rows.append(worked_out(name))
        print(rows[-1], file=sys.stderr, flush=True)
    text = section(rows)
    print(text, file=sys.stderr)
    if not options.only:
        replace_section(DOCUMENT, "scale-up", text)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
