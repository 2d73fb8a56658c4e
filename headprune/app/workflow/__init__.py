"""What `headprune score` and `headprune prune` do, step by step.

The result of each step is stored at once, so that an interrupted run can continue; the run folder changes at the end, as a whole.
"""

from headprune.app.options import Options
from headprune.app.workflow.cost import cost_of_pruning, cost_of_scores
from headprune.app.workflow.pruning import open_to_prune, plan_run, prune_run, score_run
from headprune.app.workflow.scene import Console, Scene, open_scene
from headprune.app.workflow.search import PruneConfig

__all__ = [
    "Console", "Options", "PruneConfig", "Scene", "cost_of_pruning", "cost_of_scores", "open_scene", "open_to_prune",
    "plan_run", "prune_run", "score_run",
]  # fmt: skip
