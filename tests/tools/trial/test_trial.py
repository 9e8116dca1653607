"""One real run of a command each, and what it counts as."""

import os
import sys
from pathlib import Path

import pytest

from harness.tools.trial.trial import Outcome, Signature, Trial, first_code, run_trial

RAISES = "raise ValueError('log-prob is off by 3')"
NO_SESSION = "raise RuntimeError('update_weights_from_tensor requires an open begin_weight_update session')"
NO_DRIVER = "raise RuntimeError('Found no NVIDIA driver on your system.')"

REPORT = (
    "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : {} (pid: 7)\nend of log"
)
"""The report with which torchrun ends. Here a script prints it, as if it showed another job's log."""
PRINTED = 'it ended with exit code 1; its last line is "end of log"'


def tried(folder: Path, *command: str, limit: float = 0.0, is_torchrun: bool = False, **looked_for: object) -> Outcome:
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    asked = Signature(**looked_for)  # type: ignore[arg-type]
    trial = Trial(
        command=command,
        variables=variables,
        cwd=folder,
        folder=folder / "run",
        signature=asked,
        limit=limit,
        is_torchrun=is_torchrun,
        no_gpu=True,
    )
    return run_trial(trial)


@pytest.mark.parametrize(
    ("code", "options", "verdict", "reason"),
    [
        ("", {}, "good", "it passed"),
        (RAISES, {}, "bad", "ValueError: log-prob is off by 3"),
        (RAISES, {"match": "log-?prob is off"}, "bad", "ValueError: log-prob is off by 3"),
        (RAISES, {"match": "an illegal memory access"}, "other", "ValueError: log-prob is off by 3"),
        (RAISES, {"match": "update-needs-nvidia-driver"}, "other", "ValueError: log-prob is off by 3"),
        (NO_DRIVER, {}, "skip", "cannot run here: RuntimeError: Found no NVIDIA driver on your system."),
        ("import sys; sys.exit(125)", {}, "skip", "cannot run here: the script said so, with exit code 125"),
        ("import sys; sys.exit(3)", {}, "bad", "it ended with exit code 3 and printed nothing"),
        ("print('BAD: working'); raise SystemExit(1)", {}, "bad", 'it ended with exit code 1; its last line is "BAD: working"'),
        (f"print({REPORT.format(125)!r}); raise SystemExit(1)", {}, "bad", PRINTED),
        (f"print({REPORT.format(200)!r}); raise SystemExit(1)", {}, "bad", PRINTED),
        ("import os; os.kill(os.getpid(), 11)", {}, "bad", "it was killed by SIGSEGV"),
        ("import time; time.sleep(60)", {"limit": 0.5}, "bad", "it ran longer than 0 s"),
        ("import time; time.sleep(60)", {"limit": 0.5, "match": "x"}, "other", "it ran longer than 0 s"),
    ],
)  # fmt: skip
def test_a_run_counts_as(tmp_path: Path, code: str, options: dict[str, object], verdict: str, reason: str) -> None:
    made = tried(tmp_path, "python", "-c", code, **options)  # type: ignore[arg-type]
    assert (made.verdict, made.reason) == (verdict, reason)


def test_a_known_failure_is_matched_by_its_slug(tmp_path: Path) -> None:
    made = tried(tmp_path, "python", "-c", NO_SESSION, match="update-outside-session")
    assert (made.verdict, made.failure.slug) == ("bad", "update-outside-session")
    assert "requires an open begin_weight_update session" in made.reason


def test_the_exit_code_of_a_rank_counts(tmp_path: Path) -> None:
    """torchrun itself ends with 1. What a rank has printed before is not torchrun's report."""
    (tmp_path / "rank.py").write_text(f"print({REPORT.format(3)!r}); raise SystemExit(125)")
    meet = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1")
    torchrun = ("python", "-m", "torch.distributed.run")
    made = tried(tmp_path, *torchrun, *meet, str(tmp_path / "rank.py"), is_torchrun=True)
    assert (made.code, made.verdict) == (125, "skip")


@pytest.mark.parametrize(("code", "found"), [(2, 2), (125, 125), (-9, 0)])
def test_the_root_cause_is_the_rank_that_failed_first(code: int, found: int, tmp_path: Path) -> None:
    others = "Failures:\n[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 8)\n"
    (tmp_path / "log.txt").write_text(others + REPORT.format(code))
    assert first_code(tmp_path / "log.txt") == found
