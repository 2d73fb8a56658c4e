"""Bad inputs, a row each: what is given, what the one line says, and the exit code. `tests/test_bad_input.py` tries them all.

Here is what is typed, and JSON documents; data and folders are in `tests.support.bad_files`.

`tests/test_mistakes.py` has a row for every option of every command; what is there is not here again.
"""

from __future__ import annotations

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
    row("inspect {bert}@main", "no model can have this name"),
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
    row(f"{SCORE} -m ablation:memory=4XB", "memory=4GB"),
    row(f"{SCORE} -m ablation:memory=-4GB", "memory=4GB"),
    row(f"{SCORE} -m ablation:memory=1.2.3GB", "memory=4GB"),
    row(f"{SCORE} -m ablation:memory=0", "memory=4GB"),
    row(f"{SCORE} -m l0:keep=1e400", "is not a number of heads|leaves"),
    row(f"{SCORE} -m ablation:time=soon", "ablation:time=soon"),
    row(f"{SCORE} -m ablation:time=-1", "time"),
    row(f"{SCORE} -m l0:steps=1.5", "steps"),
    row(f"{SCORE} -m l0:sparsity=-0.1", "sparsity"),
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
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), [1, 2], "has 2 numbers, and there are 4 heads"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), [1, 2, 3, True], "no list of numbers"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), [1, 2, 3, "4"], "no list of numbers"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), "1234", "no list of numbers"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values"), {}, "damaged scores file .*block.0.attn"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "stderr", "block.0.attn"), [1, 1, 1, -1], "standard error below 0"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "details"), None, "damaged scores file"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "details"), {"carried_by": [1]}, "has 1 numbers, and there are 4 heads"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "details"), {"carried_by": [1, 2, 3, None]}, "carried_by has no number for some heads"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "matrix"), [[1]], "has 1 numbers, and there are 4 heads"),
    changed(BY_SCORES, "scores.json", ("scores",), [], "holds no scores"),
    changed(BY_SCORES, "scores.json", ("scores",), {}, "holds no scores|damaged scores"),
    changed(BY_SCORES, "scores.json", ("scores",), [1], "damaged scores file"),
    changed(BY_SCORES, "scores.json", ("layers",), [], "no layers"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "name"), 3, "damaged scores file .*name is 3: .* valid string"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "index"), -1, "damaged scores file .*-1"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "index"), True, "damaged scores file .*True"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "num_heads"), 10**12, "damaged scores file"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "num_heads"), 0, "damaged scores file .*0 heads"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "prunable"), "yes", "prunable is 'yes': Input should be a valid boolean"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "groups"), [[0, 1], [1, 2]], "groups of others"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "projections"), [
        {"module": "m", "features": ["0:99999999999"]}], "are no features"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "projections"), [
        {"module": "m", "features": ["5:-5"]}], "are no features"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "projections"), [{"module": 1, "features": []}], "module is 1: .* valid string"),
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
