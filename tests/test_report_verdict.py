"""What a run comes to, in a sentence: right in every case, and the same in the report, in the terminal and in JSON."""

from __future__ import annotations

import copy
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console as RichConsole

import headprune as hp
from headprune import latency
from headprune.app.console import Console
from headprune.app.documents import Metrics, Run
from headprune.app.report import findings, markdown, numbers, sentences
from headprune.app.report.figures import colours
from headprune.app.report.verdict import Kind, against_random, elsewhere, headline_row, loss_within, verdict
from headprune.app.workflow.results import mean_of
from headprune.attention import AttentionLayer
from headprune.cli import tables
from headprune.evaluation import Measurement, compare
from tests.support.commands import run as command
from tests.support.documents import LAYER, MEASURED, METRICS, RUN, SPEED, TIMING, TRAINED, repaired
from tests.support.folders import sentences as rows_of
from tests.support.folders import write_jsonl

FASTER = {"ratio": 1.5, "low": 1.4, "high": 1.6, "verdict": "faster"}
OTHERS = {"no": "no measurable change"}
REPORTS = sorted((Path(__file__).parent.parent / "reports").glob("*/metrics.json"))


def documents(*changes: tuple[int, float, float, str], metric: str = "accuracy", **more: Any) -> dict[str, Any]:
    """Metrics with a pruned model for each (heads kept, change, half its interval, verdict)."""
    found = copy.deepcopy(METRICS)
    (first,) = found["budgets"]
    found |= {"metric": metric, "budgets": [], **more}
    names = [f"{kept} heads" for kept, *_ in changes]
    for name, (kept, value, half, word) in zip(names, changes, strict=True):
        change = {**first["change"], "metric": metric, "value": value, "low": value - half, "high": value + half}
        found["budgets"].append(
            {**first, "name": name, "kept": kept, "asked": kept, "checkpoint": f"pruned-{kept}", "change": {**change, "verdict": OTHERS.get(word, word)}}
        )  # fmt: skip
    row = found["latency"]["rows"][0]
    row["timings"] = dict.fromkeys(["dense", *names, "no heads"], TIMING)
    row["speedups"] = {**dict.fromkeys(names, FASTER), "no heads": {**FASTER, "ratio": 2.0}}
    if metric == "perplexity":
        for model in (found["dense"], *(b["pruned"] for b in found["budgets"])):
            model |= {"metrics": {"perplexity": 12.0}, "low": 11.0, "high": 13.0}
        for b in found["budgets"]:
            b["random"] = [20.0, 21.0]
    return found


def read(data: dict[str, Any]) -> Metrics:
    return Metrics.model_validate(data)


def headline(metrics: Metrics) -> str:
    """On the machine that RUN says."""
    return sentences.headline(Run.model_validate(RUN), metrics)


def test_the_fewest_heads_without_a_loss_are_recommended_in_whatever_order_they_were_typed() -> None:
    metrics = read(documents((3, 0.001, 0.01, "no"), (1, -0.2, 0.1, "worse"), (2, -0.005, 0.015, "no")))
    found = verdict(metrics)
    assert (found.kind, found.budget.kept, found.recommended) == (Kind.CAN_GO, 2, True)
    assert headline(metrics) == (
        "Half of the heads (2 of 4) can go: accuracy 70.0 % against 80.0 % (no measurable change; a loss of up to 2.0 points is possible), 1.50x as fast at batch 1 x 9 "
        "tokens on a CPU (cpu, 2 threads, float32); removing every head would give 2.00x."
    )
    _, rows = sentences.table(metrics)
    assert [row.cells[0] for row in rows] == ["4 (dense)", "3", "2", "1"]
    assert [row.recommended for row in rows] == [False, False, True, False]


@pytest.mark.parametrize(("value", "half", "metric", "told"), [
    (0.003, 0.002, "perplexity", "(+0.3%, measurably worse; a loss of up to 0.5% is possible)"),
    (-0.008, 0.006, "accuracy", "(-0.8 points, measurably worse; a loss of up to 1.4 points is possible)"),
])  # fmt: skip
def test_a_small_loss_is_recommended_whether_or_not_it_is_measurable(
    value: float, half: float, metric: str, told: str
) -> None:
    """More examples made a loss of 0.3 % measurable, and only therefore the model was not recommended."""
    metrics = read(documents((2, value, half, "worse"), metric=metric))
    assert verdict(metrics).recommended
    assert told in headline(metrics)
    limit = "2.5 points" if metric == "accuracy" else "5 %"
    assert sentences.rule(metrics) == f"Recommended: 2 heads, since a loss above {limit} is ruled out at 95 %."
    wide = read(documents((2, value, 10 * half, "no"), metric=metric))
    assert verdict(wide).recommended == (metric == "perplexity")  # +2.3 % at most, and 6.8 points


def test_no_measurable_change_on_few_examples_is_no_recommendation() -> None:
    metrics = read(documents((2, -0.05, 0.06, "no"), (1, -0.05, 0.08, "no")))
    found = verdict(metrics)
    assert (found.kind, found.budget.kept, found.recommended) == (Kind.UNSURE, 2, False)
    assert headline(metrics).startswith("200 examples are too few to say whether heads can go: without half of the")
    assert headline(metrics).endswith("a loss of up to 11.0 points is possible.")
    assert sentences.rule(metrics).startswith("None is recommended")


def test_where_all_are_worse_the_mildest_is_told() -> None:
    metrics = read(documents((3, -0.03, 0.01, "worse"), (2, -0.1, 0.01, "worse")))
    assert verdict(metrics).kind is Kind.COSTS
    assert headline(metrics).startswith(
        "Every plan worsens the accuracy; the mildest removes a quarter of the heads (1 of 4): accuracy 70.0 % against 80.0 % "
        "(-3.0 points, measurably worse), 1.50x"
    )


def test_one_that_is_better() -> None:
    metrics = read(documents((2, 0.03, 0.01, "better")))
    assert "can go: accuracy 70.0 % against 80.0 % (+3.0 points, measurably better)" in headline(metrics)


@pytest.mark.parametrize(("value", "half", "word", "kind"), [
    (0.02, 0.01, "worse", Kind.CAN_GO), (0.1, 0.06, "worse", Kind.COSTS), (0.02, 0.025, "no", Kind.CAN_GO), (0.02, 0.04, "no", Kind.UNSURE),
    (-0.02, 0.01, "better", Kind.CAN_GO),
])  # fmt: skip
def test_a_perplexity_is_better_when_it_is_smaller(value: float, half: float, word: str, kind: Kind) -> None:
    metrics = read(documents((2, value, half, word), metric="perplexity"))
    assert verdict(metrics).kind is kind
    assert loss_within(metrics, metrics.budgets[0].change) == pytest.approx(value + half)
    assert "perplexity 12 against 12" in headline(metrics)
    assert against_random(metrics, metrics.budgets[0]).verdict == "better"


def test_a_change_of_perplexity_fits_the_mean_it_stands_beside() -> None:
    """Chosen heads with a perplexity of 60 are worse than draws of 10, 20 and 300 by the loss, and better than their arithmetic mean."""
    data = documents((2, 0.0, 0.001, "no"), metric="perplexity")
    (budget,) = data["budgets"]
    draws = [Measurement({}, np.log([p, p]), np.zeros(2), np.ones(2)) for p in (10.0, 20.0, 300.0)]
    chosen = Measurement({}, np.log([60.0, 60.0]), np.zeros(2), np.ones(2))
    change = compare(mean_of(draws), chosen, "perplexity")
    budget["random"], budget["over_random"] = [10.0, 20.0, 300.0], asdict(change)
    budget["pruned"]["metrics"] = {"perplexity": 60.0}
    found = against_random(read(data), read(data).budgets[0])
    assert change.value == pytest.approx(found.value / found.mean - 1)
    assert "60 against 39.15: +53.3%" in sentences.over_random(read(data))
    assert sentences.control(read(data)) == "random heads: geometric mean of 3 draws (range)"


def test_random_heads_are_not_compared_with_trained_ones() -> None:
    """Chosen heads that were no better than random ones were better once they had been trained, which random ones are not."""
    data = documents((2, 0.0, 0.001, "no"))
    (budget,) = data["budgets"]
    before = {**MEASURED, "metrics": {**MEASURED["metrics"], "accuracy": 0.6}}
    budget |= {"random": [0.6, 0.62], "repair": None, "finetune": {**TRAINED, "before": before}}
    found = against_random(read(data), read(data).budgets[0])
    assert found.value == 0.6
    assert found.verdict == "no measurable difference"
    told = sentences.over_random(read(data))
    assert "60.0 % against 61.0 %" in told
    assert "as they were before training" in told
    assert sentences.control(read(data)) == "chosen against random heads: mean of 2 draws (range), both before training"
    assert "60.0 % against 61.0 %" in sentences.table(read(data))[1][1].cells[sentences.Column.RANDOM]


def test_a_plain_loss_is_judged_as_a_share_of_the_dense_models() -> None:
    data = documents((2, 0.002, 0.02, "no"), metric="loss")
    for model in (data["dense"], data["budgets"][0]["pruned"]):
        model |= {"metrics": {"loss": 0.5}, "low": 0.4, "high": 0.6}
    metrics = read(data)
    assert loss_within(metrics, metrics.budgets[0].change) == pytest.approx(0.044)
    assert verdict(metrics).kind is Kind.CAN_GO
    assert "| +0.002 (-0.018 to +0.022) |" in markdown.render(Run.model_validate(RUN), [], metrics)


def test_a_drop_that_was_allowed_counts_instead_of_the_usual_one() -> None:
    data = documents((2, -0.06, 0.01, "worse"))
    data["budgets"][0]["budget"] = {
        "asked": "drop 0.08", "kind": "drop", "limit": 0.08, "relative": False, "unit": "", "measured": 0.05, "low": 0.04, "high": 0.07,
    }  # fmt: skip
    metrics = read(data)
    assert verdict(metrics).kind is Kind.CAN_GO
    assert (
        "can go: accuracy 70.0 % against 80.0 % (-6.0 points, measurably worse; a loss of up to 7.0 points is possible)"
        in headline(metrics)
    )
    assert "a loss above 8 points (your limit) is ruled out" in sentences.rule(metrics)
    data["budgets"][0]["budget"]["limit"] = 0.05
    assert verdict(read(data)).kind is Kind.COSTS
    assert "None is recommended: for no model a loss above 5 points (your limit) is ruled out" in sentences.rule(
        read(data)
    )


@pytest.mark.parametrize(("metric", "level", "guessing"), [
    ("accuracy", 0.76, True), ("accuracy", 0.5, False), ("perplexity", 12.5, True), ("perplexity", 30_000.0, False),
])  # fmt: skip
def test_a_dense_model_that_only_guesses(metric: str, level: float, guessing: bool) -> None:
    data = documents((2, 0.0, 0.001, "no"), metric=metric)
    data["dense"]["guessing"] = level
    assert (verdict(read(data)).kind is Kind.GUESSING) == guessing
    assert headline(read(data)).startswith("The dense model is no better than guessing") == guessing
    # The pruned model lost nothing: that is not why none is recommended.
    why = "None is recommended: the dense model is no better than guessing."
    assert (sentences.rule(read(data)) == why) == guessing


@pytest.mark.parametrize(("speed", "bound", "told"), [
    ({**SPEED, "ratio": 0.9, "verdict": "slower"}, FASTER, "slower (0.90x as fast) at batch 1 x 9 tokens on a CPU (cpu, 2 threads, float32); removing every head would give 1.50x"),
    (SPEED, SPEED, "not measurably faster (1.01x, 0.98 to 1.04) at batch 1 x 9 tokens on a CPU (cpu, 2 threads, float32); nor would it be with every head removed."),
    ({**FASTER, "ratio": 1.6}, FASTER, "1.60x as fast at batch 1 x 9 tokens on a CPU (cpu, 2 threads, float32)."),
])  # fmt: skip
def test_speed_in_the_headline(speed: dict[str, Any], bound: dict[str, Any], told: str) -> None:
    data = documents((2, 0.0, 0.001, "no"))
    data["latency"]["rows"][0]["speedups"] = {"2 heads": speed, "no heads": bound}
    assert told in headline(read(data))
    data["latency"]["bound"] = None
    assert "every head" not in headline(read(data))


def test_the_headlines_speed_is_of_the_largest_batch_at_the_usual_length() -> None:
    data = documents((2, 0.0, 0.001, "no"))
    (row,) = data["latency"]["rows"]
    shapes = [(1, 9), (32, 36), (32, 9), (1, 36)]
    data["latency"]["rows"] = [{**row, "batch": batch, "length": length} for batch, length in shapes]
    found = headline_row(read(data).latency)
    assert (found.batch, found.length) == (32, 9)


def test_chosen_heads_beside_random_ones() -> None:
    data = documents((3, 0.0, 0.001, "no"), (2, 0.0, 0.001, "no"))
    gain = {**data["budgets"][0]["change"], "value": 0.1, "low": 0.05, "high": 0.15, "verdict": "better"}
    data["budgets"][0] |= {"random": [0.5, 0.6], "over_random": gain}
    data["budgets"][1] |= {"random": [0.5, 0.6], "over_random": {**gain, "verdict": "no measurable change"}}
    metrics = read(data)
    assert (
        sentences.over_random(metrics)
        == "Yes with 3 heads (70.0 % against 55.0 %: +10.00 points, +5.00 to +15.00); no measurable difference with 2 heads "
        "(70.0 % against 55.0 %: +10.00 points, +5.00 to +15.00). The intervals cover the choice of examples, not the draw of random heads."
    )
    assert not [c for c in sentences.cautions(Run.model_validate(RUN), metrics) if "random" in c]
    data["budgets"][0]["random"] = [0.5, 0.75]  # beyond chance for these examples, but one draw was better
    metrics = read(data)
    assert sentences.over_random(metrics).startswith(
        "No measurable difference with 3 heads (70.0 % against 62.5 %: +10.00 points,"
    )
    assert "measurably beat as many random ones" in sentences.cautions(Run.model_validate(RUN), metrics)[0]
    assert not sentences.cautions(Run.model_validate(RUN), metrics.changed(planning={"plan": "my.json"}))


def on_other_data(change: str, gain: str | None) -> dict[str, Any]:
    data = documents((2, 0.0, 0.001, "no"))
    one = data["budgets"][0]["change"]
    data["also"] = [{"name": "notes.txt", "data": RUN["parts"]["report"], "dense": MEASURED}]
    data["budgets"][0]["also"] = [
        {
            "pruned": MEASURED,
            "change": {**one, "verdict": change},
            "gain": gain and {**one, "value": -0.2, "verdict": gain},
        }
    ]
    data["budgets"][0]["repair"] = repaired(gain={**one, "value": 0.1, "verdict": "better"})
    return data


def test_repair_that_helped_here_and_hurt_there() -> None:
    run = Run.model_validate(RUN)
    data = on_other_data("no measurable change", "worse")
    told = sentences.cautions(run, read(data))
    assert any(
        "repair hurts on notes.txt (-20.00 points" in c and "while it helped on the first data" in c for c in told
    )
    data["budgets"][0]["repair"]["gain"]["verdict"] = "worse"  # then it is no secret
    assert not elsewhere(read(data))
    (found,) = elsewhere(read(on_other_data("worse", "no measurable change")))
    assert (found.repair_hurt, found.worse) == (False, True)
    assert not elsewhere(read(on_other_data("no measurable change", "better")))
    text = markdown.render(run, [], read(on_other_data("worse", "better")))
    assert "## On other data" in text
    assert "| `notes.txt`, 200 examples | 4 (dense) | 60.0 % (50.0 % to 70.0 %) |" in text


def test_texts_that_were_cut_are_told() -> None:
    run = copy.deepcopy(RUN)
    run["parts"]["report"]["shortened"] = 7
    told = sentences.cautions(Run.model_validate(run), read(METRICS))
    assert any(c.startswith("7 of the 200 reported texts were cut at their end: they are longer") for c in told)


def test_heads_that_stay_although_they_score_low() -> None:
    layer = AttentionLayer(LAYER.name, 0, "encoder", 4, 4, 8)
    values = {layer.name: torch.tensor([0.1, 0.2, 0.0, 0.4], dtype=torch.float64)}
    found = hp.HeadScores("ablation", "loss (nats) added", values, values, 100, (layer,))
    (budget,) = read(METRICS).budgets  # without H1 and H2
    assert findings.kept_though_low(found, budget) == ["L0.H0"]
    searched = budget.changed(method="", strategy="re-scored")
    names, why = sentences.stay_though_low([found], searched)
    assert names.endswith("among the 2 lowest: L0.H0.")
    assert "others can do scores low, and matters once those others are gone" in why
    assert (
        "A constraint (groups, protected heads"
        in sentences.stay_though_low([found], budget.changed(strategy="per-layer"))[1]
    )
    assert not sentences.stay_though_low([found], budget.changed(drop={layer.name: (0, 2)}))


def test_no_layers_colours_hide_anothers() -> None:
    grid = np.array([[300.0, 200.0], [4.0, 1.0], [3.0, 6.0], [2.0, 5.0]]) / 1000
    norm, power = colours(grid, both=False)
    assert power == -3
    assert float(norm(0.006)) - float(norm(0.001)) > 0.1  # of a linear scale it would be .017
    assert float(norm(0.3)) == pytest.approx(1)
    middle, _ = colours(np.array([[-1.0, 2.0], [0.5, np.nan]]), both=True)
    assert float(middle(0.0)) == pytest.approx(0.5)


def shown(run: Run, metrics: Metrics, folder: Path, width: int = 400) -> str:
    console = Console()
    console.out = RichConsole(file=io.StringIO(), width=width, highlight=False)
    metrics.write(folder / "metrics.json")
    tables._print_results(console, run, metrics)
    found = console.out.file.getvalue()  # type: ignore[attr-defined]
    return re.sub(r" +", " ", found)


@pytest.mark.parametrize("path", [*REPORTS, None], ids=lambda p: p.parent.name if p else "other-data")
def test_report_terminal_and_json_say_the_same(path: Path | None, tmp_path: Path) -> None:
    run = Run.read(path.parent / "run.json") if path else Run.model_validate(RUN)
    metrics = Metrics.read(path) if path else read(on_other_data("worse", "worse"))
    text, screen = markdown.render(run, [], metrics), shown(run, metrics, tmp_path)
    data = json.loads((tmp_path / "metrics.json").read_text())
    first = "\n".join(text.splitlines()[:25])
    _, rows = sentences.table(metrics)
    for line in (
        sentences.headline(run, metrics),
        sentences.precision(run, metrics),
        sentences.over_random(metrics),
        *sentences.cautions(run, metrics),
    ):
        assert line in first
        assert line in screen
    hidden = {sentences.Column.RANDOM}
    for row in rows:
        assert all(cell in first for cell in row.cells)
        assert " ".join(cell for i, cell in enumerate(row.cells) if cell and i not in hidden) in screen
    for b in data["budgets"]:
        value, change = b["pruned"]["metrics"][data["metric"]], b["change"]
        row = next(row.cells for row in rows if row.cells[0] == str(b["kept"]))
        assert row[1].startswith(f"{100 * value:.1f} %")
        assert f"{100 * change['low']:+.2f} to {100 * change['high']:+.2f}" in row[2]
        assert row[3] == change["verdict"]
        speed = headline_row(metrics.latency).speedups[b["name"]]
        assert row[5:7] == (f"{speed.ratio:.2f}x ({speed.low:.2f} to {speed.high:.2f})", speed.verdict)
        if b.get("weights"):
            assert f"; {numbers.size(b['weights'])}" in row[7]


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.parent.name)
def test_a_narrow_terminal_cuts_no_number(path: Path, tmp_path: Path) -> None:
    """At 80 columns "22,713,986" was "22,713,9…"."""
    run, metrics = Run.read(path.parent / "run.json"), Metrics.read(path)
    told = shown(run, metrics, tmp_path, 80)
    for number in (metrics.dense.parameters, *(b.parameters for b in metrics.budgets)):
        assert f"{number:,}" in told


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.parent.name)
def test_the_first_screen_answers_five_questions_in_plain_words(path: Path) -> None:
    run, metrics = Run.read(path.parent / "run.json"), Metrics.read(path)
    first = "\n".join(markdown.render(run, [], metrics).splitlines()[:25])
    assert re.search(r"of the heads \(\d+ of \d+\)|\d+ of the \d+ heads", first)  # how many went
    assert re.search(r"against [\d.]+ % \(", first)  # what it cost
    assert re.search(r"[\d.]+x as fast|not measurably faster", first)
    assert f" on {numbers.device(metrics.environment or run.environment, run.model.dtype)}" in first
    assert "the kept heads' weights refitted" in first
    assert re.search(r"\| \d+ \(dense\).*[\d.]+ [kMG]B\) \|", first)
    assert "| parameters (size in float" in first
    assert "| faster |" in first
    assert "Better than random heads?" in first
    assert "headprune.load(" in first
    for word in ("re-scored", "W_O", "to first order", "divergence", "ridge"):
        assert word not in first


# -- planted cases -----------------------------------------------------------------------------


def test_models_that_are_equally_good_are_told_apart_at_most_five_times_in_a_hundred() -> None:
    """Of 300 examples each model gets four in five right, mostly the same: by the verdict of the whole report."""
    metrics = read(documents((2, 0.0, 0.001, "no")))
    (budget,) = metrics.budgets
    rng, alike, few = np.random.default_rng(0), 0, 0
    for _ in range(1000):
        easy = rng.random(300) < 0.75
        dense, pruned = (
            Measurement({}, np.zeros(300), np.where(easy, 1.0, rng.random(300) < 0.2), np.ones(300, int)) for _ in "ab"
        )
        change = compare(dense, pruned, "accuracy")
        found = metrics.changed(budgets=[budget.changed(change=change)])
        alike += change.verdict == "no measurable change"
        few += verdict(found).kind is Kind.COSTS
    assert alike >= 950
    assert few <= 50


def rounds(rng: np.random.Generator, factor: float, count: int = 20) -> tuple[list[float], list[float]]:
    """Times of two models in turn on a machine that changes its speed and is sometimes interrupted."""
    drift = 1 + 0.3 * np.sin(np.linspace(0, 3, count) + rng.uniform(0, 6))
    noise = np.exp(rng.normal(0, 0.03, (2, count))) * (
        1 + (rng.random((2, count)) < 0.05) * rng.exponential(1, (2, count))
    )
    dense, other = drift * noise[0], drift * noise[1] * factor
    return dense.tolist(), other.tolist()


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "no measurable change"), (1.1, "slower"), (0.9, "faster")])
def test_planted_times_are_told(factor: float, expected: str) -> None:
    rng = np.random.default_rng(1)
    found = [latency.speedup(*rounds(rng, factor)).verdict for _ in range(4000)]
    assert found.count(expected) >= 3800  # by a bootstrap, 93 % of the equally fast ones


def test_a_model_that_was_slowed_is_found_slower() -> None:
    class Slowed(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                super().forward(x)
            return super().forward(x)

    models = {"dense": torch.nn.Linear(128, 128), "slowed": Slowed(128, 128)}
    row = hp.benchmark(models, torch.randn(64, 128), min_seconds=0.01)
    assert row.speedups["slowed"].verdict == "slower"


# -- second data, from the command line -----------------------------------------------------------


QUICK = ("--strategy", "one-shot", "-m", "gradient", "-q")


@pytest.mark.usefixtures("brief")
def test_second_data_are_measured_and_change_nothing_else(here: Path, bert_folder: Path, data_folder: Path) -> None:
    other = write_jsonl(
        here / "other.jsonl", [{"sentence": r["text"], "label": r["label"]} for r in rows_of(30, seed=9)]
    )
    ask = ("prune", bert_folder, "-d", data_folder, "-L", 20, "-k", 4, *QUICK)
    command(*ask, "-o", "plain")
    screen = command(*ask[:-1], "-o", "both", "--also", other, "--also", data_folder).stdout
    plain, both = (json.loads((here / name / "metrics.json").read_text()) for name in ("plain", "both"))
    assert [d["name"] for d in both["also"]] == [str(other), str(data_folder)]
    assert "also" not in plain or not plain["also"]
    for key in ("pruned", "change", "drop", "random", "over_random"):
        assert plain["budgets"][0][key] == both["budgets"][0][key]
    first, second = both["budgets"][0]["also"]
    assert first["gain"]["examples"] == both["also"][0]["data"]["examples"] > 0
    assert second["pruned"]["metrics"] == both["budgets"][0]["pruned"]["metrics"]  # its test split is what is reported
    report = (here / "both" / "report.md").read_text()
    assert "## On other data" in report
    assert numbers.change(compare_of(first["change"]), "accuracy") in report
    assert str(other) in screen
    assert json.loads((here / "both" / "run.json").read_text())["options"]["data"]["also"] == [
        str(other),
        str(data_folder),
    ]


def compare_of(change: dict[str, Any]) -> Any:
    from headprune.evaluation import Change

    return Change(**change)


@pytest.mark.usefixtures("brief")
def test_language_models_are_measured_on_a_text_that_comes_with_headprune(
    here: Path, llama_folder: Path, data_folder: Path
) -> None:
    command("prune", llama_folder, "-d", data_folder, "-L", 20, "-k", 4, *QUICK, "-o", "run")
    (also,) = json.loads((here / "run" / "metrics.json").read_text())["also"]
    assert also["name"] == "plain-english.txt"
    assert also["data"]["examples"] == 40
    assert "`plain-english.txt`, 40 examples" in (here / "run" / "report.md").read_text()


def test_second_data_that_are_not_there_or_do_not_fit(here: Path, bert_folder: Path, data_folder: Path) -> None:
    ask = ("prune", bert_folder, "-d", data_folder, "-L", 20, "-k", 4, "--strategy", "one-shot", "-m", "gradient")
    assert "There is no file or folder missing.jsonl" in command(*ask, "--also", "missing.jsonl", code=1).stderr
    wrong = write_jsonl(here / "wrong.jsonl", [{"text": f"good {i}", "label": 7} for i in range(9)])
    assert "label 7 does not fit the model's head" in command(*ask, "--also", wrong, code=1).stderr
    used = write_jsonl(
        here / "used.jsonl", [json.loads(line) for line in (data_folder / "train.jsonl").read_text().splitlines()]
    )
    assert "repeat an input" in command(*ask[:4], "-L", 60, *ask[6:], "--also", used, code=1).stderr


def test_nothing_is_trained_on_second_data(here: Path, bert_folder: Path, data_folder: Path) -> None:
    from headprune.app.data import DataOptions, load_also, load_parts, load_train
    from headprune.app.models import load_model

    rows = [json.loads(line) for line in (data_folder / "train.jsonl").read_text().splitlines()]
    other = write_jsonl(here / "some.jsonl", rows)
    options = DataOptions(str(data_folder), limit=20, also=(str(other),))
    loaded = load_model(str(bert_folder))
    parts = load_parts(options, loaded)
    beside = load_also(options, loaded, parts)
    (also,) = beside.also
    assert not set(also.inputs) & {*parts.score.inputs, *parts.choose.inputs}
    before, now = (load_train(options, loaded, p)[0] for p in (parts, beside))
    assert len(before) > len(now)
    assert set(map(repr, now.features)).isdisjoint(map(repr, also.features))
