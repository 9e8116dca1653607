"""multiprocessing's own processes, forked from real servers that have imported a module of a few lines."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.rollout.early_start import ForkedProcess, forking
from harness.runtime.fork_server import ForkServer
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
    for forks in (True, False):
        with forking([server]) if forks else nullcontext() as starts:
            process, pipe = run(forked_targets.answer, "word", 7)
        seen.append(received(pipe))
        process.join(SECONDS)
        assert process.exitcode == 0 and seen[-1].pop("pid") == process.pid
        seen[-1]["name"] = seen[-1]["name"].partition("-")[0]
        assert isinstance(process._popen, ForkedProcess) == forks, "after the block it is spawned"
        assert starts is None or (starts.forked, starts.spawned) == (1, 0)
    assert [process.pop("modules") for process in seen] == [["cheap"], []]
    assert seen[0] == seen[1]
    assert seen[0]["variable"] == "2" and seen[0]["parent"] == os.getpid() and seen[0]["parent lives"]


def test_queues_locks_shared_values_and_pipes_work(start: Start) -> None:
    requests, answers, event, lock = spawning.Queue(), spawning.Queue(), spawning.Event(), spawning.Lock()
    counter = spawning.Value("i")
    ours, theirs = spawning.Pipe()
    with forking([start()]) as starts:
        server = spawning.Process(target=forked_targets.serve, args=(requests, answers))
        others = [spawning.Process(target=forked_targets.use_locks, args=(event, lock, counter)) for _ in range(3)]
        others.append(spawning.Process(target=forked_targets.end_in_a_thread, args=(theirs,)))
        for process in (server, *others):
            process.start()
    assert starts.forked == 5
    theirs.close()
    ours.send("word")
    assert received(ours) == "word"
    for number in range(3):
        requests.put(number)
    assert [answers.get(timeout=SECONDS) for _ in range(3)] == [0, 1, 4]
    requests.put(None)
    assert event.wait(SECONDS)
    for process in (server, *others):
        process.join(SECONDS)
        assert process.exitcode == 0
    assert counter.value == 3
    with pytest.raises(EOFError):
        ours.recv()


def test_a_process_ends_as_a_spawned_one_ends(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with forking([start()]) as starts:
        processes = [spawning.Process(target=forked_targets.exit_with, args=(code,)) for code in (0, 3)]
        processes.append(spawning.Process(target=forked_targets.fail))
        for process in processes:
            process.start()
        (killed, pipe), (ended, other) = (run(forked_targets.wait) for _ in range(2))
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0, 3, 1] and starts.forked == 5
    assert "ArithmeticError: planted" in capfd.readouterr().err
    assert received(pipe) == killed.pid and received(other) == ended.pid
    killed.join(0.01)
    assert killed.is_alive() and killed.exitcode is None
    assert wait([killed.sentinel], 0) == []
    killed.kill()
    assert wait([killed.sentinel], SECONDS) == [killed.sentinel]
    killed.join(SECONDS)
    assert not killed.is_alive() and killed.exitcode == -signal.SIGKILL
    killed.close()
    ended.terminate()
    ended.join(SECONDS)
    assert ended.exitcode == -signal.SIGTERM


def spawned_because(*servers: ForkServer) -> str:
    with forking(servers) as starts:
        processes = [spawning.Process(target=forked_targets.exit_with, args=(3,)) for _ in range(2)]
        for process in processes:
            process.start()
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [3, 3]
    assert (starts.forked, starts.spawned) == (0, 2)
    return starts.why_spawned


def test_where_a_server_cannot_fork_another_does_or_it_is_spawned_and_it_is_said_why(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_ENABLE_TORCH_COMPILE", raising=False)
    monkeypatch.setenv("READ", "1")
    server = start("import os; os.environ.get('READ'); os.environ.get('SGLANG_ENABLE_TORCH_COMPILE')")
    monkeypatch.setenv("SGLANG_ENABLE_TORCH_COMPILE", "0")  # as SGLang's Engine writes it, and the same for it
    with forking([server]) as starts:
        process, pipe = run(forked_targets.answer)
    assert received(pipe)["pid"] == process.pid and starts.forked == 1
    program = tmp_path / "bound"  # SGLang binds a process to a NUMA node by another program in front of Python
    program.write_text(f'#!/bin/sh\nexec {shutil.which("env")} {sys.executable} "$@"\n')
    program.chmod(0o700)
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(program))
    try:
        assert spawned_because(server) == f"SGLang starts it by {program}"
    finally:
        multiprocessing.set_executable(before)
    failed = start("raise ArithmeticError('planted')")
    assert "ArithmeticError: planted" in spawned_because(failed)
    with forking([failed, server]) as starts:
        process, pipe = run(forked_targets.answer)
    assert received(pipe)["modules"] == ["cheap"] and starts.forked == 1
    monkeypatch.setenv("READ", "2")
    assert spawned_because(server) == "READ was '1' during the imports, and is '2' here"
    os.kill(server.pid, signal.SIGKILL)
    assert "SIGKILL" in spawned_because(server)
    assert spawned_because() == ""


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
from harness.runtime.fork_server import ForkServer
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
