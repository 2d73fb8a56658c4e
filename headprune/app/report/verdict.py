"""A run's verdict: which pruned model is recommended, and by what rule; and the report's first screen, which says it.

The first screen's sentences are printed in the terminal, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headprune.amounts import code, head_count
from headprune.app.documents import BudgetResult, Examples, Latencies, Measured, Metrics, Run
from headprune.app.report import numbers
from headprune.app.report.content import Markdown, bullets, capital, listed
from headprune.evaluation import Change
from headprune.latency import LatencyRow
from headprune.metrics import metric_named
from headprune.uncertainty import FEW

# A loss of this size must be ruled out before a model is recommended: a share of the metric's scale (points of accuracy), or of the dense
# model's value, whichever is less.
TOLERATED, TOLERATED_SHARE = 0.025, 0.05


# What can be said of a run's heads: a loss above the margin is ruled out; or none was measured, but there are too few examples to rule one
# out; or every plan loses something measurable; or the dense model is no better than guessing.
CAN_GO, UNSURE, COSTS, GUESSING = "can go", "unsure", "costs", "guessing"

_REFITTED = "the weights that stay refitted by least squares"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        conclusion: ``CAN_GO``, ``UNSURE``, ``COSTS`` or ``GUESSING``.
        budget: The pruned model that the verdict is about: the recommended one, or the one that loses least.
        recommended: Whether it is recommended.
        tolerated: The loss that a recommendation must rule out, in the unit of `loss_within`.
    """

    conclusion: str
    budget: BudgetResult
    recommended: bool
    tolerated: float


def judge(metrics: Metrics) -> Verdict:
    """The verdict: the fewest heads with which a loss above the margin is ruled out; else the plan that loses least.

    Only the margin decides, not whether a loss is measurable: more examples make small losses so, but no model worse.
    If a budget itself limits the loss, its limit is the margin, on the reporting part.
    """
    if not metrics.budgets:
        raise ValueError("no budgets")
    conclusions = [_conclusion(metrics, b) for b in metrics.budgets]
    best = min(conclusions, key=(GUESSING, CAN_GO, UNSURE, COSTS).index)
    budgets = [b for b, conclusion in zip(metrics.budgets, conclusions, strict=True) if conclusion == best]
    recommended = best == CAN_GO
    budget = min(budgets, key=lambda b: (0, b.kept) if recommended else (loss_within(metrics, b.change), -b.kept))
    return Verdict(best, budget, recommended, _limit(metrics, budget))


def largest_first(metrics: Metrics) -> list[BudgetResult]:
    """The budgets, those that keep most heads first."""
    return sorted(metrics.budgets, key=lambda b: -b.kept)


def loss_within(metrics: Metrics, change: Change) -> float:
    """The largest loss that a change's interval allows: as a share of the metric's scale, or of the dense value if it has none."""
    return _as_share(metrics, largest_loss(change))


def largest_loss(change: Change) -> float:
    """The largest loss that a change's interval allows."""
    return -change.low if metric_named(change.metric).higher else change.high


def limits_metric(budgets: Sequence[BudgetResult]) -> bool:
    """Whether a budget limits the loss of the metric, so that fewer heads are better."""
    return any(b.budget and b.budget.parsed and b.budget.parsed.by_metric for b in budgets)


def against_random(metrics: Metrics, budget: BudgetResult) -> str:
    """Whether heads were chosen better than by chance: ``"better"`` or ``"worse"`` (than the mean of the random draws beyond chance,
    and than every draw), or ``""``.
    """
    value, draws = like_random(budget).metrics[metrics.metric], budget.random
    sign = 1 if metric_named(metrics.metric).higher else -1
    better, worse = (all(way * sign * (value - draw) > 0 for draw in draws) for way in (1, -1))
    word = "better" if better else "worse" if worse else ""
    if not word or (budget.over_random is not None and budget.over_random.verdict != word):
        return ""
    return word


def like_random(budget: BudgetResult) -> Measured:
    """The chosen heads, treated like the random ones: with the cheaper repair, and not trained."""
    return layers_alone(budget) or untrained(budget)


def layers_alone(budget: BudgetResult) -> Measured | None:
    """The chosen heads with layer-by-layer repair only, like random ones; None if the model's repair did no more."""
    return budget.repair.layers_alone if budget.repair else None


def trained(metrics: Metrics) -> bool:
    """Whether a pruned model was trained again."""
    return any(b.finetune for b in metrics.budgets)


def untrained(budget: BudgetResult) -> Measured:
    """The pruned model's metrics on the reporting part, before any training."""
    return budget.finetune.before if budget.finetune else budget.pruned


def headline_row(latency: Latencies) -> LatencyRow:
    """The input whose speed is reported first: the largest batch, of the length that is nearest to the median."""
    return min(latency.rows, key=lambda row: (-row.batch, abs(row.length - latency.typical_length)))


def _guesses(dense: Measured, metrics: Metrics) -> bool:
    level = metrics.dense.guessing  # of a model that only guesses
    return level is not None and (dense.low <= level if metric_named(metrics.metric).higher else dense.high >= level)


def _conclusion(metrics: Metrics, budget: BudgetResult) -> str:
    if _guesses(metrics.dense, metrics):
        return GUESSING
    if loss_within(metrics, budget.change) <= _limit(metrics, budget):
        return CAN_GO
    return COSTS if budget.change.verdict == "worse" else UNSURE


def _limit(metrics: Metrics, budget: BudgetResult) -> float:
    """The loss that must be ruled out: the user's limit, or the default margin."""
    asked = budget.budget.parsed if budget.budget else None
    if asked and asked.by_metric:
        return _as_share(metrics, asked.amount)
    kind, dense = metric_named(metrics.metric), metrics.dense.metrics[metrics.metric]
    return min(TOLERATED, TOLERATED_SHARE * abs(dense) / kind.width) if kind.width else TOLERATED_SHARE


def _as_share(metrics: Metrics, amount: float) -> float:
    kind, dense = metric_named(metrics.metric), metrics.dense.metrics[metrics.metric]
    scale = 1.0 if kind.relative else kind.width or abs(dense)
    return amount / (scale or 1.0)


# -- the first screen, in sentences ----------------------------------------------------------------------


def extremes(heads: Sequence[tuple[str, float, float]]) -> str:
    """Heads with their scores and standard errors."""
    return ", ".join(f"{name} ({score:.4f}{'' if error != error else f'±{error:.4f}'})" for name, score, error in heads)


def _guessing(dense: Measured, metrics: Metrics) -> str:
    value, level = (
        numbers.value(each, metrics.metric) for each in (dense.metrics[metrics.metric], metrics.dense.guessing or 0.0)
    )
    return f"guessing ({metrics.metric} {value}; a model that knows nothing has {level})"


def headline(run: Run, metrics: Metrics) -> str:
    """The run in one sentence: the heads that can go, other changes, the cost, and the speed on this device."""
    result = judge(metrics)
    b, metric = result.budget, metrics.metric
    dense, pruned = (numbers.value(m.metrics[metric], metric) for m in (metrics.dense, b.pruned))
    cost, speed = _cost(b.change, metric), _speed(run, metrics, b)
    heads, beside = f"{b.total - b.kept} of the {b.total} heads", _other_changes(b)
    if result.conclusion == GUESSING:
        return f"The dense model is no better than {_guessing(metrics.dense, metrics)}, so this run says nothing about its heads."
    possible = f"a loss of up to {numbers.difference(largest_loss(b.change), metric)} is possible"
    against = f"{metric} {pruned} against {dense} ({cost}), {speed}"
    if result.conclusion == UNSURE:
        few = f"{b.change.examples:,} examples are too few to say whether heads can go"
        return f"{few}: without {heads}{beside}, {against}; {possible}."
    if result.conclusion == COSTS:
        if len(metrics.budgets) > 1:
            return f"Every plan worsens the {metric}; the mildest removes {heads}{beside}: {against}."
        return f"Removing {heads} worsens the {metric}{beside}: {against}."
    if b.change.verdict != "better" and loss_within(metrics, b.change) > 0:
        cost = f"{cost}; {possible}"
    return f"{heads} can go{beside}: {metric} {pruned} against {dense} ({cost}), {speed}."


def _cost(change: Change, metric: str) -> str:
    if change.verdict == "no measurable change":
        return change.verdict
    return f"{numbers.difference(change.value, metric, '+')}, measurably {change.verdict}"


def _other_changes(budget: BudgetResult) -> str:
    """What was done to the model beside the removal of heads: repair and training, in words."""
    repair = budget.repair
    steps = [_REFITTED] if repair and (repair.layers or repair.answers) else []
    if budget.finetune and budget.finetune.best:  # 0: no epoch was better than none, so these weights are kept
        return f", with {' and '.join([*steps, 'the smaller model trained again'])}"
    return f", with {steps[0]} (repair, without training)" if steps else ""


def _speed(run: Run, metrics: Metrics, budget: BudgetResult) -> str:
    """How much faster the model is, on which machine, and how much faster it could be without any heads."""
    latency, row = metrics.latency, headline_row(metrics.latency)
    gain = row.speedups[budget.name]
    machine = numbers.device(metrics.environment or run.environment, run.model.dtype)
    where = f"at {numbers.shape(row)} on {machine}"
    text = {
        "faster": f"{gain.ratio:.2f}x as fast {where}",
        "slower": f"slower ({gain.ratio:.2f}x as fast) {where}",
    }.get(gain.verdict, f"not measurably faster ({gain.ratio:.2f}x, {gain.low:.2f} to {gain.high:.2f}) {where}")
    if not latency.bound:
        return text
    limit = row.speedups[latency.bound]
    if limit.verdict != "faster":
        return f"{text}; nor would it be with every head removed"
    return text if limit.ratio <= gain.ratio else f"{text}; removing every head would give {limit.ratio:.2f}x"


def rule(metrics: Metrics) -> str:
    """By what rule a model is recommended, or why none is."""
    result = judge(metrics)
    if result.conclusion == GUESSING:
        return "None is recommended: the dense model is no better than guessing."
    set_by_user = " (your limit)" if limits_metric(metrics.budgets) else ""
    limit = f"a loss above {numbers.amount(result.tolerated, metrics.metric)}{set_by_user} is ruled out at 95 %"
    if not result.recommended:
        return f"None is recommended: for no model {limit}."
    which = "the smallest model for which" if len(metrics.budgets) > 1 else "since"
    return f"Recommended: {head_count(result.budget.kept)}, {which} {limit}."


def over_random_line(metrics: Metrics) -> str:
    """Whether the chosen heads beat random ones in the same number."""

    def size(b: BudgetResult) -> str:
        gain = numbers.change(b.over_random, metrics.metric).replace(" (", ", ") if b.over_random else ""
        return f"{head_count(b.kept)}{f' ({gain}' if gain else ''}"

    def answer(b: BudgetResult) -> str:
        if word := against_random(metrics, b):
            return {"better": "yes", "worse": "no, worse"}[word]
        if b.over_random is not None and b.over_random.verdict in ("better", "worse"):
            return f"{b.over_random.verdict} than the mean of the draws, but not than each,"
        return "no measurable difference"

    sizes: dict[str, list[str]] = {}
    for b in largest_first(metrics):
        sizes.setdefault(answer(b), []).append(size(b))
    parts = [f"{text} with {listed(some)}" for text, some in sizes.items()]
    return f"Better than random heads? {capital('; '.join(parts))}."


def loading(run: Run, budget: BudgetResult) -> str:
    """The call that loads a budget's model as it was measured."""
    folder = f"{run.folder}/{budget.checkpoint}" if run.folder else budget.checkpoint
    trust, widen = ", trust_remote_code=True" * budget.runs_code, ".float()" * _widened(run, budget)
    return f"headprune.load({json.dumps(folder, ensure_ascii=False)}{trust}){widen}"


def stock_loading(run: Run, budget: BudgetResult) -> str:
    """The call of transformers that loads it; "" for a class of the model's own code, which would be built with all heads."""
    if budget.runs_code:
        return ""
    native = budget.loads if budget.loads and not budget.loads.startswith("headprune.") else ""
    call = native or "from_pretrained(folder, trust_remote_code=True)"
    return f'{call.removesuffix(")")}, dtype="float32")' if _widened(run, budget) else call


def _widened(run: Run, budget: BudgetResult) -> bool:
    """Whether a model is saved in half precision, but was measured in float32."""
    return bool(budget.dtype) and budget.dtype != run.model.dtype == "float32"


def precision(run: Run, metrics: Metrics) -> str:
    """A note if models are saved in another precision than they were measured in, and how to load them so; else ""."""
    saved, computed = judge(metrics).budget.dtype, run.model.dtype
    if not saved or saved == computed:
        return ""
    as_dense = ", as the dense checkpoint is" if saved == metrics.dense.dtype else ""
    text = f"Weights are saved in {saved}{as_dense}; all models, the dense one too, were measured in {computed}"
    widened = ', as `headprune.load(folder).float()` gives, or `from_pretrained(folder, dtype="float32", …)`'
    return f"{text}{widened if computed == 'float32' else ''}."


# -- what a reader must know before believing the headline ------------------------------------------


def cautions(run: Run, metrics: Metrics) -> list[str]:
    """The cautions that apply to this run, the most important first."""
    return [
        *_no_better_than_random(metrics), *_trained_on_choosing(run, metrics), *_worse_on_other_data(metrics),
        *shortened(run.parts.report, "reported"), *_carried_by_few(metrics),
    ]  # fmt: skip


def shortened(part: Examples, role: str) -> Iterator[str]:
    """A caution if texts were truncated."""
    if part.shortened:
        yield (
            f"{part.shortened:,} of the {part.examples:,} {role} texts were cut at their end: longer than the model or `--max-length` allows."
        )


def _no_better_than_random(metrics: Metrics) -> Iterator[str]:
    verdicts = {against_random(metrics, b) for b in metrics.budgets}
    if metrics.planning.plan is None and "better" not in verdicts:
        yield (
            "At no size did the chosen heads beat every draw of as many random ones beyond chance, so this run does not show that it matters which heads go."
        )


def _trained_on_choosing(run: Run, metrics: Metrics) -> Iterator[str]:
    """A caution if the dense model is clearly better on the choosing part than on the reporting part."""
    dense, metric = metrics.dense, metrics.metric
    (there,) = (p for p in metrics.curve if p.method == "dense")
    if metrics.curve_metric not in ("", metric):
        return
    if there.low > dense.high if metric_named(metric).higher else there.high < dense.low:
        split = code(run.parts.choose.split)
        yield (
            f"The dense model's {metric} is {numbers.value(there.value, metric)} where plans were chosen ({split}) and "
            f"{numbers.value(dense.metrics[metric], metric)} on the examples that are reported, so it was probably trained on "
            f"{split}. The reported figures stand, but plans were compared on examples that the model has memorised; choose others with "
            "`--choose-split`."
        )


def _worse_on_other_data(metrics: Metrics) -> Iterator[str]:
    """Cautions for pruned models that do worse on second data than the first data lets expect."""
    metric = metrics.metric
    # Only perplexity's level of guessing, the number of tokens, is that of any data.
    unknown = [data for data in metrics.also if metric_named(metric).relative and _guesses(data.dense, metrics)]
    for data in unknown:
        guessing = _guessing(data.dense, metrics)
        yield f"On {code(data.name)} the dense model is no better than {guessing}, so what pruning does there says nothing."
    for b in largest_first(metrics):
        gain = b.repair.gain.verdict if b.repair and b.repair.gain else ""
        effect = "helped" if gain == "better" else "changed nothing measurable"
        for data, there in zip(metrics.also, b.also, strict=True):
            if data in unknown:
                continue
            if there.gain and there.gain.verdict == "worse" and gain != "worse":
                yield (
                    f"With {head_count(b.kept)}, repair hurts on {code(data.name)} ({numbers.change(there.gain, metric)}), while it "
                    f"{effect} on the first data. `--no-repair` turns it off."
                )
            if there.change.verdict == "worse" and b.change.verdict != "worse":
                yield (
                    f"With {head_count(b.kept)}, {metric} is measurably worse on {code(data.name)} "
                    f"({numbers.change(there.change, metric)}), though not on the first data."
                )


def _carried_by_few(metrics: Metrics) -> Iterator[str]:
    """Cautions for changes of a metric without a scale that rest on so few examples that their interval may be too narrow."""
    for b in largest_first(metrics) if not metric_named(metrics.metric).width else ():
        if 0 < b.change.carried_by < FEW <= b.change.examples:
            yield (
                f"With {head_count(b.kept)}, the change of the loss rests on about {b.change.carried_by:.0f} of the "
                f"{b.change.examples:,} examples, so its interval may be too narrow; measure on more."
            )


def notes(run: Run) -> Markdown:
    """The columns of the data, what was guessed or left out, and the layers that cannot be pruned."""
    columns = ", ".join(f"{what} = {code(name)}" for what, name in run.columns.items())
    fixed = (f"{code(a.name)} cannot be pruned: {a.reason}." for a in run.model.layers if not a.prunable)
    return bullets([f"Columns: {columns}.", *run.notes, *fixed])
