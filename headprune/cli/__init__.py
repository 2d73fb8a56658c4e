"""The command line: parsing and printing only. torch is imported when a command runs, not for --help."""

try:
    from headprune.cli import pruning, saved, looking  # isort: skip  # commands are listed in this order
    from headprune.cli.app import app, main
except KeyboardInterrupt:  # Ctrl-C before `headprune.cli.session.Signals` listens
    raise SystemExit(130) from None

__all__ = ["app", "looking", "main", "pruning", "saved"]
