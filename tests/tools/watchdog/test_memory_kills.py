"""Evidence that the kernel's out-of-memory killer ended a process; files as kernels write them."""

from pathlib import Path

import pytest

from harness.tools.watchdog.deaths import COUNTS, MemoryKills

RANK, OTHER = 555, 777


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A machine on which rank 555 runs in one cgroup, and 777 in the cgroup of another job."""
    write(tmp_path / f"proc/{RANK}/cgroup", "0::/slurm/job7\n")
    write(tmp_path / f"proc/{OTHER}/cgroup", "0::/slurm/job8\n")
    for group in ("job7", "job8"):
        count(tmp_path, group, 0)
    return tmp_path


def count(root: Path, group: str, kills: int) -> None:
    write(root / f"sys/fs/cgroup/slurm/{group}/memory.events", f"low 0\nmax 12\noom 1\noom_kill {kills}\n")


STRUCK = "the out-of-memory killer has just struck"


def test_a_kill_in_the_cgroup_explains_one_death(job: Path) -> None:
    write(job / f"proc/{OTHER}/cgroup", "0::/slurm/job7\n")
    kills = MemoryKills(job)
    kills.look([RANK, OTHER])
    count(job, "job7", 1)
    assert STRUCK in kills.killed(RANK)
    assert kills.killed(RANK) == kills.killed(OTHER) == ""


def test_a_death_that_a_rank_reports_late_still_has_its_evidence(job: Path) -> None:
    """As when a scheduler is killed while the trainer computes: its rank sees that at its next call of the engine."""
    kills = MemoryKills(job)
    kills.look([RANK, OTHER])
    count(job, "job7", 1)
    for _ in range(3 * COUNTS):
        kills.look([OTHER])
    assert STRUCK in kills.killed(RANK)


def test_a_process_that_is_exiting_has_left_its_cgroup_but_not_its_evidence(job: Path) -> None:
    write(job / "sys/fs/cgroup/memory.events", "oom_kill 9\n")
    kills = MemoryKills(job)
    kills.look([RANK])
    count(job, "job7", 1)
    write(job / f"proc/{RANK}/cgroup", "0::/\n")
    kills.look([RANK])
    assert STRUCK in kills.killed(RANK)


def test_a_kill_elsewhere_or_long_ago_explains_nothing(job: Path) -> None:
    kills = MemoryKills(job)
    kills.look([RANK, OTHER])
    count(job, "job7", 1)
    for _ in range(COUNTS):
        kills.look([RANK, OTHER])
    count(job, "job8", 1)
    assert kills.killed(RANK) == ""


def test_a_cgroup_that_is_removed_with_its_process_is_not_taken_for_the_whole_machine(job: Path) -> None:
    kills = MemoryKills(job)
    kills.look([RANK, OTHER])
    (job / "sys/fs/cgroup/slurm/job7/memory.events").unlink()
    write(job / "sys/fs/cgroup/memory.events", "oom_kill 9\n")
    assert kills.killed(RANK) == ""
    (job / f"proc/{OTHER}/cgroup").unlink()
    kills.look([OTHER])
    assert kills.killed(OTHER) == ""
