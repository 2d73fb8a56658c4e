"""Processes that share out the work of one computation (ranks): the same program on the same examples in each.

Every rank does all of the program but for loops over independent items: of these each rank does its share, and all ranks get
all results, in the order of the items. So all ranks know the same at every line, and what a run gives does not depend on
how many there are. A process that was not told of others (`joined`, `launched`) is alone, even if the program around it has
a process group.

    from headprune.ranks import current
    losses = current().share("losses", [partial(loss, batch) for batch in batches])

Ranks talk by torch.distributed, over gloo, in messages that carry a number and a name. So ranks that are not at the same place
find that out instead of waiting for ever; an error in one of them is raised in all; and one that is gone ends the others.
"""

from headprune.ranks.base import ALONE, Ranks, current, shares, using
from headprune.ranks.errors import LostRankError, lost_ranks
from headprune.ranks.joining import joined, launched

__all__ = ["ALONE", "LostRankError", "Ranks", "current", "joined", "launched", "lost_ranks", "shares", "using"]
