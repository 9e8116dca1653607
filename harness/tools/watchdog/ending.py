"""The end of everything that a run has on this host: ranks, what they started, torchrun if it stays, temporary files.

The host's watchdog sees to it, or one of the ranks if the watchdog itself has died (LostWatchdog).

Processes end first; telling comes second. A screen or a run directory that blocks (a full pipe, a dead mount) delays
the end by seconds at most, because whatever may block runs on a thread that is left behind.
"""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.runtime.errors import SPEAKS_LAST, STANDARD_ERROR, say, say_twice
from harness.runtime.events import unix_seconds
from harness.runtime.files import remove_run_folders, replace_file
from harness.runtime.processes import descendants_since, end_processes, in_background, is_alive, stat_fields
from harness.tools.environments import REPOSITORY
from harness.tools.run_tree import SharedFiles, with_variable
from harness.tools.watchdog.channel import LAST_BEAT, Heartbeats, Met, WatchdogSettings, open_heartbeat_socket
from harness.tools.watchdog.deaths import ExitWatch
from harness.tools.watchdog.failures import JobView, Place, RunFailure
from harness.tools.watchdog.verdict import RunVerdict

MARK = "HARNESS_WATCHDOG"
"""Variable with the name of the watchdog, inherited by every process that a rank starts."""
WRITE_SECONDS = 1.0  # how long a screen may block
KEEP_SECONDS = 3.0  # how long the run directory may block
REPORT_SECONDS = 5.0  # reports take seconds on a busy machine; everything must be gone within 15
TORCHRUN_SECONDS = 8.0  # torchrun may stay so long after its ranks; with its store on a lost host, it stays for minutes
TERMINATE_SECONDS = 1.0  # from SIGTERM to SIGKILL
SETTLE_SECONDS = 0.5  # from the watchdog's end to the verdict: another rank may have died together with it
CLEANUP_SECONDS = 2.0  # how long the ranks of a host take, together, to end without their watchdog
POLL_SECONDS = 0.02
NO_REPORT = "no-report.txt"

_PARENT, _STARTED = 1, 19  # fields of /proc/PID/stat, counted from 0 after the name
_SIG_IGN = 1

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
    """What must be ended and kept on this host, by its watchdog or by a rank in the watchdog's place."""

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

    def end_torchrun(self, torchrun: psutil.Process) -> None:
        """Give torchrun the time to report and exit; end it if it stays."""
        self.wait(lambda: not is_alive(torchrun), TORCHRUN_SECONDS)
        if is_alive(torchrun) and not any(map(_is_rank, torchrun.children())):
            who = f"torchrun on {self.settings.host} (pid {torchrun.pid})"
            say_in_time(f"{who} is still there {TORCHRUN_SECONDS:g} s after its ranks: ending it\n")
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


@dataclass(frozen=True, slots=True)
class LostWatchdog:
    """What a rank knows when its watchdog is gone: nothing else would notice now that the run hangs.

    Each rank ends what it has started, and exits. The first rank that can still act does so last: it reports the
    failure in the place of the watchdog, ends the ranks that stay (a stopped one would stay for 30 s), and removes what
    they leave.
    """

    settings: WatchdogSettings
    pid: int  # of the watchdog
    rank: int
    place: Place
    others: Mapping[int, psutil.Process]  # the other ranks of this host, by rank; none before all have met
    met: Met | None

    def leave(self) -> None:
        """Do what this rank has to do before it exits, in about CLEANUP_SECONDS.

        torchrun ends all ranks as soon as one has exited, so they wait for each other.
        """
        _ignore_ending_signals()
        until = time.monotonic() + CLEANUP_SECONDS
        exits = {rank: ExitWatch(process.pid) for rank, process in self.others.items()}
        cleanup = HostCleanup(self.settings, self.others.values, _wait)
        cleanup.look()
        end_processes(descendants_since(()))
        # Only now, because a full pipe or a dead disk may block from here on.
        said = f"rank {self.rank} FAILED: the watchdog of {self.settings.host} is gone, so this rank exits too\n"
        in_time(lambda: say(said), SETTLE_SECONDS)
        time.sleep(max(0.0, until - CLEANUP_SECONDS + SETTLE_SECONDS - time.monotonic()))
        _wait(self._is_first, until - time.monotonic())
        if not self._is_first():
            return
        verdict = self._verdict(exits)
        self._tell_other_hosts(verdict.cause)
        in_time(lambda: say_twice(verdict.text(f"rank {self.rank}")), SETTLE_SECONDS)
        cleanup.end_ranks(until - time.monotonic())
        keep_and_report(verdict, reports=min([self.rank, *self.others]) == 0)

    def _is_first(self) -> bool:
        """Return whether no other rank with a lower number can act."""
        return not any(
            rank < self.rank and is_alive(each) and not is_stopped(each.pid) for rank, each in self.others.items()
        )

    def _verdict(self, exits: Mapping[int, ExitWatch]) -> RunVerdict:
        """Return what happened, with the other ranks that ended or are stopped. Most wait, as this one does."""
        ends = {rank: exits[rank].how or "died" for rank, each in self.others.items() if not is_alive(each)}
        ends |= {rank: "is stopped" for rank, each in self.others.items() if is_stopped(each.pid)}
        with_it = "".join(f", and rank {rank} {how}" for rank, how in sorted(ends.items()))
        host, now = self.settings.host, unix_seconds()
        detail = f"(pid {self.pid}) is gone{with_it}"
        failure = RunFailure(kind="watchdog", time=now, host=host, ranks=(self.rank,), place=self.place, detail=detail)
        places, world_size = {self.rank: self.place}, self.settings.world_size
        view = JobView(now=now, world_size=world_size, places=places, hosts={self.rank: host})
        folder, name = (Path(self.met.folder), self.met.launcher) if self.met else (None, "")
        return RunVerdict(name, folder, [failure], view)

    def _tell_other_hosts(self, failure: RunFailure) -> None:
        if self.met and len(self.met.nodes) > 1:
            seconds = self.settings.heartbeat_timeout
            beats = Heartbeats(open_heartbeat_socket(), self.met, seconds, unix_seconds, count=LAST_BEAT)
            beats.say_farewell({self.rank: self.place}, [failure])


def _wait(holds: Callable[[], bool], seconds: float) -> None:
    """Return once the condition holds, or after so many seconds."""
    given_up = time.monotonic() + seconds
    while not holds() and time.monotonic() < given_up:
        time.sleep(POLL_SECONDS)


def _ignore_ending_signals() -> None:
    """Ignore what torchrun sends when another rank of the host has ended. Python can do so in the main thread only."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        libc.signal(number, _SIG_IGN)
