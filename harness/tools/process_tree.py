"""Run a command, and leave no process of it behind: neither when it ends or runs too long, nor when this process is killed.

run_tree() starts this file as a script, the supervisor: two processes that adopt every orphan of the command
(PR_SET_CHILD_SUBREAPER). Their standard input is a pipe that run_tree() holds open; when it closes, because run_tree() was
interrupted or this process died, they kill the command's whole tree. They do the same once the command itself has ended, and
after the timeout, when they first print the stacks of its Python processes and send SIGTERM. The files in /dev/shm that the
tree used are removed too, because a killed process removes none.

The supervisor is standard library only, and reads /proc itself instead of using psutil: it starts in 20 ms with -I -S, in
the command's environment, which may hide the packages of this one.
"""

import ctypes
import json
import os
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

GRACE_SECONDS = 5.0
TICK_SECONDS = 0.5
POLL_SECONDS, STACKS_SECONDS = 0.02, 10.0
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The terminal's are for the parent. A failing scheduler of SGLang sends SIGQUIT to its parent: an orphan's is the supervisor."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = "/dev/shm"
SCRIPT = str(Path(__file__).resolve())
CANNOT_START = 127
"""The exit code for a command that cannot be started, as in a shell."""


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
    grace: float = GRACE_SECONDS,
    inherit: Sequence[int] = (),
    tick: Callable[[], None] | None = None,
) -> Ended:
    """Run the command to its end, with both its streams in `output`; return when every process of it is gone.

    timeout: seconds, 0 for none; grace: seconds between SIGTERM and SIGKILL after it. inherit: descriptors, of locks, that
    stay open until the tree is gone, even if this process dies first. tick: called twice a second; what it raises ends the
    command. Raises SupervisorKilled, OSError.
    """
    reading, writing = os.pipe()
    words = [sys.executable, "-I", "-S", SCRIPT, str(writing), str(timeout), str(grace), "--", *command]
    with os.fdopen(reading, "rb") as result:
        try:
            supervisor = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                cwd=cwd,
                pass_fds=(writing, *inherit),
            )
        finally:
            os.close(writing)
        assert supervisor.stdin is not None
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
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if not (second := os.fork()):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # is not inherited
        os.write(result, json.dumps(_run(timeout, grace, command)).encode())
        return
    while os.waitpid(-1, 0)[0] != second:
        pass
    _kill_descendants()


def _run(timeout: float, grace: float, command: list[str]) -> dict[str, object]:
    """Return the fields of Ended, once the whole tree is gone."""
    started = time.monotonic()
    shared = _SharedFiles()
    code, timed_out = CANNOT_START, False
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_restore)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    else:
        code, timed_out = _wait(process.pid, started + timeout if timeout else None, grace, shared)
    seconds = time.monotonic() - started
    _end_tree(shared)
    return {"code": code, "timed_out": timed_out, "seconds": seconds}


def _restore() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _wait(pid: int, deadline: float | None, grace: float, shared: "_SharedFiles") -> tuple[int, bool]:
    """Return the command's exit code, and whether the deadline passed first."""
    timed_out = False
    while True:
        shared.look(TICK_SECONDS)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans too
                if ended[0] == pid:
                    return os.waitstatus_to_exitcode(ended[1]), timed_out
        if deadline and time.monotonic() > deadline:
            if timed_out:
                return -signal.SIGKILL, True
            timed_out = True
            _print_stacks()
            deadline = time.monotonic() + grace
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0] and not os.read(0, 1):
            _end_tree(shared)
            os._exit(1)  # without a result: no reader is left


def _print_stacks() -> None:
    """Print where every Python process of the command hangs, if py-spy is installed beside this Python."""
    spy = Path(sys.executable).with_name("py-spy")
    for pid in _descendants(os.getpid()) if spy.exists() else ():
        with suppress(OSError, subprocess.TimeoutExpired):
            if Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("python"):
                subprocess.run([str(spy), "dump", "--pid", str(pid)], stdin=subprocess.DEVNULL, timeout=STACKS_SECONDS)


def _end_tree(shared: "_SharedFiles") -> None:
    shared.look()
    _kill_descendants()
    shared.remove()


def _kill_descendants() -> None:
    """Kill and reap all descendants; an orphan becomes a child of this process."""
    while True:
        for pid in _children(os.getpid()):
            _kill_tree(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_tree(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # so that it starts nothing more
    for child in _children(pid):
        _kill_tree(child)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (child, *_descendants(child))]


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


class _SharedFiles:
    """Files in /dev/shm that processes of the command map, by inode: their owner is known only while these processes live."""

    def __init__(self) -> None:
        self.before = self._inodes()
        self.ours: dict[str, int] = {}
        self.looked = 0.0

    def look(self, least_seconds: float = 0.0) -> None:
        """Note which new files are the command's, unless that was done within these last seconds."""
        if time.monotonic() - self.looked < least_seconds:
            return
        self.looked = time.monotonic()
        known = set((self.before | self.ours).items())
        if new := dict(set(self._inodes().items()) - known):
            used = self._used_by(_descendants(os.getpid()))
            self.ours.update({name: inode for name, inode in new.items() if inode in used})

    def remove(self) -> None:
        """Remove what the dead processes of the command left, save what another process maps."""
        here = self._inodes()
        if left := {name: inode for name, inode in self.ours.items() if here.get(name) == inode}:
            used = self._used_by(int(each.name) for each in Path("/proc").glob("[0-9]*"))
            for name, inode in left.items():
                with suppress(OSError):
                    if inode not in used:
                        os.unlink(f"{SHARED_MEMORY}/{name}")

    def _inodes(self) -> dict[str, int]:
        try:
            with os.scandir(SHARED_MEMORY) as files:
                return {file.name: file.inode() for file in files}
        except OSError:
            return {}  # this system has no such folder

    def _used_by(self, pids: Iterable[int]) -> set[int]:
        used = set()
        for pid in pids:
            with suppress(OSError):  # it has just ended, or is another user's
                for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                    fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
                    if fields[-1].startswith(f"{SHARED_MEMORY}/"):
                        used.add(int(fields[4]))
        return used


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[5:])
