"""A process that has done the imports once, and forks processes that need them.

Importing torch, transformers and SGLang takes ten seconds of a core, and the ranks and schedulers of one host all do
it. Here one process does it for all of them, while nothing else needs it yet.

    server = ForkServer.start(["torch"], os.environ)
    pid = server.fork(Task("module:function", b"argument"))

The new process becomes a child of the one that asked, which waits for it, gets its exit status, and is the parent that
a dying process signals. Server and client talk over a pair of sockets without a name, so no other process can ask. The
server ends with its client.

If the imports have initialized CUDA, no fork of the process could use it. Then the server does one task itself: it is a
process that was started early. Start as many of them as there are tasks.

A forked process is like a started one only if the imports depended on nothing that is different now. So the server
records which environment variables were read during them, and ForkServer.obstacle() compares.
"""

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.popen_fork import Popen
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

HANDED_OVER = "HARNESS_FORK_SERVER"
"""Variable in which a process finds servers of its own: the descriptor and pid of each."""
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
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


Meaning = Callable[[str, str | None], object]


def as_written(name: str, value: str | None) -> object:
    """Return the value of a variable as its meaning."""
    return value


class ServerGone(RuntimeError):
    """The server has ended, or could not do its imports, or cannot fork."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a forked process does, and in which surroundings."""

    function: str
    """MODULE:FUNCTION, called with the argument and the descriptors that were passed. It is the last thing that the
    process does."""
    argument: bytes = b""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
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
    gets_server: bool = False
    """Whether the process gets a server of its own, a fork of this one."""
    serves: bool = False
    """Whether the process is a server too: the function is not called, and the fourth descriptor is its connection."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What a server has imported, and what the imports depended on."""

    began: float
    """When the imports began, in UNIX seconds."""
    seconds: float
    environment: Mapping[str, str]
    """The environment before the imports."""
    read: frozenset[str]
    """Names of the variables that were read."""
    changed: Mapping[str, str | None]
    """Variables that the imports have set; None: removed."""
    printed: bytes
    """What the imports have printed."""
    forks: bool
    """Whether the server can fork; otherwise it does one task itself."""

    def obstacle(self, environment: Mapping[str, str], meaning: Meaning) -> str:
        """Return why a process with this environment may have imported something else; "" if it has not."""
        prefixes = READ_BY_LIBRARIES if self.forks else (*READ_BY_LIBRARIES, "CUDA_")
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


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)


class ForkServer:
    """The client's end of a server, which is a child of this process.

    Use it from one thread: the server ends with it.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        """Speak to the server with this pid over the connection."""
        self._socket = connection
        self._connection = Connection(os.dup(connection.fileno()))
        self.pid = pid
        self.used_up = False
        """Whether the server has become a process that does a task."""
        self._imported: Imported | None = None
        self._why_gone = ""
        self._has_ended = False

    @classmethod
    def start(
        cls,
        modules: Sequence[str],
        environment: Mapping[str, str],
        *,
        first: str = "",
        argument: str = "",
        new_session: bool = False,
    ) -> "ForkServer":
        """Start a server in this environment, which imports the modules. Return at once.

        first: MODULE:FUNCTION, called with the argument before the imports. It returns servers that the process gets if
        it does a task itself (see Imported.forks). new_session: whether the server gets a session of its own.
        """
        own, its = socket.socketpair()
        with its:
            descriptor = its.fileno()
            given = (descriptor, os.getpid(), list(modules), first, argument)
            code = f"from {__name__} import main; main(*{given!r})"
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_CLIENT)  # which the server inherits
            try:
                process = subprocess.Popen(
                    [sys.executable, *_args_from_interpreter_flags(), "-P", "-c", code],
                    env=environment,
                    pass_fds=[descriptor],
                    stdin=subprocess.DEVNULL,
                    start_new_session=new_session,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        process.returncode = 0  # close() waits for it, so that Popen does not warn that it still runs
        return cls(own, process.pid)

    @classmethod
    def handed_over(cls) -> "list[ForkServer]":
        """Return the servers that this process was started with, or that it has handed over.

        A second call returns none.
        """
        found = []
        for each in os.environ.pop(HANDED_OVER, "").split():
            descriptor, _, pid = each.partition(":")
            if _parent_of(int(pid)) == os.getpid():  # otherwise the variable is an ancestor's
                found.append(cls(socket.socket(fileno=int(descriptor)), int(pid)))
        return found

    @staticmethod
    def hand_over(servers: Sequence["ForkServer"]) -> None:
        """Give up these objects, and leave the servers for the next `handed_over` of this process.

        None may have been asked what it has imported: a server says so once, and who takes it would wait for ever.
        """
        if servers:
            os.environ[HANDED_OVER] = " ".join(server._detach() for server in servers)

    def _detach(self) -> str:
        """Return the server's address. This object must not end what becomes of the server."""
        assert self._imported is None, "the server has said what it imported"
        self.used_up, self._why_gone = True, "the process that did the imports was handed over"
        self._connection.close()
        return f"{self._socket.detach()}:{self.pid}"

    def imported(self) -> Imported:
        """Wait until the imports are done, and return what they depended on. Raise ServerGone if they failed."""
        if self._why_gone:
            raise ServerGone(self._why_gone)
        if self._imported is None:
            answer = self._receive()
            if isinstance(answer, str):
                self._why_gone = answer
                raise ServerGone(answer)
            self._imported = answer
        assert self._imported is not None
        return self._imported

    def obstacle(self, environment: Mapping[str, str], meaning: Meaning = as_written) -> str:
        """Return why a process with this environment cannot be forked; "" if it can. Waits until the imports are done.

        meaning: returns what the modules understand by a variable's value, where None is an unset one.
        """
        try:
            return self.imported().obstacle(environment, meaning)
        except ServerGone as error:
            return str(error)

    def fork(self, task: Task, descriptors: Sequence[int] = ()) -> int:
        """Return the pid of a process that does the task, a child of this process. Raise ServerGone.

        descriptors: passed to the process, the first three as its standard input, output and error.
        """
        forks = self.imported().forks
        if self.used_up:
            raise ServerGone("the process that did the imports does a task")
        with adopting_orphans():
            with suppress(OSError):  # it has gone, which the answer shows
                self._connection.send_bytes(pickle.dumps(task))
                socket.send_fds(self._socket, [b"f"], list(descriptors))
            answer = self._receive()
        if isinstance(answer, str):
            raise ServerGone(answer)
        self.used_up = not forks
        return int(answer)

    def clone(self) -> "ForkServer":
        """Return another server that has done the same imports: a fork of this one.

        Raise ServerGone if it cannot fork.
        """
        if not self.imported().forks:
            raise ServerGone("the imports have initialized CUDA, so the process that did them cannot fork")
        own, its = socket.socketpair()
        with its:
            pid = self.fork(Task("", serves=True, ends_with_parent=True), [0, 1, 2, its.fileno()])
        return ForkServer(own, pid)

    def close(self) -> None:
        """End the server. Forked processes go on. A second call does nothing."""
        self._connection.close()
        self._socket.close()
        self._why_gone = self._why_gone or "the process that did the imports has been ended"
        self._end()

    def _end(self) -> str:
        """End the server, unless it does a task, and return how it ended; "" if that is not known."""
        if self.used_up or self._has_ended:
            return ""
        self._has_ended = True
        try:
            os.kill(self.pid, signal.SIGKILL)  # it may be in its imports
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except (ChildProcessError, ProcessLookupError):  # somebody else has waited for it
            return ""
        return f" with exit code {code}" if code >= 0 else f": {signal.Signals(-code).name}"

    def _receive(self) -> Any:
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            when = "after" if self._imported else "during"
            self._why_gone = f"the process that does the imports has ended {when} them{self._end()}"
            raise ServerGone(self._why_gone) from error


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


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


# The server.


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


def import_once(modules: Sequence[str]) -> Imported:
    """Import the modules, and record what they read of the environment and set in it."""
    before, began, started = dict(os.environ), time.time(), time.monotonic()
    with tempfile.TemporaryFile() as output:
        with _printing_to(output.fileno()), _recording_reads() as read, collecting_nothing():
            for module in modules:
                importlib.import_module(module)
        output.seek(0)
        printed = output.read()
    changed = {
        name: os.environ.get(name) for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)
    }
    torch = sys.modules.get("torch")
    forks = torch is None or not torch.cuda.is_initialized()
    return Imported(began, time.monotonic() - started, before, frozenset(read), changed, printed, forks)


def _prepare_titles() -> None:
    """Let setproctitle find the arguments of this process, next to the environment, which imports and forked processes
    replace.

    Without SPT_NOENV titles would take the environment's place, by which a process is found that belongs to a run
    (run_tree.with_variable).
    """
    with suppress(ModuleNotFoundError), patch.dict(os.environ, SPT_NOENV="1"):
        importlib.import_module("setproctitle").getproctitle()


@contextmanager
def _printing_to(descriptor: int) -> Iterator[None]:
    """Send this process's standard output and error to the descriptor."""
    own = os.dup(1), os.dup(2)
    for number in (1, 2):
        os.dup2(descriptor, number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, each in zip((1, 2), own, strict=True):
            os.dup2(each, number)
            os.close(each)


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


def main(descriptor: int, client: int, modules: Sequence[str], first: str, argument: str) -> None:
    """Import the modules and serve the client.

    In each forked process, do its task; then the interpreter ends as usual.
    """
    _end_with(client)
    _prepare_titles()
    connection = socket.socket(fileno=descriptor)
    servers: Sequence[ForkServer] = ()
    answer: Imported | str
    try:
        servers = resolve_name(first)(argument) if first else ()
        answer = import_once(modules)
        if servers:
            answer = replace(answer, forks=False)  # they are children of this process, and of no other
        threads = [thread.name for thread in threading.enumerate()[1:]]
        if threads and answer.forks:
            answer = f"an import has started threads, which a forked process does not have: {', '.join(threads)}"
    except (
        BaseException
    ) as error:  # SystemExit too. It is not shown: whoever needs the import will make it and show it.
        answer = f"an import failed: {type(error).__name__}: {error}"
    while True:
        task, descriptors = _serve(connection, answer)
        assert isinstance(answer, Imported)
        _settle(task, descriptors, answer)
        if task.serves:
            signal.pthread_sigmask(signal.SIG_BLOCK, FOR_CLIENT)
            connection = socket.socket(fileno=descriptors[3])
            continue
        ForkServer.hand_over(servers)
        if not (task.gets_server and answer.forks):
            break
        own, its = socket.socketpair()
        client = os.getpid()
        if pid := os.fork():
            its.close()
            os.environ[HANDED_OVER] = f"{own.detach()}:{pid}"
            break
        # The new process is the server of the one that forked it.
        _end_with(client)
        signal.pthread_sigmask(signal.SIG_BLOCK, FOR_CLIENT)
        own.close()
        for each in descriptors[3:]:
            os.close(each)
        connection = its
    resolve_name(task.function)(task.argument, descriptors[3:])


def _serve(connection: socket.socket, answer: Imported | str) -> tuple[Task, list[int]]:
    """Answer what was imported, then fork a process for each task.

    Return in that process; the server itself ends in here.
    """
    messages = Connection(os.dup(connection.fileno()))
    with suppress(OSError, EOFError):  # the client has gone
        messages.send_bytes(pickle.dumps(answer))
        while isinstance(answer, Imported):
            task = pickle.loads(messages.recv_bytes())
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 250, socket.MSG_CMSG_CLOEXEC)
            if not answer.forks:
                messages.send_bytes(pickle.dumps(os.getpid()))
            elif not _fork_for(messages):
                for each in descriptors:
                    os.close(each)
                continue
            messages.close()
            connection.close()
            return task, descriptors
    os._exit(0)


def _fork_for(client: Connection) -> bool:
    """Fork a process that the client adopts, and tell the client its pid, or why there is none.

    Return whether this is it.

    It goes on only when the client knows its pid: if this server is killed before, nothing runs that nobody knows of.
    """
    told, tells = os.pipe()
    waits, goes = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        os.write(tells, str(error).encode())
    else:
        if middle == 0:
            _fork_orphan(tells)
            for each in (told, tells, goes):
                os.close(each)
            if not os.read(waits, 1):
                os._exit(1)
            os.close(waits)
            return True
        os.waitpid(middle, 0)
    os.close(tells)
    os.close(waits)
    said = os.read(told, 1000).decode()
    client.send_bytes(
        pickle.dumps(int(said) if said.isdecimal() else f"the process that does the imports cannot fork: {said}")
    )
    with suppress(BrokenPipeError):  # it has been killed
        os.write(goes, b"1")
    os.close(told)
    os.close(goes)
    return False


def _fork_orphan(tells: int) -> None:
    """Fork a process and end, so that the client becomes its parent. Write its pid, or why there is none.

    Return in it.
    """
    try:
        if pid := os.fork():
            os.write(tells, str(pid).encode())
            os._exit(0)
    except OSError as error:
        os.write(tells, str(error).encode())
        os._exit(1)


def _settle(task: Task, descriptors: Sequence[int], imported: Imported) -> None:
    """Give this process the surroundings of its task."""
    if task.new_session and os.getsid(0) != os.getpid():
        os.setsid()
    _end_with(task.parent if task.ends_with_parent else 0)
    for limit, values in task.limits.items():
        with suppress(ValueError, OSError):  # a hard limit that only root may raise
            resource.setrlimit(limit, values)
    for number, passed in enumerate(descriptors[:3]):
        os.dup2(passed, number)
        os.close(passed)
    os.chdir(task.folder)
    os.environ.clear()
    os.environ.update(imported.applied_to(task.environment))
    tempfile.tempdir = None
    multiprocessing.current_process().authkey = os.urandom(32)  # as multiprocessing draws one in each new Python
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    signal.pthread_sigmask(signal.SIG_SETMASK, task.blocked)


def _end_with(parent: int) -> None:
    """Get SIGKILL when this parent ends; end now if it has ended already. 0: end with no parent."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if parent else 0, 0, 0, 0)
    if parent not in (0, os.getppid()):
        os._exit(0)
