import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tools.hosts.host_output import HostConsole, LineReader, RootCause

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


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"))), st.integers(1, 9))
def test_lines_come_whole_however_they_are_cut(lines: list[str], piece: int) -> None:
    told: list[str] = []
    reader = LineReader(told.append)
    data = "".join(line + "\n" for line in lines).encode()
    for start in range(0, len(data), piece):
        reader.feed(data[start : start + piece])
    reader.end()
    assert told == lines


def test_a_last_line_without_a_newline_is_told() -> None:
    told: list[str] = []
    reader = LineReader(told.append)
    reader.feed(b"one\r\ntwo")
    reader.end()
    assert told == ["one", "two"]


@pytest.mark.parametrize("code", [2, 125, -9])
def test_the_root_cause_is_the_rank_that_failed_first(code: int) -> None:
    cause = RootCause()
    for line in LAST_WORDS.format(code=code).splitlines():
        cause.read(line)
    assert cause.code == code


def test_each_line_has_its_hosts_name(capsys: pytest.CaptureFixture[str]) -> None:
    console = HostConsole(width=6)
    console.line("host1", 1, "hello")
    console.line("host10", 10, "[bold]hello[/bold]")
    console.say("cut host1")
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first, second) == ("host1  | hello", "host10 | [bold]hello[/bold]")
    assert third.startswith("hosts: cut host1 (0.") and third.endswith(" s)")
