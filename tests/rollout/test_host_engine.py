"""The processes of an engine: their output, their errors, their deaths, with real children; SIGQUIT in real event
loops."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvloop

from harness.rollout import host_engine, sglang_api
from harness.rollout.host_engine import (
    TAKEN,
    EngineLog,
    output_to,
    own_handlers,
    restore_handlers,
    started_processes,
    watch_processes,
)
from harness.runtime.processes import end_processes


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_engine, "POLL_SECONDS", 0.05)


SLEEPER = "import time; time.sleep(60)"


def python(code: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code], text=True, **options)


def test_a_child_goes_on_writing_to_the_file_after_it_closes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    log.write_text("Traceback (most recent call last):\nValueError: of an earlier run\n")
    deadline = time.monotonic() + 20
    os.write(1, b"before\n")
    with output_to(log):
        child = python("print('child', flush=True); input(); print('late', flush=True)", stdin=subprocess.PIPE)
        while log.read_text() != "child\n" and time.monotonic() < deadline:
            time.sleep(0.02)
        os.write(2, b"descriptor 2\n")
    os.write(1, b"after\n")
    child.communicate("\n", timeout=20)
    assert log.read_text() == "child\ndescriptor 2\nlate\n"
    assert capfd.readouterr() == ("before\nafter\n", "")


def test_python_streams_are_flushed_at_both_ends(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from harness.rollout.host_engine import output_to\n"
        "print('before')\nwith output_to(Path('log')): print('within')\nprint('after')"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment) == b"before\nafter\n"
    assert (tmp_path / "log").read_text() == "within\n"


def test_output_comes_back_after_an_exception_and_no_descriptor_leaks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError), output_to(tmp_path / "log"):
        raise RuntimeError
    with pytest.raises(IsADirectoryError), output_to(tmp_path):
        pass
    assert len(os.listdir("/proc/self/fd")) == descriptors
    os.write(1, b"here\n")
    assert capfd.readouterr().out == "here\n"


def watched(*processes: psutil.Process) -> tuple[threading.Event, list[tuple[str, int, str]], threading.Event]:
    deaths: list[tuple[str, int, str]] = []
    told = threading.Event()

    def on_death(name: str, pid: int, signal_name: str) -> None:
        deaths.append((name, pid, signal_name))
        told.set()

    return watch_processes({process.pid: process for process in processes}, on_death), deaths, told


def test_a_child_killed_by_sigkill_is_reported_once_though_nobody_reaps_it() -> None:
    child = python(SLEEPER)
    _, deaths, told = watched(psutil.Process(child.pid))
    name = psutil.Process(child.pid).name()
    child.send_signal(signal.SIGKILL)
    assert told.wait(10)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    while any(thread.name == "engine-watch" for thread in threading.enumerate()):
        time.sleep(0.01)  # it ends with the first report
    assert deaths == [(name, child.pid, "")]  # whose signal the one who started it will hear
    child.wait()


def test_of_several_dead_children_the_killed_one_is_reported_with_its_signal_whoever_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_engine, "POLL_SECONDS", 2.0)  # for both to be gone when it reports
    fork = multiprocessing.get_context("fork")
    may_leave = fork.Event()
    leaver = fork.Process(target=may_leave.wait, daemon=True)
    victim, living = (fork.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2))
    for process in (leaver, victim, living):
        process.start()
    assert leaver.pid and victim.pid and living.pid
    _, deaths, told = watched(*(psutil.Process(process.pid) for process in (leaver, living, victim)))
    may_leave.set()
    leaver.join()
    victim.kill()
    victim.join()
    assert told.wait(20)
    assert [death[1:] for death in deaths] == [(victim.pid, "SIGKILL")]
    assert host_engine.ending_signal(leaver) == host_engine.ending_signal(living) == ""
    living.kill()
    living.join()


def test_of_children_that_failed_one_by_one_the_first_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_engine, "POLL_SECONDS", 2.0)  # for both to be gone when it reports
    code = "input(); raise SystemExit(sum(range(5_000_000)) > 0)"  # in which the watcher surely wakes
    follower, first = (python(code, stdin=subprocess.PIPE) for _ in range(2))
    _, deaths, told = watched(psutil.Process(follower.pid), psutil.Process(first.pid))
    for child in (first, follower):
        child.communicate("1\n", timeout=20)
    assert told.wait(20)
    assert [pid for _, pid, _ in deaths] == [first.pid]


def test_a_killed_child_has_its_signal_before_anybody_can_wait_for_it() -> None:
    """Kernels show a zombie while its last threads end, for which waitpid() gives nothing yet.

    The stand-in is multiprocessing's object, as it is in that moment; the zombie is real.
    """
    child = python(SLEEPER)
    stand_in: Any = SimpleNamespace(pid=child.pid, exitcode=None)
    assert host_engine.ending_signal(stand_in) == ""
    child.send_signal(signal.SIGKILL)
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert host_engine.ending_signal(stand_in) == "SIGKILL"
    child.wait()


def test_a_child_that_was_gone_before_the_watch_is_reported_and_none_after_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child, other = python(SLEEPER), python(SLEEPER)
    process, later = psutil.Process(child.pid), psutil.Process(other.pid)
    child.kill()
    child.wait()
    _, deaths, told = watched(process)
    assert told.wait(10)
    assert [pid for _, pid, _ in deaths] == [child.pid]
    monkeypatch.setattr(host_engine, "POLL_SECONDS", 2.0)  # for the stop to come before it reports
    stop, deaths, told = watched(later)
    end_processes({other.pid: later})
    stop.set()
    assert not told.wait(1.5 * host_engine.POLL_SECONDS) and deaths == []
    assert not psutil.pid_exists(other.pid)


TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    f()\nValueError: of a scheduler\n'
OWN = AssertionError("max_lora_rank is missing")


@pytest.fixture
def log(tmp_path: Path) -> EngineLog:
    path = tmp_path / "engine-rank0.log"
    path.write_text(f"{TRACEBACK}[2026-11-21 22:03:12] Using custom SIGQUIT handler: <function ignore_signal>\n")
    return EngineLog(path)


def die(number: int) -> None:
    if number:
        os.kill(os.getpid(), number)


def started_and_ended(number: int) -> list[BaseProcess]:
    """A process that ended, and that its parent waited for, as SGLang does before it raises."""
    with started_processes() as started:
        process = multiprocessing.get_context("fork").Process(target=die, args=(number,))
        process.start()
        process.join()
    assert not multiprocessing.active_children()
    return started


def test_of_a_process_that_failed_the_log_tells_and_else_the_exception_is_the_cause(log: EngineLog) -> None:
    assert log.start_failure(OWN, []).startswith("AssertionError: max_lora_rank is missing (whole log: ")
    for number in (0, signal.SIGUSR2):
        assert log.start_failure(OWN, started_and_ended(number)).startswith("ValueError: of a scheduler (")
    killed = started_and_ended(signal.SIGKILL)
    assert log.start_failure(OWN, killed).startswith("AssertionError: "), "it had no last word"


def test_an_error_before_the_last_answer_was_survived(log: EngineLog) -> None:
    assert "died: ValueError: of a scheduler" in log.death("scheduler", 7, "")
    log.answered()
    assert "died of SIGSEGV: there is no error in its log" in log.death("scheduler", 7, "SIGSEGV")
    with log.path.open("a") as file:
        file.write(TRACEBACK.replace("of a", "of this"))
    assert "died: ValueError: of this scheduler" in log.death("scheduler", 7, "")
    assert log.death("scheduler", 7, "SIGKILL").startswith("engine process scheduler (pid 7) died of SIGKILL (whole")


IGNORED = "Exception ignored in: <function X.__del__>\n"
TRACKER = TRACEBACK.replace("x.py", "multiprocessing/resource_tracker.py").replace("ValueError", "KeyError")


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("Loading: 50%\n", ""),
        (f"[2026-11-20 22:04:42 TP1] Scheduler hit an exception: {TRACEBACK}", "ValueError: of a scheduler"),
        (TRACEBACK.replace("ValueError", "Loading: 50%\nsafetensors._rust.SafetensorError"),
         "safetensors._rust.SafetensorError: of a scheduler"),
        (f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n"
         f"{TRACEBACK.replace('ValueError', 'RuntimeError')}", "ValueError: of a scheduler"),
        (IGNORED + TRACEBACK, ""),
        (f"{IGNORED}BrokenPipeError: [Errno 32]\n{TRACEBACK}", "ValueError: of a scheduler"),
        (TRACKER, ""),
        (f"{TRACKER}Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n",
         "Fatal Python error: Segmentation fault"),
    ],
)  # fmt: skip
def test_the_first_error_of_a_log_is_the_cause(log: str, error: str) -> None:
    assert host_engine.first_error(log) == error


POLICIES = [uvloop.EventLoopPolicy, asyncio.DefaultEventLoopPolicy]


@pytest.fixture
def own() -> Iterator[dict[signal.Signals, Any]]:
    handlers = own_handlers()
    yield handlers
    restore_handlers(handlers, engine_serves=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_handler_set_in_the_loop_is_removed_for_every_later_call(
    policy: type[asyncio.AbstractEventLoopPolicy], own: dict[signal.Signals, Any]
) -> None:
    loop = policy().new_event_loop()
    called: list[str] = []

    def start() -> None:
        for number in TAKEN:
            loop.add_signal_handler(number, called.append, "SGLang's")

    async def serve() -> None:
        os.kill(os.getpid(), signal.SIGQUIT)
        await asyncio.sleep(0.05)

    manager = SimpleNamespace(auto_create_handle_loop=start)
    sglang_api.start_loop(
        SimpleNamespace(loop=loop, tokenizer_manager=manager), TAKEN, lambda task, error: called.append(task)
    )
    restore_handlers(own, engine_serves=True)
    loop.run_until_complete(serve())
    loop.close()
    assert called == []


async def print_exception_wrapper(task: Callable[[], Awaitable[None]]) -> None:
    """SGLang's, as far as it matters: it kills the process whose task failed."""
    try:
        await task()
    except Exception:
        os.kill(os.getpid(), signal.SIGKILL)


class TokenizerManager:
    """Creates its task as SGLang's does; the task waits for an answer, which is garbage."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.answer = loop, loop.create_future()
        self.tasks: list[asyncio.Task[None]] = []

    def auto_create_handle_loop(self) -> None:
        self.tasks.append(self.loop.create_task(print_exception_wrapper(self.handle_loop)))

    async def handle_loop(self) -> None:
        pickle.loads(await self.answer)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_task_that_fails_is_told_and_the_call_that_waits_raises(
    policy: type[asyncio.AbstractEventLoopPolicy], log: EngineLog
) -> None:
    loop, told = policy().new_event_loop(), list[str]()
    manager = TokenizerManager(loop)
    engine = SimpleNamespace(loop=loop, tokenizer_manager=manager)
    sglang_api.start_loop(engine, (), lambda task, error: told.append(log.task_failure(task, error)))
    loop.call_soon(manager.answer.set_result, b"garbage")
    with pytest.raises(RuntimeError, match="stopped before"):
        loop.run_until_complete(loop.create_future())
    loop.close()
    said = "SGLang's TokenizerManager.handle_loop failed in this process: _pickle.UnpicklingError: pickle data was truncated"
    assert [each.split(" (")[0] for each in told] == [f"EngineFailed: {said}"]
    assert log.path.read_text().splitlines()[-1] == "_pickle.UnpicklingError: pickle data was truncated"


def test_handlers_are_as_before_once_the_engine_has_ended(own: dict[signal.Signals, Any]) -> None:
    before = [signal.getsignal(number) for number in TAKEN]
    restore_handlers(own, engine_serves=True)
    assert signal.getsignal(signal.SIGQUIT) not in before
    restore_handlers(own, engine_serves=False)
    assert [signal.getsignal(number) for number in TAKEN] == before
