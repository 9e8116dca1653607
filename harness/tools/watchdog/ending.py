"""The end of everything that a run has on this host: ranks, what they started, torchrun if it stays, temporary files.

Processes end first; telling comes second. A screen or a run directory that blocks (a full pipe, a dead mount) delays
the end by seconds at most, because whatever may block runs on a thread that is left behind.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.runtime.errors import SPEAKS_LAST, STANDARD_ERROR, say
from harness.runtime.files import remove_run_folders, replace_file
from harness.runtime.processes import end_processes, in_background, is_alive, stat_fields
from harness.tools.environments import REPOSITORY
from harness.tools.run_tree import SharedFiles, with_variable
from harness.tools.watchdog.channel import WatchdogSettings
from harness.tools.watchdog.verdict import RunVerdict

MARK = "HARNESS_WATCHDOG"
"""Variable with the name of the watchdog, inherited by every process that a rank starts."""
WRITE_SECONDS = 1.0  # how long a screen may block
KEEP_SECONDS = 3.0  # how long the run directory may block
REPORT_SECONDS = 10.0  # reports take seconds on a busy machine; launch/torchrun.py waits 25 s for all of it
TORCHRUN_SECONDS = 60.0  # torchrun may stay so long after its ranks: a signal would change its exit code
STORE_LOST_SECONDS = 8.0  # the same after a host was lost: with its store there, it would stay for minutes
TERMINATE_SECONDS = 1.0  # from SIGTERM to SIGKILL
NO_REPORT = "no-report.txt"

_PARENT, _STARTED = 1, 19  # fields of /proc/PID/stat, counted from 0 after the name

Wait = Callable[[Callable[[], bool], float], None]
"""Wait until the condition holds, but no longer than so many seconds."""


def started_at(pid: int) -> int:
    """Return the start time in clock ticks since boot, which together with the pid names one process."""
    return int(stat_fields(pid)[_STARTED])


def is_stopped(pid: int, by_debugger: bool = True) -> bool:
    """Return whether the process got SIGSTOP or, if that counts, a debugger holds it."""
    return stat_fields(pid)[:1] in (["T"], ["t"] if by_debugger else ["T"])


@dataclass(slots=True)
class Descendants:
    """Everything that the ranks started, noted while the parents live: an orphan has another parent."""

    known: dict[int, psutil.Process] = field(default_factory=dict)
    rank_of: dict[int, int] = field(default_factory=dict)  # pid of each -> pid of the rank that it descends from

    def look(self, ranks: Iterable[int]) -> None:
        """Note the descendants of these pids, and forget those that have ended."""
        self.known = {pid: process for pid, process in self.known.items() if is_alive(process)}
        children: dict[int, list[int]] = {}
        for pid in psutil.pids():
            if fields := stat_fields(pid):
                children.setdefault(int(fields[_PARENT]), []).append(pid)
        waiting = [*ranks, *self.known]
        seen = set(waiting)
        while waiting:
            parent = waiting.pop()
            for pid in set(children.get(parent, [])) - seen:
                seen.add(pid)
                waiting.append(pid)
                with suppress(psutil.NoSuchProcess):
                    self.known[pid] = psutil.Process(pid)
                    self.rank_of[pid] = self.rank_of.get(parent, parent)

    def look_for_orphans(self, name: str) -> None:
        """Note what a rank of this watchdog started just before it died; forget what outlives the run on purpose."""
        self.known |= with_variable(MARK, name)
        for pid in (os.getpid(), *with_variable(SPEAKS_LAST, "1")):
            self.known.pop(pid, None)


def in_time(work: Callable[[], Any], seconds: float) -> bool:
    """Do the work on a thread, and return whether it was done within this time."""
    with suppress(NotInTimeError):
        in_background(work, "in time").result(seconds)
        return True
    return False


@dataclass(slots=True)
class HostCleanup:
    """What must be ended and removed on this host."""

    settings: WatchdogSettings
    ranks: Callable[[], Iterable[psutil.Process]]
    wait: Wait
    descendants: Descendants = field(default_factory=Descendants)
    shared: SharedFiles = field(default_factory=SharedFiles)

    def look(self) -> dict[int, psutil.Process]:
        """Note what the ranks have started, and the files that all use; return the ranks that are alive, by pid."""
        alive = {each.pid: each for each in self.ranks() if is_alive(each)}
        self.descendants.look(alive)
        self.shared.look([*alive, *self.descendants.known])
        return alive

    def end_ranks(self, seconds: float) -> None:
        """Give ranks this time to exit, end what is left of them and of what they started, and remove their files."""
        self.look()
        self.wait(lambda: not any(map(is_alive, self.ranks())), seconds)
        stubborn = self.look()
        self.descendants.look_for_orphans(self.settings.name)
        end_processes(stubborn | self.descendants.known)
        self.remove_files()

    def end_torchrun(self, torchrun: psutil.Process, seconds: float) -> None:
        """Give torchrun this time to report and exit; end it if it stays."""
        self.wait(lambda: not is_alive(torchrun), seconds)
        if is_alive(torchrun) and not any(map(_is_rank, torchrun.children())):
            who = f"torchrun on {self.settings.host} (pid {torchrun.pid})"
            say_in_time(f"{who} is still there {seconds:g} s after its ranks: ending it\n")
            with suppress(psutil.NoSuchProcess):
                torchrun.terminate()  # it removes its temporary files then
            self.wait(lambda: not is_alive(torchrun), TERMINATE_SECONDS)
            end_processes({torchrun.pid: torchrun})

    def remove_files(self) -> None:
        """Remove what the processes left in /dev/shm and in their temporary folders, once all have ended."""
        self.shared.remove()
        remove_run_folders(self.settings.name)


def _is_rank(child: psutil.Process) -> bool:
    """Return whether this child of torchrun is a live rank. A rank leads a session; a fork server does not."""
    with suppress(ProcessLookupError):
        return is_alive(child) and os.getsid(child.pid) == child.pid
    return False


def say_in_time(text: str, screen: int = STANDARD_ERROR) -> None:
    """Write to this descriptor, which may block for WRITE_SECONDS."""
    in_time(lambda: say(text, screen), WRITE_SECONDS)


def keep_and_report(verdict: RunVerdict, reports: bool) -> None:
    """Write the verdict to the run directory, then the reports of a run that failed, if the directory answers."""
    if not in_time(verdict.keep, KEEP_SECONDS):
        say_in_time(f"warning: the run directory does not answer: {verdict.folder}\n")
    elif reports and (folder := verdict.folder):
        in_time(lambda: report_failed_run(folder), REPORT_SECONDS + KEEP_SECONDS)


def report_failed_run(folder: Path, seconds: float = REPORT_SECONDS) -> None:
    """Write the reports of a run directory that has a config.

    An error goes to no-report.txt: the verdict must stay last on the screen.
    """
    if (folder / "config.toml").is_file() and (problem := write_reports(folder, seconds)):
        with suppress(OSError):  # a full disk
            replace_file(folder / NO_REPORT, problem)


def write_reports(folder: Path, seconds: float) -> str:
    """Write the reports of a run directory, in a process, because a report can fail too.

    Return why there are none and how to write them; "" if they are written.
    """
    command = [sys.executable, str(REPOSITORY / "launch" / "report.py"), str(folder)]
    # Not a rank: with this variable it would print an error again below torchrun's report.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, env=environment, timeout=seconds, **pipes)
        problem = (done.stderr or f"launch/report.py ended with {done.returncode}\n") if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}\n"
    return f"{problem}`{shlex.join(command)}` writes the reports.\n" if problem else ""
