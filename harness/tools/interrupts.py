"""How Ctrl-C or SIGTERM ends a program that is not a rank: the last line on the screen says what it was doing.

The signal raises Interrupted, so that every `with` and `finally` on the way out ends what it has begun. While modules
are imported the signal ends the process at once: there is nothing to end then, and modules swallow exceptions, or turn
them into an ImportError. So does a second signal. Standard library only.
"""

import atexit
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from harness.runtime.errors import STANDARD_ERROR, say
from harness.runtime.events import current_work

TAKEN = (signal.SIGINT, signal.SIGTERM)
NAMES = {int(signal.SIGINT): "Ctrl-C (SIGINT)", int(signal.SIGTERM): "SIGTERM", int(signal.SIGHUP): "SIGHUP"}


class Interrupted(SystemExit):
    """Raised when a signal arrives. Its argument is the exit code: 128 plus the signal's number, as in a shell."""


@dataclass(slots=True)
class Ending:
    """What this process does when Ctrl-C or SIGTERM arrives, and what it says last."""

    program: str
    pid: int = field(default_factory=os.getpid)
    number: int = 0
    """Of the signal that came first."""
    doing: str = ""

    def take(self, number: int, _: FrameType | None = None) -> None:
        """Raise Interrupted, or end the process."""
        if os.getpid() != self.pid:  # a fork of the program, which has nothing to say
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        work, is_second = current_work(), bool(self.number)
        if not is_second:
            self.number, self.doing = number, work.what if work else ""
        if is_second or (work and work.importing):
            atexit._run_exitfuncs()  # which remove temporary folders, and call say()
            os._exit(128 + self.number)
        raise Interrupted(128 + number)

    def say(self) -> None:
        """Print the sentence, if a signal came. Called as the last thing that Python does."""
        if self.number:
            say_interrupted(self.program, self.number, self.doing and f" while {self.doing}")


def say_interrupted(what: str, number: int, doing: str, folder: Path | None = None) -> None:
    """Print which signal interrupted what. doing: such as " in generate of step 1". folder: the run directory."""
    newline = "\n" if number == signal.SIGINT and os.isatty(STANDARD_ERROR) else ""  # the terminal has written ^C
    where = f"; run directory: {folder}" if folder else ""
    say(f"{newline}{what} was interrupted by {NAMES.get(number, f'signal {number}')}{doing}{where}\n")


def end_by_sentence(program: str) -> Ending:
    """Let signals end this process with a sentence. Call it once, before anything else."""
    ending = Ending(program)
    atexit.register(ending.say)  # registered first, called last
    for number in TAKEN:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a shell
            signal.signal(number, ending.take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)  # see become()
    return ending


def end_quietly() -> None:
    """Let Ctrl-C end this rank without a traceback: its launcher and its watchdog say what happened."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
    usual = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            usual(kind, error, trace)

    sys.excepthook = show


def become(words: list[str]) -> NoReturn:
    """Replace this process by another script of launch/.

    A signal that comes before the new one can say anything waits until it can.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
    os.execv(words[0], words)
