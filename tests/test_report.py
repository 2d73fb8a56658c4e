"""What the report says is what was measured, the bad news too: by `headprune report` on run folders of these documents."""

import copy
import dataclasses
import math
import re
from typing import Any

import pytest

from tests.support.documents import (
    GENERATION,
    HEADS,
    LAYER,
    MEASURED,
    METRICS,
    PARTS,
    RUN,
    TIME,
    TRAINED,
    repaired,
    scores_of,
)

SCORES = scores_of([0.3, 0.2, -0.1, 0.005])
STEP = {"before": 1.0, "held_out": 0.7, "strength": 1.0, "examples": 9}


def with_budget(**changes: Any) -> dict[str, Any]:
    """Metrics whose one pruned model differs so."""
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0] |= changes
    return metrics


def planned(**planning: Any) -> dict[str, Any]:
    return {**METRICS, "planning": {"strategy": "auto", "about": "x", **planning}}


def compared(*plans: tuple[str, int]) -> list[dict[str, Any]]:
    """Two orders, whose plans for these budgets have a loss of 1/4, 1/8, …."""
    return [
        {"order": order, "used": order == "compensated", "plans": [
            {"budget": budget, "kept": kept, "loss": value / 2**i} for i, (budget, kept) in enumerate(plans)
        ]} for order, value in (("gradient", 0.25), ("compensated", 0.125))
    ]  # fmt: skip


TRIALS = [
    {"step": "output projections", "before": 0.5, "after": 0.25, "examples": 256, "kept": True},
    {"step": "values", "before": 0.25, "after": 0.375, "examples": 256, "kept": False},
    {"step": "answers", "before": 0.25, "after": math.nan, "examples": 256, "kept": True},
]
LATE = {"asked": "latency 80%", "kind": "latency", "limit": 0.8, "relative": True, "unit": "of the dense model's",
        "measured": 0.78, "low": 0.77, "high": 0.79, "batch": 32, "length": 9}  # fmt: skip
PARAMS = {"asked": "params 9.5M", "kind": "params", "limit": 9.5e6, "relative": False, "unit": "parameters",
          "measured": 9.4e6, "low": 9.4e6, "high": 9.4e6}  # fmt: skip
SPLIT = {"metrics": {"accuracy": 0.65}, "low": 0.6, "high": 0.7, "examples": 200}
OTHER = {**METRICS["curve"][2], "value": 0.7}
EXPORTS = [
    {"format": "onnx", "name": "2 heads", "checkpoint": "pruned-2", "file": "2.onnx", "proved": True, "summary": "3 kB", "notes": ["Slow."]},
    {"format": "gguf", "name": "2 heads", "checkpoint": "pruned-2", "file": None, "proved": False, "summary": "no decoder"},
]  # fmt: skip

# What the committed reports show is compared with them, word for word, in test_report_page.py.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a bare run": (METRICS, [
        "| heads kept | accuracy | loss | p | FLOPs |", "| 2 | 70.0 % | 0.6 | 0.001 | 0.004 MFLOPs (-20.0%) |",
        "100 (`train`) score the heads, 50 (`validation`) choose between plans, and every figure",
        "from 200 others (`test`).", "3 draws of as many heads", "| L0 (`block.0.attn`) | H1, H2 |",
        "differ by at most 1.0e-07 of their largest value (allowed: 1e-04) from those of the same model",
        "its outputs are exactly those of the model in memory", "2 threads,", "for at least 20 rounds. So was the limit",
    ], ["## Repair", "The run uses one order", "Where the time goes", "Written text", "last step"]),
    "exact, and a reload that is not": (
        with_budget(proof={**METRICS["budgets"][0]["proof"], "difference": 0.0, "reload_difference": 3e-6}),
        ["outputs are exactly those of the same model with these heads masked", "differ by at most 3.0e-06 of their largest value from"],
        ["0.0e+00"],
    ),
    "ghosts": ({**with_budget(proof={**METRICS["budgets"][0]["proof"], "ghosts": [LAYER.name]}),
                "latency": {**METRICS["latency"], "bound_ghosts": 1}},
               [f"keep one head (or group) with zero output for the cache: `{LAYER.name}`", "In 1 of its layers"], []),
    "the last step": (with_budget(repair=repaired(answers={**STEP, "part": 0.5}, layers_alone=SPLIT, trials=TRIALS)), [
        "| accuracy without repair | repaired layer by layer only |", "| 60.0 % | 65.0 % |", "; left out: values with 2 heads.",
        "but without the last step of repair, on the 50 choosing", "65.0 % against 60.0 % (50.0 % to 70.0 %)",
    ], []),
    "trained": (with_budget(repair=repaired(), finetune=TRAINED), [
        "| accuracy without repair | before training |", "| 60.0 % | 60.0 % |", "Fine-tuned on 60 examples for 2 epochs, with distillation",
        "and what repair and training gained",
    ], []),
    "the effort": (planned(protect="L0.H3", min_heads_per_layer=1, work={
        "compensated": {"passes": 21.0, "flops": 2e12, "examples": 512},
        "re-scored": {"passes": 70.0, "flops": 7e13, "examples": 512, "left_out": "it would take much"},
    }), ["- re-scored was not tried: it would take much. `--effort high` tries it.", "Protected heads: L0.H3.",
         "at least 1 query heads", "- The strategy of this run: auto."], ["compensated was"]),
    "compared by loss": (planned(judged_by="the loss", compared=compared(("latency 80%", 1), ("keep 2", 2))), [
        "the best by the loss. Below: each plan's loss, in nats", "| order | keep 2 | latency 80% |", "| gradient | 0.125 | 0.25 (1 head) |",
    ], []),
    "a latency": (with_budget(strategy="per-layer", budget=LATE), [
        "Asked: at most 80 % of the dense model's latency; with 2 heads it is 78 % (95 %: 77 % to 79 %) at batch 32 x 9 tokens, on a "
        "fresh measurement.", "| 2 | ablation, per-layer | `pruned-2/` |",
    ], []),
    "parameters": (with_budget(budget=PARAMS), ["Asked: at most 9,500,000 parameters; with 2 heads it is 9,400,000 parameters."], []),
    "a drop": (with_budget(budget={**PARAMS, "kind": "drop", "limit": 0.01, "measured": 0.002, "low": -0.001, "high": 0.008}),
               ["are 2: 0.0020 (-0.0010 to 0.0080) there"], []),
    "a plan of the user's": ({**with_budget(method="", strategy="", budget={"asked": "plan my.json"}), "planning": {"plan": "my.json"}}, [
        "| 2 | `my.json` | `pruned-2/` |", "100 (`train`) are not used, 50 (`validation`) are used for the curve only",
    ], ["## How the heads were chosen"]),
    "draws": ({**METRICS, "curve": [*METRICS["curve"], OTHER, {**OTHER, "asked": 3}]},
              ["| 3 | – | 70.0 % |", "| 2 | 72.0 % | 60.0 % |"], []),
    "the largest input, and one that waits": ({**METRICS, "time": [
        {**TIME, "parts": {**TIME["parts"], "feed-forward": 0.25, "launch overhead": 0.8}}, {**TIME, "batch": 8, "bounds": {"2 heads": 1.3}},
    ]}, ["At batch 8 x 9 tokens, 38%", "gives 1.30x", "At batch 1 x 9 tokens, 40% is launch overhead, which pruning heads does not",
         "| 2 heads: measured of possible | 1.01x of 1.25x (81%) | not compared |"], []),
    "a busy machine": ({**METRICS, "time": [{**TIME, "total": 336.0, "parts": {k: 168 * ms for k, ms in TIME["parts"].items()}}]}, [
        "\n\nAt batch 1 x 9 tokens the machine was busy while the dense model's time was broken down: a pass took 336.00 ms, and 2.00 ms",
        "possible | not compared |",
    ], ["of the dense model's time is attention"]),
    "plain operations took another time": ({**METRICS, "time": [{**TIME, "total": 0.2, "stand_ins": True}]}, ["plain operations"], ["busy"]),
    "written text": ({**METRICS, "generation": [GENERATION]}, [
        "| batch 1 x 9 tokens | dense | 2.00 |  | 2.00 |  | 500.0 | 12.3 kB |",
        "| batch 1 x 9 tokens | 2 heads | 2.00 | 1.01x (0.98 to 1.04) | 1.60 | 1.25x (1.20 to 1.30) | 625.0 | 6.14 kB |",
    ], []),
    "other data": ({**with_budget(repair=repaired(), also=[
        {"pruned": MEASURED, "change": METRICS["budgets"][0]["change"], "gain": {**METRICS["budgets"][0]["change"], "verdict": "better"}},
    ]), "also": [{"name": "no|tes.txt", "data": PARTS["report"], "dense": MEASURED}]}, [
        "| `no\\|tes.txt`, 200 examples | 4 (dense) | 60.0 % (50.0 % to 70.0 %) |  |  |  |", "| -10.00 points (-15.00 to -5.00), better |",
        "effect of repair",
    ], []),
    "other engines": ({**METRICS, "exports": EXPORTS, "engines": [{"format": "onnx", "rows": METRICS["latency"]["rows"]}]}, [
        "| 2 heads | onnx | `2.onnx`: 3 kB |", "| 2 heads | gguf | not written: no decoder |", "onnx, timed as above", "\n\nSlow.\n\n",
    ], []),
    "sizes in two precisions": ({**with_budget(weights=2_000, dtype="float32"), "dense": {**METRICS["dense"], "weights": 2, "dtype": "float16"}},
                                ["| parameters (size as saved) |", "| 900 (-10.0%; 2 kB in float32) |"], ["Weights are saved"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_report_says(name: str, report: Any) -> None:
    metrics, there, absent = CASES[name]
    text = report(metrics)
    assert [line for line in there if line not in text] == []
    assert [line for line in absent if line in text] == []
    assert text.count("<details>") == text.count("</details>")


def test_scores_alone(report: Any) -> None:
    odd = dataclasses.replace(SCORES, method="gradient", details={"carried_by": [3, 50, 50, 50], "stderr": "none"})
    text = report(None, SCORES, odd, run={**RUN, "folder": "my runs/a"})
    for line in (
        "**Nothing is pruned yet: this run has only scored the heads.** Next, to keep half of them:\n\n```\nheadprune prune --keep 50% -o 'my runs/a'\n```",
        "- By ablation, the heads that matter most are L0.H0 (0.3000±0.0100), L0.H1 (0.2000±0.0100)",
        "- The scores are from 100 examples (`train`). Two other parts, which share no example and no input with them, are set aside",
        "Harmful (more than 1.96 standard errors below 0): 1 of 4; within 1.96 standard errors of 0: 1.",
        f"; 100 examples; no standard error: none; {odd.caution}.", "| ablation, gradient | 1.00 | 1.00 | 100% |",
    ):  # fmt: skip
        assert line in text
    assert odd.caution
    assert "Harmful" not in report(None, scores_of([0.1, 0.2, 0.3, 0.4]))  # none is
    unsure = dataclasses.replace(SCORES, stderr={LAYER.name: SCORES.stderr[LAYER.name] * math.nan})
    assert "Harmful" not in report(None, unsure)
    flat = report(None, SCORES, scores_of([4, 3, 2, 1], "down"), scores_of([1, 1, 1, 1], "flat"))
    pairs = re.findall(r"^\| (\w+, \w+) \| (\S+) \|", flat, re.M)
    assert pairs[0][0] == "ablation, down"
    assert [rho for _, rho in pairs[1:]] == ["–", "–"]  # those that cannot be compared come last


def test_what_holds_of_all_models_is_said_once(report: Any) -> None:
    notes, steps = ["Two, not three.", "The search took long."], ["All alike.", "No step."]
    metrics = with_budget(notes=notes, repair=repaired(notes=steps))
    other = {"kept": 1, "notes": notes[1:], "repair": repaired(notes=steps[:1])}
    metrics["budgets"].append({**METRICS["budgets"][0], **other})
    text = report(metrics)
    for note in ("The search took long.", "With 2 heads: Two, not three.", "All alike.", "With 2 heads: No step."):
        assert text.count(f"\n\n{note}\n\n") == 1


def test_what_the_removed_heads_did(report: Any) -> None:
    """Counted by hand: heads 1 and 2 went, which are one of the broad heads and one of the two that look ahead."""
    text = report(METRICS, heads=HEADS)
    rows = re.findall(r"^\| ([a-z ]+) \| (\d) \| (\d) \| (.*) \|$", text.partition("## What the heads do")[2], re.M)
    assert rows == [
        ("next token", "2", "1", "L0.H2: 90% is there"), ("broad", "1", "1", "L0.H1: 96% is there"), ("mixed", "1", "0", "L0.H3: 10% is there"),
    ]  # fmt: skip
    assert "removed to keep" not in report(None, SCORES, heads=HEADS).partition("## What the heads do")[2]


@pytest.mark.parametrize(("model", "title"), [
    (".headprune/digits/model", "digits/model"), ("/", "/"), ("<a> & {{ b }}  c", "\\<a> & {{ b }}  c"),
])  # fmt: skip
def test_a_title_has_a_name_and_no_path(model: str, title: str, report: Any) -> None:
    run = {**RUN, "options": {**RUN["options"], "model": model}, "columns": {"items": "x"}}
    text = report(METRICS, run=run)
    assert re.match(rf"# Attention heads of {re.escape(title)}\n\n\*\*(?s:.*)timings do not.\n\Z", text)
    assert f"- The model: `{model}`, `M`, t, " in text
    assert "- Columns: items = `x`." in text


def test_commands_to_paste_overwrite_nothing(report: Any) -> None:
    run = copy.deepcopy(RUN)
    run["commands"] = ["headprune score 'm y' -o r --overwrite -q", "headprune prune --keep 2 --overwrite"]
    run["environment"]["threads"] = 1
    run["notes"] = ["1. a", "# b", "2.5 c"]
    text = report(METRICS, run=run)
    assert "```\nheadprune score 'm y' -o r -q\nheadprune prune --keep 2\n```" in text
    assert "1 thread," in text
    assert "\n- 1\\. a\n- \\# b\n- 2\\.5 c\n" in text
