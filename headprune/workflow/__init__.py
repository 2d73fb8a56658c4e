"""The way through the house: what `headprune score` and `headprune prune` do, step by step.

Everything is computed first and written at the end, so an interrupted run leaves no half-written folder.
"""

from headprune.workflow.pruning import Pruned, plan_run, prune_run
from headprune.workflow.scene import Console, Options, Scene, open_scene
from headprune.workflow.scoring import score_run
from headprune.workflow.targets import Goal

__all__ = [
    "Console", "Goal", "Options", "Pruned", "Scene", "open_scene", "plan_run", "prune_run", "score_run",
]  # fmt: skip
