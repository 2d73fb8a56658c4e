"""Save pruned or dense models to folders that headprune and transformers can load, and prove each load.

A folder holds the weights (``model.safetensors``, sharded if they are large), the model's config, a processor, and

- ``headprune.json``: the class, how the model's modules differ from that class (`headprune.pruned`), the removed heads;
- ``README.md``: the model card (`card`);
- ``headprune.safetensors``: the probe, a made-up input and the model's answers to it (`probe`);
- for pruned transformers models that their stock class cannot represent (`stock`) ``modeling_headprune.py``, the code that transformers
  runs for ``from_pretrained(folder, trust_remote_code=True)`` where headprune is not installed (`remote_code`).

`saving` writes all of them, and `loading` loads a folder.
"""

from headprune.checkpoint.card import add_figures, code, files_to_upload, metadata, upload
from headprune.checkpoint.loading import about, check_attention, damaged, is_checkpoint, load
from headprune.checkpoint.probe import difference, prove_same_answers
from headprune.checkpoint.remote_code import SIDECAR, LoadCall, NotStockError, load_call
from headprune.checkpoint.saving import check_tied, install_save_methods, save, unite_tied
from headprune.checkpoint.stock import StockCounts, pattern, to_stock

__all__ = [
    "SIDECAR", "LoadCall", "NotStockError", "StockCounts", "about", "add_figures", "check_attention", "check_tied", "code", "damaged", "difference",
    "files_to_upload", "install_save_methods", "is_checkpoint", "load", "load_call", "metadata", "pattern", "prove_same_answers",
    "save", "to_stock", "unite_tied", "upload",
]  # fmt: skip
