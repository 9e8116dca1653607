"""One real run of a command each, and what it counts as."""

import sys
from pathlib import Path

import pytest

from harness.tools.bisection.classify import Run, run_once
from harness.tools.bisection.installation import Environment
from harness.tools.bisection.question import Options, Pause, Question
from harness.tools.bisection.state import Attempt

RAISES = "raise ValueError('log-prob is off by 3')"
NO_SESSION = "raise RuntimeError('update_weights_from_tensor requires an open begin_weight_update session')"
NO_DRIVER = "raise RuntimeError('Found no NVIDIA driver on your system.')"

REPORT = (
    "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : {} (pid: 7)\nend of log"
)
"""The report with which torchrun ends. Here a script prints it, as if it showed another job's log."""
PRINTED = 'it ended with exit code 1; its last line is "end of log"'


def classified(folder: Path, code: str, limit: float = 0.0, **options: object) -> Attempt:
    return classified_run(folder, ("python", "-c", code), limit, **options)


def classified_run(folder: Path, command: tuple[str, ...], limit: float = 0.0, **options: object) -> Attempt:
    asked = Options(package="moving", **options)  # type: ignore[arg-type]
    question = Question(options=asked, command=command, folder=str(folder))
    with (folder / "lock").open("w") as lock:
        run = Run(
            question=question,
            environment=Environment(python=sys.executable),
            folder=folder / "run",
            candidate="1.0",
            no_gpu=True,
            lock=lock.fileno(),
            limit=limit,
        )
        return run_once(run)


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
    made = classified(tmp_path, code, **options)  # type: ignore[arg-type]
    assert (made.verdict, made.reason) == (verdict, reason)


def test_a_known_failure_is_matched_by_its_slug(tmp_path: Path) -> None:
    made = classified(tmp_path, NO_SESSION, match="update-outside-session")
    assert (made.verdict, made.failure.slug) == ("bad", "update-outside-session")
    assert "requires an open begin_weight_update session" in made.reason


@pytest.mark.parametrize("torchrun", ["torchrun", "python -m torch.distributed.run"])
def test_the_exit_code_of_a_rank_counts(tmp_path: Path, torchrun: str) -> None:
    """torchrun itself ends with 1. What a rank has printed before is not torchrun's report."""
    (tmp_path / "rank.py").write_text(f"print({REPORT.format(3)!r}); raise SystemExit(125)")
    meet = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1")
    made = classified_run(tmp_path, (*torchrun.split(), *meet, str(tmp_path / "rank.py")))
    assert (made.code, made.verdict) == (125, "skip")


def test_exit_codes_of_128_and_more_stop(tmp_path: Path) -> None:
    with pytest.raises(Pause, match="exit code 200"):
        classified(tmp_path, "import sys; sys.exit(200)")
