"""Real torchrun, real gloo ranks: what ended the run is the last thing on the screen, whatever it was.

The watchdog's verdict is printed once. launch/torchrun.py keeps torchrun's report off the screen; below that of
torchrun itself a line repeats what the verdict began with.
"""

import json
import re
import signal
import subprocess
import sys
import time
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


@pytest.mark.long
def test_a_hang_is_last_with_stacks(tmp_path: Path) -> None:
    lines = last(screen(start(tmp_path / "run", "--inject", "hang@values:1:1", "--run.phase_timeouts.values", "3")))
    assert "rank 1 on " in lines[0] and "is stuck in it (not in a collective); waited for by rank 0" in lines[0]
    assert lines[1].startswith("  rank 0 waits in all_reduce (torch/distributed/distributed_c10d.py:")
    assert lines[2].startswith("  rank 1 was in Injector._hang (harness/tools/inject.py:")
    assert json.loads(next((tmp_path / "run").glob("failure-*.json")).read_text())["code"] == 124
    assert "_hang (" in next((tmp_path / "run").glob("stacks-*-rank1.txt")).read_text()


@pytest.mark.long
def test_a_run_that_a_job_scheduler_ends_says_so_last(tmp_path: Path) -> None:
    """Ctrl-C in a terminal is in tests/launch/test_interrupts.py."""
    job = start(tmp_path / "run", "--run.steps", "400", launcher="forked")
    job.wait_for_phase("generate")
    job.process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    lines = screen(job)
    first, *_ = last(lines, "forked")
    assert job.process.returncode == 128 + signal.SIGTERM and "the run was interrupted by " in lines[-1]
    assert time.monotonic() - told < 30
    assert re.match(r"FIRST FAILURE: ranks? \d on \S+ (got SIGTERM, .*|was killed by SIGTERM) (in|after) ", first)


@pytest.mark.long
def test_a_console_that_nobody_reads_is_named(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, QUICKSTART]
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--run.dir", str(tmp_path / "run")], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stream
        )
        assert process.stdout
        with process.stdout as console:
            while "mesh dp=" not in console.readline().decode():
                assert process.poll() is None
    assert process.wait(120) != 0
    end = time.monotonic() + 15
    while not (said := errors.read_text().splitlines()[-1:]) or not said[0].startswith("first failure, see above: "):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "ConsoleGone: standard output is a closed pipe" in said[0] and str(tmp_path / "run") in said[0]
