"""run_forked_tree: what run_tree promises, for programs that are forked."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from harness.runtime.fork_server import ForkServer, Task
from harness.tools.repro.forked_tree import run_forked_tree
from harness.tools.run_tree import Ended, SupervisorKilled

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    found = ForkServer.start([__name__], {**os.environ, "PYTHONPATH": str(REPOSITORY)})
    yield found
    found.close()


def run(
    server: ForkServer,
    function: Callable[[bytes], None],
    folder: Path,
    **variables: str,
) -> tuple[Ended, str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    log = folder / "log"
    with log.open("wb") as output:
        name = f"{__name__}:{function.__name__}"
        ended = run_forked_tree(server, name, b"word", output=output, cwd=folder, env=env, tick=lambda: None)
    return ended, log.read_text()


def running(folder: Path) -> list[int]:
    """Return those of the processes in folder/pids that still run."""
    pids = map(int, (folder / "pids").read_text().split())
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def leave_processes() -> None:
    """Leave an orphan that is forked and one that is another program, each in a session of its own."""
    if not (forked := os.fork()):
        os.setsid()
        time.sleep(1000)
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path("new").write_text(f"{os.getpid()} {forked} {program.pid}")
    Path("new").rename("pids")


def speak_and_fail(argument: bytes) -> None:
    leave_processes()
    print(argument.decode(), os.environ["MARK"], os.getcwd(), repr(sys.stdin.read()))
    print("and this", file=sys.stderr)
    sys.exit(7)


def test_code_and_output_of_a_program_whose_orphans_are_ended(server: ForkServer, tmp_path: Path) -> None:
    ended, output = run(server, speak_and_fail, tmp_path, MARK="here")
    assert (ended.code, ended.timed_out) == (7, False)
    assert set(output.splitlines()) == {f"word here {tmp_path} ''", "and this"}
    assert not running(tmp_path)


def fork_once_more(_: bytes) -> None:
    (own,) = ForkServer.handed_over()
    status = os.waitpid(own.fork(Task(f"{__name__}:exit_with_9")), 0)[1]
    os.kill(os.getpid(), signal.SIGQUIT if os.waitstatus_to_exitcode(status) == 9 else signal.SIGABRT)


def exit_with_9(_: bytes, __: Sequence[int] = ()) -> None:
    sys.exit(9)


def test_a_program_has_a_server_and_signals_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    # A program inherits what this process blocks, as a started one would; an earlier test may have left something.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGQUIT})
    assert run(server, fork_once_more, tmp_path)[0].code == -signal.SIGQUIT


def kill_supervisor(_: bytes) -> None:
    leave_processes()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def test_a_program_that_kills_its_supervisor_leaves_nothing(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(SupervisorKilled):
        run(server, kill_supervisor, tmp_path)
    assert not running(tmp_path)
    assert run(server, exit_with_9, tmp_path)[0].code == 9


def show_key(_: bytes) -> None:
    print(multiprocessing.current_process().authkey.hex())


def test_two_programs_have_different_keys_for_connections(server: ForkServer, tmp_path: Path) -> None:
    keys = {run(server, show_key, tmp_path)[1] for _ in range(2)} | {multiprocessing.current_process().authkey.hex()}
    assert len(keys) == 3
