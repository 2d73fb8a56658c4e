"""headprune: which attention heads matter, and what happens when the others go.

>>> import headprune as hp
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headprune.api import prune as prune
    from headprune.api import repair as repair
    from headprune.attention import AttentionLayer as AttentionLayer
    from headprune.checkpoint import load as load
    from headprune.checkpoint import save as save
    from headprune.errors import HeadPruneError as HeadPruneError
    from headprune.errors import PruneError as PruneError
    from headprune.evaluation import Change as Change
    from headprune.evaluation import Measurement as Measurement
    from headprune.evaluation import compare as compare
    from headprune.evaluation import evaluate as evaluate
    from headprune.exporting import Exported as Exported
    from headprune.exporting import export as export
    from headprune.latency import LatencyRow as LatencyRow
    from headprune.latency import Speedup as Speedup
    from headprune.latency import Timing as Timing
    from headprune.latency import benchmark as benchmark
    from headprune.planning import plan as plan
    from headprune.plans import PruningPlan as PruningPlan
    from headprune.pruned import stand_in as stand_in
    from headprune.repairing import Repair as Repair
    from headprune.repairing import Trial as Trial
    from headprune.scoring import HeadScores as HeadScores
    from headprune.scoring import score as score
    from headprune.scoring.scores import agreement as agreement
    from headprune.searching import search as search
    from headprune.seeing import HeadProfile as HeadProfile
    from headprune.seeing import attention_weights as attention_weights
    from headprune.seeing import profile_heads as profile_heads
    from headprune.surgery import Proof as Proof
    from headprune.surgery import mask as mask
    from headprune.timing import Breakdown as Breakdown
    from headprune.timing import breakdown as breakdown
    from headprune.trace import find_attention as find_attention

# Loaded on first use, so that `headprune --help` does not wait for torch.
_HOME = {
    "AttentionLayer": "attention",
    "load": "checkpoint",
    "save": "checkpoint",
    "HeadPruneError": "errors",
    "PruneError": "errors",
    "Change": "evaluation",
    "Measurement": "evaluation",
    "compare": "evaluation",
    "evaluate": "evaluation",
    "Exported": "exporting",
    "export": "exporting",
    "LatencyRow": "latency",
    "Speedup": "latency",
    "Timing": "latency",
    "benchmark": "latency",
    "stand_in": "pruned",
    "PruningPlan": "plans",
    "plan": "planning",
    "Repair": "repairing",
    "Trial": "repairing",
    "repair": "api",
    "HeadScores": "scoring",
    "agreement": "scoring",
    "score": "scoring",
    "search": "searching",
    "HeadProfile": "seeing",
    "attention_weights": "seeing",
    "profile_heads": "seeing",
    "Proof": "surgery",
    "mask": "surgery",
    "prune": "api",
    "Breakdown": "timing",
    "breakdown": "timing",
    "find_attention": "trace",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headprune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headprune.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
