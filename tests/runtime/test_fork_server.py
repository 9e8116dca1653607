"""Real servers and forked processes. What they import is a module of a few lines."""

import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.runtime.fork_server import AS_WRITTEN, ForkServer, ServerGone, Task
from harness.runtime.processes import is_alive
from harness.tools.run_tree import with_variable

REPOSITORY = Path(__file__).resolve().parents[2]
TASKS = "tests.runtime.forked_tasks"
HANG_SECONDS = 60
CLEAN = dict(os.environ)

Start = Callable[..., ForkServer]


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fail a test that waits for ever."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError(f"it hangs for {HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def environment_with(folder: Path, **variables: str) -> dict[str, str]:
    return CLEAN | {"PYTHONPATH": f"{folder}:{REPOSITORY}"} | variables


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a server that imports `cheap`, a module with this text, in this environment, which this process gets."""
    with ExitStack() as stack:

        def start_server(text: str = "", *modules: str, **variables: str) -> ForkServer:
            (tmp_path / "cheap.py").write_text(textwrap.dedent(text))
            for name, value in environment_with(tmp_path, **variables).items():
                monkeypatch.setenv(name, value)
            server = ForkServer.start(["cheap", *modules], dict(os.environ))
            stack.callback(server.close)
            return server

        yield start_server


def fork(server: ForkServer, function: str, argument: str = "", **surroundings: Any) -> tuple[int, int]:
    """Fork a process; return its pid and a descriptor from which to read what it says."""
    reading, writing = os.pipe()
    try:
        task = Task(f"{TASKS}:{function}", argument.encode(), **surroundings)
        return server.fork(task, [0, 1, 2, writing]), reading
    finally:
        os.close(writing)


def said(reading: int) -> str:
    with open(reading) as answer:
        return answer.read()


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def result(server: ForkServer, function: str = "report", argument: str = "", **surroundings: Any) -> Any:
    """What a forked process says, once it has ended well."""
    pid, reading = fork(server, function, argument, **surroundings)
    text = said(reading)
    assert exit_code(pid) == 0
    return json.loads(text)


def refusal(server: ForkServer, environment: Mapping[str, str], meaning: str = AS_WRITTEN) -> str:
    """Why a process with this environment is not forked; "" if it is."""
    try:
        pid = server.fork(Task(f"{TASKS}:exit_with", b"0", dict(environment), meaning), [0, 1, 2, 1])
    except ServerGone as error:
        return str(error)
    assert exit_code(pid) == 0
    return ""


def gone(pid: int) -> bool:
    """Wait for the end of a process, which need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], HANG_SECONDS)[0])
    finally:
        os.close(descriptor)


# What a forked process is.

IMPORTS = """
import os, random, tempfile
import numpy
random.seed(1)
numpy.random.seed(1)
tempfile.gettempdir()
os.environ["SET"] = "by the import"
os.environ["OWN"] = "by the import"
del os.environ["REMOVED"]
"""


def test_it_is_a_child_of_the_process_that_asked_in_the_surroundings_of_its_task(start: Start, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    server = start(IMPORTS, REMOVED="1", VANISHES="1")
    variables = {"REMOVED": "1", "OWN": "mine", "ADDED": "2", "TMPDIR": str(tmp_path / "folder")}
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    surroundings: dict[str, Any] = {
        "environment": environment_with(tmp_path, **variables),
        "folder": str(tmp_path / "folder"),
        "blocked": frozenset({signal.SIGUSR1}),
        "limits": {resource.RLIMIT_NOFILE: (limit - 1, hard)},
        "new_session": True,
    }
    first, second = (result(server, argument="a word", **surroundings) for _ in range(2))
    assert first["parent"] == os.getpid() and len({first["pid"], second["pid"], server.pid}) == 3
    assert (first["argument"], first["modules"]) == ("a word", ["cheap"])
    del variables["REMOVED"]
    assert first["environment"] == environment_with(tmp_path, SET="by the import", **variables)
    assert first["folder"] == first["temporary"] == str(tmp_path / "folder")
    assert first["blocked"] == [signal.SIGUSR1] and first["files"] == [limit - 1, hard]
    assert first["session"] == first["pid"]
    assert first["random"] != second["random"] and first["numpy"] != second["numpy"]
    assert random.Random(1).random() not in (first["random"], second["random"])


def test_its_surroundings_are_those_of_the_process_that_asks_unless_told(start: Start) -> None:
    server = start()
    result(server)  # its limits are as they were
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = (limits[0] - 1, limits[1])  # what SGLang does before it starts its processes, upwards
    resource.setrlimit(resource.RLIMIT_NOFILE, raised)
    try:
        process = result(server)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert process["files"] == list(raised)
    assert process["folder"] == os.getcwd()
    assert process["blocked"] == []  # though the server blocks some
    assert process["session"] == os.getsid(0)
    assert process["environment"] == dict(os.environ)


def test_it_has_the_streams_that_it_is_given_and_ends_as_a_script_ends(start: Start, tmp_path: Path) -> None:
    server = start()
    (tmp_path / "in").write_text("typed")
    with (
        (tmp_path / "in").open() as given,
        (tmp_path / "out").open("w") as out,
        (tmp_path / "error").open("w") as error,
    ):
        streams = [given.fileno(), out.fileno(), error.fileno()]
        assert exit_code(server.fork(Task(f"{TASKS}:use_streams"), streams)) == 0
        assert exit_code(server.fork(Task(f"{TASKS}:fail", b"planted"), streams)) == 1
    assert (tmp_path / "out").read_text() == "out typed\n"
    printed = (tmp_path / "error").read_text()
    assert printed.startswith("error\nTraceback") and printed.endswith("ArithmeticError: planted\n")
    assert len(result(server)["open"]) == 4  # three streams, and the pipe on which it says this
    assert len(psutil.Process(server.pid).open_files()) == 0
    assert exit_code(fork(server, "exit_with", "3")[0]) == 3
    for number in (signal.SIGKILL, signal.SIGTERM):
        pid, reading = fork(server, "wait")
        assert os.read(reading, 20) == str(pid).encode()
        os.kill(pid, number)
        assert exit_code(pid) == -number


def test_its_title_can_be_set_and_its_environment_stays_readable(start: Start) -> None:
    pytest.importorskip("setproctitle")
    server = start("import setproctitle", MARKED="1")
    for length in (10, 5000):
        words, environment = result(server, "set_title", "t" * length)
        assert words[0].startswith("t" * 10)
        assert "MARKED=1" in environment
    pid, reading = fork(server, "wait")
    assert os.read(reading, 20) and pid in with_variable("MARKED", "1")
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL


# Ends.

CLIENT = """
import os, signal, sys
from harness.runtime.fork_server import ForkServer, Task
server = ForkServer.start(["cheap"], os.environ)
if "forked" in sys.argv:
    for ends in (True, False):
        reading, writing = os.pipe()
        print(server.fork(Task("tests.runtime.forked_tasks:wait", ends_with_parent=ends), [0, 2, 2, writing]))
        os.read(reading, 20)
print(server.pid, flush=True)
input()
if "close" in sys.argv:
    server.close()
    print("closed", flush=True)
    input()
"""


def client(tmp_path: Path, text: str, *words: str) -> "subprocess.Popen[str]":
    """A process that starts a server, and prints pids."""
    (tmp_path / "cheap.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, *words],
        env=environment_with(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_server_ends_with_its_client_during_its_imports(tmp_path: Path, end: str) -> None:
    process = client(tmp_path, "import time; time.sleep(600)", end)
    assert process.stdin and process.stdout
    pid = int(process.stdout.readline())
    if end == "kill":
        process.kill()
    else:
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        assert not psutil.pid_exists(pid)  # not a zombie either
    process.communicate("\n" if end == "close" else None)
    assert gone(pid)


def test_a_process_ends_with_its_parent_only_when_asked(tmp_path: Path) -> None:
    process = client(tmp_path, "", "forked")
    assert process.stdout
    ends, stays, server = (int(process.stdout.readline()) for _ in range(3))
    process.kill()
    process.communicate()
    assert gone(ends) and gone(server)
    assert is_alive(psutil.Process(stays))
    os.kill(stays, signal.SIGKILL)
    assert gone(stays)


@pytest.mark.parametrize("with_gpu", [False, True])
def test_a_task_outlives_the_end_of_the_server(start: Start, with_gpu: bool) -> None:
    server = start(OPENS_GPU if with_gpu else "")
    pid, reading = fork(server, "wait", ends_with_parent=True)
    assert os.read(reading, 20) == str(pid).encode()
    server.close()
    assert is_alive(psutil.Process(pid)) and psutil.pid_exists(server.pid) == (pid == server.pid) == with_gpu
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    server.close()  # does nothing


def test_signals_for_the_client_do_not_end_the_server(start: Start) -> None:
    server = start()
    for _ in range(2):  # while Python starts, and after the imports
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(server.pid, number)
        assert result(server)["parent"] == os.getpid()


# Whether a process can be forked.

READING = """
import os
os.environ.get("READ"), os.getenv("GOTTEN"), "ASKED" in os.environ, os.environ.get("SWITCH"), os.environ.get("OTHER")
os.environ.setdefault("DEFAULT", "")
os.environ.setdefault("SET", "5")
"""
GIVEN = {"READ": "1", "UNREAD": "1", "GOTTEN": "1", "DEFAULT": "1", "CUDA_VISIBLE_DEVICES": "1"}


def test_a_variable_that_was_read_and_differs_is_an_obstacle_with_both_values(start: Start, tmp_path: Path) -> None:
    server = start(READING, **GIVEN)

    def refused(meaning: str = AS_WRITTEN, **changed: str) -> str:
        return refusal(server, environment_with(tmp_path, **(GIVEN | changed)), meaning)

    for harmless in ({}, {"UNREAD": "2"}, {"SET": "5"}, {"CUDA_VISIBLE_DEVICES": "2"}):
        assert refused(**harmless) == ""
    assert refused(READ="2") == "READ was '1' during the imports, and is '2' here"
    assert refused(ASKED="3") == "ASKED was unset during the imports, and is '3' here"
    unset = environment_with(tmp_path, **{name: value for name, value in GIVEN.items() if name != "READ"})
    assert refusal(server, unset) == "READ was '1' during the imports, and is unset here"
    libraries = ("LD_PRELOAD", "OMP_NUM_THREADS", "MKL_CBWR", "PYTHONHASHSEED", "LC_ALL")
    for name in ("GOTTEN", "DEFAULT", "SET", *libraries):
        assert name in refused(**{name: "6"})
    assert refused(f"{TASKS}:meaning", SWITCH="0") == "", "which means the same as none"
    assert "SWITCH" in refused(f"{TASKS}:meaning", SWITCH="1")
    assert "OTHER" in refused(f"{TASKS}:meaning", OTHER="0")
    assert "READ" in refusal(start("import os; dict(os.environ)", **GIVEN), unset)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ArithmeticError('planted')", "an import failed: ArithmeticError: planted"),
        ("import os; os._exit(5)", "has ended with exit code 5"),
        ("import sys; sys.exit(6)", "an import failed: SystemExit: 6"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, name='busy', daemon=True).start()",
            "an import has started threads, which a forked process does not have: busy",
        ),
    ],
)
def test_imports_that_fail_are_a_refusal_each_time_that_one_asks(start: Start, text: str, reason: str) -> None:
    server = start(text)
    assert reason in refusal(server, os.environ)
    assert refusal(server, os.environ)
    server.close()
    assert not psutil.pid_exists(server.pid)
    assert refusal(server, os.environ)


@pytest.mark.parametrize("text", ["import time; time.sleep(600)", ""])
def test_a_server_that_is_killed_is_a_refusal(start: Start, text: str) -> None:
    server = start(text)
    if not text:
        assert refusal(server, os.environ) == ""
    os.kill(server.pid, signal.SIGKILL)
    assert "has ended: SIGKILL" in refusal(server, os.environ)
    assert not psutil.pid_exists(server.pid)


def test_what_is_forked_while_the_server_is_killed_is_known(start: Start) -> None:
    """The client must know of it, to wait for it."""
    server = start(
        """
        import os, signal
        real = os.waitpid
        def killed(pid, options):
            real(pid, options)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid = killed
        """
    )
    assert result(server)["parent"] == os.getpid()
    assert refusal(server, os.environ)


@pytest.mark.parametrize("which", [1, 2])
def test_a_server_that_cannot_fork_says_why_and_lives(start: Start, which: int) -> None:
    server = start(
        f"""
        import os
        real, calls = os.fork, []
        def fork():
            calls.append(1)
            if len(calls) == {which}:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return real()
        os.fork = fork
        """
    )
    with pytest.raises(ServerGone, match="cannot fork: .*Resource temporarily unavailable"):
        server.fork(Task(f"{TASKS}:report"))
    if which == 1:  # the second is called in another process each time
        assert result(server)["parent"] == os.getpid()


# Imports that initialize CUDA.


OPENS_GPU = "import os, harness.runtime.fork_server as f; f.GPU = '/dev/zero'; os.open('/dev/zero', 0); "
"""Stands in for an import that initializes CUDA."""


def test_a_server_with_a_gpu_does_one_task_itself(start: Start, tmp_path: Path) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    server = start(OPENS_GPU + thread, CUDA_VISIBLE_DEVICES="1")
    assert "CUDA_VISIBLE_DEVICES was '1'" in refusal(server, environment_with(tmp_path, CUDA_VISIBLE_DEVICES="2"))
    pid, reading = fork(server, "report", ends_with_parent=True)
    process = json.loads(said(reading))
    assert pid == server.pid == process["pid"] and process["parent"] == os.getpid()
    with pytest.raises(ServerGone, match="in use"):
        server.fork(Task(f"{TASKS}:report"))
    server.close()  # leaves the task alone
    assert exit_code(pid) == 0


def test_a_task_of_a_process_that_was_started_late_imports_from_its_folder_only_if_told(
    start: Start, tmp_path: Path
) -> None:
    """The current folder is not on the path, whatever it holds."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "json.py").write_text("")
    file, threads = result(start(), "import_module_of", "json", folder=str(tmp_path / "folder"))
    assert str(tmp_path) not in file and threads == 1


# Servers of this process.

HERE = """
import atexit, json, os, signal, sys, weakref
from harness.runtime.fork_server import ForkServer, Task, import_once, may_fork, printed

def of_the_client(number, frame):
    print("the client's handler ran")

signal.signal(signal.SIGTERM, of_the_client)
import_once(["cheap"], {**os.environ, "READ": "1"})
assert printed() == b"a warning of the import\\n"
import_once(["no_such_module"], os.environ)
assert may_fork() and "READ" not in os.environ and os.environ["SET"] == "by the import"
print("written before the fork", end="")
server = ForkServer.here()

def ask(client, function, argument="", **surroundings):
    reading, writing = os.pipe()
    pid = client.fork(Task("tests.runtime.forked_tasks:" + function, argument.encode(), **surroundings), [0, 1, 2, writing])
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    return text and json.loads(text), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

environment = {**os.environ, "READ": "1"}
first, code = ask(server, "report", environment=environment)
assert code == 0 and first["parent"] == os.getpid() and first["modules"] == ["cheap"], first
assert ask(server, "end_by_sigterm", environment=environment)[1] == -signal.SIGTERM
other = server.clone()
server.close()
assert ask(other, "report", environment=environment)[0]["parent"] == os.getpid()
try:
    ask(other, "report")
except Exception as error:
    assert "READ was '1' during the imports" in str(error), error
else:
    raise AssertionError("it was forked")
third, _ = ask(other, "fork_in_turn", environment=environment)
assert third["grandchild"]["parent"] == third["pid"] and third["grandchild"]["modules"] == ["cheap"], third
other.close()
print(" and after it")
"""


def test_a_process_that_has_imported_forks_a_server_of_its_own(tmp_path: Path) -> None:
    """What is below the server on the stack never runs in a fork of it, nor what the client left unwritten."""
    (tmp_path / "cheap.py").write_text(
        "import os; os.environ.get('READ'); os.environ['SET'] = 'by the import'; print('a warning of the import')"
    )
    words = [sys.executable, "-c", HERE]
    run = subprocess.run(words, env=environment_with(tmp_path), capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (run.returncode, run.stdout) == (0, "written before the fork and after it\n"), run.stderr
