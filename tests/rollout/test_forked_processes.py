"""multiprocessing's own processes, forked from real servers that have imported a module of a few lines."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.rollout.early_start import ForkedProcess, forking
from harness.runtime.fork_server import ForkServer, ServerGone, Task
from tests.rollout import forked_targets
from tests.runtime.test_fork_server import OPENS_GPU

SECONDS = 60
spawning = multiprocessing.get_context("spawn")

Start = Callable[..., ForkServer]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a server that imports `cheap`, a module with this text, in this process's environment."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    with ExitStack() as stack:

        def start_server(text: str = "", *modules: str) -> ForkServer:
            (tmp_path / "cheap.py").write_text(text)
            server = ForkServer.start(["cheap", *modules], dict(os.environ))
            stack.callback(server.close)
            return server

        yield start_server


def received(pipe: Any) -> Any:
    assert pipe.poll(SECONDS), "nothing came"
    return pipe.recv()


def run(target: Callable[..., None], *words: Any) -> Any:
    """Start a process with the writing end of a pipe, and return it with the reading end."""
    reading, writing = spawning.Pipe(duplex=False)
    process = spawning.Process(target=target, args=(writing, *words))
    process.start()
    writing.close()
    return process, reading


def test_a_forked_process_equals_a_spawned_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARIABLE", "1")
    server = start()
    monkeypatch.setenv("VARIABLE", "2")
    seen = []
    for servers in ([server], []):
        with forking(servers) as starts:
            process, pipe = run(forked_targets.answer, "word", 7)
        seen.append(received(pipe))
        process.join(SECONDS)
        assert process.exitcode == 0 and seen[-1].pop("pid") == process.pid
        seen[-1]["name"] = seen[-1]["name"].partition("-")[0]
        assert (starts.forked, starts.spawned) == ((1, 0) if servers else (0, 1))
    assert [process.pop("modules") for process in seen] == [["cheap"], []]
    assert seen[0] == seen[1]
    assert seen[0]["variable"] == "2" and seen[0]["parent"] == os.getpid() and seen[0]["parent lives"]


def test_queues_locks_and_shared_values_work(start: Start) -> None:
    requests, answers, event, lock = spawning.Queue(), spawning.Queue(), spawning.Event(), spawning.Lock()
    counter = spawning.Value("i")
    with forking([start()]) as starts:
        server = spawning.Process(target=forked_targets.serve, args=(requests, answers))
        others = [spawning.Process(target=forked_targets.use_locks, args=(event, lock, counter)) for _ in range(3)]
        for process in (server, *others):
            process.start()
    assert starts.forked == 4
    for number in range(3):
        requests.put(number)
    assert [answers.get(timeout=SECONDS) for _ in range(3)] == [0, 1, 4]
    requests.put(None)
    assert event.wait(SECONDS)
    for process in (server, *others):
        process.join(SECONDS)
        assert process.exitcode == 0
    assert counter.value == 3


def test_two_ends_of_a_pipe_go_to_two_processes(start: Start) -> None:
    ours, theirs = spawning.Pipe()
    with forking([start()]):
        process = spawning.Process(target=forked_targets.end_in_a_thread, args=(theirs,))
        process.start()
    theirs.close()
    ours.send("word")
    assert received(ours) == "word"
    process.join(SECONDS)
    assert process.exitcode == 0
    with pytest.raises(EOFError):
        ours.recv()


def test_exit_codes_are_those_of_spawned_processes(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with forking([start()]) as starts:
        processes = [spawning.Process(target=forked_targets.exit_with, args=(code,)) for code in (0, 3)]
        processes.append(spawning.Process(target=forked_targets.fail))
        for process in processes:
            process.start()
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0, 3, 1] and starts.forked == 3
    assert "ArithmeticError: planted" in capfd.readouterr().err


def test_a_process_lives_until_it_is_killed(start: Start) -> None:
    with forking([start()]):
        process, pipe = run(forked_targets.wait)
    assert received(pipe) == process.pid
    process.join(0.01)
    assert process.is_alive() and process.exitcode is None
    assert wait([process.sentinel], 0) == []
    process.kill()
    assert wait([process.sentinel], SECONDS) == [process.sentinel]
    process.join(SECONDS)
    assert not process.is_alive() and process.exitcode == -signal.SIGKILL
    process.close()


def test_terminate_ends_it_with_sigterm(start: Start) -> None:
    with forking([start()]):
        process, pipe = run(forked_targets.wait)
    received(pipe)
    process.terminate()
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGTERM


# Where a server cannot fork, multiprocessing spawns, and it is said why.


def spawned_because(servers: list[ForkServer]) -> str:
    with forking(servers) as starts:
        processes = [spawning.Process(target=forked_targets.exit_with, args=(3,)) for _ in range(2)]
        for process in processes:
            process.start()
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [3, 3]
    assert not any(isinstance(process._popen, ForkedProcess) for process in processes)  # type: ignore[attr-defined]
    assert (starts.forked, starts.spawned) == (0, 2)
    return starts.why_spawned


def test_a_variable_that_differs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READ", "1")
    server = start("import os; os.environ.get('READ')")
    monkeypatch.setenv("READ", "2")
    assert spawned_because([server]) == "READ was '1' during the imports, and is '2' here"


def test_what_sglang_understands_by_two_values_may_be_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_ENABLE_TORCH_COMPILE", raising=False)
    server = start("import os; os.environ.get('SGLANG_ENABLE_TORCH_COMPILE')")
    monkeypatch.setenv("SGLANG_ENABLE_TORCH_COMPILE", "0")  # as SGLang's Engine writes it
    with forking([server]) as starts:
        process, pipe = run(forked_targets.answer)
    assert received(pipe)["pid"] == process.pid and starts.forked == 1
    process.join(SECONDS)


def test_imports_that_failed(start: Start) -> None:
    assert "ArithmeticError: planted" in spawned_because([start("raise ArithmeticError('planted')")])


@pytest.mark.parametrize("text", ["import time; time.sleep(600)", ""])
def test_a_server_that_was_killed(start: Start, text: str) -> None:
    server = start(text)
    if not text:
        os.waitpid(server.fork(Task("tests.runtime.forked_tasks:exit_with", b"0"), [0, 1, 2]), 0)
    os.kill(server.pid, signal.SIGKILL)
    assert "SIGKILL" in spawned_because([server])


def test_another_program_in_front_of_python(start: Start, tmp_path: Path) -> None:
    """As SGLang does to bind a process to a NUMA node."""
    program = tmp_path / "bound"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("env")} {sys.executable} "$@"\n')
    program.chmod(0o700)
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(program))
    try:
        assert spawned_because([start()]) == f"SGLang starts it by {program}"
    finally:
        multiprocessing.set_executable(before)


def test_no_server_needs_no_reason() -> None:
    assert spawned_because([]) == ""


def test_the_second_server_forks_where_the_first_cannot(start: Start) -> None:
    failed, works = start("raise ArithmeticError", "harness"), None
    with pytest.raises(ServerGone):
        failed.fork(Task(""))  # the imports are done
    works = start()
    with forking([failed, works]) as starts:
        process, pipe = run(forked_targets.answer)
    assert received(pipe)["modules"] == ["cheap"] and starts.forked == 1
    process.join(SECONDS)


def test_after_the_block_processes_are_spawned_again(start: Start) -> None:
    with forking([start()]):
        pass
    process, pipe = run(forked_targets.answer)
    assert received(pipe)["modules"] == []
    process.join(SECONDS)
    assert not isinstance(process._popen, ForkedProcess)


def test_with_a_gpu_each_server_becomes_one_process_and_then_they_are_spawned(start: Start) -> None:
    servers = [start(OPENS_GPU) for _ in range(2)]
    with forking(servers) as starts:
        started = [run(forked_targets.answer) for _ in range(3)]
    seen = [received(pipe) for _, pipe in started]
    for process, _ in started:
        process.join(SECONDS)
        assert process.exitcode == 0
    assert [process["pid"] for process in seen[:2]] == [server.pid for server in servers]
    assert (starts.forked, starts.spawned) == (2, 1)
    assert starts.why_spawned == "every process that was started early is in use"


CLIENT = """
import multiprocessing, os, sys
from harness.rollout.early_start import forking
from harness.runtime.fork_server import ForkServer, ServerGone, Task
from tests.rollout import forked_targets

if __name__ == "__main__":
    spawning = multiprocessing.get_context("spawn")
    server = ForkServer.start(["json"], dict(os.environ))
    reading, writing = spawning.Pipe(duplex=False)
    with forking([server]) as starts:
        process = spawning.Process(target=forked_targets.wait, args=(writing,))
        process.start()
    print(starts.forked, reading.recv(), flush=True)
    input()
"""


def test_a_forked_process_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    words = [sys.executable, str(tmp_path / "client.py")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout
        forked, pid = map(int, client.stdout.readline().split())
        assert forked == 1
        process = psutil.Process(pid)
        client.kill()
    gone, _ = psutil.wait_procs([process], SECONDS)
    assert gone or process.status() == psutil.STATUS_ZOMBIE
