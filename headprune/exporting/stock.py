"""Folders that a stock class of transformers loads without any option."""

from __future__ import annotations

import copy
from typing import Any

import torch

from headprune.checkpoint import NotStockError, load_call, prove_same_answers, save, to_stock
from headprune.errors import HeadPruneError
from headprune.exporting.base import Exported, Request, exporter
from headprune.pruned import structure_of


@exporter("stock", "-stock", folder=True)
def stock(request: Request) -> Exported:
    """A folder that from_pretrained loads without any option (as many heads in every layer)."""
    model: Any = request.model
    plain = model
    if structure_of(model):
        try:
            plain = to_stock(model)
        except NotStockError as error:
            raise HeadPruneError(
                error.args[0],
                "Prune by --strategy uniform, which keeps to what the class can have, or load the folder as it is, with "
                "trust_remote_code=True.",
            ) from error
    dtype = getattr(torch, request.dtype)
    if dtype != torch.float32:
        plain = copy.deepcopy(plain)
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(dtype)
    save(plain, request.path, processor=request.processor, overwrite=True, about={"exported": request.name})
    try:
        loaded = type(plain).from_pretrained(request.path, attn_implementation=model.config._attn_implementation).eval()
        off = prove_same_answers(model, loaded)
    except NotStockError:
        raise
    except Exception as error:
        raise HeadPruneError(f"transformers does not load it: {error}.", "Please report this.") from error
    call = load_call(request.path).code()
    size = sum(file.stat().st_size for file in request.path.glob("model*.safetensors"))
    facts = {"bytes": size, "dtype": request.dtype, "difference": off, "loads": call}
    summary = f"{size / 1e6:,.0f} MB, {request.dtype}; loads with {call}: answers within {off:.1g} of the largest"
    return Exported(request.path, "stock", True, summary, facts)
