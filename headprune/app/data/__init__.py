"""From a dataset's id or path to three disjoint parts of encoded examples: score, choose, report; and a part to train on.

The examples that score heads never choose between plans, and neither are ever reported. Training may use
the scored examples, and no others of the three.

`reading` reads the data; `classes` are a model's, and labels as their numbers; `encoder` makes features of rows, by the functions of
`encodings`, one for each task; `part` holds encoded examples; `parts` cuts the data and puts it together.
"""

from headprune.app.data.part import DataParts, Part
from headprune.app.data.parts import load_also, load_parts, load_train
from headprune.app.options import DataOptions

__all__ = ["DataOptions", "DataParts", "Part", "load_also", "load_parts", "load_train"]
