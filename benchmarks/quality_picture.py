"""Draws README's picture of accuracy against heads kept, from the table of minilm-rt in docs/benchmarks.md (made by quality.py)."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent.parent / "docs"
TOTAL = 72
METHODS = {
    "headprune auto": ("headprune (auto, repaired)", "#0072B2", "D-"),
    "Kwon, Fisher + swap + rescaling": ("Kwon et al. 2022, with rescaling (one draw)", "#009E73", "s-"),
    "Kwon, Fisher + swap": ("Kwon et al. 2022, Fisher and swap", "#56B4E9", "s-"),
    "Michel, layer L2": ("Michel et al. 2019, per-layer L2", "#E69F00", "o-"),
    "Michel": ("Michel et al. 2019", "#D55E00", "o-"),
    "run_bertology": ("run_bertology's formula", "#CC79A7", "^-"),
    "random": ("random heads", "#7f7f7f", "--"),
}


def read(text: str) -> tuple[float, list[int], dict[str, list[list[float]]]]:
    """The dense accuracy, the numbers of heads kept, and each method's means and standard deviations (0 for one draw)."""
    told, table = text.split(f"\nAccuracy by heads kept of {TOTAL}; ")[1].split("\n\n")[:2]
    dense = float(re.findall(r"dense (\d\.\d+)", told)[0])
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    cells = {row[0]: [[*map(float, cell.split(" ± ")), 0.0][:2] for cell in row[1:-1]] for row in rows}
    return dense, [int(count) for count in head[1:-1]], cells


def main() -> None:
    dense, kept, cells = read((DOCS / "benchmarks.md").read_text(encoding="utf-8"))
    figure = Figure(figsize=(7.2, 4.0), layout="constrained", dpi=130)
    axis = figure.subplots()
    for name, (label, colour, style) in METHODS.items():
        means, spreads = zip(*cells[name], strict=True)
        axis.errorbar(kept, means, spreads, fmt=style, color=colour, markersize=4, capsize=2, label=label)
    axis.axhline(dense, color="black", lw=0.8, ls=":", label="dense model")
    axis.set_xticks(kept)
    axis.set_xlabel(f"heads kept, of {TOTAL} (no training)")
    axis.set_ylabel("accuracy, 1,530 reported examples")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, frameon=False)
    figure.savefig(DOCS / "quality.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
