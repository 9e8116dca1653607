"""The end of all that a run has on this host: ranks, what they started, torchrun if it stays, and temporary files.

Ending waits for no screen and no run directory: what may block is done on threads, and costs seconds at most.
"""

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.runtime.errors import say
from harness.runtime.processes import end_processes, is_alive
from harness.tools.process_tree import SharedFiles
from harness.tools.watchdog import run_scratch
from harness.tools.watchdog.channel import WatchdogSettings
from harness.tools.watchdog.failures import Place, RunFailure
from harness.tools.watchdog.host_processes import Descendants, started_at
from harness.tools.watchdog.verdict import RunVerdict

LEAVE_SECONDS = 2.0  # from the order to exit to SIGKILL
WRITE_SECONDS = 1.0  # a terminal, or a full pipe without a reader, may delay the verdict for so long
KEEP_SECONDS = 3.0  # the run directory, which may be a dead mount, may delay it for so long once all has ended
REPORT_SECONDS = 5.0  # reports take seconds on a busy machine; all of a run must be gone within 15
IDLE_SECONDS = 4.0  # torchrun may do nothing for so long once its ranks are gone: its store may hang
STAY_SECONDS = 20.0  # it may stay for so long in any case: on a busy machine its report takes seconds
AT_WORK = 0.05  # share of the time that a process which works runs, or waits for a core; polling needs less
SAMPLE_SECONDS = 0.5
NO_REPORT = "no-report.txt"
STANDARD_ERROR = 2
ROOT = Path(__file__).resolve().parents[3]

Wait = Callable[[Callable[[], bool], float], None]
"""Return once the condition holds, or these seconds have passed."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a standby needs to end and to report a run in the place of its watchdog, which sends it once a second."""

    folder: Path | None = None  # the run directory
    ranks: Mapping[int, tuple[int, Place]] = field(default_factory=dict)  # pid and place of the ranks that are alive
    started: Mapping[int, int] = field(default_factory=dict)  # pid -> start time: with it, no other process's
    shared: Set[tuple[str, int]] = frozenset()  # the run's files in /dev/shm
    failures: Sequence[RunFailure] = ()

    def processes(self) -> dict[int, psutil.Process]:
        """Return the processes that are still there, ranks included, by pid."""
        found = {}
        for pid, ticks in self.started.items():
            with suppress(IndexError, psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if started_at(pid) == ticks:
                    found[pid] = process
        return found


@dataclass(slots=True)
class HostCleanup:
    """What must be ended on this host, and how."""

    settings: WatchdogSettings
    launcher: psutil.Process
    wait: Wait
    descendants: Descendants = field(default_factory=Descendants)
    shared: SharedFiles = field(default_factory=SharedFiles)
    _folder_answers: bool = True
    _screen: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "screen"))
    _folder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "folder"))

    def say(self, text: str, screen: int = STANDARD_ERROR) -> Future[None]:
        """Write to this descriptor, on a thread."""
        return self._screen.submit(say, text, screen)

    def send_snapshot(
        self,
        line: socket.socket,
        folder: Path | None,
        ranks: Mapping[int, tuple[int, Place]],
        failures: Sequence[RunFailure],
    ) -> None:
        """Send the standby what it would have to end and report now. ranks: pid and place of each."""
        started = {}
        for pid in [*(pid for pid, _ in ranks.values()), *self.descendants.known]:
            with suppress(IndexError):  # it has just ended
                started[pid] = started_at(pid)
        snapshot = Snapshot(folder, ranks, started, self.shared.ours, failures)
        with suppress(OSError):  # it is gone or stopped, and ends nothing
            line.send(pickle.dumps(snapshot), socket.MSG_DONTWAIT)

    def end_and_report(
        self, verdict: RunVerdict, screen: int, ranks: Sequence[psutil.Process], all_gone: Callable[[], bool]
    ) -> None:
        """Print the verdict, end all, and print it again on screen, torchrun's, below torchrun's report; keep it."""
        torchrun_reports = self.settings.is_torchrun and is_alive(self.launcher)
        _wait_for(self.say(verdict.text()), WRITE_SECONDS)
        kept = self._folder.submit(verdict.keep)
        self._end_all(ranks, all_gone)
        if torchrun_reports:
            _wait_for(self.say(verdict.text(), screen), WRITE_SECONDS)
        self._folder_answers = _wait_for(kept, KEEP_SECONDS)
        if not self._folder_answers:
            self.say(f"warning: the run directory does not answer: {verdict.folder}\n")
        _wait_for(self.say(""), WRITE_SECONDS)  # after all that was printed before

    def _end_all(self, ranks: Sequence[psutil.Process], all_gone: Callable[[], bool]) -> None:
        """Give ranks the time to exit, and end what is left."""

        def alive() -> dict[int, psutil.Process]:
            left = {each.pid: each for each in ranks if is_alive(each)}
            self.descendants.look(left)
            self.shared.look([*left, *self.descendants.known])
            return left

        alive()
        self.wait(all_gone, LEAVE_SECONDS)
        stubborn = alive()
        self.descendants.look_for_orphans(self.settings.name)
        end_processes(stubborn | self.descendants.known, patience_seconds=0)
        self.remove_files()
        if self.settings.is_torchrun:
            end_torchrun(self.launcher, self.settings.host, self.say, self.wait)

    def remove_files(self) -> None:
        """Remove, once all have ended, what they left in /dev/shm and in their temporary folders."""
        self.shared.remove()
        run_scratch.remove(self.settings.name)

    def write_reports(self, folder: Path) -> None:
        """Write the reports of a run that failed, if its run directory answers."""
        if self._folder_answers:
            _wait_for(self._folder.submit(report_failed_run, folder), REPORT_SECONDS + KEEP_SECONDS)


def _wait_for(work: Future[Any], seconds: float) -> bool:
    """Return whether it was done within this time."""
    with suppress(NotInTimeError):
        work.result(seconds)
        return True
    return False


def end_torchrun(torchrun: psutil.Process, host: str, say: Callable[[str], object], wait: Wait) -> None:
    """Wait, once its ranks are gone, while it works, within limits; end it if it stays."""
    worked, work = time.monotonic(), _work_of(torchrun.pid)

    def stays() -> bool:
        nonlocal worked, work
        now, total = time.monotonic(), _work_of(torchrun.pid)
        if now - worked > SAMPLE_SECONDS and total - work > AT_WORK * (now - worked):
            worked, work = now, total
        return is_alive(torchrun) and now - worked < IDLE_SECONDS

    wait(lambda: not stays(), STAY_SECONDS)
    if is_alive(torchrun) and not any(map(is_alive, torchrun.children())):
        say(f"torchrun on {host} (pid {torchrun.pid}) is still there after its ranks, and idle: terminating it\n")
        end_processes({torchrun.pid: torchrun}, patience_seconds=1.0)


def _work_of(pid: int) -> float:
    """Return the seconds that its threads ran, or waited for a core, which a busy machine makes long."""
    nanoseconds = 0
    with suppress(OSError, ValueError):  # it ends, or this kernel has no such statistics
        for thread in Path(f"/proc/{pid}/task").iterdir():
            ran, waited, *_ = (thread / "schedstat").read_text(encoding="ascii").split()
            nanoseconds += int(ran) + int(waited)
    return nanoseconds / 1e9


def stderr_of(pid: int) -> int:
    """Open that process's standard error, which may differ from its ranks' (torchrun --tee); return ours if it is the same."""
    theirs = Path(f"/proc/{pid}/fd/{STANDARD_ERROR}")
    with suppress(OSError):
        if not os.path.samestat(theirs.stat(), os.fstat(STANDARD_ERROR)):
            return os.open(theirs, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    return STANDARD_ERROR


def report_failed_run(folder: Path, seconds: float = REPORT_SECONDS) -> None:
    """Write report.md and report.html of a run directory that has a config, in a process, as a report may fail too.

    Raise nothing: an error is written to no-report.txt, since the verdict must stay the last lines on the screen.
    """
    if not (folder / "config.toml").is_file():
        return
    command = [sys.executable, str(ROOT / "launch" / "report.py"), str(folder)]
    # It is no rank: with this variable it would print an error again below torchrun's report.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, env=environment, timeout=seconds, **pipes)
        problem = (done.stderr or f"launch/report.py ended with {done.returncode}\n") if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}\n"
    if problem:
        with suppress(OSError):  # a full disk
            (folder / NO_REPORT).write_text(f"{problem}`python launch/report.py {folder}` makes the reports.\n")
