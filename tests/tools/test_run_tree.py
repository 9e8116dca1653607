"""run_tree and its supervisor, over real processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from harness.tools.run_tree import CANNOT_START, Ended, SupervisorKilled, run_tree


def run_python(folder: Path, code: str, *words: str, timeout: float = 30.0, grace: float = 5.0) -> Ended:
    with (folder / "log").open("wb") as output:
        return run_tree([sys.executable, "-c", code, *words], output=output, timeout=timeout, grace=grace)


def running(word: str) -> list[int]:
    """Processes with that word on their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def unique_seconds() -> str:
    return f"{4000 + os.getpid() / 1e7:.7f}"


DETACHED = "import subprocess, sys; subprocess.Popen(['sleep', sys.argv[1]], start_new_session=True);"


def test_code_output_and_variables_of_a_command_whose_orphan_is_ended(tmp_path: Path) -> None:
    seconds = unique_seconds()
    code = DETACHED + "import os; print(os.getcwd(), os.environ['MARK'], flush=True); sys.exit(7)"
    with (tmp_path / "log").open("wb") as output:
        ended = run_tree(
            [sys.executable, "-c", code, seconds], output=output, cwd=tmp_path, env={**os.environ, "MARK": "here"}
        )
    assert (ended.code, ended.timed_out) == (7, False)
    assert (tmp_path / "log").read_text() == f"{tmp_path} here\n"
    assert not running(seconds)


def test_a_command_that_cannot_start(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as output:
        assert run_tree(["/no/such/command"], output=output).code == CANNOT_START
    assert "/no/such/command" in (tmp_path / "log").read_text()


def test_after_the_timeout_a_command_may_end_within_its_grace(tmp_path: Path) -> None:
    ready = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); time.sleep(60)"
    ended = run_python(tmp_path, ready, timeout=5)
    assert (ended.code, ended.timed_out) == (3, True)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    ended = run_python(tmp_path, deaf, timeout=5, grace=0.1)
    assert (ended.code, ended.timed_out) == (-signal.SIGKILL, True)


def test_an_exception_of_the_tick_ends_the_command(tmp_path: Path) -> None:
    seconds = unique_seconds()

    def tick() -> None:
        if running(seconds):
            raise KeyboardInterrupt

    with (tmp_path / "log").open("wb") as output, pytest.raises(KeyboardInterrupt):
        run_tree([sys.executable, "-c", DETACHED + "import time; time.sleep(60)", seconds], output=output, tick=tick)
    assert not running(seconds)


CALLER = """
import sys
from harness.tools.run_tree import run_tree
run_tree(["sleep", sys.argv[1]], output=sys.stdout.buffer)
"""


def test_the_tree_ends_when_the_caller_is_killed() -> None:
    seconds = unique_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", CALLER, seconds], cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL
    ) as caller:
        while len(running(seconds)) < 3:  # the caller, the supervisor, the command
            assert caller.poll() is None
            time.sleep(0.02)
        caller.kill()
    deadline = time.monotonic() + 10
    while running(seconds):
        assert time.monotonic() < deadline
        time.sleep(0.02)


ORPHAN = """
import os, signal, sys, time
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGQUIT)  # as SGLang's scheduler does to its parent, which by now is the subreaper
    open(sys.argv[1], "w").close()
    os._exit(0)
"""
COMMAND = """
import pathlib, subprocess, sys, time
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
sys.exit(7)
"""


def test_an_orphaned_scheduler_cannot_end_the_supervisor(tmp_path: Path) -> None:
    assert run_python(tmp_path, COMMAND, ORPHAN, str(tmp_path / "signalled")).code == 7


def test_the_command_itself_can_be_quit(tmp_path: Path) -> None:
    ended = run_python(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGQUIT)")
    assert ended.code == -signal.SIGQUIT


SHARER = """
import mmap, multiprocessing, os, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(file, 4096)
mapped = mmap.mmap(file, 4096)
print(semaphore._semlock.name, flush=True)
time.sleep(4)  # the supervisor looks twice a second
os.kill(os.getpid(), 9)
"""


def test_nothing_stays_in_shared_memory_of_a_command_that_was_killed(tmp_path: Path) -> None:
    file = Path(f"/dev/shm/harness-test-{os.getpid()}.shm")
    foreign = Path(f"/dev/shm/harness-test-{os.getpid()}.other")
    foreign.write_text("of another program")
    try:
        assert run_python(tmp_path, SHARER, str(file)).code == -signal.SIGKILL
        semaphore = Path(f"/dev/shm/sem.{(tmp_path / 'log').read_text().split()[0].removeprefix('/')}")
        assert semaphore.name.startswith("sem.mp-") and not semaphore.exists()
        assert not file.exists() and foreign.exists()
    finally:
        foreign.unlink()


KILLER = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True)
os.kill(os.getppid(), 9)
time.sleep(60)
"""


def test_a_command_that_kills_its_supervisor_leaves_nothing(tmp_path: Path) -> None:
    seconds = unique_seconds()
    with pytest.raises(SupervisorKilled):
        run_python(tmp_path, KILLER, seconds)
    assert not running(seconds)
