"""What a report concludes from heads.json: which roles there are, and which of them the removed heads had."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headprune.amounts import in_line
from headprune.app.documents import BudgetResult, Heads
from headprune.seeing import HeadProfile


@dataclass(frozen=True)
class Kind:
    """The heads with one role.

    Attributes:
        heads: How many there are in the dense model.
        removed: How many of them each budget removed.
        clearest: The head that shows the role best, such as ``L3.H7``; because: what shows it there.
    """

    role: str
    heads: int
    removed: tuple[int, ...]
    clearest: str
    because: str


def _every(heads: Heads) -> list[tuple[str, str, int, HeadProfile]]:
    """Layer, label, number and profile of every head that was seen."""
    return [(a.name, f"L{a.index}.H{h}", h, p) for a in heads.layers for h, p in enumerate(a.heads)]


def roles(heads: Heads, budgets: Sequence[BudgetResult]) -> list[Kind]:
    """The roles, those of most heads first."""
    every, found = _every(heads), []
    for role, count in Counter(p.role for *_, p in every).most_common():
        mine = [one for one in every if one[3].role == role]
        removed = tuple(sum(h in b.drop.get(layer, ()) for layer, _, h, _ in mine) for b in budgets)
        _, label, _, best = max(mine, key=lambda one: one[3].clarity)
        found.append(Kind(role, count, removed, label, best.because))
    return found


def told_removed(heads: Heads, budgets: Sequence[BudgetResult]) -> list[tuple[BudgetResult, int, str]]:
    """For each budget, how many heads went that were seen, and how many of each role they and the kept ones had, in words."""
    every, found = _every(heads), []
    for b in budgets:
        gone = Counter(p.role for layer, _, h, p in every if h in b.drop.get(layer, ()))
        all_ = Counter(p.role for *_, p in every)
        told = ", ".join(f"{count} of the {all_[role]} {role}" for role, count in gone.most_common())
        if gone:
            found.append((b, gone.total(), told))
    return found


def plain(text: str) -> str:
    r"""Text from data, with what markdown would read escaped.

    >>> plain("a *b* <i> [x](y)|z")
    'a \\*b\\* \\<i\\> \\[x\\](y)\\|z'
    """
    return re.sub(r"([\\`*_\[\]<>|$~#&])", r"\\\1", in_line(text))


def prose(text: str) -> str:
    r"""A note of ours that may hold a name from the data: what it has in backticks is code, and nothing else in it is markup.

    >>> prose("cut at `a<b`, says <i> and [x](y)")
    'cut at `a<b`, says \\<i> and \\[x](y)'
    """
    parts = in_line(text).split("`")
    if not len(parts) % 2:
        return plain(text)
    escaped = [
        re.sub(r"([\\<\[*|]|&(?=[\w#])|(?<!\w)_|_(?!\w))", r"\\\1", part)
        if not i % 2
        else f"`{part}`"
        if part
        else r"\`\`"
        for i, part in enumerate(parts)
    ]
    return "".join(escaped)


def fence(texts: Sequence[str]) -> str:
    """What a block of code begins and ends with: longer than any run of backticks in it."""
    return "`" * max(3, 1 + max((len(run) for text in texts for run in re.findall("`+", text)), default=0))
