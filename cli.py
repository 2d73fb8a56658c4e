"""Thin launcher, so that ``python cli.py score …`` works from a checkout."""

from headprune.cli import main

if __name__ == "__main__":
    main()
