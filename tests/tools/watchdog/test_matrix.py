"""Faults on purpose, kinds by phases: each ends in time, names the rank and the phase, and leaves nothing behind."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from harness.runtime.events import MEET, RUN, STEP_PHASES
from harness.runtime.processes import shared_memory_files
from harness.tools.fault_spec import ANYWHERE
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
PHASE_OF: dict[str, str] = {
    "exception": MEET,
    "kill": "sync",
    "stop": "start_engine",
    "hang": RUN,
    "slow": "sync",
    "oom": "start_engine",
    "full-disk": RUN,
}
"""Each kind in one phase: before the ranks have met, the whole job, before the steps, or in a step. The job of these
tests does the same in every other phase."""
BY_DEFAULT = ("kill", "stop")
"""Kinds that every run of the tests has; the others are marked long."""


def cells() -> list[Any]:
    marks = {kind: [] if kind in BY_DEFAULT else [pytest.mark.long] for kind in ANYWHERE}
    return [pytest.param(kind, PHASE_OF[kind], id=f"{kind}@{PHASE_OF[kind]}", marks=marks[kind]) for kind in ANYWHERE]


@pytest.mark.parametrize(("kind", "phase"), cells())
def test_a_fault_ends_the_run_in_time_and_is_named(tmp_path: Path, kind: str, phase: str) -> None:
    deadline = DEADLINE_SECONDS if kind in ("hang", "stop") else 0
    step = ":1" if phase in STEP_PHASES else ""
    arguments = [QUICKSTART, "--run.steps", "2", "--inject", f"{kind}@{phase}:1{step}"]
    arguments += ["--run.phase_timeouts", f"{{{phase} = {deadline}}}"] if deadline else []
    job = Job(folder=tmp_path / "run", ranks=2, arguments=arguments, script=ALL_REDUCES, launcher="plain")
    if kind == "full-disk":
        if kernel.refusal():
            pytest.skip(f"no namespaces here: {kernel.refusal()}")
        job.folder.mkdir(0o700)
        job.prefix = [*SMALL_DISK, str(job.folder)]
    job.start()
    at = expected_place(phase)
    if kind == "slow":
        assert job.wait(300) == 0, job.output()
        late = rf"^slow: rank 1 came [3-9]\.\d s after the others on \S+ to {phase} of step 1$"
        assert phase not in STEP_PHASES or re.search(late, job.output(), re.M), job.output()
        return
    named = {
        "exception": rf"rank 1 on \S+ failed {at} at .*: InjectedFault: ",
        "kill": rf"rank 1 on \S+ {ended('was killed by SIGKILL')} {at} at ",
        "stop": rf"rank 1 on \S+ was stopped {at} \(SIGSTOP",
        # The whole job's deadline passes on both ranks at once; rank 0 is one phase further then.
        "hang": rf"deadline of 3 s passed ({at}{'|in inputs of step 0' * (phase == RUN)}): rank 1 on \S+ (was|is) ",
        "oom": rf"rank 1 on \S+ failed {at} at .*: MemoryError: ",
        "full-disk": rf"rank [01] on \S+ failed {at} at .*: OSError: \[Errno 28\] No space left on device",
    }
    end = check_end(job, verdict=named[kind])
    has_folder = kind != "full-disk" and phase != MEET  # that we can see; a run makes it once its ranks have met
    assert set(kept_codes(job)) == ({124 if deadline else 1} if has_folder else set())
    assert not has_folder or f"{kind}@{phase}:1{step} was injected" in job.output()
    for fault in (event for event in job.events(1) if event["event"] == "injected"):
        assert end - fault["time"] < deadline + END_SECONDS


def expected_place(phase: str) -> str:
    """As a verdict says it. It does not name the phase that is the whole job, but the one that ended last."""
    if phase == RUN:
        return "after meet"
    return "in meet" if phase == MEET else f"in {phase} of step {1 if phase in STEP_PHASES else 0}"


REAL = {
    # In float16, where a gradient that is not finite may be an overflow: this one is not taken for one.
    "nan-gradient@update_actor:1:1": r"rank 1 on \S+ failed in update_actor of step 1 at .*: FloatingPointError: the"
    r' gradient norm of the actor must be finite, got nan; it is not on rank 1 \(model.dtype = "float16", loss scale 1\)',
    "wrong-shape@sync:1:1": r"rank 1 on \S+ failed in sync of step 1 at .*: WeightsRefused: model.embed_tokens.weight: .* on rank 1",
    "dropped-bucket@sync:1:1": r"rank [01] on \S+ failed (in|after) \w+ of step 1 at .*: WeightsDidNotArrive: step 1: .*",
    "lost-message@sync:1:1": r"deadline of 20 s passed in sync of step 1: ",
    "kill@start_engine:1": rf"rank 1 on \S+ {ended('was killed by SIGKILL')} in start_engine at ",
}
"""Real engines: who is named, and where. A weight that is spoiled before a sync shows in it."""
REAL_DEADLINE = "{sync = 20}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words", "launcher"),
    [
        ("nan-gradient@update_actor:1:1", ["--model.dtype", "float16"], "forked"),
        ("wrong-shape@sync:1:1", [], "forked"),
        ("dropped-bucket@sync:1:1", [], "forked"),
        ("lost-message@sync:1:1", ["--weights.transport", "pull"], "forked"),
        ("kill@start_engine:1", [], "plain"),
    ],
)
def test_the_same_with_real_engines(tmp_path: Path, fault: str, words: list[str], launcher: Launcher) -> None:
    arguments = [QUICKSTART, "--run.steps", "2", "--run.phase_timeouts", REAL_DEADLINE, "--inject", fault, *words]
    job = Job(folder=tmp_path / "run", ranks=2, arguments=[*arguments, *WAYS[launcher]], launcher=launcher).start()
    check_end(job, verdict=REAL[fault])
    assert kept_codes(job) == [124 if fault.startswith("lost") else 1]


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
    assert job.left_behind() == []
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
    arguments = [QUICKSTART, "--run.steps", "2", "--run.phase_timeouts", REAL_DEADLINE, "--inject", "slow@sync:1:1"]
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
    assert kept_codes(job) == [code]
    assert time.monotonic() - began < END_SECONDS + (20 if end == "scheduler stopped" else 0)
