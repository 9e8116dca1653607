"""Commands whose output goes into a closed pipe, as in `... | head`: real processes, real pipes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.tools.command_line import READER_GONE

REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = {
    "dry run": ("", "launch/ppo.py", "configs/cpu/quickstart.toml", "--parallel.tp", "1", "--dry-run"),
    "repros": ("", "launch/repro.py", "list"),
    "repros, unbuffered": ("1", "launch/repro.py", "list"),
    "export": ("1", "launch/export.py", "configs/cpu/quickstart.toml"),
    "diagnose": ("1", "launch/diagnose.py", "README.md"),
    "bisect": ("", "launch/bisect_versions.py", "--help"),
    "hosts": ("1", "launch/hosts.py", "--help"),
    "report": ("", "launch/report.py", "--help"),
}
"""PYTHONUNBUFFERED, by which Python notices at a print or at its end; and a command line."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.long] * (each == "export")) for each in COMMANDS]
)
def test_a_command_ends_quietly_when_nobody_reads_its_output(name: str) -> None:
    unbuffered, *words = COMMANDS[name]
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    _, said = process.communicate(timeout=300)
    assert process.returncode == READER_GONE
    assert [line for line in said.splitlines() if not line.endswith(b" s so far)")] == []


def test_a_command_that_is_read_ends_with_its_own_code() -> None:
    words = [sys.executable, "launch/diagnose.py", "setup.cfg"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "") and done.stdout
