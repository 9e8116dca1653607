"""The supervisor as it is, over real processes."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from harness.tools.bisection import supervised

SUPERVISOR = Path(__file__).resolve().parents[3] / "harness" / "bisect" / "supervisor.py"
ORPHAN = """
import os, signal, sys, time
if os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGQUIT)  # as SGLang's scheduler, whose parent is whoever has adopted it
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


def code_under_the_warden(folder: Path, *command: str) -> int:
    """The exit code in its result, of a command of this Python."""
    file = folder / "result"
    words = [sys.executable, "-I", "-S", str(SUPERVISOR), str(file), "30", "--", sys.executable, "-c", *command]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE
    ) as supervisor:  # whose end of the pipe it holds until it is over
        assert supervisor.wait(60) == 0
    code: int = json.loads(file.read_text())["code"]
    return code


def test_a_scheduler_that_lost_its_parent_cannot_end_whoever_adopted_it(tmp_path: Path) -> None:
    assert code_under_the_warden(tmp_path, COMMAND, ORPHAN, str(tmp_path / "spoken")) == 7


def test_the_command_itself_can_be_quit(tmp_path: Path) -> None:
    assert code_under_the_warden(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGQUIT)") == -3


SHARER = """
import mmap, multiprocessing, os, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(file, 4096)
held = mmap.mmap(file, 4096)
print(semaphore._semlock.name, flush=True)
time.sleep(1.5)
os.kill(os.getpid(), 9)
"""


def test_nothing_stays_in_shared_memory_of_a_command_that_was_killed(tmp_path: Path) -> None:
    file = Path(f"/dev/shm/harness-test-{os.getpid()}.shm")
    foreign = Path(f"/dev/shm/harness-test-{os.getpid()}.other")
    foreign.write_text("of another program")
    script = tmp_path / "sharer.py"
    script.write_text(SHARER)
    result, log = tmp_path / "result.json", tmp_path / "log"
    command = [
        sys.executable,
        "-I",
        "-S",
        str(SUPERVISOR),
        str(result),
        "0",
        "--",
        sys.executable,
        str(script),
        str(file),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output)
        assert process.wait(timeout=60) == 0
    semaphore = Path(f"/dev/shm/sem.{log.read_text().strip().removeprefix('/')}")
    assert semaphore.name.startswith("sem.mp-")
    assert json.loads(result.read_text())["code"] == -9
    assert not file.exists()
    assert not semaphore.exists()
    assert foreign.exists()
    foreign.unlink()


KILLER = """
import os, pathlib, subprocess, sys, time
subprocess.Popen(["release", sys.argv[1]], start_new_session=True)
parent = os.getppid()
above = int(pathlib.Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
os.kill({"parent": parent, "the one above": above}[sys.argv[2]], 9)
time.sleep(60)
"""


@pytest.mark.parametrize("which", ["parent", "the one above"])
def test_a_command_that_kills_what_watches_it_leaves_nothing(tmp_path: Path, which: str) -> None:
    seconds = f"{4000 + os.getpid() / 1e7:.7f}"
    with pytest.raises(supervised.WatcherKilled):
        supervised.run([sys.executable, "-c", KILLER, seconds, which], tmp_path / "log")
    deadline = time.monotonic() + 5
    while (left := running(seconds)) and time.monotonic() < deadline:
        time.sleep(0.02)  # where it is the one above, the other ends them once its pipe is closed
    assert not left


def running(word: str) -> list[int]:
    """Processes with that word on their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found
