"""Faults on purpose: each ends in time, names the rank and the phase, and leaves nothing behind."""

import json
import re
import time
from pathlib import Path

import pytest

from harness.runtime.events import MEET, RUN, STEP_PHASES
from harness.runtime.processes import shared_memory_files
from harness.tools.hosts import kernel
from harness.tools.inject import SLOW_SECONDS
from tests.end_to_end.launching import QUICKSTART, WAYS, Job, Launcher
from tests.tools.watchdog.hosts import ended

pytestmark = pytest.mark.slow

ALL_REDUCES = "tests/tools/watchdog/phases_with_gloo.py"
SMALL_DISK = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m,mode=700 none "$0" && exec "$@"']
"""Runs a command with a small disk mounted at a folder, for the command alone."""
DEADLINE_SECONDS = 3
END_SECONDS = 60
"""From the fault, or the deadline that it makes others pass, to the end of everything."""
PHASE_OF: dict[str, str] = {"kill": "sync", "stop": "start_engine", "oom": MEET, "full-disk": RUN}
"""Each kind in one phase: before the ranks have met, the whole job, before the steps, or in a step. An exception and a
hang are in test_last_screen.py, a slow rank below."""
BY_DEFAULT = ("kill", "stop")
"""Kinds that every run of the tests has; the others are marked long."""


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[] if each in BY_DEFAULT else pytest.mark.long) for each in PHASE_OF]
)
def test_a_fault_ends_the_run_in_time_and_is_named(tmp_path: Path, kind: str) -> None:
    phase, deadline = PHASE_OF[kind], DEADLINE_SECONDS if kind == "stop" else 0
    step = ":1" if phase in STEP_PHASES else ""
    arguments = [QUICKSTART, "--run.steps", "2", "--inject", f"{kind}@{phase}:1{step}"]
    arguments += ["--run.phase_timeouts", f"{{{phase} = {deadline}}}"] if deadline else []
    launcher: Launcher = "forked" if kind == "kill" else "plain"
    job = Job(folder=tmp_path / "run", ranks=2, arguments=arguments, script=ALL_REDUCES, launcher=launcher)
    if kind == "full-disk":
        if kernel.refusal():
            pytest.skip(f"no namespaces here: {kernel.refusal()}")
        job.folder.mkdir(0o700)
        job.prefix = [*SMALL_DISK, str(job.folder)]
    job.start()
    named = {
        "kill": rf"rank 1 on \S+ {ended('was killed by SIGKILL')} in sync of step 1 at ",
        "stop": r"rank 1 on \S+ was stopped in start_engine of step 0 \(SIGSTOP",
        "oom": r"rank 1 on \S+ failed in meet at .*: MemoryError: ",
        # The verdict does not name the phase that is the whole job, but the one that ended last.
        "full-disk": r"rank [01] on \S+ failed after meet at .*: OSError: \[Errno 28\] No space left on device",
    }
    end = check_end(job, verdict=named[kind])
    has_folder = kind != "full-disk" and phase != MEET  # that we can see; a run makes it once its ranks have met
    assert set(kept_codes(job)) == ({124 if deadline else 1} if has_folder else set())
    assert not has_folder or f"{kind}@{phase}:1{step} was injected" in job.output()
    for fault in (event for event in job.events(1) if event["event"] == "injected"):
        assert end - fault["time"] < deadline + END_SECONDS
    if launcher == "forked":
        report = next(job.folder.glob("torchrun-*.log"))
        assert report.name in job.output() and "ChildFailedError" in report.read_text()


REAL = {
    # In float16, where a gradient that is not finite may be an overflow: this one is not taken for one.
    "nan-gradient@update_actor:1:1": r"rank 1 on \S+ failed in update_actor of step 1 at .*: FloatingPointError: the"
    r' gradient norm of the actor must be finite, got nan; it is not on rank 1 \(model.dtype = "float16", loss scale 1\)',
    "kill@start_engine:1": rf"rank 1 on \S+ {ended('was killed by SIGKILL')} in start_engine at ",
}
"""Real engines: who is named, and where."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words", "launcher"),
    [("nan-gradient@update_actor:1:1", ["--model.dtype", "float16"], "forked"), ("kill@start_engine:1", [], "plain")],
)
def test_the_same_with_real_engines(tmp_path: Path, fault: str, words: list[str], launcher: Launcher) -> None:
    arguments = [QUICKSTART, "--run.steps", "2", "--inject", fault, *words, *WAYS[launcher]]
    job = Job(folder=tmp_path / "run", ranks=2, arguments=arguments, launcher=launcher).start()
    check_end(job, verdict=REAL[fault])
    assert kept_codes(job) == [1]


def check_end(job: Job, verdict: str) -> float:
    """Wait for the end of a job, which must report this first failure last, and leave nothing behind.

    Return its time.
    """
    memory: set[Path] = set()
    until = time.monotonic() + 500
    while job.process.poll() is None:
        assert time.monotonic() < until, job.output()
        job.look()
        memory |= shared_memory_files(process.pid for process in job.seen)
        time.sleep(0.5)
    at_once = job.output()
    assert job.left_behind() == []
    assert job.launcher == "plain" or job.output() == at_once, "it says nothing after it has returned"
    end = time.time()
    said = job.output().splitlines()
    [first] = [index for index, line in enumerate(said) if line.startswith("FIRST FAILURE: ")]
    assert re.match(f"FIRST FAILURE: {verdict}", said[first]), job.output()
    assert said[-1].startswith(("  reported by the watchdog on ", "first failure, see above: "))
    assert [file for file in memory if file.exists()] == []
    return end


def kept_codes(job: Job) -> list[int]:
    """Return the exit codes in the verdicts that the run directory has."""
    return [json.loads(file.read_text())["code"] for file in job.folder.glob("failure-*.json")]


SCHEDULER = r"engine process sglang::scheduler\S* \(pid \d+\)"
IN_A_PULL = {
    "scheduler stopped": (124, rf"{SCHEDULER} .*was stopped in sync of step 1 "),
    "trainer killed": (1, rf"rank 1 on \S+ {ended('was killed by SIGKILL')} in sync of step 1 at "),
}


@pytest.mark.long
@pytest.mark.parametrize("end", IN_A_PULL)
def test_an_end_in_the_middle_of_a_pull(tmp_path: Path, end: str) -> None:
    """Rank 1 comes late to the sync. Until then its scheduler is stopped, so that the pull begins and does not end."""
    arguments = [QUICKSTART, "--run.steps", "2", "--run.phase_timeouts", "{sync = 20}", "--inject", "slow@sync:1:1"]
    arguments += ["--weights.transport", "pull"]
    job = Job(folder=tmp_path / "run", ranks=2, arguments=arguments).start()
    job.wait_for_phase("sync", step=1)
    scheduler = next(each for each in job.processes() if each.name() == "sglang::scheduler_TP1")
    scheduler.suspend()
    time.sleep(SLOW_SECONDS + 3)
    began = time.monotonic()
    if end == "trainer killed":
        job.rank_processes()[1].kill()
    code, verdict = IN_A_PULL[end]
    check_end(job, verdict)
    late = r"^slow: rank 1 came [3-9]\.\d s after the others on \S+ to sync of step 1$"
    assert re.search(late, job.output(), re.M), job.output()
    assert kept_codes(job) == [code]
    assert time.monotonic() - began < END_SECONDS + (20 if end == "scheduler stopped" else 0)
