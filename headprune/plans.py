"""`PruningPlan`: the heads to remove. Planning makes it, surgery applies it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from headprune import documents
from headprune.attention import AttentionLayer, Heads, check_heads, check_possible
from headprune.documents import Count
from headprune.errors import HeadPruneError
from headprune.files import read_json, write_json
from headprune.fingerprint import fingerprint, has_identity, identity
from headprune.pruned import add_record

Keep = int | float | str

_EDITED = "was changed after headprune had written it."  # the end of a note: by a person, or by a fault of the disk


@dataclass(frozen=True)
class PruningPlan:
    """The heads to remove.

    Its file may be edited: only ``drop`` is needed; the other fields are made again when the plan is applied to a model
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
    kept: Count = 0
    total: Count = 0
    asked: Count = 0
    method: str = ""
    model: str = ""
    notes: tuple[str, ...] = ()
    strategy: str = ""
    budget: str = ""

    def check_model(self, model: nn.Module, repaired_for: Heads | None = None) -> None:
        """Refuse a model whose weights are not those that were scored.

        Args:
            repaired_for: This plan's heads by the layers' names, if the model may also be the scored model after
                `headprune.repair` for just these heads.

        Raises:
            HeadPruneError: It is another model, or repaired for other heads.
        """
        if not self.model or self.model == identity(model):
            return
        note: RepairNote | None = model.__dict__.get(_REPAIRED)
        if note is None or self.model not in note.dense or note.now != fingerprint(model):
            if has_identity(model, self.model):  # as older documents say it
                return
            message = f"This plan is for another model (fingerprint {self.model}, this one is {identity(model)})."
            raise HeadPruneError(message, "Score this model, or prune with a plain dict of heads.")
        if repaired_for is None:
            message = "This plan is for the model as it was before it was repaired."
            raise HeadPruneError(message, "Repair a copy of the dense model.")
        if repaired_for != note.drop:
            message = "The model was repaired for other heads than this plan's, so its weights do not suit it."
            hint = "Prune by the plan that it was repaired for, or repair a copy of the dense model for this one."
            raise HeadPruneError(message, hint)

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
        # Edited by hand: the plan's other fields describe other heads.
        edited = tuple(note for note in self.notes if note.endswith(_EDITED))
        return PruningPlan(drop, kept, total, kept, model=self.model, notes=edited)

    def to_json(self) -> dict[str, Any]:
        return documents.to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PruningPlan:
        """The plan that plain values describe; further keys are left out, since people write notes of their own there.

        Raises:
            ValueError: What is wrong, and its place.
        """
        known = {field.name for field in fields(cls)}
        plan = documents.from_json(cls, {key: value for key, value in data.items() if key in known})
        for name, heads in plan.drop.items():  # before a model is loaded
            if wrong := [head for head in heads if head < 0 or heads.count(head) > 1]:
                what = f": head {wrong[0]} is listed twice" if wrong[0] >= 0 else f" has no head {wrong[0]}"
                raise ValueError(f"Layer {name}{what}")
        return plan

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
        except ValueError as error:
            message = f"{path} is a damaged plan ({error})."
            raise HeadPruneError(message, "Heads are whole numbers, such as [0, 3]; or plan again.") from None
        return replace(plan, notes=(*plan.notes, *remarks))


@dataclass(frozen=True)
class RepairNote:
    """A note on a repaired model, so that the plan that it was repaired for still applies to it.

    Attributes:
        dense: Fingerprints of the model before, any of which a plan may name.
        now: Fingerprint after the repair; if the model has another one, this note no longer counts.
        drop: The heads whose removal it was repaired for.
    """

    dense: tuple[str, ...]
    now: str
    drop: Heads


_REPAIRED = "_headprune_repaired"


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
    text = str(keep).strip()
    percent = text.endswith("%")
    try:
        number = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        number = math.nan
    share = percent or ("." in text and number <= 1)  # "1" is a count
    if math.isnan(number) or not (share or number.is_integer()):
        message = f"keep {keep} is not a number of heads."
        raise HeadPruneError(message, "Give a count (36), a percentage (50%) or a share (0.5).")
    if number <= 0:
        raise HeadPruneError(f"keep {keep} leaves no head.", "Keep at least 1.")
    return number if share else int(number)


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
        message = f"keep {keep} is more than all {total} heads."
        raise HeadPruneError(message, f"Keep fewer, for instance {max(total // 2, 1)}.")
    return count
