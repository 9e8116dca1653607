"""How a rank ends at once: its threads, and other ranks, may be in collectives that will never end."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from harness.runtime import redact
from harness.runtime.errors import say, tell_torchrun
from harness.runtime.processes import descendants, end_processes

FAILED = 1


def hard_exit(code: int) -> NoReturn:
    """Exit at once, and skip Python's own shutdown.

    If a thread of torch or gloo asks for the interpreter's lock while Python 3.11 shuts down, the process aborts
    ("terminate called without an active exception"). That made ranks fail that had passed, twice in some hundred test
    runs.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, or a pipe that nobody reads
            stream.flush()
    os._exit(code)


def end_failed(said: str, error: str, traceback: str, announce: Callable[[str, str], None]) -> NoReturn:
    """Print what happened, announce the error, and end what this process has started and itself.

    Call it from any thread.

    said: lines for the screen. announce: called with error and traceback. If a watchdog observes the run, it ends this
    process in there, and later prints the run's first failure.
    """
    said, error, traceback = map(redact.text, (said, error, traceback))
    say(said + "\n")
    tell_torchrun(error, traceback)
    announce(error, traceback)
    end_processes(descendants())
    hard_exit(FAILED)
