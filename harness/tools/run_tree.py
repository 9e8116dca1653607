"""Run a command and leave nothing of it behind: its processes end, and their files in /dev/shm go.

run_tree() starts a supervisor, which runs this file. repro/forked_tree.py does the same with a supervisor and a program
that are forked.
"""

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from harness.runtime.processes import (
    POLL_SECONDS,
    SHARED_MEMORY,
    descendants,
    end_processes,
    prctl,
    shared_files,
    signal_all,
    used_by,
)

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
_SUPERVISOR = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); from harness.tools.run_tree import supervise_command; supervise_command()"
_OF_TORCH = re.compile(r"torch_(\d+)_")  # torch puts the pid of the process that made a file into the file's name
EXEC_SECONDS = 0.1
"""How long an exec may show no environment."""


class SupervisorKilled(RuntimeError):
    """The supervisor was killed before the command ended: by the command, or by the kernel for lack of memory."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. A negative code is the number of the signal that killed it."""

    code: int
    timed_out: bool
    seconds: float


@dataclass(slots=True)
class SharedFiles:
    """The files in /dev/shm, as (name, inode), that appear from now on and that our processes use.

    They must be noted while the processes live: a process that is killed removes nothing, and then nobody knows what it
    used.
    """

    ours: set[tuple[str, int]] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    """All processes of ours that were ever seen."""
    _not_ours: set[tuple[str, int]] = field(default_factory=shared_files)
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    """When a file that none of our processes uses was first seen."""

    def sees_new(self) -> bool:
        """Return whether there are files whose users look() has not found."""
        return not shared_files() <= self.ours | self._not_ours

    def look(self, pids: Iterable[int]) -> None:
        """Note the new files that these processes of ours use."""
        pids, there, now = set(pids), shared_files(), time.monotonic()
        self.pids |= pids
        self.ours &= there  # each sync makes files and removes them
        self._not_ours &= there
        if new := there - self.ours - self._not_ours:
            used = used_by(pids)
            self.ours |= {file for file in new if file[1] in used or self._is_of_torch(file)}
            self._since = {file: self._since.get(file, now) for file in new - self.ours}
            # Not looked at again: reading the maps of every scheduler takes milliseconds.
            self._not_ours |= {file for file, since in self._since.items() if now - since > UNKNOWN_SECONDS}

    def remove(self) -> None:
        """Remove, once our processes are dead, what no other process uses."""
        left = {file for file in shared_files() if file in self.ours or self._is_of_torch(file)}
        used = used_by(set(psutil.pids()) - self.pids) if left else set()
        for name, inode in left:
            if inode not in used:
                with suppress(OSError):
                    os.unlink(f"{SHARED_MEMORY}/{name}")

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
        words = [sys.executable, "-I", "-c", _SUPERVISOR, str(result), str(timeout), str(grace), *command]
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


def kill_descendants() -> None:
    """Kill and reap everything below this process, which must have called adopt_orphans() before.

    Everything is stopped first, so that no process reacts to the end of another one.
    """
    while True:
        found = descendants().values()
        signal_all(found, signal.SIGSTOP)
        signal_all(found, signal.SIGKILL)
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


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, instead of process 1."""
    prctl("PR_SET_CHILD_SUBREAPER", 1)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the thread that started this process ends. Kept over exec, not over fork."""
    prctl("PR_SET_PDEATHSIG", by)


def name_and_pid(process: psutil.Process) -> str:
    """Return "name (pid 7)", for messages."""
    with suppress(psutil.Error):
        return f"{process.name()} (pid {process.pid})"
    return f"a process (pid {process.pid})"


def supervise_command() -> None:
    """Supervise the command of sys.argv, after the descriptor of the result, the timeout and the grace."""
    supervise(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), lambda: _start(sys.argv[4:]))
