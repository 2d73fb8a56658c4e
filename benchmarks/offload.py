"""What memory a model takes whose weights stay on disk: a random Llama repaired, pruned and saved, and one in memory; docs/scale.md.

    python benchmarks/offload.py      # writes section `offload` of docs/scale.md; about five minutes

Each of the two runs in a process of its own. Its memory is RssAnon of /proc/self/status, looked at every 20 ms: memory that cannot be
read again from a file. Pages of files that the system keeps as long as there is room do not count. Both must save the same weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from document import replace_section

ROOT = Path(__file__).resolve().parents[1]
LAYERS, WIDTH, INNER, HEADS, VOCABULARY, TOKENS, EXAMPLES = 8, 512, 4096, 8, 2000, 32, 8


def rss() -> int:
    """Bytes of this process's memory that no file holds."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def worker(options: argparse.Namespace) -> None:
    """Do the work, and print what it took."""
    import torch
    import transformers as tf

    import headprune as hp
    from headprune.fingerprint import fingerprint

    torch.set_num_threads(1)
    most, base, done = 0, rss(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, rss())

    threading.Thread(target=watch, daemon=True).start()
    folder = Path(options.folder)
    spread = {"device_map": {"model": "disk", "lm_head": "disk"}} if options.worker == "disk" else {}
    model = tf.AutoModelForCausalLM.from_pretrained(folder / "dense", **spread).eval()
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator) for _ in range(EXAMPLES // 2)]
    batches = [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": i} for i in ids]
    example = {k: v for k, v in batches[0].items() if k != "labels"}
    layers = hp.find_attention(model, example)
    plan = {layer.name: list(range(0, HEADS, 2)) for layer in layers}
    hp.repair(model, plan, batches, layers=layers)
    hp.prune(model, plan, example, layers=layers)
    hp.save(model, folder / options.worker, max_shard_size="50MB")
    done.set()
    print(json.dumps({"most": most - base, "weights": fingerprint(model)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=("memory", "disk"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    import torch
    import transformers as tf

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = tf.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS, num_hidden_layers=LAYERS,
            vocab_size=VOCABULARY, max_position_embeddings=4 * TOKENS, attn_implementation="sdpa",
        )  # fmt: skip
        model = tf.LlamaForCausalLM(config)
        size = sum(p.numel() * 4 for p in model.parameters())
        model.save_pretrained(Path(folder) / "dense", max_shard_size="50MB")
        del model
        for kind in ("memory", "disk"):
            command = [sys.executable, __file__, "--worker", kind, "--folder", folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
            found[kind] = json.loads(done.stdout.splitlines()[-1])
            print(kind, found[kind], file=sys.stderr)
    if found["memory"].pop("weights") != found["disk"].pop("weights"):
        sys.exit("The two models have other weights.")
    mib = 2**20
    lines = [
        f"A random Llama of {size / mib:,.0f} MiB ({LAYERS} layers of {HEADS} heads, {WIDTH} wide, float32), repaired on {EXAMPLES} texts of "
        f"{TOKENS} tokens, pruned to half of its heads and saved in files of 50 MB; one thread. The weights are the same to the bit.",
        "",
        "| weights | memory at the most |",
        "|---|---|",
        *(f"| {name} | {found[kind]['most'] / mib:,.0f} MiB |" for name, kind in (("in memory", "memory"), ("on disk", "disk"))),
        "",
        "Memory is what no file holds (RssAnon), beyond what Python takes by itself. Command: `python benchmarks/offload.py`.",
    ]  # fmt: skip
    text = "\n".join(lines)
    print(text)
    replace_section(ROOT / "docs" / "scale.md", "offload", text)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
