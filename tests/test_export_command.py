"""`headprune export`, `bench` and `prune --export`: the inputs that files take, and their times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune import HeadPruneError
from headprune.exporting import FORMATS, Exported, exporter, time_onnx
from tests.support.commands import PRUNE, run
from tests.support.decoders import bytewise, llama
from tests.support.engines import by_onnxruntime, by_openvino
from tests.support.plain import Summed, summed
from tests.support.zoo import ZOO

pytest.importorskip("onnxruntime")


def test_gguf_of_a_pruned_folder(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, folder = llama(), tmp_path / "small.1"
    example = {"input_ids": torch.arange(3, 33).view(2, 15)}
    layers = hp.find_attention(model, example)
    plan = {layers[0].name: [0, 1], layers[1].name: list(range(6))}
    hp.repair(model, plan, [example], values=False, answers=False)
    hp.prune(model, plan, example)
    hp.save(model, folder, processor=bytewise())
    document = json.loads(run("export", folder, "--to", "gguf", "--json").stdout)
    assert (document["path"], document["facts"]["heads"]) == (f"{folder}.gguf", [4, 0, 6])
    for arguments, message in (
        (("--to", "gguf"), "--overwrite"),
        (("--to", "onnx", "-o", tmp_path / "model.gguf"), "Name it model.onnx"),
        (("--to", "stock", "-o", f"{folder}.gguf"), "is a file. Name a folder"),
        (("--to", "stock"), "trust_remote_code=True"),
    ):
        assert message in run("export", folder, *arguments, code=1).stderr.splitlines()[-1]


def test_half_precision_is_half_the_size_and_as_near_as_rounding_allows(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("openvino")
    model = llama()
    whole, *halves = (
        hp.export(model, tmp_path / f"{dtype}.gguf", processor=bytewise(), dtype=dtype)
        for dtype in ("float32", "float16", "bfloat16")
    )
    for half in halves:
        saved = sum(p.numel() * 2 for p in model.parameters() if p.ndim > 1)
        assert abs(whole.facts["bytes"] - half.facts["bytes"] - saved) < 2000
        assert 1e-4 < half.facts["proof"]["largest_difference"] < half.facts["proof"]["allowed"] < 2
    small = hp.export(summed(), tmp_path / "half.onnx", "onnx", dtype="float16")
    assert small.facts["proof"]["allowed"] < 0.02
    assert by_onnxruntime(small.path, {"x": torch.ones(1, 3, 8).half()})[1].dtype == torch.float16

    full, half = (hp.export(summed(), tmp_path / d, "openvino", dtype=d) for d in ("float32", "float16"))
    weights = [(done.path / "openvino_model.bin").stat().st_size for done in (full, half)]
    assert weights[1] < weights[0]
    assert by_openvino(half.path, {"x": torch.ones(1, 3, 8)})[0].dtype == torch.float32
    stock = hp.export(model, tmp_path / "stock", "stock", dtype="bfloat16")
    assert tf.LlamaForCausalLM.from_pretrained(stock.path).dtype == torch.bfloat16
    assert model.dtype == torch.float32


def test_files_are_timed_in_turn(tmp_path: Path) -> None:
    """Also those that take other inputs: one may take token types that another does not know."""

    class Scaled(Summed):
        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(x, scale)

    scaled, plain, x = summed(Scaled, scale=torch.ones(2, 5, 1)), summed(), torch.ones(2, 5, 8)
    files = [hp.export(plain, tmp_path / "plain.onnx", "onnx"), hp.export(scaled, tmp_path / "scaled.onnx", "onnx")]
    assert files[0].facts["inputs"] == {"x": ["batch", "length", 8]}
    assert files[0].facts["outputs"] == ["summed", "x_out"]  # an output may have an input's name
    paths = {"plain": files[0].path, "again": files[0].path}
    row = time_onnx(paths, {"x": x, "more": x}, min_runs=3, min_seconds=0.001)
    assert row.timings["again"].runs >= 3
    with pytest.raises(HeadPruneError, match="takes scale too"):
        time_onnx({"scaled": files[1].path}, {"x": x})
    timed = run("bench", *(f.path for f in files), "--batch-sizes", "2", "--lengths", "4,6", "--json")
    assert [(row["batch"], row["length"]) for row in json.loads(timed.stdout)["rows"]] == [(2, 4), (2, 6)]
    assert "does not exist" in run("bench", files[0].path, tmp_path / "none.onnx", code=1).stderr
    assert "Only one" in run("bench", files[0].path, tmp_path, code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("bert", ["token_type_ids"]), ("gpt2", [])])
def test_what_the_tokenizer_gives_is_an_input(name: str, more: list[str], tmp_path: Path) -> None:
    """A dense BERT is exported with token types, as its pruned copy is; GPT-2's types are tokens, which nobody passes."""
    coder = bytewise()
    coder.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    done = hp.export(ZOO[name]()[0], tmp_path / "model.onnx", "onnx", processor=coder)
    assert list(done.facts["inputs"]) == ["input_ids", "attention_mask", *more]


@pytest.mark.slow
def test_labels_become_what_a_decoder_reads(tmp_path: Path) -> None:
    model, example = ZOO["t5"]()
    labels = torch.tensor([[5, 6, -100], [7, 8, 9], [3, 4, 5]])
    example = {**{k: v for k, v in example.items() if k != "decoder_input_ids"}, "labels": labels}
    hp.prune(model, {hp.find_attention(model, example)[0].name: [0]}, example)
    done = hp.export(model, tmp_path / "model.onnx", "onnx")
    assert list(done.facts["inputs"]) == ["input_ids", "attention_mask", "decoder_input_ids"]
    assert "loss" not in done.facts["outputs"]
    assert "no cache" in " ".join(done.notes)


def test_sizes_that_a_model_fixes_are_fixed_and_said(tmp_path: Path) -> None:
    class Fixed(Summed):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            if x.shape[1] != 5:
                raise ValueError("five")
            return self.outer(self.inner(x))

    model = summed(Fixed, rows=1)  # torch.export would fix that too
    done = hp.export(model, tmp_path / "model.onnx", "onnx")
    assert done.facts["inputs"] == {"x": ["batch", 5, 8]}
    torch.testing.assert_close(by_onnxruntime(done.path, {"x": torch.ones(4, 5, 8)})[0], model(torch.ones(4, 5, 8)))


# -- `headprune prune --export`: in the run and its report ----------------------------------------


@pytest.fixture
def formats() -> Any:
    """Two formats: one that writes how many parameters a model has, one that can express nothing."""

    @exporter("count", ".count")
    def count(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
        """A number."""
        path.write_text(str(sum(p.numel() for p in model.parameters())))
        return Exported(path, "count", False, "a number", notes=("It is only a number.",))

    @exporter("none", ".none")
    def none(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
        """Nothing."""
        raise HeadPruneError("It has no place for heads.", "Use another.")

    yield
    del FORMATS["count"], FORMATS["none"]


@pytest.mark.usefixtures("brief")
def test_pruned_models_are_exported(formats: Any, bert_folder: Path, data_folder: Path, here: Path) -> None:
    exports = ("--export", "none", "--export", "count")
    found = run(*PRUNE, 4, "-k", 6, bert_folder, "-d", data_folder, "-o", "run", *exports, "--json")
    metrics = json.loads(found.stdout)
    made = {(m["format"], m["checkpoint"]): m for m in metrics["exports"]}
    assert list(made) == [(f, c) for f in ("none", "count") for c in ("pruned-6", "pruned-4")]
    for keep in (4, 6):
        file = here / "run" / f"pruned-{keep}.count"
        model = hp.load(here / "run" / f"pruned-{keep}")
        assert file.read_text() == str(sum(p.numel() for p in model.parameters()))
        assert made["count", f"pruned-{keep}"]["file"] == file.name
        assert made["none", f"pruned-{keep}"]["file"] is None  # and the rest of the run is there
    report = (here / "run" / "report.md").read_text()
    assert "| 4 heads | none | not written: It has no place for heads. |" in report
    assert "| 6 heads | count | `pruned-6.count`: a number |" in report
    assert report.count("It is only a number.") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_onnx_is_timed_and_gives_the_reported_accuracy(bert_folder: Path, data_folder: Path, here: Path) -> None:
    found = run(*PRUNE, 4, bert_folder, "-d", data_folder, "-o", "run", "--export", "onnx", "--json")
    metrics = json.loads(found.stdout)
    (engine,) = metrics["engines"]
    assert [set(row["timings"]) for row in engine["rows"]] == [{"dense", "4 heads"}] * len(metrics["latency"]["rows"])
    assert "onnx, timed as above" in (here / "run" / "report.md").read_text()
    tokenizer = tf.AutoTokenizer.from_pretrained(here / "run" / "pruned-4")
    right = []
    for row in map(json.loads, (data_folder / "test.jsonl").read_text().splitlines()):
        logits, *_ = by_onnxruntime(here / "run" / "pruned-4.onnx", tokenizer(row["text"], return_tensors="pt"))
        right.append(int(logits[0].argmax()) == row["label"])
    assert sum(right) / len(right) == pytest.approx(metrics["budgets"][0]["pruned"]["metrics"]["accuracy"])
