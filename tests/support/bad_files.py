"""Bad inputs, as `tests.support.bad_inputs` has them: data, folders of models, folders that headprune saved, calls from Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.bad_inputs import GONE, NESTED, Row

# -- data -----------------------------------------------------------------------------------------------------------


def rows(count: int = 40, **other: Any) -> str:
    """Lines of JSON; ``other`` is in row 3 in the place of what is right."""
    lines: list[dict[str, Any]] = [{"text": f"good film {'very ' * i}", "label": i % 2} for i in range(count)]
    lines[3].update(other)
    return "\n".join(json.dumps({k: v for k, v in line.items() if v is not GONE}) for line in lines)


def of_data(file: str, content: str | bytes, says: str, *more: str) -> Row:
    """A data file that is scored."""
    return Row(("score", "{bert}", "-d", f"{{made}}/{file}", "-m", "gradient", *more), says, 1, {file: content})


DATA: list[Row] = [
    of_data("a.jsonl", rows(text=5), "a.jsonl"),
    of_data("a.jsonl", rows(text=None), "Row 3 of a.jsonl .*holds no text"),
    of_data("a.jsonl", rows(text=["a"]), "a.jsonl"),
    of_data("a.jsonl", rows(label=7), "Row 3 of a.jsonl .*label 7 does not fit"),
    of_data("a.jsonl", rows(label=-2), "Row 3 of a.jsonl .*label -2 does not fit"),
    of_data("a.jsonl", rows(label=0.5), "Row 3 of a.jsonl .*label 0.5 does not fit"),
    of_data("a.jsonl", rows(label=None), "Row 3 of a.jsonl .*label"),
    of_data("a.jsonl", rows(label=10**30), "a.jsonl"),
    of_data("a.jsonl", rows().replace('"label": 1', '"label": "maybe"').replace('"label": 0', '"label": "no"'), "none of the model's"),
    of_data("a.jsonl", rows().replace("label", "colour"), "No column looks like the label: the columns are"),
    of_data("a.jsonl", rows().replace("text", "colour"), "No column looks like the text"),
    of_data("a.jsonl", rows(), "no column 'nothing'", "--text-column", "nothing"),
    of_data("a.jsonl", rows(), "no column 'nothing'", "--label-column", "nothing"),
    of_data("a.jsonl", rows(), "no usable split 'test'", "--report-split", "test"),
    of_data("a.jsonl", rows(2 + 2), "too few rows"),
    of_data("a.jsonl", "\n\n\n", "a.jsonl"),
    of_data("a.jsonl", "null\n" * 20, "line 1: it holds null instead of a JSON object"),
    of_data("a.jsonl", '{"text": "a", "label": 1}\n' * 40, "repeat an input"),
    of_data("a.jsonl", '{"text": "a", "label": -1}\n' * 40, "no labelled rows"),
    of_data("a.jsonl", '{"text": "\ud800", "label": 1}\n'.encode("utf-8", "surrogatepass") * 40, "Row .* of a.jsonl .*cannot be read: UnicodeDecodeError|line 1: .*utf-8"),
    of_data("a.jsonl", rows().encode("utf-16"), "line 1: .*utf-8"),
    of_data("a.jsonl", b"\x1f\x8b\x08\x00junk", "a.jsonl"),
    of_data("a.jsonl", NESTED, "a.jsonl"),
    of_data("a.json", "[]", "a.json"),
    of_data("a.json", "3", "a.json"),
    of_data("a.json", '{"text": "a"', "a.json cannot be read as a dataset"),
    of_data("a.csv", "text,label\n", "holds no rows|no labelled rows|too few"),
    of_data("a.csv", "text,label\na;b\n" * 20, "a.csv|label"),
    of_data("a.csv", 'text,label\n"a,1\n' * 5, "EOF inside string"),
    of_data("a.csv", "\x00" * 100, "a.csv"),
    of_data("a.csv", "text,text,label\n" + "a,b,1\n" * 40, "a.csv|text|repeat"),
    of_data("a.tsv", "text,label\n" + "a,1\n" * 40, "No column looks like"),
    of_data("a.txt", "good\nbad\n" * 40, "No column looks like the label"),
    of_data("a.parquet", b"PAR1" + b"\x00" * 50 + b"PAR1", "a.parquet cannot be read as a dataset"),
    of_data("a.parquet", rows(), "a.parquet cannot be read as a dataset"),
    Row(("score", "{bert}", "-d", "{made}", "-m", "random"), "cannot be read as a dataset|line 1", 1, {"train.jsonl": "{"}),
    Row(("score", "{bert}", "-d", "{made}", "-m", "random"), "a.md|cannot be read", 1, {"a.md": "# nothing\n"}),
    Row(("score", "{bert}", "-d", "{made}", "-m", "random"), "cannot be read", 1, {"state.json": "{", "dataset_info.json": "{}"}),
    Row(("score", "{bert}", "-d", "{made}", "-m", "random"), "cannot be read", 1, {"dataset_dict.json": "[]"}),
    Row(("score", "{bert}", "-d", "{made}", "-m", "random"), "cannot be read", 1, {"train.csv": b"\xff\xfe\x00"}),
    Row(("score", "{bert}", "-d", "{made}", "-m", "random"), "cannot be read", 1, {
        "data.py": "raise SystemExit('ran')", "a.jsonl": "{"}),
]  # fmt: skip


# -- folders of models ----------------------------------------------------------------------------------------------

INSPECT = ("inspect", "{made}")
BENCH = ("bench", "{made}", "{made}")  # which, unlike inspect, asks for a task
TAKEN = ("score", "{made}", "-d", "{data}", "-m", "random", "-L", "10")


def config(where: str, value: Any, says: str, typed: tuple[str, ...] = INSPECT) -> Row:
    """A model's folder with another value in its config.json."""
    return Row(typed, says, 1, {"config.json": ((where,), value)})


MODELS: list[Row] = [
    config("model_type", GONE, "config.json"),
    config("model_type", 3, "config.json"),
    config("model_type", "nothing", "nothing"),
    config("architectures", GONE, "task of .* cannot be read", BENCH),
    config("architectures", 5, "task of|config.json", BENCH),
    config("architectures", [], "task of .* cannot be read", BENCH),
    config("architectures", [None], "task of .* cannot be read", BENCH),
    config("architectures", ["MadeUp"], "task of .* cannot be read from its architecture .MadeUp", BENCH),
    config("hidden_size", -32, "config.json|does not load"),
    config("hidden_size", 33, "config.json|does not load"),
    config("hidden_size", "big", "config.json|does not load"),
    config("num_attention_heads", 0, "config.json|does not load"),
    config("num_attention_heads", 5, "config.json|does not load"),
    config("num_attention_heads", True, "config.json|does not load"),
    config("num_hidden_layers", 3, "no weights for"),
    config("vocab_size", 31, "does not load|config.json"),
    config("vocab_size", None, "does not load|config.json"),
    config("hidden_act", "eval", "does not load|config.json"),
    config("dtype", "object", "config.json|does not load"),
    config("attn_implementation", "someone/kernel", "attention kernel someone/kernel"),
    config("id2label", {"x": 1}, "config.json|does not load"),
    Row(INSPECT, "config.json", 1, {"config.json": NESTED}),
    Row(INSPECT, "config.json", 1, {"config.json": "null"}),
    Row(INSPECT, "damaged or cut short|does not load", 1, {"model.safetensors": b"\x00" * 4}),
    Row(INSPECT, "damaged or cut short|does not load", 1, {"model.safetensors": b"\xff" * 64}),
    Row(INSPECT, "damaged or cut short|does not load", 1, {"model.safetensors": (10**6).to_bytes(8, "little") + b"{}"}),
    Row(INSPECT, "does not load|no weights", 1, {"model.safetensors": (2).to_bytes(8, "little") + b"{}"}),
    Row(INSPECT, "does not load", 1, {"model.safetensors": None}),
    Row(INSPECT, "does not load", 1, {"model.safetensors": None, "model.safetensors.index.json": "{"}),
    Row(INSPECT, "does not load", 1, {
        "model.safetensors": None, "model.safetensors.index.json": '{"weight_map": {"a": "../../../etc/passwd"}}'}),
    Row(TAKEN, "tokenizer", 1, {"tokenizer.json": "{"}),
    Row(TAKEN, "tokenizer", 1, {"tokenizer.json": NESTED}),
    Row(TAKEN, "tokenizer", 1, {"tokenizer.json": None, "tokenizer_config.json": None}),
    Row(TAKEN, "tokenizer|code", 1, {"tokenizer_config.json": '{"tokenizer_class": "os.system"}', "tokenizer.json": None}),
    Row(TAKEN, "tokenizer|trust-remote-code", 1, {
        "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}, "tokenizer_class": "Evil"}',
        "tokenizer.json": None, "evil.py": "raise SystemExit('ran')"}),
]  # fmt: skip


# -- folders that headprune saved -----------------------------------------------------------------------------------


def sidecar(where: tuple[Any, ...], value: Any, says: str) -> Row:
    """A pruned folder with another value in its headprune.json."""
    return Row(("inspect", "{pruned}"), says, 1, {"headprune.json": (where, value)})


SAVED: list[Row] = [
    sidecar(("fingerprint",), GONE, "headprune.json is damaged: fingerprint is None"),
    sidecar(("fingerprint",), "0" * 16, "not those that were saved"),
    sidecar(("about",), [], r"headprune.json is damaged: about is \[\]"),
    sidecar(("heads",), {"L0": True}, "headprune.json is damaged: heads"),
    sidecar(("heads",), 4, "headprune.json is damaged: heads is 4"),
    sidecar(("removed",), {"a": 1}, "headprune.json is damaged: removed"),
    sidecar(("removed",), [{"bert": [0, 0]}], "headprune.json is damaged: removed"),
    sidecar(("removed",), [{"bert": [-1]}], "headprune.json is damaged: removed"),
    sidecar(("structure",), [1], "do not fit"),
    sidecar(("structure", "version"), 99, "newer headprune"),
    sidecar(("structure", "modules"), [], "do not fit"),
    sidecar(("structure", "modules"), {"no.such": {"empty": {}}}, "do not fit|not those"),
    sidecar(("structure", "modules"), {}, "do not fit"),
    sidecar(("class",), "builtins.eval", "cannot build"),
    sidecar(("class",), ["x"], "cannot build"),
    sidecar(("weights",), "../model.safetensors", "as its weights"),
    sidecar(("schema",), 2, "has format 2"),
    sidecar(("schema",), True, "has format True"),
    sidecar(("headprune",), "plan", "does not hold headprune's checkpoint"),
    Row(("inspect", "{pruned}"), "headprune.json is not readable", 1, {"headprune.json": NESTED}),
    Row(("inspect", "{pruned}"), "headprune.safetensors is damaged", 1, {"headprune.safetensors": b"\x00" * 30}),
    Row(("inspect", "{pruned}"), "headprune.safetensors is damaged", 1, {"headprune.safetensors": (2).to_bytes(8, "little") + b"{}"}),
    Row(("inspect", "{pruned}"), "damaged or cut short", 1, {"model.safetensors": b"\x00" * 30}),
    Row(("inspect", "{pruned}"), "config.json", 1, {"config.json": None}),
    Row(("finetune", "{pruned}", "-d", "{data}"), "does not say which model it was made from", 1, {
        "headprune.json": (("about",), {"from": 3})}),
    Row(("finetune", "{pruned}", "-d", "{data}"), "no model can have this name.*--teacher", 1, {
        "headprune.json": (("about",), {"from": "../elsewhere/gone"})}),
    Row(("export", "{pruned}", "--to", "onnx"), "damaged or cut short", 1, {"model.safetensors": b"\x00" * 30}),
    Row(("push", "{pruned}", "a/b/c"), "no name of a repository", 1, {}),
    Row(("push", "{pruned}", ""), "could not be pushed", 1, {}),
]  # fmt: skip


# -- Python ---------------------------------------------------------------------------------------------------------

Call = Callable[[Any, Any, Any], Any]  # hp, a tiny model, its example

PYTHON: list[tuple[str, Call, str]] = [
    ("a head that is not there", lambda hp, m, x: hp.prune(m, {"L0": [9]}, x), "has no head 9"),
    ("a negative head", lambda hp, m, x: hp.prune(m, {"L0": [-1]}, x), "has no head -1"),
    ("a head that is true", lambda hp, m, x: hp.prune(m, {"L0": [True]}, x), "no list of heads"),
    ("half a head", lambda hp, m, x: hp.prune(m, {"L0": [0.5]}, x), "no list of heads"),
    ("a head twice", lambda hp, m, x: hp.prune(m, {"L0": [1, 1]}, x), "head 1 is listed twice"),
    ("a layer twice", lambda hp, m, x: hp.prune(m, {"L0": [1], hp.find_attention(m, x)[0].name: [2]}, x), "named twice"),
    ("a layer that is not there", lambda hp, m, x: hp.prune(m, {"L7": [0]}, x), "no attention layer named 'L7'"),
    ("a layer that is a number", lambda hp, m, x: hp.prune(m, {0: [0]}, x), "no attention layer named 0"),
    ("no dict", lambda hp, m, x: hp.prune(m, [0, 1], x), "does not say which heads"),
    ("no plan", lambda hp, m, x: hp.prune(m, None, x), "does not say which heads"),
    ("to mask a head that is not there", lambda hp, m, x: hp.mask(m, {"L0": [4]}, x).__enter__(), "has no head 4"),
    ("a method that is none", lambda hp, m, x: hp.score(m, [x], method="guess"), "no scoring method 'guess'"),
    ("no batches", lambda hp, m, x: hp.score(m, [], method="gradient"), "no examples to score on"),
    ("a batch of nothing", lambda hp, m, x: hp.score(m, [{}], method="gradient"), "batch|example|input"),
    ("no model's batches", lambda hp, m, x: hp.score(m, None, method="gradient"), "batches"),
    ("a folder that is not there", lambda hp, m, x: hp.load("nowhere/at/all"), "no folder nowhere"),
    ("a folder with a NUL", lambda hp, m, x: hp.load("a\0b"), "no folder"),
    ("a plan that is not there", lambda hp, m, x: hp.PruningPlan.load("gone.json"), "no file gone.json"),
    ("a plan with a NUL", lambda hp, m, x: hp.PruningPlan.load("a\0b"), "not readable"),
    ("scores that are not there", lambda hp, m, x: hp.HeadScores.load("gone.json"), "no file gone.json"),
    ("a budget that is none", lambda hp, m, x: hp.search(m, [x], keep="many"), "not a number of heads|no budget"),
    ("a budget that is NaN", lambda hp, m, x: hp.search(m, [x], keep=float("nan")), "not a number of heads"),
    ("a budget of more than all", lambda hp, m, x: hp.search(m, [x], keep=10**9), "more than all|keeps all|label|loss"),
    ("an export to nothing", lambda hp, m, x: hp.export(m, "x.bin", to="luck"), "no export format 'luck'"),
    ("an export to gguf of no type", lambda hp, m, x: hp.export(m, "x.gguf", to="gguf", dtype="int3"), "no type 'int3'"),
]  # fmt: skip
