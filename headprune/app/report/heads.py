"""Tables and pictures of heads: how important each is, how far methods agree, what heads do, and which were removed."""

from __future__ import annotations

from collections.abc import Sequence

from headprune import amounts
from headprune.app.documents import BudgetResult, Heads, Metrics, Run, by_role
from headprune.app.pictures import figure_of_all, new_figure
from headprune.app.report import verdict
from headprune.app.report.content import Block, Documents, Figure, Table, capital, notes_by_size
from headprune.scoring import METHODS
from headprune.scoring.scores import HeadScores, agreements, chance


def method_line(method: str) -> str:
    """A scoring method's description in one line."""
    return METHODS[method].about if method in METHODS else "Your own method."


def basis(scores: HeadScores) -> str:
    """What a method's scores mean, and what they are based on."""
    details = scores.details
    error = f"no standard error: {details['stderr']}" if "stderr" in details else "± is the standard error"
    facts = [capital(scores.unit), scores.basis, error, details.get("estimated"), scores.caution, scores.stability]
    return f"{method_line(scores.method)} {'; '.join(str(fact) for fact in facts if fact)}."


def harmful(s: HeadScores) -> str:
    """A sentence on how many heads are harmful; "" if no score is below 0, or signs or standard errors are missing."""
    values, errors = s.flat(), s.flat_stderr()
    if not (s.signed and float(values.min()) < 0 and bool(errors.isfinite().all())):
        return ""
    harmful, unsure = (int(mask.sum()) for mask in (values + 1.96 * errors < 0, values.abs() < 1.96 * errors))
    return f" Harmful (more than 1.96 standard errors below 0): {harmful} of {len(values)}; within 1.96 standard errors of 0: {unsure}."


def scores_figure(documents: Documents) -> Figure:
    """A heat map per method, layers by heads; crosses mark the heads that the verdict's plan removes."""
    metrics, scores = documents.metrics, documents.rankings or documents.scores
    budget = verdict.judge(metrics).budget if metrics is not None else None
    layers = scores[0].layers
    columns = min(len(scores), 3)
    rows = -(-len(scores) // columns)
    width, height = 1.6 + 0.42 * max(6, *(layer.num_heads for layer in layers)), 1.35 + 0.36 * max(len(layers), 4)
    figure, axes = new_figure(width * columns, height * rows, columns, rows)
    for axis in axes[len(scores) :]:
        axis.set_visible(False)
    for axis, s in zip(axes, scores, strict=False):
        s.plot(axis, None if budget is None else budget.drop)
        axis.images[0].colorbar.set_label(s.unit.split(",")[0].split(" when ")[0], fontsize=8)
    if budget is not None:
        figure.supxlabel(f"×: removed to keep {budget.kept} of {budget.total} heads", fontsize=9)
    crosses = "; crosses mark the heads that went" * (budget is not None)
    return Figure("importance.png", f"importance of every head{crosses}", figure)


def agreement_table(scores: Sequence[HeadScores]) -> Table | None:
    """The agreement of every pair of methods, highest first, undefined ones last; None for a single method."""
    pairs = agreements(scores)
    if not pairs:
        return None
    random = chance(len(scores[0].flat()))
    pairs = sorted(pairs, key=lambda p: -2 if p.spearman != p.spearman else p.spearman, reverse=True)
    rows = [(f"{p.first}, {p.second}", _rank(p.spearman), _rank(p.kendall), f"{p.top_half:.0%}") for p in pairs]
    limits = (f"±{random.spearman:.2f}", f"±{random.kendall:.2f}", f"{random.top_half:.0%}")
    rows.append(("random orders, 95 % within", *limits))
    return Table(("methods", "Spearman", "Kendall", "upper half in common"), rows)


def _rank(correlation: float) -> str:
    """A rank correlation as text; – where one of the methods gives every head the same score."""
    return "–" if correlation != correlation else f"{correlation:.2f}"


def attention_figure(heads: Heads, budget: BudgetResult | None) -> Figure:
    """What every head attends to in the last sample; crosses mark the heads that the budget's plan removes."""
    figure = figure_of_all(heads, heads.samples[-1], budget.drop if budget else None)
    return Figure("heads.png", "attention of every head on one example", figure)


def role_table(metrics: Metrics | None, heads: Heads) -> Table:
    """A table of the roles, most frequent first: their heads, how many of these each plan removes, and an example."""
    budgets = verdict.largest_first(metrics) if metrics is not None else []
    rows = []
    for role, addresses, example in by_role(heads):
        gone = (sum(h in b.drop.get(name, ()) for name, h in addresses) for b in budgets)
        rows.append((role, str(len(addresses)), *map(str, gone), example))
    return Table(("role", "heads", *(f"removed to keep {b.kept}" for b in budgets), "clearest example"), rows)


def removed(run: Run, metrics: Metrics) -> list[Block]:
    """Tables of the removed heads, by layer, and of the pruned models' folders, with notes."""
    budgets = verdict.largest_first(metrics)
    layers = []
    for layer in run.model.layers:
        gone = [", ".join(f"H{h}" for h in b.drop.get(layer.name, ())) for b in budgets]
        if any(gone):
            layers.append((f"L{layer.index} ({amounts.code(layer.name)})", *(heads or "–" for heads in gone)))
    folders, notes = [], []
    for b in budgets:
        by = ", ".join(dict.fromkeys(filter(None, [b.method, b.strategy]))) or amounts.code(metrics.planning.plan)
        size, loads = amounts.size(b.size, 3) if b.size else "", amounts.code(b.loads) if b.loads else ""
        folders.append((str(b.kept), by, amounts.code(f"{b.checkpoint}/"), size, loads))
        emptied = "These layers lost all their heads, but keep one head (or group) with zero output, which the cache or the module's code needs: "
        ghosts = f"{emptied}{', '.join(map(amounts.code, b.proof.ghosts))}."
        notes.append((b.kept, [ghosts, *b.notes] if b.proof.ghosts else b.notes))
    return [
        Table(("layer", *(f"removed to keep {b.kept}" for b in budgets)), layers),
        Table(("heads kept", "chosen by", "saved in", "size in all", "loads with"), folders),
        *notes_by_size(notes),
    ]  # fmt: skip
