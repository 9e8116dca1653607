"""The end of all that a run has on this host: ranks, what they started, torchrun if it stays, and temporary files.

Ending waits for no screen and no run directory: what may block is done on threads, and costs seconds at most.
"""

import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.runtime import scratch
from harness.runtime.errors import say
from harness.runtime.processes import end_processes, is_alive, shared_memory_files, started_at
from harness.tools.watchdog.failures import Place, RunFailure
from harness.tools.watchdog.host_processes import Descendants
from harness.tools.watchdog.launcher import RankLauncher, Wait
from harness.tools.watchdog.verdict import RunVerdict

LEAVE_SECONDS = 2.0  # from the order to exit to SIGKILL
WRITE_SECONDS = 1.0  # a terminal, or a full pipe without a reader, may delay the verdict for so long
KEEP_SECONDS = 3.0  # the run directory, which may be a dead mount, may delay it for so long once all has ended
REPORT_SECONDS = 5.0  # reports take seconds on a busy machine; all of a run must be gone within 15
NO_REPORT = "no-report.txt"
SHARED_MEMORY = Path("/dev/shm")
_TORCH_FILE = re.compile(r"torch_(\d+)_")  # torch puts the pid of the process that made a file into its name
STANDARD_ERROR = 2
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a standby needs to end and to report a run in the place of its watchdog, which sends it once a second."""

    folder: Path | None = None  # the run directory
    ranks: Mapping[int, tuple[int, Place]] = field(default_factory=dict)  # pid and place of the ranks that are alive
    started: Mapping[int, int] = field(default_factory=dict)  # pid -> start time: with it, no other process's
    shared: Mapping[str, int] = field(default_factory=dict)  # name -> inode of the files in /dev/shm
    failures: Sequence[RunFailure] = ()

    def send(self, line: socket.socket) -> None:
        """Send it to the standby, without blocking."""
        with suppress(OSError):  # it is gone or stopped, and ends nothing
            line.send(pickle.dumps(self), socket.MSG_DONTWAIT)

    def processes(self) -> dict[int, psutil.Process]:
        """Return the processes that are still there, ranks included, by pid."""
        found = {}
        for pid, ticks in self.started.items():
            with suppress(IndexError, psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if started_at(pid) == ticks:
                    found[pid] = process
        return found


def _inodes() -> dict[str, int]:
    with os.scandir(SHARED_MEMORY) as files:
        return {file.name: file.inode() for file in files}


def _used_by(pids: Iterable[int]) -> set[str]:
    """Return the names of the files that these processes map or have open, as far as that can be read."""
    pids = set(pids)
    names = {file.name for file in shared_memory_files(pids)}
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for link in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed in the meantime
                    folder, _, name = os.readlink(link.path).rpartition("/")
                    names |= {name} if folder == str(SHARED_MEMORY) else set()
    return names


@dataclass(slots=True)
class SharedMemoryFiles:
    """The files in /dev/shm that appeared since this was made and are used by, or named after, a process of ours.

    They are noted while their processes are alive: a process that is killed removes none of its own.
    """

    before: dict[str, int] = field(default_factory=_inodes)  # name -> inode: never ours while the inode is the same
    ours: dict[str, int] = field(default_factory=dict)
    theirs: dict[str, int] = field(default_factory=dict)  # not used by us when new: its maker maps a file at once
    pids: set[int] = field(default_factory=set)  # of all processes of ours that were ever seen
    _seen_once: dict[str, int] = field(default_factory=dict)

    def look(self, pids: Iterable[int]) -> None:
        """Note what these processes of ours map; read their maps only if there is a file of unknown owner."""
        pids = set(pids)
        self.pids |= pids
        known = set((self.before | self.theirs | self.ours).items())
        if unknown := set(_inodes().items()) - known:
            mapped = _used_by(pids)
            for name, inode in unknown:
                if name in mapped or self._is_of_torch(name):
                    self.ours[name] = inode
                elif self._seen_once.get(name) == inode:
                    self.theirs[name] = inode
                else:  # it may be a moment old, and not mapped yet
                    self._seen_once[name] = inode

    def remove(self) -> list[str]:
        """Unlink, once our processes are dead, what no other process uses; return the names."""
        left = {
            name
            for name, inode in _inodes().items()
            if inode != self.before.get(name) and (self.ours.get(name) == inode or self._is_of_torch(name))
        }
        left -= _used_by(set(psutil.pids()) - self.pids) if left else set()
        for name in left:
            with suppress(FileNotFoundError):
                (SHARED_MEMORY / name).unlink()
        return sorted(left)

    def _is_of_torch(self, name: str) -> bool:
        match = _TORCH_FILE.match(name)
        return match is not None and int(match[1]) in self.pids


@dataclass(slots=True)
class HostCleanup:
    """What must be ended on this host, and how."""

    name: str  # of the watchdog, which all that a rank starts has in its environment
    host: str
    launcher: RankLauncher
    wait: Wait
    descendants: Descendants = field(default_factory=Descendants)
    shared: SharedMemoryFiles = field(default_factory=SharedMemoryFiles)
    _folder_answers: bool = True
    _screen: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "screen"))
    _folder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "folder"))

    def say(self, text: str, screen: int = STANDARD_ERROR) -> Future[None]:
        """Write to this descriptor, on a thread."""
        return self._screen.submit(say, text, screen)

    def look_at_memory(self, ranks: Iterable[int]) -> None:
        self.shared.look([*ranks, *self.descendants.known])

    def snapshot(
        self, folder: Path | None, ranks: Mapping[int, tuple[int, Place]], failures: Sequence[RunFailure]
    ) -> Snapshot:
        """Return what a standby would have to end and report now. ranks: pid and place of each."""
        started = {}
        for pid in [*(pid for pid, _ in ranks.values()), *self.descendants.known]:
            with suppress(IndexError):  # it has just ended
                started[pid] = started_at(pid)
        return Snapshot(folder, ranks, started, dict(self.shared.ours), tuple(failures))

    def end_and_report(
        self, verdict: RunVerdict, screen: int, ranks: Iterable[psutil.Process], all_gone: Callable[[], bool]
    ) -> None:
        """Print the verdict, end all, and print it again on screen, torchrun's, if that wrote anything; keep it."""
        ranks = list(ranks)
        torchrun_reports = self.launcher.is_torchrun and self.launcher.is_alive()
        quiet = not any(map(is_alive, [*ranks, *self.descendants.known.values()]))
        _wait_for(self._folder.submit(verdict.look_at_folder), WRITE_SECONDS)
        _wait_for(self.say(verdict.text()), WRITE_SECONDS)
        written = self.launcher.bytes_written()
        kept = self._folder.submit(verdict.keep)
        self._end_all(ranks, all_gone)
        if torchrun_reports and not (quiet and self.launcher.wrote_nothing_since(written)):
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
            self.look_at_memory(left)
            return left

        alive()
        self.wait(all_gone, LEAVE_SECONDS)
        stubborn = alive()
        self.descendants.look_for_orphans(self.name)
        stubborn = {pid: process for pid, process in stubborn.items() if is_alive(process)}
        end_processes(stubborn | self.descendants.known, patience_seconds=0)
        self.remove_files()
        self.launcher.end(self.host, self.say, self.wait)

    def remove_files(self) -> None:
        """Remove, once all have ended, what they left in /dev/shm and in their temporary folders."""
        self.shared.remove()
        scratch.remove(self.name)

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
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        done = subprocess.run(command, env=environment, text=True, errors="replace", timeout=seconds, **pipes)
        ended = f"launch/report.py ended with {done.returncode}\n"
        problem = (done.stderr or ended) if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}\n"
    if problem:
        with suppress(OSError):  # a full disk
            (folder / NO_REPORT).write_text(f"{problem}`python launch/report.py {folder}` makes the reports.\n")
