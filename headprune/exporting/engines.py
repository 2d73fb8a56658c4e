"""Files run by the engines that they are for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.errors import HeadPruneError, first_line

Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""Named inputs to outputs, in the order of the file's."""


def version(engine: str) -> str:
    """An engine and its version."""
    return f"{engine} {importlib.metadata.version(engine)}"


def onnxruntime(path: Path, threads: int | None = None) -> Run:
    """An ONNX file in onnxruntime, on the CPU.

    Args:
        threads: By default as many as torch uses.

    Raises:
        HeadPruneError: It does not read the file; so does the function that is returned, where the file does not run.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or torch.get_num_threads()
    try:
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _refused("onnxruntime", "read", path, error) from error
    names = [given.name for given in session.get_inputs()]

    def run(given: Mapping[str, Tensor]) -> list[Tensor]:
        try:
            found = session.run(None, {name: given[name].numpy() for name in names})
        except Exception as error:
            raise _refused("onnxruntime", "run", path, error) from error
        return [torch.from_numpy(value) for value in found]

    return run


def openvino(path: Path, threads: int | None = None, exact: bool = True) -> Run:
    """An OpenVINO model (its ``.xml``) or an ONNX file in OpenVINO, on the CPU.

    Args:
        threads: By default as many as torch uses.
        exact: Compute in float32. Else as OpenVINO likes it, which on some processors is bfloat16.

    Raises:
        HeadPruneError: As `onnxruntime`.
    """
    import openvino as ov

    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads or torch.get_num_threads(), "NUM_STREAMS": 1}
    if exact:
        settings |= {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    try:
        compiled = ov.Core().compile_model(path, "CPU", settings)
    except Exception as error:
        raise _refused("OpenVINO", "read", path, error) from error
    names = [given.any_name for given in compiled.inputs]
    request = compiled.create_infer_request()

    def run(given: Mapping[str, Tensor]) -> list[Tensor]:
        try:
            found = request.infer({name: given[name].numpy() for name in names})
        except Exception as error:
            raise _refused("OpenVINO", "run", path, error) from error
        return [torch.from_numpy(found[i].copy()) for i in range(len(compiled.outputs))]

    return run


def _refused(engine: str, what: str, path: Path, error: Exception) -> HeadPruneError:
    return HeadPruneError(
        f"{engine} does not {what} {path.name}: {first_line(error)}", f"Another version of {engine.lower()} may (pip install -U)."
    )
