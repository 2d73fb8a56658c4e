"""How the process of a command ends: signals that stop it, and outputs that take nothing or not every letter."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from headprune.errors import Stopped

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")
_GRACE = 3.0  # seconds after a signal in which others are not obeyed: what the first one stopped is cleaning up
_AGAIN = 0.05  # seconds until a signal that was lost is sent again


class Signals:
    """Signals that stop the process: Ctrl-C, what batch systems, containers and closed terminals send, and a limit on its time.

    A second Ctrl-C a moment after the first would stop the cleaning up, and leave half a file behind.

    Attributes:
        got: The last of them that was obeyed.
    """

    def __init__(self) -> None:
        self.got: int | None = None
        self._obeyed = float("-inf")

    def listen(self) -> None:
        """Raise `Stopped` in the main thread when one comes; those that are ignored (``nohup``) stay so."""
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._stop)
        told = sys.unraisablehook

        def lost(found: sys.UnraisableHookArgs) -> None:
            # Python drops what is raised within a destructor or a weak reference's callback.
            if isinstance(found.exc_value, Stopped):
                threading.Timer(_AGAIN, self._again).start()
            else:
                told(found)

        sys.unraisablehook = lost

    def _again(self) -> None:
        assert self.got is not None
        self._obeyed = float("-inf")
        os.kill(os.getpid(), self.got)

    def _stop(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if now - self._obeyed >= _GRACE:
            self.got, self._obeyed = number, now
            raise Stopped(128 + number)


class Patient:
    """An output whose failures stop no work: what is said beside the results is worth less than they are.

    A closed pipe still stops it, as it stops other programs.

    Attributes:
        lost: Whether something could not be written.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self.lost = False

    def write(self, text: str) -> int:
        return int(self._tried(lambda: self._real.write(text)) or 0)

    def flush(self) -> None:
        self._tried(self._real.flush)

    def _tried(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            self.lost = True
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def run(app: Callable[[], Any]) -> None:
    """Run the application to its end.

    Raises:
        SystemExit: Always, with the exit status.
    """
    signals = Signals()
    signals.listen()
    if sys.stderr is not None:
        sys.stderr = Patient(sys.stderr)
    if hasattr(sys.stdout, "reconfigure"):  # a locale without ±, or Windows' code page behind a pipe
        sys.stdout.reconfigure(errors="replace")
    status: Any = 0
    try:
        app()
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        status = Stopped().status
    except OSError as error:
        status = _untold(error)
    if status == Stopped().status and signals.got is not None:
        status = 128 + signals.got  # the library that parses commands takes every signal for Ctrl-C
    sys.exit(_closed(status))


def _closed(status: Any) -> Any:
    """The exit status, once both outputs have taken all; what they do not take is dropped, so that Python says nothing of it."""
    for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError) as error:
            if number == 1 and not status:
                status = _untold(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return status


def _untold(error: Exception) -> int:
    """Say that stdout took nothing, unless whoever read it has enough (`| head`); the exit status."""
    if not isinstance(error, BrokenPipeError) and sys.stderr is not None:
        why = getattr(error, "strerror", None) or error
        print(f"headprune: What this command prints could not be written to stdout: {why}.", file=sys.stderr)
    return 1
