"""A wrong command line of launch/sync.py ends before anything heavy is imported; tests/said/tools.txt has the sentences."""

import resource

from tests.end_to_end.launching import run_script


def cpu_seconds() -> float:
    """Return those of all children; other work on the machine does not change them much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_mistake_ends_at_once() -> None:
    before = cpu_seconds()
    assert run_script("launch/sync.py", "configs/cpu/quickstart.toml", "--syncs", "0").returncode == 2
    assert cpu_seconds() - before < 3.0
