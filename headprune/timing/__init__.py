"""Where the time of a model goes: the parts of a forward pass (shares.py), text that is written (decoding.py), energy (joules.py)."""

from headprune.timing.decoding import GenerationRow, generation
from headprune.timing.joules import EnergyRow, energy
from headprune.timing.parts import PARTS
from headprune.timing.shares import Breakdown, Cost, breakdown

__all__ = ["PARTS", "Breakdown", "Cost", "EnergyRow", "GenerationRow", "breakdown", "energy", "generation"]
