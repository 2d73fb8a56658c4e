"""What a run comes to, in a sentence: right in every case, and the same in the report, in the terminal and in JSON."""

import copy
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console as RichConsole

import headprune as hp
from headprune.app.console import Console
from headprune.app.runs import RunFolder
from headprune.cli import tables
from tests.support.documents import MEASURED, METRICS, RUN, SPEED, TIMING, TRAINED, repaired

FASTER = {"ratio": 1.5, "low": 1.4, "high": 1.6, "verdict": "faster"}
OTHERS = {"no": "no measurable change"}
REPORTS = sorted((Path(__file__).parent.parent / "reports").glob("*/"))
WHERE = "at batch 1 x 9 tokens on a CPU (cpu, 2 threads, float32)"


def documents(*changes: tuple[int, float, float, str], metric: str = "accuracy") -> dict[str, Any]:
    """Metrics with a pruned model for each (heads kept, change, half its interval, verdict)."""
    found = copy.deepcopy(METRICS)
    (first,) = found["budgets"]
    found |= {"metric": metric, "budgets": []}
    names = [f"{kept} heads" for kept, *_ in changes]
    for name, (kept, value, half, word) in zip(names, changes, strict=True):
        change = {**first["change"], "metric": metric, "value": value, "low": value - half, "high": value + half}
        change["verdict"] = OTHERS.get(word, word)
        facts = {"name": name, "kept": kept, "asked": kept, "checkpoint": f"pruned-{kept}", "change": change}
        found["budgets"].append({**first, **facts})
    row = found["latency"]["rows"][0]
    row["timings"] = dict.fromkeys(["dense", *names, "no heads"], TIMING)
    row["speedups"] = {**dict.fromkeys(names, FASTER), "no heads": {**FASTER, "ratio": 2.0}}
    if metric != "accuracy":
        value = {"perplexity": 12.0, "loss": 0.5}[metric]
        for model in (found["dense"], *(b["pruned"] for b in found["budgets"])):
            model |= {"metrics": {metric: value}, "low": 0.8 * value, "high": 1.1 * value}
        for b in found["budgets"]:
            b["random"] = [20.0, 21.0]
    return found


def limited(limit: float) -> dict[str, Any]:
    """The user allowed a drop of this size."""
    data = documents((2, -0.06, 0.01, "worse"))
    data["budgets"][0]["budget"] = {"asked": f"drop {limit}", "kind": "drop", "limit": limit, "relative": False, "unit": "",
                                    "measured": 0.05, "low": 0.04, "high": 0.07}  # fmt: skip
    return data


def guessing(metric: str, level: float) -> dict[str, Any]:
    data = documents((2, 0.0, 0.001, "no"), metric=metric)
    data["dense"]["guessing"] = level
    return data


def timed(speed: dict[str, Any], bound: dict[str, Any]) -> dict[str, Any]:
    data = documents((2, 0.0, 0.001, "no"))
    data["latency"]["rows"][0]["speedups"] = {"2 heads": speed, "no heads": bound}
    return data


TOO_FEW = "200 examples are too few to say whether heads can go: without half of the heads (2 of 4), "
GUESSES = "The dense model is no better than guessing"
CASES: dict[str, tuple[dict[str, Any], str, str]] = {  # the headline's words, and the rule's
    "the fewest without a loss, in whatever order they were typed": (
        documents((3, 0.001, 0.01, "no"), (1, -0.2, 0.1, "worse"), (2, -0.005, 0.015, "no")),
        "Half of the heads (2 of 4) can go: accuracy 70.0 % against 80.0 % (no measurable change; a loss of up to 2.0 points is possible), "
        f"1.50x as fast {WHERE}; removing every head would give 2.00x.", "Recommended: 2 heads, the smallest model for which a loss above",
    ),
    # More examples made a loss of 0.3 % measurable, and only therefore the model was not recommended.
    "a small loss of perplexity": (documents((2, 0.003, 0.002, "worse"), metric="perplexity"),
                                   "(+0.3%, measurably worse; a loss of up to 0.5% is possible)", "Recommended: 2 heads, since a loss above 5 % is"),
    "a small loss of accuracy": (documents((2, -0.008, 0.006, "worse")), "(-0.8 points, measurably worse; a loss of up to 1.4 points is possible)",
                                 "Recommended: 2 heads, since a loss above 2.5 points is ruled out at 95 %."),
    "too few examples": (documents((2, -0.05, 0.06, "no"), (1, -0.05, 0.08, "no")), TOO_FEW, "None is recommended: for no model a loss above 2.5"),
    "all are worse": (
        documents((3, -0.03, 0.01, "worse"), (2, -0.1, 0.01, "worse")), "Every plan worsens the accuracy; the mildest removes a quarter of the "
        "heads (1 of 4): accuracy 70.0 % against 80.0 % (-3.0 points, measurably worse), 1.50x", "None is recommended",
    ),
    "one is better": (documents((2, 0.03, 0.01, "better")), "can go: accuracy 70.0 % against 80.0 % (+3.0 points, measurably better)", "Recommended"),
    "perplexity, unsure": (documents((2, 0.02, 0.04, "no"), metric="perplexity"), TOO_FEW, "None is recommended"),
    "perplexity, better": (documents((2, -0.02, 0.01, "better"), metric="perplexity"), "can go", "Recommended"),
    "a plain loss, as a share of the dense model's": (documents((2, 0.002, 0.02, "no"), metric="loss"), "a loss of up to 0.022 is possible", "above 5 %"),
    "an allowed drop": (limited(0.08), "can go: accuracy 70.0 % against 80.0 % (-6.0 points, measurably worse; a loss of up to 7.0 points is",
                        "since a loss above 8 points (your limit) is ruled out"),
    "an allowed drop that is exceeded": (limited(0.05), "worsens the accuracy", "for no model a loss above 5 points (your limit) is ruled out"),
    "guessing": (guessing("accuracy", 0.76), GUESSES, "None is recommended: the dense model is no better than guessing."),
    "not guessing": (guessing("accuracy", 0.5), "can go", "Recommended"),
    "guessing tokens": (guessing("perplexity", 12.5), GUESSES, "None is recommended: the dense model is no"),
    "slower": (timed({**SPEED, "ratio": 0.9, "verdict": "slower"}, FASTER), f"slower (0.90x as fast) {WHERE}; removing every head would give 1.50x", ""),
    "not faster": (timed(SPEED, SPEED), f"not measurably faster (1.01x, 0.98 to 1.04) {WHERE}; nor would it be with every head removed.", ""),
    "faster than the bound": (timed({**FASTER, "ratio": 1.6}, FASTER), f"1.60x as fast {WHERE}.", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str, report: Any) -> None:
    data, headline, rule = CASES[name]
    text = report(data)
    assert headline in text.split("**")[1]
    (line,) = re.findall(r"^- ((?:None is r|R)ecommended.*)$", text, re.M)
    assert rule in line
    strong = re.findall(r"^\| \*\*(\d)\*\* \|", text, re.M)
    assert strong == re.findall(r"Recommended: (\d)", line)


def test_what_was_changed_beside_the_removal_and_where_it_was_timed(report: Any) -> None:
    data = documents((2, -0.1, 0.01, "worse"))
    refitted = "with the kept heads' weights refitted by least squares"
    for changes, words in (
        ({}, "worsens the accuracy: "), ({"repair": repaired()}, f"accuracy, {refitted} (repair, without training): accuracy"),
        ({"repair": repaired(), "finetune": TRAINED}, f"accuracy, {refitted} and the smaller model trained again: accuracy"),
        ({"repair": repaired(layers={}), "finetune": TRAINED}, "accuracy, with the smaller model trained again: accuracy"),
    ):  # fmt: skip
        data["budgets"][0] |= changes
        assert words in report(data).split("**")[1]
    row = data["latency"]["rows"][0]
    shapes = [(1, 9), (32, 36), (32, 9), (1, 36)]  # the largest batch, at the usual length
    data["latency"]["rows"] = [{**row, "batch": batch, "length": length} for batch, length in shapes]
    elsewhere = RUN["environment"] | {"device": "cuda:0", "device_name": "a GPU"}  # scores may be of another machine
    assert "at batch 32 x 9 tokens on a GPU (cuda:0, float32)" in report({**data, "environment": elsewhere})


def test_chosen_heads_beside_random_ones(report: Any) -> None:
    data = documents((3, 0.0, 0.001, "no"), (2, 0.0, 0.001, "no"))
    gain = {**data["budgets"][0]["change"], "value": 0.1, "low": 0.05, "high": 0.15, "verdict": "better"}
    data["budgets"][0] |= {"random": [0.5, 0.6], "over_random": gain}
    data["budgets"][1] |= {"random": [0.5, 0.6], "over_random": {**gain, "verdict": "no measurable change"}}
    text, caution = report(data), "measurably beat as many random ones"
    assert (
        "- Better than random heads? Yes with 3 heads (70.0 % against 55.0 %: +10.00 points, +5.00 to +15.00); no measurable difference with "
        "2 heads (70.0 % against 55.0 %: +10.00 points, +5.00 to +15.00). The intervals cover the choice of examples, not the draw of random "
    ) in text
    assert caution not in text
    data["budgets"][0]["random"] = [0.5, 0.75]  # beyond chance for these examples, but one draw was better
    text = report(data)
    assert "random heads? No measurable difference with 3 heads (70.0 % against 62.5 %: +10.00 points," in text
    assert text.index(caution) < text.index("| heads kept |") < text.index("- Recommended")
    assert caution not in report({**data, "planning": {"plan": "my.json"}})


def test_a_change_of_perplexity_fits_the_mean_it_stands_beside(report: Any) -> None:
    """Chosen heads with a perplexity of 60 are worse than draws of 10, 20 and 300 by the loss, and better than their arithmetic mean."""
    data = documents((2, 0.0, 0.001, "no"), metric="perplexity")
    (budget,) = data["budgets"]
    draws = hp.Measurement({}, np.full(2, np.log([10, 20, 300]).mean()), np.zeros(2), np.ones(2))
    chosen = hp.Measurement({}, np.log([60.0, 60.0]), np.zeros(2), np.ones(2))
    budget["random"] = [10.0, 20.0, 300.0]
    budget["over_random"] = asdict(hp.compare(draws, chosen, "perplexity"))
    budget["pruned"]["metrics"] = {"perplexity": 60.0}
    text = report(data)
    assert "60 against 39.15: +53.3%" in text
    assert "| random heads: geometric mean of 3 draws (range) |" in text


def test_random_heads_are_not_compared_with_trained_ones(report: Any) -> None:
    """Chosen heads that were no better than random ones were better once they had been trained, which random ones are not."""
    data = documents((2, 0.0, 0.001, "no"))
    before = {**MEASURED, "metrics": {**MEASURED["metrics"], "accuracy": 0.6}}
    data["budgets"][0] |= {"random": [0.6, 0.62], "repair": None, "finetune": {**TRAINED, "before": before}}
    text = report(data)
    assert "difference with 2 heads (60.0 % against 61.0 %). Random heads are not trained, so the chosen ones" in text
    assert "| chosen against random heads: mean of 2 draws (range), both before training |" in text
    assert "| 60.0 % against 61.0 % (60.0 % to 62.0 %) |" in text


def on_other_data(change: str, gain: str | None, here: str = "better") -> dict[str, Any]:
    data = documents((2, 0.0, 0.001, "no"))
    one = data["budgets"][0]["change"]
    data["also"] = [{"name": "notes.txt", "data": RUN["parts"]["report"], "dense": MEASURED}]
    gained = gain and {**one, "value": -0.2, "verdict": gain}
    there = {"pruned": MEASURED, "change": {**one, "verdict": change}, "gain": gained}
    data["budgets"][0] |= {"also": [there], "repair": repaired(gain={**one, "value": 0.1, "verdict": here})}
    return data


def test_cautions(report: Any) -> None:
    hurts, worse = "repair hurts on `notes.txt` (-20.00 points", "accuracy is measurably worse on `notes.txt`"
    text = report(on_other_data("no measurable change", "worse"))
    assert hurts in text
    assert "while it helped on the first data" in text
    assert worse not in text
    assert hurts not in report(on_other_data("no measurable change", "worse", here="worse"))  # then it is no secret
    text = report(on_other_data("worse", "no measurable change"))
    assert worse in text
    assert hurts not in text
    run = copy.deepcopy(RUN)
    run["parts"]["report"]["shortened"] = 7
    assert "**Caution:** 7 of the 200 reported texts were cut at their end: they are longer" in report(METRICS, run=run)
    for metric, low, high, trained in (
        ("accuracy", 0.95, 0.99, True), ("accuracy", 0.80, 0.90, False), ("perplexity", 1.0, 2.0, True), ("perplexity", 95.0, 99.0, False),
    ):  # fmt: skip
        data = documents((2, 0.0, 0.001, "no"), metric=metric)
        data["curve"][0] |= {"low": low, "high": high}
        assert ("so it was probably trained on `validation`" in report(data)) == trained
    data = documents((2, 0.0, 0.001, "no"), metric="perplexity")
    data["budgets"][0]["change"]["carried_by"] = 3.0
    assert "the change of the loss rests on about 3 of the 200 examples" in report(data)


def shown(folder: Path, width: int) -> str:
    """What the terminal says of a run."""
    console = Console()
    console.out = RichConsole(file=io.StringIO(), width=width, highlight=False)
    run = RunFolder(folder)
    metrics = run.read_metrics()
    assert metrics is not None
    tables._print_summary(console, run.read_run(), metrics)
    tables.print_times(console, metrics.latency.rows)
    told: str = console.out.file.getvalue()  # type: ignore[attr-defined]
    return told


@pytest.mark.parametrize("folder", [*REPORTS, None], ids=lambda p: p.name if p else "other-data")
def test_report_terminal_and_json_say_the_same(folder: Path | None, tmp_path: Path, report: Any) -> None:
    if folder is None:
        report(on_other_data("worse", "worse"))
    folder = folder or tmp_path / "r"
    text, data = (folder / "report.md").read_text(), json.loads((folder / "metrics.json").read_text())
    first, wide = text.partition("\n## ")[0], re.sub(r" +", " ", shown(folder, 400))
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in first.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[3:]] == [str(b["kept"]) for b in sorted(data["budgets"], key=lambda b: -b["kept"])]
    lines = [first.split("**")[1], *re.findall(r"^(?:\*\*Caution:\*\* |- )(.*)$", first, re.M)]
    for line in (line for line in lines if not line.startswith("To use")):
        assert line in wide
    for row in rows[2:]:
        assert " ".join(cell for i, cell in enumerate(row) if cell and i != 4) in wide
    for b in data["budgets"]:
        row = next(row for row in rows if row[0] == str(b["kept"]))
        value, change = b["pruned"]["metrics"][data["metric"]], b["change"]
        assert row[1].startswith(f"{100 * value:.1f} %")
        assert f"{100 * change['low']:+.2f} to {100 * change['high']:+.2f}" in row[2]
        assert row[3] == change["verdict"]
    narrow = shown(folder, 80)  # where "22,713,986" was "22,713,9…"
    assert max(map(len, narrow.partition("Dense and pruned")[2].partition("\n\n")[0].splitlines())) <= 80
    for model in (data["dense"], *data["budgets"]):
        assert f"{model['parameters']:,}" in narrow
