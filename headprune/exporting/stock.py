"""Folders that a stock class of transformers loads without any option."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.checkpoint import NotStockError, load_call, prove_same_answers, save, to_stock
from headprune.errors import HeadPruneError
from headprune.exporting.formats import Exported, exporter
from headprune.pruned import structure_of


@exporter("stock", "-stock", folder=True)
def stock(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
    """A folder that from_pretrained loads without any option (as many heads in every layer, where the class can have them)."""
    try:
        same: Any = to_stock(model) if structure_of(model) else model
    except NotStockError as error:
        raise HeadPruneError(
            error.args[0],
            "Load the folder as it is, with trust_remote_code=True; or prune by --strategy uniform, which keeps to what a stock class can have.",
        ) from error
    if dtype != "float32":
        same = copy.deepcopy(same)
        for parameter in same.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    save(same, path, processor=processor, overwrite=True, about={"exported": name})
    try:
        loaded = type(same).from_pretrained(path, attn_implementation=same.config._attn_implementation).eval()
    except Exception as error:
        raise HeadPruneError(f"transformers does not load it: {error}.", "Please report this.") from error
    difference = prove_same_answers(model, loaded)
    loads = load_call(path).code()
    size = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    facts = {"bytes": size, "dtype": dtype, "difference": difference, "loads": loads}
    summary = f"{size / 1e6:,.0f} MB, {dtype}; loads with {loads}: answers within {difference:.1g} of the largest"
    return Exported(path, "stock", True, summary, facts)
