"""Processes of this host: find what a process has started, end it, and remove what it left in /dev/shm.

A pid alone does not name a process for long, because the kernel reuses it. psutil.Process compares start times too.

run_tree() runs a command and leaves nothing of it behind. It starts this file as a script, the supervisor, so this file
must not import anything of harness. forked_tree.py does the same with a supervisor and a program that are forked.
"""

import ctypes
import fcntl
import json
import math
import os
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

END_SECONDS = 10.0
"""How long a process may take to end after SIGKILL."""
EXEC_SECONDS = 0.1
"""How long an exec may show no environment."""
POLL_SECONDS = 0.05
LOOK_SECONDS = 0.5
"""How often a supervisor lists the processes of its command, and run_tree() calls its tick."""
STACKS_SECONDS = 10.0
UNKNOWN_SECONDS = 3.0
"""A file in /dev/shm that none of our processes uses for so long belongs to another program."""
CANNOT_START = 127
"""The exit code for a command that cannot be started, as in a shell."""
TREE = "HARNESS_TREE"
"""Variable by which run_tree() finds the processes of a command whose supervisor was killed."""
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a supervisor ignores. Ctrl-C is for the process that called run_tree(). A scheduler of SGLang that fails
sends SIGQUIT to its parent, and the parent of an orphan is the supervisor."""

_SHARED_MEMORY = "/dev/shm"
_STATE, _START, _EXIT_CODE = 0, 19, 49  # fields of /proc/PID/stat, counted from 0 after the name
# The inode in a line of /proc/PID/maps: address, permissions, offset, device, inode, path.
_MAPPED = re.compile(rf"^(?:\S+ ){{4}}(\d+) +{_SHARED_MEMORY}/", re.MULTILINE)
_MAPPED_FOR_WRITING = re.compile(rf"^\S+ .w.s (?:\S+ ){{2}}(\d+) +{_SHARED_MEMORY}/", re.MULTILINE)
_OF_TORCH = re.compile(r"torch_(\d+)_")  # torch puts the pid of the process that made a file into the file's name
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_AT_FDCWD, _STATX_BTIME, _STATX_BYTES, _STATX_BTIME_OFFSET = -100, 0x800, 256, 0x50  # of statx(2)
_PRCTL = {"PR_SET_PDEATHSIG": 1, "PR_SET_TIMERSLACK": 29, "PR_SET_CHILD_SUBREAPER": 36}
"""Linux's numbers, from <sys/prctl.h>."""
# From <linux/pidfd.h> of Linux 6.15: the request, its flag for the exit code, and struct pidfd_info, whose first field
# has the flags and whose last one has the code. The request's number contains the size of the structure.
_PIDFD_INFO_EXIT, _PIDFD_INFO = 1 << 3, struct.Struct("QQ11Ii")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class SupervisorKilled(RuntimeError):
    """The supervisor was killed before the command ended: by the command, or by the kernel for lack of memory."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. A negative code is the number of the signal that killed it."""

    code: int
    timed_out: bool
    seconds: float


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process still runs: not a zombie, and not another process that got the same pid."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name, state first; none once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_status(pid: int) -> int | None:
    """Return the status that waitpid() gives for a zombie, without waiting for it; None if it is alive, or has been
    reaped.

    waitpid() itself gives nothing while other threads of the process are still ending.
    """
    fields = stat_fields(pid)
    return int(fields[_EXIT_CODE]) if fields and fields[_STATE] == "Z" else None


def status_after_reaping(pidfd: int) -> int | None:
    """Return the status of a process whose parent has waited for it; None before that, and before Linux 6.15.

    pidfd: a descriptor from os.pidfd_open(), made while the process existed.
    """
    try:
        answer = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    except OSError:  # before 6.15; or the process has ended, and nobody has waited for it
        return None
    flags, *_, status = _PIDFD_INFO.unpack(answer)
    return int(status) if flags & _PIDFD_INFO_EXIT else None


def descendants() -> dict[int, psutil.Process]:
    """Return the children of this process, and theirs, by pid."""
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


def with_variable(name: str, value: str) -> dict[int, psutil.Process]:
    """Return the processes of this user that were started with this environment variable, by pid.

    A process can overwrite its environment, as SGLang's schedulers do when they set their title.
    """
    wanted, found = f"{name}={value}".encode(), {}
    unclear = psutil.pids()
    for seconds in (0.0, EXEC_SECONDS):
        if unclear:
            time.sleep(seconds)
        pids, unclear = unclear, []
        for pid in pids:
            with suppress(OSError, psutil.NoSuchProcess):  # it has just ended, or is another user's
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if wanted in environment.split(b"\0"):
                    found[pid] = psutil.Process(pid)
                # In the middle of an exec there is none, although the process's parent goes on already. Threads of the
                # kernel never have one, and no program either.
                if not environment and os.path.exists(f"/proc/{pid}/exe"):
                    unclear.append(pid)
    return found


def is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether it is multiprocessing's resource tracker, which cleans up /dev/shm after its parent has ended."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def name_and_pid(process: psutil.Process) -> str:
    """Return "name (pid 7)", for messages."""
    with suppress(psutil.Error):
        return f"{process.name()} (pid {process.pid})"
    return f"a process (pid {process.pid})"


def descendants_since(before: Collection[int]) -> dict[int, psutil.Process]:
    """Return the descendants of this process whose pids are not in `before`.

    Without multiprocessing's resource tracker: it ends by itself, after this process.
    """
    return {pid: child for pid, child in descendants().items() if pid not in before and not is_resource_tracker(child)}


def end_processes(processes: Mapping[int, psutil.Process], stop: Callable[[], None] | None = None) -> None:
    """Call stop(), then kill what is left of these processes, and return when all are gone.

    The files that they made in /dev/shm (25 MB for each engine) go too, except those that this process uses itself.
    """
    files = _made_by(processes)  # stop() may end processes without removing them
    try:
        if stop:
            stop()
    finally:
        _kill(processes, files)


def _kill(processes: Mapping[int, psutil.Process], files: set[Path]) -> None:
    """Kill what is left of these processes, and remove these files and those that they made since."""
    alive = [process for process in processes.values() if is_alive(process)]
    _signal_all(alive, signal.SIGSTOP)  # from now on none makes a new file, or reacts to the end of another one
    files |= _made_by(processes)
    files -= shared_memory_files([os.getpid()])
    for file in files:  # before their ends: if we are killed here, others still see by these processes what to remove
        file.unlink(missing_ok=True)
    _signal_all(alive, signal.SIGKILL)
    _wait_for_end(alive, END_SECONDS)


def _signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has just ended, or has become another user's (sudo)
            process.send_signal(number)


def _wait_for_end(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended, for so many seconds at most. Reap our children.

    psutil.wait_procs alone would wait for zombies too, and in a container whose process 1 reaps nothing they stay.
    """
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    psutil.wait_procs(processes, timeout=0)


def shared_memory_files(pids: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that these processes use."""
    used = _used_by(pids)
    return {Path(_SHARED_MEMORY, name) for name, inode in _shared_files() if inode in used}


def _shared_files() -> set[tuple[str, int]]:
    with os.scandir(_SHARED_MEMORY) as files:
        return {(file.name, file.inode()) for file in files}


def _made_by(pids: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that these processes use and that are younger than one of those that use them.

    Any other is somebody else's, such as a model that a user keeps there. Both times are known up to a tick of the
    kernel; a file that was made in the same tick is the process's own if it writes to it. If the clock has been set
    since this process began, it is not known which is younger: then none counts, because a file that stays is the
    smaller harm.
    """
    if abs(_booted() - _BOOTED) > 2 * _TICK_SECONDS:
        return set()
    there, found = {Path(_SHARED_MEMORY, name): inode for name, inode in _shared_files()}, set()
    for pid in pids:
        used, written = _used_by([pid]), _used_by([pid], for_writing=True)
        for file, inode in there.items():
            with suppress(OSError, ValueError):  # the file has just been removed, or the process has just ended
                age = _born_at(file) - start_time(pid) if inode in used else -math.inf
                if age > _TICK_SECONDS or (age > -_TICK_SECONDS and inode in written):
                    found.add(file)
    return found


def _born_at(file: Path) -> float:
    """Return when the file was made, in UNIX seconds. Raise OSError."""
    buffer = (ctypes.c_uint8 * _STATX_BYTES)()
    if ctypes.CDLL(None, use_errno=True).statx(_AT_FDCWD, os.fsencode(file), 0, _STATX_BTIME, buffer):
        raise OSError(ctypes.get_errno(), f"statx {file}")
    if int.from_bytes(buffer[:4], sys.byteorder) & _STATX_BTIME:
        seconds, nanoseconds = struct.unpack_from("=qI", buffer, _STATX_BTIME_OFFSET)
        return float(seconds + nanoseconds / 1e9)
    return file.stat().st_ctime  # an older kernel: when it last changed


def start_time(pid: int) -> float:
    """Return when the process was started, in UNIX seconds, up to a tick too early.

    Raise ValueError if it has ended.
    """
    if not (fields := stat_fields(pid)):
        raise ValueError(f"process {pid} has ended")
    return _booted() + int(fields[_START]) * _TICK_SECONDS


def _booted() -> float:
    """Return when this machine was started, in UNIX seconds, by the clock as it is set now."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


_BOOTED = _booted()


def _used_by(pids: Iterable[int], for_writing: bool = False) -> set[int]:
    """Return the inodes of the files in /dev/shm that these processes map or have open, as far as we may read that.

    Not names: sem_open() makes a semaphore under another name than it then gives it. Not psutil's memory_maps(), which
    adds up every page.
    """
    used, mapped = set(), _MAPPED_FOR_WRITING if for_writing else _MAPPED
    for pid in pids:
        with suppress(OSError):  # it has just ended, or is another user's
            used |= {int(inode) for inode in mapped.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace"))}
            for link in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed in the meantime
                    counts = not for_writing or os.lstat(link.path).st_mode & stat.S_IWUSR
                    if counts and os.readlink(link.path).startswith(f"{_SHARED_MEMORY}/"):
                        used.add(os.stat(link.path).st_ino)
    return used


@dataclass(slots=True)
class SharedFiles:
    """The files in /dev/shm, as (name, inode), that appear from now on and that our processes use.

    They must be noted while the processes live: a process that is killed removes nothing, and then nobody knows what it
    used.
    """

    ours: set[tuple[str, int]] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    """All processes of ours that were ever seen."""
    _not_ours: set[tuple[str, int]] = field(default_factory=_shared_files)
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    """When a file that none of our processes uses was first seen."""

    def sees_new(self) -> bool:
        """Return whether there are files whose users look() has not found."""
        return not _shared_files() <= self.ours | self._not_ours

    def look(self, pids: Iterable[int]) -> None:
        """Note the new files that these processes of ours use."""
        pids, there, now = set(pids), _shared_files(), time.monotonic()
        self.pids |= pids
        self.ours &= there  # each sync makes files and removes them
        self._not_ours &= there
        if new := there - self.ours - self._not_ours:
            used = _used_by(pids)
            self.ours |= {file for file in new if file[1] in used or self._is_of_torch(file)}
            self._since = {file: self._since.get(file, now) for file in new - self.ours}
            # Not looked at again: reading the maps of every scheduler takes milliseconds.
            self._not_ours |= {file for file, since in self._since.items() if now - since > UNKNOWN_SECONDS}

    def remove(self) -> None:
        """Remove, once our processes are dead, what no other process uses."""
        left = {file for file in _shared_files() if file in self.ours or self._is_of_torch(file)}
        used = _used_by(set(psutil.pids()) - self.pids) if left else set()
        for name, inode in left:
            if inode not in used:
                with suppress(OSError):
                    os.unlink(f"{_SHARED_MEMORY}/{name}")

    def _is_of_torch(self, file: tuple[str, int]) -> bool:
        match = _OF_TORCH.match(file[0])
        return match is not None and int(match[1]) in self.pids and file not in self._not_ours


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
    """Run the command with both its streams in `output`. Return once it has ended and everything it started is gone.

    timeout: in seconds, 0 for none. After it the command's Python stacks are printed, it gets SIGTERM, and SIGKILL
    after `grace` seconds. inherit: descriptors (of locks) that stay open until the tree is gone, even if this process
    dies first. tick: called twice a second; what it raises ends the command. Raise SupervisorKilled, OSError.
    """

    def start(environment: Mapping[str, str], stdin: int, result: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-I", str(Path(__file__).resolve()), str(result), str(timeout), str(grace), *command]
        streams = {"stdin": stdin, "stdout": output, "stderr": output}
        return subprocess.Popen(words, **streams, env=environment, cwd=cwd, pass_fds=(result, *inherit))  # type: ignore[call-overload]

    return run_supervised(start, command[0], os.environ if env is None else env, tick)


def run_supervised(
    start: Callable[[Mapping[str, str], int, int], Any],
    name: str,
    environment: Mapping[str, str],
    tick: Callable[[], None] | None,
) -> Ended:
    """Start a supervisor, and return once it and everything below it has ended, as run_tree() does.

    start: starts it with an environment, its standard input and a descriptor that is passed to supervise(). Returns an
    object that can wait() for it.
    """
    mark = uuid.uuid4().hex
    reading, writing = os.pipe()
    stdin, held = os.pipe()
    with os.fdopen(reading, "rb") as result:
        try:
            supervisor = start({**environment, TREE: mark}, stdin, writing)
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(stdin)
            os.close(writing)
        try:
            # It writes the result as the last thing that it does. If it is killed, the pipe ends.
            while not select.select([result], [], [], LOOK_SECONDS if tick else None)[0]:
                if tick:
                    tick()
        finally:
            os.close(held)  # the supervisor kills what still runs, and ends
            supervisor.wait()
            written = result.read()
    if not written:
        end_processes(with_variable(TREE, mark))
        raise SupervisorKilled(f"the process that supervised {name} was killed.")
    return Ended(**json.loads(written))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, instead of process 1."""
    _prctl("PR_SET_CHILD_SUBREAPER", 1)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the thread that started this process ends. Kept over exec, not over fork."""
    _prctl("PR_SET_PDEATHSIG", by)


def wake_on_time() -> None:
    """Have the kernel end this thread's timed waits when they are due.

    By default it may add 0.05 ms to each, the timer slack.
    """
    _prctl("PR_SET_TIMERSLACK", 1)  # ns


def _prctl(option: str, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PRCTL[option], value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def kill_descendants() -> None:
    """Kill and reap everything below this process, which must have called adopt_orphans() before.

    Everything is stopped first, so that no process reacts to the end of another one.
    """
    while True:
        found = descendants().values()
        _signal_all(found, signal.SIGSTOP)
        _signal_all(found, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def reap(wanted: int = 0) -> int | None:
    """Reap all children that have ended, adopted ones too. Return the wanted one's exit code if it is one of them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def supervise(result: int, timeout: float, grace: float, start: Callable[[], int]) -> None:
    """Start a command and end its tree, once it has ended or once nobody holds our standard input open any more.

    result: where to write how it ended. start: returns the command's pid, which must lead a session; may raise OSError.
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    started, shared = time.monotonic(), SharedFiles()
    ended: tuple[int, bool] | None = (CANNOT_START, False)
    try:
        pid = start()
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
    else:
        ended = _wait(pid, started + (timeout or math.inf), grace, shared)
    seconds = time.monotonic() - started
    shared.look(descendants())
    kill_descendants()
    shared.remove()
    if ended:
        os.write(result, json.dumps({"code": ended[0], "timed_out": ended[1], "seconds": seconds}).encode())


def _start(command: Sequence[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_restore)
    process.returncode = 0  # _wait() waits for it, so that Popen does not
    return process.pid


def _restore() -> None:
    die_with_parent()
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _wait(pid: int, deadline: float, grace: float, shared: SharedFiles) -> tuple[int, bool] | None:
    """Return the command's exit code, and whether the deadline passed first; None once run_tree() has gone."""
    timed_out, looked = False, 0.0
    while not (select.select([sys.stdin], [], [], POLL_SECONDS)[0] and not os.read(0, 1)):
        now = time.monotonic()
        if now - looked > LOOK_SECONDS or shared.sees_new():
            looked = now
            shared.look(descendants())
        if (code := reap(pid)) is not None:
            return code, timed_out
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
    """Print where every Python process of the command hangs, if py-spy is installed with this Python."""
    spy = Path(sys.executable).with_name("py-spy")
    for process in descendants().values() if spy.exists() else ():
        with suppress(OSError, psutil.Error, subprocess.TimeoutExpired):
            if Path(process.exe()).name.startswith("python"):
                words = [str(spy), "dump", "--pid", str(process.pid)]
                subprocess.run(words, stdin=subprocess.DEVNULL, timeout=STACKS_SECONDS, check=False)


if __name__ == "__main__":
    supervise(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), lambda: _start(sys.argv[4:]))
