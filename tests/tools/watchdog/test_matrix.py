"""Faults on purpose, kinds by phases: each ends in time, names the rank and the phase, and leaves nothing behind."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.runtime.phases import MEET, RUN, STEP_PHASES
from harness.runtime.processes import shared_memory_files
from harness.tools.fault_spec import ANYWHERE
from harness.tools.hosts import kernel
from harness.tools.inject import SLOW_SECONDS
from tests.end_to_end.launching import QUICKSTART, REPOSITORY, Job

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 3
END_SECONDS = 15
"""From the fault, or the deadline that it makes others pass, to the end of everything."""
START_SECONDS = 25
"""From the start to the fault, on a busy machine."""
SOME_PHASES = (
    *(MEET, RUN, "inputs", "start_engine", "build_trainer", "resume_weights", "sync", "generate", "old_log_probs"),
    *("update_actor", "verify_push", "shutdown"),
)
BY_DEFAULT = {
    "exception": "sync",
    "kill": "generate",
    "stop": "resume_weights",
    "hang": "old_log_probs",
    "slow": "generate",
    "oom": "update_actor",
    "full-disk": "old_log_probs",
}
"""Cells that every run of the tests has, one of each kind; the others are marked long."""


def cells() -> list[Any]:
    every = [(kind, phase) for kind in ANYWHERE for phase in SOME_PHASES if (kind, phase) != ("full-disk", MEET)]
    every.remove(("slow", RUN))  # which is no phase of a step, and meet has nobody who could wait
    every.remove(("slow", MEET))
    marks = {cell: [] if cell[1] == BY_DEFAULT[cell[0]] else [pytest.mark.long] for cell in every}
    return [pytest.param(*cell, id="@".join(cell), marks=marks[cell]) for cell in every]


def words_of(kind: str, phase: str) -> list[str]:
    step = ":1" if phase in STEP_PHASES else ""
    deadline = ["--run.phase_timeouts", f"{{{phase} = {DEADLINE_SECONDS}}}"] if kind in ("hang", "stop") else []
    return ["--run.steps", "2", "--inject", f"{kind}@{phase}:1{step}", *deadline]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all cells that were asked for, run side by side: most of the time each of them waits."""
    folder = tmp_path_factory.mktemp("cells")
    cells = []
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and "kind" in params:
            kind, phase = params["kind"], params["phase"]
            name = f"{kind}@{phase}"
            if kind == "full-disk" and kernel.refusal():
                continue
            disk = "size=16m" if kind == "full-disk" else ""
            cells.append({"name": name, "folder": str(folder / name), "words": words_of(kind, phase), "disk": disk})
    (folder / "cells.json").write_text(json.dumps(cells))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.tools.watchdog.run_cells",
            str(folder / "cells.json"),
            str(folder / "results.json"),
        ],
        cwd=REPOSITORY,
        check=True,
        timeout=60 + 12 * len(cells),
    )
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize(("kind", "phase"), cells())
def test_a_fault_ends_the_run_in_time_and_is_named(results: dict[str, Any], kind: str, phase: str) -> None:
    if f"{kind}@{phase}" not in results:
        pytest.skip(f"no disk of its own here: {kernel.refusal()}")
    cell = results[f"{kind}@{phase}"]
    said = cell["said"]
    # Of the whole job's start: a file that a rank made a moment before it was killed may have been seen by nobody.
    assert [each for each in cell["left"] if phase != RUN or "harness-test" not in each] == [], said
    at = expected_place(phase)
    if kind == "slow":
        assert cell["code"] == 0, said
        if phase in STEP_PHASES:
            assert re.search(
                rf"^slow: rank 1 came [3-9]\.\d s after the others on \S+ to {phase} of step 1$", said, re.M
            ), said
        return
    deadline = kind in ("hang", "stop")
    assert cell["seconds"] < START_SECONDS + END_SECONDS + (DEADLINE_SECONDS if deadline else 0)
    assert cell["code"] == (124 if deadline else 0xF7 if kind == "kill" else 1), said
    verdicts = {line for line in said.splitlines() if line.startswith("FIRST FAILURE: ")}
    assert len(verdicts) == 1, said
    (verdict,) = verdicts
    named = {
        "exception": rf"rank 1 on \S+ failed {at} at .*: InjectedFault: ",
        "kill": rf"rank 1 on \S+ (was killed by SIGKILL|died) {at} at ",
        "stop": rf"rank 1 on \S+ (was|is) stopped {at} \(SIGSTOP",
        # The whole job's deadline passes on both ranks at once; rank 0 is one phase further then.
        "hang": rf"deadline of 3 s passed ({at}{'|in inputs' * (phase == RUN)}): rank 1 on \S+ (was|is) ",
        "oom": rf"rank 1 on \S+ failed {at} at .*: MemoryError: ",
        "full-disk": rf"rank [01] on \S+ failed {at} at .*: OSError: \[Errno 28\] No space left on device",
    }
    assert re.match(f"FIRST FAILURE: {named[kind]}", verdict), said
    assert said.rstrip().splitlines()[-1].startswith("  reported by the watchdog on ")


def expected_place(phase: str) -> str:
    """As a verdict says it; of the whole job the phase is not known, but which one ended last."""
    if phase == RUN:
        return "after meet"
    return f"in {phase} of step 1" if phase in STEP_PHASES else f"in {phase}"


REAL = {
    "nan-gradient@update_actor:1:1": r"rank 1 on \S+ failed in update_actor of step 1 at .*: FloatingPointError: .*not on rank 1",
    "nan-gradient@update_critic:0:0": r"rank 0 on \S+ failed in update_critic of step 0 at .*: FloatingPointError: .*not on rank 0",
    "nan-weight@resume_weights:1:1": r"rank 1 on \S+ failed in sync of step 1 at .*: WeightsRefused: .*\(rank 1\)",
    "nan-weight@sync:0:1": r"rank 0 on \S+ failed in sync of step 1 at .*: WeightsRefused: .*\(rank 0\)",
    "wrong-shape@sync:1:1": r"rank 1 on \S+ failed in sync of step 1 at .*: WeightsRefused: model.embed_tokens.weight: .* on rank 1",
    "dropped-bucket@sync:1:1": r"rank [01] on \S+ failed (in|after) \w+ of step 1 at .*: WeightsDidNotArrive: step 1: .*",
    "lost-message@sync:1:1": r"deadline of 20 s passed in sync of step 1: ",
    "exception@import_sglang:1": r"rank 1 on \S+ failed in import_sglang at .*: InjectedFault",
    "kill@start_engine:1": r"rank 1 on \S+ (was killed by SIGKILL|died) in start_engine at ",
    "kill@generate:0:1": r"rank 0 on \S+ (was killed by SIGKILL|died) in generate of step 1 at ",
    "hang@sync:1:1": r"deadline of 20 s passed in sync of step 1: rank 1 on \S+ is stuck in it",
    "stop@update_actor:1:1": r"rank 1 on \S+ (was|is) stopped in update_actor of step 1 ",
}
"""Real engines: who is named, and where. A weight that is spoiled before a sync shows in it."""
REAL_DEADLINE = "{sync = 20, update_actor = 20}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "transport"), [*((fault, "auto") for fault in REAL), ("dropped-bucket@sync:1:1", "pull")]
)
def test_the_same_with_real_engines(tmp_path: Path, fault: str, transport: str) -> None:
    arguments = [QUICKSTART, "--run.steps", "2", "--run.phase_timeouts", REAL_DEADLINE, "--inject", fault]
    arguments += ["--weights.transport", "pull" if fault.startswith("lost-message") else transport]
    job = Job(folder=tmp_path / "run", ranks=2, arguments=arguments).start()
    check_end(job, code=124 if fault.startswith(("hang", "stop", "lost")) else 1, verdict=REAL[fault])


def check_end(job: Job, code: int, verdict: str) -> None:
    """Wait for the end of a job, which must report this first failure last, and leave nothing behind."""
    memory: set[Path] = set()
    end = time.monotonic() + 500
    while job.process.poll() is None:
        assert time.monotonic() < end, job.output()
        job.look()
        memory |= shared_memory_files(process.pid for process in job.seen)
        time.sleep(0.5)
    assert job.left_behind() == []
    said = job.output().splitlines()
    first = max(index for index, line in enumerate(said) if line.startswith("FIRST FAILURE: "))
    assert re.match(f"FIRST FAILURE: {verdict}", said[first]), job.output()
    assert said[-1].startswith("  reported by the watchdog on ")
    assert not any("ChildFailedError" in line for line in said[first:])
    assert [file for file in memory if file.exists()] == []
    assert json.loads(next(job.folder.glob("failure-*.json")).read_text())["code"] == code


SCHEDULER = r"engine process sglang::scheduler\S* \(pid \d+\)"
IN_A_PULL = {
    "scheduler killed": (1, rf"rank 0 on \S+ .* in sync of step 1 at .*: {SCHEDULER} died of SIGKILL"),
    "scheduler stopped": (124, rf"{SCHEDULER} .*was stopped in sync of step 1 "),
    "trainer killed": (1, r"rank 1 on \S+ (was killed by SIGKILL|died) in sync of step 1 at "),
}


@pytest.mark.long
@pytest.mark.parametrize("end", IN_A_PULL)
def test_an_end_in_the_middle_of_a_pull(tmp_path: Path, end: str) -> None:
    """Rank 1 comes late to the sync. Until then its scheduler is stopped, so that the pull begins and does not end."""
    arguments = [QUICKSTART, "--run.steps", "2", "--run.phase_timeouts", REAL_DEADLINE, "--inject", "slow@sync:1:1"]
    job = Job(folder=tmp_path / "run", ranks=2, arguments=[*arguments, "--weights.transport", "pull"]).start()
    job.wait_for_phase("sync", step=1)
    scheduler = next(each for each in job.processes() if each.name() == "sglang::scheduler_TP1")
    scheduler.suspend()
    time.sleep(SLOW_SECONDS + 3)
    began = time.monotonic()
    if end == "scheduler killed":
        scheduler.kill()
    elif end == "trainer killed":
        next(each for each in job.processes() if each.environ().get("RANK") == "1").kill()
    check_end(job, *IN_A_PULL[end])
    assert time.monotonic() - began < END_SECONDS + (20 if end == "scheduler stopped" else 0)
