"""Bad inputs, a row each: what is given, what the one line says, and the exit code. `tests/test_bad_input.py` tries them all.

`tests/test_mistakes.py` has a row for every option of every command; what is there is not here again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GONE = object()  # the value is taken out
NESTED = "[" * 100_000 + "]" * 100_000
WIDE = "9" * 5000


@dataclass(frozen=True)
class Row:
    """A bad input.

    Attributes:
        typed: The command; ``{bert}``, ``{llama}``, ``{data}``, ``{made}`` (what ``make`` wrote) and ``{here}`` stand for folders.
        says: What is in the line: a pattern.
        code: The exit code.
        make: What lies in ``{made}``: by file name its text or bytes, or a change to the document of that name.
    """

    typed: tuple[str, ...]
    says: str
    code: int = 1
    make: Any = None

    @property
    def name(self) -> str:
        what = next(iter(self.make), "") if isinstance(self.make, dict) else ""
        return f"{' '.join(self.typed)[:40]} {what}: {self.says[:60]}"


def row(typed: str, says: str, code: int = 1, **make: Any) -> Row:
    """A row of what is typed alone."""
    return Row(tuple(typed.split(" ")), says, code, make or None)


SCORE, PRUNE = "score {bert} -d {data}", "prune {bert} -d {data}"

# -- what is typed -----------------------------------------------------------------------------------------------------

TYPED: list[Row] = [
    # commands and options that are none
    row("scores", "No such command", 2),
    row("--frobnicate", "No such option", 2),
    row("score", "Missing argument", 2),
    row("inspect", "Missing argument", 2),
    row("inspect {bert} {bert}", "unexpected extra argument", 2),
    row("report", "Missing argument", 2),
    row("finetune", "Missing argument", 2),
    row("export {bert}", "Missing option", 2),
    row("push {bert}", "Missing argument", 2),
    row("bench {bert}", "Missing argument", 2),
    row("methods {bert}", "unexpected extra argument", 2),
    row("score {bert} -d", "requires an argument", 2),
    row("score {bert} --batchsize 3 -d {data}", "No such option", 2),
    row(f"{SCORE} -L 1e3", "valid int", 2),
    row(f"{SCORE} -L 5.5", "valid int", 2),
    row(f"{SCORE} -L 0x10", "valid int", 2),
    row(f"{SCORE} -b -1", "in the range|should be (greater|less) than", 2),
    row(f"{SCORE} --seed nan", "valid int", 2),
    row(f"{SCORE} --seed 2147483648", "in the range|should be (greater|less) than", 2),
    row(f"{SCORE} --time soon", "valid (number|float)", 2),
    row(f"{SCORE} --time -1", "in the range|should be (greater|less) than", 2),
    row(f"{SCORE} --steps 1.5", "valid int", 2),
    row(f"{SCORE} --sparsity -0.1", "in the range|should be (greater|less) than", 2),
    row(f"{PRUNE} -k 4 --min-heads-per-layer two", "valid int", 2),
    row(f"{PRUNE} -k 4 --finetune much", "valid (number|float)", 2),
    row("finetune {bert} --patience 1.5", "valid int", 2),
    row(f"{SCORE} --json=yes", "does not take a value", 2),
    # models
    row("score ./does-not-exist -d {data}", r"no model '\./does-not-exist'.*no model can have this name"),
    row("inspect ../does-not-exist", "no model can have this name"),
    row("inspect /does/not/exist", "no model can have this name"),
    row("inspect ~/does-not-exist", "no model can have this name"),
    row("inspect a/b/c", "no model can have this name"),
    row("inspect a//b", "no model can have this name"),
    row("inspect https://huggingface.co/a/b", "no model can have this name"),
    row("inspect {bert}/config.json", "is a file"),
    row("inspect {bert}/nothing/", "no model can have this name"),
    row("inspect .", "without a config.json"),
    row("inspect a\0b", "There is no model"),
    row("inspect a\nb", "There is no model"),
    row("inspect \x1b[31mred", "There is no model"),
    row("inspect [red]x[/]", "There is no model"),
    row("inspect <script>", "There is no model"),
    row("inspect {bert} --task Sequence-Classification", "no task"),
    row("inspect {bert} --dtype float8", "no dtype 'float8'"),
    row("inspect {bert} --device cpu:x", "no device 'cpu:x'"),
    row("inspect {bert} --device tpu", "no device 'tpu'"),
    row("inspect {bert} --revision main", "has no revisions"),
    row("show {bert}", "nothing to look at"),
    row("show {bert} -t a --image b.png", "are two inputs"),
    Row(("show", "{bert}", "-t", "  "), "text is empty"),
    row("show {bert} -t a -o picture.jpg", "no name of a picture"),
    row("show {bert} -t a -o nowhere/picture.png", "no folder nowhere"),
    row("show ./gone -t a", "no model can have this name"),
    # data
    row("score {bert} -d ~/gone", "no file or folder ~/gone"),
    row("score {bert} -d gone.csv", "no file or folder gone.csv"),
    row("score {bert} -d gone.parquet", "no file or folder gone.parquet"),
    row("score {bert} -d ../gone/data.jsonl", "no file or folder"),
    row("score {bert} -d a\0b.jsonl", "no file or folder|cannot be read"),
    row("score {bert} -d {bert}/model.safetensors", "no data file that headprune reads"),
    row("score {bert} -d {bert}/config.txt", "no file or folder"),
    row("score {bert} -d /dev/null", "no file or folder /dev/null|no data file"),
    row(f"{SCORE} --text-column a,b,c,d", "more than two columns"),
    row(f"{SCORE} --task Text", "no task 'Text'"),
    # methods, budgets
    row(f"{SCORE} -m Ablation", "no scoring method 'Ablation'"),
    row(f"{SCORE} -m ablation,gradient", "no scoring method 'ablation,gradient'"),
    row(f"{SCORE} -m [red]", "no scoring method"),
    row(f"{SCORE} --max-memory 4XB", "no amount of memory"),
    row(f"{SCORE} --max-memory -4GB", "no amount of memory"),
    row(f"{SCORE} --max-memory 1.2.3GB", "no amount of memory"),
    row(f"{SCORE} --max-memory 0", "no amount of memory"),
    row(f"{SCORE} --keep 1e400", "is not a number of heads|leaves"),
    row(f"{PRUNE} --keep inf", "is not a number of heads"),
    row(f"{PRUNE} --keep -0.5", "leaves no head"),
    row(f"{PRUNE} --keep 50%%", "is not a number of heads"),
    row(f"{PRUNE} --keep %", "is not a number of heads"),
    row(f"{PRUNE} --keep 4,000", "is not a number of heads"),
    row(f"{PRUNE} --keep None", "is not a number of heads"),
    row(f"{PRUNE} --keep True", "is not a number of heads"),
    row(f"{PRUNE} --keep 0%", "leaves no head"),
    row(f"{PRUNE} --keep 0.0", "leaves no head"),
    row(f"{PRUNE} --keep -50%", "leaves no head"),
    row(f"{PRUNE} --target-latency 0", "is no budget"),
    row(f"{PRUNE} --target-latency nan", "is no budget"),
    row(f"{PRUNE} --target-latency 1e999", "is no budget"),
    row(f"{PRUNE} --target-latency 80%%", "is no budget"),
    row(f"{PRUNE} --target-flops -1G", "is no budget"),
    row(f"{PRUNE} --target-flops G", "is no budget"),
    row(f"{PRUNE} --target-params 1Q", "is no budget"),
    row(f"{PRUNE} --target-params 100%", "met by the dense model"),
    row(f"{PRUNE} --target-kv-cache none", "is no budget"),
    row(f"{PRUNE} --max-drop much", "is no budget"),
    row(f"{PRUNE} --max-drop inf", "is no budget"),
    row(f"{PRUNE} --keep 4 --target-latency 80%", "different kinds of budget"),
    row(f"{PRUNE} --target-flops 80% --target-params 80%", "different kinds of budget"),
    row(f"{PRUNE} --keep 4 -s Auto", "no strategy 'Auto'"),
    row(f"{PRUNE} --keep 4 --effort highest", "no effort 'highest'"),
    row(f"{PRUNE} --keep 4 --export gguf --export pdf", "no export format 'pdf'"),
    row(f"{PRUNE} --keep 4 --also gone.jsonl", "no file or folder gone.jsonl"),
    row(f"{PRUNE} --keep 4 --finetune -1", "no number of epochs"),
    row("prune --keep 4 -o nowhere", "no scores in nowhere"),
    row("prune {bert} --keep 4", "No dataset was given"),
    row("prune {bert} -d {data} --keep 4 --scores gone.json", "no file or folder gone.json"),
    # folders to write to
    row(f"{SCORE} -o /dev/null/x", "cannot be written|is a file"),
    row(f"{SCORE} -o {{bert}}", "exists and is not empty"),
    row(f"{SCORE} -o {{bert}}/config.json", "is a file"),
    row(f"{PRUNE} -k 4 -o {{bert}}", "exists and is not empty"),
    row("export {bert} --to onnx -o {bert}", "is a folder"),
    row("export {bert} --to gguf -o /proc/x/model.gguf", "cannot be written"),
    row("export {bert} --to stock --dtype int8", "no type 'int8'"),
    row("export {bert} --to gguf --pad", "no option 'pad'"),
    row("export {bert} --to ONNX", "no export format 'ONNX'"),
    row("export ./gone --to onnx", "no model can have this name"),
    row("finetune {bert}", "holds no pruned model"),
    row("finetune {bert} --alpha nan", "alpha|weight"),
    row("finetune {bert} --temperature inf", "temperature"),
    row("finetune {bert} --temperature -1", "temperature"),
    row("finetune {bert} --learning-rate inf", "no learning rate inf"),
    row("finetune {bert} --learning-rate 0", "no learning rate 0"),
    row("finetune {bert} --epochs -1", "-1 epochs"),
    row("finetune {bert} --patience -2", "patience of -2"),
    row("report {bert}", "not a run's folder"),
    row("report {bert}/config.json", "no folder"),
    row("push ./gone me/there", "no folder gone"),
    row("push {bert} me/there", "holds no pruned model"),
    row("bench {bert} ./gone", "no model can have this name"),
    row("bench {bert} {bert} --lengths 8;16", "no list of numbers"),
    row("bench {bert} {bert} --batch-sizes 1e3", "no list of numbers"),
    row("bench {bert} {bert} --batch-sizes 1,0", "no list of numbers"),
    row("bench {bert} gone.onnx", "no file|no model|Only one of"),
]  # fmt: skip


# -- the documents of a run folder, of a plan, of scores ---------------------------------------------------------------

Change = tuple[tuple[Any, ...], Any]  # where, and what stands there instead

REPORT = ("report", "{made}")
BY_SCORES = ("prune", "-k", "2", "--scores", "{made}")
BY_PLAN = ("prune", "{bert}", "-d", "{data}", "--plan", "{made}/plan.json")


def changed(typed: tuple[str, ...], file: str, where: tuple[Any, ...], value: Any, says: str) -> Row:
    """A document with one other value."""
    return Row(typed, says, 1, {file: (where, value)})


def whole(typed: tuple[str, ...], file: str, text: str | bytes, says: str) -> Row:
    """Another text in the place of a document."""
    return Row(typed, says, 1, {file: text})


def plan(drop: str, **more: str) -> str:
    """A plan's file, from the text of its ``drop``."""
    fields = {"headprune": '"plan"', "schema": "1", "drop": drop, **more}
    return "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"


DOCUMENTS: list[Row] = [
    # plans
    whole(BY_PLAN, "plan.json", plan('{"L0": [true]}'), "L0.*no list of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [-1]}'), "L0 has no head -1"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0, 0]}'), "L0: head 0 is listed twice"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0], "L0": [1]}'), "'L0' stands there twice"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', drop2="1", schema="true"), "has format True"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', schema="1.0"), "has format 1.0"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', schema='"1"'), "has format '1'"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', kept="true"), "damaged plan .*True is no number of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', kept="1.5"), "damaged plan .*1.5 is no number of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', kept='"4"'), "damaged plan .*'4' is no number of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', total="-8"), "damaged plan .*-8 is no number of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', asked="null"), "damaged plan .*None is no number of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', asked="NaN"), "damaged plan .*nan is no number of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', notes='"many"'), "damaged plan .*no text"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', notes="[1]"), "damaged plan .*1 is no text"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', method="3"), "damaged plan .*3 is no text"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', model="[]"), r"damaged plan .*\[\] is no text"),
    whole(BY_PLAN, "plan.json", plan("null"), "damaged plan"),
    whole(BY_PLAN, "plan.json", plan('{"float": "NaN"}'), "damaged plan"),
    whole(BY_PLAN, "plan.json", plan('{"L0": {"0": 1}}'), "no list of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": ["0"]}'), "no list of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [[0]]}'), "no list of heads"),
    whole(BY_PLAN, "plan.json", plan('{"L0": null}'), "no list of heads"),
    whole(BY_PLAN, "plan.json", plan(f'{{"L0": [{WIDE}]}}'), "not readable .*number too large"),
    whole(BY_PLAN, "plan.json", plan(f'{{"L0": {NESTED}}}'), "not readable .*lists within lists"),
    whole(BY_PLAN, "plan.json", plan('{"L0": ' + "[" * 200 + "]" * 200 + "}"), "not readable .*lists within lists"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}') + "}", "not readable .*Extra data"),
    whole(BY_PLAN, "plan.json", "\ufeff" + plan('{"L0": [0]}'), "not readable .*BOM"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}').encode("utf-16"), "not readable .*utf-8"),
    whole(BY_PLAN, "plan.json", b"\x00" * 100, "not readable"),
    whole(BY_PLAN, "plan.json", b"\x80\x04\x95", "not readable"),
    # scores
    changed(BY_SCORES, "scores.json", ("scores", 0, "examples"), True, "damaged scores file .*examples is True"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "examples"), -1, "damaged scores file .*examples is -1"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "examples"), 10**30, "not readable .*number too large"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "method"), 3, "method is 3, which is no text"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "method"), GONE, "damaged scores file .*method"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "unit"), ["loss"], "unit is .* no text"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), [1, 2], "4 heads, but not as many scores"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), [1, 2, 3, True], "no list of numbers"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), [1, 2, 3, "4"], "no list of numbers"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), "1234", "no list of numbers"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values"), {}, "damaged scores file .*block.0.attn"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "stderr", "block.0.attn"), [1, 1, 1, -1], "standard error below 0"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "details"), None, "damaged scores file"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "details"), {"carried_by": [1]}, "carried_by is not of 4 heads"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "matrix"), [[1]], "matrix is not of 4 by 4"),
    changed(BY_SCORES, "scores.json", ("scores",), [], "holds no scores"),
    changed(BY_SCORES, "scores.json", ("scores",), {}, "holds no scores|damaged scores"),
    changed(BY_SCORES, "scores.json", ("scores",), [1], "damaged scores file"),
    changed(BY_SCORES, "scores.json", ("layers",), [], "no layers"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "name"), 3, "damaged scores file .*no text"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "index"), -1, "damaged scores file .*-1"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "index"), True, "damaged scores file .*True"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "num_heads"), 10**12, "damaged scores file"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "num_heads"), 0, "damaged scores file .*0 heads"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "prunable"), "yes", "prunable is 'yes', not true or false"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "groups"), [[0, 1], [1, 2]], "groups of others"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "projections"), [
        {"module": "m", "features": ["0:99999999999"]}], "are no features"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "projections"), [
        {"module": "m", "features": ["5:-5"]}], "are no features"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "projections"), [{"module": 1, "features": []}], "no text"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "inner_modules"), GONE, "damaged scores file .*inner_modules"),
    whole(BY_SCORES, "scores.json", NESTED, "not readable .*lists within lists"),
    # run.json
    changed(REPORT, "run.json", ("commands",), "score", "commands is 'score'"),
    changed(REPORT, "run.json", ("commands",), GONE, "commands is missing"),
    changed(REPORT, "run.json", ("seconds", 0), True, "seconds › 0 is True"),
    changed(REPORT, "run.json", ("seconds", 0), "3", "seconds › 0 is '3'"),
    changed(REPORT, "run.json", ("when",), 3, "when is 3"),
    changed(REPORT, "run.json", ("parts", "score", "examples"), -5, "parts › score › examples is -5"),
    changed(REPORT, "run.json", ("parts", "score", "examples"), 5.0, "parts › score › examples is 5.0"),
    changed(REPORT, "run.json", ("parts", "choose"), GONE, "parts › choose is missing"),
    changed(REPORT, "run.json", ("model", "layers"), {}, "model › layers"),
    changed(REPORT, "run.json", ("model", "heads"), "4", "model › heads is '4'"),
    changed(REPORT, "run.json", ("model", "layers", 0, "num_heads"), -4, "num_heads is -4"),
    changed(REPORT, "run.json", ("model", "layers", 0, "prunable"), 1, "prunable is 1"),
    changed(REPORT, "run.json", ("environment", "threads"), [], "environment › threads"),
    changed(REPORT, "run.json", ("options", "data", "limit"), "all", "options › data › limit is 'all'"),
    changed(REPORT, "run.json", ("notes",), [1], "notes › 0 is 1"),
    changed(REPORT, "run.json", ("\ud800",), 1, "valid string"),
    # metrics.json
    changed(REPORT, "metrics.json", ("metric",), None, "metric is None"),
    changed(REPORT, "metrics.json", ("dense", "parameters"), True, "dense › parameters is True"),
    changed(REPORT, "metrics.json", ("dense", "low"), "nan", "dense › low is 'nan'"),
    changed(REPORT, "metrics.json", ("budgets", 0, "kept"), -1, "budgets › 0 › kept is -1"),
    changed(REPORT, "metrics.json", ("budgets", 0, "kept"), 5, "more heads are kept than there are"),
    changed(REPORT, "metrics.json", ("budgets", 0, "drop"), {"block.0.attn": [1, 1]}, "a head is listed twice"),
    changed(REPORT, "metrics.json", ("budgets", 0, "drop"), {"block.0.attn": [-1]}, "drop › block.0.attn › 0 is -1"),
    changed(REPORT, "metrics.json", ("budgets", 0, "checkpoint"), "../../elsewhere", "leads to another folder"),
    changed(REPORT, "metrics.json", ("budgets", 0, "checkpoint"), "/etc", "leads to another folder"),
    changed(REPORT, "metrics.json", ("budgets", 0, "change", "verdict"), 1, "verdict is 1"),
    changed(REPORT, "metrics.json", ("budgets", 0, "proof"), None, "proof"),
    changed(REPORT, "metrics.json", ("budgets",), [], "damaged, or of another version"),
    changed(REPORT, "metrics.json", ("curve",), [], "damaged, or of another version"),
    changed(REPORT, "metrics.json", ("latency", "rows"), [], "damaged, or of another version"),
    changed(REPORT, "metrics.json", ("latency", "rows", 0, "timings"), {}, "damaged, or of another version"),
    changed(REPORT, "metrics.json", ("exports",), [
        {"format": "onnx", "name": "2 heads", "checkpoint": "pruned-2", "file": "../x.onnx", "proved": True, "summary": ""},
    ], "exports › 0 › file.*leads to another folder"),
    whole(REPORT, "metrics.json", NESTED, "not readable .*lists within lists"),
    # heads.json
    changed(REPORT, "heads.json", ("examples",), True, "examples is True"),
    changed(REPORT, "heads.json", ("samples", 0, "layers", 0, "weights"), "AAAA", "do not have the shape"),
    changed(REPORT, "heads.json", ("samples", 0, "layers", 0, "weights"), "ä", "weights|ASCII"),
    changed(REPORT, "heads.json", ("samples", 0, "layers", 0, "shape"), [4, -3, -3], "shape"),
    changed(REPORT, "heads.json", ("samples", 0, "positions"), {}, "damaged, or of another version"),
    changed(REPORT, "heads.json", ("layers", 0, "index"), 0.5, "index is 0.5"),
]  # fmt: skip


# -- data -----------------------------------------------------------------------------------------------------------


def rows(count: int = 40, **other: Any) -> str:
    """Lines of JSON; ``other`` is in row 3 in the place of what is right."""
    lines: list[dict[str, Any]] = [{"text": f"good film {'very ' * i}", "label": i % 2} for i in range(count)]
    lines[3].update(other)
    return "\n".join(json.dumps({k: v for k, v in line.items() if v is not GONE}) for line in lines)


def of_data(file: str, content: str | bytes, says: str, *more: str) -> Row:
    """A data file that is scored."""
    return Row(("score", "{bert}", "-d", f"{{made}}/{file}", "-m", "random", *more), says, 1, {file: content})


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
    of_data("a.jsonl", "null\n" * 20, "line 1 holds null instead of a JSON object"),
    of_data("a.jsonl", '{"text": "a", "label": 1}\n' * 40, "repeat an input"),
    of_data("a.jsonl", '{"text": "a", "label": -1}\n' * 40, "no labelled rows"),
    of_data("a.jsonl", '{"text": "\ud800", "label": 1}\n'.encode("utf-8", "surrogatepass") * 40, "Row .* of a.jsonl .*cannot be read: UnicodeDecodeError|not UTF-8"),
    of_data("a.jsonl", rows().encode("utf-16"), "not UTF-8|not valid JSON"),
    of_data("a.jsonl", b"\x1f\x8b\x08\x00junk", "a.jsonl"),
    of_data("a.jsonl", NESTED, "a.jsonl"),
    of_data("a.json", "[]", "a.json"),
    of_data("a.json", "3", "a.json"),
    of_data("a.json", '{"text": "a"', "not valid JSON"),
    of_data("a.csv", "text,label\n", "holds no rows|no labelled rows|too few"),
    of_data("a.csv", "text,label\na;b\n" * 20, "a.csv|label"),
    of_data("a.csv", 'text,label\n"a,1\n' * 5, "quotes"),
    of_data("a.csv", "\x00" * 100, "a.csv"),
    of_data("a.csv", "text,text,label\n" + "a,b,1\n" * 40, "a.csv|text|repeat"),
    of_data("a.tsv", "text,label\n" + "a,1\n" * 40, "No column looks like"),
    of_data("a.txt", "good\nbad\n" * 40, "No column looks like the label"),
    of_data("a.parquet", b"PAR1" + b"\x00" * 50 + b"PAR1", "no Parquet file|a.parquet"),
    of_data("a.parquet", rows(), "no Parquet file"),
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
TAKEN = ("score", "{made}", "-d", "{data}", "-m", "random", "-L", "10")


def config(where: str, value: Any, says: str, typed: tuple[str, ...] = INSPECT) -> Row:
    """A model's folder with another value in its config.json."""
    return Row(typed, says, 1, {"config.json": ((where,), value)})


MODELS: list[Row] = [
    config("model_type", GONE, "config.json"),
    config("model_type", 3, "config.json"),
    config("model_type", "nothing", "nothing"),
    config("architectures", GONE, "task of .* cannot be read"),
    config("architectures", 5, "task of|config.json"),
    config("architectures", [], "task of .* cannot be read"),
    config("architectures", [None], "task of .* cannot be read"),
    config("architectures", ["MadeUp"], "task of .* cannot be read from its architecture .MadeUp"),
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
    ("an export of no type", lambda hp, m, x: hp.export(m, "x.gguf", to="gguf", dtype="int3"), "no type 'int3'"),
]  # fmt: skip
