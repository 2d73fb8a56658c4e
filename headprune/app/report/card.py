"""What a pruned model's card says of its costs: the figures of metrics.json, as the report has them."""

from __future__ import annotations

from collections.abc import Iterator

from headprune import amounts
from headprune.app.documents import BudgetResult, Metrics, Run
from headprune.app.report import markdown, numbers
from headprune.app.report.content import Block, Bullets, Table, code


def card(run: Run, metrics: Metrics, budget: BudgetResult) -> str:
    """A table of the model beside the dense one, and how it was made."""
    dataset = numbers.without_place(run.options.data.dataset)
    machine = numbers.device(metrics.environment or run.environment, run.model.dtype)
    blocks: list[Block] = [
        f"On {budget.change.examples:,} examples of {code(dataset)} ({code(run.parts.report.split)}), none of which decided anything; "
        "intervals: 95 %, paired by example for the change. “Dense” is the model before this run.",
        _costs(metrics, budget),
        " ".join(_origin(run, metrics, budget)),
        f"Times: one forward pass on {machine}. Made by headprune {run.environment.headprune} with:",
        Bullets([code(numbers.without_places(command)) for command in dict.fromkeys(run.commands)]),
    ]
    return "\n\n".join(map(markdown.block_of, blocks))


def _costs(metrics: Metrics, budget: BudgetResult) -> Table:
    metric, dense, pruned = metrics.metric, metrics.dense, budget.pruned
    change = f"{numbers.change(budget.change, metric)}: {budget.change.verdict}"
    rows = [[metric, numbers.interval(dense, metric), numbers.interval(pruned, metric), change]]
    for name, title in numbers.METRICS.items():
        if name != metric and name in dense.metrics:
            rows.append([title, *(numbers.value(model.metrics[name], name) for model in (dense, pruned)), ""])
    counts = [f"{model.parameters:,}" for model in (dense, budget)]
    flops = [amounts.flops(model.flops, 4) for model in (dense, budget)]
    rows.append(["parameters", *counts, numbers.share_of(budget.parameters, dense.parameters)])
    rows.append(["FLOPs, one example of median length", *flops, numbers.share_of(budget.flops, dense.flops)])
    for row in metrics.latency.rows:
        faster = row.speedups[budget.name]
        times = (f"{row.timings[name].median:.2f}" for name in ("dense", budget.name))
        rows.append([f"ms, {numbers.shape(row)}", *times, f"{numbers.ratio(faster)} as fast: {faster.verdict}"])
    return Table(("", "dense", f"{budget.kept} of {budget.total} heads", "change"), rows)


def _origin(run: Run, metrics: Metrics, budget: BudgetResult) -> Iterator[str]:
    """What is due to the choice of heads, to repair and to training, and how the weights are stored."""
    metric, repair, tuning = metrics.metric, budget.repair, budget.finetune
    mean = f"{'geometric ' * (metric == 'perplexity')}mean {metric} of {numbers.value(numbers.mean_of(budget.random, metric), metric)}"
    how = "layer by layer only" if repair and repair.layers_alone else "as well"
    yield f"Random heads in the same number{f', repaired {how},' if repair else ''} give a {mean}."
    if repair is not None:
        without = numbers.value(repair.without.metrics[metric], metric)
        yield f"Without the repair{' and before training' if tuning else ''}, the {metric} of this model is {without}."
    if tuning is not None:
        before = numbers.value(tuning.before.metrics[metric], metric)
        yield f"It was trained after the pruning, with distillation from the dense model; before that its {metric} was {before}."
    if budget.dtype and budget.dtype != run.model.dtype:
        option = code(f'dtype="{run.model.dtype}"')
        yield f"Weights are stored in {budget.dtype}; it was measured in {run.model.dtype}, as `from_pretrained` with {option} gives."
