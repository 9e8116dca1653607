"""launch/sync.py with real engines in SGLang's CPU mode; tests/end_to_end/test_fp8.py reads back what it sends."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.launching import run

pytestmark = pytest.mark.long


def test_a_bench_is_one_table_of_all_transports(tmp_path: Path) -> None:
    words = ("--bench", "--repeats", "1", "--transports", "pull", "bucket")
    job = run(tmp_path, 2, "configs/cpu/quickstart.toml", *words, script="launch/sync.py")
    assert job.process.returncode == 0, job.output()[-4000:]
    rows = [line for line in job.output().splitlines() if re.match(r"\S (all-gather|pull|bucket) ", line)]
    assert len(rows) == 3, job.output()[-2000:]
