"""Structure of a pruned model: how its modules differ from their classes, as data, and the code that applies it.

`structure_of` reads the differences off a pruned model; `restructure` gives them to a freshly built dense one, whose
weights are loaded afterwards. The differences are: shapes of tensors, integers by which modules count heads, replaced
modules (`modules`), and hooks that take the kept heads' part of what is still computed for all heads (`hooks`).

The files of this package are copied into every folder that headprune saves (`modeling_headprune.py`), so that
transformers can load it without headprune. So they import nothing of headprune but each other, and no two define the
same name.
"""

from headprune.pruned.hooks import HeadArgument, SharedPositionBias, from_ranges, to_ranges
from headprune.pruned.modules import EmptyAttention, MultiheadAttention, convert, is_ours, stand_in
from headprune.pruned.structure import (
    add_biases,
    add_record,
    ghosts,
    home,
    record_of,
    restructure,
    structure_of,
    unwrapped,
)

__all__ = [
    "EmptyAttention", "HeadArgument", "MultiheadAttention", "SharedPositionBias", "add_biases", "add_record", "convert",
    "from_ranges", "ghosts", "home", "is_ours", "record_of", "restructure", "stand_in", "structure_of", "to_ranges", "unwrapped",
]  # fmt: skip
