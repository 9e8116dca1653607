"""Fork processes from one that has done their imports.

Importing torch, transformers and SGLang takes ten seconds of a core, and the ranks and schedulers of one host all do
it. Here one process does it for all of them.

    import_once(["torch"], os.environ)
    server = ForkServer.here()  # a fork of this process, before it has threads
    pid = server.fork(Task("module:function", b"argument"))

The new process becomes a child of the one that asked, which waits for it, gets its exit status, and is the parent that
a dying process signals. Server and client talk over a pair of sockets without a name, so no other process can ask. The
server ends with its client.

An import of SGLang on a GPU initializes CUDA, which no fork can use. There `ForkServer.start` starts a Python that
imports meanwhile and then does one task itself. Start as many as there are tasks.

A forked process is like a started one only if the imports depended on nothing that is different now. So it is recorded
which environment variables were read during them, and a server refuses a task in which one of these differs.
"""

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.popen_fork import Popen
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pkgutil import resolve_name
from typing import Any, NoReturn
from unittest.mock import patch

READ_BY_LIBRARIES = (
    *("LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "PYTHON"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH_CPP_"),
)
"""Prefixes of variables that Python and C libraries read when they are loaded, which no Python code sees."""
MAY_DIFFER = (
    *("TMPDIR", "TEMP", "TMP", "PWD", "OLDPWD", "_", "COLUMNS", "LINES", "PYTHONSAFEPATH"),
    "TORCHINDUCTOR_CACHE_DIR",
)
"""Variables that may differ, because nothing keeps what it read of them at import: tempfile and torch look for their
folders again at each use, modules that are imported later are looked for where the task says, and the size of a
terminal does not matter. Importing torch's compiler sets TORCHINDUCTOR_CACHE_DIR, and so does importing SGLang 0.5.23,
to another folder. The first one wins."""
FOR_CLIENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a server blocks: the terminal and launchers send them to its client, which ends it."""
LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
AS_WRITTEN = f"{__name__}:as_written"
GPU = "/dev/nvidia"
"""How the device files of GPUs begin."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


def as_written(name: str, value: str | None) -> object:
    """Return the value of a variable as its meaning."""
    return value


def unimportant(name: str, value: str | None) -> object:
    """Return the same meaning for every value: the task does not depend on it."""
    return None


class ServerGone(RuntimeError):
    """The server has ended, could not do its imports, or cannot do this task; one sentence."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a forked process does, and in which surroundings."""

    function: str
    """MODULE:FUNCTION, called with the argument and the descriptors that were passed. It is the last thing that the
    process does."""
    argument: bytes = b""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    meaning: str = AS_WRITTEN
    """MODULE:FUNCTION, returns what the imported modules understand by a variable's value, where None is an unset
    one."""
    folder: str = field(default_factory=os.getcwd)
    blocked: frozenset[int] = field(default_factory=lambda: frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    """Signals that the process starts with blocked."""
    limits: Mapping[int, tuple[int, int]] = field(
        default_factory=lambda: {limit: resource.getrlimit(limit) for limit in LIMITS}
    )
    """Soft and hard resource limits. SGLang raises its own before it starts its processes."""
    new_session: bool = False
    ends_with_parent: bool = False
    parent: int = field(default_factory=os.getpid)


# The imports.


@dataclass(frozen=True, slots=True)
class Imports:
    """What the imports of a process depended on."""

    environment: Mapping[str, str]
    """The environment before them."""
    read: frozenset[str]
    """Names of the variables that were read."""
    changed: Mapping[str, str | None]
    """Variables that they have set; None: removed."""
    opened_gpu: bool
    """Whether they have opened a GPU. Then no fork of the process can use one."""
    printed: bytes
    """What they have written to standard output and error."""

    def obstacle(self, environment: Mapping[str, str], meaning: Callable[[str, str | None], object]) -> str:
        """Return why a process with this environment may have imported something else; "" if it has not."""
        prefixes = (*READ_BY_LIBRARIES, "CUDA_") if self.opened_gpu else READ_BY_LIBRARIES
        names = {name for name in {*environment, *self.environment} if name.startswith(prefixes)}
        found = []
        for name in sorted((self.read | names) - set(MAY_DIFFER)):
            before, now = self.environment.get(name), environment.get(name)
            if now != self.changed.get(name, before) and meaning(name, now) != meaning(name, before):
                found.append(f"{name} was {_shown(before)} during the imports, and is {_shown(now)} here")
        return "; ".join(found)

    def applied_to(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with what the imports would have set in it."""
        new = {
            name: value for name, value in self.changed.items() if environment.get(name) == self.environment.get(name)
        }
        return {name: value for name, value in {**environment, **new}.items() if value is not None}


_imports: list[Imports] = []
"""What this process, or the one that it was forked from, has imported: at most one."""


def may_fork() -> bool:
    """Return whether import_once() has imported what it was asked for, and forks of this process can use it."""
    return bool(_imports) and not _imports[0].opened_gpu


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def import_once(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Import the modules in this environment, and record what they read of it. What they set in it, this process gets.
    What they print is kept for the log of an engine: see printed().

    Do nothing if this process, or the one that it was forked from, has done so before. Raise what an import raises.
    """
    if _imports:
        return
    own, before = dict(os.environ), dict(environment)
    _prepare_titles()
    _become(before)
    with tempfile.TemporaryFile() as output:
        try:
            with _printing_to(output.fileno()), _recording_reads() as read, collecting_nothing():
                for module in modules:
                    importlib.import_module(module)
            now = dict(os.environ)
        finally:
            _become(own)
        output.seek(0)
        said = output.read()
    changed = {name: now.get(name) for name in {*before, *now} if before.get(name) != now.get(name)}
    found = Imports(before, frozenset(read), changed, _opened_gpu(), said)
    _become(found.applied_to(own))
    _imports.append(found)


def printed() -> bytes:
    """Return what the imports of this process have printed."""
    return _imports[0].printed if _imports else b""


@contextmanager
def _printing_to(descriptor: int) -> Iterator[None]:
    """Send this process's standard output and error to the descriptor.

    A signal may end the process in this block: its last sentence goes where it should.
    """
    own = os.dup(1), os.dup(2)

    def restore() -> None:
        for number, stream in zip((1, 2), (sys.stdout, sys.stderr), strict=True):
            stream.flush()
            os.dup2(own[number - 1], number)
            os.close(own[number - 1])

    sys.stdout.flush()
    sys.stderr.flush()
    for number in (1, 2):
        os.dup2(descriptor, number)
    atexit.register(restore)
    try:
        yield
    finally:
        atexit.unregister(restore)
        restore()


def _become(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Keep Python's garbage collector from looking at what is imported in this block, now and later.

    What is imported stays. The collector would look at all of it again and again, for a fifth of the time that the
    imports take. And a forked process shares the memory only as long as the collector does not write to it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _prepare_titles() -> None:
    """Let setproctitle find the arguments of this process, next to the environment, which imports and forked processes
    replace.

    Without SPT_NOENV titles would take the environment's place, by which a process is found that belongs to a run
    (run_tree.with_variable).
    """
    with suppress(ModuleNotFoundError), patch.dict(os.environ, SPT_NOENV="1"):
        importlib.import_module("setproctitle").getproctitle()


@contextmanager
def _recording_reads() -> Iterator[set[str]]:
    """Collect the names of the environment variables that are read in this block."""
    read: set[str] = set()
    real = type(os.environ)

    class Recording(real):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            read.add(name)
            return str(super().__getitem__(name))

        def __contains__(self, name: object) -> bool:
            read.add(str(name))
            return bool(super().__contains__(name))

    os.environ.__class__ = Recording
    try:
        yield read
    finally:
        os.environ.__class__ = real


def _opened_gpu() -> bool:
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one by which the folder is read
            if os.readlink(f"/proc/self/fd/{each}").startswith(GPU):
                return True
    return False


# The client's side.


class ForkServer:
    """The client's end of a server, which is a child of this process.

    Use it from one thread: the server ends with it.
    """

    _handed_over: "list[ForkServer]" = []  # noqa: RUF012 - of the process, as its children are

    def __init__(self, connection: socket.socket, pid: int) -> None:
        """Speak to the server with this pid over the connection."""
        self._socket = connection
        self._connection = Connection(os.dup(connection.fileno()))
        self.pid = pid
        self._why_gone = ""
        """Why nothing can be forked any more; "" while it can."""

    @classmethod
    def here(cls) -> "ForkServer":
        """Return a server that is a fork of this process, which has called import_once() and has no threads."""
        own, its = socket.socketpair()
        client = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if pid := os.fork():
            its.close()
            return cls(own, pid)
        own.close()
        _end_with(client)
        signal.pthread_sigmask(signal.SIG_BLOCK, FOR_CLIENT)
        for number in FOR_CLIENT:  # the client's handlers are not its children's
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        serve(its)

    @classmethod
    def start(cls, modules: Sequence[str], environment: Mapping[str, str]) -> "ForkServer":
        """Start a Python in this environment that imports the modules and then serves. Return at once.

        If the imports open a GPU, it does one task itself.
        """
        own, its = socket.socketpair()
        with its:
            descriptor = its.fileno()
            code = f"from {__name__} import main; main(*{(descriptor, os.getpid(), list(modules))!r})"
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_CLIENT)  # which the server inherits
            try:
                process = subprocess.Popen(
                    [sys.executable, *_args_from_interpreter_flags(), "-P", "-c", code],
                    env=environment,
                    pass_fds=[descriptor],
                    stdin=subprocess.DEVNULL,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        process.returncode = 0  # close() waits for it, so that Popen does not warn that it still runs
        return cls(own, process.pid)

    @classmethod
    def hand_over(cls, servers: "Sequence[ForkServer]") -> None:
        """Leave servers for the engine that this process will build."""
        cls._handed_over[:] = servers

    @classmethod
    def handed_over(cls) -> "list[ForkServer]":
        """Return the servers that were left for an engine. A second call returns none."""
        found = list(cls._handed_over)
        cls._handed_over.clear()
        return found

    def fork(self, task: Task, descriptors: Sequence[int] = ()) -> int:
        """Return the pid of a process that does the task, a child of this process. Wait for the imports first.

        descriptors: passed to the process, the first three as its standard input, output and error. Raise ServerGone.
        """
        if self._why_gone:
            raise ServerGone(self._why_gone)
        with adopting_orphans():
            try:
                self._connection.send_bytes(pickle.dumps(task))
                socket.send_fds(self._socket, [b"f"], list(descriptors))
                answer: int | str = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError) as error:
                self._why_gone = f"the process that does the imports has ended{self._end()}"
                raise ServerGone(self._why_gone) from error
        if isinstance(answer, str):
            raise ServerGone(answer)
        if answer == self.pid:
            self._why_gone = "every process that was started early is in use"
        return answer

    def clone(self) -> "ForkServer":
        """Return another server, a fork of this one. Raise ServerGone."""
        own, its = socket.socketpair()
        with its:
            serve_again, meaning = f"{__name__}:serve_again", f"{__name__}:unimportant"
            task = Task(serve_again, meaning=meaning, blocked=frozenset(FOR_CLIENT), ends_with_parent=True)
            return ForkServer(own, self.fork(task, [0, 1, 2, its.fileno()]))

    def close(self) -> None:
        """End the server, unless it does a task. Forked processes go on. A second call does nothing."""
        self._connection.close()
        self._socket.close()
        if not self._why_gone:
            self._why_gone = f"the process that does the imports was ended{self._end()}"

    def _end(self) -> str:
        """End the server, and return how it ended; "" if that is not known."""
        try:
            os.kill(self.pid, signal.SIGKILL)  # it may be in its imports
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except (ChildProcessError, ProcessLookupError):  # somebody else has waited for it
            return ""
        return f" with exit code {code}" if code >= 0 else f": {signal.Signals(-code).name}"


class ForkedChild(Popen):
    """A child that a server has forked: multiprocessing's object for a child, which also takes subprocess.Popen's
    place.
    """

    def __init__(self, pid: int, sentinel: int) -> None:
        """sentinel: a descriptor that can be read once the child has ended."""
        self.returncode = None
        self.finalizer = None
        self.pid = pid
        self.sentinel = sentinel


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of its descendants whose parent ends in this block."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# The server's side.


def main(descriptor: int, client: int, modules: Sequence[str]) -> NoReturn:
    """Import the modules and serve the client, in a Python that was started for that."""
    _end_with(client)
    problem = ""
    try:
        import_once(modules, os.environ)
    except BaseException as error:  # SystemExit too. Whoever needs the import will make it and show it.
        problem = f"an import failed: {type(error).__name__}: {error}"
    if may_fork() and (threads := [thread.name for thread in threading.enumerate()[1:]]):
        problem = f"an import has started threads, which a forked process does not have: {', '.join(threads)}"
    serve(socket.socket(fileno=descriptor), problem)


def serve(connection: socket.socket, problem: str = "") -> NoReturn:
    """Fork a process for each task that the client sends; do the first one, if the imports opened a GPU.

    problem: why no task can be done; "" if there is nothing.
    """
    task, descriptors = _task_of_this_process(connection, problem)
    _settle(task, descriptors)
    run_and_end(resolve_name(task.function), task.argument, descriptors[3:])


def serve_again(_: bytes, descriptors: Sequence[int]) -> NoReturn:
    """Be a server, in a process that a server has forked for that."""
    serve(socket.socket(fileno=descriptors[0]))


def _task_of_this_process(connection: socket.socket, problem: str) -> tuple[Task, list[int]]:
    """Answer the client. Return in the process that does a task; the server itself ends in here."""
    messages = Connection(os.dup(connection.fileno()))
    with suppress(OSError, EOFError):  # the client has gone
        while True:
            task = pickle.loads(messages.recv_bytes())
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 250, socket.MSG_CMSG_CLOEXEC)
            why_not = problem or _imports[0].obstacle(task.environment, resolve_name(task.meaning))
            if why_not:
                messages.send_bytes(pickle.dumps(why_not))
            elif not may_fork() or _is_fork_for(messages):
                messages.send_bytes(pickle.dumps(os.getpid()))
                messages.close()
                connection.close()
                return task, descriptors
            for each in descriptors:
                os.close(each)
    os._exit(0)


def _is_fork_for(messages: Connection) -> bool:
    """Fork a process that the client adopts, and return whether this is it. If that fails, tell the client why."""
    waits, goes = os.pipe()
    middle = -1
    try:
        middle = os.fork()
        if middle == 0 and os.fork():
            os._exit(0)
    except OSError as error:
        messages.send_bytes(pickle.dumps(f"the process that does the imports cannot fork: {error}"))
        if middle == 0:
            os._exit(1)
    if middle == 0:
        os.close(goes)
        os.read(waits, 1)  # until the client has adopted it
        os.close(waits)
        return True
    if middle > 0:
        os.waitpid(middle, 0)
    os.close(goes)
    os.close(waits)
    return False


def _settle(task: Task, descriptors: Sequence[int]) -> None:
    """Give this process the surroundings of its task."""
    if task.new_session:
        os.setsid()
    _end_with(task.parent if task.ends_with_parent else 0)
    for limit, values in task.limits.items():
        with suppress(ValueError, OSError):  # a hard limit that only root may raise
            resource.setrlimit(limit, values)
    for number, passed in enumerate(descriptors[:3]):
        os.dup2(passed, number)
        os.close(passed)
    os.chdir(task.folder)
    _become(_imports[0].applied_to(task.environment))
    tempfile.tempdir = None
    multiprocessing.current_process().authkey = os.urandom(32)  # as multiprocessing draws one in each new Python
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    signal.pthread_sigmask(signal.SIG_SETMASK, task.blocked)
    if not may_fork():  # the imports were for this task alone
        os.write(2, printed())


def run_and_end(function: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Call the function and end this process as Python ends a script. Its callers never go on."""
    code = 0
    try:
        function(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for what a script's end waits for
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
            stream.flush()
    os._exit(code)


def _end_with(parent: int) -> None:
    """Get SIGKILL when this parent ends; end now if it has ended already. 0: end with no parent."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if parent else 0, 0, 0, 0)
    if parent not in (0, os.getppid()):
        os._exit(0)
