"""Exported files answer in the engines that they are for as the model does, on inputs of other sizes than the traced ones.

And what no exported file may be: of a model that the format cannot express, with other answers, half written, or in another's place.
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn

import headprune as hp
from headprune import HeadPruneError
from tests.support.commands import PRUNE, metrics_of, run, stderr_of
from tests.support.decoders import DECODERS, EXAMPLE, TOKENIZERS, bytewise, llama, mistral, qwen2, scaled, settings
from tests.support.even import MADE, even, even_plan
from tests.support.even import mistral as plain_mistral
from tests.support.folders import common, sentences, tokenizer, write_jsonl
from tests.support.plain import Attention, Summed, noise, summed
from tests.support.zoo import ZOO, labelled, randomise, sizes, text

gguf = pytest.importorskip("gguf")
onnxruntime = pytest.importorskip("onnxruntime")
PACKAGES = {"onnx": "onnxruntime", "openvino": "openvino", "gguf": "xllamacpp", "stock": "transformers"}
SUFFIXES = {"onnx": ".onnx", "openvino": "", "gguf": ".gguf", "stock": ""}
# How many units (heads, or key/value groups) go of layer i, which has n.
KINDS: dict[str, Callable[[int, int], int]] = {
    "dense": lambda i, n: 0,
    "uniform": lambda i, n: 1,
    "uneven": lambda i, n: min(1 + i % 2, n - 1),
    "emptied": lambda i, n: n if i == 1 else 1,
    "repaired": lambda i, n: n if i == 1 else 1,
    "first and last emptied": lambda i, n: 0 if i == 1 else n,
    "neighbours emptied": lambda i, n: n if i else 0,
    "neighbours emptied, repaired": lambda i, n: n if i else 1,
}
# Of those that trace a model.
FAST = {("onnx", "bert", "repaired"), ("onnx", "by size", "uniform"), ("openvino", "bert", "emptied")}
TABLE = [("onnx", name, "emptied") for name in ZOO]
TABLE += [("onnx", name, "uneven") for name in ("gpt2", "t5", "mha")]
TABLE += [("onnx", name, kind) for name in ("bert", "llama") for kind in ("dense", "uniform", "uneven", "repaired")]
TABLE += [("onnx", "mixtral", "dense"), ("onnx", "whisper", "emptied")]
TABLE += [("onnx", name, "uniform") for name in ("by size", "by shape")]
# OpenVINO reads what is traced for ONNX: each kind in two models is enough.
TABLE += [("openvino", "bert", kind) for kind in ("uneven", "emptied", "repaired")]
TABLE += [("openvino", "llama", kind) for kind in ("uniform", "emptied", "repaired")]
TABLE += [("openvino", "vit", kind) for kind in ("uniform", "uneven")]
TABLE += [("gguf", "llama", kind) for kind in KINDS]
FEW = ("uneven", "emptied", "neighbours emptied, repaired")
TABLE += [("gguf", name, kind) for name in ("mistral", "qwen2") for kind in FEW]
TABLE += [("gguf", name, "dense") for name in DECODERS if name != "llama"]
TABLE += [("gguf", "biased llama", "emptied")]
TABLE += [("stock", name, kind) for name in ("qwen3", "gemma", "vit") for kind in ("dense", "uniform")]


def mixtral() -> tuple[nn.Module, Any]:
    config = tf.MixtralConfig(**sizes("sdpa", num_key_value_heads=2, num_local_experts=4))
    return randomise(tf.MixtralForCausalLM(config)), text()


class Sized(Attention):
    """As BLIP's: the width of a head is what the input is wide, by the number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = self.sizes(x)
        split = (rows, length, self.num_heads, width // self.num_heads)
        attended = F.scaled_dot_product_attention(*(t.reshape(split).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)))
        return self.o(attended.transpose(1, 2).reshape(rows, length, width))

    def sizes(self, x: Tensor) -> torch.Size:
        return x.size()


class SizedByShape(Sized):
    """As most people write it."""

    def sizes(self, x: Tensor) -> torch.Size:
        return x.shape


def sized(attention: type[Sized]) -> tuple[nn.Module, Any]:
    return randomise(nn.Sequential(attention(), nn.LayerNorm(32))), (noise(3, 6, 32),)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **MADE, "mixtral": mixtral, "by size": lambda: sized(Sized), "by shape": lambda: sized(SizedByShape),
}  # fmt: skip


def made(to: str, name: str, kind: str) -> tuple[Any, Any]:
    """A model without the heads that go, and an example."""
    model, example = (DECODERS[name](), EXAMPLE) if to == "gguf" else MODELS[name]()
    layers = hp.find_attention(model, example)
    units = {a.name: a.units[: KINDS[kind](i, len(a.units))] for i, a in enumerate(layers)}
    drop = {name: sorted(h for unit in gone for h in unit) for name, gone in units.items()}
    if "repaired" in kind:
        batches = [{k: v.roll(n, 0) for k, v in example.items()} for n in range(2)]
        hp.repair(model, drop, batches, values=False, answers=False)
        for projection in (m for n, m in model.named_modules() if n.endswith(("o_proj", "output.dense"))):
            if isinstance(projection.bias, nn.Parameter):  # larger than a repair makes them, so that they count
                projection.bias.data.normal_(generator=torch.Generator().manual_seed(5))
    if kind != "dense":
        hp.prune(model, {a: heads for a, heads in drop.items() if heads}, example)
    return model, example


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        found = model(**inputs)
    return [v for v in ([found] if isinstance(found, Tensor) else found.values()) if isinstance(v, Tensor)]


def other(example: Any, names: list[str]) -> dict[str, Tensor]:
    """Inputs of twice as many rows, and twice as long where they have a length; text is padded at either end."""
    given = example if isinstance(example, dict) else dict(zip(names, example, strict=True))
    times = {1: (2,), 2: (2, 2), 3: (2, 2, 1), 4: (2, 1, 1, 1)}
    twice = {k: v.repeat(times[v.ndim]) for k, v in given.items()}
    if "input_features" in twice:
        twice["input_features"] = given["input_features"].repeat(2, 1, 1)
    if "attention_mask" in twice:
        twice["attention_mask"][0, :5] = 0
        twice["token_type_ids"] = torch.zeros_like(twice["input_ids"])
    return twice


# What the engines answer, by no code of headprune's.


def by_onnxruntime(file: Path, inputs: dict[str, Tensor]) -> list[Tensor]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    given = {i.name: inputs[i.name].numpy() for i in session.get_inputs()}
    return [torch.from_numpy(t) for t in session.run(None, given)]


def by_openvino(folder: Path, inputs: dict[str, Tensor]) -> list[Tensor]:
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


def check(own: list[Tensor], expected: list[Tensor], tolerance: float = 1e-4) -> None:
    for a, b in zip(own, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))


SLOW = {row for row in TABLE if row[0] in ("onnx", "openvino")} - FAST


ROWS = [pytest.param(*row, marks=[pytest.mark.slow] * (row in SLOW)) for row in TABLE]


@pytest.mark.parametrize(("to", "name", "kind"), ROWS)
def test_the_engine_gives_the_models_answers(to: str, name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[to])
    model, example = made(to, name, kind)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    coder = bytewise() if to == "gguf" else None
    done = hp.export(model, tmp_path / f"file{SUFFIXES[to]}", to, processor=coder)
    assert done.proved
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    if to == "gguf":
        return check_text(done.path, model, coder)
    if to == "stock":
        plain = type(model).from_pretrained(done.path).eval()
        assert not {"auto_map", "headprune"} & json.loads((done.path / "config.json").read_text()).keys()
        return check(outputs(plain, other(example, [])), outputs(model, other(example, [])), 1e-5)
    inputs = other(example, list(done.facts["inputs"]))
    assert all(shape[0] == "batch" for shape in done.facts["inputs"].values())
    if "input_ids" in inputs:
        assert done.facts["inputs"]["input_ids"] == ["batch", "length"]
    assert to != "onnx" or str(Path(hp.__file__).parent).encode() not in done.path.read_bytes()
    own = (by_onnxruntime if to == "onnx" else by_openvino)(done.path, inputs)
    return check(own, outputs(model, {k: v for k, v in inputs.items() if k in done.facts["inputs"]}))


def check_text(file: Path, model: Any, coder: Any) -> None:
    """llama.cpp writes the same greedy text, with the same log-probabilities at every token."""
    prompt = coder("Once upon a time")["input_ids"]
    size = model.config.vocab_size
    # llama.cpp tells a token only once it is whole text.
    halves = [i for i in range(size) if i >= len(coder) or i < 2 or not coder.decode([i]).isascii()]
    how = {"max_new_tokens": 20, "do_sample": False, "suppress_tokens": halves, "pad_token_id": 0}
    ids = model.generate(torch.tensor([prompt]), **how)
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0].log_softmax(-1)
    steps = by_llama_cpp(file, prompt, 20, logit_bias=[[i, False] for i in halves])
    assert [token for token, _ in steps] == ids[0, len(prompt) :].tolist()
    for place, (_, told) in enumerate(steps, len(prompt) - 1):
        close = torch.tensor(list(told.values()))
        torch.testing.assert_close(close, expected[place, list(told)], rtol=0, atol=2e-3)


# -- what is refused, or not kept -------------------------------------------------------------------


def edited(edit: Callable[[Any], Any]) -> Any:
    model = llama()
    edit(model.model)
    return model


class Choosing(Summed):
    """A model that looks at its input to choose what to do."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.outer(self.inner(x)) if x.sum() > 0 else x


def granite(**scales: float) -> Any:
    return tf.GraniteForCausalLM(tf.GraniteConfig(**settings(**scales)))


def repaired_mistral() -> Any:
    model, example = plain_mistral()
    plan = even_plan(model, example)
    hp.repair(model, plan, [labelled(model, example, seed) for seed in range(2)])
    hp.prune(model, plan, example)
    return model


def wordwise() -> Any:
    raw = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "another family": ("gguf", lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_head=4, n_layer=1)), "no model.embed_tokens"),
    "norms of queries": ("gguf", lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**settings())), r"Layer 0: self_attn\.\w_norm\.weight has"),
    "more norms": ("gguf", lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**settings())), "Layer 0"),
    "experts": ("gguf", lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**settings(num_local_experts=2))), "Layer 0: mlp"),
    "another activation": ("gguf", lambda: llama(hidden_act="gelu"), "Layer 0 of LlamaForCausalLM does not compute"),
    "scales": ("gguf", lambda: granite(residual_multiplier=0.5), "Layer 0 of GraniteForCausalLM does not compute"),
    "scales at the end": ("gguf", lambda: granite(logits_scaling=1.05), "After its last layer GraniteForCausalLM does not"),
    "a sliding window": ("gguf", lambda: mistral(sliding_window=16), "Layer 0 sees 16 tokens back"),
    "a sliding window in one layer": ("gguf", lambda: qwen2(use_sliding_window=True, sliding_window=16, max_window_layers=2), "Layer 2 sees 16"),
    "positions that change with length": ("gguf", lambda: scaled("dynamic"), "'dynamic' change with"),
    "half of a head rotated": ("gguf", lambda: edited(lambda m: setattr(m.rotary_emb, "inv_freq", m.rotary_emb.inv_freq[:2])), "4 of a head's 8 features are rotated"),
    "groups of different sizes": ("gguf", lambda: edited(lambda m: setattr(m.layers[1].self_attn.q_proj, "weight", nn.Parameter(torch.ones(40, 48)))), "Layer 1: 40 query, 24 key and 24 value features"),
    "another epsilon": ("gguf", lambda: edited(lambda m: setattr(m.layers[2].input_layernorm, "variance_epsilon", 1e-2)), r"model\.layers\.2\.input_layernorm"),
    "half precision in memory": ("gguf", lambda: llama().bfloat16(), "bfloat16 on cpu"),
    "infinite weights": ("gguf float16", lambda: edited(lambda m: m.layers[1].mlp.up_proj.weight.data.fill_(1e5)), r"blk\.1\.ffn_up\.weight holds numbers too large for torch.float16"),
    "no such type": ("onnx bfloat16", summed, "no type 'bfloat16'.*Choose from float32, float16"),
    "a choice by values": ("onnx", lambda: summed(Choosing), r"torch\.export does not take Choosing"),
    "inputs of no known form": ("onnx", lambda: randomise(Summed()), "not known what Summed takes"),
    "uneven heads": ("stock", lambda: even("bert")[0], "BertForSequenceClassification.*trust_remote_code=True"),
    "a bias without a flag": ("stock", repaired_mistral, r"o_proj\.bias has no place \(a repair gave it\)"),
}  # fmt: skip
TOKENIZERS_REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, "no tokenizer with a tokenizer.json"),
    "words": (wordwise, "WordLevel"),
    "more tokens than embeddings": (lambda: bytewise(vocab_size=400), "only 331 embeddings"),
    "a space before": (lambda: bytewise(pre_tokenizers.ByteLevel(add_prefix_space=True)), "none of the ways"),
    "whole words first": (lambda: bytewise(ignore_merges=True), "looks up whole words"),
    "another end": (lambda: bytewise(post="<|begin|> $A <|begin|>"), "bos and eos tokens only"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, *TOKENIZERS_REFUSED])
def test_what_a_format_cannot_express_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coder, message = TOKENIZERS_REFUSED.get(name, (bytewise, ""))
    to, build, message = REFUSED.get(name, ("gguf", llama, message))
    to, _, dtype = to.partition(" ")
    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", lambda *_: pytest.fail("something was written"))
    model, file = build().eval(), tmp_path / f"file.{to}"
    with pytest.raises(HeadPruneError, match=message) as caught:
        hp.export(model, file, to, processor=coder(), dtype=dtype or "float32")
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_reads_texts_as_the_same_tokens(name: str, tmp_path: Path) -> None:
    coder = TOKENIZERS[name]()
    coder.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    if name == "qwen2":
        coder.backend_tokenizer.normalizer = normalizers.NFC()
    model = llama(vocab_size=len(coder) + 3, num_hidden_layers=1)
    done = hp.export(model, tmp_path / "model.gguf", processor=coder)
    assert done.facts["tokenizer"] == name.partition(",")[0]
    assert ("NFC" in " ".join(done.notes)) == (name == "qwen2")
    ((_, told),) = by_llama_cpp(done.path, "it's 2024: naïve café – 東京", 1) if done.proved else [(0, {})]
    ids = torch.tensor([coder("it's 2024: naïve café – 東京")["input_ids"]])
    expected = model(input_ids=ids).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(torch.tensor(list(told.values())), expected[list(told)], rtol=0, atol=1e-3)
    fields = {k: v.contents() for k, v in gguf.GGUFReader(done.path).fields.items() if k.startswith("tokenizer.")}
    assert fields["tokenizer.chat_template"] == coder.chat_template
    assert fields["tokenizer.ggml.add_bos_token"] == any(kind in name for kind in ("llama-bpe", "tekken", "default"))
    assert fields["tokenizer.ggml.eos_token_id"] == coder.eos_token_id
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens[: len(coder)] == coder.convert_ids_to_tokens(range(len(coder)))
    assert tokens[len(coder) :] == [f"[PAD{len(coder) + i}]" for i in range(3)]


WRITE, COUNT, RUN = gguf.GGUFWriter.write_tensor_data, gguf.GGUFWriter.add_block_count, onnxruntime.InferenceSession.run
WRONG: dict[str, tuple[str, Callable[[], Any], Any, str, Callable[..., Any], str]] = {
    "weights": ("gguf", llama, gguf.GGUFWriter, "write_tensor_data", lambda self, t: WRITE(self, t[::-1].copy()), "log-probabilities are"),
    "a count": ("gguf", llama, gguf.GGUFWriter, "add_block_count", lambda self, n: COUNT(self, n + 1), r"llama\.cpp does not run the file: ."),
    "answers": ("onnx", summed, onnxruntime.InferenceSession, "run", lambda *given: [t + 1e-3 * abs(t).max() for t in RUN(*given)], "value off"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_with_other_answers_is_not_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    to, build, where, method, wrong, message = WRONG[name]
    file = tmp_path / f"model.{to}"
    file.write_text("an earlier file")
    with pytest.raises(HeadPruneError, match="exists"):
        hp.export(build(), file, to, processor=bytewise())
    monkeypatch.setattr(where, method, wrong)
    with pytest.raises(HeadPruneError, match=message):
        hp.export(build(), file, to, processor=bytewise(), overwrite=True)
    assert file.read_text() == "an earlier file"
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("package", ["gguf", "onnxruntime", "openvino", "xllamacpp"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, to = importlib.util.find_spec, {"onnxruntime": "onnx", "xllamacpp": "gguf"}.get(package, package)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == package else real(name, *more))
    file = tmp_path / f"model.{to}"
    if package == "xllamacpp":
        done = hp.export(llama(), file, to, processor=bytewise())
        assert not done.proved
        assert "not tried in llama.cpp" in done.summary
        return
    with pytest.raises(HeadPruneError, match=rf'{package} must be installed.*pip install "headprune\[{to}\]"'):
        hp.export(llama(), file, to, processor=bytewise())


@pytest.mark.slow
def test_a_file_in_parts_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any rename, the parts of two files are never together; the next export takes the place of what is there."""
    pytest.importorskip("torch.onnx._internal.exporter._onnx_program")
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1)
    first, second, x, replace = summed(), summed(), torch.ones(1, 3, 8), os.replace
    second.inner.weight.data.neg_()
    whole = tmp_path / "whole"
    whole.mkdir()
    done = hp.export(first, whole / "model.onnx", "onnx")
    assert {p.name for p in whole.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert done.facts["bytes"] == sum(p.stat().st_size for p in whole.iterdir())
    for renames in range(3):
        file, left = tmp_path / str(renames) / "model.onnx", [renames]
        shutil.copytree(whole, file.parent)

        def stopping(one: Any, other: Any, folder: Path = file.parent, left: list[int] = left) -> None:
            left[0] -= Path(other).parent == folder
            if left[0] < 0:
                raise KeyboardInterrupt
            replace(one, other)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) if renames < 2 else nullcontext():
            patch.setattr(os, "replace", stopping)
            hp.export(second, file, "onnx", overwrite=True)
        assert file.exists() == (renames == 2)
        if renames < 2:
            hp.export(first, file, "onnx", overwrite=True)
        torch.testing.assert_close(by_onnxruntime(file, {"x": x})[0], (first if renames < 2 else second)(x)["summed"])
    monkeypatch.undo()
    hp.export(first, whole / "model.onnx", "onnx", overwrite=True)
    assert [p.name for p in whole.iterdir()] == ["model.onnx"]  # without the weights of the file before


# -- the commands: `headprune export`, `bench` and `prune --export` --------------------------------


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
    dtypes = ("float32", "float16", "bfloat16")
    whole, *halves = (hp.export(model, tmp_path / f"{d}.gguf", processor=bytewise(), dtype=d) for d in dtypes)
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

    files = [
        hp.export(summed(), tmp_path / "plain.onnx", "onnx"),
        hp.export(summed(Scaled, scale=torch.ones(2, 5, 1)), tmp_path / "scaled.onnx", "onnx"),
    ]
    assert files[0].facts["inputs"] == {"x": ["batch", "length", 8]}
    assert files[0].facts["outputs"] == ["summed", "x_out"]  # an output may have an input's name
    timed = run("bench", *(f.path for f in files), "--batch-sizes", "2", "--lengths", "4,6", "--json")
    rows = json.loads(timed.stdout)["rows"]
    assert [(row["batch"], row["length"]) for row in rows] == [(2, 4), (2, 6)]
    assert all(timing["runs"] >= 3 for row in rows for timing in row["timings"].values())
    assert "does not exist" in stderr_of("bench", files[0].path, tmp_path / "none.onnx", code=1)
    assert "Only one" in stderr_of("bench", files[0].path, tmp_path, code=1)


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


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_pruned_models_are_exported(data_folder: Path, here: Path) -> None:
    """By one format that can express them, and by one that has no place for their tokenizer."""
    pytest.importorskip("gguf")
    randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**common()))).save_pretrained("m")
    tokenizer().save_pretrained("m")
    quick = ("-L", 20, "-m", "gradient", "-s", "uniform", "--no-repair", "-q")
    exports = ("--export", "gguf", "--export", "stock", "--json")
    found = run("prune", "m", "-d", data_folder, *quick, "-k", 4, "-k", 2, "-o", "run", *exports)
    metrics = json.loads(found.stdout)
    made = {(m["format"], m["checkpoint"]): m for m in metrics["exports"]}
    assert made.keys() == {(f, c) for f in ("gguf", "stock") for c in ("pruned-4", "pruned-2")}
    report, loads = (here / "run" / "report.md").read_text(), "AutoModelForCausalLM.from_pretrained(folder)"
    assert f"| `{loads}` |" in report
    assert [b["loads"] for b in metrics["budgets"]] == [loads] * 2  # what is pruned uniformly needs no code, either
    assert all(len(heads) == (8 - b["kept"]) / 2 for b in metrics["budgets"] for heads in b["drop"].values())
    for keep in (4, 2):
        one = made["stock", f"pruned-{keep}"]
        plain = tf.LlamaForCausalLM.from_pretrained(here / "run" / one["file"])
        assert plain.num_parameters() == hp.load(here / "run" / f"pruned-{keep}").num_parameters()
        assert f"| {keep} heads | stock | `{one['file']}`: {one['summary'][:9]}" in report
        refused = made["gguf", f"pruned-{keep}"]
        assert refused["file"] is None  # and the rest of the run is there
        assert f"| {keep} heads | gguf | not written: {refused['summary'][:30]}" in report


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


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_encoder_decoders_are_timed_there(here: Path) -> None:
    """At its end the run failed: the file takes the decoder's tokens, and the inputs that are timed have labels."""
    small = {"vocab_size": 30, "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48}
    config = tf.T5Config(**small, decoder_start_token_id=0)
    randomise(tf.T5ForConditionalGeneration(config)).save_pretrained("m")
    tokenizer().save_pretrained("m")
    rows = [{"document": row["text"], "summary": str(row["text"])[:9]} for row in sentences(60, 1)]
    write_jsonl(here / "d.jsonl", rows)
    run(*PRUNE, 12, "m", "-d", "d.jsonl", "-L", 20, "-m", "weight-norm", "--no-repair", "-o", "run", "--export", "onnx")
    (engine,) = metrics_of(here / "run")["engines"]
    assert [set(row["timings"]) for row in engine["rows"]] == [{"dense", "12 heads"}] * 2
