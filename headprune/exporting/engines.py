"""Files run by the engines that they are for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.errors import HeadPruneError, first_line

Size = int | str
"""Of a dimension; a free one has a name."""
_TYPES = {
    "float": torch.float32, "float16": torch.float16, "double": torch.float64, "int64": torch.int64, "int32": torch.int32, "bool": torch.bool,
}  # fmt: skip
_SPELT = {
    "f32": "float",
    "f16": "float16",
    "f64": "double",
    "i64": "int64",
    "i32": "int32",
    "boolean": "bool",
}  # by OpenVINO


@dataclass(frozen=True)
class Session:
    """A file that is loaded.

    Attributes:
        engine: Its name and version.
        inputs: By name, the type and shape that the file takes.
        run: Named inputs to outputs, in the order of the file's; other inputs are ignored. Raises HeadPruneError.
    """

    engine: str
    inputs: dict[str, tuple[torch.dtype, list[Size]]]
    run: Callable[[Mapping[str, Tensor]], list[Tensor]]


def session(path: Path, threads: int | None = None, exact: bool = True) -> Session:
    """A file, or OpenVINO's folder, in the engine that its name says, on the CPU.

    Args:
        path: An ONNX file (``.onnx``); an OpenVINO model (``.xml``), or the folder that it is in.
        threads: By default as many as torch uses.
        exact: Compute in float32. Else as the engine likes it: OpenVINO computes in bfloat16 on some processors.

    Raises:
        HeadPruneError: It is none of these, the engine is not installed, or it does not read the file.
    """
    for engine, load in _ENGINES.items():
        file = runs_in(path, engine)
        if file is not None:
            return _loaded(path, file, engine, load, (threads or torch.get_num_threads(), exact))
    raise HeadPruneError(f"{path} is no file of an engine.", "Name an .onnx file, or a folder with an OpenVINO model.")


def _loaded(path: Path, file: Path, engine: str, load: Any, how: tuple[int, bool]) -> Session:
    if importlib.util.find_spec(engine) is None:
        raise HeadPruneError(f"{path} runs in {engine}, which is not installed.", f"pip install {engine}")
    if not file.is_file():
        raise HeadPruneError(f"{path} does not exist.", "headprune export MODEL writes such a file.")
    try:
        inputs, run = load(file, *how)
    except Exception as error:
        raise _refused(engine, "read", path, error) from error

    def checked(given: Mapping[str, Tensor]) -> list[Tensor]:
        try:
            return [torch.from_numpy(value) for value in run({name: given[name].numpy() for name in inputs})]
        except Exception as error:
            raise _refused(engine, "run", path, error) from error

    return Session(f"{engine} {importlib.metadata.version(engine)}", inputs, checked)


def runs_in(path: Path, engine: str) -> Path | None:
    """The file that an engine is to read; None where a path is not for this engine."""
    if engine == "onnxruntime":
        return path if path.suffix == ".onnx" else None
    if path.suffix == ".xml":
        return path
    found = sorted(path.glob("*.xml")) if path.is_dir() else []
    return found[0] if len(found) == 1 else None


def is_exported(path: Path) -> bool:
    """Whether an engine's file or folder is meant, not a model of transformers."""
    return any(runs_in(path, engine) is not None for engine in _ENGINES)


def _onnxruntime(file: Path, threads: int, exact: bool) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    loaded = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {
        given.name: (_TYPES[given.type.removeprefix("tensor(").removesuffix(")")], list(given.shape))
        for given in loaded.get_inputs()
    }
    return inputs, lambda given: loaded.run(None, given)


def _openvino(file: Path, threads: int, exact: bool) -> Any:
    import openvino as ov

    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    if exact:
        settings |= {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    compiled = ov.Core().compile_model(file, "CPU", settings)
    inputs = {
        given.any_name: (
            _TYPES[_SPELT[given.element_type.get_type_name()]],
            [d.get_length() if d.is_static else f"{given.any_name}_{i}" for i, d in enumerate(given.partial_shape)],
        )
        for given in compiled.inputs
    }
    request = compiled.create_infer_request()

    def run(given: Mapping[str, Any]) -> list[Any]:
        found = request.infer(given)
        return [found[i].copy() for i in range(len(compiled.outputs))]

    return inputs, run


_ENGINES: dict[str, Callable[[Path, int, bool], Any]] = {"onnxruntime": _onnxruntime, "openvino": _openvino}


def _refused(engine: str, what: str, path: Path, error: Exception) -> HeadPruneError:
    return HeadPruneError(
        f"{engine} does not {what} {path.name}: {first_line(error)}", f"Another version may: pip install -U {engine}"
    )
