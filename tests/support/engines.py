"""What the engines answer that exported files are for, by no code of headprune's."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]


def by_onnxruntime(file: Path, inputs: Inputs) -> list[Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    given = {i.name: inputs[i.name].numpy() for i in session.get_inputs()}
    return [torch.from_numpy(t) for t in session.run(None, given)]


def by_openvino(folder: Path, inputs: Inputs) -> list[Tensor]:
    import openvino

    model = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    result = model({i.any_name: inputs[i.any_name].numpy() for i in model.inputs})
    return [torch.from_numpy(result[i]) for i in range(len(model.outputs))]


def by_llama_cpp(file: Path, prompt: str | list[int], tokens: int, **more: Any) -> list[tuple[int, dict[int, float]]]:
    """Each token of the greedy text, and the log-probabilities that all tokens had there."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_parallel = params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = False
    params.verbosity = -1
    request = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "n_probs": 1000, **more}
    answer = xllamacpp.Server(params).handle_completions(request)
    steps = answer["choices"][0]["logprobs"]["content"]
    return [(step["id"], {t["id"]: t["logprob"] for t in step["top_logprobs"]}) for step in steps]
