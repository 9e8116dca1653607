"""The kernel's count of what its out-of-memory killer killed; files as kernels write them."""

from pathlib import Path

from harness.failures.memory_kills import MemoryKills, counters


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_kill_in_the_cgroup_is_seen_once(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/slurm/job7\n")
    events = tmp_path / "sys/fs/cgroup/slurm/job7/memory.events"
    write(events, "low 0\nhigh 0\nmax 12\noom 1\noom_kill 0\noom_group_kill 0\n")
    write(tmp_path / "proc/vmstat", "nr_free_pages 7\noom_kill 3\n")
    kills = MemoryKills(tmp_path)
    assert kills.before == {"the cgroup /slurm/job7": 0, "this machine": 3}
    assert kills.seen() == ""
    write(events, "oom 2\noom_kill 1\n")
    assert kills.seen() == "the out-of-memory killer has struck in the cgroup /slurm/job7"
    assert kills.seen() == ""


def test_in_a_container_of_the_first_version_its_own_group_is_at_the_top(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert counters(tmp_path) == {"the cgroup /docker/abc": 2}


def test_what_cannot_be_read_is_not_counted(tmp_path: Path) -> None:
    assert counters(tmp_path) == {}
    assert MemoryKills(tmp_path).seen() == ""
