"""The command line: parsing and printing only, one file a command. torch is imported when a command runs, not for --help."""

from headprune.cli import score  # isort: skip  # commands are listed in this order
from headprune.cli import prune, finetune, report, export, push, inspect, show, bench, methods, demo  # isort: skip
from headprune.cli.app import app, main

__all__ = [
    "app",
    "bench",
    "demo",
    "export",
    "finetune",
    "inspect",
    "main",
    "methods",
    "prune",
    "push",
    "report",
    "score",
    "show",
]
