"""Folders of models, pruned or not: written so that headprune and transformers load them, and proved when they are loaded.

A folder holds the weights (``model.safetensors``, sharded where they are large), the model's config, a processor, and

- ``headprune.json``: the class, how the model's modules differ from that class (`headprune.pruned`), which heads went;
- ``README.md``: the model card (`card`);
- ``headprune.safetensors``: a probe, inputs and the answers to them (`headprune.probe`);
- for pruned transformers models that their stock class cannot state (`headprune.stock`) ``modeling_headprune.py``, the code that
  transformers runs for ``from_pretrained(folder, trust_remote_code=True)`` where headprune is not installed (`remote_code`).

`writing` makes all of them, `reading` loads a folder, `loading` says how it loads, `files` has checksums of its files, `folders` replaces a
folder as a whole, `hub` uploads one, `ties` handles tensors that are one by the config.
"""

from headprune.checkpoint.card import add_figures, code, metadata
from headprune.checkpoint.folders import recovered, replaced
from headprune.checkpoint.hub import upload, uploaded
from headprune.checkpoint.loading import SIDECAR, Loading, loading_of
from headprune.checkpoint.reading import about, check_attention, damaged, is_checkpoint, load
from headprune.checkpoint.shards import Placing
from headprune.checkpoint.ties import check_tied, unite_tied
from headprune.checkpoint.writing import push_to_hub, save, save_pretrained

__all__ = [
    "SIDECAR",
    "Loading",
    "Placing",
    "about",
    "add_figures",
    "check_attention",
    "check_tied",
    "code",
    "damaged",
    "is_checkpoint",
    "load",
    "loading_of",
    "metadata",
    "push_to_hub",
    "recovered",
    "replaced",
    "save",
    "save_pretrained",
    "unite_tied",
    "upload",
    "uploaded",
]
