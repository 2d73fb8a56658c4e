"""From a dataset's id or path to three disjoint parts of encoded examples: score, choose, report; and a part to train on.

The examples that score heads never choose between plans, and neither are ever reported. Training may use
the scored examples, and no others of the three.

`reading` reads the data; `encoder` makes features of rows, and labels a model's classes, by the functions of `encodings`, one for each
task; `parts` cuts the data and puts it together.
"""

from headprune.app.data.parts import DataParts, Part, load_also, load_parts, load_train
from headprune.app.options import DataOptions

__all__ = ["DataOptions", "DataParts", "Part", "load_also", "load_parts", "load_train"]
