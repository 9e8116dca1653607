"""Real releases of sglang, really installed, on a machine without a GPU: bisects whose answers are known."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench

UPDATE = Path(__file__).with_name("update_outside_session.py")
# Asked of the source, so that no release is imported, which takes 10 s each.
MOVED_IN_SOURCE = (
    "import importlib.util, pathlib\n"
    "folder = pathlib.Path(importlib.util.find_spec('sglang').submodule_search_locations[0])\n"
    "runner = (folder / 'srt/model_executor/model_runner.py').read_text()\n"
    "if 'class LocalSerializedTensor' not in runner: raise ImportError('LocalSerializedTensor has moved')"
)


def bisect(bench: Bench, good: str, bad: str, *words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Each release alone, over this environment's packages. Skips where there is no registry."""
    run = bench.bisect("--only-package", "--dir", "found", "--good", good, "--bad", bad, *words, timeout=timeout)
    if "could not be read" in run.stderr or "could not be reached" in run.stderr:
        pytest.skip("no package registry is within reach")
    return run


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    made.environment["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR") or f"{cache}/uv"  # releases are downloaded once
    return made


@pytest.mark.long
def test_a_small_one(bench: Bench) -> None:
    run = bisect(bench, "0.5.15", "0.5.17", "--match", "has moved", "--", bench.script(MOVED_IN_SOURCE), timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first bad release is 0.5.16; the last good one is 0.5.15.post1." in run.stdout
    report = bench.report()
    assert "https://github.com/sgl-project/sglang/compare/v0.5.15.post1...v0.5.16" in report
    assert "- engine arguments gone: " in report and "| sglang | 0.5.15.post1 | 0.5.16 | likely suspect |" in report


@pytest.mark.long
def test_each_release_with_its_own_pins(bench: Bench) -> None:
    run = bench.bisect(
        *("--dir", "found", "--good", "0.5.20", "--bad", "0.5.21", "--", bench.script(UPDATE.read_text())), timeout=3600
    )
    if "could not be re" in run.stderr:
        pytest.skip("no package registry is within reach")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first bad release is 0.5.21; the last good one is 0.5.20." in run.stdout
    freeze = (bench.folder / "found" / "environments" / "0.5.21.txt").read_text()
    assert "sglang==0.5.21" in freeze and "torch==2.13.0" in freeze
