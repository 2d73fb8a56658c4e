"""Folders that a stock class of transformers loads without any option."""

from __future__ import annotations

import copy
from typing import Any

import torch

from headprune.checkpoint import loading_of, save
from headprune.errors import HeadPruneError
from headprune.exporting.base import Exported, Request, exporter
from headprune.pruned import structure_of
from headprune.stock import CannotStateError, padded, prove, stock_instance


@exporter("stock", "-stock", folder=True)
def stock(request: Request, *, pad: bool = False) -> Exported:
    """A folder that from_pretrained loads without any option (as many heads in every layer, or padded to that)."""
    model: Any = request.model
    made, facts, notes = model, dict[str, Any](), list[str]()
    if structure_of(model):
        try:
            made = stock_instance(model)
        except CannotStateError as error:
            if not pad:
                raise HeadPruneError(
                    error.args[0],
                    "--pad (pad=True) fills it up with heads of zeros, which saves nothing; or load the folder as it is, with "
                    "trust_remote_code=True.",
                ) from error
            made, facts = padded(model)
            notes.append(
                f"Padding saves nothing: {facts['kept']} heads are kept, and {facts['stored']} are stored and computed, "
                f"{facts['stored'] - facts['kept']} of them zeros (the dense model has {facts['dense']})."
            )
    dtype = getattr(torch, request.dtype)
    if dtype != torch.float32:
        made = copy.deepcopy(made)
        for parameter in made.parameters():
            parameter.data = parameter.data.to(dtype)
    save(made, request.path, processor=request.processor, overwrite=True, about={"exported": request.name, **facts})
    try:
        loaded = type(made).from_pretrained(request.path, attn_implementation=model.config._attn_implementation).eval()
        off = prove(model, loaded, padded=bool(facts))
    except CannotStateError:
        raise
    except Exception as error:
        raise HeadPruneError(f"transformers does not load it: {error}.", "Please report this.") from error
    loading = loading_of(request.path)
    size = sum(file.stat().st_size for file in request.path.glob("model*.safetensors"))
    facts |= {"bytes": size, "dtype": request.dtype, "difference": off, "loads": loading.call()}
    summary = (
        f"{size / 1e6:,.0f} MB, {request.dtype}; loads with {loading.call()}: answers within {off:.1g} of the largest"
    )
    return Exported(request.path, "stock", True, summary, facts, tuple(notes))
