"""Real releases of sglang, really installed, on a machine without a GPU: bisects whose answers are known."""

import os
from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench

UPDATE = Path(__file__).with_name("update_outside_session.py")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    made.environment["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR") or f"{cache}/uv"  # releases are downloaded once
    return made


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
