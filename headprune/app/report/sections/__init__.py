"""The report's sections, one file a topic: functions from the run's documents to a `Section`, or to None where there is nothing to say."""

from __future__ import annotations

from headprune.app.report.content import Documents, Section
from headprune.app.report.sections.heads import agreement, importance, removed, roles
from headprune.app.report.sections.measured import all_metrics, engines, generation, latency, other_data, time
from headprune.app.report.sections.opening import opening
from headprune.app.report.sections.plans import choice, trade_off
from headprune.app.report.sections.trust import reproduce, trust

FIRST = (opening, trust)
"""Of every run, as functions of all its documents. The first screen is for readers who know nothing yet."""
PRUNED = (other_data, all_metrics, choice, trade_off, latency, time, generation, engines, removed)
"""Of runs that pruned, as functions of run.json and metrics.json."""
LAST = (importance, agreement, roles, reproduce)


def sections_of(documents: Documents) -> list[Section]:
    """All that a report says, in its order."""
    run, metrics = documents.run, documents.metrics
    pruned = [make(run, metrics) for make in PRUNED] if metrics is not None else []
    sections = [*(make(documents) for make in FIRST), *pruned, *(make(documents) for make in LAST)]
    return [section for section in sections if section is not None]
