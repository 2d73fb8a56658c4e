"""What other work on the machine did to the times, in words."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.app.documents import MOST_APART, TimeParts
from headprune.app.report.numbers import shape
from headprune.latency import LatencyRow


def disturbed(row: TimeParts, timed: Sequence[LatencyRow]) -> str:
    """That a breakdown is of passes unlike those that were timed in turn, though they are of one model; "" if they are alike."""
    median = row.timed(timed)
    if median is None or row.apart(timed) <= MOST_APART:
        return ""
    return (
        f"At {shape(row)} the machine was busy while the dense model's time was broken down: a pass took {row.total:.2f} ms, and {median:.2f} ms "
        "where models were timed in turn. So the shares of its time are rough; once the machine is idle, headprune bench measures both again."
    )
