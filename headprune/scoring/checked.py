"""What a file says of scores, looked at before it is believed: somebody else may have written or edited it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headprune.attention import AttentionLayer


def check_scores(data: Mapping[str, Any], layers: Sequence[AttentionLayer]) -> None:
    """Refuse one method's scores that cannot be scores of these layers.

    Raises:
        ValueError, TypeError, KeyError: What is wrong; there are too few or too many numbers, or something else than numbers.
    """
    heads = sum(layer.num_heads for layer in layers)
    for layer in layers:
        values, errors = (numbers_of(data[what][layer.name]) for what in ("values", "stderr"))
        if not len(values) == len(errors) == layer.num_heads:
            raise ValueError(f"layer {layer.name} has {layer.num_heads} heads, but not as many scores")
        if (errors < 0).any():
            raise ValueError(f"layer {layer.name} has a standard error below 0")
    for name in ("method", "unit", "model"):
        if not isinstance(data[name], str):
            raise TypeError(f"{name} is {data[name]!r:.60}, which is no text")
    if type(data["examples"]) is not int or data["examples"] < 0:
        raise ValueError(f"examples is {data['examples']!r:.60}, which is no number of examples")
    carried = data["details"].get("carried_by")
    if carried is not None and (len(numbers_of(carried)) != heads or None in carried):
        raise ValueError(f"carried_by is not of {heads} heads")
    if "matrix" in data and [len(numbers_of(row)) for row in data["matrix"]] != [heads] * heads:
        raise ValueError(f"the matrix is not of {heads} by {heads} heads")


def check_together(layers: Sequence[AttentionLayer], methods: Sequence[str]) -> None:
    """Refuse a file in which a layer or a method stands twice, or that has scores of no layer.

    Raises:
        ValueError: What stands twice, or is missing.
    """
    for what, found in (
        ("layer", [(layer.name, layer.index) for layer in layers]),
        ("method", [(m, m) for m in methods]),
    ):
        for each in zip(*found, strict=True):  # names, then numbers
            if len(set(each)) < len(each):
                raise ValueError(f"a {what} is there twice")
    if methods and not layers:
        raise ValueError("there are scores, but no layers")


def numbers_of(listed: Any) -> Tensor:
    """A list of a file as float64, with NaN for null.

    Raises:
        TypeError: Something in it is no number.
    """
    if not isinstance(listed, list) or not all(x is None or type(x) in (int, float) for x in listed):
        raise TypeError(f"{listed!r:.60} is no list of numbers")
    return torch.tensor([math.nan if x is None else x for x in listed], dtype=torch.float64)
