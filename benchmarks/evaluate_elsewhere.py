"""Measures a model where headprune is not installed: one way, one file, and examples as they lie in the data.

    python evaluate_elsewhere.py (transformers|onnxruntime|openvino|llama.cpp) MODEL TOKENIZER EXAMPLES.json MAX_LENGTH

Run by `without_headprune.py`, which compares what it prints with the report: accuracy and loss, each over all examples. Nothing of
headprune's is imported. The examples go through the model one at a time, without padding.
"""

import json
import math
import sys
from pathlib import Path


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
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(str(_in(file, "*.onnx")), providers=["CPUExecutionProvider"])

    def logits(ids):
        given = _inputs(ids, {i.name: i.shape for i in session.get_inputs()})
        return np.asarray(session.run(None, given)[0][0], np.float64)

    return logits


def by_openvino(file, classes):
    import numpy as np
    import openvino

    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})  # it may take bfloat16 otherwise
    model = core.compile_model(str(_in(file, "*.xml")), "CPU")

    def logits(ids):
        given = _inputs(ids, {i.get_any_name(): None for i in model.inputs})
        return np.asarray(model(given)[0][0], np.float64)

    return logits


def _in(file, pattern):
    """The file itself, or the one in a folder."""
    return next(Path(file).glob(pattern)) if Path(file).is_dir() else file


def _inputs(ids, wanted):
    import numpy as np

    one = np.asarray([ids], np.int64)
    known = {"input_ids": one, "attention_mask": np.ones_like(one), "token_type_ids": np.zeros_like(one)}
    known["position_ids"] = np.arange(len(ids))[None]
    return {name: known[name] for name in wanted}


def by_llama_cpp(file, classes):
    """Log-probabilities of every token after those before it; logits are not told."""
    import numpy as np
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

    def logits(ids):
        rows = []
        for end in range(1, len(ids)):
            row = np.full(max(ids) + 1, -math.inf)
            for likeliest in (4000, 200_000):  # all tokens, if the true one is not among the first
                asked = {
                    "prompt": ids[:end],
                    "n_predict": 1,
                    "n_probs": likeliest,
                    "temperature": 0,
                    "cache_prompt": True,
                }
                answer = server.handle_completions(asked)
                for told in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                    if told["id"] < len(row):
                        row[told["id"]] = told["logprob"]
                if math.isfinite(row[ids[end]]):
                    break
            rows.append(row)
        return np.stack([*rows, rows[-1]])  # what comes after the last token is not asked

    logits.are_log_probabilities = True
    return logits


WAYS = {
    "transformers": by_transformers,
    "onnxruntime": by_onnxruntime,
    "openvino": by_openvino,
    "llama.cpp": by_llama_cpp,
}


def main():
    import numpy as np
    import transformers

    way, model, tokenizer_folder, file, length = sys.argv[1:]
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    examples = json.loads(Path(file).read_text(encoding="utf-8"))
    classes = "label" in examples[0]
    logits = WAYS[way](model, classes)
    done = getattr(logits, "are_log_probabilities", False)

    def log_probability(row, label):
        row = np.asarray(row, np.float64)
        return row[label] - (0 if done else row.max() + np.log(np.exp(row - row.max()).sum()))

    right = tokens = 0
    loss = 0.0
    for example in examples:
        ids = tokenizer(example["text"], truncation=True, max_length=int(length))["input_ids"]
        rows = logits(ids)
        pairs = [(rows, example["label"])] if classes else list(zip(rows[:-1], ids[1:], strict=True))
        for row, label in pairs:
            loss -= float(log_probability(row, label))
            right += int(np.argmax(row) == label)
            tokens += 1
    print(json.dumps({"accuracy": right / tokens, "loss": loss / tokens, "examples": len(examples)}))


if __name__ == "__main__":
    main()
