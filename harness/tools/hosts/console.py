"""What launch/hosts.py prints: every host's lines under its name, and its own."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_ROOT_CAUSE = "Root Cause (first observed failure)"
_EXIT_CODE = re.compile(r"\s*exitcode\s*:\s*(-?\d+)\b")


@dataclass(slots=True)
class Lines:
    """Bytes as they come -> whole lines."""

    tell: Callable[[str], None]
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        """Tell every line that is complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.tell(line.rstrip(b"\r").decode(errors="replace"))

    def end(self) -> None:
        """Tell what stands without a newline."""
        if self._rest:
            self.feed(b"\n")


@dataclass(slots=True)
class RootCause:
    """Reads torchrun's last words: its own exit code is 1, whatever the rank's was."""

    code: int | None = None
    """Exit code of the rank that failed first; negative for a signal."""
    _follows: bool = False

    def read(self, line: str) -> None:
        """Take one line of the host's output."""
        if _ROOT_CAUSE in line:
            self._follows = True
        elif self._follows and (match := _EXIT_CODE.match(line)):
            self.code, self._follows = int(match[1]), False


@dataclass(slots=True)
class Console:
    """Standard output, in colours where it is a terminal."""

    width: int
    """Of the longest host's name."""
    started: float = field(default_factory=time.monotonic)
    _print: Callable[[str, str, str], None] = field(init=False)

    def __post_init__(self) -> None:
        self._print = _in_colours() if sys.stdout.isatty() else _plain

    def say(self, text: str) -> None:
        """A line of the launcher, with the time since the start."""
        self._print("", f"hosts: {text} ({time.monotonic() - self.started:.1f} s)", "")

    def line(self, host: str, index: int, text: str) -> None:
        """A line of a host."""
        self._print(f"{host:<{self.width}} | ", text, COLOURS[index % len(COLOURS)])


def _plain(prefix: str, text: str, colour: str) -> None:
    print(f"{prefix}{text}", flush=True)


def _in_colours() -> Callable[[str, str, str], None]:
    from rich.console import Console as Rich
    from rich.text import Text

    rich = Rich(highlight=False, soft_wrap=True)

    def show(prefix: str, text: str, colour: str) -> None:
        rich.print(Text(prefix, style=colour) + Text.from_ansi(text) if prefix else Text(text, style="bold"))

    return show
