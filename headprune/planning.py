"""From scores and a budget to the heads that go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from headprune.attention import AttentionLayer, Heads, check_heads
from headprune.errors import HeadPruneError
from headprune.fingerprint import fingerprint
from headprune.jsonio import read_json, write_json
from headprune.scoring.base import HeadScores

Budget = int | float | str


@dataclass(frozen=True)
class PruningPlan:
    """Which heads go.

    Attributes:
        drop: ``{layer_name: [head, ...]}``; layers that lose nothing are left out.
        kept: Heads that stay, over all layers of the model that were scored.
        total: Heads there are.
        asked: The budget in heads; ``kept`` is at most this.
        method: The scores it was made from.
        model: Fingerprint of the model it is for ("" applies to any).
        notes: What a reader should know, such as rounding to whole groups.
    """

    drop: Heads
    kept: int
    total: int
    asked: int
    method: str = ""
    model: str = ""
    notes: tuple[str, ...] = field(default=())

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model whose weights are not those that were scored."""
        if self.model and self.model != (now := fingerprint(model)):
            raise HeadPruneError(
                f"This plan is for another model (fingerprint {self.model}, this one is {now}).",
                "Score this model, or prune with a plain dict of heads.",
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "drop": self.drop, "kept": self.kept, "total": self.total, "asked": self.asked,
            "method": self.method, "model": self.model, "notes": list(self.notes),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PruningPlan:
        drop = {k: [int(h) for h in v] for k, v in data["drop"].items()}
        return cls(
            drop, data["kept"], data["total"], data["asked"], data["method"], data["model"], tuple(data["notes"])
        )

    def save(self, path: str | Path) -> None:
        """Write to a JSON file."""
        write_json(Path(path), "plan", self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> PruningPlan:
        """Read a plan.

        Raises:
            HeadPruneError: The file is missing, corrupt, or does not hold a plan.
        """
        data = read_json(Path(path), "plan")
        try:
            return cls.from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise HeadPruneError(f"{path} is a damaged plan ({what}).", "Plan again.") from None


def heads_to_keep(keep: Budget, total: int) -> int:
    """A budget in heads: a count, a share below 1, or a percentage.

    >>> heads_to_keep(36, 72), heads_to_keep("50%", 72), heads_to_keep(0.5, 72), heads_to_keep("36", 72)
    (36, 36, 36, 36)

    Raises:
        HeadPruneError: Not a number, 0 or less, or more than there are.
    """
    wrong = HeadPruneError(
        f"--keep {keep} is not a number of heads.", "Give a count (36), a percentage (50%) or a share (0.5)."
    )
    try:
        if isinstance(keep, str):
            text = keep.strip()
            if text.endswith("%"):
                count = _share(float(text[:-1]) / 100, total)
            elif "." in text:
                return heads_to_keep(float(text), total)
            else:
                count = int(text)
        elif isinstance(keep, float):
            if keep > 1:
                if not keep.is_integer():
                    raise wrong
                count = int(keep)
            else:
                count = _share(keep, total)
        else:
            count = int(keep)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if count < 1:
        raise HeadPruneError(f"--keep {keep} leaves no head.", f"Keep at least 1 of the {total}.")
    if count > total:
        raise HeadPruneError(f"--keep {keep} is more than the model's {total} heads.", f"Keep at most {total}.")
    return count


def _share(share: float, total: int) -> int:
    """Heads in a share: rounded down, so that the budget holds; above 1 it stays above ``total``."""
    return total + 1 if share > 1 else int(share * total + 1e-9)


def plan(scores: HeadScores, keep: Budget) -> PruningPlan:
    """Keep the most important heads of the whole model, at most ``keep`` of them.

    What can go alone is a head, or a key/value group (whose importance is the mean of its heads'). Units
    are dropped in the order of their importance until the budget holds. Ties go by position, so equal
    scores give equal plans; a smaller budget's heads are always among a larger one's.

    Args:
        scores: From `headprune.score`.
        keep: A count (36), a share (0.5) or a percentage ("50%").

    Raises:
        HeadPruneError: A budget below what cannot be pruned, below 1 or above the total.
    """
    if not scores.flat().isfinite().all():
        raise HeadPruneError("Some scores are not finite, so heads cannot be ranked.", "Score the model again.")
    total = sum(layer.num_heads for layer in scores.layers)
    asked = heads_to_keep(keep, total)
    fixed = sum(layer.num_heads for layer in scores.layers if not layer.prunable)
    if asked < fixed:
        raise HeadPruneError(
            f"{fixed} heads cannot be pruned ({_first_reason(scores.layers)}), so {asked} is out of reach.",
            f"Keep at least {fixed}.",
        )
    units = sorted(_units(scores))
    drop: dict[str, list[int]] = {}
    kept = total
    for _, index, unit in units:
        if kept <= asked:
            break
        drop.setdefault(scores.layers[index].name, []).extend(unit)
        kept -= len(unit)
    ordered = {a.name: sorted(drop[a.name]) for a in scores.layers if a.name in drop}
    notes = []
    if kept < asked:
        size = max(len(unit) for *_, unit in units)
        notes.append(
            f"{kept} of {total} heads are kept, not {asked}: heads that share a key/value head go together, "
            f"{size} at a time."
        )
    if fixed:
        notes.append(f"{fixed} heads stay because they cannot be pruned: {_first_reason(scores.layers)}.")
    check_heads(ordered, scores.layers)
    return PruningPlan(ordered, kept, total, asked, scores.method, scores.model, tuple(notes))


def _units(scores: HeadScores) -> list[tuple[float, int, tuple[int, ...]]]:
    return [
        (float(scores.values[layer.name][list(unit)].mean()), i, unit)
        for i, layer in enumerate(scores.layers)
        if layer.prunable
        for unit in layer.units
    ]


def _first_reason(layers: Sequence[AttentionLayer]) -> str:
    return next((f"{a.name}: {a.reason}" for a in layers if not a.prunable), "")
