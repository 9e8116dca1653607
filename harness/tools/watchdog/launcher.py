"""What started the ranks of this host, usually torchrun, seen from outside: whether it works, writes, or got a signal."""

import re
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

import psutil

from harness.runtime.processes import end_processes, is_alive
from harness.tools.watchdog.stacks import pyspy_command

IDLE_SECONDS = 4.0  # it may do nothing for so long once its ranks are gone: its store may hang
STAY_SECONDS = 20.0  # it may stay for so long in any case: on a busy machine its report takes seconds
AT_WORK = 0.05  # share of the time that a process which works runs, or waits for a core; polling needs less
SAMPLE_SECONDS = 0.5
SEEN_SECONDS = 0.1  # it must have been looked at so close to its end to know that it wrote nothing more
ASK_SECONDS = 2.0
# py-spy's dump of torchrun's main thread while it passes a signal on to its ranks.
_GOT_SIGNAL = re.compile(r"\be: <SignalException at ")
_WHICH = re.compile(r"\bdeath_sig: (\d+)")

Wait = Callable[[Callable[[], bool], float], None]
"""Return once the condition holds, or these seconds have passed."""


@dataclass(slots=True)
class RankLauncher:
    """The process that started the ranks."""

    process: psutil.Process
    is_torchrun: bool  # whether the watchdog may end it
    got_signal: str = ""  # the name of the signal that it got and passes on, once seen
    _asking: bool = False
    _worked: tuple[float, float] = (0.0, 0.0)  # when it was last seen to work, and its total of work in seconds
    _written: tuple[float, int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_alive(self) -> bool:
        return is_alive(self.process)

    def look_for_signal(self) -> None:
        """Look on a thread whether it got a signal: its ranks die of that as they do when one of them fails."""
        with self._lock:
            if self._asking or self.got_signal or not self.is_torchrun:
                return
            self._asking = True
        threading.Thread(target=self._look_for_signal, name="torchrun", daemon=True).start()

    def end(self, host: str, say: Callable[[str], object], wait: Wait) -> None:
        """Wait, once its ranks are gone, while it works, within limits; end it if it stays."""
        if not self.is_torchrun:
            return
        self._worked, self._written = (time.monotonic(), self._work()), None
        wait(lambda: not self._stays(), STAY_SECONDS)
        if self.is_alive() and not any(map(is_alive, self.process.children())):
            say(f"torchrun on {host} (pid {self.pid}) is still there after its ranks, and idle: terminating it\n")
            end_processes({self.pid: self.process}, patience_seconds=1.0)

    def bytes_written(self) -> int | None:
        """Return what it has written in all, to its screen, files and pipes; None if that cannot be read."""
        with suppress(psutil.Error):
            return int(self.process.io_counters().write_chars)
        return None

    def wrote_nothing_since(self, before: int | None) -> bool:
        """Return whether it is known to have written nothing more until its end, for which end() has waited."""
        if before is None or self._written is None:
            return False
        seen, written = self._written
        return written == before and time.monotonic() - seen < SEEN_SECONDS

    def _stays(self) -> bool:
        """Return whether it is alive, and has worked lately."""
        if not self.is_alive():
            return False
        now = time.monotonic()
        if (written := self.bytes_written()) is not None:
            self._written = (now, written)
        then, work = self._worked
        if now - then > SAMPLE_SECONDS and (total := self._work()) - work > AT_WORK * (now - then):
            self._worked = (now, total)
        return now - self._worked[0] < IDLE_SECONDS

    def _work(self) -> float:
        """Return the seconds that its threads ran, or waited for a core, which a busy machine makes long."""
        nanoseconds = 0
        with suppress(OSError, ValueError):  # it ends, or this kernel has no such statistics
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                ran, waited, *_ = (thread / "schedstat").read_text(encoding="ascii").split()
                nanoseconds += int(ran) + int(waited)
        return nanoseconds / 1e9

    def _look_for_signal(self) -> None:
        found = signal_in(_stacks_with_variables(self.pid))
        with self._lock:
            self.got_signal, self._asking = found, False


def _stacks_with_variables(pid: int) -> str:
    """Return its stacks with variables, which py-spy reads without a stop; "" without py-spy or its permission."""
    if command := pyspy_command():
        with suppress(subprocess.TimeoutExpired):
            command += ["--nonblocking", "--locals", "--pid", str(pid)]
            return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS).stdout
    return ""


def signal_in(stacks: str) -> str:
    """Return the name of the signal that torchrun passes on in these stacks; "" if it does not."""
    numbers = _WHICH.findall(stacks)
    if not numbers or not _GOT_SIGNAL.search(stacks):
        return ""
    return Signals(int(numbers[-1])).name if int(numbers[-1]) in list(Signals) else ""
