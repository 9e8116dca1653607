"""Run a command, and leave no process of it behind: neither when it ends or runs too long, nor when this process is killed.

run_tree() starts this file as a script, the supervisor: two processes that adopt every orphan of the command, and kill its
whole tree once it has ended, or once the pipe that run_tree() holds open closes. It is standard library only, and reads
/proc itself: it starts in 20 ms with -I -S, in the command's environment, which may hide the packages of this one.
"""

import ctypes
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TICK_SECONDS = 0.5
POLL_SECONDS, STACKS_SECONDS = 0.02, 10.0
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The terminal's are for the parent. A failing scheduler of SGLang sends SIGQUIT to its parent: an orphan's is the supervisor."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = "/dev/shm"
UNKNOWN_SECONDS = 3.0  # a process that has just started may be noted so long after its first file
CANNOT_START = 127
"""The exit code for a command that cannot be started, as in a shell."""

_prctl = ctypes.CDLL(None).prctl
# The inode in a line of /proc/PID/maps: address, permissions, offset, device, inode, path.
_MAPPED = re.compile(rf"^(?:\S+ ){{4}}(\d+) +{SHARED_MEMORY}/", re.MULTILINE)
_OF_TORCH = re.compile(r"torch_(\d+)_")  # torch puts the pid of the process that made a file into its name


class SupervisorKilled(RuntimeError):
    """The supervisor was killed before the command ended: by the command, or by the kernel for want of memory."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. A negative code is the number of the signal that killed it."""

    code: int
    timed_out: bool
    seconds: float


def run_tree(
    command: Sequence[str],
    *,
    output: int | IO[bytes],
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 0.0,
    grace: float = 5.0,
    inherit: Sequence[int] = (),
    tick: Callable[[], None] | None = None,
) -> Ended:
    """Run the command to its end, with both its streams in `output`; return when every process of it is gone.

    timeout: seconds, 0 for none; then its Python processes' stacks are printed and it gets SIGTERM, and SIGKILL after grace
    seconds. inherit: descriptors, of locks, that stay open until the tree is gone, even if this process dies first. tick:
    called twice a second; what it raises ends the command. Raises SupervisorKilled, OSError.
    """
    reading, writing = os.pipe()
    words = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).resolve()),
        str(writing),
        str(timeout),
        str(grace),
        *command,
    ]
    streams = {"stdin": subprocess.PIPE, "stdout": output, "stderr": output}
    with os.fdopen(reading, "rb") as result:
        try:
            supervisor = subprocess.Popen(words, **streams, env=env, cwd=cwd, pass_fds=(writing, *inherit))  # type: ignore[call-overload]
        finally:
            os.close(writing)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    supervisor.wait(TICK_SECONDS if tick else None)
                    break
                if tick:
                    tick()
        finally:
            supervisor.stdin.close()  # the supervisor kills what still runs, and ends
            supervisor.wait()
            written = result.read()  # to its end: until both processes of the supervisor are gone
    if not written:
        raise SupervisorKilled(f"the process that supervised {command[0]} was killed.")
    return Ended(**json.loads(written))


def _supervise(result: int, timeout: float, grace: float, command: list[str]) -> None:
    """Run the command in a second process like this one.

    Each of the two ends the tree if the command kills the other: this one as its subreaper, the second when its pipe closes.
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if second := os.fork():
        while os.waitpid(-1, 0)[0] != second:
            pass
        _kill_descendants()
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # is not inherited
    started, shared = time.monotonic(), SharedFiles()
    ended: tuple[int, bool] | None = (CANNOT_START, False)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_restore)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    else:
        ended = _wait(process.pid, started + (timeout or math.inf), grace, shared)
    seconds = time.monotonic() - started
    shared.look(descendants_of(os.getpid()))
    _kill_descendants()
    shared.remove()
    if ended:
        os.write(result, json.dumps({"code": ended[0], "timed_out": ended[1], "seconds": seconds}).encode())


def _restore() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _wait(pid: int, deadline: float, grace: float, shared: "SharedFiles") -> tuple[int, bool] | None:
    """Return the command's exit code, and whether the deadline passed first; None if no reader of these is left."""
    timed_out, looked = False, 0.0
    while not (select.select([sys.stdin], [], [], POLL_SECONDS)[0] and not os.read(0, 1)):
        now = time.monotonic()
        if now - looked > TICK_SECONDS:
            looked = now
            shared.look(descendants_of(os.getpid()))
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans too
                if ended[0] == pid:
                    return os.waitstatus_to_exitcode(ended[1]), timed_out
        if now > deadline:
            if timed_out:
                return -signal.SIGKILL, True
            timed_out = True
            _print_stacks()
            deadline = time.monotonic() + grace
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
    return None


def _print_stacks() -> None:
    """Print where every Python process of the command hangs, if py-spy is installed beside this Python."""
    spy = Path(sys.executable).with_name("py-spy")
    for pid in descendants_of(os.getpid()) if spy.exists() else ():
        with suppress(OSError, subprocess.TimeoutExpired):
            if Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("python"):
                subprocess.run([str(spy), "dump", "--pid", str(pid)], stdin=subprocess.DEVNULL, timeout=STACKS_SECONDS)


def _kill_descendants() -> None:
    """Kill and reap all descendants; an orphan becomes a child of this process."""
    while True:
        for pid in descendants_of(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def descendants_of(pid: int) -> set[int]:
    """Return the pids of all that the process, and what it started, has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = {pid}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


class SharedFiles:
    """The files in /dev/shm that appear from now on and are used by, or named after, a process of ours: (name, inode).

    They are noted while their processes are alive: a process that is killed removes none of its own.
    """

    def __init__(self) -> None:
        self.before = self.known = _shared_files()
        self.ours: set[tuple[str, int]] = set()
        self.pids: set[int] = set()  # of all processes of ours that were ever seen
        self._since: dict[tuple[str, int], float] = {}  # when a file of no known process was first seen

    def look(self, pids: Iterable[int]) -> None:
        """Note what these processes of ours use; a file that they do not use for UNKNOWN_SECONDS is another program's."""
        pids, there = set(pids), _shared_files()
        self.pids |= pids
        # What is gone is forgotten: every sync makes files, and the standby is sent all of ours once a second.
        self.ours, self.known = self.ours & there, self.known & there
        if new := there - self.known:
            used = _used_by(pids)
            self.ours |= {file for file in new if file[1] in used or self._is_of_torch(file)}
            now = time.monotonic()
            self._since = {file: self._since.get(file, now) for file in new}
            theirs = {file for file, since in self._since.items() if now - since > UNKNOWN_SECONDS}
            self.known = self.known | self.ours | theirs

    def remove(self) -> None:
        """Unlink, once our processes are dead, what no other process uses."""
        left = {file for file in _shared_files() - self.before if file in self.ours or self._is_of_torch(file)}
        used = _used_by({int(each.name) for each in Path("/proc").glob("[0-9]*")} - self.pids) if left else set()
        for name, inode in left:
            with suppress(OSError):
                if inode not in used:
                    os.unlink(f"{SHARED_MEMORY}/{name}")

    def _is_of_torch(self, file: tuple[str, int]) -> bool:
        match = _OF_TORCH.match(file[0])
        return match is not None and int(match[1]) in self.pids


def _shared_files() -> set[tuple[str, int]]:
    with os.scandir(SHARED_MEMORY) as files:
        return {(file.name, file.inode()) for file in files}


def _used_by(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the files that these processes map or have open, as far as that can be read."""
    used = set()
    for pid in pids:
        with suppress(OSError):  # it has just ended, or is another user's
            used |= {int(inode) for inode in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace"))}
            for link in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed in the meantime
                    if os.readlink(link.path).startswith(f"{SHARED_MEMORY}/"):
                        used.add(os.stat(link.path).st_ino)
    return used


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
