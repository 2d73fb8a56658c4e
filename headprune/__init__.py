"""headprune: find out which attention heads of a transformer matter, and prune the others.

>>> import headprune as hp
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # isort: off
    from headprune.api import prune as prune, repair as repair, search as search
    from headprune.attention import AttentionLayer as AttentionLayer
    from headprune.checkpoint import load as load, save as save
    from headprune.errors import HeadPruneError as HeadPruneError, PruneError as PruneError
    from headprune.evaluation import Change as Change, Measurement as Measurement
    from headprune.evaluation import compare as compare, evaluate as evaluate
    from headprune.exporting import Exported as Exported, export as export
    from headprune.generation import Generation as Generation
    from headprune.latency import LatencyRow as LatencyRow, Speedup as Speedup, Timing as Timing, benchmark as benchmark
    from headprune.metrics import Answers as Answers, Metric as Metric
    from headprune.planning import plan as plan
    from headprune.plans import PruningPlan as PruningPlan
    from headprune.pruned import stand_in as stand_in
    from headprune.repairing import Repair as Repair, Trial as Trial
    from headprune.scoring import HeadScores as HeadScores, agreement as agreement, score as score
    from headprune.seeing import HeadProfile as HeadProfile
    from headprune.seeing import attention_weights as attention_weights, profile_heads as profile_heads
    from headprune.surgery import Proof as Proof, mask as mask
    from headprune.timing import Breakdown as Breakdown, breakdown as breakdown
    from headprune.trace import find_attention as find_attention

# Loaded on first use, so that `headprune --help` does not wait for torch.
_ROOMS = {
    "attention": "AttentionLayer",
    "checkpoint": "load save",
    "errors": "HeadPruneError PruneError",
    "evaluation": "Change Measurement compare evaluate",
    "exporting": "Exported export",
    "generation": "Generation",
    "latency": "LatencyRow Speedup Timing benchmark",
    "metrics": "Answers Metric",
    "pruned": "stand_in",
    "plans": "PruningPlan",
    "planning": "plan",
    "repairing": "Repair Trial",
    "scoring": "HeadScores agreement score",
    "seeing": "HeadProfile attention_weights profile_heads",
    "surgery": "Proof mask",
    "api": "prune repair search",
    "timing": "Breakdown breakdown",
    "trace": "find_attention",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headprune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headprune.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
