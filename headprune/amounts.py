"""Formats amounts and texts for people: amounts without powers of ten, texts without a terminal's control codes."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TIMES = ((86400.0, "day"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_OPERATIONS = ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


# Control codes of terminals, lone surrogates, line separators, and marks that change the direction of text.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """A text with � for every code that a terminal or a browser would obey; line ends stay.

    >>> visible("a\\nb \\x1b[31m")
    'a\\nb \ufffd[31m'
    """
    return _UNPRINTABLE.sub("\ufffd", text)


def in_line(text: str) -> str:
    """As `visible`, with all of the text in one line.

    >>> in_line("a\\nb \\x1b[31m")
    'a b \ufffd[31m'
    """
    return visible("".join(" " if c.isspace() else c for c in text))


def digits(number: float, count: int) -> str:
    """A number rounded to ``count`` digits; a large number keeps its zeros.

    >>> digits(0.12345, 3), digits(999.7, 3), digits(50257, 4), digits(float("inf"), 4)
    ('0.123', '1,000', '50,260', 'inf')
    """
    rounded = float(f"{number:.{count}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (count - 1) else f"{rounded:.{count}g}"


def head_count(count: int) -> str:
    """How many heads.

    >>> head_count(1), head_count(36)
    ('1 head', '36 heads')
    """
    return f"{count} head{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time in its largest unit, to two digits.

    >>> duration(0.4), duration(42), duration(200), duration(9000), duration(900000)
    ('1 s', '42 s', '3.3 min', '2.5 h', '10 days')
    """
    length, unit = next((pair for pair in _TIMES if seconds >= 1.5 * pair[0]), _TIMES[-1])
    number = f"{max(seconds, 1.0):.0f}" if unit == "s" else digits(seconds / length, 2)
    return f"{number} {unit}{'s' if unit == 'day' else ''}"


def flops(count: float, to: int = 2) -> str:
    """Floating-point operations, to ``to`` digits.

    >>> flops(2.1e12), flops(5e9), flops(3e18), flops(5e8), flops(9.99e8), flops(5.021e14, 3)
    ('2.1 TFLOPs', '5 GFLOPs', '3 EFLOPs', '500 MFLOPs', '1 GFLOPs', '502 TFLOPs')
    """
    return _in_units(count, _OPERATIONS, to)


def size(count: float, to: int = 2) -> str:
    """Bytes, to ``to`` digits.

    >>> size(6.4e8), size(9.99e10), size(8.1e11), size(512, 3), size(912_808, 3), size(1.23e12, 3), size(0)
    ('640 MB', '100 GB', '810 GB', '512 bytes', '913 kB', '1.23 TB', '0 bytes')
    """
    return _in_units(count, _BYTES, to)


def _in_units(count: float, units: Sequence[tuple[float, str]], to: int) -> str:
    """A count in the largest unit that the rounded number reaches."""
    rounded = float(f"{count:.{to}g}")
    unit, name = next((pair for pair in units if rounded >= pair[0]), units[-1])
    return f"{digits(rounded / unit, to)} {name}"


def code(text: object) -> str:
    """A text, marked as code: a name, a path, a call, or anything from the data.

    >>> code("a b"), code("a`b")
    ('`a b`', '``a`b``')
    """
    plain = str(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    pad = " " if plain[:1] in ("`", "") or plain.endswith("`") else ""
    return f"{fence}{pad}{plain}{pad}{fence}"
