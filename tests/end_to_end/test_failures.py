"""What a broken run says, how it ends, and that nothing of it stays."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.end_to_end.launching import QUICKSTART, Job, run

pytestmark = pytest.mark.slow


def test_the_folder_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o700)
    (tmp_path / "run" / "config.toml").write_text("")
    job = run(tmp_path / "run", 2, QUICKSTART, launcher="plain")
    assert job.mistake().startswith("error: run.dir = ")
    assert f"{tmp_path}/run" in job.mistake() and "holds an earlier run" in job.mistake()
    assert job.left_behind() == []


def test_an_engine_argument_that_sglang_lacks_is_one_sentence(tmp_path: Path) -> None:
    job = run(tmp_path / "run", 2, QUICKSTART, "--engine.args.mem_fraction", "0.5", launcher="plain")
    assert "engine.args.mem_fraction" in job.mistake()
    assert f"sglang {version('sglang')} has no such engine argument" in job.mistake()
    assert "mem_fraction_static" in job.mistake()
    assert not job.folder.exists()  # found before ranks met
    assert job.left_behind() == []


def test_a_bad_row_is_named_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = ['{"question": "1 + 1?", "answer": "#### 2"}', '{"question": "2 + 2?"}']
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows) + "\n")
    job = run(tmp_path / "run", 2, QUICKSTART, "--task.source", str(tmp_path / "data"), launcher="plain")
    assert "train.jsonl line 2: answer must be a text" in job.mistake()
    assert not (job.folder / "engines").exists()
    assert job.left_behind() == []


@pytest.mark.long
def test_a_killed_scheduler_is_named_and_nothing_stays(tmp_path: Path) -> None:
    job = Job(folder=tmp_path / "run", ranks=2, arguments=[QUICKSTART, "--run.steps", "50"]).start()
    job.wait_for_phase("update_actor")
    schedulers = [process for process in job.processes() if "scheduler" in process.name()]
    assert len(schedulers) == 2
    schedulers[1].send_signal(signal.SIGKILL)
    assert job.wait(60) == 1
    assert f"engine process {'sglang::schedul'}" in job.output()
    assert f"(pid {schedulers[1].pid}) died of SIGKILL" in job.output()
    first = [line for line in job.output().splitlines() if line.startswith("FIRST FAILURE: ")]
    assert first and not any("a peer vanished" in line for line in first)
    assert job.left_behind() == []


CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
)
"""Of the first and the second version: folder, the file of a group's limit, and the file of what it uses, in bytes."""
LOOKS_SECONDS, STRIKE_SECONDS = 5.0, 30.0


@pytest.fixture
def starve() -> Iterator[Callable[[int], None]]:
    """Let the kernel's out-of-memory killer strike a process, in a memory cgroup whose limit follows what it uses
    down."""
    group, limit, usage = memory_cgroup(f"harness-test-{os.getpid()}")

    def strike(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        # The watchdog looks once a second in which group a process is, and shows that nowhere.
        time.sleep(LOOKS_SECONDS)
        deadline = time.monotonic() + STRIKE_SECONDS
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            with suppress(OSError):  # it has allocated more in the meantime
                limit.write_text(usage.read_text())
            time.sleep(0.001)

    yield strike
    group.rmdir()


def memory_cgroup(name: str) -> tuple[Path, Path, Path]:
    """Make a group; return its folder and the files of its limit and of what it uses.

    Skip the test if none can be made.
    """
    for parent, limit, usage in CGROUPS:
        group = parent / name
        with suppress(OSError):
            group.mkdir()
            with (group / limit).open("r+"):  # which makes no file where this is no such cgroup
                return group, group / limit, group / usage
        with suppress(OSError):
            group.rmdir()
    pytest.skip("no memory cgroup can be made here, which takes root and a cgroup file system that can be written")


@pytest.mark.long
def test_a_scheduler_that_the_out_of_memory_killer_ends_is_told_so(
    tmp_path: Path, starve: Callable[[int], None]
) -> None:
    job = Job(folder=tmp_path / "run", ranks=2, arguments=[QUICKSTART, "--run.steps", "50"]).start()
    job.wait_for_phase("update_actor")
    victim = next(process for process in job.processes() if "scheduler" in process.name())
    starve(victim.pid)
    assert job.wait(60) == 1
    first = next(line for line in job.output().splitlines() if line.startswith("FIRST FAILURE: "))
    assert f"(pid {victim.pid}) died of SIGKILL" in first and "out-of-memory killer" in first
    assert job.left_behind() == []


@pytest.mark.long
def test_a_failure_of_one_rank_alone_ends_the_run_at_once(tmp_path: Path) -> None:
    script = "tests/end_to_end/ppo_with_one_bad_rank.py"
    job = Job(folder=tmp_path / "run", ranks=2, arguments=[QUICKSTART], script=script)
    job.start().wait_for_phase("advantages")
    started = time.monotonic()
    assert job.wait(60) == 1
    assert time.monotonic() - started < 20
    assert "rank 1 FAILED: ArithmeticError: planted on rank 1" in job.output()
    assert job.left_behind() == []
