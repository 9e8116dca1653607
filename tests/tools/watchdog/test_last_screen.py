"""Real torchrun, real gloo ranks: what ended the run is the last thing on the screen, whatever it was.

The watchdog's verdict is printed once. launch/torchrun.py keeps torchrun's report off the screen; below that of
torchrun itself a line repeats what the verdict began with.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.launching import QUICKSTART, REPOSITORY, Job, Launcher

pytestmark = pytest.mark.slow

SCRIPT = "tests/tools/watchdog/phases_with_gloo.py"
TORCHRUNS_OWN = "ChildFailedError"


def start(folder: Path, *arguments: str, launcher: Launcher = "plain") -> Job:
    return Job(folder=folder, ranks=2, arguments=[QUICKSTART, *arguments], script=SCRIPT, launcher=launcher).start()


def screen(job: Job) -> list[str]:
    """All lines, once nothing of the job is left that could write another."""
    job.wait(120)
    assert job.left_behind() == []
    return job.output().splitlines()


def last(lines: list[str], launcher: Launcher = "plain") -> list[str]:
    """The verdict, and what stands last."""
    [at] = [index for index, line in enumerate(lines) if line.startswith("FIRST FAILURE: ")]
    verdict, after = lines[at:], []
    for end, line in enumerate(verdict):
        if line.startswith("  reported by the watchdog on "):
            verdict, after = verdict[: end + 1], verdict[end + 1 :]
    if launcher == "plain":  # torchrun may have printed its report, and ended, before the verdict was known
        assert not after or after[-1].startswith("first failure, see above: ")
    else:
        assert not any(TORCHRUNS_OWN in line for line in lines) and len(after) <= 2
    return verdict


def test_an_exception_is_last_with_its_traceback(tmp_path: Path) -> None:
    lines = screen(start(tmp_path / "run", "--inject", "exception@values:1:1"))
    first, *rest = last(lines)
    assert re.match(
        r"FIRST FAILURE: rank 1 on \S+ failed in values of step 1 at .*: InjectedFault: exception@values:1:1", first
    )
    trace = [line for line in rest if line.startswith("  | ")]
    assert len(trace) <= 10
    assert trace[-1] == "  | harness.tools.inject.InjectedFault: exception@values:1:1 was asked for"
    assert any(TORCHRUNS_OWN in line for line in lines)
    assert lines[-1].endswith(f"run directory: {tmp_path / 'run'}") and "InjectedFault" in lines[-1]


def test_torchruns_report_is_kept_in_the_run_directory(tmp_path: Path) -> None:
    job = start(tmp_path / "run", "--inject", "kill@values:1:1", launcher="forked")
    assert job.wait(120) == 1
    lines = job.output().splitlines()  # at once: nothing is printed after the command has returned
    assert last(lines, "forked")[-1] == lines[-1]
    assert job.left_behind() == [] and job.output().splitlines() == lines
    report = next((tmp_path / "run").glob("torchrun-*.log"))
    assert report.name in job.output() and TORCHRUNS_OWN in report.read_text()


@pytest.mark.long
def test_a_hang_is_last_with_stacks(tmp_path: Path) -> None:
    lines = last(screen(start(tmp_path / "run", "--inject", "hang@values:1:1", "--run.phase_timeouts.values", "3")))
    assert "rank 1 on " in lines[0] and "is stuck in it (not in a collective); waited for by rank 0" in lines[0]
    assert lines[1].startswith("  rank 0 waits in all_reduce (torch/distributed/distributed_c10d.py:")
    assert lines[2].startswith("  rank 1 was in Injector._hang (harness/tools/inject.py:")
    assert "_hang (" in next((tmp_path / "run").glob("stacks-*-rank1.txt")).read_text()


@pytest.mark.long
@pytest.mark.parametrize(("number", "launcher"), [(signal.SIGINT, "plain"), (signal.SIGTERM, "forked")])
def test_a_run_that_is_told_to_end_says_so_last(tmp_path: Path, number: signal.Signals, launcher: Launcher) -> None:
    job = start(tmp_path / "run", "--run.steps", "400", launcher=launcher)
    job.wait_for_phase("generate")
    # Ctrl-C reaches all of the terminal's processes; a job scheduler tells its own child.
    os.killpg(job.process.pid, number) if number is signal.SIGINT else job.process.send_signal(number)
    told = time.monotonic()
    lines = screen(job)
    first, *_ = last(lines, launcher)
    if launcher == "forked":
        assert job.process.returncode == 128 + number and "the run was interrupted by " in lines[-1]
    assert time.monotonic() - told < 30
    assert re.match(
        rf"FIRST FAILURE: ranks? \d on \S+ (got {number.name}, .*|was killed by {number.name}) (in|after) ", first
    )


@pytest.mark.long
def test_without_its_launcher_all_ends(tmp_path: Path) -> None:
    job = start(tmp_path / "run", "--run.steps", "400", launcher="forked")
    job.wait_for_phase("generate")
    job.look()
    job.process.send_signal(signal.SIGKILL)
    told = time.monotonic()
    [first] = [line for line in screen(job) if line.startswith("FIRST FAILURE: ")]
    assert time.monotonic() - told < 15 + 5
    assert re.match(r"FIRST FAILURE: torchrun of ranks 0, 1 on \S+ \(pid \d+\) is gone at ", first), first


@pytest.mark.long
@pytest.mark.parametrize(
    ("read_until", "has_folder"),
    [
        ("", False),  # before the ranks met, who agree on a run directory
        ("mesh dp=", True),
    ],
)
def test_a_console_that_nobody_reads_is_named(tmp_path: Path, read_until: str, has_folder: bool) -> None:
    errors = tmp_path / "errors"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, QUICKSTART]
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--run.dir", str(tmp_path / "run")], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stream
        )
        assert process.stdout
        with process.stdout as console:
            while read_until and read_until not in console.readline().decode():
                assert process.poll() is None
    assert process.wait(120) != 0
    wait_for(lambda: "".join(errors.read_text().splitlines()[-1:]).startswith("first failure, see above: "))
    said = errors.read_text().splitlines()[-1]
    assert "ConsoleGone: standard output is a closed pipe" in said
    assert ("run directory: " in said) == has_folder and (str(tmp_path / "run") in said) == has_folder


def wait_for(holds: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
