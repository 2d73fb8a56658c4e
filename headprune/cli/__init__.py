"""The command line: parsing and printing only. torch is imported when a command runs, not for --help."""

from headprune.cli import score  # isort: skip  # commands are listed in this order
from headprune.cli import prune, finetune, saved, looking, demo  # isort: skip
from headprune.cli.app import app, main

__all__ = ["app", "demo", "finetune", "looking", "main", "prune", "saved", "score"]
