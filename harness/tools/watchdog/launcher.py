"""What started the ranks of this host, torchrun as a rule, seen from outside: whether it works, writes, or got a signal."""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

import psutil

from harness.runtime.processes import end_processes, is_alive

IDLE_SECONDS = 4.0
"""How long it may do nothing when all its ranks are gone: it may hang in a store that no longer answers."""
STAY_SECONDS = 20.0
"""How long it may stay in any case: a busy machine lets it write its report after seconds."""
AT_WORK = 0.05
"""Share of the time that a process which works runs, or waits for a core; one that only polls needs less."""
SAMPLE_SECONDS = 0.5
SEEN_SECONDS = 0.1
"""How close to its end it must have been looked at for it to be known that it wrote nothing more."""
ASK_SECONDS = 2.0
# py-spy's words for torchrun's main thread while it passes a signal on to its ranks.
_GOT_SIGNAL = re.compile(r"\be: <SignalException at ")
_WHICH = re.compile(r"\bdeath_sig: (\d+)")

Wait = Callable[[Callable[[], bool], float], None]
"""Returns once it is so, or these seconds have passed."""


@dataclass(slots=True)
class Launcher:
    """See the module."""

    process: psutil.Process
    is_torchrun: bool
    """Whether it is ours to end."""
    got_signal: str = ""
    """The name of the signal that it got and passes on, as far as that was seen."""
    _asking: bool = False
    _worked: tuple[float, float] = (0.0, 0.0)
    """When it was last seen to work, and how many seconds it had worked in all."""
    _written: tuple[float, int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def lives(self) -> bool:
        """Whether it runs."""
        return is_alive(self.process)

    def ask(self) -> None:
        """Look aside, once at a time, whether it has got a signal: its ranks die of that, as they do when one of them fails."""
        with self._lock:
            if self._asking or self.got_signal or not self.is_torchrun:
                return
            self._asking = True
        threading.Thread(target=self._ask, name="torchrun", daemon=True).start()

    def end(self, host: str, say: Callable[[str], object], wait: Wait) -> None:
        """Once its ranks are gone: wait while it works, within limits, and end it where it stays."""
        if not self.is_torchrun:
            return
        self._worked = (time.monotonic(), self._work())
        self._written = None
        wait(lambda: not self._stays(), STAY_SECONDS)
        if not self.lives() or any(map(is_alive, self.process.children())):
            return
        say(f"torchrun on {host} (pid {self.pid}) is still there after its ranks, and does nothing: ended\n")
        end_processes({self.pid: self.process}, patience_seconds=1.0)

    def bytes_written(self) -> int | None:
        """What it has written in all, to its screen, files and pipes; None where that cannot be read."""
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self.pid}/io").read_text(encoding="ascii").splitlines()
            return int(next(line for line in lines if line.startswith("wchar:")).split()[1])
        return None

    def wrote_nothing_since(self, before: int | None) -> bool:
        """Whether it is known to have written nothing more until its end, which end() has awaited."""
        if before is None or self._written is None:
            return False
        seen, written = self._written
        return written == before and time.monotonic() - seen < SEEN_SECONDS

    def _stays(self) -> bool:
        """Whether it lives, and has worked lately."""
        if not self.lives():
            return False
        now = time.monotonic()
        if (written := self.bytes_written()) is not None:
            self._written = (now, written)
        then, work = self._worked
        if now - then > SAMPLE_SECONDS and (total := self._work()) - work > AT_WORK * (now - then):
            self._worked = (now, total)
        return now - self._worked[0] < IDLE_SECONDS

    def _work(self) -> float:
        """Seconds that its threads ran, or waited for a core, which a busy machine makes long."""
        nanoseconds = 0
        with suppress(OSError, ValueError):  # it ends, or this kernel keeps no such account
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                ran, waited, *_ = (thread / "schedstat").read_text(encoding="ascii").split()
                nanoseconds += int(ran) + int(waited)
        return nanoseconds / 1e9

    def _ask(self) -> None:
        found = _signal_of(_dump(self.pid))
        with self._lock:
            self.got_signal, self._asking = found, False


def _dump(pid: int) -> str:
    """Its stacks with their variables, which py-spy reads without a stop; "" without py-spy, or where it may not look."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return ""
    command = [tool, "dump", "--nonblocking", "--locals", "--pid", str(pid)]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS).stdout
    return ""


def _signal_of(dump: str) -> str:
    """The name of the signal that torchrun passes on in these stacks; "" where it does not."""
    numbers = _WHICH.findall(dump)
    if not numbers or not _GOT_SIGNAL.search(dump):
        return ""
    return Signals(int(numbers[-1])).name if int(numbers[-1]) in list(Signals) else ""
