"""What a reader must know before believing the headline, why the figures can be believed, and how to make them again."""

from __future__ import annotations

from collections.abc import Iterator

from headprune.amounts import code, head_count
from headprune.app.documents import Examples, Metrics, Run
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Bullets, CommandLines, Documents, Section
from headprune.uncertainty import FEW


def cautions(run: Run, metrics: Metrics) -> list[str]:
    """Every one that this run needs, the most important first."""
    return [
        *_no_better_than_random(metrics), *_trained_on_choosing(run, metrics), *_worse_on_other_data(metrics),
        *filter(None, [shortened(run.parts.report, "reported")]), *_carried_by_few(metrics),
    ]  # fmt: skip


def shortened(part: Examples, role: str) -> str:
    """That texts were cut at their end; "" if none was."""
    if not part.shortened:
        return ""
    were, their, they = ("was", "its", "it is") if part.shortened == 1 else ("were", "their", "they are")
    return (
        f"{part.shortened:,} of the {part.examples:,} {role} texts {were} cut at {their} end: {they} longer than the model or "
        "`--max-length` allows."
    )


def _no_better_than_random(metrics: Metrics) -> Iterator[str]:
    verdicts = {verdict.against_random(metrics, b).verdict for b in metrics.budgets}
    if metrics.planning.plan is None and "better" not in verdicts:
        several = len(metrics.budgets) > 1
        sizes = "At none of these sizes did the chosen heads" if several else "The chosen heads did not"
        yield f"{sizes} measurably beat as many random ones, so this run does not show that it matters which heads go."


def _trained_on_choosing(run: Run, metrics: Metrics) -> Iterator[str]:
    """The dense model is far better where plans were chosen than where they are reported."""
    dense, metric = metrics.dense, metrics.metric
    (there,) = (p for p in metrics.curve if p.method == "dense")
    if there.low > dense.high if metric == "accuracy" else there.high < dense.low:
        split = code(run.parts.choose.split)
        yield (
            f"The dense model's {metric} is {numbers.value(there.value, metric)} where plans were chosen ({split}) and "
            f"{numbers.value(dense.metrics[metric], metric)} on the examples that are reported, so it was probably trained on "
            f"{split}. The reported figures stand, but plans were compared on examples that the model has memorised; choose others with "
            "`--choose-split`."
        )


def _worse_on_other_data(metrics: Metrics) -> Iterator[str]:
    """A pruned model does worse on second data than the first data lets expect."""
    metric = metrics.metric
    for b in verdict.largest_first(metrics):
        gain = b.repair.gain.verdict if b.repair and b.repair.gain else ""
        effect = "helped" if gain == "better" else "changed nothing measurable"
        for data, there in zip(metrics.also, b.also, strict=True):
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
    """A change of perplexity hangs on so few examples that its interval may be too narrow."""
    for b in verdict.largest_first(metrics) if metrics.metric != "accuracy" else ():
        if 0 < b.change.carried_by < FEW <= b.change.examples:
            yield (
                f"With {head_count(b.kept)}, the change of the loss rests on about {b.change.carried_by:.0f} of the "
                f"{b.change.examples:,} examples, so its interval may be too narrow; measure on more."
            )


def trust(documents: Documents) -> Section:
    """What an engineer asks before believing a figure."""
    run, metrics = documents.run, documents.metrics
    columns = ", ".join(f"{what} = {code(name)}" for what, name in run.columns.items())
    fixed = (
        f"{code(layer.name)} cannot be pruned: {layer.reason}." for layer in run.model.layers if not layer.prunable
    )
    lines = [_model(documents), _parts(documents)]
    if metrics is not None:
        lines += _evidence(metrics)
    notes = Bullets([f"Columns: {columns}.", *run.notes, *fixed])
    return Section("Why trust these figures", [Bullets(lines)], "Columns of the data, and notes on this run", [notes])


def _model(documents: Documents) -> str:
    run, model = documents.run, documents.run.model
    layers = len(model.layers)
    return (
        f"The model: {code(run.options.model)}, {code(model.class_name)}, {model.task}, {model.parameters:,} parameters, {model.heads} "
        f"heads in {layers} attention layer{'s' * (layers != 1)}. The data: {code(run.options.data.dataset)}. Made by headprune "
        f"{run.environment.headprune} on {run.when}, {numbers.device(run.environment, model.dtype)}."
    )


def _parts(documents: Documents) -> str:
    """How many examples were used for what."""
    cut, metrics = documents.run.parts, documents.metrics
    score, choose, report = (f"{p.examples:,} ({code(p.split)})" for p in (cut.score, cut.choose, cut.report))
    if metrics is None:
        return (
            f"The scores are from {cut.score.examples:,} examples ({code(cut.score.split)}). Two other parts, which share no example and no "
            f"input with them, are set aside for pruning: {choose} to choose between plans, and {report} to report on."
        )
    own = metrics.planning.plan is not None
    uses = ["score the heads"] * (not own) + ["fit the repair"] * any(b.repair is not None for b in metrics.budgets)
    split = ", which was split for this" if cut.report.split in (cut.choose.split, cut.score.split) else ""
    return (
        f"Three parts of the data share no example and no input: {score} {' and '.join(uses) or 'are not used'}, {choose} "
        f"{'are used for the curve only' if own else 'choose between plans'}, and every figure above comes from "
        f"{cut.report.examples:,} others ({code(cut.report.split)}{split})."
    )


def _evidence(metrics: Metrics) -> Iterator[str]:
    budgets, proofs = metrics.budgets, [b.proof for b in metrics.budgets]
    proof = _equality(max(p.difference for p in proofs), f" (allowed: {proofs[0].tolerance:.0e})")
    yield (
        f"The heads are really removed: parameters and FLOPs shrink, and on {min(p.inputs for p in proofs)} inputs each pruned model's "
        f"outputs {proof} those of the same model with these heads masked. All figures are of the saved folder, loaded again; its outputs "
        f"{_equality(max(p.reload_difference for p in proofs))} those of the model in memory."
    )
    paired = (
        "Changes are paired: dense and pruned model on the same examples; interval, p and verdict come from one test"
    )
    yield f"{paired} (`headprune.uncertainty`). “No measurable change”: the 95 % interval contains 0."
    chance = ", and the draws' mean by more than chance" if any(b.over_random for b in budgets) else ""
    yield (
        f"Random heads: {len(budgets[0].random)} draws of as many heads, repaired as the heads they are compared with were. Chosen heads count "
        f"as better only if they beat every draw{chance}."
    )
    bound = " So was the limit that no plan can exceed: the model with every prunable head removed."
    rounds = min(timing.runs for row in metrics.latency.rows for timing in row.timings.values())
    yield f"Dense and pruned models were timed in turn, for at least {rounds} rounds.{bound if metrics.latency.bound else ''}"


def _equality(difference: float, limit: str = "") -> str:
    """In words, how much outputs differ from others: "are exactly" for no difference."""
    near = f"differ by at most {difference:.1e} of their largest value{limit} from"
    return near if difference else "are exactly"


def reproduce(documents: Documents) -> Section:
    """What to type to make the run again."""
    run, environment = documents.run, documents.run.environment
    took = " and ".join(f"{seconds:,.0f} s" for seconds in run.seconds)
    versions = f"Python {environment.python}, torch {environment.torch}, transformers {environment.transformers}, {environment.system}"
    repeats = "Scores, plans and metrics repeat from the seed; timings do not."
    facts = f"Took {took}. {versions}; seed {run.options.seed}; model fingerprint `{run.model.fingerprint}`. {repeats}"
    return Section("Reproduce", [CommandLines([*dict.fromkeys(map(numbers.to_repeat, run.commands))]), facts])
