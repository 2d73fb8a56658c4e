"""Measures a model where headprune is not installed, without padding: `without_headprune.py` and `clients.py` run it.

    python evaluate_elsewhere.py (transformers|onnxruntime|openvino|llama.cpp) MODEL TOKENIZER EXAMPLES.json MAX_LENGTH

Prints accuracy and loss over all examples; of examples with the answers that are expected (``"expected"``: logits by token, or of the text),
also how far the model's are off, at most: as a share of the largest, or in nats where an engine tells log-probabilities alone.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np


def by_transformers(folder, classes):
    import torch
    import transformers

    auto = transformers.AutoModelForSequenceClassification if classes else transformers.AutoModelForCausalLM
    # In float32, as the report's model was computed, whatever the folder stores.
    model = auto.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()

    def logits(ids):
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids])).logits[0].double().numpy()

    return logits


def by_onnxruntime(file, classes):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return lambda ids: np.asarray(session.run(None, inputs(ids, names))[0][0], np.float64)


def by_openvino(folder, classes):
    import openvino

    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})  # it may take bfloat16 otherwise
    model = core.compile_model(str(next(Path(folder).glob("*.xml"))), "CPU")
    names = [i.get_any_name() for i in model.inputs]
    return lambda ids: np.asarray(model(inputs(ids, names))[0][0], np.float64)


def inputs(ids, names):
    one = np.asarray([ids], np.int64)
    known = {"input_ids": one, "attention_mask": np.ones_like(one), "token_type_ids": np.zeros_like(one)}
    known["position_ids"] = np.arange(len(ids))[None]
    return {name: known[name] for name in names}


def by_llama_cpp(file, classes):
    """Log-probabilities after every token; logits are not told."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    settings.n_parallel = settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.n_gpu_layers = 0
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.warmup = settings.fit_params = False
    settings.verbosity = -1
    server = xllamacpp.Server(settings)

    def log_probabilities(ids):
        rows = []
        for end in range(1, len(ids) + 1):
            request = {"prompt": ids[:end], "n_predict": 1, "n_probs": 200_000, "temperature": 0, "cache_prompt": True}
            answer = server.handle_completions(request)
            tokens = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            row = np.full(max(token["id"] for token in tokens) + 1, -math.inf)
            row[[token["id"] for token in tokens]] = [token["logprob"] for token in tokens]
            rows.append(row)
        return np.stack(rows)

    return log_probabilities


WAYS = {
    "transformers": by_transformers, "onnxruntime": by_onnxruntime, "openvino": by_openvino, "llama.cpp": by_llama_cpp,
}  # fmt: skip


def normal(rows):
    """Log-probabilities of logits, ``[..., labels]``; of log-probabilities the same."""
    most = rows.max(-1, keepdims=True)
    return rows - most - np.log(np.exp(rows - most).sum(-1, keepdims=True))


def main():
    import transformers

    way, model, tokenizer_folder, file, length = sys.argv[1:]
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    examples = json.loads(Path(file).read_text(encoding="utf-8"))
    classes = "label" in examples[0]
    answer = WAYS[way](model, classes)
    right = tokens = 0
    loss = off = 0.0
    for example in examples:
        ids = tokenizer(example["text"], truncation=True, max_length=int(length))["input_ids"]
        rows = answer(ids)
        if "expected" in example:
            expected = np.asarray(example["expected"])
            if way == "llama.cpp":
                size = min(rows.shape[-1], expected.shape[-1])
                gaps = np.abs(rows[:, :size] - normal(expected)[:, :size])
                off = max(off, gaps[np.isfinite(gaps)].max())
            else:
                off = max(off, np.abs(rows - expected).max() / np.abs(expected).max())
        for row, label in [(rows, example["label"])] if classes else zip(rows[:-1], ids[1:], strict=True):
            loss -= float(normal(row)[label])
            right += int(np.argmax(row) == label)
            tokens += 1
    print(json.dumps({"accuracy": right / tokens, "loss": loss / tokens, "examples": len(examples), "off": float(off)}))


if __name__ == "__main__":
    main()
