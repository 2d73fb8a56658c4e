"""The control that every comparison needs: a method that knows nothing."""

from __future__ import annotations

import torch

from headprune.scoring.base import Estimate, Problem, method


@method("random", unit="none (a uniform draw)", loss=False)
def random(problem: Problem) -> Estimate:
    """Uniform draws from the seed. A method is worth its time only where it beats this.

    Budhraja et al. (2020, ACL Anthology 2020.emnlp-main.260) found random pruning often nearly as good after fine-tuning.
    """
    generator = torch.Generator().manual_seed(problem.seed)
    values = torch.rand(problem.heads, generator=generator, dtype=torch.float64)
    problem.progress(1, 1)
    return Estimate.without_error(values, "a draw estimates nothing")
