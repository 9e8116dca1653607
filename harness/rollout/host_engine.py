"""HostEngine: the sglang.Engine that one rank of a host builds, the processes that it starts, and how they end.

SGLang's own way to fail is to SIGKILL the process that built the engine: a scheduler that dies sends SIGQUIT to its
parent, whose handler kills the whole process tree. The rank would vanish silently, and every other rank would blame its
connection. So the handlers are taken away, and a thread watches the processes, says which one died and why, and ends
the rest. Nothing that the engine started outlives it: processes, sockets, names in /dev/shm.
"""

import atexit
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import format_exception, format_exception_only
from typing import Any
from unittest.mock import patch

import psutil

from harness.cluster.ports import PortLease
from harness.rollout import sglang_api
from harness.rollout.early_start import forking
from harness.rollout.engine import EngineFailed, Starts, in_one_line
from harness.rollout.engine_settings import child_environment
from harness.runtime.errors import say
from harness.runtime.files import engine_folder, remove_what_exit_would, variables_of_folder
from harness.runtime.fork_server import ForkServer
from harness.runtime.processes import descendants, descendants_since, end_processes, hard_exit, is_alive, wait_status

POLL_SECONDS = 0.5
TAKEN = (signal.SIGTERM, signal.SIGQUIT)
"""Signals that SGLang sets handlers for: it ignores SIGTERM, and on SIGQUIT it SIGKILLs this process and its
children."""
_CRASHES = ("Fatal Python error: ", "terminate called after throwing an instance of ")
_EXCEPTION = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Expired|Failed|Gone|Iteration))(?::.*)?"
)
"""Not "Loading: 50%", which another process may have written in between."""
ENDING_SIGNALS = ("SIGKILL", "SIGTERM")
"""Sent from outside. The process logs no error of its own; an error in the shared log is a consequence."""


class HostEngine:
    """One sglang.Engine and its processes on this host. Build it in the main thread."""

    def __init__(self, log: Path, base_port: int, on_death: Callable[[str], None] | None = None) -> None:
        """Lease ports and make a folder for temporary files; `start` builds the engine.

        log: file for the output of the engine's processes. on_death: called with a message when one of them dies, on a
        thread, or when SGLang fails in this process; by default print the message and exit with code 1.
        """
        self.engine: Any = None
        """The sglang.Engine; None before `start` and after `stop`."""
        self.log = EngineLog(log)
        self.starts = Starts()
        self._lease = PortLease(base_port)
        self.ports = self._lease.ports
        self._on_death = on_death
        self._handlers = own_handlers()
        # SGLang makes sockets in its folder for temporary files and removes none of them.
        self._scratch = engine_folder()
        self.folder = Path(self._scratch.name)
        """For temporary files of the engine's processes, and for the sockets by which ranks of this host reach them."""
        self._stop_watching: Callable[[], None] = lambda: None
        self._before: Collection[int] = ()
        """Pids of this process's descendants that are none of the engine's."""

    def start(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str | None],
        serves: bool,
    ) -> None:
        """Build the engine and watch its processes. Raise EngineFailed, with the log's error, if it does not start.

        Processes that were started early (rollout/early_start.py) become the engine's where they can; for others SGLang
        starts a new Python. environment: added to what this process's children inherit; None removes a variable.
        serves: whether this is node 0 of the engine, the only one that can be called.
        """
        arguments = {**arguments, "custom_sigquit_handler": ignore_signal}
        environment = {**environment, **variables_of_folder(self.folder)}
        servers = ForkServer.handed_over()
        self._before = descendants().keys() - {server.pid for server in servers}
        with started_processes() as started:
            try:
                with (
                    child_environment(environment),
                    patch.object(tempfile, "tempdir", str(self.folder)),
                    output_to(self.log.path),
                    sigterm_blocked(),
                    forking(servers) as self.starts,
                ):
                    self.engine = sglang_api.build_engine(arguments)
                    # SGLang's own exit handler would end more than the engine's processes: see sglang_api.close.
                    atexit.unregister(self.engine.shutdown)
                    if serves:
                        sglang_api.start_loop(self.engine, TAKEN, self._report_task)
                        sglang_api.unlink_shared_memory(self.engine)
            except Exception as error:
                failure = self.log.start_failure(error, started)
                end_processes(descendants_since(self._before))
                self._scratch.cleanup()
                self._lease.close()
                raise EngineFailed(failure) from error
            finally:
                for server in servers:
                    server.close()
                restore_handlers(self._handlers, engine_serves=self.engine is not None)
        atexit.register(self.stop)
        self._stop_watching = watch_processes(descendants_since(self._before), self._report_death).set

    def stop(self) -> None:
        """End the engine and its processes, and give back what it used. A second call does nothing."""
        self._stop_watching()
        atexit.unregister(self.stop)
        if (engine := self.engine) is not None:
            end_processes(descendants_since(self._before), lambda: sglang_api.close(engine))
            self.engine = None
            restore_handlers(self._handlers, engine_serves=False)
        self._scratch.cleanup()
        self._lease.close()

    def _report_death(self, name: str, pid: int, signal_name: str) -> None:
        self.fail(self.log.death(name, pid, signal_name))

    def _report_task(self, task: str, error: Exception) -> None:
        self.fail(self.log.task_failure(task, error))

    def fail(self, message: str) -> None:
        """Report a failure, on a thread, and end the engine's processes. By default end this process too.

        Report it first: ending the processes may take seconds, in which this rank may be ended too.
        """
        if self._on_death:
            self._on_death(message)
        else:
            say(message + "\n")
        # They are useless now, and they hold a GPU.
        end_processes(descendants_since(()))
        self._scratch.cleanup()
        if not self._on_death:
            remove_what_exit_would()
            hard_exit(1)  # a thread cannot raise in the main thread, which may sit in a collective for minutes


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send stdout and stderr of this process, and of the children it starts, to a file. The file is emptied first.

    Children keep writing there after the block. Python's streams are flushed at both ends, so lines stay in order.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    streams = {1: sys.stdout, 2: sys.stderr}
    with ExitStack() as after, path.open("ab") as file:
        for descriptor, stream in streams.items():
            stream.flush()
            saved = os.dup(descriptor)
            after.callback(os.close, saved)
            after.callback(os.dup2, saved, descriptor)
            after.callback(stream.flush)
            os.dup2(file.fileno(), descriptor)
        yield


@dataclass(slots=True)
class EngineLog:
    """The log that all processes of one engine write to. It explains their failures."""

    path: Path
    survived: int = 0
    """Size of the log when the engine last answered a call. An error before that did not end it."""

    def answered(self) -> None:
        self.survived = self.path.stat().st_size

    def start_failure(self, error: Exception, started: Collection[BaseProcess]) -> str:
        """Return why the engine did not start: the log's error if one of its processes failed, else the exception."""
        failed = any(_exit_code(each) is not None and ending_signal(each) not in ENDING_SIGNALS for each in started)
        logged = self._error() if failed else ""
        return f"{logged or in_one_line(error)} (whole log: {self.path})"

    def death(self, name: str, pid: int, signal_name: str) -> str:
        """Return how a process of the engine died, and why. signal_name: as watch_processes gives it."""
        how = f" of {signal_name}" if signal_name else ""
        if signal_name not in ENDING_SIGNALS:
            how += f": {self._error() or 'there is no error in its log'}"
        return f"engine process {name} (pid {pid}) died{how} (whole log: {self.path})"

    def task_failure(self, task: str, error: Exception) -> str:
        """Return that a task of SGLang in this process failed, and why. Write its traceback to the log."""
        with suppress(OSError), self.path.open("a", encoding="utf-8") as log:  # a full disk
            log.write(f"{task} failed in the process that built the engine:\n{''.join(format_exception(error))}")
        said = format_exception_only(error)[-1].strip()
        ends = "SGLang would have killed this process"
        return f"EngineFailed: SGLang's {task} failed in this process: {said} ({ends}; whole log: {self.path})"

    def _error(self) -> str:
        log = self.path.read_bytes()[self.survived :].decode(errors="replace")
        return first_error(log)


def first_error(log: str) -> str:
    """Return the line that names the first error in an engine's log: an exception, or a crash below Python. "" if none.

    Python ignores an exception in a destructor ("Exception ignored in"), and multiprocessing's resource tracker goes on
    after its KeyError: neither has ended a process.
    """
    is_open, is_ignored, frame = False, False, ""
    for line in log.splitlines():
        if line.startswith(_CRASHES):
            return line
        if "Exception ignored in" in line:
            is_ignored = True
        elif "Traceback (most recent call last)" in line:
            is_open, frame = True, ""
        elif is_open and line.startswith('  File "'):
            frame = line
        elif _EXCEPTION.fullmatch(line):
            if is_open and not is_ignored and "resource_tracker.py" not in frame:
                return line
            is_open = is_ignored = False
    return ""


def ending_signal(child: BaseProcess | None) -> str:
    """Return the signal, such as SIGKILL, that ended a child; "" if it is alive or has exited."""
    code = _exit_code(child) if child else None
    return signal.Signals(-code).name if code is not None and code < 0 else ""


def _exit_code(child: BaseProcess) -> int | None:
    """Return the exit code, or the negative number of a signal; None if the child is alive.

    multiprocessing's object remembers the exit code: SGLang's threads may have waited for the process already, and the
    operating system tells only the first who waits. A large process that was killed can be a zombie for a while before
    anybody can wait for it; until then its status is in /proc.
    """
    if child.exitcode is None and child.pid is not None and (status := wait_status(child.pid)) is not None:
        return os.waitstatus_to_exitcode(status)
    return child.exitcode


@contextmanager
def started_processes() -> Iterator[list[BaseProcess]]:
    """Record the processes that multiprocessing starts in this block: it forgets those that SGLang has waited for."""
    started: list[BaseProcess] = []
    real = BaseProcess.start

    def start(self: BaseProcess) -> None:
        real(self)
        started.append(self)

    with patch.object(BaseProcess, "start", start):
        yield started


def watch_processes(
    watched: Mapping[int, psutil.Process], on_death: Callable[[str, int, str], None]
) -> threading.Event:
    """Call on_death(name, pid, signal_name) once, on a thread, when one of these is gone.

    Set the returned event to stop.
    """
    stop = threading.Event()
    started = {child.pid: child for child in multiprocessing.active_children()}

    def watch() -> None:
        names = {pid: _name(process) for pid, process in watched.items()}
        with ExitStack() as opened:
            ends: dict[Any, int] = {}
            for pid in watched:
                with suppress(OSError):  # it is gone already, or this kernel has no pidfd
                    opened.callback(os.close, end := os.pidfd_open(pid))
                    ends[end] = pid
            first: list[int] = []
            while not stop.is_set() and not first and all(map(is_alive, watched.values())):
                first = [ends[each] for each in connection.wait(ends, POLL_SECONDS)]
        if stop.wait(POLL_SECONDS):
            return
        dead = [*first, *(pid for pid, process in watched.items() if not is_alive(process))]
        signals = {pid: ending_signal(started.get(pid)) for pid in dead}
        # Blame the one that a signal ended, though others that followed it may be gone sooner; else the first.
        pid = max(dead, key=lambda each: bool(signals[each]))
        on_death(names[pid], pid, signals[pid])

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()
    return stop


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "engine process"


def own_handlers() -> dict[signal.Signals, Any]:
    """Return this process's handlers for the signals that SGLang takes over. Call before an engine is built."""
    return {number: signal.getsignal(number) for number in TAKEN}


def restore_handlers(own: Mapping[signal.Signals, Any], engine_serves: bool) -> None:
    """Set these handlers again. While an engine serves, ignore SIGQUIT: watch_processes reports a scheduler's death.

    Raises ValueError outside the main thread.
    """
    for number, handler in own.items():
        signal.signal(number, ignore_signal if number == signal.SIGQUIT and engine_serves else handler)


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Make the processes that are started in this block ignore SIGTERM. For this process it waits until the block ends.

    torchrun sends SIGTERM to a rank and to all its children, but a rank that saves a checkpoint at SIGTERM needs its
    engine until it has saved.
    """
    resource_tracker.ensure_running()  # starting it inside the block would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signal(signum: int, frame: object) -> None:
    """Ignore the SIGQUIT by which a failing scheduler asks its parent to die: watch_processes reports the death.

    Defined at module level because SGLang pickles the handler into its schedulers.
    """
