"""The output of launch/hosts.py: every host's lines under its name, and the launcher's own."""

import re
import sys
import time
from dataclasses import dataclass, field

ANSI_COLOURS = (36, 35, 32, 33, 34, 31)
_ROOT_CAUSE = "Root Cause (first observed failure)"
_EXIT_CODE = re.compile(r"\s*exitcode\s*:\s*(-?\d+)\b")


@dataclass(slots=True)
class RootCause:
    """Read torchrun's report: its own exit code is 1, whatever the rank's was."""

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
class HostConsole:
    """Standard output, in colours if it is a terminal."""

    width: int
    """Of the longest host's name."""
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line of the launcher, with the time since the start."""
        self._print(f"hosts: {text} ({time.monotonic() - self.started:.1f} s)", 1, "")

    def line(self, host: str, index: int, text: str) -> None:
        """Print a line of a host."""
        self._print(f"{host:<{self.width}} | ", ANSI_COLOURS[index % len(ANSI_COLOURS)], text)

    def _print(self, prefix: str, style: int, text: str) -> None:
        line = f"\x1b[{style}m{prefix}\x1b[0m{text}" if sys.stdout.isatty() else prefix + text
        sys.stdout.write(line + "\n")  # one write: every host has a thread that prints
        sys.stdout.flush()
