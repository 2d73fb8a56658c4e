"""What the report says is what was measured, the bad news too."""

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.app.documents import Metrics, Run
from headprune.app.report import markdown
from headprune.app.runs import RunFolder
from headprune.planning import STRATEGIES
from headprune.repairing.steps import STEPS
from headprune.scoring import METHODS
from tests.support.documents import GENERATION, LAYER, MEASURED, METRICS, RUN, TIME, TRAINED, repaired


def scores(values: list[float], method: str = "ablation") -> hp.HeadScores:
    return hp.HeadScores(
        method, "loss (nats) added when the head is removed", {LAYER.name: torch.tensor(values, dtype=torch.float64)},
        {LAYER.name: torch.full((4,), 0.01, dtype=torch.float64)}, 100, (LAYER,),
    )  # fmt: skip


def render(
    metrics: dict[str, Any] | None = METRICS, *found: hp.HeadScores, run: dict[str, Any] = RUN, scored: bool = True
) -> str:
    """The report of documents as JSON holds them, with some scores."""
    shown = found or (scores([0.3, 0.2, -0.1, 0.005]),) if scored else ()
    return markdown.render(Run.model_validate(run), shown, metrics and Metrics.model_validate(metrics))


def test_figures_and_bad_news() -> None:
    text = render()
    assert (
        "**Removing half of the heads (2 of 4) worsens the accuracy: accuracy 70.0 % against 80.0 % (-10.0 points, measurably worse), not "
        "measurably faster (1.01x, 0.98 to 1.04) at batch 1 x 9 tokens on a CPU (cpu, 2 threads, float32); nor would it be "
        "with every head removed.**"
    ) in text
    assert (
        "| 2 | 70.0 % (64.0 % to 76.0 %) | -10.00 points (-15.00 to -5.00) | worse | 60.0 % (50.0 % to 70.0 %) |"
        in text
    )
    assert "900 (-10.0%)" in text
    assert (
        "1 of 4 heads are harmful (more than 1.96 standard errors below 0), and 1 cannot be told from 0 (within 1.96"
        in text
    )
    assert "L0 (block.0.attn): H1, H2" in text
    assert text.count("Caution") == 1  # 70.0 % is no better than the best of the random draws
    assert "measurably beat as many random ones, so this run does not show" in text


def test_a_control_that_was_repaired_by_less_stands_beside_heads_repaired_alike() -> None:
    metrics = copy.deepcopy(METRICS)
    step = {"before": 1.0, "held_out": 0.7, "strength": 1.0, "examples": 9}
    alone = {**MEASURED, "metrics": {"accuracy": 0.65}}
    metrics["budgets"][0]["repair"] = repaired(answers=step, layers_alone=alone)
    text = render(metrics)
    assert (
        "Random heads: 3 draws of the same number of heads, repaired layer by layer only; the chosen heads they are compared with were repaired in the same way"
        in text
    )
    assert "| heads | accuracy without | layer by layer alone | repaired |" in text
    assert "| 2 | 60.0 % | 65.0 % | 70.0 % |" in text
    metrics["budgets"][0]["repair"] |= {"answers": None, "layers_alone": None}
    text = render(metrics)
    assert "Random heads: 3 draws of the same number of heads, repaired in the same way." in text
    assert "last step" not in text


def test_the_effort_and_what_it_left_out_are_told() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["planning"] = {
        "strategy": "auto", "about": "As…", "effort": {"name": "low", "flops": 5e13, "examples": 128},
        "work": {
            "compensated": {"passes": 21.0, "flops": 2e12, "examples": 512},
            "re-scored": {"passes": 70.0, "flops": 7e13, "examples": 512, "left_out": "it would take much"},
        },
    }  # fmt: skip
    text = render(metrics)
    assert "re-scored was not tried: it would take much. `--effort high` tries it." in text
    assert "compensated takes about 21 forward passes over 512 examples (2 TFLOPs), as counted in advance" in text
    assert "uses up to 128 scoring examples" in text


def test_no_measurable_change() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0]["change"] |= {"value": 0.001, "low": -0.01, "high": 0.012, "verdict": "no measurable change"}
    text = render(metrics)
    assert (
        "**Half of the heads (2 of 4) can go: accuracy 70.0 % against 80.0 % (no measurable change; a loss of up to "
        in text
    )
    assert "| **2** |" in text
    assert "Recommended: 2 heads, since a loss above 2.5 points is ruled out at 95 %." in text


def test_a_choosing_part_that_was_trained_on() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["curve"][0] |= {"value": 0.97, "low": 0.95, "high": 0.99}
    assert (
        "**Caution:** The dense model's accuracy is 97.0 % where plans were chosen (`validation`) and 80.0 % on"
        in render(metrics)
    )


def test_scores_alone() -> None:
    text = render(None)
    assert "**Nothing is pruned yet: this run has only scored the heads.**" in text
    assert "headprune prune --keep 50%\n" in text
    assert "headprune prune --keep 50% -o 'my runs/a'\n" in render(None, run={**RUN, "folder": "my runs/a"})
    assert "## All metrics" not in text
    assert "highest: L0.H0 0.3" in text


def test_parts_of_the_data_are_told_as_they_were_used() -> None:
    scored = render(None)
    assert (
        "- The scores are from 100 examples (`train`). Two other parts, which share no example and no input with them, are set aside"
        in scored
    )
    assert "figure above" not in scored
    assert "; 50 of `validation` are set aside to choose between plans, and 200 of `test` to report on. No" in scored
    assert "Other sizes" not in scored
    metrics = copy.deepcopy(METRICS)
    assert "100 (`train`) score the heads, 50 (`validation`) choose between plans, and every figure" in render(metrics)
    assert (
        "- Scores come from 100 examples of `train`; plans were chosen on 50 of `validation`; accuracy is reported on 200 of `test`. No"
        in render(metrics)
    )
    metrics["budgets"][0]["repair"] = repaired()
    assert "100 (`train`) score the heads and fit the repair, 50" in render(metrics)
    metrics["planning"] = {"plan": "my.json"}
    text = render(metrics, scored=False)
    assert "100 (`train`) fit the repair, 50 (`validation`) are used for the curve only, and" in text
    metrics["budgets"][0]["repair"] = None
    assert "100 (`train`) are not used, 50" in render(metrics, scored=False)


def test_methods_that_agree_or_cannot_be_compared() -> None:
    up, down, flat = scores([1, 2, 3, 4]), scores([4, 3, 2, 1], "gradient"), scores([1, 1, 1, 1], "gradient")
    assert "hardly agree" in render(None, up, down)
    assert "agree on the order of the heads: Spearman 1.00" in render(None, up, scores([1, 2, 3, 4], "gradient"))
    assert "cannot be compared" in render(None, up, flat)


def test_ghosts_are_told() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0]["proof"]["ghosts"] = [LAYER.name]
    metrics["latency"]["bound_ghosts"] = 1
    text = render(metrics)
    assert f"keep one head (or group) with zero output for the cache: {LAYER.name}" in text
    assert "In 1 of its layers" in text


def test_budgets_say_what_was_asked_and_measured() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["planning"] = {
        "strategy": "per-layer",
        "about": "Every layer…",
        "protect": "L0.H3",
        "min_heads_per_layer": 1,
    }
    metrics["budgets"][0] |= {"strategy": "per-layer", "budget": {
        "asked": "latency 80%", "kind": "latency", "limit": 0.8, "relative": True, "unit": "of the dense model's",
        "measured": 0.78, "low": 0.77, "high": 0.79, "batch": 32, "length": 9,
    }}  # fmt: skip
    text = render(metrics)
    assert "(chosen by ablation, per-layer)" in text
    assert (
        "Asked: at most 80 % of the dense model's latency; with 2 heads it is 78 % (95 %: 77 % to 79 %) "
        "at batch 32 x 9 tokens, on a fresh measurement." in text
    )
    assert "Protected heads: L0.H3." in text
    assert "at least 1 query heads" in text
    metrics["budgets"][0]["budget"] = {
        "asked": "params 9.5M", "kind": "params", "relative": False, "limit": 9.5e6, "measured": 9.4e6, "low": 9.4e6, "high": 9.4e6,
        "unit": "parameters",
    }  # fmt: skip
    assert "Asked: at most 9,500,000 parameters; with 2 heads it is 9,400,000 parameters." in render(metrics)
    metrics["budgets"][0]["budget"] |= {"kind": "drop", "limit": 0.01, "measured": 0.002, "low": -0.001, "high": 0.008}
    assert "are 2: 0.0020 (-0.0010 to 0.0080) there" in render(metrics)


def test_a_plan_without_scores() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0] |= {"method": "", "strategy": "", "budget": {"asked": "plan my.json"}}
    text = render(metrics, scored=False)
    assert "(as <code>my.json</code> says)" in text
    assert "## Importance" not in text
    assert "The scoring part, which was not used, has 100 examples" in text


def test_what_repair_was_fitted_to_is_told() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0]["repair"] = repaired()
    assert "on the 100 scoring examples, to what" in render(metrics)
    metrics["budgets"][0]["repair"] = repaired(mixtures=200)
    assert "on the 100 scoring examples and 200 mixtures of them" in render(metrics)


def test_a_note_says_which_budget_it_is_of() -> None:
    metrics = copy.deepcopy(METRICS)
    first, second = metrics["budgets"][0], copy.deepcopy(metrics["budgets"][0])
    metrics["budgets"].append(second | {"kept": 3})
    first["repair"] = repaired(notes=["All alike.", "No step."])
    metrics["budgets"][1]["repair"] = repaired(notes=["All alike."])
    report = render(metrics)
    assert "\n2 heads: No step." in report
    assert "\nAll alike." in report


def test_auto_with_scores_by_gradient_alone() -> None:
    metrics = copy.deepcopy(METRICS)
    for strategy, methods, told in (
        ("auto", ["gradient"], True),
        ("auto", ["ablation", "gradient"], False),
        ("one-shot", ["gradient"], False),
    ):
        metrics["planning"] = {"strategy": strategy, "about": "x"}
        text = render(metrics, scores([1, 2, 3, 4], "gradient"), run={**RUN, "methods": methods})
        assert ("the order of the gradient scores" in text) == told


def test_scores_that_rest_on_few_examples() -> None:
    found = dataclasses.replace(scores([1, 2, 3, 4]), details={"carried_by": [3, 50, 50, 50], "seconds": 1234})
    assert found.caution
    assert f"; 100 examples, 1,234 s; ± is the standard error; {found.caution})" in render(None, found)


def test_what_users_named_is_written_as_it_is() -> None:
    run = {**RUN, "options": {**RUN["options"], "model": "<a> & {{ b }}  c"}, "columns": {"items": "x"}}
    text = render(None, run=run)
    assert text.startswith("# Attention heads of \\<a> & {{ b }}  c\n\n**")
    assert "- Columns: items = `x`." in text
    assert "- The model: `<a> & {{ b }} c`, M, t, " in text
    assert text.endswith("timings do not.\n")


def test_one_thread() -> None:
    run = copy.deepcopy(RUN)
    run["environment"]["threads"] = 1
    text = render(run=run, scored=False)
    assert "1 thread," in text
    assert "1 threads" not in text
    assert "2 threads," in render()


def test_what_holds_of_all_budgets_is_said_once() -> None:
    metrics = copy.deepcopy(METRICS)
    other = {**copy.deepcopy(metrics["budgets"][0]), "kept": 1, "asked": 1}
    metrics["budgets"].append(other)
    metrics["budgets"][0]["notes"] = ["Two, not three.", "The search took long."]
    other["notes"] = ["The search took long."]
    text = render(metrics)
    assert text.count("The search took long.") == text.count("Two, not three.") == 1


def test_what_decided_between_orders_is_shown() -> None:
    assert "The run uses one order" not in render()
    metrics = copy.deepcopy(METRICS)
    compared = [
        {"order": "gradient", "used": False, "plans": [{"budget": "keep 2", "kept": 2, "divergence": 0.25}]},
        {"order": "compensated", "used": True, "plans": [{"budget": "keep 2", "kept": 2, "divergence": 0.125}]},
    ]
    metrics["planning"] = {"strategy": "auto", "about": "x", "compared": compared}
    text = render(metrics)
    assert "plan's mean divergence (KL, in nats) from the dense model's answers" in text
    assert "| order | keep 2 |" in text
    assert "| gradient | 0.25 |" in text
    assert "| **compensated** (used) | 0.125 |" in text
    for order in compared:
        order["plans"] = [
            {"budget": "latency 80%", "kept": 1, "loss": 0.5},
            {"budget": "keep 2", "kept": 2, "loss": 0.25},
        ]
    text = render(metrics)
    assert "plan's loss, in nats" in text
    assert "| order | keep 2 | latency 80% |" in text
    assert "| gradient | 0.25 | 0.5 (1 head) |" in text


def test_what_was_changed_beside_the_removal_is_in_the_headline() -> None:
    metrics = copy.deepcopy(METRICS)
    (budget,) = metrics["budgets"]
    refitted = "with the kept heads' weights refitted by least squares"

    def headline() -> str:
        return render(metrics).split("**")[1]

    assert refitted not in headline()
    budget["repair"] = repaired()
    assert f"worsens the accuracy, {refitted} (repair, without training): accuracy" in headline()
    budget["finetune"] = TRAINED
    assert f"worsens the accuracy, {refitted} and the smaller model trained again: accuracy" in headline()
    budget["repair"] = repaired(layers={})  # every step was left out
    assert "worsens the accuracy, with the smaller model trained again: accuracy" in headline()
    budget["finetune"] = None
    assert refitted not in headline()


def test_the_machine_is_the_one_that_the_speed_was_measured_on() -> None:
    """Scores may have been made elsewhere."""
    environment = {**RUN["environment"], "device": "cuda:0", "device_name": "a GPU"}
    assert "at batch 1 x 9 tokens on a GPU (cuda:0, float32)" in render({**METRICS, "environment": environment})


def test_cautions_come_before_what_they_are_about() -> None:
    lines = render().splitlines()
    caution = next(i for i, line in enumerate(lines) if line.startswith("**Caution:**"))
    table = next(i for i, line in enumerate(lines) if line.startswith("| heads kept |"))
    recommended = next(i for i, line in enumerate(lines) if line.startswith("- None is recommended"))
    assert caution < table < recommended


def test_outputs_that_are_the_same_are_said_to_be() -> None:
    metrics = copy.deepcopy(METRICS)
    proof = metrics["budgets"][0]["proof"]
    proof |= {"difference": 0.0, "reload_difference": 0.0}
    text = render(metrics)
    assert "outputs are exactly those of the same model with these heads masked." in text
    assert "its outputs are exactly those of the model in memory" in text
    assert "0.0e+00" not in text
    proof |= {"difference": 2e-7, "reload_difference": 3e-6}
    text = render(metrics)
    assert "differ by at most 2.0e-07 of their largest value (allowed: 1e-04) from those of the same model with" in text
    assert "differ by at most 3.0e-06 of their largest value from those of the model in memory" in text


def test_what_is_particular_about_scores_is_told_and_nothing_else() -> None:
    plain = dataclasses.replace(scores([1, 2, 3, 4]), details={"replayed": True, "seconds": 1.0})
    assert "- Scores by" not in render(None, plain)
    odd = dataclasses.replace(
        plain, details={"loss": "a distance", "replayed": ["L0", "L1"], "resumed": "went on once"}
    )
    assert "\n- Scores by ablation: The loss is a distance. Not replayed: L0; L1. Went on once.\n" in render(None, odd)


def test_commands_to_paste_overwrite_nothing() -> None:
    run = {**RUN, "commands": ["headprune score 'm y' -o r --overwrite -q", "headprune prune --keep 2 --overwrite"]}
    metrics = Metrics.model_validate(METRICS)
    card = markdown.card(Run.model_validate(run), metrics, metrics.budgets[0])
    for text in (render(run=run), card):
        assert "headprune score 'm y' -o r -q" in text
        assert "headprune prune --keep 2" in text
        assert "--overwrite" not in text


def test_what_every_step_did_on_the_choosing_examples_is_told() -> None:
    metrics = copy.deepcopy(METRICS)
    trials = [
        {"step": "output projections", "before": 0.5, "after": 0.25, "examples": 256, "kept": True},
        {"step": "values", "before": 0.25, "after": 0.375, "examples": 256, "kept": False},
        {"step": "answers", "before": 0.25, "after": 0.0625, "examples": 256, "kept": True},
    ]
    step = {"before": 0.4, "held_out": 0.3, "strength": 1.0, "examples": 200, "part": 0.5}
    metrics["budgets"][0]["repair"] = repaired(trials=trials, answers=step)
    text = render(metrics)
    assert "| 2 | output projections | 256 examples | 0.5 | 0.25 | kept |" in text
    assert "| 2 | values | 256 examples | 0.25 | 0.375 | **left out** |" in text
    assert "| 2 | answers (50 % of it) | 256 examples | 0.25 | 0.0625 | kept |" in text
    for each in STEPS:
        assert f"- **{each.name}**: {each.about}." in text
    metrics["budgets"][0]["repair"] = repaired(trials=trials[:2])
    assert "- **answers**" not in render(metrics)


@pytest.mark.parametrize(("model", "title"), [
    ("../shared/real/minilm-rt", "minilm-rt"), (".headprune/digits/model", "digits/model"), ("org/bert-base", "org/bert-base"),
    ("bert", "bert"), ("/", "/"),
])  # fmt: skip
def test_a_title_has_a_name_and_no_path(model: str, title: str) -> None:
    text = render(run={**RUN, "options": {**RUN["options"], "model": model}})
    assert text.startswith(f"# Attention heads of {title}\n")
    assert f"- The model: `{model}`, M, t, " in text


def test_sizes_say_in_which_precision() -> None:
    metrics = copy.deepcopy(METRICS)
    (budget,) = metrics["budgets"]
    assert "| 4 (dense) | 80.0 % (75.0 % to 85.0 %) |  |  |  |  |  | 1,000 |" in render(metrics)
    budget |= {"dtype": "float16"}  # a file from before sizes were in it
    assert "| 1,000 (2 kB) |" in render(metrics)
    assert "| parameters (size in float16) |" in render(metrics)
    metrics["dense"] |= {"dtype": "float16", "weights": 2_400}
    budget |= {"weights": 2_000}
    text = render(metrics)
    assert "| 1,000 (2.4 kB) |" in text
    assert "| 900 (-10.0%; 2 kB) |" in text
    assert (
        "- Weights are saved in float16, as the dense checkpoint is; all models, the dense one too, were measured in float32, "
        'as `headprune.load(folder).float()` gives, or `from_pretrained(folder, dtype="float32", …)`.'
    ) in text
    budget |= {"dtype": "float32"}
    text = render(metrics)
    assert "Weights are saved in" not in text
    assert "| parameters (size as saved) |" in text
    assert "| 900 (-10.0%; 2 kB in float32) |" in text
    assert "were measured in bfloat16." in render(
        {**metrics, "budgets": [{**budget, "dtype": "float16"}]},
        run={**RUN, "model": {**RUN["model"], "dtype": "bfloat16"}},
    )


REPORTS = sorted((Path(__file__).parent.parent / "reports").glob("*/metrics.json"))


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.parent.name)
def test_names_of_orders_and_methods_are_explained_where_they_first_stand(path: Path) -> None:
    text = RunFolder(path.parent).report_path.read_text()
    assert text == rendered(path.parent)
    for name in ("auto", "re-scored", "compensated"):
        assert f"- **{name}**: {STRATEGIES[name].about}\n" in text
        assert re.search(rf"\b{name}\b", text).start() == text.index(f"**{name}**") + 2, name  # type: ignore[union-attr]
    for name in ("ablation", "gradient"):
        told = text.index(f"- **{name}**: By the scores of that name (one-shot): the least important heads")
        assert re.search(rf"\b{name}\b", text).start() == told + 4  # type: ignore[union-attr]
        assert f"**{name}**: {METHODS[name].about} (" in text


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.parent.name)
def test_details_are_folded(path: Path) -> None:
    sections = dict(part.split("\n\n", 1) for part in rendered(path.parent).split("\n## ")[1:])
    open_ = {"Why trust these figures", "Where the time goes", "Reproduce"}
    assert {name for name, text in sections.items() if not text.startswith("<details><summary>")} == open_ & set(
        sections
    )
    assert all(text.count("<details>") == text.count("</details>") for text in sections.values())


def rendered(folder: Path) -> str:
    """The report of a run folder's documents."""
    run = RunFolder(folder)
    return markdown.render(run.read_run(), run.read_scores(), run.read_metrics(), run.read_heads())


def test_where_the_time_goes() -> None:
    assert "Where the time goes" not in render()  # a run folder from before it was measured
    metrics = {**METRICS, "time": [TIME]}
    text = render(metrics)
    assert (
        "At batch 1 x 9 tokens, 38% of the dense model's time is attention and 42% feed-forward: by this estimate, removing every prunable "
        "head gives 1.60x (1.20x was measured); pruning feed-forward neurons is the next thing to try. With 2 heads it is 1.01x as fast, 81% of the 1.25x "
        "that this plan can give by the same estimate." in text
    )
    assert "| batch 1 x 9 tokens | 2.00 | 25.0% | 12.5% | 42.5% | 5.0% | 5.0% | 10.0% | 1.01x of 1.25x (81%) |" in text
    assert "is launch overhead, which pruning heads does not reduce" not in text
    assert "Generation" not in text
    waits = {**TIME, "parts": {**TIME["parts"], "feed-forward": 0.25, "launch overhead": 0.8}}
    text = render({**METRICS, "time": [waits]})
    assert (
        "40% is launch overhead, which pruning heads does not reduce: use larger batches, or compile the model." in text
    )
    assert "feed-forward neurons" not in text
    busy = {**TIME, "total": 336.0, "parts": {name: 168 * ms for name, ms in TIME["parts"].items()}}
    text = render({**METRICS, "time": [busy]})
    assert (
        "\n\nAt batch 1 x 9 tokens the machine was busy while the dense model's time was broken down: a pass took 336.00 ms, and 2.00 ms"
        in text
    )
    assert "| 10.0% | not compared |\n" in text
    assert "that this plan can give" not in text


def test_written_tokens() -> None:
    text = render({**METRICS, "time": [TIME], "generation": [GENERATION]})
    assert "| batch 1 x 9 tokens | dense | 2.00 |  | 2.00 |  | 500.0 | 12.3 kB |" in text
    assert (
        "| batch 1 x 9 tokens | 2 heads | 2.00 | 1.01x (0.98 to 1.04) | 1.60 | 1.25x (1.20 to 1.30) | 625.0 | 6,144 B |"
        in text
    )
