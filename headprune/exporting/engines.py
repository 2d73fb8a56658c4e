"""Run and time exported files in their engines: onnxruntime, OpenVINO and llama.cpp."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError, first_line
from headprune.latency import LatencyRow, bench, example_shape
from headprune.running import Progress


class Session(nn.Module):
    """An exported file as a CPU module that runs in the file's engine: takes inputs by name, returns the outputs in the file's order.

    Args:
        path: An ONNX file (``.onnx``), an OpenVINO model (``.xml``), or the folder of one.
        exact: Compute in float32. Otherwise the engine chooses: OpenVINO uses bfloat16 on some processors.

    Attributes:
        engine: The engine's name and version.
        inputs: Name -> (type, shape) of the file's inputs; a free size is a name.
        outputs: Names of the file's outputs, in order.

    Raises:
        HeadPruneError: The path is none of these, the engine is not installed, or it does not read or run the file.
    """

    inputs: dict[str, tuple[torch.dtype, list[int | str]]]
    outputs: list[str]

    def __init__(self, path: Path, exact: bool = True) -> None:
        super().__init__()
        self._path, (self._name, file) = path, _engine_of(path)
        if not self._name:
            raise HeadPruneError(f"{path} is no file of an engine.", "Name an .onnx file, or OpenVINO's folder.")
        if not file.is_file():
            raise HeadPruneError(f"{path} does not exist.", "headprune export MODEL writes such a file.")
        with self._explain_errors("read"):
            self.inputs, self.outputs, self._run = (
                _onnxruntime(file) if self._name == "onnxruntime" else _openvino(file, exact)
            )
        self.engine = f"{self._name} {importlib.metadata.version(self._name)}"

    def forward(self, **given: Tensor) -> list[Tensor]:
        """Run the file; inputs that it does not take are ignored."""
        if missing := [name for name in self.inputs if name not in given]:
            raise HeadPruneError(f"{self._path.name} takes {', '.join(missing)} too.", "Pass all that it takes.")
        with self._explain_errors("run"):
            outputs = self._run({name: given[name].to(dtype).numpy() for name, (dtype, _) in self.inputs.items()})
        return [torch.from_numpy(output) for output in outputs]

    @contextmanager
    def _explain_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            message = f"{self._name} does not {what} {self._path.name}: {first_line(error)}"
            raise HeadPruneError(message, f"Another version may: pip install -U {self._name}") from error


def is_exported(path: Path) -> bool:
    """Whether a path is an exported file or folder for an engine, not a transformers model."""
    return bool(_engine_of(path)[0])


def _engine_of(path: Path) -> tuple[str, Path]:
    """The engine that runs a path ("" for none), and the file that it reads."""
    if path.suffix == ".onnx":
        return "onnxruntime", path
    models = [path] if path.suffix == ".xml" else sorted(path.glob("*.xml")) if path.is_dir() else []
    return ("openvino", models[0]) if len(models) == 1 else ("", path)


def _onnxruntime(file: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    loaded = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {}
    for node in loaded.get_inputs():
        dtype = getattr(torch, node.type.removeprefix("tensor(").removesuffix(")"))
        # PyTorch writes some fixed sizes as text.
        inputs[node.name] = dtype, [int(size) if str(size).isdigit() else size for size in node.shape]
    return inputs, [node.name for node in loaded.get_outputs()], partial(loaded.run, None)


def _openvino(file: Path, exact: bool) -> Any:
    import openvino as ov

    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1}
    if exact:
        settings |= {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    compiled = ov.Core().compile_model(file, "CPU", settings)
    inputs = {}
    for node in compiled.inputs:
        dtype = torch.from_numpy(np.empty(0, node.element_type.to_dtype())).dtype
        sizes = [d.get_length() if d.is_static else f"{node.any_name}_{i}" for i, d in enumerate(node.partial_shape)]
        inputs[node.any_name] = dtype, sizes
    request = compiled.create_infer_request()
    return inputs, [node.any_name for node in compiled.outputs], lambda arrays: [*request.infer(arrays).values()]


def complete(
    file: Path, requests: Sequence[dict[str, Any]], *, context: int = 512, exact: bool = True
) -> tuple[str, list[dict[str, Any]]]:
    """llama.cpp's answers to requests. It runs in a child process, since a file that it cannot read ends the process.

    Args:
        file: A GGUF file.
        requests: Completion requests for llama.cpp's server, such as ``{"prompt": [1, 2], "n_predict": 1, "n_probs": 10}``.
        context: Context size in tokens.
        exact: Keep keys and values in float32, not in float16 as llama.cpp does by default.

    Returns:
        xllamacpp's version, and the answers.

    Raises:
        HeadPruneError: llama.cpp does not read the file, or ended before it answered.
    """
    job = {
        "path": sys.path, "file": os.fspath(file.absolute()), "context": context, "exact": exact,
        "threads": torch.get_num_threads(), "requests": list(requests),
    }  # fmt: skip
    code = f"{inspect.getsource(_answer)}\n_answer()"
    command = [sys.executable, "-I", "-c", code]
    process = subprocess.run(command, input=json.dumps(job).encode(), capture_output=True, check=False)
    if process.returncode == 0 and process.stdout:
        version, answers = json.loads(process.stdout.splitlines()[-1])
        return version, answers
    log = [line for line in process.stderr.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in log if re.search("[Ee]rror|GGML_ASSERT|failed", line)]
    why = (*errors, *log, f"it ended with {process.returncode}")[0].strip()[:300].rstrip(".")
    hint = "Another version of xllamacpp may (pip install -U xllamacpp)."
    raise HeadPruneError(f"llama.cpp does not run the file: {why}.", hint)


def _answer() -> None:
    """Print llama.cpp's answers to the requests on stdin. `complete` runs this source in another Python, so it uses nothing else here."""
    import json
    import sys

    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = job["file"]
    settings.n_ctx = settings.n_batch = settings.n_ubatch = job["context"]
    settings.n_parallel = 1
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = job["threads"]
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if job["exact"]:
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.warmup = settings.fit_params = False
    settings.cache_ram_mib = 0
    settings.verbosity = 1
    server = xllamacpp.Server(settings)
    answers = [server.handle_completions({"cache_prompt": False, **request}) for request in job["requests"]]
    print(json.dumps([xllamacpp.__version__, answers]), flush=True)


def log_probabilities(answer: dict[str, Any]) -> dict[int, float]:
    """The log-probabilities of the first generated token, by token id, as far as llama.cpp lists them.

    Raises:
        HeadPruneError: The answer has none.
    """
    try:
        return {t["id"]: t["logprob"] for t in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    except (KeyError, IndexError, TypeError):
        said = f"llama.cpp gave no log-probabilities: {json.dumps(answer)[:200]}."
        raise HeadPruneError(said, "Report this with xllamacpp's version.") from None


def time_onnx(files: Mapping[str, Path | str], example: Mapping[str, Tensor], **rounds: Any) -> LatencyRow:
    """Time ONNX files in onnxruntime (or OpenVINO models in OpenVINO) against each other on one input, on the CPU.

    Args:
        files: Paths by name; all others are compared with the first, usually the dense model.
        example: The inputs by name; those that a file does not take are ignored.
        rounds: ``min_runs`` and ``min_seconds``, as in `headprune.benchmark`.

    Returns:
        A `LatencyRow`, as of `headprune.benchmark`.

    Raises:
        HeadPruneError: A file does not run, or needs an input that the example lacks.
    """
    sessions = {name: Session(Path(file), exact=False) for name, file in files.items()}
    return bench(sessions, [(*example_shape(example), example)], **rounds)[0]


def bench_files(
    files: Mapping[str, Path], batches: Sequence[int], lengths: Sequence[int], *, progress: Progress | None = None
) -> list[LatencyRow]:
    """`time_onnx` on made-up inputs of several sizes; ``lengths`` apply only if the files leave a length free."""
    sessions = {name: Session(file, exact=False) for name, file in files.items()}
    shapes = [shape for _, shape in next(iter(sessions.values())).inputs.values()]
    free = any(isinstance(size, str) for shape in shapes for size in shape[1:])
    inputs = []
    for length, batch in product(lengths if free else [0], batches):
        every = [_inputs(loaded, batch, length) for loaded in reversed([*sessions.values()])]
        inputs.append((batch, length, {name: t for own in every for name, t in own.items()}))
    return bench(sessions, inputs, progress=progress)


def _inputs(loaded: Session, batch: int, length: int) -> dict[str, Tensor]:
    """Made-up inputs for a file: masks of ones, other integers 0, floats random.

    Raises:
        HeadPruneError: The file has another, fixed batch size.
    """
    inputs: dict[str, Tensor] = {}
    for name, (dtype, sizes) in loaded.inputs.items():
        shape = [size if isinstance(size, int) else length if d else batch for d, size in enumerate(sizes)]
        if shape and shape[0] != batch:
            raise HeadPruneError(f"The file takes {shape[0]} rows of {name}.", f"Use --batch-sizes {shape[0]}.")
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        inputs[name] = noise.to(dtype) if dtype.is_floating_point else torch.full(shape, "mask" in name, dtype=dtype)
    return inputs
