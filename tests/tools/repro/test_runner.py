"""What runs a variant: in time, with nothing left behind, and with none of a launcher's variables. The variants here are
stand-ins, a few lines of shell."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from harness.tools.repro import runner

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, sys
sys.path.insert(0, {root!r})
from harness.tools.repro import runner
from harness.tools.repro.case import Case
runner.command = lambda slug, variant: ["bash", "-c", {shell!r}]
case = Case(title="t", needs="cpu", broken="b", healthy="h", signature=("it broke",), seconds={seconds})
outcome = runner.run("stand-in", case, "broken")
print("code", outcome.exit_code, "seconds", outcome.seconds)
print(outcome.output)
"""


def ran(shell: str, seconds: float = 30.0) -> str:
    """In a process of its own: the runner takes over all orphans of the one it is in."""
    program = textwrap.dedent(PROGRAM).format(root=str(REPOSITORY), shell=shell, seconds=seconds)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_exit_code_and_output_of_both_streams() -> None:
    output = ran("echo one; echo two >&2; exit 7")
    assert output.startswith("code 7 ") and "one\ntwo" in output


def test_a_variant_that_does_not_end_is_ended() -> None:
    began = time.monotonic()
    assert ran("echo up; sleep 1000", seconds=1.0).startswith("code None seconds 1.")
    assert time.monotonic() - began < 10


def test_a_variant_that_has_shown_its_signature_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "PROGRAM", PROGRAM.replace("case =", "runner.LINGER_SECONDS = 1.0\ncase =")
    )
    began = time.monotonic()
    assert ran("echo it broke; sleep 1000", seconds=50.0).startswith("code None seconds ")
    assert time.monotonic() - began < 15


def test_what_it_left_in_shared_memory_goes() -> None:
    output = ran("echo of $$; echo 1 > /dev/shm/torch_$$_7_0; sleep 1; kill -9 $$")
    assert output.startswith("code -9 ")
    pid = output.split("of ")[1].split()[0]
    assert not Path(f"/dev/shm/torch_{pid}_7_0").exists()


def test_what_it_left_running_is_ended() -> None:
    output = ran("setsid sleep 977 & echo left $!")
    assert "left " in output
    left = int(output.split("left ")[1].split()[0])
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_a_launchers_variables_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "HARNESS_RUN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    made = runner.environment("/tmp/some")
    assert {"RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "HARNESS_RUN"}.isdisjoint(made)
    assert (made["TMPDIR"], made["CUDA_VISIBLE_DEVICES"]) == ("/tmp/some", "1")
    assert made["PYTHONPATH"].startswith(str(REPOSITORY))
