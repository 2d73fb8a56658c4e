"""Loads a dataset as three disjoint parts of encoded examples (score, choose, report), and a part to train on.

Heads are scored on the first part, plans are chosen on the second, and results are reported on the third.
Training may use the scored examples, but none of the other two parts.

`reading` reads the data. `encoder` turns rows into features and labels into the model's classes, by the functions
of `encodings`, one for each task. `parts` cuts the data into parts and encodes them.
"""

from headprune.app.data.parts import DataParts, Part, load_also, load_parts, load_train
from headprune.app.options import DataOptions

__all__ = ["DataOptions", "DataParts", "Part", "load_also", "load_parts", "load_train"]
