"""The steps of a repair, in the order in which they are made: a new one is a file here, and a line in `STEPS`."""

from headprune.repairing.steps import logits, outputs, values

STEPS = (
    outputs.STEP,
    values.STEP,
    logits.STEP,
)
