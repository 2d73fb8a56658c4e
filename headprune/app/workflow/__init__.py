"""What `headprune score` and `headprune prune` do, step by step.

The result of each step is stored at once, so that an interrupted run can continue; the run folder changes at the end, as a whole.
"""
