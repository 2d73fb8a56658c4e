"""Weights that a config says are one tensor, such as the input and output embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headprune.errors import HeadPruneError
from headprune.pruned import structure_of


def unite_tied(model: nn.Module) -> None:
    """Make two equal tensors one where the config has one: transformers 5.0 leaves them two where a checkpoint stores both."""
    for name, other, one, two in _apart(model):
        if not (one.is_meta or two.is_meta) and torch.equal(one, two):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, two)
            _known(model)[name] = other


def check_tied(model: nn.Module, source: str = "The model") -> None:
    """Refuse a model in which there are two tensors where its config has one: whatever is built from the config has one of them only.

    transformers loads such a checkpoint as it is stored, with a warning; a folder that is saved of it would not be the model that was measured.

    Args:
        source: Where the model is from, for the message.

    Raises:
        HeadPruneError: Two tensors that are one by the config.
    """
    for name, other, one, two in _apart(model):
        if name not in _known(model) or not (
            one.is_meta or two.is_meta
        ):  # what is kept elsewhere has no tensors to compare
            raise HeadPruneError(
                f"{source} has weights of its own for {name}, but by its config (tie_word_embeddings) these are those of {other}.",
                "If both are meant, set tie_word_embeddings to false in config.json (in Python model.config.tie_word_embeddings = "
                f"False); if not, take {name} out of the checkpoint.",
            )


def _apart(model: nn.Module) -> Iterator[tuple[str, str, Any, Any]]:
    """Names and tensors that are one by the config, and two in the model.

    Tensors that were pruned do not count: a saved folder says itself which of them are one (`headprune.pruned.structure_of`). Layers that were
    tied may have lost different heads.
    """
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    if expanded is None:
        return
    own: dict[str, Any] = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    modules = structure_of(model).get("modules", {})
    pruned = {f"{name}.{tensor}" for name, entry in modules.items() for tensor in entry.get("tensors", ())}
    for name, other in expanded(all_submodels=True).items():
        one, two = own.get(name), own.get(other)
        if one is not None and two is not None and one is not two and name not in pruned:
            yield name, other, one, two


def _known(model: nn.Module) -> dict[str, str]:
    """What transformers itself tied, by name."""
    found: dict[str, str] | None = getattr(model, "all_tied_weights_keys", None)
    return {} if found is None else found
