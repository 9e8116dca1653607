from pathlib import Path

import pytest

from harness.tools.bisection.classify import first_code

# As torch 2.13's torchrun prints it.
LAST_WORDS = """\
============================================================
launch/ppo.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 8)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_05:51:15
  host      : host0
  rank      : 0 (local_rank: 0)
  exitcode  : {code} (pid: 6)
  error_file: <N/A>
"""


@pytest.mark.parametrize(("code", "found"), [(2, 2), (125, 125), (-9, 0)])
def test_the_root_cause_is_the_rank_that_failed_first(code: int, found: int, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LAST_WORDS.format(code=code))
    assert first_code(log) == found
