"""The dense model as a fixed reference: measured once on calibration examples, before anything is removed or repaired.

`calibrate` pins the dense weights and the examples, `measure` runs the model and gives a `DenseReference`: second moments at
every output projection, weighted by how much each token matters, what heads could read instead, and the answers. Repair,
search and measuring are given that value, so that nothing depends on when it is called.
"""

from headprune.reference.dense import Calibration, DenseReference, calibrate, measure
from headprune.reference.dense_weights import DenseWeights
from headprune.reference.projections import OutputProjection

__all__ = [
    "Calibration",
    "DenseReference",
    "DenseWeights",
    "OutputProjection",
    "calibrate",
    "measure",
]
