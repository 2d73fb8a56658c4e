"""What every command runs in: quiet libraries, errors as one line with the right exit code, signals that stop it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.amounts import in_line
from headprune.errors import HeadPruneError, Stopped, explained, first_line

if TYPE_CHECKING:
    from headprune.cli.terminal import Console


_LINGER = 0.5  # seconds that other ranks stay after a signal to all: a rank that is gone by then was the cause


@dataclass(frozen=True)
class Manner:
    """The options of a command's output."""

    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The libraries' messages, and tracebacks.")] = False


@contextmanager
def session(manner: Manner, *, shared: bool = False) -> Iterator[Console]:
    """The context that a command runs in; gives its console.

    Args:
        shared: Whether several processes that torchrun or Accelerate started share out the work, of which only the first one
            prints. If not, the first process runs the command alone.

    Raises:
        typer.Exit: With the exit code, after any error; its message has been printed.
    """
    from headprune.cli.terminal import Console

    others = isinstance(sys.stderr, NullOutput)
    if others and not shared:
        raise typer.Exit(0)
    console = Console(manner.quiet or others, manner.json and not others)
    ranks: Any = None
    try:
        # What libraries (or a model's own code) print must not be part of the document.
        with redirect_stdout(sys.stderr) if manner.json else nullcontext():
            if session.__doc__ is None:
                why = "This Python drops docstrings (-OO, or PYTHONOPTIMIZE=2), and transformers loads no model without its own."
                raise HeadPruneError(why, "Use -O, or leave it out.")
            quieten(manner.verbose)
            from headprune.parallel import launcher_ranks

            with launcher_ranks() if shared else nullcontext() as ranks:
                if ranks and ranks.main:
                    say_size(console, ranks.size)
                yield console
    except KeyboardInterrupt as error:
        raise typer.Exit(_say_stopped(error, console, ranks)) from None
    except (typer.Exit, SystemExit, BrokenPipeError):  # the output was closed, as behind `| head`
        raise
    except Exception as error:
        known = error if isinstance(error, HeadPruneError) else explained(error)
        if known is error:
            unhush(ranks)
        unexpected = f"{type(error).__name__}: {first_line(error)}"
        fail(console, known or HeadPruneError(unexpected, "(unexpected; add -v for the traceback)"))
        if manner.verbose or (known is not error and os.environ.get("HEADPRUNE_DEBUG")):
            raise
        raise typer.Exit(1) from None


def _say_stopped(error: KeyboardInterrupt, console: Console, ranks: Any) -> int:
    """Report that a signal ended the command, or that a lost rank was the cause; the exit code."""
    stopped = error if isinstance(error, Stopped) else Stopped()
    if isinstance(sys.stderr, NullOutput):
        time.sleep(_LINGER)
    elif ranks is not None and (gone := ranks.find_lost()):  # torchrun stops the others then
        from headprune.parallel import LostRankError

        fail(console, LostRankError(gone))
        return 1
    what = "interrupted." if stopped.status == Stopped().status else "terminated."
    fail(console, HeadPruneError(what, stopped.hint))
    return stopped.status


class NullOutput(io.TextIOWrapper):
    """An output that drops everything, for processes other than the first."""

    def __init__(self) -> None:
        super().__init__(io.FileIO(os.devnull, "w"), errors="replace")


def hush() -> None:
    """Silence this process, if a launcher started several and it is not the first."""
    if not os.environ.keys() & {"WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"}:
        return  # so that `headprune --help` does not wait for torch
    from headprune.parallel import place

    with suppress(HeadPruneError):  # the command reports it
        ranks = place()
        if ranks is not None and ranks[0] and not os.environ.get("HEADPRUNE_DEBUG"):
            sys.stdout, sys.stderr = NullOutput(), NullOutput()


def unhush(ranks: Any) -> None:
    """Let this process print to stderr again, if it is the first of the remaining processes."""
    if isinstance(sys.stderr, NullOutput) and ranks is not None and {*range(ranks.rank)} <= {*ranks.gone}:
        sys.stderr = Output(sys.__stderr__, results=False)


def say_size(console: Console, size: int) -> None:
    """Say how many processes share out the work, and where a launcher started fewer than it was asked for."""
    if size > 1:
        console.say(f"{size} processes share out the work.")
    elif os.environ.get("ACCELERATE_USE_CPU") and os.environ.get("MASTER_PORT"):
        several = "For several: torchrun --nproc-per-node N."
        console.say(f"accelerate launch --cpu starts one process, whatever --num_processes says. {several}")


def quieten(verbose: bool) -> None:
    """Keep the libraries' bars and warnings off the screen."""
    # Notebooks set it to a backend that headprune's environment may not have; pictures are files here.
    os.environ.pop("MPLBACKEND", None)
    if verbose:
        return
    import logging
    import warnings

    # transformers imports torchao where it is installed, which warns; so does lm-eval of each model that is in memory
    for name in ("torchao", "torch.utils._pytree", "lm_eval"):
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


def fail(console: Console, error: HeadPruneError) -> None:
    """Print an error: a line on stderr, and a JSON document if one was asked for."""
    line = in_line(f"headprune: {error}")
    typer.echo(line, err=True)
    if not console.as_json and getattr(sys.stderr, "lost", False):  # `Output`: stderr takes nothing, so use stdout
        with suppress(OSError, HeadPruneError):  # stdout may be full or closed, too
            typer.echo(line)
    with suppress(OSError, HeadPruneError):
        console.document({"error": str(error.args[0]), "hint": error.hint.strip("()")})


# -- how the process ends ------------------------------------------------------------------------------

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")
_GRACE = 3.0  # seconds after a signal in which others are ignored, while the command cleans up
_AGAIN = 0.05  # seconds until a signal that was lost is sent again


class Signals:
    """Handles the signals that stop the process: of Ctrl-C, batch systems, containers, closed terminals and time limits.

    A second Ctrl-C a moment after the first is ignored: it would stop the cleaning up, and leave half a file behind.

    Attributes:
        got: The last signal that was obeyed.
    """

    def __init__(self) -> None:
        self.got: int | None = None
        self._obeyed = float("-inf")

    def listen(self) -> None:
        """Raise `Stopped` in the main thread when a signal comes; signals that are ignored (``nohup``) stay ignored."""
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._stop)
        usual = sys.unraisablehook

        def resend(event: sys.UnraisableHookArgs) -> None:
            # Python drops exceptions that are raised in a destructor or a weak reference's callback.
            if isinstance(event.exc_value, Stopped) and self.got is not None:
                self._obeyed = float("-inf")
                threading.Timer(_AGAIN, os.kill, (os.getpid(), self.got)).start()
            else:
                usual(event)

        sys.unraisablehook = resend

    def _stop(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if now - self._obeyed >= _GRACE:
            self.got, self._obeyed = number, now
            raise Stopped(128 + number)


class Output:
    """Wraps stdout or stderr, so that its write errors are not taken for errors of the disk with the results.

    A closed pipe stops the command, as it stops other programs (`| head`).

    Args:
        results: Whether results go there. If not, a failure to write does not stop the work.

    Attributes:
        lost: Whether something could not be written.
    """

    def __init__(self, real: Any, results: bool) -> None:
        self._real, self._results, self.lost = real, results, False

    def write(self, text: str) -> int:
        return int(self._try(lambda: self._real.write(text)) or 0)

    def flush(self) -> None:
        self._try(self._real.flush)

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._results:
                message = f"What this command prints could not be written to stdout: {error.strerror or error}."
                raise HeadPruneError(
                    message, "Send it elsewhere; files that the command writes are complete."
                ) from error
            self.lost = True
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def run(app: Callable[[], Any]) -> None:
    """Run the application to its end; of several processes, only the first one prints.

    Raises:
        SystemExit: Always, with the exit status.
    """
    signals = Signals()
    signals.listen()
    if sys.stderr is not None:
        sys.stderr = Output(sys.stderr, results=False)
    if hasattr(sys.stdout, "reconfigure"):  # a locale without ±, or Windows' code page behind a pipe
        sys.stdout.reconfigure(errors="replace")
        sys.stdout = Output(sys.stdout, results=True)
    status: Any = 0
    try:
        hush()
        app()
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        status = Stopped().status
    except (HeadPruneError, OSError) as error:
        status = _say_unwritable(error)
    if status == Stopped().status and signals.got is not None:
        status = 128 + signals.got  # the library that parses commands takes every signal for Ctrl-C
    sys.exit(_close(status))


def _close(status: Any) -> Any:
    """Flush both outputs; the exit status. What they do not take is dropped, so that Python reports no error."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except (HeadPruneError, OSError, ValueError) as error:
            if number == 1 and not status:
                status = _say_unwritable(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return status


def _say_unwritable(error: Exception) -> int:
    """Report that stdout could not be written, unless its reader closed it (`| head`); the exit status."""
    if not isinstance(error, BrokenPipeError) and sys.stderr is not None:
        print(f"headprune: {error}", file=sys.stderr)
    return 1
