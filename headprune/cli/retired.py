"""Options and commands that older versions had: what to type in place of each."""

from __future__ import annotations

RETIRED = {
    "--streaming": "For a model larger than the memory: `headprune prune MODEL -d DATA --plan FILE --device-map auto` (docs/scale.md).",
    "--pad": "A padded model is as large as the dense one. Prune by `headprune prune --strategy uniform`, which keeps to what a stock class can "
    "have, or load the folder by from_pretrained(folder, trust_remote_code=True).",
    "estimate": "`headprune score`, `prune` and `finetune` say before they begin how long they will take; with --dry-run, no more than that.",
}
"""By what was typed: the next thing to type. An option is looked up only where its command has none of that name."""
