"""ONNX files: what onnxruntime answers on shapes that were never traced, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from typer.testing import CliRunner

import headprune as hp
from headprune import exporting
from headprune.cli import app
from headprune.errors import HeadPruneError
from headprune.exporting import engines, export, graph, onnx, time_onnx, timing
from headprune.input_specs import record
from headprune.inputs import call
from headprune.surgery import answers
from tests.support.checks import pruned
from tests.support.plain import Attention, Summed, summed
from tests.support.zoo import ZOO, llama, randomise, sizes, text

runs = pytest.mark.skipif(
    any(importlib.util.find_spec(p) is None for p in ("onnxruntime", "onnxscript")), reason="onnxruntime is not installed"
)  # fmt: skip


def ask(file: Path, **inputs: Tensor) -> list[Tensor]:
    """What onnxruntime answers, by no code of headprune's."""
    import onnxruntime as ort

    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(t) for t in session.run(None, {k: v.numpy() for k, v in inputs.items()})]


def check(file: Path, model: nn.Module, **inputs: Tensor) -> None:
    with torch.no_grad():
        expected = answers(call(model, inputs))
    for own, answer in zip(ask(file, **inputs), expected, strict=True):
        torch.testing.assert_close(own, answer, rtol=0, atol=1e-4 * float(answer.abs().max()))


@runs
def test_a_pruned_folder_answers_on_other_shapes(tmp_path: Path) -> None:
    model, _ = pruned("bert")  # uneven, and its second layer is empty
    folder, file = tmp_path / "small.1", tmp_path / "small.1.onnx"
    hp.save(model, folder, processor=words())
    result = command("export", folder, "--to", "onnx", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["path"], document["proved"], document["facts"]["dtype"]) == (str(file), True, "float32")
    assert document["facts"]["inputs"] == {"input_ids": ["batch", "length"], "attention_mask": ["batch", "length"]}
    assert document["facts"]["outputs"] == ["logits"]
    assert len(document["facts"]["proof"]["shapes"]) > 3
    for rows, length, padding in ((5, 17, 6), (1, 1, 0), (2, 9, 0)):
        example = text(rows, length)
        example["attention_mask"][:] = 1
        if padding:
            example["attention_mask"][0, -padding:] = 0
        check(file, model, **example)
    assert {p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")} == {"small.1", "small.1.onnx"}

    row = time_onnx({"this": file, "again": file}, text(), min_runs=3, min_seconds=0.001)
    assert row.timings["again"].runs >= 3
    assert (row.batch, row.length) == (3, 9)
    with pytest.raises(HeadPruneError, match="attention_mask"):
        time_onnx({"this": file}, {"input_ids": text()["input_ids"]})
    timed = command("bench", file, file, "--batch-sizes", "2", "--lengths", "4,6", "--json")
    assert timed.exit_code == 0, timed.output
    assert [(row["batch"], row["length"]) for row in json.loads(timed.stdout)["rows"]] == [(2, 4), (2, 6)]
    for asked, said in (
        (("bench", file, folder), "Only one"),
        (("bench", file, tmp_path / "none.onnx"), "does not exist"),
        (("export", folder, "--to", "onnx", "--overwrite", "--dtype", "bfloat16"), "float16"),
    ):
        refused = command(*asked)
        assert refused.exit_code == 1
        assert said in refused.output


def words() -> tf.PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", pad_token="[UNK]")


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.slow
@runs
def test_a_pruned_decoder_takes_padding_on_either_side(tmp_path: Path) -> None:
    model, _ = pruned("llama")
    done = export(model, tmp_path / "model.onnx", "onnx")
    assert "no cache" in " ".join(done.notes)
    example = text(4, 12)
    example["attention_mask"][0, :5] = 0  # the first tokens see nothing
    check(done.path, model, **example)
    assert model.config.use_cache


@runs
@pytest.mark.slow
def test_a_plain_module_keeps_the_names_of_its_arguments(tmp_path: Path) -> None:
    model, (x, padding) = pruned("mha")
    done = export(model, tmp_path / "model.onnx", "onnx")
    assert done.facts["inputs"] == {"x": ["batch", "length", 32], "padding": ["batch", "length"]}
    check(done.path, model, x=torch.cat([x, x], 1), padding=torch.cat([padding, padding], 1))


@runs
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("cut", [False, True])
def test_every_family(name: str, cut: bool, tmp_path: Path) -> None:
    model, example = pruned(name) if cut else ZOO[name]()
    if not cut:
        record(model, example)
    done = export(model, tmp_path / "model.onnx", "onnx")
    assert any("batch" in shape for shape in done.facts["inputs"].values())
    assert done.facts["proof"]["largest_difference"] <= 1e-4


@runs
@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    config = tf.MixtralConfig(**sizes("sdpa", num_key_value_heads=2, num_local_experts=4))
    model = randomise(tf.MixtralForCausalLM(config))
    before = model.get_experts_implementation()
    record(model, text())
    export(model, tmp_path / "model.onnx", "onnx")
    assert model.get_experts_implementation() == before
    check(tmp_path / "model.onnx", model, **text(2, 13))


@runs
def test_half_precision(tmp_path: Path) -> None:
    model = summed()
    done = export(model, tmp_path / "half.onnx", "onnx", dtype="float16")
    assert done.facts["proof"]["allowed"] < 0.02
    (_, own) = ask(done.path, x=torch.ones(1, 3, 8, dtype=torch.float16))
    assert own.dtype == torch.float16
    assert next(model.parameters()).dtype == torch.float32
    with pytest.raises(HeadPruneError, match="bfloat16"):
        export(model, tmp_path / "other.onnx", "onnx", dtype="bfloat16")


@runs
def test_large_weights_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "_LARGEST", 1)
    model = summed()
    for overwrite in (False, True):
        done = export(model, tmp_path / "model.onnx", "onnx", overwrite=overwrite)
    assert {p.name for p in tmp_path.iterdir()} - {".model.onnx.lock"} == {"model.onnx", "model.onnx.data"}
    check(done.path, model, x=torch.ones(1, 3, 8))
    assert done.facts["bytes"] == sum((tmp_path / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))


@pytest.mark.parametrize("done", range(5))
def test_a_file_in_parts_is_replaced_as_a_whole(done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any of the renames, parts of two files are never together, and the next export finds the old ones or the new ones."""
    path, left, replace = tmp_path / "model.onnx", [done], os.replace
    parts = [path, tmp_path / "model.onnx.data"]
    (tmp_path / "new").mkdir()
    for part in parts:
        part.write_text("old")
        (tmp_path / "new" / part.name).write_text("new")

    def stopping(one: Path, other: Path) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(one, other)

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt) if done < 4 else nullcontext():
        exporting._move_in(tmp_path / "new", path)
    monkeypatch.undo()
    assert not path.exists() or parts[1].read_text() == path.read_text()
    exporting._put_back(path)
    assert {part.read_text() for part in parts} == {"new" if done == 4 else "old"}
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".old")]


@runs
def test_an_output_with_an_inputs_name(tmp_path: Path) -> None:
    assert export(summed(), tmp_path / "model.onnx", "onnx").facts["outputs"] == ["summed", "x_out"]


@runs
def test_a_file_with_other_answers_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engines.session

    def wrong(path: Path) -> engines.Session:
        loaded = real(path)
        off = lambda given: [t + 1e-3 * t.abs().max() for t in loaded.run(given)]  # noqa: E731
        return replace(loaded, run=off)

    monkeypatch.setattr(engines, "session", wrong)
    with pytest.raises(HeadPruneError, match="of its largest value off"):
        export(summed(), tmp_path / "model.onnx", "onnx")
    assert not list(tmp_path.glob("*.onnx"))
    assert not list(tmp_path.glob(".*.new"))


@runs
def test_what_the_exporter_does_not_take_is_said(tmp_path: Path) -> None:
    class Odd(Summed):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.outer(self.inner(x)) if x.sum() > 0 else x

    model = randomise(Odd())
    record(model, (torch.ones(2, 3, 8),))
    with pytest.raises(HeadPruneError, match=r"torch\.export does not take Odd"):
        export(model, tmp_path / "model.onnx", "onnx")
    with pytest.raises(HeadPruneError, match="not known what Summed takes"):
        export(Summed(), tmp_path / "model.onnx", "onnx")


@runs
def test_sizes_that_a_model_fixes_are_fixed_and_said(tmp_path: Path) -> None:
    class Fixed(Summed):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            if x.shape[1] != 5:
                raise ValueError("five")
            return self.outer(self.inner(x))

    model = randomise(Fixed())
    record(model, torch.randn(1, 5, 8))  # one row: torch.export would fix that too
    done = export(model, tmp_path / "model.onnx", "onnx")
    assert done.facts["inputs"] == {"x": ["batch", 5, 8]}
    check(done.path, model, x=torch.ones(4, 5, 8))


class SizedByInput(Attention):
    """As BLIP's: the width of a head is what the input is wide, by the number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = self.sizes(x)
        q, k, v = (
            t.reshape(rows, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(attended.transpose(1, 2).reshape(rows, length, width))

    def sizes(self, x: Tensor) -> torch.Size:
        return x.size()


class SizedByShape(SizedByInput):
    """As most people write it."""

    def sizes(self, x: Tensor) -> torch.Size:
        return x.shape


@pytest.mark.parametrize("attention", [SizedByInput, SizedByShape])
def test_narrowed_inputs_are_exported(attention: type[SizedByInput]) -> None:
    model = randomise(nn.Sequential(attention(), nn.LayerNorm(32)))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    hp.prune(model, {"0": [1]}, x)
    assert "_headprune_narrow" in vars(model[0])
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},))
    other = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(program.module()(other), model(other))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 31))
    torch.testing.assert_close(model(x), model(x.clone()))  # nothing of the trace is left


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_attention_in_plain_operations(mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 8, generator=generator)
    k, v = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(2))
    seen = torch.rand(2, 1, 5, 5, generator=generator) > 0.4
    seen[0, 0, 2] = False  # a token that sees none
    given: dict[str, Any] = {
        "none": {}, "causal": {"is_causal": True}, "bool": {"attn_mask": seen},
        "float": {"attn_mask": torch.zeros(2, 1, 5, 5).masked_fill(~seen, float("-inf"))},
    }[mask]  # fmt: skip
    expected = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3, **given)
    torch.testing.assert_close(graph._attend(q, k, v, enable_gqa=True, scale=0.3, **given), expected)


def test_what_the_tokenizer_gives_is_an_input() -> None:
    """A dense BERT is exported with token types, as its pruned copy is: a service can change the one for the other."""
    model, _ = ZOO["bert"]()
    coder = words()
    coder.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    found = graph.callable_of(model, coder)
    assert found.inputs == ("input_ids", "attention_mask", "token_type_ids")
    assert graph.callable_of(model).inputs == ("input_ids", "attention_mask")
    written, _ = ZOO["gpt2"]()  # its types are tokens: nobody passes them
    assert graph.callable_of(written, coder).inputs == ("input_ids", "attention_mask")


def test_files_that_take_other_inputs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (torch.int64, ["batch", "length"])
    given: dict[str, set[str]] = {}
    sessions: dict[str, SimpleNamespace] = {}
    for name, inputs in {"dense": ["ids"], "pruned": ["ids", "types"]}.items():
        given[name] = set()
        loaded = SimpleNamespace(inputs=dict.fromkeys(inputs, sizes), run=given[name].update)
        sessions[name] = loaded
    monkeypatch.setattr(timing, "session", lambda file, **_: sessions[str(file)])
    monkeypatch.setattr(timing, "bench_calls", lambda calls, *shape: [call() for call in calls.values()])
    timing.bench_files({"dense": Path("dense"), "pruned": Path("pruned")}, [2], [4])
    assert given == {"dense": {"ids"}, "pruned": {"ids", "types"}}


def test_labels_become_what_a_decoder_reads() -> None:
    model, example = ZOO["t5"]()
    labels = torch.tensor([[5, 6, -100], [7, 8, 9], [3, 4, 5]])
    record(model, {k: v for k, v in {**example, "labels": labels}.items() if k != "decoder_input_ids"})
    found = graph.callable_of(model)
    assert found.inputs == ("input_ids", "attention_mask", "decoder_input_ids")
    assert "loss" not in found.outputs


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HeadPruneError, match="onnx") as raised:
        exporting.export(llama()[0], tmp_path / "model.onnx", "onnx")
    assert "headprune[onnx]" in raised.value.hint
