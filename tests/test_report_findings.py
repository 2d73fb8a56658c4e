"""What a report concludes from the documents, and how it writes numbers."""

import math
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.app.documents import Latency, Metrics, Point, Repaired
from headprune.app.report import findings, numbers
from headprune.app.report.busy import disturbed
from headprune.attention import AttentionLayer
from headprune.evaluation import Change
from headprune.latency import LatencyRow, Speedup
from headprune.scoring.agreement import Agreement
from tests.support.documents import METRICS, TIME, repaired

LAYER = AttentionLayer("attn", 0, "encoder", 4, 4, 8)
CHANGED = Change("accuracy", 0.05, -0.01, 0.1, 0.2, "no measurable change")


def scores(values: list[float], errors: list[float], unit: str = "loss (nats) added") -> hp.HeadScores:
    known, error = ({LAYER.name: torch.tensor(v, dtype=torch.float64)} for v in (values, errors))
    return hp.HeadScores("ablation", unit, known, error, 100, (LAYER,))


def test_heads_are_ordered_and_the_harmful_ones_counted() -> None:
    found = findings.ranking(scores([0.1, -0.5, 0.3, -0.01], [0.1] * 4))
    assert [label for label, _, _ in found.heads] == ["L0.H2", "L0.H0", "L0.H3", "L0.H1"]
    assert (found.harmful, found.unsure) == (1, 2)  # -0.5 is; 0.1 and -0.01 cannot be told from 0
    assert [label for label, _, _ in found.highest] == ["L0.H2", "L0.H0"]
    assert [label for label, _, _ in found.lowest] == ["L0.H1", "L0.H3"]


@pytest.mark.parametrize(
    ("values", "errors", "unit"),
    [
        ([0.1, 0.2, 0.3, 0.4], [0.1] * 4, "loss (nats) added"),  # none is below 0
        ([0.1, -0.2, 0.3, 0.4], [math.nan] * 4, "loss (nats) added"),  # nobody knows how surely
        ([0.1, -0.2, 0.3, 0.4], [0.1] * 4, "weight"),  # below 0 means nothing
    ],
)
def test_no_head_is_called_harmful_where_that_is_not_known(values: Any, errors: Any, unit: str) -> None:
    assert findings.ranking(scores(values, errors, unit)).harmful is None


@pytest.mark.parametrize(("metric", "chosen", "apart"), [
    ("accuracy", (0.95, 0.99), True), ("accuracy", (0.80, 0.90), False), ("accuracy", (0.1, 0.2), False),
    ("perplexity", (0.1, 0.2), True), ("perplexity", (0.95, 0.99), False), ("loss", (0.1, 0.2), True), ("loss", (0.95, 0.99), False),
])  # fmt: skip
def test_a_model_that_is_better_where_plans_are_chosen(metric: str, chosen: tuple[float, float], apart: bool) -> None:
    low, high = chosen
    point = Point(method="dense", kept=4, asked=4, value=0.5, low=low, high=high, loss=1.0)
    metrics = Metrics.model_validate(METRICS).changed(metric=metric, curve=[point])
    assert findings.trained_on_choosing(metrics) == (0.5 if apart else None)


def test_speed_is_told_with_its_limit() -> None:
    def row(ratio: float, limit: float) -> LatencyRow:
        pruned = Speedup(ratio, ratio, ratio, "faster" if ratio > 1 else "slower")
        return LatencyRow(1, 9, {}, {"2 heads": pruned, "none": Speedup(limit, limit, limit, "faster")})

    rows = (row(1.1, 1.2), row(0.9, 1.5))
    found = findings.speed(Latency(rows=rows, bound="none", typical_length=9), "2 heads")
    assert found.slow == 1
    assert found.most == (rows[1], 1.5)
    assert findings.speed(Latency(rows=rows, bound=None, typical_length=9), "2 heads").most is None


def test_curves_are_averaged_over_draws() -> None:
    points = [("dense", 4, 0.9), ("auto", 2, 0.8), ("random", 2, 0.4), ("random", 2, 0.6), ("random", 3, 0.7)]
    found = findings.trade_off(
        [Point(method=m, kept=n, asked=n, value=v, low=v, high=v, loss=1) for m, n, v in points], "accuracy"
    )
    assert found.methods == ["auto", "random"]
    assert found.rows == [(3, [None, 0.7]), (2, [0.8, 0.5])]


def test_the_mean_perplexity_is_that_of_the_mean_loss() -> None:
    assert findings.mean_of([2.0, 8.0], "perplexity") == pytest.approx(4.0)
    assert findings.mean_of([2.0, 8.0], "loss") == findings.mean_of([2.0, 8.0], "accuracy") == 5.0
    points = [Point(method="random", kept=2, asked=2, value=v, low=v, high=v, loss=1) for v in (2.0, 8.0)]
    assert findings.trade_off(points, "perplexity").rows == [(2, [pytest.approx(4.0)])]


def test_a_note_of_all_repairs_is_told_once() -> None:
    (budget,) = Metrics.model_validate(METRICS).budgets
    budgets = [
        budget.changed(kept=3, repair=repaired(notes=["All."])),
        budget.changed(kept=2, repair=repaired(notes=["All.", "Two."])),
        budget.changed(kept=1, repair=None),
    ]
    assert findings.shared_notes(budgets) == [("All.", None), ("Two.", [2])]


def test_refits_are_averaged() -> None:
    layers = {
        "a": {"before": 0.2, "after": 0.1, "ridge": math.inf, "values": False},
        "b": {"before": 0.4, "after": 0.2, "ridge": 0.1, "values": True},
    }
    found = findings.refit(Repaired.model_validate(repaired(layers=layers)))
    assert found is not None
    assert [found.before, found.after] == pytest.approx([0.3, 0.15])
    assert (found.least, found.most, found.new_values, found.layers) == (0.1, math.inf, 1, 2)
    assert findings.refit(Repaired.model_validate(repaired(layers={}))) is None
    assert findings.refit(None) is None


def test_pairs_that_cannot_be_compared_come_last() -> None:
    pairs = [Agreement("a", b, rho, rho, 0.5) for b, rho in (("b", math.nan), ("c", -1.0), ("d", 0.9))]
    assert [p.second for p in findings.closest_first(pairs)] == ["d", "c", "b"]


@pytest.mark.parametrize(("written", "expected"), [
    (numbers.value(0.877, "accuracy"), "87.7 %"), (numbers.value(12345.6, "perplexity"), "12,350"),
    (numbers.change(CHANGED, "perplexity"), "+5.0% (-1.0% to +10.0%)"),
    (numbers.change(CHANGED, "accuracy"), "+5.00 points (-1.00 to +10.00)"),
    (numbers.flops(999), "999"), (numbers.flops(1_500_000), "1.50 M"), (numbers.flops(2 * 10**12), "2.00 T"),
    (numbers.shape(LatencyRow(8, 9, {}, {})), "batch 8 x 9 tokens"), (numbers.shape(LatencyRow(8, 0, {}, {})), "batch 8"),
    (numbers.ridge(math.inf), "∞"), (numbers.ridge(0.1), "0.1"), (numbers.rank(math.nan), "–"), (numbers.rank(-0.123), "-0.12"),
    (numbers.known(None), "not finite"), (numbers.known(0.12345), "0.123"),
    (numbers.with_error(1.0, math.nan, ".2f", "±"), "1.00"), (numbers.with_error(1.0, 0.5, ".2f", "±"), "1.00±0.50"),
])  # fmt: skip
def test_numbers(written: str, expected: str) -> None:
    assert written == expected


def test_the_largest_input_is_what_the_time_is_told_of() -> None:
    other = {**TIME, "batch": 8, "total": 2.5, "bounds": {"2 heads": 1.3}}
    latency = {
        **METRICS["latency"],
        "rows": [*METRICS["latency"]["rows"], {**METRICS["latency"]["rows"][0], "batch": 8}],
    }
    found = findings.where_time_goes(Metrics.model_validate({**METRICS, "time": [TIME, other], "latency": latency}))
    assert found is not None
    assert found.largest.batch == 8
    assert (found.beside, found.most, found.waiting) == ("feed-forward", 1.3, None)
    assert [(g.row.batch, g.bound) for g in found.gains] == [(1, 1.25), (8, 1.3)]
    assert [g.share for g in found.at_largest] == [pytest.approx(1.01 / 1.3)]
    assert findings.where_time_goes(Metrics.model_validate(METRICS)) is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (numbers.size(1_230_000_000_000), "1.23 TB"),
        (numbers.size(999_700_000), "1,000 MB"),
        (numbers.size(512), "512 bytes"),
        (numbers.value(151_936.0, "perplexity"), "151,900"),
        (numbers.value(62.014, "perplexity"), "62.01"),
        (numbers.value(float("nan"), "perplexity"), "nan"),
        (numbers.known(12_345.0), "12,300"),
        (numbers.operations(1.234e15), "1.23 PFLOPs"),
        (numbers.operations(4.81e7), "48.1 MFLOPs"),
    ],
)
def test_no_figure_is_a_power_of_ten(said: str, expected: str) -> None:
    """The perplexity of a model that knows nothing was 1.519e+05, and a large checkpoint had 1.23e+03 GB."""
    assert said == expected


@pytest.mark.parametrize("total", [336.0, 0.2])
def test_a_breakdown_that_other_work_disturbed_is_told_and_not_compared(total: float) -> None:
    timed = METRICS["latency"]["rows"]
    share = total / TIME["total"]
    busy = {**TIME, "total": total, "parts": {name: share * ms for name, ms in TIME["parts"].items()}}
    metrics = Metrics.model_validate({**METRICS, "time": [busy]})
    found = findings.where_time_goes(metrics)
    assert found is not None
    assert (found.gains, found.waiting, found.names) == ([], None, ["2 heads"])
    assert f"took {total:.2f} ms, and {timed[0]['timings']['dense']['median']:.2f} ms" in disturbed(
        metrics.time[0], metrics.latency.rows
    )
    # Plain operations in the place of fused ones may take another time.
    stands_in = Metrics.model_validate({**METRICS, "time": [{**busy, "stand_ins": True}]})
    assert disturbed(stands_in.time[0], stands_in.latency.rows) == ""
    assert not disturbed(Metrics.model_validate({**METRICS, "time": [TIME]}).time[0], metrics.latency.rows)
