"""The command line: parsing and printing only. torch is imported when a command runs, not for --help."""

from headprune.cli import pruning, saved, looking  # isort: skip  # commands are listed in this order
from headprune.cli.app import app, main

__all__ = ["app", "looking", "main", "pruning", "saved"]
