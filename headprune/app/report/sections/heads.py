"""What the heads do, and which ones went."""

from __future__ import annotations

from functools import partial

from headprune import amounts
from headprune.app.documents import Heads, Metrics, Run
from headprune.app.report import verdict
from headprune.app.report.content import Block, Documents, Figure, Section, Table, code, notes_by_size
from headprune.app.seeing import by_role
from headprune.app.seeing.pictures import figure_of_all


def roles(documents: Documents) -> Section | None:
    """Where each head looks, and which roles the removed heads had."""
    heads, metrics = documents.heads, documents.metrics
    if heads is None:
        return None
    blocks: list[Block] = []
    if heads.samples:
        budget = verdict.judge(metrics).budget if metrics is not None else None
        sample = heads.samples[-1]
        draw = partial(figure_of_all, heads, sample, budget.drop if budget else None)
        text = f" ({code(sample.title)})" if sample.title else ""
        crosses = f" Crosses: the heads removed to keep {budget.kept}." if budget else ""
        blocks += [
            Figure("heads.png", "attention of every head on one example", draw),
            f"Every head of the dense model on one example{text}: queries downwards, keys to the right, darker for larger weights (square "
            f"root); the frame is the head's role.{crosses}",
        ]
    repeated = f"; induction: over {heads.repeated} repeated sequences of random tokens" if heads.repeated else ""
    blocks += [
        _role_table(metrics, heads),
        f"Means over {heads.tokens:,} {heads.unit} of {heads.examples} examples of the scoring part{repeated}. A role describes where a "
        "head attends, by its attention weights alone, not what it is for (headprune's `docs/heads.md`; all figures: `heads.json`).",
    ]
    if unseen := [layer.unseen for layer in heads.layers if layer.unseen]:
        blocks.append(f"The weights of {len(unseen)} layer{'s' * (len(unseen) != 1)} cannot be seen: {unseen[0]}")
    return Section("What the heads do", (), "Where each head looks, and what the removed heads did", blocks)


def _role_table(metrics: Metrics | None, heads: Heads) -> Table:
    """The roles, those of most heads first."""
    budgets = verdict.largest_first(metrics) if metrics is not None else []
    rows = []
    for role, addresses, example in by_role(heads):
        gone = (sum(h in b.drop.get(name, ()) for name, h in addresses) for b in budgets)
        rows.append((role, str(len(addresses)), *map(str, gone), example))
    return Table(("role", "heads", *(f"removed to keep {b.kept}" for b in budgets), "clearest example"), rows)


def removed(run: Run, metrics: Metrics) -> Section:
    """The heads that went, by layer, and the folders of the models without them."""
    budgets = verdict.largest_first(metrics)
    layers = []
    for layer in run.model.layers:
        gone = [", ".join(f"H{h}" for h in b.drop.get(layer.name, ())) for b in budgets]
        if any(gone):
            layers.append((f"L{layer.index} ({code(layer.name)})", *(heads or "–" for heads in gone)))
    folders = []
    for b in budgets:
        by = ", ".join(dict.fromkeys(filter(None, [b.method, b.strategy]))) or code(metrics.planning.plan)
        size, loads = amounts.size(b.size, 3) if b.size else "", code(b.loads) if b.loads else ""
        folders.append((str(b.kept), by, code(f"{b.checkpoint}/"), size, loads))
    emptied = "These layers lost all their heads, but keep one head (or group) with zero output for the cache: "
    ghosts = [[f"{emptied}{', '.join(map(code, b.proof.ghosts))}."] * bool(b.proof.ghosts) for b in budgets]
    notes = [(b.kept, [*empty, *b.notes]) for b, empty in zip(budgets, ghosts, strict=True)]
    blocks: list[Block] = [
        Table(("layer", *(f"removed to keep {b.kept}" for b in budgets)), layers),
        Table(("heads kept", "chosen by", "saved in", "size in all", "loads with"), folders),
        *notes_by_size(notes),
    ]  # fmt: skip
    return Section("Heads removed", (), "The heads that went, by layer, and the saved folders", blocks)
