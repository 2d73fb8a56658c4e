"""Bad inputs, as `tests.support.bad_inputs` has them: data, folders of models, folders that headprune saved, calls from Python."""

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


LABELS: dict[str, Any] = {"7": 7, "-2": -2, "0.5": 0.5, "": None}
NAMES = rows().replace('"label": 1', '"label": "maybe"').replace('"label": 0', '"label": "no"')
SURROGATE = '{"text": "\ud800", "label": 1}\n'.encode("utf-8", "surrogatepass") * 40
ANY_FILE = r"a\.(jsonl?|csv|parquet)"  # the error names it
DATA: list[Row] = [
    *(of_data("a.jsonl", rows(text=text), "Row 3 of a.jsonl .*holds no text|a.jsonl cannot be read") for text in (5, None, ["a"])),
    *(of_data("a.jsonl", rows(label=label), f"Row 3 of a.jsonl .*label {text}") for text, label in LABELS.items()),
    of_data("a.jsonl", rows(label=10**30), "a.jsonl"),
    of_data("a.jsonl", NAMES, "label '(maybe|no)' does not fit the model's head, which has 2 classes .negative, positive"),
    of_data("a.jsonl", rows().replace("label", "colour"), "No column looks like the label: the columns are"),
    of_data("a.jsonl", rows().replace("text", "colour"), "No column looks like the text"),
    *(of_data("a.jsonl", rows(), f"no column 'nothing' .{flag}", flag, "nothing") for flag in ("--text-column", "--label-column")),
    of_data("a.jsonl", rows(), "no usable split 'test'", "--report-split", "test"),
    of_data("a.jsonl", '{"text": "a", "label": 1}\n' * 40, "repeating an input"),
    of_data("a.jsonl", '{"text": "a", "label": -1}\n' * 40, "no labelled rows"),
    of_data("a.jsonl", SURROGATE, "Row .* of a.jsonl .*cannot be read: UnicodeDecodeError|line 1: .*utf-8"),
    *(of_data("a.jsonl", text, ANY_FILE) for text in ("\n\n\n", b"\x1f\x8b\x08\x00junk", NESTED)),
    *(of_data("a.json", text, ANY_FILE) for text in ("[]", "3", '{"text": "a"')),
    *(of_data("a.csv", text, ANY_FILE) for text in ("text,label\na;b\n" * 20, "\x00" * 100, "text,text,label\n" + "a,b,1\n" * 40)),
    of_data("a.csv", "text,label\n", "holds no rows|no labelled rows|too few|a.csv"),
    of_data("a.txt", "good\nbad\n" * 40, "No column looks like the label"),
    *(Row(("score", "{bert}", "-d", "{made}", "-m", "random"), "cannot be read as a dataset|cannot be read or written", 1, files) for files in (
        {"a.md": "# nothing\n"}, {"state.json": "{", "dataset_info.json": "{}"}, {"dataset_dict.json": "[]"},
        {"train.csv": b"\xff\xfe\x00"}, {"data.py": "raise SystemExit('ran')", "a.jsonl": "{"})),
]  # fmt: skip


# -- folders of models ----------------------------------------------------------------------------------------------

INSPECT = ("inspect", "{made}")
BENCH = ("bench", "{made}", "{made}")  # which, unlike inspect, asks for a task
TAKEN = ("score", "{made}", "-d", "{data}", "-m", "random", "-L", "10")


def config(where: str, value: Any, says: str, typed: tuple[str, ...] = INSPECT) -> Row:
    """A model's folder with another value in its config.json."""
    return Row(typed, says, 1, {"config.json": ((where,), value)})


BAD_CONFIGS: list[tuple[str, Any]] = [
    ("model_type", GONE), ("model_type", 3), ("hidden_size", -32), ("hidden_size", 33), ("hidden_size", "big"), ("num_attention_heads", 0),
    ("num_attention_heads", 5), ("num_attention_heads", True), ("vocab_size", 31), ("vocab_size", None), ("hidden_act", "eval"),
    ("dtype", "object"), ("id2label", {"x": 1}),
]  # fmt: skip
MODELS: list[Row] = [
    *(config(where, value, "config.json|does not load") for where, value in BAD_CONFIGS),
    *(config("architectures", value, "task of .* cannot be read|config.json", BENCH) for value in (GONE, 5, [], [None], ["MadeUp"])),
    config("model_type", "nothing", "nothing"),
    config("num_hidden_layers", 3, "no weights for"),
    config("attn_implementation", "someone/kernel", "attention kernel someone/kernel"),
    *(Row(INSPECT, "config.json", 1, {"config.json": text}) for text in (NESTED, "null")),
    *(Row(INSPECT, "damaged or cut short|does not load|no weights", 1, {"model.safetensors": weights}) for weights in (
        b"\x00" * 4, b"\xff" * 64, (10**6).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"{}")),
    *(Row(TAKEN, "The weights in .*made are damaged or cut short", 1, {"model.safetensors": size}) for size in (0, 1000, -1)),
    Row(INSPECT, "does not load", 1, {"model.safetensors": None}),
    Row(INSPECT, "does not load", 1, {"model.safetensors": None, "model.safetensors.index.json": "{"}),
    Row(INSPECT, "does not load", 1, {
        "model.safetensors": None, "model.safetensors.index.json": '{"weight_map": {"a": "../../../etc/passwd"}}'}),
    *(Row(TAKEN, "tokenizer", 1, files) for files in (
        {"tokenizer.json": "{"}, {"tokenizer.json": NESTED}, {"tokenizer.json": None, "tokenizer_config.json": None})),
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
    *(sidecar(("heads",), value, "headprune.json is damaged: heads") for value in ({"L0": True}, 4)),
    *(sidecar(("removed",), value, "headprune.json is damaged: removed") for value in ({"a": 1}, [{"bert": [0, 0]}], [{"bert": [-1]}])),
    sidecar(("structure",), [1], "do not fit"),
    sidecar(("structure", "version"), 99, "newer headprune"),
    *(sidecar(("structure", "modules"), value, "do not fit|not those") for value in ([], {"no.such": {"empty": {}}}, {})),
    *(sidecar(("schema",), value, f"has format {value}") for value in (2, True)),
    sidecar(("headprune",), "plan", "does not hold headprune's checkpoint"),
    Row(("inspect", "{pruned}"), "headprune.json is not readable", 1, {"headprune.json": NESTED}),
    *(Row(("inspect", "{pruned}"), "headprune.safetensors is damaged", 1, {"headprune.safetensors": weights}) for weights in (
        b"\x00" * 30, (2).to_bytes(8, "little") + b"{}")),
    *(Row(("inspect", "{pruned}"), "damaged or cut short", 1, {"model.safetensors": weights}) for weights in (b"\x00" * 30, 0, 1000, -1)),
    Row(("inspect", "{pruned}"), "config.json", 1, {"config.json": None}),
    *(Row(("finetune", "{pruned}", "-d", "{data}", *more.split()), says, 1, {}) for more, says in (
        ("--teacher nobody/nothing", "no model 'nobody"), ("--teacher {llama}", "not trained for sequence"), ("-o {data}", "exists and is not empty"),
        ("-o {data} --overwrite", "did not write"), ("--dtype float16", "float16"), ("--device cuda", "no device .cuda."))),
    Row(("finetune", "{pruned}"), "Name the dataset with -d", 1, {}),
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
    ("no dict", lambda hp, m, x: hp.prune(m, [0, 1], x), "does not say which heads"),
    ("to mask a head that is not there", lambda hp, m, x: hp.mask(m, {"L0": [4]}, x).__enter__(), "has no head 4"),
    ("a method that is none", lambda hp, m, x: hp.score(m, [x], method="guess"), "no scoring method 'guess'"),
    ("no batches", lambda hp, m, x: hp.score(m, [], method="gradient"), "no examples to score on"),
    ("no model's batches", lambda hp, m, x: hp.score(m, None, method="gradient"), "batches"),
    ("a folder that is not there", lambda hp, m, x: hp.load("nowhere/at/all"), "no folder nowhere"),
    ("a folder with a NUL", lambda hp, m, x: hp.load("a\0b"), "no folder"),
    ("a plan that is not there", lambda hp, m, x: hp.PruningPlan.load("gone.json"), "no file gone.json"),
    ("a budget that is none", lambda hp, m, x: hp.search(m, [x], keep="many"), "not a number of heads|no budget"),
    ("an export to nothing", lambda hp, m, x: hp.export(m, "x.bin", to="luck"), "no export format 'luck'"),
    ("an export to gguf of no type", lambda hp, m, x: hp.export(m, "x.gguf", to="gguf", dtype="int3"), "no type 'int3'"),
]  # fmt: skip
