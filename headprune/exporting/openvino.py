"""OpenVINO models, made of the ONNX file."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch

from headprune.exporting import engines
from headprune.exporting.base import Exported, Request, exporter
from headprune.exporting.graph import Call, callable_of
from headprune.exporting.onnx import exported, written

FILE = "openvino_model.xml"


@exporter("openvino", "-openvino", needs=("openvino", "onnx", "onnxscript"), folder=True, dtypes=("float32", "float16"))
def openvino(request: Request) -> Exported:
    """A folder for OpenVINO: the same graph as onnx (weights may be in half precision; it computes as the processor likes)."""
    import openvino as ov

    half = request.dtype == "float16"

    def converted(onnx: Path) -> engines.Session:
        ov.save_model(ov.Core().read_model(onnx), request.path / FILE, compress_to_fp16=half)
        return engines.session(request.path / FILE)

    function = callable_of(request.model, request.processor)
    rounded = Call(copy.deepcopy(request.model).to(torch.float16).float(), function.example) if half else function
    with tempfile.TemporaryDirectory() as folder:
        graph, proof = written(function, Path(folder, "model.onnx"), converted, rounded=rounded)
    return exported(request, "openvino", graph, proof)
