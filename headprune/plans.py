"""`PruningPlan`: the heads to remove. Planning makes it, surgery applies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from headprune.attention import AttentionLayer, Heads, check_heads, check_possible
from headprune.errors import HeadPruneError
from headprune.files import read_json, write_json
from headprune.fingerprint import fingerprint, has_identity, identity
from headprune.pruned import add_record

Keep = int | float | str

_EDITED = "was changed after headprune had written it."  # the end of a note: by a person, or by a fault of the disk


@dataclass(frozen=True)
class PruningPlan:
    """The heads to remove.

    Its file may be edited: only ``drop`` is needed, and the other fields are made again when the plan is applied to a model
    (`on`).

    Attributes:
        drop: ``{layer_name: [head, ...]}``; layers that lose no head are left out. A layer may have its short address,
            ``L3``.
        kept: Heads that stay, over all layers of the model that were scored.
        total: Heads of the model.
        asked: The budget in heads; ``kept`` is at most this.
        method: The scores it was made from.
        model: Fingerprint of the model it is for ("" applies to any).
        notes: What a reader should know, such as rounding to whole groups.
        strategy: How heads were picked by their scores.
        budget: What was asked for, such as ``"keep 36"`` or ``"latency 80%"``.
    """

    drop: Heads
    kept: int = 0
    total: int = 0
    asked: int = 0
    method: str = ""
    model: str = ""
    notes: tuple[str, ...] = ()
    strategy: str = ""
    budget: str = ""

    def check_model(self, model: nn.Module, repaired_for: Heads | None = None) -> None:
        """Refuse a model whose weights are not those that were scored.

        Args:
            repaired_for: This plan's heads by the layers' names, where the model may also be what `headprune.repair` made, for
                just these heads, of the model that was scored.

        Raises:
            HeadPruneError: It is another model, or repaired for other heads.
        """
        if not self.model or has_identity(model, self.model):
            return
        note: RepairNote | None = model.__dict__.get(_REPAIRED)
        if note is None or self.model not in note.dense or note.now != fingerprint(model):
            raise HeadPruneError(
                f"This plan is for another model (fingerprint {self.model}, this one is {identity(model)}).",
                "Score this model, or prune with a plain dict of heads.",
            )
        if repaired_for is None:
            raise HeadPruneError(
                "This plan is for the model as it was before it was repaired.", "Repair a copy of the dense model."
            )
        if repaired_for != note.drop:
            raise HeadPruneError(
                "The model was repaired for other heads than this plan's, so its weights do not suit it.",
                "Prune by the plan that it was repaired for, or repair a copy of the dense model for this one.",
            )

    def on(self, layers: Sequence[AttentionLayer]) -> PruningPlan:
        """This plan for the layers of a model: heads counted again, layers by their full names and in their order.

        Raises:
            HeadPruneError: A layer or head that does not exist, or heads that can only be removed together with others.
        """
        drop = check_heads(self.drop, layers)
        for layer in layers:
            if layer.name in drop:
                check_possible(layer, drop[layer.name])
        total = sum(layer.num_heads for layer in layers)
        kept = total - sum(map(len, drop.values()))
        if (kept, total) == (self.kept, self.total):
            return replace(self, drop=drop)
        # Edited by hand: what the plan says about its making is about other heads.
        edited = tuple(note for note in self.notes if note.endswith(_EDITED))
        return PruningPlan(drop, kept, total, kept, model=self.model, notes=edited)

    def to_json(self) -> dict[str, Any]:
        return {
            "drop": self.drop, "kept": self.kept, "total": self.total, "asked": self.asked, "budget": self.budget,
            "strategy": self.strategy, "method": self.method, "model": self.model, "notes": list(self.notes),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PruningPlan:
        for name, heads in data["drop"].items():
            if not isinstance(heads, list) or not all(type(h) is int for h in heads):
                raise HeadPruneError(
                    f"Layer {name}: {heads!r:.60} is no list of heads.", "Heads are whole numbers, such as [0, 3]."
                )
            if heads and min(heads) < 0:
                raise HeadPruneError(f"Layer {name} has no head {min(heads)}.", "Heads are counted from 0.")
            if len(set(heads)) < len(heads):
                raise HeadPruneError(f"Layer {name}: head {_twice(heads)} is listed twice.", "Name every head once.")
        kept, total, asked = (data.get(name, 0) for name in ("kept", "total", "asked"))
        for number in (kept, total, asked):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r:.60} is no number of heads")
        texts = [data.get(name, "") for name in ("method", "model", "strategy", "budget")]
        notes = data.get("notes", [])
        for text in (*texts, *notes):
            if not isinstance(text, str) or not isinstance(notes, list | tuple):
                raise TypeError(f"{text!r:.60} is no text")
        drop = {name: list(heads) for name, heads in data["drop"].items()}
        method, model, strategy, budget = texts
        return cls(drop, kept, total, asked, method, model, tuple(notes), strategy, budget)

    def save(self, path: str | Path) -> None:
        """Write to a JSON file, a line per layer."""
        write_json(Path(path), "plan", self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> PruningPlan:
        """Read a plan; one edited by hand needs only ``drop``, and has a note that says so.

        Raises:
            HeadPruneError: The file is missing, corrupt, or does not hold a plan.
        """
        remarks: list[str] = []
        data = read_json(Path(path), "plan", lambda: remarks.append(f"{Path(path).name} {_EDITED}"))
        try:
            plan = cls.from_json(data)
            return replace(plan, notes=(*plan.notes, *remarks))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}"
            raise HeadPruneError(f"{path} is a damaged plan ({what}).", "Plan again.") from None


@dataclass(frozen=True)
class RepairNote:
    """What is noted on a repaired model, so that the plan that it was repaired for still applies to it.

    Attributes:
        dense: Fingerprints of the model before, any of which a plan may name.
        now: Fingerprint after the repair; if the model has another one, this note no longer counts.
        drop: The heads whose removal it was repaired for.
    """

    dense: tuple[str, ...]
    now: str
    drop: Heads


_REPAIRED = "_headprune_repaired"


def _twice(heads: Sequence[int]) -> int:
    """The first head that a list has more than once."""
    return next(h for i, h in enumerate(heads) if h in heads[:i])


def note_repaired(model: nn.Module, dense: tuple[str, ...], drop: Heads) -> None:
    """Note on a model that it was repaired for the removal of ``drop``.

    Args:
        dense: Fingerprints of the model before, any of which a plan may name.
    """
    model.__dict__[_REPAIRED] = RepairNote(dense, fingerprint(model), drop)
    add_record(model, {"repaired": True})


def keep_of(keep: Keep) -> int | float:
    """A budget as a count of heads (int) or a share of them (float).

    >>> keep_of(36), keep_of("36"), keep_of("50%"), keep_of("0.5"), keep_of(36.0)
    (36, 36, 0.5, 0.5, 36)

    Raises:
        HeadPruneError: Not a number, or 0 or less.
    """
    wrong = HeadPruneError(
        f"keep {keep} is not a number of heads.", "Give a count (36), a percentage (50%) or a share (0.5)."
    )
    number: int | float
    try:
        if isinstance(keep, str) and keep.strip().endswith("%"):
            number = float(keep.strip()[:-1]) / 100
        elif isinstance(keep, str):
            number = _whole(float(keep)) if "." in keep else int(keep)
        else:
            number = _whole(keep) if isinstance(keep, float) else int(keep)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if number != number:
        raise wrong
    if number <= 0:
        raise HeadPruneError(f"keep {keep} leaves no head.", "Keep at least 1.")
    return number


def _whole(number: float) -> int | float:
    """A number above 1 as a count; up to 1 it is a share."""
    if number <= 1:
        return number
    if not number.is_integer():
        raise ValueError
    return int(number)


def heads_to_keep(keep: Keep, total: int) -> int:
    """A budget in heads: a count, a share below 1, or a percentage.

    >>> heads_to_keep(36, 72), heads_to_keep("50%", 72), heads_to_keep(0.5, 72), heads_to_keep("36", 72)
    (36, 36, 36, 36)

    Raises:
        HeadPruneError: Not a number, 0 or less, or more than there are.
    """
    number = keep_of(keep)
    # A share is rounded down, so that the budget holds.
    count = number if isinstance(number, int) else total + 1 if number > 1 else int(number * total + 1e-9)
    if count < 1:
        raise HeadPruneError(f"keep {keep} leaves no head.", f"Keep at least 1 of the {total}.")
    if count > total:
        raise HeadPruneError(
            f"keep {keep} is more than all {total} heads.", f"Keep fewer, for instance {max(total // 2, 1)}."
        )
    return count
