"""Where the weights go of a model that is larger than a device: from what was typed to what is loaded by."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from headprune.errors import HeadPruneError, first_line
from headprune.inputs import model_device

NAMED = ("auto", "balanced", "balanced_low_0", "sequential")


def placed(model: nn.Module) -> str:
    """Where a model is, for people."""
    places: dict[Any, int] = {}
    sizes = {f"{name}.": p.numel() * p.element_size() for name, p in model.named_parameters()}
    for name, place in getattr(model, "hf_device_map", {}).items():  # a module's name, or a parameter's
        inside = f"{name}." if name else ""
        places[place] = places.get(place, 0) + sum(size for own, size in sizes.items() if own.startswith(inside))
    if len(places) < 2 and "disk" not in places:
        return str(model_device(model))
    named = {place: f"cuda:{place}" if isinstance(place, int) else str(place) for place in places}
    return ", ".join(f"{named[place]} ({size / 2**20:,.0f} MiB)" for place, size in places.items())


def placing_of(device_map: str | None, memory: str | None) -> dict[str, Any] | None:
    """The arguments of ``from_pretrained`` for what was typed; None where no device map was.

    Args:
        device_map: One of `NAMED`, or a JSON file with the device of every module.
        memory: The most to put on each device, such as ``"0=20GB,cpu=60GB"``.

    Raises:
        HeadPruneError: A map or an amount that is none; something for a map where there is none.
    """
    if device_map is None:
        if memory is not None:
            raise HeadPruneError("--device-memory has no use without --device-map.", "Add --device-map auto.")
        return None
    found = device_map if device_map in NAMED else _read(device_map)
    most = None if memory is None else _memory(memory)
    return {"device_map": found, "max_memory": most}


def _read(file: str) -> dict[str, Any]:
    """A device map from a file."""
    if not Path(file).is_file():
        raise HeadPruneError(
            f"There is no device map {file!r}.",
            f"Use {', '.join(NAMED)}, or a JSON file with the device of every module.",
        )
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(type(place) in (int, str) for place in found.values()):
            raise ValueError("it is no object with a device for every module")
    except (OSError, ValueError, RecursionError) as error:
        raise HeadPruneError(
            f"{file} is no device map ({first_line(error)}).",
            'Write it as {"model.embed_tokens": 0, "model.layers": "cpu", …}.',
        ) from error
    return found


def _memory(text: str) -> dict[int | str, int | str]:
    """The most for each device."""
    found: dict[int | str, int | str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+|cpu|mps)\s*=\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b\s*", part, re.IGNORECASE)
        if match is None:
            raise HeadPruneError(
                f"--device-memory {text!r} is no amount for each device.", "Write it as 0=20GB,1=20GB,cpu=60GB."
            )
        device, size, unit = match.groups()
        found[int(device) if device.isdigit() else device.lower()] = int(
            float(size) * 1024 ** " kmgt".index(unit.lower() or " ")
        )
    return found
