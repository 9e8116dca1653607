"""What is laid to whom: an exception of the rank that builds an engine, or the end of one of the engine's processes."""

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from harness.rollout.engine_log import EngineLog
from harness.rollout.processes import START_POLL_SECONDS, started_processes

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    f()\nValueError: of a scheduler\n'
OWN = AssertionError("max_lora_rank is missing")


@pytest.fixture
def log(tmp_path: Path) -> EngineLog:
    path = tmp_path / "engine-rank0.log"
    path.write_text(f"{TRACEBACK}[2026-11-21 22:03:12] Using custom SIGQUIT handler: <function ignore_signal>\n")
    return EngineLog(path)


def die(number: int) -> None:
    time.sleep(2 * START_POLL_SECONDS)
    if number:
        os.kill(os.getpid(), number)


def started_and_ended(number: int) -> set[BaseProcess]:
    """A process that ended, and that its parent waited for, as SGLang does before it raises."""
    with started_processes() as started:
        process = multiprocessing.get_context("fork").Process(target=die, args=(number,))
        process.start()
        process.join()
    assert not multiprocessing.active_children()
    return started


def test_while_no_process_has_ended_the_exception_is_the_cause(log: EngineLog) -> None:
    assert log.start_failure(OWN, set()).startswith("AssertionError: max_lora_rank is missing (whole log: ")


@pytest.mark.parametrize("number", [0, signal.SIGUSR2])
def test_of_a_process_that_failed_the_log_tells(log: EngineLog, number: int) -> None:
    assert log.start_failure(OWN, started_and_ended(number)).startswith("ValueError: of a scheduler (")


def test_a_killed_process_has_no_last_word(log: EngineLog) -> None:
    assert log.start_failure(OWN, started_and_ended(signal.SIGKILL)).startswith("AssertionError: ")


def test_a_line_that_tells_of_no_error_is_no_cause(log: EngineLog) -> None:
    log.path.write_text("Loading: 50%\n[2026-11-21 22:03:12] Using custom SIGQUIT handler\n")
    asked = ChildProcessError("a process of the engine asked its parent to end")
    assert log.start_failure(asked, set()).startswith("ChildProcessError: a process of the engine asked")


def test_an_error_before_the_last_answer_was_survived(log: EngineLog) -> None:
    assert "died: ValueError: of a scheduler" in log.death("scheduler", 7, "")
    log.answered()
    assert "died of SIGSEGV: its log tells of no error" in log.death("scheduler", 7, "SIGSEGV")
    with log.path.open("a") as file:
        file.write(TRACEBACK.replace("of a", "of this"))
    assert "died: ValueError: of this scheduler" in log.death("scheduler", 7, "")
    assert log.death("scheduler", 7, "SIGKILL").startswith("engine process scheduler (pid 7) died of SIGKILL (whole")
