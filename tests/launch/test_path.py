"""launch/bisect.py has the name of a module of Python's, which whatever else lies in launch/ must still be able to import."""

import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("script", sorted(file.name for file in LAUNCH.glob("*.py")))
def test_no_script_imports_ours_for_pythons(script: str, tmp_path: Path) -> None:
    """The first lines of each script as they are, then modules of Python's that need its bisect; as `python launch/X.py`."""
    text = (LAUNCH / script).read_text()
    head, mark, _ = text.partition("sys.path.sort(")
    assert mark, f"launch/{script} leaves launch/ first on sys.path, where bisect.py hides Python's"
    line = text[len(head) :].splitlines()[0]
    folder = tmp_path / "launch"
    folder.mkdir()
    (folder / "bisect.py").write_text("raise ImportError('launch/bisect.py was imported for Python\\'s')")
    use = "import random, statistics, heapq, bisect\nassert bisect.insort and random.choices([1, 2], [1, 1])\n"
    (folder / script).write_text(f"{head}{line}\n{use}")  # over the file above, where the script is bisect.py itself
    run = subprocess.run([sys.executable, str(folder / script)], capture_output=True, text=True, cwd=folder)
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
