"""OpenVINO folders: the answers of pruned models, and of those with a layer without heads, which once were garbage there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from headprune.exporting import export, time_onnx
from headprune.inputs import call
from headprune.pruned import EmptyAttention, OnlyBias
from headprune.surgery import answers
from tests.support.checks import pruned
from tests.support.plain import summed
from tests.support.zoo import text

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(p) is None for p in ("openvino", "onnxscript")), reason="openvino is not installed"
)


def ask(folder: Path, example: dict[str, torch.Tensor]) -> torch.Tensor:
    """What OpenVINO answers, by no code of headprune's."""
    import openvino as ov

    compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled({k: v.numpy() for k, v in example.items()})[0])


@pytest.mark.slow
def test_a_pruned_model_with_an_empty_layer(tmp_path: Path) -> None:
    model, _ = pruned("bert")
    assert any(isinstance(module, EmptyAttention | OnlyBias) for module in model.modules())
    done = export(model, tmp_path / "model", "openvino")
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"openvino_model.xml", "openvino_model.bin"}
    assert done.facts["proof"]["engine"].startswith("openvino")
    example = text(2, 14)
    with torch.no_grad():
        (expected, *_) = answers(call(model, example))
    torch.testing.assert_close(ask(done.path, example), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    row = time_onnx({"this": done.path, "again": done.path}, example, min_runs=3, min_seconds=0.001)
    assert "again" in row.speedups


def test_half_precision_is_smaller_and_computed_in_full(tmp_path: Path) -> None:
    model = summed()
    full, half = (export(model, tmp_path / dtype, "openvino", dtype=dtype) for dtype in ("float32", "float16"))
    weights = [(done.path / "openvino_model.bin").stat().st_size for done in (full, half)]
    assert weights[1] < weights[0]
    assert ask(half.path, {"x": torch.ones(1, 3, 8)}).dtype == torch.float32
