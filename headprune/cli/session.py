"""What all commands run in: quiet libraries, and every error as one line with the right exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING

import typer

from headprune.cli.asked import fail
from headprune.cli.options import Manner
from headprune.errors import HeadPruneError, Stopped, explained, first_line

if TYPE_CHECKING:
    from headprune.app.console import Console


@contextmanager
def session(manner: Manner) -> Iterator[Console]:
    """What a command runs in.

    Raises:
        typer.Exit: With the exit code, after any error; its message has been printed.
    """
    from headprune.app.console import Console

    console = Console(manner.quiet, manner.json)
    # What libraries (or a model's own code) print must not be part of the document.
    apart = redirect_stdout(sys.stderr) if manner.json else nullcontext()
    try:
        with apart:
            quieten(manner.verbose)
            yield console
    except HeadPruneError as error:
        fail(console, str(error.args[0]), error.hint)
        if manner.verbose:
            raise
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped()
        fail(console, "interrupted." if stopped.status == Stopped().status else "terminated.", stopped.hint)
        raise typer.Exit(stopped.status) from None
    except (typer.Exit, SystemExit, BrokenPipeError):  # the output was closed, as behind `| head`
        raise
    except Exception as error:
        name, known = type(error).__name__, explained(error)
        if known is not None:
            fail(console, str(known.args[0]), known.hint)
        else:
            fail(console, f"{name}: {first_line(error)}", "(unexpected; add -v for the traceback)")
        if manner.verbose or os.environ.get("HEADPRUNE_DEBUG"):
            raise
        raise typer.Exit(1) from None


def quieten(verbose: bool) -> None:
    """Keep the libraries' bars and warnings off the screen."""
    if verbose:
        return
    import warnings

    import datasets
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", message="headprune: ")  # such as a checkpoint that was edited
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # an error is shown once, as an exception
    datasets.disable_progress_bars()
