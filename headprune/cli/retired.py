"""Options and commands that older versions had: what to type in place of each."""

from __future__ import annotations

RETIRED = {
    "--streaming": "For a model larger than the memory: `headprune prune MODEL -d DATA --plan FILE --device-map auto` (docs/scale.md).",
    "estimate": "`headprune score`, `prune` and `finetune` say before they begin how long they will take; with --dry-run, no more than that.",
}
"""By what was typed: the next thing to type. An option is looked up only where its command has none of that name."""
