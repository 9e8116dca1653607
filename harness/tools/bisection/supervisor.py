"""Runs one command to its end and leaves nothing of it behind, whatever ends this process or its parent. Standard library only.

    python supervisor.py RESULT.json SECONDS -- COMMAND ...

Standard input is a pipe whose other end the parent holds: when it closes, everything that the command started is killed.
So it is after the command's own end, and after SECONDS (0: never), once the stacks of its Pythons were shown and it had
GRACE_SECONDS from a SIGTERM. So are the files in /dev/shm that its processes used: who is killed removes none. RESULT.json: {"code", "timed_out", "seconds"}; a negative code is a signal's number.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS, POLL_SECONDS, SPY_SECONDS = 5.0, 0.02, 10.0
NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The terminal's are for the parent. SIGQUIT is what a failing scheduler of SGLang sends whoever has adopted it."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = "/dev/shm"
LOOK_SECONDS = 0.5


def main(result: Path, limit: float, command: list[str]) -> None:
    """Run it in a second process like this one, and end what is left should the command kill that: there is no result then. A
    command that kills this one finds the other, whose pipe is closed by the parent."""
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if not (watching := os.fork()):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # is not inherited
        _watch(result, limit, command)
        return
    while os.waitpid(-1, 0)[0] != watching:
        pass
    _end_all()


def _watch(result: Path, limit: float, command: list[str]) -> None:
    """Does not raise for a command that cannot start: its code is 127, as a shell has it."""
    started = time.monotonic()
    shared = SharedMemory()
    code, timed_out = 127, False
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_restore)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    else:
        code, timed_out = _wait(process.pid, started + limit if limit else None, shared)
    seconds = time.monotonic() - started
    _kill_all(shared)
    temporary = result.with_suffix(".new")
    temporary.write_text(json.dumps({"code": code, "timed_out": timed_out, "seconds": seconds}))
    os.replace(temporary, result)


def _restore() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_DFL)


class SharedMemory:
    """Files in /dev/shm that processes of the command map, by inode: whose they are is known only while these live."""

    def __init__(self) -> None:
        self.before = self._inodes()
        self.ours: dict[str, int] = {}
        self.looked = 0.0

    def look(self, least_seconds: float = 0.0) -> None:
        """Note what is new and ours; nothing where it was looked for in these last seconds."""
        if time.monotonic() - self.looked < least_seconds:
            return
        self.looked = time.monotonic()
        known = set((self.before | self.ours).items())
        if new := dict(set(self._inodes().items()) - known):
            used = self._used_by(_tree(os.getpid()))
            self.ours.update({name: inode for name, inode in new.items() if inode in used})

    def remove(self) -> None:
        """Once the command's processes are dead: remove what is left of it, save what another process maps."""
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
            return {}  # there is none on this system

    def _used_by(self, pids: Iterable[int]) -> set[int]:
        used = set()
        for pid in pids:
            with suppress(OSError):  # it has just ended, or is another user's
                for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                    fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
                    if fields[-1].startswith(f"{SHARED_MEMORY}/"):
                        used.add(int(fields[4]))
        return used


def _wait(pid: int, deadline: float | None, shared: SharedMemory) -> tuple[int, bool]:
    """Exit code, and whether the deadline passed first."""
    timed_out = False
    while True:
        shared.look(LOOK_SECONDS)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans too: they are ours
                if ended[0] == pid:
                    return os.waitstatus_to_exitcode(ended[1]), timed_out
        if deadline and time.monotonic() > deadline:
            if timed_out:
                return -signal.SIGKILL, True
            timed_out = True
            _show_stacks()
            deadline = time.monotonic() + GRACE_SECONDS
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0] and not os.read(0, 1):
            _kill_all(shared)
            os._exit(1)  # no result: nobody is left to read it


def _show_stacks() -> None:
    """Where every Python of the command hangs, by the py-spy beside this Python; nothing without it."""
    spy = Path(sys.executable).with_name("py-spy")
    for pid in _tree(os.getpid()) if spy.exists() else ():
        with suppress(OSError, subprocess.TimeoutExpired):
            if Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("python"):
                subprocess.run([str(spy), "dump", "--pid", str(pid)], stdin=subprocess.DEVNULL, timeout=SPY_SECONDS)


def _tree(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (child, *_tree(child))]


def _kill_all(shared: SharedMemory) -> None:
    """Kill and reap all descendants, and remove what they shared."""
    shared.look()
    _end_all()
    shared.remove()


def _end_all() -> None:
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


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[4:])
