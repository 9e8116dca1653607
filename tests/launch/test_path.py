"""launch/bisect_versions.py has the name of a module of Python's, which whatever else lies in launch/ must still be able to import."""

import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


USES = """
import _bisect, bisect, heapq, random, statistics, tempfile
assert bisect.__file__.endswith("launch/bisect_versions.py"), bisect.__file__
for name in ("bisect_left", "bisect_right", "insort_left", "insort_right"):
    assert getattr(bisect, name) is getattr(_bisect, name)
assert bisect.bisect is _bisect.bisect_right and bisect.insort is _bisect.insort_right
assert random.choices([1, 2], [1, 1])
"""


def test_beside_it_pythons_own_is_had() -> None:
    """As in a script of launch/, whose folder Python puts first on the path."""
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(LAUNCH)!r}){USES}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["bisect.py", "diagnose.py", "hosts.py"])
def test_help_runs(script: str) -> None:
    run = subprocess.run([sys.executable, str(LAUNCH / script), "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and f"launch/{script}" in run.stdout, run.stderr


def test_no_module_of_the_environments_script_is_pythons_bisect() -> None:
    """It runs with harness/ first on sys.path, where the folder bisect/ is."""
    script = LAUNCH.parent / "harness" / "environments.py"
    run = subprocess.run([sys.executable, "-X", "importtime", str(script), "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    assert not {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()} & {"bisect", "random", "tempfile"}
