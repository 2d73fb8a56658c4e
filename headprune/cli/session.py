"""What all commands run in: quiet libraries, and every error as one line with the right exit code."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

import typer

from headprune.amounts import in_line
from headprune.cli.options import Manner
from headprune.errors import HeadPruneError, Stopped, explained, first_line

if TYPE_CHECKING:
    from headprune.app.console import Console


_LINGER = 0.5  # seconds that others stay when all are told to stop: who is still there was not the cause


@contextmanager
def session(manner: Manner, *, shared: bool = False) -> Iterator[Console]:
    """What a command runs in.

    Args:
        shared: Whether several processes that torchrun or Accelerate started share out its work; only the first one prints. Any
            other command is run by the first one alone.

    Raises:
        typer.Exit: With the exit code, after any error; its message has been printed.
    """
    from headprune.app.console import Console

    others = isinstance(sys.stderr, NullOutput)
    if others and not shared:
        raise typer.Exit(0)
    console = Console(manner.quiet or others, manner.json and not others)
    ranks: Any = None
    # What libraries (or a model's own code) print must not be part of the document.
    apart = redirect_stdout(sys.stderr) if manner.json else nullcontext()
    try:
        with apart:
            _check_docstrings()
            quieten(manner.verbose)
            if not shared:
                yield console
                return
            from headprune.parallel import launcher_ranks

            with launcher_ranks() as ranks:
                if ranks.main:
                    told_of(console, ranks.size)
                yield console
    except HeadPruneError as error:
        heard(ranks)
        fail(console, str(error.args[0]), error.hint)
        if manner.verbose:
            raise
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped()
        if others:
            time.sleep(_LINGER)
        elif ranks is not None and (gone := ranks.find_lost()):  # torchrun stops the others then
            from headprune.parallel import LostRankError

            lost = LostRankError(gone)
            fail(console, str(lost.args[0]), lost.hint)
            raise typer.Exit(1) from None
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


class NullOutput(io.TextIOBase):
    """The output of a process that is not to be heard, since another one says the same.

    Args:
        real: Where its output would go.
    """

    def __init__(self, real: Any) -> None:
        super().__init__()
        self.real = real

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


def hush() -> None:
    """Let this process print nothing, if a launcher started several and it is not the first."""
    if not any(name in os.environ for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")):
        return  # so that `headprune --help` does not wait for torch
    from headprune.parallel import place

    try:
        found = place()
    except HeadPruneError:  # said by the command
        return
    if found is not None and found[0] and not os.environ.get("HEADPRUNE_DEBUG"):
        sys.stdout, sys.stderr = NullOutput(sys.stdout), NullOutput(sys.stderr)


def heard(ranks: Any) -> None:
    """Let this process print again, if it is the first of those that are left."""
    if isinstance(sys.stderr, NullOutput) and ranks is not None and {*range(ranks.rank)} <= {*ranks.gone}:
        sys.stderr = sys.stderr.real


def told_of(console: Console, size: int) -> None:
    """Say how many processes share out the work, and where a launcher started fewer than it was asked for."""
    if size > 1:
        console.say(f"{size} processes share out the work.")
    elif os.environ.get("ACCELERATE_USE_CPU") and os.environ.get("MASTER_PORT"):
        console.say(
            "accelerate launch --cpu starts one process, whatever --num_processes says. For several: torchrun --nproc-per-node N."
        )


def _check_docstrings() -> None:
    """Refuse a Python that drops docstrings: transformers reads its own, and no model of it would load.

    Raises:
        HeadPruneError: It does.
    """
    if session.__doc__ is None:
        raise HeadPruneError(
            "This Python drops docstrings (-OO, or PYTHONOPTIMIZE=2), and transformers loads no model without its own.",
            "Use -O, or leave it out.",
        )


def quieten(verbose: bool) -> None:
    """Keep the libraries' bars and warnings off the screen."""
    # Notebooks set it for their own process to a backend that headprune's environment may not have; pictures are files here.
    os.environ.pop("MPLBACKEND", None)
    if verbose:
        return
    import logging
    import warnings

    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao where it is installed, which warns
        logging.getLogger(name).setLevel(logging.ERROR)

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


def fail(console: Console, message: str, hint: str) -> None:
    """Say what is wrong: a line on stderr, and the document if one was asked for."""
    _say(in_line(f"headprune: {message} {hint}".rstrip()), aside=not console.as_json)
    with suppress(OSError, HeadPruneError):  # stdout may be what is full, or closed
        console.document({"error": message, "hint": hint.strip("()")})


def _say(line: str, aside: bool = True) -> None:
    """A line on stderr; if that takes nothing and ``aside``, on stdout: who sees only that hears of it, too."""
    typer.echo(line, err=True)
    if aside and getattr(sys.stderr, "lost", False):  # `headprune.cli.ending.Patient`
        with suppress(OSError):
            typer.echo(line)
