"""torchrun as seen from outside: real processes that work, sleep and write in its place."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from harness.tools.watchdog import launcher
from harness.tools.watchdog.launcher import RankLauncher, signal_in

WORKS = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nraise SystemExit(3)\n"
SLEEPS = "import time\ntime.sleep(60)\n"
Start = Callable[[str], tuple["subprocess.Popen[bytes]", RankLauncher]]

# As py-spy shows torchrun's main thread while it waits for ranks that it has passed SIGINT on to, shortened.
GOT_SIGINT = """Thread 17 (idle): "MainThread"
    PContext.close (torch/distributed/elastic/multiprocessing/api.py:661)
        Arguments:
            death_sig: 2
            timeout: 30
    SimpleElasticAgent.run (torch/distributed/elastic/agent/server/api.py:754)
        Locals:
            e: <SignalException at 0x7f2249b2e7a0>
"""


def wait(until: Callable[[], bool], seconds: float) -> None:
    given_up = time.monotonic() + seconds
    while not until() and time.monotonic() < given_up:
        time.sleep(0.02)


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> tuple["subprocess.Popen[bytes]", RankLauncher]:
        command = [sys.executable, "-S", "-c", code]
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        return made[-1], RankLauncher(psutil.Process(made[-1].pid), is_torchrun=True)

    yield begin
    for process in made:
        process.kill()
        process.communicate()


def test_one_that_works_is_waited_for_and_one_that_does_not_is_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "IDLE_SECONDS", 1.0)
    said: list[str] = []
    works, seen = start(WORKS)
    seen.end("host0", said.append, wait)
    assert works.wait(0) == 3
    assert said == []
    sleeps, seen = start(SLEEPS)
    seen.end("host0", said.append, wait)
    assert not psutil.pid_exists(sleeps.pid)
    assert len(said) == 1 and said[0].startswith("torchrun on host0 (pid ")


@pytest.mark.parametrize("writes", [True, False])
def test_whether_it_wrote_anything_before_its_end_is_known(start: Start, writes: bool) -> None:
    process, seen = start(
        "import sys\ninput()\n" + "sys.stdout.write('report'), sys.stdout.flush()\n" * writes + "input()\n"
    )
    before = seen.bytes_written()
    assert process.stdin
    process.stdin.write(b"\n")
    process.stdin.flush()
    time.sleep(0.2)
    steps = iter([False] * 3)

    def finish(until: Callable[[], bool], seconds: float) -> None:
        wait(lambda: until() or next(steps, True), seconds)
        assert process.stdin
        process.stdin.close()
        process.wait()

    seen.end("host0", str, finish)
    assert seen.wrote_nothing_since(before) != writes


def test_the_signal_that_torchrun_passes_on_is_read_from_its_stacks() -> None:
    assert signal_in(GOT_SIGINT) == "SIGINT"
    assert signal_in(GOT_SIGINT.replace("SignalException", "ChildFailedError")) == ""
    assert signal_in("") == ""
