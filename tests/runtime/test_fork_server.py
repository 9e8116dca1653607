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
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.runtime.fork_server import HANDED_OVER, ForkServer, ServerGone, Task, as_written
from harness.runtime.processes import is_alive
from harness.tools.run_tree import with_variable

REPOSITORY = Path(__file__).resolve().parents[2]
TASKS = "tests.runtime.forked_tasks"
HANG_SECONDS = 60

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
    return os.environ | {"PYTHONPATH": f"{folder}:{REPOSITORY}"} | variables


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server that imports `cheap`, a module with this text, in this environment."""
    with ExitStack() as stack:

        def start_server(text: str = "", *modules: str, **variables: str) -> ForkServer:
            (tmp_path / "cheap.py").write_text(textwrap.dedent(text))
            server = ForkServer.start(["cheap", *modules], environment_with(tmp_path, **variables))
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


def test_it_is_a_child_of_the_process_that_asked_and_not_of_the_server(start: Start) -> None:
    server = start()
    pid, reading = fork(server, "report", "a word")
    process = json.loads(said(reading))
    assert (process["pid"], process["parent"], process["argument"]) == (pid, os.getpid(), "a word")
    assert process["modules"] == ["cheap"]
    assert exit_code(pid) == 0 and server.pid != pid


@pytest.mark.parametrize("code", [0, 3])
def test_its_exit_code_is_that_of_sys_exit(start: Start, code: int) -> None:
    pid, _ = fork(start(), "exit_with", str(code))
    assert exit_code(pid) == code


def test_its_exception_is_printed_with_a_traceback_and_ends_it_with_1(start: Start) -> None:
    server = start()
    reading, writing = os.pipe()
    pid = server.fork(Task(f"{TASKS}:fail", b"planted"), [0, 1, writing])
    os.close(writing)
    text = said(reading)
    assert exit_code(pid) == 1
    assert "Traceback" in text and text.rstrip().endswith("ArithmeticError: planted")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_by_a_signal_its_exit_code_is_negative(start: Start, number: signal.Signals) -> None:
    pid, reading = fork(start(), "wait")
    assert os.read(reading, 20) == str(pid).encode()
    os.kill(pid, number)
    assert exit_code(pid) == -number
    os.close(reading)


def test_a_server_forks_many(start: Start) -> None:
    server = start()
    assert len({result(server)["pid"] for _ in range(5)}) == 5


def test_its_surroundings_are_those_of_the_task(start: Start, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    server = start("", VANISHES="1")
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = result(
        server,
        environment=environment_with(tmp_path, ADDED="2"),
        folder=str(tmp_path / "folder"),
        blocked=frozenset({signal.SIGUSR1}),
        limits={resource.RLIMIT_NOFILE: (limit - 1, hard)},
        new_session=True,
    )
    assert process["environment"] == environment_with(tmp_path, ADDED="2")
    assert process["folder"] == str(tmp_path / "folder")
    assert process["blocked"] == [signal.SIGUSR1]
    assert process["files"] == [limit - 1, hard]
    assert process["session"] == process["pid"]


def test_its_surroundings_are_those_of_the_process_that_asks_unless_told(start: Start) -> None:
    server = start()
    assert server.imported()
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


def test_it_has_the_streams_and_descriptors_that_it_is_given_and_no_others(start: Start, tmp_path: Path) -> None:
    server = start()
    (tmp_path / "in").write_text("typed")
    with (
        (tmp_path / "in").open() as given,
        (tmp_path / "out").open("w") as out,
        (tmp_path / "error").open("w") as error,
    ):
        pid = server.fork(Task(f"{TASKS}:use_streams"), [given.fileno(), out.fileno(), error.fileno()])
    assert exit_code(pid) == 0
    assert (tmp_path / "out").read_text() == "out typed\n"
    assert (tmp_path / "error").read_text() == "error\n"
    assert len(result(server)["open"]) == 4  # three streams, and the pipe on which it says this
    assert len(psutil.Process(server.pid).open_files()) == 0


def test_it_gets_what_the_imports_would_have_set_in_its_environment(start: Start, tmp_path: Path) -> None:
    server = start(
        """
        import os
        os.environ["SET"] = "by the import"
        os.environ["OWN"] = "by the import"
        del os.environ["REMOVED"]
        """,
        REMOVED="1",
    )
    process = result(server, environment=environment_with(tmp_path, REMOVED="1", OWN="mine"))
    assert process["environment"] == environment_with(tmp_path, SET="by the import", OWN="mine")


def test_what_the_imports_print_is_kept(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    server = start("import os, sys; print('out'); print('error', file=sys.stderr); os.write(1, b'raw\\n')")
    assert sorted(server.imported().printed.split()) == [b"error", b"out", b"raw"]
    assert capfd.readouterr() == ("", "")


def test_no_two_have_the_same_random_numbers(start: Start) -> None:
    server = start("import random, numpy; random.seed(1); numpy.random.seed(1)")
    seen = [result(server) for _ in range(2)]
    assert len({process["random"] for process in seen}) == 2 and random.Random(1).random() not in seen[0].values()
    assert len({process["numpy"] for process in seen}) == 2


def test_it_uses_the_folder_for_temporary_files_of_its_task(start: Start, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    server = start("import tempfile; tempfile.gettempdir()")
    environment = environment_with(tmp_path, TMPDIR=str(tmp_path / "new"))
    assert server.obstacle(environment) == ""
    assert result(server, environment=environment)["temporary"] == str(tmp_path / "new")


@pytest.mark.parametrize("length", [10, 5000])
def test_its_title_can_be_set_and_its_environment_stays_readable(start: Start, length: int) -> None:
    pytest.importorskip("setproctitle")
    server = start("import setproctitle", MARKED="1")
    words, environment = result(server, "set_title", "t" * length)
    assert words[0].startswith("t" * 10)
    assert "MARKED=1" in environment
    pid, reading = fork(server, "wait")
    assert os.read(reading, 20) and pid in with_variable("MARKED", "1")
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    os.close(reading)


# Ends.

CLIENT = """
import os, signal, sys
from harness.runtime.fork_server import ForkServer, Task
server = ForkServer.start(["cheap"], os.environ)
if "imported" in sys.argv:
    server.imported()
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


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
@pytest.mark.parametrize("when", ["during its imports", "imported"])
def test_a_server_ends_with_its_client(tmp_path: Path, end: str, when: str) -> None:
    process = client(tmp_path, "import time; time.sleep(600)" if when != "imported" else "", end, when)
    assert process.stdin and process.stdout
    pid = int(process.stdout.readline())
    if end == "kill":
        process.kill()
    else:
        process.stdin.write("\n")
        process.stdin.flush()
    if end == "close":
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


def test_forked_processes_outlive_the_server(start: Start) -> None:
    server = start()
    pid, reading = fork(server, "wait", ends_with_parent=True)
    assert os.read(reading, 20)
    server.close()
    assert is_alive(psutil.Process(pid)) and not psutil.pid_exists(server.pid)
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    os.close(reading)
    server.close()  # does nothing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_for_the_client_do_not_end_the_server(start: Start, number: signal.Signals) -> None:
    server = start()
    for _ in range(2):  # while Python starts, and after the imports
        os.kill(server.pid, number)
        assert result(server)["parent"] == os.getpid()


# Whether a process can be forked.


def test_a_variable_that_was_read_and_differs_is_an_obstacle_with_both_values(start: Start, tmp_path: Path) -> None:
    server = start("import os; os.environ.get('READ'); 'ASKED' in os.environ", READ="1", UNREAD="1")
    assert server.obstacle(environment_with(tmp_path, READ="1", UNREAD="2")) == ""
    assert server.obstacle(environment_with(tmp_path, READ="2")) == "READ was '1' during the imports, and is '2' here"
    assert server.obstacle(environment_with(tmp_path)) == "READ was '1' during the imports, and is unset here"
    asked = server.obstacle(environment_with(tmp_path, READ="1", ASKED="3"))
    assert asked == "ASKED was unset during the imports, and is '3' here"


@pytest.mark.parametrize(
    "read", ["os.getenv('READ')", "dict(os.environ)", "os.environ.copy()", "os.environ.setdefault('READ', '')"]
)
def test_every_way_of_reading_counts(start: Start, tmp_path: Path, read: str) -> None:
    server = start(f"import os; {read}", READ="1")
    assert "READ" in server.obstacle(environment_with(tmp_path, READ="2"))


@pytest.mark.parametrize("name", ["LD_PRELOAD", "OMP_NUM_THREADS", "MKL_CBWR", "PYTHONHASHSEED", "LC_ALL"])
def test_variables_that_libraries_read_count(start: Start, tmp_path: Path, name: str) -> None:
    server = start()
    assert name in server.obstacle(environment_with(tmp_path) | {name: "3"})


def test_a_value_that_the_imports_have_set_themselves_is_none(start: Start, tmp_path: Path) -> None:
    server = start("import os; os.environ.setdefault('SET', '5')")
    assert server.obstacle(environment_with(tmp_path)) == ""
    assert server.obstacle(environment_with(tmp_path, SET="5")) == ""
    assert server.obstacle(environment_with(tmp_path, SET="6"))


def test_values_of_one_meaning_are_equal(start: Start, tmp_path: Path) -> None:
    def meaning(name: str, value: str | None) -> object:
        return (value or "0").lower() in ("1", "true") if name == "SWITCH" else value

    server = start("import os; os.environ.get('SWITCH'); os.environ.get('OTHER')")
    assert server.obstacle(environment_with(tmp_path, SWITCH="0"), meaning) == ""
    assert "SWITCH" in server.obstacle(environment_with(tmp_path, SWITCH="1"), meaning)
    assert "OTHER" in server.obstacle(environment_with(tmp_path, OTHER="0"), meaning)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ArithmeticError('planted')", "an import failed: ArithmeticError: planted"),
        ("import no_such_module", "an import failed: ModuleNotFoundError"),
        ("import os; os._exit(5)", "during them with exit code 5"),
        ("import sys; sys.exit(6)", "an import failed: SystemExit: 6"),
        ("import os; os.kill(os.getpid(), 11)", "during them: SIGSEGV"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, name='busy', daemon=True).start()",
            "an import has started threads, which a forked process does not have: busy",
        ),
    ],
)
def test_imports_that_fail_are_an_obstacle_each_time_that_one_asks(start: Start, text: str, reason: str) -> None:
    server = start(text)
    for _ in range(2):
        assert reason in server.obstacle(os.environ)
        with pytest.raises(ServerGone, match=reason):
            server.fork(Task(f"{TASKS}:report"))
    server.close()
    assert not psutil.pid_exists(server.pid)
    assert reason in server.obstacle(os.environ)


def test_a_server_that_is_killed_during_its_imports_is_an_obstacle(start: Start) -> None:
    server = start("import time; time.sleep(600)")
    os.kill(server.pid, signal.SIGKILL)
    assert "has ended during them: SIGKILL" in server.obstacle(os.environ)
    with pytest.raises(ServerGone, match="SIGKILL"):
        server.fork(Task(f"{TASKS}:report"))


def test_a_server_that_is_killed_after_its_imports_says_so_when_it_should_fork(start: Start) -> None:
    server = start()
    assert server.imported().obstacle(server.imported().environment, as_written) == ""
    os.kill(server.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ServerGone, match="has ended after them: SIGKILL"):
            server.fork(Task(f"{TASKS}:report"))
    assert "SIGKILL" in server.obstacle(os.environ)
    assert not psutil.pid_exists(server.pid)


def test_what_is_forked_while_the_server_is_killed_never_runs(start: Start, tmp_path: Path) -> None:
    """The client would not know of it."""
    server = start(
        """
        import os, signal
        real, server = os.waitpid, os.getpid()
        def killed(pid, options):
            real(pid, options)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid = killed
        """
    )
    before = set(psutil.Process().children())
    reading, writing = os.pipe()
    with pytest.raises(ServerGone, match="SIGKILL"):
        server.fork(Task(f"{TASKS}:report"), [0, 1, 2, writing])
    os.close(writing)
    assert said(reading) == ""
    [orphan] = set(psutil.Process().children()) - before  # it became a child of this process
    assert exit_code(orphan.pid) == 1


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
    if which == 1:
        assert result(server)["parent"] == os.getpid()
    server.close()


# Servers of forked processes.


def test_a_process_that_gets_a_server_forks_in_turn(start: Start) -> None:
    server = start("import os; os.environ.get('READ')")
    process = result(server, "fork_in_turn", "word", gets_server=True)
    assert process["grandchild"]["parent"] == process["pid"] and process["grandchild"]["argument"] == "word"
    assert process["grandchild"]["modules"] == ["cheap"]
    assert process["code"] == 0
    assert gone(process["server"])
    assert result(server)["modules"] == ["cheap"]  # it forks on


def test_a_server_that_its_process_does_not_ask_for_ends_with_it(start: Start) -> None:
    server = start()
    pid, reading = fork(server, "name_server", gets_server=True)
    descriptor, own = (int(part) for part in json.loads(said(reading)).split(":"))
    assert descriptor > 2 and exit_code(pid) == 0
    assert gone(own)
    assert result(server, "name_server") is None


def test_the_server_of_a_process_does_not_hold_what_was_passed_to_the_process(start: Start) -> None:
    """A pipe that shows the end of a process must close with it, even if its server is stopped."""
    server = start()
    reading, writing = os.pipe()
    pid, answer = fork(server, "wait", gets_server=True)
    assert os.read(answer, 20) == str(pid).encode()
    [own] = psutil.Process(pid).children()
    pipe = f"/proc/self/fd/{answer}"
    while os.readlink(pipe) in {file.resolve().name for file in Path(f"/proc/{own.pid}/fd").iterdir()}:
        time.sleep(0.01)  # it closes what it has inherited as it begins
    own.suspend()
    os.close(writing)
    os.kill(pid, signal.SIGKILL)
    assert os.read(answer, 20) == b""
    assert exit_code(pid) == -signal.SIGKILL
    assert gone(own.pid)
    for each in (reading, answer):
        os.close(each)


def test_the_variable_of_an_ancestor_hands_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ForkServer.handed_over() == []
    monkeypatch.setenv(HANDED_OVER, f"5:{os.getppid()}")
    assert ForkServer.handed_over() == [] and HANDED_OVER not in os.environ
    monkeypatch.setenv(HANDED_OVER, "5:999999999")
    assert ForkServer.handed_over() == []


# Imports that initialize CUDA.


@pytest.fixture
def with_stub_of_initialized_torch(tmp_path: Path) -> None:
    """Stand in for torch on a machine without a GPU: CUDA says that the imports have initialized it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import cuda\n")
    (tmp_path / "torch" / "cuda.py").write_text("def is_initialized():\n    return True\n")


@pytest.mark.usefixtures("with_stub_of_initialized_torch")
def test_a_server_with_cuda_does_one_task_itself(start: Start, tmp_path: Path) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    server = start(thread, "torch")
    assert not server.imported().forks and not server.used_up
    pid, reading = fork(server, "report", ends_with_parent=True, gets_server=True)
    process = json.loads(said(reading))
    assert pid == server.pid == process["pid"] and process["parent"] == os.getpid()
    assert HANDED_OVER not in process["environment"]
    assert server.used_up
    with pytest.raises(ServerGone, match="does a task"):
        server.fork(Task(f"{TASKS}:report"))
    server.close()  # leaves the task alone
    assert exit_code(pid) == 0


@pytest.mark.usefixtures("with_stub_of_initialized_torch")
def test_a_server_with_cuda_is_not_ended_with_its_task_unfinished(start: Start) -> None:
    server = start("", "torch")
    pid, reading = fork(server, "wait")
    assert os.read(reading, 20) == str(pid).encode()
    server.close()
    assert is_alive(psutil.Process(pid))
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    os.close(reading)


@pytest.mark.usefixtures("with_stub_of_initialized_torch")
def test_with_cuda_every_variable_of_cuda_counts(start: Start, tmp_path: Path) -> None:
    server = start("", "torch", CUDA_VISIBLE_DEVICES="1")
    assert "CUDA_VISIBLE_DEVICES was '1'" in server.obstacle(environment_with(tmp_path, CUDA_VISIBLE_DEVICES="2"))


def test_without_cuda_they_do_not(start: Start, tmp_path: Path) -> None:
    server = start("", CUDA_VISIBLE_DEVICES="1")
    assert server.obstacle(environment_with(tmp_path, CUDA_VISIBLE_DEVICES="2")) == ""


def test_a_task_of_a_process_that_was_started_late_imports_from_its_folder_only_if_told(
    start: Start, tmp_path: Path
) -> None:
    """The current folder is not on the path, whatever it holds."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "json.py").write_text("")
    file, threads = result(start(), "import_module_of", "json", folder=str(tmp_path / "folder"))
    assert str(tmp_path) not in file and threads == 1


# Servers that a server starts before its imports.


def test_a_server_hands_over_the_servers_that_it_started_first(start: Start, tmp_path: Path) -> None:
    start()  # the module is there
    server = ForkServer.start(
        ["json"], environment_with(tmp_path), first=f"{TASKS}:start_another", argument="cheap", new_session=True
    )
    assert not server.imported().forks
    process = result(server, "fork_in_turn", new_session=True)
    assert process["pid"] == server.pid and process["server"] != server.pid
    assert process["grandchild"]["parent"] == server.pid and process["grandchild"]["modules"] == ["cheap"]
    assert process["grandchild"]["session"] == server.pid
    assert gone(process["server"])


def test_what_a_server_started_first_ends_with_it(start: Start, tmp_path: Path) -> None:
    start("import time; time.sleep(600)")
    server = ForkServer.start(["json"], environment_with(tmp_path), first=f"{TASKS}:start_another", argument="cheap")
    server.imported()
    [another] = psutil.Process(server.pid).children()
    server.close()
    assert gone(another.pid)


def test_a_failure_before_the_imports_is_an_obstacle(tmp_path: Path) -> None:
    server = ForkServer.start([], environment_with(tmp_path), first=f"{TASKS}:start_another", argument="fails")
    assert "ArithmeticError: planted" in server.obstacle(os.environ)
    server.close()
