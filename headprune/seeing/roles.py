"""What a head does, in words: rules, each of which says whose it is, in the order in which they are tried.

The thresholds are the papers' where they give one; docs/heads.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headprune.seeing.figures import HeadProfile

HALF = 0.5  # of the attention: Clark et al. (2019), section 3
POINTS = 0.9  # of the queries: Voita et al. (2019), section 5.1
COPIES = 0.4  # of the attention on repeated random tokens
EVEN = 0.9  # of the largest possible entropy; Clark's 10 % of the attention at most depends on a text's length
NEAR = 0.5  # of the distance of even attention
MIXED = "mixed"
UNKNOWN = "unknown"

Said = Callable[[HeadProfile], "tuple[float, str] | None"]
"""From a head's figures to the one that justifies a role (0 to 1), and the same in words; None if it has not got this role."""


@dataclass(frozen=True)
class Rule:
    """A role, and when a head has it.

    Attributes:
        role: In words.
        short: In five letters at most.
        about: The rule, for people.
        source: Whose it is.
        said: See `Said`.
    """

    role: str
    short: str
    about: str
    source: str
    said: Said


def _at_least(figure: str, least: float, words: str) -> Said:
    def said(profile: HeadProfile) -> tuple[float, str] | None:
        share: float | None = getattr(profile, figure)
        return (share, words.format(percent(share))) if share is not None and share >= least else None

    return said


def _adjacent(figure: str, step: int, which: str) -> Said:
    def said(profile: HeadProfile) -> tuple[float, str] | None:
        share: float | None = getattr(profile, figure)
        pointing = profile.pointing or 0.0
        if share is not None and share >= HALF:
            return share, f"{percent(share)} goes to the {which} token"
        if profile.position == step and pointing >= POINTS:
            return pointing, f"its largest weight is on the {which} token for {percent(pointing)} of queries"
        return None

    return said


def _elsewhere(profile: HeadProfile) -> tuple[float, str] | None:
    step, share = profile.position, profile.pointing or 0.0
    if step is None or share < POINTS:
        return None
    where = f"{abs(step)} tokens {'on' if step > 0 else 'back'}" if step else "on the position itself"
    return share, f"its largest weight is {where} for {percent(share)} of queries"


def _rare(profile: HeadProfile) -> tuple[float, str] | None:
    share, chance = profile.rare, profile.rare_chance
    if share is None or chance is None or share < HALF or share < 2 * chance:
        return None
    words = f"its largest weight is on one of the two rarest tokens for {percent(share)} of queries, by chance {percent(chance)}"
    return share, words


def _broad(profile: HeadProfile) -> tuple[float, str] | None:
    even = profile.evenness or 0.0
    return (even, f"its entropy is {percent(even)} of the largest possible") if even >= EVEN else None


def _near(profile: HeadProfile) -> tuple[float, str] | None:
    if profile.reach is None or profile.distance is None or profile.reach > NEAR:
        return None
    words = f"it looks {profile.distance:.1f} positions away on average, {percent(profile.reach)} of what even attention would"
    return 1 - profile.reach, words


_OLSSON = "Olsson et al. (2022), arXiv:2209.11895; the threshold is ours"
_WANG = "Wang et al. (2022), arXiv:2211.00593, on Olsson's sequences; the threshold is ours"
_CLARK = "Clark et al. (2019), arXiv:1906.04341, section 3"
_VOITA = "Voita et al. (2019), arXiv:1905.09418, section 5"

RULES = (
    Rule(
        "induction", "ind", f"on repeated random tokens, at least {COPIES:.0%} to the token after the earlier occurrence", _OLSSON,
        _at_least("induction", COPIES, "on repeated random tokens, {} goes to what followed the token before"),
    ),
    Rule(
        "duplicate token", "dup", f"on repeated random tokens, at least {COPIES:.0%} to the earlier occurrence", _WANG,
        _at_least("duplicate", COPIES, "on repeated random tokens, {} goes to the token's earlier occurrence"),
    ),
    Rule(
        "previous token", "prev", f"at least {HALF:.0%} to the previous token, or the largest weight there for {POINTS:.0%} of queries",
        f"{_CLARK}; {_VOITA}", _adjacent("previous", -1, "previous"),
    ),
    Rule(
        "next token", "next", f"at least {HALF:.0%} to the next token, or the largest weight there for {POINTS:.0%} of queries",
        f"{_CLARK}; {_VOITA}", _adjacent("next", 1, "next"),
    ),
    Rule("itself", "self", f"at least {HALF:.0%} to the query's own position", "ours", _at_least("itself", HALF, "{} goes to the position itself")),
    Rule(
        "relative position", "pos", f"the largest weight at one and the same relative position for {POINTS:.0%} of queries", _VOITA,
        _elsewhere,
    ),
    Rule(
        "same token", "same", f"at least {HALF:.0%} to other positions with the same token", "ours",
        _at_least("same", HALF, "{} goes to other positions with the same token, where there are any"),
    ),
    Rule(
        "sink", "sink", f"at least {HALF:.0%} to keys that are no tokens", "Xiao et al. (2023), arXiv:2309.17453; the threshold is ours",
        _at_least("sink", HALF, "{} goes to a key that is no token"),
    ),
    Rule("separator", "sep", f"at least {HALF:.0%} to separators", _CLARK, _at_least("separator", HALF, "{} goes to separators")),
    Rule(
        "first token", "first", f"at least {HALF:.0%} to the first token, a sink in decoders",
        "Clark et al. (2019), section 3; Xiao et al. (2023), arXiv:2309.17453", _at_least("first", HALF, "{} goes to the first token"),
    ),
    Rule(
        "rare words", "rare", f"the largest weight on one of the two rarest tokens for {HALF:.0%} of queries, and twice as often as by chance",
        f"{_VOITA}.3", _rare,
    ),
    Rule(
        "broad", "broad", f"at least {EVEN:.0%} of the largest possible entropy",
        "after Clark et al. (2019), section 3.3; the threshold is ours", _broad,
    ),
    Rule("near", "near", f"a mean distance of at most {NEAR:.0%} of even attention's", "after Dosovitskiy et al. (2020), arXiv:2010.11929, figure 7; the threshold is ours", _near),
)  # fmt: skip

_SHARES = {
    "previous": "the previous token", "next": "the next token", "itself": "the position itself", "first": "the first token",
    "separator": "separators", "sink": "a sink",
}  # fmt: skip


def with_role(profile: HeadProfile) -> HeadProfile:
    """A head's profile with its role and the figure that justifies it."""
    if not profile.queries:
        return replace(profile, role=UNKNOWN, because="no query in the data sees two keys")
    for rule in RULES:
        if said := rule.said(profile):
            return replace(profile, role=rule.role, clarity=said[0], because=said[1])
    shares = [(share, words) for figure, words in _SHARES.items() if (share := getattr(profile, figure)) is not None]
    most = sorted(shares, reverse=True)[:2]
    if not most:
        return replace(profile, role=MIXED, because=f"its largest weight is {percent(profile.largest)} on average")
    told = " and ".join(f"{percent(share)} to {words}" for share, words in most)
    return replace(profile, role=MIXED, clarity=most[0][0], because=f"no rule holds: {told}, the rest elsewhere")


def percent(share: float) -> str:
    """A share for a sentence; with a decimal, so that what misses a threshold does not look as if it had met it.

    >>> percent(0.714), percent(0.496), percent(1.0)
    ('71.4 %', '49.6 %', '100 %')
    """
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")
