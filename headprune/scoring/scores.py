"""`HeadScores`, the value that scoring gives and planning takes, and its file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.files import read_json, write_json
from headprune.scoring.checked import check_scores, check_together, numbers_of
from headprune.uncertainty import FEW

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED = 4  # heads that a caution names
_RELIABLE, _LEAST = (
    0.8,
    0.1,
)  # rank correlation that is asked for; below the second it is too uncertain to say how many examples do


@dataclass(frozen=True)
class HeadScores:
    """The importance of every maskable head; higher is more important.

    Attributes:
        method: Such as ``"gradient"``.
        unit: What a score of 1 means.
        values: ``{layer_name: [num_heads]}``, float64.
        stderr: The standard error of each value over examples (`standard_error`); NaN where the method has none.
        examples: How many examples were used.
        layers: The layers that were scored.
        model: Fingerprint of the model's weights.
        details: More results of the method, such as the mean loss, why there is no standard error, or (``carried_by``) how
            many examples every head's score rests on.
        matrix: For methods that weigh pairs: ``[heads, heads]``, in the order of `flat`.
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
        """Whether the scores estimate an added loss, so that below 0 a head is harmful."""
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
        labels = self.labels()
        few = [label for label, count in zip(labels, carried, strict=True) if 0 < count < FEW]
        none = [label for label, count in zip(labels, carried, strict=True) if count == 0]
        said = []
        if few:
            said.append(
                f"the scores of {_named(few)} rest on fewer than {FEW:.0f} examples, so their ± may be too small"
            )
        if none:
            said.append(
                f"no example shows any effect of {_named(none)}: up to {min(1.0, 3 / self.examples):.1%} of all examples still may"
            )
        return "; ".join(said)

    @property
    def stability(self) -> str:
        """How alike as many other examples would order the heads, and how many would be enough; "" if it is not known."""
        found = self.details.get("reliability")
        if found is None:
            return ""
        told = f"as many other examples would order the heads with a Spearman correlation of about {found:.2f} with this order"
        if found >= _RELIABLE:
            return told
        needed = self.examples * _RELIABLE / (1 - _RELIABLE) * (1 - found) / max(found, _LEAST)
        about = "about" if found >= _LEAST else "more than"
        cancel = self.signed and bool((self.flat() < 0).any())
        instead = "; signs cancel here: gradient, or ablation with --distil, needs fewer" if cancel else ""
        return f"{told} (for {_RELIABLE:g}, score on {about} {float(f'{needed:.1g}'):,.0f}{instead})"

    def top(self, count: int = 10) -> list[tuple[str, float, float]]:
        """The most important heads, from the top down: (label such as ``"L3.H7"``, score, standard error)."""
        flat, error, labels = self.flat(), self.flat_stderr(), self.labels()
        return [(labels[i], float(flat[i]), float(error[i])) for i in flat.argsort(descending=True).tolist()[:count]]

    def __repr__(self) -> str:
        best = ", ".join(f"{label} {value:.3g}" for label, value, _ in self.top(3))
        return f"HeadScores({self.method}: {len(self.labels())} heads in {len(self.layers)} layers, {self.basis}; highest: {best})"

    def _repr_html_(self) -> str:
        """Layers by heads, as a notebook shows it: the deeper the colour, the more important."""
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

    def plot(self) -> Figure:
        """A heat map, layers by heads; the figure's ``savefig`` writes it."""
        from matplotlib.figure import Figure

        grid = torch.full((len(self.layers), max(layer.num_heads for layer in self.layers)), torch.nan)
        for row, layer in zip(grid, self.layers, strict=True):
            row[: layer.num_heads] = self.values[layer.name]
        figure = Figure(layout="constrained")
        axis, most = figure.subplots(), float(grid.nan_to_num().abs().max())
        signed = self.signed and bool((self.flat() < 0).any())
        image = axis.imshow(grid, cmap="RdBu" if signed else "Blues", vmin=-most if signed else None, vmax=most)
        axis.set(title=self.method, xlabel="head", ylabel="layer")
        axis.set_yticks(range(len(self.layers)), [f"L{layer.index}" for layer in self.layers])
        figure.colorbar(image, label=self.unit)
        return figure

    def labels(self) -> list[str]:
        """Every head's short address, in the same order."""
        return [layer.label(h) for layer in self.layers for h in range(layer.num_heads)]

    def to_json(self) -> dict[str, Any]:
        def numbers(tensors: Mapping[str, Tensor]) -> dict[str, list[float | None]]:
            return {k: [None if v != v else v for v in t.tolist()] for k, t in tensors.items()}

        found = {
            "method": self.method,
            "unit": self.unit,
            "examples": self.examples,
            "model": self.model,
            "values": numbers(self.values),
            "stderr": numbers(self.stderr),
            "details": self.details,
        }
        if self.matrix is not None:
            found["matrix"] = [[float(f"{x:.7g}") for x in row] for row in self.matrix.tolist()]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any], layers: Sequence[AttentionLayer]) -> HeadScores:
        check_scores(data, layers)
        values, stderr = ({k: numbers_of(v) for k, v in data[what].items()} for what in ("values", "stderr"))
        matrix = torch.stack([*map(numbers_of, data["matrix"])]) if "matrix" in data else None
        return cls(
            data["method"], data["unit"], values, stderr, data["examples"], tuple(layers), data["model"],
            dict(data["details"]), matrix,
        )  # fmt: skip

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
    return named if len(labels) <= _NAMED else f"{named} and {len(labels) - _NAMED} heads more"


def save_scores(path: str | Path, scores: Sequence[HeadScores]) -> None:
    """Write scores of one model by several methods to one file."""
    document = {
        "layers": [layer.to_json() for layer in scores[0].layers],
        "scores": [s.to_json() for s in scores],
    }
    write_json(Path(path), "scores", document)


def load_scores(path: str | Path) -> list[HeadScores]:
    """Read every method's scores from a file.

    Raises:
        HeadPruneError: The file is missing, corrupt, or does not hold scores.
    """
    data = read_json(Path(path), "scores")
    try:
        layers = [AttentionLayer.from_json(d) for d in data["layers"]]
        scores = [HeadScores.from_json(d, layers) for d in data["scores"]]
        check_together(layers, [s.method for s in scores])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise HeadPruneError(f"{path} is a damaged scores file ({what}).", "Score the model again.") from None
    if not scores:
        raise HeadPruneError(f"{path} holds no scores.", "Score the model again.")
    return scores
