"""One real bug of the engine, one of the sender and one of the trainer, through the program that puts them all back."""

import subprocess
import sys
from pkgutil import resolve_name

import pytest

from tests.real_bugs.run import ROOT, bugs


def test_what_a_bug_replaces_in_this_harness_exists() -> None:
    ours = [each.function for each in bugs().values() if each.function.startswith("harness.")]
    assert len(ours) > 10 and all(callable(resolve_name(function)) for function in ours)


@pytest.mark.long
def test_bugs_of_engine_sender_and_trainer_are_caught_and_named() -> None:
    ids = ("S25", "N02", "T01")
    done = subprocess.run([sys.executable, "-m", "tests.real_bugs.run", *ids], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(" | ")[:3] for line in done.stdout.splitlines()] == [[each, "caught", "exit 1"] for each in ids]
