"""Real runs: each broken variant fails in the known way, and its control passes; by default two quick ones."""

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import get_args

import pytest

from harness.tools.repro.case import Variant, all_cases
from harness.tools.repro.run_cases import VariantOutcome, judge

REPOSITORY = Path(__file__).resolve().parents[3]
QUICK = ("cpu-payload-authkey", "missing-main-guard")
HERE = (
    "hf-router-masking",
    "lost-correction-bias",
    "safe-unpickler",
    "tied-embeddings",
    "unknown-engine-argument",
    "verl-engine-removed",
)
"""Those without processes of their own."""
ENGINES = (
    "double-resume-or-release",
    "dsv3-qkv-a-split",
    "nonzero-node-engine-blocks",
    "orphans-of-a-start",
    "packed-experts-names",
    "update-outside-session",
)
"""Those whose engines are the point; the others run with `launch/repro.py run --all`, which takes half an hour."""
NOT_HERE = {
    "hf-router-masking": "both variants pass",  # fixed in the transformers that this sglang takes
}
WITHOUT_ENGINE = [
    slug
    for slug, case in all_cases().items()
    if case.needs in ("cpu", "hosts") and not case.engine and slug not in (*QUICK, *HERE)
]


def check(slug: str) -> None:
    command = [sys.executable, str(REPOSITORY / "launch" / "repro.py"), "run", slug]
    ended = subprocess.run(command, capture_output=True, text=True)
    last = ended.stdout.rstrip().rpartition("\n")[2]
    if last.startswith("cannot run here: "):
        pytest.skip(last)
    expected = "not reproduced: " if slug in NOT_HERE else "reproduced: "
    assert last.startswith(expected) and NOT_HERE.get(slug, "") in last, ended.stdout + ended.stderr
    assert ended.returncode == (0 if slug in NOT_HERE else 1)


@pytest.mark.parametrize("slug", QUICK)
def test_quick(slug: str) -> None:
    check(slug)


@pytest.mark.parametrize("slug", HERE)
def test_here(slug: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    outcomes: dict[Variant, VariantOutcome] = {}
    for variant in get_args(Variant):
        try:
            all_cases()[slug].program(variant == "broken")
            code = 0
        except Exception:
            traceback.print_exc()
            code = 1
        printed = capfd.readouterr()
        outcomes[variant] = VariantOutcome(exit_code=code, output=printed.out + printed.err, seconds=1.0)
    kind, sentence = judge(all_cases()[slug], outcomes["broken"], outcomes["healthy"])
    assert kind == ("not reproduced" if slug in NOT_HERE else "reproduced"), outcomes
    assert NOT_HERE.get(slug, "") in sentence


@pytest.mark.long
@pytest.mark.parametrize("slug", WITHOUT_ENGINE)
def test_without_an_engine(slug: str) -> None:
    check(slug)


@pytest.mark.long
@pytest.mark.parametrize("slug", ENGINES)
def test_with_engines(slug: str) -> None:
    check(slug)
