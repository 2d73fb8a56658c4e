"""Options and commands that older versions had: what to type in place of each."""

from __future__ import annotations

RETIRED = {
    "--examples": "A method's settings follow its name: -m ablation:examples=64.",
    "--time": "A method's settings follow its name: -m ablation:time=60.",
    "--max-memory": "A method's settings follow its name: -m ablation:memory=4GB.",
    "--normalise": "A method's settings follow its name: -m gradient:normalise.",
    "--steps": "A method's settings follow its name: -m l0:steps=400.",
    "--permutations": "A method's settings follow its name: -m shapley:permutations=64.",
    "--sparsity": "A method's settings follow its name: -m l0:sparsity=0.02.",
    "--keep": "A method's settings follow its name: -m l0:keep=36.",
    "--revision": "The revision of a Hub model follows its name: MODEL@REVISION.",
    "--offload-folder": "Weights that fit in no memory lie in temporary files until the run ends: TMPDIR says where.",
    "--streaming": "For a model larger than the memory: `headprune prune MODEL -d DATA --plan FILE --device-map auto` (docs/scale.md).",
    "--pad": "A padded model is as large as the dense one. Prune by `headprune prune --strategy uniform`, which keeps to what a stock class can "
    "have, or load the folder by from_pretrained(folder, trust_remote_code=True).",
    "estimate": "`headprune score`, `prune` and `finetune` say before they begin how long they will take; with --dry-run, no more than that.",
}
"""By what was typed: the next thing to type. An option is looked up only where its command has none of that name."""
