"""Where the time of a model goes: the parts of a forward pass (shares.py), and text that is written (decoding.py)."""

from headprune.timing.decoding import GenerationRow, generation
from headprune.timing.parts import PARTS
from headprune.timing.shares import Breakdown, Cost, breakdown

__all__ = ["PARTS", "Breakdown", "Cost", "GenerationRow", "breakdown", "generation"]
