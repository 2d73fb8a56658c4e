"""Which clients load a pruned folder where headprune is not installed, and with what answers.

    python benchmarks/clients.py FOLDER                # prints a table: client, and how far its answers are from headprune.load's
    python benchmarks/clients.py FOLDER --document     # and writes it into docs/deploy.md

FOLDER is a text model with its tokenizer, as `headprune prune` saves it. Each client runs in a process of its own, in which
headprune cannot be imported. What is not installed is left out: peft, sentence-transformers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import document
import torch
import transformers

import headprune as hp

TEXTS = ["a wonderful film", "dull, lifeless and far too long for what it has to say"]
HEAD = """
import sys
sys.modules["headprune"] = None
import torch, transformers
transformers.utils.logging.set_verbosity_error()
folder, auto, texts = sys.argv[1], getattr(transformers, sys.argv[2]), {texts!r}
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
inputs = dict(tokenizer(texts, padding=True, return_tensors="pt"))
expected = torch.load(sys.argv[3])


def loaded(**more):
    return auto.from_pretrained(folder, trust_remote_code=True, **more).eval()


def off(model):
    with torch.no_grad():
        return float((model(**inputs).logits - expected).abs().max() / expected.abs().max())


"""
CLIENTS = {
    "`from_pretrained`": "print(off(loaded()))",
    '`from_pretrained(…, device_map="auto")`': 'print(off(loaded(device_map="auto")))',
    "`from_pretrained`, saved again in shards and loaded": """
import tempfile
again = tempfile.mkdtemp()
loaded().save_pretrained(again, max_shard_size="5MB")
folder = again
print(off(loaded()))
""",
    "accelerate: `init_empty_weights`, `load_checkpoint_and_dispatch`": """
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
config = transformers.AutoConfig.from_pretrained(folder)
with init_empty_weights():
    model = auto.from_config(config, trust_remote_code=True)
print(off(load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}).eval()))
""",
    "`pipeline`": """
task = "text-classification" if "Classification" in sys.argv[2] else "text-generation"
print("runs", len(transformers.pipeline(task, folder, trust_remote_code=True)(texts)))
""",
    "PEFT: LoRA on the loaded model": """
import peft
model = peft.get_peft_model(loaded(), peft.LoraConfig(target_modules="all-linear", r=2)).eval()
print(off(model))
""",
    "sentence-transformers": """
from sentence_transformers import SentenceTransformer
print("runs", len(SentenceTransformer(folder, trust_remote_code=True, device="cpu").encode(texts)))
""",
    "`torch.export`": "print(off(torch.export.export(loaded(use_cache=False) if 'Causal' in sys.argv[2] else loaded(), (), kwargs=inputs).module()))",
}


def tried(client: str, folder: Path, auto: str, expected: Path) -> str:
    """What came of it, in a cell."""
    command = [sys.executable, "-c", HEAD.format(texts=TEXTS) + CLIENTS[client], str(folder), auto, str(expected)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if "ModuleNotFoundError" in last:
        return "not installed"
    if done.returncode:
        return f"fails: {last[:120]}"
    answer = done.stdout.strip().splitlines()[-1]
    return (
        "runs"
        if answer.startswith("runs")
        else "the same, to the bit"
        if float(answer) == 0
        else f"{float(answer):.0e} off"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--document", action="store_true", help="write the table into docs/deploy.md")
    options = parser.parse_args()
    model = hp.load(options.folder)
    maps = model.config.auto_map
    auto = next(name for name, cls in maps.items() if cls.endswith(f".{type(model).__name__}"))
    inputs = transformers.AutoTokenizer.from_pretrained(options.folder)(TEXTS, padding=True, return_tensors="pt")
    lines = ["| client | answers, against `headprune.load` |", "|---|---|"]
    with tempfile.TemporaryDirectory() as here, torch.no_grad():
        expected = Path(here) / "expected.pt"
        torch.save(model(**inputs).logits, expected)
        for client in CLIENTS:
            found = tried(client, options.folder, auto, expected)
            if found != "not installed":
                lines.append(f"| {client} | {found} |")
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch", "accelerate")
    )
    lines += ["", f"{type(model).__name__}, pruned; {versions}. headprune could not be imported."]
    print("\n".join(lines))
    if options.document:
        document.replace_section(Path("docs/deploy.md"), "clients", "\n".join(lines))


if __name__ == "__main__":
    main()
