"""What a run comes to, in words: the same in the report, the page and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction

from headprune.amounts import head_count
from headprune.app.documents import BudgetResult, EngineLatency, Metrics, Run
from headprune.app.report import findings, numbers
from headprune.app.report.verdict import (
    AgainstRandom,
    Kind,
    against_random,
    by_cheaper_repair,
    elsewhere,
    headline_row,
    loss_within,
    untrained,
    verdict,
)
from headprune.checkpoint import code
from headprune.evaluation import Change
from headprune.options import AUTO
from headprune.planning import STRATEGIES
from headprune.scoring import METHODS
from headprune.scoring.scores import HeadScores

_SHARES = {
    Fraction(1, 2): "half", Fraction(1, 3): "a third", Fraction(2, 3): "two thirds", Fraction(1, 4): "a quarter",
    Fraction(3, 4): "three quarters", Fraction(1): "all",
}  # fmt: skip

_NAMED = 10  # heads in a list
_REFITTED = "the kept heads' weights refitted by least squares"


class Column(IntEnum):
    """The columns of the first table, in their order."""

    HEADS = 0
    VALUE = 1
    CHANGE = 2
    VERDICT = 3
    RANDOM = 4
    SPEED = 5
    FASTER = 6
    SIZE = 7


def headline(run: Run, metrics: Metrics) -> str:
    """The run in one sentence: what can go, what else was changed, what it costs, how fast it is and where."""
    found = verdict(metrics)
    b, metric = found.budget, metrics.metric
    dense, pruned = (numbers.value(m.metrics[metric], metric) for m in (metrics.dense, b.pruned))
    cost = _cost(b.change, metric)
    against = f"{metric} {pruned} against {dense} ({cost}), {_speed(run, metrics, b)}"
    heads, beside = _heads(b), _beside(b)
    if found.kind is Kind.GUESSING:
        level = numbers.value(metrics.dense.guessing or 0.0, metric)
        return (
            f"The dense model is no better than guessing ({metric} {dense}; a model that knows nothing has {level}), so this run "
            "says nothing about its heads."
        )
    if found.kind is Kind.UNSURE:
        left = numbers.loss(found.budget.change, metrics.metric)
        return (
            f"{b.change.examples:,} examples are too few to say whether heads can go: without {heads}{beside}, {against}; a loss of up to "
            f"{left} is possible."
        )
    if found.kind is Kind.COSTS:
        if len(metrics.budgets) > 1:
            return f"Every plan worsens the {metric}; the mildest removes {heads}{beside}: {against}."
        return f"Removing {heads} worsens the {metric}{beside}: {against}."
    if b.change.verdict != "better" and loss_within(metrics, b.change) > 0:
        against = against.replace(cost, f"{cost}; a loss of up to {numbers.loss(b.change, metric)} is possible")
    return f"{_with(heads, str.upper)} can go{beside}: {against}."


def rule(metrics: Metrics) -> str:
    """By what rule a model is recommended, or why none is."""
    found = verdict(metrics)
    if found.kind is Kind.GUESSING:
        return "None is recommended: the dense model is no better than guessing."
    set_by_user = " (your limit)" if findings.limits_metric(metrics.budgets) else ""
    limit = f"a loss above {numbers.amount(found.tolerated, metrics.metric)}{set_by_user} is ruled out at 95 %"
    if not found.recommended:
        return f"None is recommended: for no model {limit}."
    which = "the smallest model for which" if len(metrics.budgets) > 1 else "since"
    return f"Recommended: {head_count(found.budget.kept)}, {which} {limit}."


def over_random(metrics: Metrics) -> str:
    """Whether the chosen heads beat random ones in the same number."""
    found = [against_random(metrics, b) for b in findings.largest_first(metrics)]
    told = []
    for word, answer in (
        ("better", "yes"),
        ("worse", "no, worse"),
        ("no measurable difference", "no measurable difference"),
    ):
        if some := [f"{head_count(r.budget.kept)}{_gain(r, metrics.metric)}" for r in found if r.verdict == word]:
            told.append(f"{answer} with {_listed(some)}")
    text = "; ".join(told)
    text = f"{_with(text, str.upper)}."
    if _trained(metrics):
        text += " Random heads are not trained, so the chosen ones are compared as they were before training."
    if any(by_cheaper_repair(r.budget) and r.value != untrained(r.budget).metrics[metrics.metric] for r in found):
        text += (
            " For this comparison both were repaired layer by layer only. The models above also had the last step of repair, which follows the "
            "dense model's answers, not the labels, so by chance it may score lower on these examples."
        )
    if any(r.change is not None for r in found):
        text += " The intervals cover the choice of examples, not the draw of random heads."
    return text


def _gain(found: AgainstRandom, metric: str) -> str:
    """What choosing gained."""
    against = f"{numbers.value(found.value, metric)} against {numbers.value(found.mean, metric)}"
    if found.change is None:
        return f" ({against})"
    return f" ({against}: {numbers.change(found.change, metric).replace(' (', ', ')}"


def cautions(run: Run, metrics: Metrics) -> list[str]:
    """What a reader must know before believing the headline."""
    metric, told = metrics.metric, []
    if all(against_random(metrics, b).verdict != "better" for b in metrics.budgets) and not _of_user(metrics):
        sizes = (
            "At none of these sizes did the chosen heads" if len(metrics.budgets) > 1 else "The chosen heads did not"
        )
        told.append(
            f"{sizes} measurably beat as many random ones, so this run does not show that it matters which heads go."
        )
    if (trained := findings.trained_on_choosing(metrics)) is not None:
        split = code(run.parts.choose.split)
        told.append(
            f"The dense model's {metric} is {numbers.value(trained, metric)} where plans were chosen ({split}) and "
            f"{numbers.value(metrics.dense.metrics[metric], metric)} on the examples that are reported, so it was probably trained on "
            f"{split}. The reported figures stand, but plans were compared on examples that the model has memorised; choose others with "
            "`--choose-split`."
        )
    for e in elsewhere(metrics):
        if e.repair_hurt and e.gain is not None:
            told.append(
                f"With {head_count(e.budget.kept)}, repair hurts on {e.name} ({numbers.change(e.gain, metric)}), while it "
                f"{_did(e.budget)} on the first data. `--no-repair` turns it off."
            )
        if e.worse:
            told.append(
                f"With {head_count(e.budget.kept)}, {metric} is measurably worse on {e.name} ({numbers.change(e.change, metric)}), though not "
                "on the first data."
            )
    if cut := run.parts.report.shortened:
        were, their, they = ("was", "its", "it is") if cut == 1 else ("were", "their", "they are")
        told.append(
            f"{cut:,} of the {run.parts.report.examples:,} reported texts {were} cut at {their} end: {they} longer than the model or "
            "`--max-length` allows."
        )
    for b in findings.rests_on_few(metrics):
        told.append(
            f"With {head_count(b.kept)}, the change of the loss rests on about {b.change.carried_by:.0f} of the {b.change.examples:,} "
            "examples, so its interval may be too narrow; measure on more."
        )
    return told


def stay_though_low(scores: Sequence[HeadScores], budget: BudgetResult) -> list[str]:
    """Heads that a plan keeps although they score low, by every method, and why; nothing where there are none."""
    told, why = [], []
    for s in scores:
        if s.method == "random" or not (heads := findings.kept_though_low(s, budget)):
            continue
        more = f" and {len(heads) - _NAMED} more" if len(heads) > _NAMED else ""
        told.append(
            f"The plan keeps these heads, though {s.method} ranks them among the {budget.total - budget.kept} lowest: {', '.join(heads[:_NAMED])}{more}."
        )
        why.append(_why_low(s, budget))
    return [*told, *dict.fromkeys(why)]


def _why_low(scores: HeadScores, budget: BudgetResult) -> str:
    if not budget.strategy:
        return "The plan is your own."
    known = STRATEGIES.get(budget.strategy)
    if known is not None and known.runs_model:
        return (
            "A score measures the removal of one head while all others stay; the search measured heads removed together. A head whose work "
            "others can do scores low, and matters once those others are gone. Heads with close scores (±) may also swap places by chance."
        )
    if budget.method != scores.method:
        return f"{_with(budget.method, str.upper)} chose which heads to remove, and ranks them differently."
    return "A constraint (groups, protected heads or heads per layer) kept them."


@dataclass(frozen=True)
class Row:
    """A row of the first table; ``recommended`` if it is the model to take."""

    cells: tuple[str, ...]
    recommended: bool = False


def table(metrics: Metrics) -> tuple[tuple[str, ...], list[Row]]:
    """The first table, its head and its rows (by `Column`): the dense model, then the pruned ones by size."""
    metric, dense, first = metrics.metric, metrics.dense, headline_row(metrics.latency)
    found, precisions = verdict(metrics), findings.precisions(metrics)
    of_all = f"size in {next(iter(precisions))}" if len(precisions) == 1 else "size as saved" if precisions else ""

    def stored(budget: BudgetResult | None = None) -> str:
        size = findings.stored(metrics, budget)
        return "" if size is None else numbers.size(size[0]) + (f" in {size[1]}" if len(precisions) > 1 else "")

    head = (
        "heads kept", f"{metric} (95 %)", "change (95 %)", "verdict", control(metrics),
        f"speed at {numbers.shape(first)} (95 %)", "speed verdict", numbers.with_more("parameters", of_all),
    )  # fmt: skip
    of_dense = _cells(f"{metrics.budgets[0].total} (dense)", numbers.measured_value(dense, metric))
    of_dense[Column.SIZE] = numbers.with_more(f"{dense.parameters:,}", stored())
    rows = [Row(tuple(of_dense))]
    for b in findings.largest_first(metrics):
        r, faster = against_random(metrics, b), first.speedups[b.name]
        share = f"{b.parameters / dense.parameters - 1:+.1%}"
        cells = _cells(str(b.kept), numbers.measured_value(b.pruned, metric))
        cells[Column.CHANGE], cells[Column.VERDICT] = numbers.change(b.change, metric), b.change.verdict
        draws = f"{numbers.value(r.mean, metric)} ({numbers.value(r.low, metric)} to {numbers.value(r.high, metric)})"
        cells[Column.RANDOM] = f"{numbers.value(r.value, metric)} against {draws}" if _treated(metrics) else draws
        cells[Column.SPEED], cells[Column.FASTER] = numbers.ratio(faster), faster.verdict
        cells[Column.SIZE] = numbers.with_more(f"{b.parameters:,}", share, stored(b))
        rows.append(Row(tuple(cells), found.recommended and b is found.budget))
    return head, rows


def control(metrics: Metrics) -> str:
    """The head of the first table's column of random heads."""
    mean = "geometric mean" if metrics.metric == "perplexity" else "mean"
    draws = f"random heads: {mean} of {len(metrics.budgets[0].random)} draws (range)"
    told = _treated(metrics)
    return f"chosen against {draws}, both {told}" if told else draws


CHOSEN = "chosen heads (95 % interval)"


def random_draws(number: int) -> str:
    """What a chart calls the line of random heads."""
    return f"random heads: mean and range of {number} draws"


def alike(metrics: Metrics) -> str:
    """What a chart calls the chosen heads treated like the random ones; "" where the saved models are just these."""
    told = _treated(metrics)
    return f"chosen heads, {told} like the random ones" if told else ""


def _treated(metrics: Metrics) -> str:
    """How chosen heads were compared with random ones, where the saved models had more done to them."""
    cheaper = any(map(by_cheaper_repair, metrics.budgets))
    return " and ".join(["repaired layer by layer"] * cheaper + ["before training"] * _trained(metrics))


def curves(run: Run, metrics: Metrics) -> str:
    """What the curves of all orders show."""
    repairs = [b.repair for b in metrics.budgets if b.repair]
    stepped = ", but without the last step of repair" if any(r.answers for r in repairs) else ""
    repaired = f" and the kept heads repaired{stepped}" if repairs else ""
    choose = run.parts.choose
    return (
        f"Each curve is one order. Heads are masked{repaired}, on the {choose.examples:,} examples of the choosing part "
        f"({code(choose.split)}), so do not compare these values with the first table. Shaded: the 95 % interval of each value (not of its "
        "difference from the dense model's); of random heads, the range of their draws."
    )


def _trained(metrics: Metrics) -> bool:
    return any(b.finetune for b in metrics.budgets)


def _cells(heads: str, value: str) -> list[str]:
    cells = [""] * len(Column)
    cells[Column.HEADS], cells[Column.VALUE] = heads, value
    return cells


def precision(run: Run, metrics: Metrics) -> str:
    """In which precision models are saved, where it is another one than they were measured in, and how to get that; else ""."""
    stored, computed = verdict(metrics).budget.dtype, run.model.dtype
    if not stored or stored == computed:
        return ""
    as_dense = ", as the dense checkpoint is" if len(findings.precisions(metrics)) == 1 else ""
    told = f"Weights are saved in {stored}{as_dense}; all models, the dense one too, were measured in {computed}"
    if computed != "float32":
        return f"{told}."
    return f'{told}, as `headprune.load(folder).float()` gives, or `from_pretrained(folder, dtype="float32", …)`.'


def proved(metrics: Metrics) -> str:
    """How near the pruned models' outputs are to those of the same models with these heads masked."""
    proofs = [b.proof for b in metrics.budgets]
    inputs, most = min(p.inputs for p in proofs), max(p.difference for p in proofs)
    same = "those of the same model with these heads masked"
    if not most:
        return f"on {inputs} inputs each pruned model's outputs are exactly {same}"
    return (
        f"on {inputs} inputs each pruned model's outputs differ by at most {most:.1e} of their largest value "
        f"(allowed: {proofs[0].tolerance:.0e}) from {same}"
    )


def reloaded(metrics: Metrics) -> str:
    """How near the saved folders' outputs are to those of the models in memory."""
    most = max(b.proof.reload_difference for b in metrics.budgets)
    if not most:
        return "its outputs are exactly those of the model in memory"
    return f"its outputs differ by at most {most:.1e} of their largest value from those of the model in memory"


def parts(run: Run, metrics: Metrics | None, scored: bool) -> str:
    """How many examples were used for what."""
    score = f"{run.parts.score.examples:,} examples of {code(run.parts.score.split)}"
    choose, report = (f"{p.examples:,} of {code(p.split)}" for p in (run.parts.choose, run.parts.report))
    begin = f"{'Scores come from' if scored else 'The scoring part, which was not used, has'} {score}"
    rest = f"plans were chosen on {choose}; {metrics.metric} is reported on {report}" if metrics else ""
    rest = rest or f"{choose} are set aside to choose between plans, and {report} to report on"
    return f"{begin}; {rest}. No example is in two parts."


def about(method: str) -> str:
    """What a scoring method says of itself."""
    return METHODS[method].about if method in METHODS else "Your own method."


def orders(metrics: Metrics) -> list[tuple[str, str]]:
    """What the names of orders of removal mean that a report uses: each with what its strategy says of itself."""
    planning = metrics.planning
    names = [p.method for p in metrics.curve if p.method != "dense"] + [o.order for o in planning.compared]
    used = [b.strategy for b in metrics.budgets if b.strategy]
    found, by_scores = [], "one-shot" if planning.strategy == AUTO else planning.strategy
    known = {"random": "Heads drawn at random, the control.", "plan": "Your own plan."}
    for name in dict.fromkeys([*names, *used, *filter(None, [planning.strategy])]):
        if name in known:
            found.append((name, known[name]))
        elif name in STRATEGIES:
            found.append((name, STRATEGIES[name].about))
        elif by_scores in STRATEGIES:
            found.append(
                (name, f"By the scores of that name ({by_scores}): {_with(STRATEGIES[by_scores].about, str.lower)}")
            )
    return found


def elsewhere_rows(metrics: Metrics) -> list[str]:
    """A line for every pruned model on every second dataset."""
    metric = metrics.metric
    return [
        f"{data.name}: {metric} {numbers.measured_value(there.pruned, metric)} with {head_count(b.kept)} against "
        f"{numbers.value(data.dense.metrics[metric], metric)}: {numbers.change(there.change, metric)}, {there.change.verdict}."
        for b in findings.largest_first(metrics)
        for data, there in zip(metrics.also, b.also, strict=True)
    ]


def also_table(metrics: Metrics) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Second data: the table's head, and of every dataset a row for the dense and for each pruned model.

    Rows begin with the dataset's name and how many examples it has, which are one column.
    """
    metric = metrics.metric
    repairs = any(b.repair for b in metrics.budgets)
    fitted = repairs or any(b.finetune for b in metrics.budgets)
    head = ("data", "heads", f"{metric} (95 %)", "change (95 %)", "verdict")
    rows: list[tuple[str, ...]] = []
    for i, data in enumerate(metrics.also):
        which = (data.name, f"{data.data.examples:,} examples")
        none = ("",) if fitted else ()
        total = metrics.budgets[0].total
        rows.append((*which, f"{total} (dense)", numbers.measured_value(data.dense, metric), "", "", *none))
        for b in findings.largest_first(metrics):
            there, gain = b.also[i], b.also[i].gain
            told = f"{numbers.change(gain, metric)}, {gain.verdict}" if gain else "–"
            rows.append(
                (
                    *which, str(b.kept), numbers.measured_value(there.pruned, metric), numbers.change(there.change, metric),
                    there.change.verdict, *((told,) if fitted else ()),
                )
            )  # fmt: skip
    return (*head, *([f"effect of {'repair' if repairs else 'training'}"] if fitted else [])), rows


ENGINE_HEAD = ("input", "model", "median, ms", "speed-up (95 %)", "verdict")


def engine_rows(engine: EngineLatency) -> list[tuple[str, ...]]:
    """Exported models' times in their engine."""
    found: list[tuple[str, ...]] = []
    for row in engine.rows:
        for name, timing in row.timings.items():
            faster = row.speedups.get(name)
            told = (numbers.ratio(faster), faster.verdict) if faster else ("", "")
            found.append((numbers.shape(row), name, f"{timing.median:.2f}", *told))
    return found


def _cost(change: Change, metric: str) -> str:
    if change.verdict == "no measurable change":
        return change.verdict
    forms = {"accuracy": f"{100 * change.value:+.1f} points", "perplexity": f"{change.value:+.1%}"}
    by = forms.get(metric, f"{change.value:+.3g}")
    return f"{by}, measurably {change.verdict}"


def _beside(budget: BudgetResult) -> str:
    """What was done to the kept heads beside the removal."""
    repair = budget.repair
    done = [_REFITTED] if repair and (repair.layers or repair.answers) else []
    if budget.finetune:
        return f", with {' and '.join([*done, 'the smaller model trained again'])}"
    return f", with {done[0]} (repair, without training)" if done else ""


def _speed(run: Run, metrics: Metrics, budget: BudgetResult) -> str:
    """How much faster, on which machine, and how much faster it could be."""
    latency, row = metrics.latency, headline_row(metrics.latency)
    gained = row.speedups[budget.name]
    machine = numbers.device(metrics.environment or run.environment, run.model.dtype)
    where = f"at {numbers.shape(row)} on {machine}"
    told = {
        "faster": f"{gained.ratio:.2f}x as fast {where}",
        "slower": f"slower ({gained.ratio:.2f}x as fast) {where}",
    }.get(gained.verdict, f"not measurably faster ({gained.ratio:.2f}x, {gained.low:.2f} to {gained.high:.2f}) {where}")
    if not latency.bound:
        return told
    limit = row.speedups[latency.bound]
    if limit.verdict != "faster":
        return f"{told}; nor would it be with every head removed"
    if limit.ratio <= gained.ratio:
        return told
    return f"{told}; removing every head would give {limit.ratio:.2f}x"


def _heads(budget: BudgetResult) -> str:
    gone = budget.total - budget.kept
    share = _SHARES.get(Fraction(gone, budget.total))
    return f"{share} of the heads ({gone} of {budget.total})" if share else f"{gone} of the {budget.total} heads"


def _did(budget: BudgetResult) -> str:
    gain = budget.repair.gain if budget.repair else None
    if gain is None or gain.verdict == "no measurable change":
        return "changed nothing measurable"
    return {"better": "helped", "worse": "hurt too"}[gain.verdict]


def _of_user(metrics: Metrics) -> bool:
    return metrics.planning.plan is not None


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _with(sentence: str, first: Callable[[str], str]) -> str:
    return f"{first(sentence[:1])}{sentence[1:]}"
