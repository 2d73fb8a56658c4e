"""What the report says is what was measured, the bad news too."""

import copy
import dataclasses
from typing import Any

import jinja2
import pytest
import torch

import headprune as hp
from headprune.app.report import markdown
from headprune.attention import AttentionLayer

LAYER = AttentionLayer("block.0.attn", 0, "encoder", 4, 4, 8)
SPEED = {"ratio": 1.01, "low": 0.98, "high": 1.04, "verdict": "no measurable change"}
TIMING = {"median": 2.0, "p95": 2.5, "runs": 20}


def scores(values: list[float], method: str = "ablation") -> hp.HeadScores:
    return hp.HeadScores(
        method, "loss (nats) added when the head is removed", {LAYER.name: torch.tensor(values, dtype=torch.float64)},
        {LAYER.name: torch.full((4,), 0.01, dtype=torch.float64)}, 100, (LAYER,),
    )  # fmt: skip


RUN: dict[str, Any] = {
    "commands": ["headprune score m -d d", "headprune prune --keep 2"],
    "when": "today",
    "seconds": [1.0, 2.0],
    "options": {"model": "m", "seed": 0, "data": {"dataset": "d"}},
    "environment": {
        "headprune": "0", "python": "3", "torch": "2", "transformers": "5", "system": "Linux", "device": "cpu",
        "device_name": "a CPU", "threads": 2,
    },
    "parts": {
        "score": {"split": "train", "examples": 100}, "choose": {"split": "validation", "examples": 50},
        "report": {"split": "test", "examples": 200},
    },
    "columns": {"text": "text"},
    "notes": [],
    "model": {
        "class": "M", "task": "t", "metric": "accuracy", "dtype": "float32", "parameters": 1000, "fingerprint": "f",
        "heads": 4, "layers": [{"name": LAYER.name, "index": 0, "prunable": True, "reason": ""}],
    },
}  # fmt: skip
METRICS: dict[str, Any] = {
    "metric": "accuracy",
    "dense": {"metrics": {"accuracy": 0.8, "loss": 0.5}, "low": 0.75, "high": 0.85, "parameters": 1000, "flops": 5000},
    "budgets": [
        {
            "name": "2 heads", "asked": 2, "kept": 2, "total": 4, "method": "ablation", "notes": [],
            "drop": {LAYER.name: [1, 2]},
            "pruned": {"metrics": {"accuracy": 0.7, "loss": 0.6}, "low": 0.64, "high": 0.76},
            "change": {"value": -0.1, "low": -0.15, "high": -0.05, "p_value": 0.001, "verdict": "worse", "examples": 200},
            "random": [0.5, 0.6, 0.7], "parameters": 900, "flops": 4000, "checkpoint": "pruned-2",
            "proof": {"difference": 1e-7, "tolerance": 1e-4, "inputs": 3, "ghosts": [], "reload_difference": 0.0},
        }
    ],
    "curve": [
        {"method": "dense", "kept": 4, "asked": 4, "value": 0.81, "low": 0.74, "high": 0.88, "loss": 0.5},
        {"method": "ablation", "kept": 2, "asked": 2, "value": 0.72, "low": 0.6, "high": 0.8, "loss": 0.6},
        {"method": "random", "kept": 2, "asked": 2, "value": 0.5, "low": 0.4, "high": 0.6, "loss": 0.9},
    ],
    "latency": {
        "bound": "no heads", "bound_ghosts": 0, "typical_length": 9,
        "rows": [
            {
                "batch": 1, "length": 9, "timings": {"dense": TIMING, "2 heads": TIMING, "no heads": TIMING},
                "speedups": {"2 heads": SPEED, "no heads": {**SPEED, "ratio": 1.2}},
            }
        ],
    },
}  # fmt: skip


def render(metrics: dict[str, Any] | None = METRICS, *found: hp.HeadScores) -> str:
    return markdown.render(RUN, found or (scores([0.3, 0.2, -0.1, 0.005]),), metrics)


def test_figures_and_bad_news() -> None:
    text = render()
    assert "goes from 80.0 % to 70.0 %: -10.00 points (-15.00 to -5.00): **worse**" in text
    assert "Random heads in the same number give 60.0 % (mean of 3, 50.0 % to 70.0 %)" in text
    assert "**It is not measurably faster anywhere it was timed**" in text
    assert "it would be 1.20 times as fast" in text
    assert "900 (-10.0%)" in text
    assert "1 of 4 heads are harmful beyond their standard error, and 1 cannot be told from 0" in text
    assert "L0 (block.0.attn): H1, H2" in text
    assert "Caution" not in text


def test_a_control_that_was_repaired_by_less_stands_beside_heads_repaired_alike() -> None:
    metrics = copy.deepcopy(METRICS)
    layer = {"before": 0.2, "after": 0.1, "ridge": 0.3, "values": False}
    step = {"before": 1.0, "after": 0.5, "held_out": 0.7, "examples": 9, "mixtures": 0}
    metrics["budgets"][0]["repair"] = {
        "layers": {LAYER.name: layer}, "examples": 9, "mixtures": 0, "notes": [], "answers": step,
        "without": {"metrics": {"accuracy": 0.6}}, "layers_alone": {"metrics": {"accuracy": 0.65}},
    }  # fmt: skip
    text = render(metrics)
    assert "repaired layer by layer alone, give 60.0 %" in text
    assert "repaired in the same way, the chosen heads give 65.0 %" in text
    assert "| heads | accuracy without | layer by layer alone | repaired |" in text
    assert "| 2 | 60.0 % | 65.0 % | 70.0 % |" in text
    metrics["budgets"][0]["repair"] |= {"answers": None, "layers_alone": None}
    text = render(metrics)
    assert "repaired as well, give 60.0 %" in text
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
    assert "re-scored was left out: it would take much. `--effort high` makes it." in text
    assert "compensated was counted beforehand to take about 21 forward passes over 512 examples, 2 TFLOPs" in text
    assert "looks at up to 128 scoring examples" in text


def test_no_measurable_change() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0]["change"] |= {"low": -0.15, "high": 0.01, "verdict": "no measurable change"}
    assert "**no measurable change**" in render(metrics)


def test_a_choosing_part_that_was_trained_on() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["curve"][0] |= {"value": 0.97, "low": 0.95, "high": 0.99}
    assert "**Caution:** the dense model's accuracy is 97.0 % on the choosing part" in render(metrics)


def test_scores_alone() -> None:
    text = render(None)
    assert "## Dense and pruned" not in text
    assert "highest: L0.H0 0.3" in text


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
    assert f"keep one head (or group) with zero output, so that their cache works: {LAYER.name}" in text
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
    assert "Protected, so that they stay: L0.H3." in text
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
    text = markdown.render(RUN, [], metrics)
    assert "(as `my.json` says)" in text
    assert "## Importance" not in text
    assert "Nothing was scored" in text


def repaired(**more: Any) -> dict[str, Any]:
    fit = {"before": 0.5, "after": 0.2, "ridge": 0.1, "values": True}
    without = {"metrics": {"accuracy": 0.6}, "low": 0.5, "high": 0.7}
    return {
        "layers": {LAYER.name: fit}, "examples": 100, "mixtures": 0, "passes": 9, "biases": [], "notes": [],
        "answers": None, "without": without, **more,
    }  # fmt: skip


def test_what_repair_was_fitted_to_is_told() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0]["repair"] = repaired()
    assert "on the 100 scoring examples, to what" in render(metrics)
    step = {
        "before": 0.4,
        "after": 0.1,
        "held_out": 0.3,
        "strength": 1.0,
        "examples": 200,
        "mixtures": 100,
        "part": 1.0,
    }
    metrics["budgets"][0]["repair"] = repaired(mixtures=200, answers=step)
    report = render(metrics)
    assert "on the 100 scoring examples and 200 mixtures of them" in report
    assert "from 0.40 to 0.10 on the 200 examples that it was made from, 100 of them mixtures" in report


def test_a_note_says_which_budget_it_is_of() -> None:
    metrics = copy.deepcopy(METRICS)
    first, second = metrics["budgets"][0], copy.deepcopy(metrics["budgets"][0])
    metrics["budgets"].append(second | {"kept": 3, "name": "3 heads"})
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
        text = markdown.render({**RUN, "methods": methods}, [scores([1, 2, 3, 4], "gradient")], metrics)
        assert ("by gradient alone" in text) == told


def test_scores_that_rest_on_few_examples() -> None:
    found = dataclasses.replace(scores([1, 2, 3, 4]), details={"carried_by": [3, 50, 50, 50], "seconds": 1234})
    assert found.caution
    assert f"; 100 examples, 1,234 s; ± is the standard error; {found.caution})" in render(None, found)


def test_what_the_documents_lack_is_an_error_and_no_empty_place() -> None:
    run = {key: value for key, value in RUN.items() if key != "when"}
    with pytest.raises(jinja2.UndefinedError, match="when"):
        markdown.render(run, [scores([1, 2, 3, 4])], None)


def test_what_users_named_is_written_as_it_is() -> None:
    run = {**RUN, "options": {**RUN["options"], "model": "<a> & {{ b }}  c"}, "columns": {"items": "x"}}
    text = markdown.render(run, [scores([1, 2, 3, 4])], None)
    assert text.startswith("# Attention heads of <a> & {{ b }}  c\n\nM, t, ")
    assert "- Columns: items = `x`." in text
    assert text.endswith("timings do not.\n")


def test_one_thread() -> None:
    run = copy.deepcopy(RUN)
    run["environment"]["threads"] = 1
    text = markdown.render(run, (), METRICS)
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
    assert "What decided between" not in render()
    metrics = copy.deepcopy(METRICS)
    compared = [
        {"order": "gradient", "used": False, "plans": [{"budget": "keep 2", "kept": 2, "divergence": 0.25}]},
        {"order": "compensated", "used": True, "plans": [{"budget": "keep 2", "kept": 2, "divergence": 0.125}]},
    ]
    metrics["planning"] = {"strategy": "auto", "about": "x", "compared": compared}
    text = render(metrics)
    assert "plans' divergence (KL) from the dense model's answers, in nats" in text
    assert "| order | keep 2 |" in text
    assert "| gradient | 0.25 (2 heads) |" in text
    assert "| **compensated** (used) | 0.125 (2 heads) |" in text
    for order in compared:
        order["plans"] = [{"budget": "keep 2", "kept": 2, "loss": 0.5}]
    assert "plans' loss, in nats" in render(metrics)
