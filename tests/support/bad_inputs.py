"""Bad inputs, a row each: what is given, what the one line says, and the exit code. `tests/test_bad_input.py` tries them all.

Here is what is typed, with a row for every option of every command, and JSON documents; data and folders are in `tests.support.bad_files`.
"""

import json
from dataclasses import dataclass
from typing import Any

GONE = object()  # the value is taken out
NESTED = "[" * 100_000 + "]" * 100_000
WIDE = "9" * 5000


@dataclass(frozen=True)
class Row:
    """A bad input.

    Attributes:
        typed: The command; ``{bert}``, ``{llama}``, ``{data}``, ``{files}`` (of `FILES`), ``{made}`` (what ``make`` wrote) and ``{here}`` stand
            for folders.
        says: What is in the line: a pattern.
        code: The exit code.
        make: What lies in ``{made}``: by file name its text or bytes, a change to the document of that name, or where that file is cut off.
    """

    typed: tuple[str, ...]
    says: str
    code: int = 1
    make: Any = None

    @property
    def name(self) -> str:
        what = next(iter(self.make), "") if isinstance(self.make, dict) else ""
        return f"{' '.join(self.typed)[:40]} {what}: {self.says[:60]}"


def row(typed: str, says: str, code: int = 1) -> Row:
    """A row of what is typed alone."""
    return Row(tuple(typed.split(" ")), says, code)


def rows(says: str, typed: str, values: str = "", code: int = 1) -> list[Row]:
    """A row for each of the values, in the place of ``…``."""
    return [row(typed.replace("…", value), says, code) for value in values.split(" ")]


SCORE, PRUNE = "score {bert} -d {data}", "prune {bert} -d {data}"

# -- files and folders that are not what is asked for ---------------------------------------------------------------------

NO_SCORES = '{"headprune": "scores", "schema": 1, "layers": [], "scores": []}'
REMOTE = {
    "model_type": "made-up", "architectures": ["MadeUpForSequenceClassification"],
    "auto_map": {"AutoConfig": "made_up.Config", "AutoModelForSequenceClassification": "made_up.Model"},
}  # fmt: skip
FILES: dict[str, str | bytes] = {
    "empty.jsonl": "", "empty.json": "", "cut.json": '{"headprune": "plan", "sch', "data.xyz": "a,b\n1,2\n",
    "other.json": NO_SCORES, "plan-schema.json": '{"headprune": "plan", "schema": 9, "drop": {}}',
    "plan-no-drop.json": '{"headprune": "plan", "schema": 1}',
    "plan-list.json": '{"headprune": "plan", "schema": 1, "drop": [1, 2]}',
    "plan-huge.json": '{"headprune": "plan", "schema": 1, "drop": {"L0": [1]}, "kept": 1e999}',
    "not-a-dict.json": "[]", "größe.json": "{}",
    "run-damaged/scores.json": "{", "run-empty/scores.json": NO_SCORES, "run-schema/run.json": '{"headprune": "run", "schema": 7}',
    "run-bare/run.json": '{"headprune": "run", "schema": 1}', "run-cut/run.json": '{"headprune": "run", "sche',
    "run-scored/run.json": "{}", "run-scored/scores.json": NO_SCORES,
    "run-other/run.json": '{"headprune": "scores", "schema": 1}', "run-nothing/run.json": "",
    "config-empty/config.json": "", "config-cut/config.json": '{"model_type": "be',
    "config-unknown/config.json": '{"model_type": "nothing-known"}',
    "config-remote/config.json": json.dumps(REMOTE),
    "config-kernel/config.json": json.dumps({
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "attn_implementation": "someone/attention",
    }),
    "sidecar-cut/config.json": '{"model_type": "bert", "architectures": ["BertForSequenceClassification"]}',
    "sidecar-cut/headprune.json": '{"headprune": "checkpo',
    "plan-none.json": '{"headprune": "plan", "schema": 1, "drop": {"L0": []}}',
    "plan-nowhere.json": '{"headprune": "plan", "schema": 1, "drop": {"L9": [0]}}', "deep.json": "[" * 100_000,
    "plan-head.json": '{"headprune": "plan", "schema": 1, "drop": {"L1": [7]}}', "map-list.json": "[1]",
    "plan-elses.json": '{"headprune": "plan", "schema": 1, "drop": {"L0": [0]}, "model": "0123456789abcdef"}',
    **dict.fromkeys(("binary.json", "binary.jsonl", "run-binary/run.json", "config-binary/config.json"), bytes(range(256))),
}  # fmt: skip


# -- what is typed -----------------------------------------------------------------------------------------------------

# None of these may load a model.
TYPED: list[Row] = [
    # what Typer refuses
    *rows("No such command|No such option", "…", "cook --frobnicate", 2),
    *rows("Missing (argument|option)", "…", "score inspect report finetune", 2),
    row("methods {bert}", "unexpected extra argument", 2),
    *rows("valid int", f"{SCORE} --…", "limit=5.5 limit=0x10 seed=nan", 2),
    *rows("in the range|should be (greater|less) than", f"{SCORE} --…", "limit=1 batch-size=0 report-limit=0 max-length=1 seed=-1 seed=2147483648", 2),
    *rows("in the range|should be|valid (number|float)", f"{PRUNE} -k 2 --…", "min-heads-per-layer=-1 finetune=much", 2),
    # models
    *rows("no model '.*no model can have this name", "inspect …",
          "./does-not-exist ~/does-not-exist a/b/c https://huggingface.co/a/b {bert}/nothing/ {bert}@main größe/modèl"),
    *rows("There is no model", "inspect …", "a\0b a\nb \x1b[31mred [red]x[/]"),
    Row(("inspect", "x" * 5000), "There is no model"),
    Row(("score", "", "-d", "{data}"), "No model was named"),
    *rows("is a file", "inspect …", "{bert}/config.json {files}/data.xyz"),
    *rows("without a config.json", "inspect …", ". {files}/nothing"),
    *rows("config-(empty|cut|binary)", "inspect {files}/config-…", "empty cut binary"),
    row("inspect {files}/config-unknown", "nothing-known"),
    row("inspect {files}/config-remote", "add --trust-remote-code"),
    row("inspect {files}/config-kernel", "attention kernel someone/attention"),
    row("inspect {files}/sidecar-cut", "headprune.json is not readable"),
    *rows("no task '", f"{SCORE} --task …", "Sequence-Classification cooking"),
    *rows("no dtype '", "inspect {bert} --dtype …", "float8 int3"),
    *rows("no device '", "inspect {bert} --device …", "cpu:x tpu meta cuda:77"),
    row(f"{SCORE} --device-map nowhere", "There is no device map 'nowhere'"),
    *rows("no device map .*json", f"{PRUNE} -k 4 --device-map {{files}}/…", "deep.json map-list.json list.json"),
    row(f"{PRUNE} -k 4 --device-map auto --device cpu", "--device and --device-map both say"),
    *rows("--(finetune|export) and --device-map do not go together", f"{PRUNE} -k 4 --device-map auto --…", "finetune=1 export=onnx"),
    row(f"{SCORE} --device-memory 5", "no use without --device-map"),
    *rows("no amount for each device", f"{SCORE} --device-map auto --device-memory …", "5 cpu=-5GB disk=5GB cpu=infGB"),
    row("show {bert}", "nothing to look at"),
    row("show {bert} -t a --image b.png", "are two inputs"),
    Row(("show", "{bert}", "-t", "  "), "text is empty"),
    row("show {bert} -t a -o picture.jpg", "no name of a picture"),
    row("show {bert} -t a -o nowhere/picture.png", "no folder nowhere"),
    # data
    Row(("score", "{bert}", "-d", ""), "No dataset was given"),
    row("prune reports/no-such-run -k 4", "or the folder of a run, which knows its own"),
    Row(("prune", "{bert}", "-d", "{data}", "-k", "4", "--also", " "), "names no dataset"),
    *rows("no file or folder", "score {bert} -d …", "~/gone gone.csv {bert}/config.txt ./nope /nope/größe"),
    row("score {bert} -d a\0b.jsonl", "no file or folder|cannot be read"),
    row("score {bert} -d /dev/null", "no file or folder /dev/null|no data file"),
    Row(("score", "{bert}", "-d", "x" * 5000), "cannot be read: File name too long"),
    *rows("no data file that headprune reads", "score {bert} -d …", "{bert}/model.safetensors {files}/data.xyz"),
    *rows(" is empty", "score {bert} -d {files}/…", "empty.jsonl nothing"),
    *rows("no file or folder|empty.jsonl is empty", f"{PRUNE} -k 4 --also …", "gone.jsonl {files}/empty.jsonl"),
    row(f"{SCORE} --text-column a,b,c", "more than two columns"),
    # methods
    *rows("no scoring method '", f"{SCORE} -m …", "Ablation ablation,gradient [red]"),
    *rows("memory=4GB", f"{SCORE} -m ablation:memory=…", f"4XB -4GB 0 {'9' * 400}GB"),
    row(f"{SCORE} -m ablation:time=soon", "ablation:time=soon"),
    *rows("time to spend", f"{SCORE} -m ablation:time=…", "nan 0 -1"),
    *rows("(examples|steps|sparsity|permutations) is ", f"{SCORE} -m …",
          "ablation:examples=1 l0:steps=0 l0:sparsity=nan l0:sparsity=inf l0:sparsity=-0.1 shapley:permutations=-1"),
    *rows("l0:steps=64", f"{SCORE} -m l0:steps=…", "some 1.5"),
    *rows("is not a number of heads|leaves", f"{SCORE} -m l0:keep=…", "1e400 none"),
    row(f"{SCORE} -m gradient:permutations=64", "no setting 'permutations' of gradient. It has normalise"),
    row(f"{SCORE} -m gradient -m gradient:normalise", "there twice"),
    # budgets and strategies
    row("prune", "How many heads to keep"),
    *rows("keep .* is not a number of heads", f"{PRUNE} --keep …", "inf 50%% % 4,000 None ½"),
    *rows("leaves no head", f"{PRUNE} --keep …", "-0.5 0% 0"),
    *rows("keeps all heads", f"{PRUNE} --keep …", "100% 1.0"),
    *rows("is no budget", f"{PRUNE} --target-latency …", "0 nan 1e999 80%% -5"),
    row(f"{PRUNE} --target-latency soon", "--target-latency soon is no budget. Write it as 12.5ms or 80%"),
    *rows("is no budget", f"{PRUNE} --target-flops …", f"-1G G nan 1{'0' * 400}"),
    *rows("is no budget", f"{PRUNE} --target-params …", "1Q 0"),
    *rows("is no budget", f"{PRUNE} --target-kv-cache …", "none 10parsec"),
    *rows("is no budget", f"{PRUNE} --max-drop …", "much inf -0.1"),
    row(f"{PRUNE} --max-drop 5", "did you mean 5%"),
    *rows("met by the dense model", f"{PRUNE} --target-…", "params=100% params=200% latency=100%"),
    row(f"{PRUNE} --keep 4 --target-latency 80%", "--keep and --target-latency are different kinds of budget. Give one of them."),
    *rows("no strategy '.*Choose from auto, one-shot", f"{PRUNE} --keep 4 -s …", "Auto luck"),
    *rows("no effort '.*Choose from low, normal, high.", f"{PRUNE} --keep 4 --effort …", "highest some"),
    *rows("takes no scores", f"{PRUNE} --keep 2 -s compensated …", "--method=gradient --distil"),
    *rows("There is no metric '.*Choose from accuracy", f"{PRUNE} --keep 4 --metric …", "F1 macro"),
    row(f"{PRUNE} --keep 4 --metric f1 --metric loss --metric loss", "--metric loss is there twice"),
    *rows("in the range|should be|valid int", f"{PRUNE} -k 2 --metric f1 --…", "num-beams=0 max-new-tokens=-1", 2),
    *rows("no number of epochs", f"{PRUNE} --keep 4 --finetune …", "-1 0 nan inf"),
    row(f"{PRUNE} --keep 4 --export gguf --export pdf", "no export format 'pdf'"),
    row(f"{PRUNE} --target-latency 80% --max-drop 0.01", "Give one of them. --max-drop keeps the fewest heads"),
    # plans and scores
    row(f"{PRUNE} -k 4 --plan {{files}}/plan-head.json", "--keep and --plan are different"),
    row(f"{PRUNE} --plan {{files}}/plan-head.json --protect L0", "--plan says which heads go, so --protect has no use"),
    row(f"{PRUNE} --plan nope.json", "no file nope.json"),
    *rows("not readable", f"{PRUNE} --plan {{files}}/…", "nothing empty.json cut.json binary.json"),
    *rows("does not hold headprune's plan", f"{PRUNE} --plan {{files}}/…", "not-a-dict.json größe.json other.json"),
    row(f"{PRUNE} --plan {{files}}/plan-schema.json", "has format 9"),
    *rows("damaged plan", f"{PRUNE} --plan {{files}}/plan-…", "no-drop.json list.json huge.json"),
    row("prune --keep 4 -o nowhere", "no scores in nowhere"),
    row("prune -k 4", "There are no scores in reports"),
    *rows("no file or folder nope|is not a run's scores.json|no file .*scores.json", "prune -k 4 --scores …",
          "nope nope.json {data}/test.jsonl {files}/nothing"),
    row("prune -k 4 --scores {files}/run-damaged", "scores.json is not readable"),
    row("prune -k 4 --scores {files}/run-empty/scores.json", "holds no scores"),
    row("prune {files}/run-scored -k 4", "run folder with scores, and holds no model.* --scores .*run-scored`"),
    row("prune {files}/run-scored -k 4 -d {data}", "run folder with scores, and holds no model"),
    # folders to write to
    *rows("cannot be written|is a file|too long", f"{SCORE} -o …",
          f"/dev/null/x {{bert}}/config.json {{files}}/data.xyz/run /proc/nothing/run {'y' * 300}"),
    row(f"{SCORE} -o {{bert}}", "exists and is not empty"),
    row(f"{PRUNE} -k 4 -o {{bert}}", "exists and is not empty"),
    row("export {bert} --to onnx -o {bert}", "is a folder"),
    # other commands
    *rows("no export format '", "export {bert} --to …", "ONNX luck"),
    row("export {bert} --to gguf -o model-1.5", "Name it model-1.5.gguf"),
    row("export {bert} --to gguf --dtype int3", "int3"),
    *rows("no folder ", "finetune …", "nope {files}/data.xyz"),
    *rows("holds no pruned model", "finetune …", "{bert} {files}/nothing"),
    *rows("alpha is .* it should be ", "finetune {bert} --alpha …", "nan 2"),
    *rows("temperature is .* it should be ", "finetune {bert} --temperature …", "inf -1 0"),
    *rows("learning_rate is .* it should be ", "finetune {bert} --learning-rate …", "inf 0 -1"),
    *rows("epochs is .* it should be ", "finetune {bert} --epochs …", "-1 0 nan 1e300"),
    *rows("patience is .* it should be greater than or equal to 1", "finetune {bert} --patience …", "-2 0"),
    row("finetune {bert} --seed 99999999999999999999", "seed is 99999999999999999999; it should be less than or equal to 2147483647"),
    *rows("is not a run's folder: it has no run.json", "report …", "nope {files}/data.xyz {bert}/config.json"),
    *rows("is not a run's folder", "report …", "{bert} {files}/nothing"),
    *rows("run.json is not readable", "report {files}/run-…", "nothing cut binary"),
    row("report {files}/run-other", "does not hold headprune's run"),
    row("report {files}/run-schema", "has format 7"),
    row("report {files}/run-bare", "run.json is damaged, or of another version: commands is missing"),
    row("push ./gone me/there", "no folder gone"),
    row("push {bert} me/there", "holds no pruned model"),
    row("evaluate {bert}", "nothing to measure on"),
    row("evaluate {bert} a.onnx --tasks a", "a.onnx is for another engine"),
    row("evaluate a.onnx -d {data}", "a.onnx holds no tokenizer"),
    row("evaluate {bert} gone/away/too -d {data}", "no model 'gone/away/too'"),
    row("evaluate {bert} --task-limit 0", "in the range|should be greater", 2),
    row("evaluate {bert} --tasks a --include-path {files}/gone", "no folder .*gone"),
    *rows("holds no run that pruned", "compare … {bert}", "{files}/nothing {bert}"),
    *rows("no list of numbers", "bench {bert} {bert} --lengths …", "8;16 long 8,,9 0 99999999999999999999"),
    *rows("no list of numbers", "bench {bert} {bert} --batch-sizes …", "1e3 1,0 -1"),
    Row(("bench", "{bert}", "{bert}", "--batch-sizes", ""), "no list of numbers"),
]  # fmt: skip

# What only the loaded model can tell, but before any long work.
LATER: list[Row] = [
    row("show {bert} --image {files}/gone.png", "it takes no image. Use --text"),
    row("show {bert} --text a --head H", "'H' is no head of this model. Write it as L3.H7"),
    row(f"{PRUNE} -L 10 --keep 8", "keeps all 8 heads, so there is nothing to prune"),
    row(f"{PRUNE} -L 10 --keep 2 --keep 9", "more than all 8 heads"),
    row(f"{PRUNE} -L 10 --keep 1%", "leaves no head"),
    row(f"{PRUNE} -L 10 --keep 3 --protect L0", "4 heads have to stay .protected: L0., so 3 is out of reach. Keep at least 4"),
    row(f"{PRUNE} -L 10 --keep 5 --min-heads-per-layer 3", "6 heads have to stay .at least 3 in every layer., so 5 is out"),
    *rows("no attention layer named 'L7'|no head 9", f"{PRUNE} -L 10 --keep 4 --protect …", "L7 L0.H9"),
    *rows("met by the dense model", f"{PRUNE} -L 10 --target-…", "params=1G flops=1T latency=60000"),
    row(f"{PRUNE} -L 10 --target-kv-cache 50%", "no key/value cache"),
    *rows("for sequence-classification gives no texts", f"{PRUNE} -k 4 --metric …", "wer squad_f1"),
    *rows("compares .*, but this model's answers are a label for each example", f"{PRUNE} -k 4 --metric …", "seqeval r2 spearman"),
    row(f"{PRUNE} -L 10 --max-drop 1", "asks for nothing"),
    row(f"{PRUNE} -L 10 --plan {{files}}/plan-none.json", "drops no head"),
    row(f"{PRUNE} -L 10 --plan {{files}}/plan-nowhere.json", "no attention layer named 'L9'"),
    row(f"{PRUNE} -L 10 --plan {{files}}/plan-elses.json", "plan is for another model"),
    row(f"{PRUNE} -L 10 --plan {{files}}/plan-head.json", "L1: head 7|Layer L1 has no head 7"),
    row(f"{SCORE} --max-length 2", "repeating an input of an earlier part.* more than 2 tokens were cut"),
    row("score {bert} -d {files}/same", "repeating an input of an earlier part"),
    row("score {bert} -d {files}/few.jsonl", "too few rows"),
    row("bench {bert} {bert} --lengths 8,5000", "does not take texts of 5,000 tokens: it has 64 positions. Use --lengths up to 64"),
    row("score nobody/nothing -d {data}", "no model 'nobody/nothing'"),
    row("score {bert} -d nobody/nothing", "no dataset 'nobody/nothing'"),
    row(f"{SCORE} --text-column body", "no column 'body'"),
    row(f"{SCORE} --task masked-lm", "was not trained for masked-lm"),
    row("bench {bert} {llama}", "Compare alike"),
    row("evaluate {bert} {llama} -d {data} -L 10", "Compare alike"),
    row("evaluate {bert} -d {data} --tasks no-such-task", "no task 'no-such-task'"),
    row("evaluate {bert} gone.onnx -d {data}", "gone.onnx does not exist"),
]  # fmt: skip


# -- the documents of a run folder, of a plan, of scores ---------------------------------------------------------------

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
    whole(BY_PLAN, "plan.json", plan('{"L0": [true]}'), "damaged plan .drop › L0"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [-1]}'), "Layer L0 has no head -1"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0, 0]}'), "Layer L0: head 0 is listed twice"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0], "L0": [1]}'), "'L0' stands there twice"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', drop2="1", schema="true"), "has format True"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}', asked="NaN"), "damaged plan .*is nan; it should be"),
    whole(BY_PLAN, "plan.json", plan(f'{{"L0": [{WIDE}]}}'), "not readable .*number too large"),
    whole(BY_PLAN, "plan.json", plan(f'{{"L0": {NESTED}}}'), "not readable .*lists within lists"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}') + "}", "not readable .*Extra data"),
    whole(BY_PLAN, "plan.json", "\ufeff" + plan('{"L0": [0]}'), "not readable .*BOM"),
    whole(BY_PLAN, "plan.json", plan('{"L0": [0]}').encode("utf-16"), "not readable .*utf-8"),
    # scores
    changed(BY_SCORES, "scores.json", ("scores", 0, "examples"), True, "damaged scores file .*examples is True"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "examples"), 10**30, "not readable .*number too large"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "method"), 3, "method is 3, which is no text"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), [1, 2], "has 2 numbers, and there are 4 heads"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values", "block.0.attn"), [1, 2, 3, True], "no list of numbers"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "values"), {}, "damaged scores file .*block.0.attn"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "stderr", "block.0.attn"), [1, 1, 1, -1], "standard error below 0"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "details"), {"carried_by": [1, 2, 3, None]}, "carried_by has no number for some heads"),
    changed(BY_SCORES, "scores.json", ("scores", 0, "matrix"), [[1]], "has 1 numbers, and there are 4 heads"),
    changed(BY_SCORES, "scores.json", ("scores",), [], "holds no scores"),
    changed(BY_SCORES, "scores.json", ("layers",), [], "no layers"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "num_heads"), 0, "damaged scores file .*0 heads"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "prunable"), "yes", "prunable is 'yes': Input should be a valid boolean"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "groups"), [[0, 1], [1, 2]], "groups of others"),
    changed(BY_SCORES, "scores.json", ("layers", 0, "projections"), [
        {"module": "m", "features": ["0:99999999999"]}], "are no features"),
    # run.json
    changed(REPORT, "run.json", ("commands",), GONE, "commands is missing"),
    changed(REPORT, "run.json", ("parts", "score", "examples"), -5, "parts › score › examples is -5"),
    changed(REPORT, "run.json", ("\ud800",), 1, "valid string"),
    # metrics.json
    changed(REPORT, "metrics.json", ("budgets", 0, "checkpoint"), "../../elsewhere", "leads to another folder"),
    changed(REPORT, "metrics.json", ("budgets",), [], r"damaged, or of another version \(ValueError: no budgets\)"),
    changed(REPORT, "metrics.json", ("latency", "rows", 0, "timings"), {}, "damaged, or of another version"),
    changed(REPORT, "metrics.json", ("exports",), [
        {"format": "onnx", "name": "2 heads", "checkpoint": "pruned-2", "file": "../x.onnx", "proved": True, "summary": ""},
    ], "exports › 0 › file.*leads to another folder"),
    # heads.json
    changed(REPORT, "heads.json", ("samples", 0, "layers", 0, "weights"), "AAAA", "cannot reshape"),
    changed(REPORT, "heads.json", ("samples", 0, "layers", 0, "weights"), "ä", "weights|ASCII"),
    changed(REPORT, "heads.json", ("samples", 0, "layers", 0, "shape"), [4, -3, -3], "shape"),
]  # fmt: skip
