"""The scripts beside headprune: licences, and `benchmarks/quality.py`."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whisper_tiny
from onnx import TensorProto, helper, numpy_helper
from quality import METHODS, Subject, leads, measured, table

import headprune as hp
from tests.support.problems import small

ROOT = Path(__file__).parent.parent


def test_every_pinned_package_has_a_line() -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    for pin in (ROOT / "constraints.txt").read_text().split():
        name, _, version = pin.partition("==")
        assert f"| {name} | {version} | " in page, f"{pin}: run `make licences`"
    assert not [line for line in page.splitlines() if "not known" in line and line.endswith("| yes |")]


@pytest.fixture
def subject() -> Subject:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    parts = (lambda draw: batches[:2]), batches[2:3], batches[2:]
    return Subject("tiny", model, layers, *parts, "accuracy", (4, 2), "few")


def test_the_table_holds_means_spreads_and_a_paired_error(subject):
    def row(method, draw, keep, each):
        value = each.count("1") / len(each)
        return {"method": method, "draw": draw, "keep": keep, "value": value, "each": each, "seconds": 2.0}

    rows = [row("dense", 0, 6, "1111"), row("a", 0, 4, "1110"), row("a", 1, 4, "1100"), row("b", 0, 2, "1111")]
    text = "\n".join(table(subject, rows))
    assert "| a | 0.625 ± 0.177 | – | 2 |" in text
    assert "| b | – | 1.000 | 2 |" in text
    assert "dense 1.000" in text
    error = np.std([0, 0, -0.5, -1], ddof=1) / 2
    assert f"0 to {error:.2g} for the paired change from dense." in text


def test_the_lead_is_over_the_best_peer_of_each_count(subject):
    def row(method, draw, each):
        return {"method": method, "draw": draw, "keep": 4, "each": each * 10}

    peers = [row("weak", 0, "0000"), row("strong", 0, "1010"), row("headprune compensated", 0, "1111")]
    rows = [row("dense", 0, "1111"), *peers, row("headprune auto", 0, "1111"), row("headprune auto", 1, "1101")]
    spread = np.tile([0, 1, -0.5, 1], 10) - 0.375
    half = 2.0227 * np.sqrt((spread**2).sum() + 2) / 40
    assert leads(subject, rows)[5:] == [f"| 4 | strong | +0.375 | {0.375 - half:+.3f} to {0.375 + half:+.3f} |"]
    assert leads(subject, rows[:3]) == []


def test_an_example_counts_by_its_tokens():
    loss, tokens = np.array([0.1, 1.0, 3.0]), np.array([1, 2, 5])
    mean = (loss * tokens).sum() / 8
    found = hp.Measurement({"perplexity": np.exp(mean), "loss": mean}, loss, np.full(3, np.nan), tokens)
    assert np.mean(measured("perplexity", found)["each"]) == pytest.approx(mean, abs=1e-5)


def test_auto_is_the_search_and_the_repair_that_users_get(subject):
    score, choose = subject.score(0), subject.choose
    (plan,) = hp.search(subject.model, score, 2, choose=choose, layers=subject.layers)
    smaller = deepcopy(subject.model)
    hp.repair(smaller, plan, score, choose=choose, layers=subject.layers)
    with hp.mask(smaller, dict(plan.drop), layers=subject.layers):
        expected = hp.evaluate(smaller, subject.report).metrics
    with METHODS["headprune auto"](subject.model, score, choose, subject.layers, 2, 0) as pruned:
        assert hp.evaluate(pruned, subject.report).metrics == expected


# -- benchmarks/whisper_tiny.py ----------------------------------------------------------------------


def quantised() -> tuple[Any, np.ndarray]:
    """`y = x @ weight + bias` in a branch, as the package's decoder has it; and the weight, ``[in, out]``."""
    rng = np.random.default_rng(0)
    held = {
        "w_scale": np.float32(0.5), "w_zero_point": np.uint8(3), "one": np.bool_(True),
        "w_quantized": rng.integers(0, 9, (2, 3), dtype=np.uint8), "fc.bias_merged_0": rng.random(3, dtype=np.float32),
    }  # fmt: skip
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 3])
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["x8", "x_scale", "x_zero"]),
        helper.make_node("MatMulInteger", ["x8", "w_quantized", "x_zero", "w_zero_point"], ["p"], "/fc/MatMul_quant"),
        helper.make_node("Cast", ["p"], ["q"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x_scale", "w_scale"], ["scale"]),
        helper.make_node("Mul", ["q", "scale"], ["r"]),
        helper.make_node("Add", ["r", "fc.bias_merged_0"], ["y"]),
    ]
    branch = helper.make_graph(nodes, "branch", [], [y])
    either = helper.make_node("If", ["one"], ["y"], then_branch=branch, else_branch=branch)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 2])
    initial = [numpy_helper.from_array(np.asarray(a), n) for n, a in held.items()]
    graph = helper.make_graph([either], "whole", [x], [y], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    return model, (held["w_quantized"].astype(np.float32) - 3) / 2


def test_weights_of_8_bits_are_made_wide():
    onnxruntime = pytest.importorskip("onnxruntime")
    model, weight = quantised()
    state = whisper_tiny.weights(model.graph, "a.")
    assert state.keys() == {"a.fc.weight", "a.fc.bias"}
    np.testing.assert_array_equal(state["a.fc.weight"], weight.T)
    x = np.random.default_rng(1).standard_normal((4, 2)).astype(np.float32)
    exact = x @ weight + state["a.fc.bias"].numpy()
    rounded, plain = (
        onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0]
        for m in (model, whisper_tiny.unrounded(deepcopy(model)))
    )
    np.testing.assert_allclose(plain, exact, atol=1e-6)
    assert np.abs(rounded - exact).max() > 1e-4


def test_word_errors_are_counted_after_normalising():
    pytest.importorskip("jiwer")
    texts = ["Fail again. Fail better!", "no matter"]

    class Processor:
        tokenizer = type("Tokenizer", (), {"pad_token_id": 0})

        def batch_decode(self, ids, skip_special_tokens):
            assert (ids >= 0).all()
            return [
                {1: texts[0], 2: texts[1], 3: " fail AGAIN, fail", 4: " no matter at all"}[int(i)] for i in ids[:, 0]
            ]

    class Model:
        def generate(self, input_features, **_):
            return input_features

    batch = {"input_features": torch.tensor([[3], [4]]), "labels": torch.tensor([[1, -100], [2, 5]])}
    found = whisper_tiny.listened(Model(), Processor(), [batch])
    assert found.metrics[whisper_tiny.METRIC] == 3 / 6
    assert found.per_example("loss").tolist() == [1, 2]
    assert found.tokens.tolist() == [4, 2]
