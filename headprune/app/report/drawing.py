"""A metric against heads kept, as two of the report's figures show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headprune.app.pictures import new_figure
from headprune.app.report.numbers import mean_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# Colours that stay apart for colour-blind readers (Okabe and Ito); grey is always the random control.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#7f7f7f"


def curves(draw: Callable[[Any], None], random: Mapping[int, Sequence[float]], metric: str, part: str) -> Drawing:
    """Lines of chosen heads beside random ones, whose draws have their mean as a line and their range as a band.

    Args:
        draw: Adds the chosen heads' lines to the axes.
        random: The draws' values by heads kept; of all heads, the dense model's value.
        part: Of the data that was measured on.
    """
    figure, (axis,) = new_figure(7.2, 4.0)
    draw(axis)
    kept = sorted(random)
    means, low, high = ([f(random[k]) for k in kept] for f in (lambda values: mean_of(values, metric), min, max))
    draws = max(map(len, random.values()))
    axis.plot(kept, means, "--", color=_GREY, label=f"random heads: mean and range of {draws} draws")
    axis.fill_between(kept, low, high, color=_GREY, alpha=0.2, lw=0)
    axis.axhline(means[-1], color="black", lw=0.8, ls=":", label="dense model")
    axis.set(xlabel=f"heads kept, of {kept[-1]}", ylabel=f"{metric}, on the {part} examples")
    axis.set_yscale("log" if metric == "perplexity" else "linear")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)
    return figure
