"""output_to and ChildWatch, with real children."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.rollout import processes
from harness.rollout.processes import ChildWatch, output_to
from harness.runtime.processes import end_processes

SLEEPER = "import time; time.sleep(60)"


def python(code: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code], text=True, **options)


def first_line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def test_a_child_goes_on_writing_to_the_file_after_it_closes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "engine.log"
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
        "from pathlib import Path; from harness.rollout.processes import output_to\n"
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


def test_what_an_earlier_run_left_in_the_file_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\nValueError: of yesterday\n")
    with output_to(log):
        os.write(1, b"today\n")
    assert log.read_text() == "today\n"


def watched(*pids: int) -> tuple[ChildWatch, list[tuple[str, int, str]], threading.Event]:
    deaths: list[tuple[str, int, str]] = []
    told = threading.Event()

    def on_death(name: str, pid: int, signal_name: str) -> None:
        deaths.append((name, pid, signal_name))
        told.set()

    return ChildWatch({pid: psutil.Process(pid) for pid in pids}, on_death), deaths, told


def test_a_child_killed_by_sigkill_is_reported_once_though_nobody_reaps_it() -> None:
    child = python(SLEEPER)
    watch, deaths, told = watched(child.pid)
    watch.start()
    assert not told.wait(2 * processes.POLL_SECONDS)
    name = psutil.Process(child.pid).name()
    child.send_signal(signal.SIGKILL)
    assert told.wait(10)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    time.sleep(2 * processes.POLL_SECONDS)
    assert deaths == [(name, child.pid, "")]  # whose signal the one who started it will hear
    child.wait()


def test_of_several_dead_children_the_killed_one_is_reported_with_its_signal_whoever_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "POLL_SECONDS", 5.0)  # for both to be gone when it looks
    spawn = multiprocessing.get_context("spawn")
    leaver, victim, living = (spawn.Process(target=time.sleep, args=(seconds,)) for seconds in (0, 600, 600))
    for process in (leaver, victim, living):
        process.start()
    assert leaver.pid and victim.pid and living.pid
    watch, deaths, told = watched(leaver.pid, living.pid, victim.pid)
    watch.start()
    victim.kill()
    victim.join()
    leaver.join()
    assert told.wait(20)
    assert [death[1:] for death in deaths] == [(victim.pid, "SIGKILL")]
    assert processes.killed_by(leaver) == processes.killed_by(living) == ""
    living.kill()
    living.join()


def test_a_child_that_was_gone_before_the_watch_is_reported() -> None:
    child = python(SLEEPER)
    watch, deaths, told = watched(child.pid)
    child.kill()
    child.wait()
    watch.start()
    assert told.wait(10)
    assert [pid for _, pid, _ in deaths] == [child.pid]


def test_a_death_after_stop_is_not_reported() -> None:
    child = python(SLEEPER)
    watch, deaths, told = watched(child.pid)
    watch.start()
    watch.stop()
    end_processes({child.pid: psutil.Process(child.pid)})
    assert not told.wait(3 * processes.POLL_SECONDS) and deaths == []
    assert not psutil.pid_exists(child.pid)
