import pytest

from harness.tools.hosts.host_output import RootCause

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


@pytest.mark.parametrize("code", [2, 125, -9])
def test_the_root_cause_is_the_rank_that_failed_first(code: int) -> None:
    cause = RootCause()
    for line in LAST_WORDS.format(code=code).splitlines():
        cause.read(line)
    assert cause.code == code
