"""From a dataset's id or path to three disjoint parts of encoded examples: score, choose, report; and a part to train on.

The examples that score heads never choose between plans, and neither are ever reported. Training may use
the scored examples, and no others of the three.

`options` says where the data is; `reading` reads it, and `broken` finds the line that cannot be read; `cutting` says which
rows serve which part; `encoders` has one class a task, which makes rows features and features batches; `part` holds encoded examples; `parts` puts it together.
"""

from headprune.app.data.part import DataParts, Part
from headprune.app.data.parts import load_also, load_parts, load_train
from headprune.app.options import DataOptions

__all__ = ["DataOptions", "DataParts", "Part", "load_also", "load_parts", "load_train"]
