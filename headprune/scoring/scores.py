"""`HeadScores`, the output of scoring and the input of planning: the class, its file, and the rank agreement of two scores."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.files import read_json, write_json
from headprune.uncertainty import FEW

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED = 4  # heads that a caution names
_RELIABLE = 0.8  # target rank correlation
_LEAST = 0.1  # a lower correlation is too uncertain to say how many examples are enough
CHANCE_DRAWS = 200  # pairs of random orders


@dataclass(frozen=True)
class HeadScores:
    """The importance of every maskable head; higher is more important.

    Attributes:
        method: The method's name, such as ``"gradient"``.
        unit: What a score of 1 means.
        values: ``{layer_name: [num_heads]}``, float64.
        stderr: The standard error of each value over examples (`standard_error`); NaN where the method has none.
        examples: Number of examples used.
        layers: The layers that were scored.
        model: Fingerprint of the model's weights.
        details: More results of the method, such as the mean loss, why there is no standard error, or (``carried_by``) how
            many examples every head's score rests on.
        matrix: For methods that score pairs of heads: ``[heads, heads]``, in the order of `flat`.
    """

    method: str
    unit: str
    values: dict[str, Tensor]
    stderr: dict[str, Tensor]
    examples: int
    layers: tuple[AttentionLayer, ...]
    model: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    matrix: Tensor | None = None

    def flat(self) -> Tensor:
        """All values in the order of ``layers``, ``[heads]``."""
        return torch.cat([self.values[layer.name] for layer in self.layers])

    def flat_stderr(self) -> Tensor:
        """All standard errors in the order of ``layers``, ``[heads]``."""
        return torch.cat([self.stderr[layer.name] for layer in self.layers])

    @property
    def signed(self) -> bool:
        """Whether the scores estimate an added loss, so that a head with a negative score is harmful."""
        return " added" in self.unit

    @property
    def basis(self) -> str:
        """How many examples were used, such as ``"512 examples"``, or ``"no data"``."""
        return f"{self.examples:,} examples" if self.examples else "no data"

    @property
    def caution(self) -> str:
        """Which scores rest on so few examples that their standard errors may be too small; "" if there are none."""
        carried = self.details.get("carried_by")
        if carried is None or self.examples < FEW:
            return ""
        counts = list(zip(self.labels(), carried, strict=True))
        texts = []
        if few := [label for label, count in counts if 0 < count < FEW]:
            texts += [f"the scores of {_named(few)} rest on fewer than {FEW:.0f} examples, so their ± may be too small"]
        if none := [label for label, count in counts if count == 0]:
            most = f"{min(1.0, 3 / self.examples):.1%}"
            texts += [f"no example shows any effect of {_named(none)}: up to {most} of all examples still may"]
        return "; ".join(texts)

    @property
    def stability(self) -> str:
        """The expected rank correlation with scores on as many other examples, and how many would be enough; "" if unknown."""
        r = self.details.get("reliability")
        if r is None:
            return ""
        text = (
            f"as many other examples would order the heads with a Spearman correlation of about {r:.2f} with this order"
        )
        if r >= _RELIABLE:
            return text
        needed = self.examples * _RELIABLE / (1 - _RELIABLE) * (1 - r) / max(r, _LEAST)
        about = "about" if r >= _LEAST else "more than"
        cancel = self.signed and bool((self.flat() < 0).any())
        instead = "; signs cancel here: gradient, or ablation with --distil, needs fewer" if cancel else ""
        return f"{text} (for {_RELIABLE:g}, score on {about} {float(f'{needed:.1g}'):,.0f}{instead})"

    def top(self, count: int = 10) -> list[tuple[str, float, float]]:
        """The most important heads, from the top down: (label such as ``"L3.H7"``, score, standard error)."""
        flat, error, labels = self.flat(), self.flat_stderr(), self.labels()
        return [(labels[i], float(flat[i]), float(error[i])) for i in flat.argsort(descending=True).tolist()[:count]]

    def __repr__(self) -> str:
        best = ", ".join(f"{label} {value:.3g}" for label, value, _ in self.top(3))
        return f"HeadScores({self.method}: {len(self.labels())} heads in {len(self.layers)} layers, {self.basis}; highest: {best})"

    def _repr_html_(self) -> str:
        """The notebook's table, layers by heads: the deeper the colour, the more important the head."""
        most = float(self.flat().nan_to_num().abs().max()) or 1.0
        rows = []
        for layer in self.layers:
            cells = "".join(
                f'<td style="background:rgba({"10,92,173" if value >= 0 else "179,38,30"},{0.7 * abs(value) / most:.2f})">{value:.3g}</td>'
                for value in self.values[layer.name].tolist()
            )
            rows.append(f"<tr><th>L{layer.index}</th>{cells}</tr>")
        title = html.escape(f"{self.method}: {self.unit}; {self.basis}")
        return f"<table><caption>{title}</caption>{''.join(rows)}</table>"

    def plot(self, axis: Any = None, drop: Mapping[str, Sequence[int]] | None = None) -> Figure:
        """A heat map of the scores, layers by heads; the figure's ``savefig`` writes it.

        The colour scale is linear up to the median and logarithmic beyond it, so that one large score does not hide the others.

        Args:
            axis: Of a matplotlib figure, to draw on; by default the only one of a new figure.
            drop: Heads to cross out, by layer.
        """
        from matplotlib.colors import AsinhNorm
        from matplotlib.figure import Figure

        grid = np.full((len(self.layers), max(layer.num_heads for layer in self.layers)), np.nan)
        for row, layer in zip(grid, self.layers, strict=True):
            row[: layer.num_heads] = self.values[layer.name].numpy()
        sizes = np.abs(grid[np.isfinite(grid)])
        most = float(sizes.max(initial=0.0)) or 1.0
        usual = max(float(np.median(sizes)) if len(sizes) else most, most / 1000)
        both = self.signed and np.nanmin(grid, initial=0.0) < 0
        norm = AsinhNorm(linear_width=usual, vmin=-most if both else 0, vmax=most)
        axis = axis or Figure(layout="constrained").subplots()
        image = axis.imshow(grid, cmap="RdBu" if both else "Blues", norm=norm, aspect="auto")
        for i, layer in enumerate(self.layers):
            for h in (drop or {}).get(layer.name, ()):
                axis.plot(h, i, "x", color="white" if norm(abs(grid[i, h])) > 0.75 else "black", markersize=4.5)
        axis.set(title=self.method, xlabel="head", ylabel="layer")
        step = max(1, len(self.layers) // 16)
        axis.set_yticks(range(0, len(self.layers), step), [f"L{layer.index}" for layer in self.layers[::step]])
        ticks = [-most, 0, most] if both else [0, usual, most]
        bar = axis.figure.colorbar(image, ax=axis, shrink=0.9, ticks=ticks, format="{x:.2g}", label=self.unit)
        bar.ax.minorticks_off()
        figure: Figure = axis.figure
        return figure

    def labels(self) -> list[str]:
        """Every head's label, such as ``"L3.H7"``, in the order of `flat`."""
        return [layer.label(h) for layer in self.layers for h in range(layer.num_heads)]

    def to_json(self) -> dict[str, Any]:
        """The scores as JSON values, with null for NaN; without the layers, which all scores in a file share."""

        def numbers(tensors: Mapping[str, Tensor]) -> dict[str, list[float | None]]:
            return {k: [None if v != v else v for v in t.tolist()] for k, t in tensors.items()}

        data = {key: getattr(self, key) for key in ("method", "unit", "examples", "model")}
        data |= {"values": numbers(self.values), "stderr": numbers(self.stderr), "details": self.details}
        if self.matrix is not None:
            data["matrix"] = [[float(f"{x:.7g}") for x in row] for row in self.matrix.tolist()]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], layers: Sequence[AttentionLayer]) -> HeadScores:
        """Read the scores of these layers that `to_json` wrote; checks them, since somebody may have edited the file.

        Raises:
            ValueError, TypeError, KeyError: Missing entries, too few or too many numbers, or values that are no numbers.
        """
        heads = sum(layer.num_heads for layer in layers)
        keys = "values", "stderr"
        values, stderr = ({a.name: _numbers(data[k][a.name], a.num_heads) for a in layers} for k in keys)
        for name, errors in stderr.items():
            if (errors < 0).any():
                raise ValueError(f"layer {name} has a standard error below 0")
        for key in ("method", "unit", "model"):
            if not isinstance(data[key], str):
                raise TypeError(f"{key} is {data[key]!r:.60}, which is no text")
        if type(data["examples"]) is not int or data["examples"] < 0:
            raise ValueError(f"examples is {data['examples']!r:.60}, which is no number of examples")
        details = dict(data["details"])
        if (carried := details.get("carried_by")) is not None and _numbers(carried, heads).isnan().any():
            raise ValueError("carried_by has no number for some heads")
        if (r := details.get("reliability")) is not None and not (type(r) in (int, float) and 0 <= r <= 1):
            raise ValueError(f"reliability is {r!r:.60}, which is no number from 0 to 1")
        matrix = torch.stack([_numbers(row, heads) for row in data["matrix"]]) if "matrix" in data else None
        if matrix is not None and len(matrix) != heads:
            raise ValueError(f"the matrix is not of {heads} by {heads} heads")
        texts = (data["method"], data["unit"])
        return cls(*texts, values, stderr, data["examples"], tuple(layers), data["model"], details, matrix)

    def save(self, path: str | Path) -> None:
        """Write to a JSON file."""
        save_scores(path, [self])

    @staticmethod
    def load(path: str | Path) -> HeadScores:
        """Read the first scores in a JSON file.

        Raises:
            HeadPruneError: The file is missing, corrupt, or does not hold scores.
        """
        return load_scores(path)[0]


def _named(labels: Sequence[str]) -> str:
    """Names of the first few heads, and how many more there are."""
    named = ", ".join(labels[:_NAMED])
    more = len(labels) - _NAMED
    return named if more <= 0 else f"{named} and {more} more head{'s' * (more > 1)}"


def _numbers(listed: Any, count: int) -> Tensor:
    """A JSON list of ``count`` numbers as a float64 tensor, with NaN for null.

    Raises:
        TypeError, ValueError: An entry is no number, or the count differs.
    """
    if not isinstance(listed, list) or not all(x is None or type(x) in (int, float) for x in listed):
        raise TypeError(f"{listed!r:.60} is no list of numbers")
    if len(listed) != count:
        raise ValueError(f"{listed!r:.60} has {len(listed)} numbers, and there are {count} heads")
    return torch.tensor([math.nan if x is None else x for x in listed], dtype=torch.float64)


def save_scores(path: str | Path, scores: Sequence[HeadScores]) -> None:
    """Write scores of one model by several methods to one file."""
    layers = [layer.to_json() for layer in scores[0].layers]
    write_json(Path(path), "scores", {"layers": layers, "scores": [s.to_json() for s in scores]})


def load_scores(path: str | Path) -> list[HeadScores]:
    """Read every method's scores from a file.

    Raises:
        HeadPruneError: The file is missing, corrupt, or does not hold scores.
    """
    data = read_json(Path(path), "scores")
    try:
        layers = [AttentionLayer.from_json(d) for d in data["layers"]]
        scores = [HeadScores.from_json(d, layers) for d in data["scores"]]
        for keys in ([a.name for a in layers], [a.index for a in layers], [s.method for s in scores]):
            if len(set(keys)) < len(keys):
                raise ValueError(f"one of {keys!r:.60} is there twice")
        if scores and not layers:
            raise ValueError("there are scores, but no layers")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise HeadPruneError(f"{path} is a damaged scores file ({what}).", "Score the model again.") from None
    if not scores:
        raise HeadPruneError(f"{path} holds no scores.", "Score the model again.")
    return scores


# -- agreement between methods -----------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Rank agreement between two methods' scores over all heads.

    Attributes:
        spearman: Spearman's rho; NaN where a method scores all heads alike.
        kendall: Kendall's tau-b.
        top_half: Share of the better half of the heads (rounded down) that both methods have in common; 0.5 by chance.
    """

    first: str
    second: str
    spearman: float
    kendall: float
    top_half: float


def agreement(a: HeadScores, b: HeadScores, top: int | None = None) -> Agreement:
    """Rank agreement between two methods on one model.

    Args:
        a, b: Scores of the same heads.
        top: Compare this many of the best heads instead of the better half.

    Raises:
        HeadPruneError: They are of other heads, or there are not so many.
    """
    heads = len(a.labels())
    if a.labels() != b.labels():
        raise HeadPruneError(
            f"Scores of {heads} and of {len(b.labels())} heads, not the same ones, cannot be compared."
        )
    if top is not None and not 1 <= top <= heads:
        raise HeadPruneError(f"top is {top}, and there are {heads} heads.", f"Give 1 to {heads}.")
    return Agreement(a.method, b.method, *_rank_agreement(a.flat().numpy(), b.flat().numpy(), top))


def agreements(scores: Sequence[HeadScores]) -> list[Agreement]:
    """The `agreement` of every pair of methods, without the random control."""
    return [agreement(a, b) for a, b in combinations([s for s in scores if s.method != "random"], 2)]


@cache
def chance(heads: int) -> Agreement:
    """The random control: the 95th percentile of the absolute agreement between independent random orders."""
    rng = np.random.default_rng(0)
    order = np.arange(heads, dtype=np.float64)
    drawn = np.abs([_rank_agreement(order, rng.permutation(order), None) for _ in range(CHANCE_DRAWS)])
    return Agreement("random", "random", *(float(q) for q in np.percentile(drawn, 95, axis=0)))


def _rank_agreement(x: np.ndarray, y: np.ndarray, top: int | None) -> tuple[float, float, float]:
    """Spearman's rho, Kendall's tau, and the share of the best heads that both orders have in common."""
    from scipy.stats import kendalltau, spearmanr

    count = max(1, len(x) // 2) if top is None else top
    common = set(x.argsort(kind="stable")[-count:].tolist()) & set(y.argsort(kind="stable")[-count:].tolist())
    if not np.ptp(x) or not np.ptp(y):
        return float("nan"), float("nan"), len(common) / count
    return float(spearmanr(x, y).statistic), float(kendalltau(x, y).statistic), len(common) / count
