"""One real run of a command each, and what it counts as."""

import sys
from pathlib import Path

import pytest

from harness.tools.bisection.classify import StopRequested, run_once
from harness.tools.bisection.installation import Environment
from harness.tools.bisection.question import Options, Question
from harness.tools.bisection.state import Attempt

RAISES = "raise ValueError('log-prob is off by 3')"
NO_SESSION = "raise RuntimeError('update_weights_from_tensor requires an open begin_weight_update session')"
NO_DRIVER = "raise RuntimeError('Found no NVIDIA driver on your system.')"


def classified(
    folder: Path, code: str, reference: float | None = None, limit: float = 0.0, **options: object
) -> Attempt:
    asked = Options(package="moving", **options)  # type: ignore[arg-type]
    question = Question(options=asked, command=("python", "-c", code), folder=str(folder))
    with (folder / "lock").open("w") as lock:
        return run_once(
            question,
            Environment(python=sys.executable),
            folder / "run",
            no_gpu=True,
            lock=lock.fileno(),
            candidate="1.0",
            reference=reference,
            limit=limit,
        )


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
        ("import sys; sys.exit(3)", {}, "bad", "it ended with exit code 3 and no message"),
        ("import os; os.kill(os.getpid(), 11)", {}, "bad", "it was killed by SIGSEGV"),
        ("print('x = 0.2'); raise OSError", {"metric": "x", "above": 0.1}, "bad", "x = 0.2"),
        ("print('x = 0.02')", {"metric": "x", "above": 0.1}, "good", "x = 0.02"),
        ("print('y = 0.02')", {"metric": "x", "above": 0.1}, "skip", "it passed and gave no x"),
        ("print('x = 1.4')", {"metric": "x", "worse": "1.3x", "reference": 1.0}, "bad", "x = 1.4, 1.400 times the good end's"),
        ("import time; time.sleep(60)", {"limit": 0.5}, "bad", "it ran past 0 s"),
        ("import time; time.sleep(60)", {"limit": 0.5, "match": "x"}, "other", "it ran past 0 s"),
    ],
)  # fmt: skip
def test_a_run_counts_as(tmp_path: Path, code: str, options: dict[str, object], verdict: str, reason: str) -> None:
    made = classified(tmp_path, code, **options)  # type: ignore[arg-type]
    assert (made.verdict, made.reason) == (verdict, reason)


def test_a_known_failure_is_matched_by_its_slug(tmp_path: Path) -> None:
    made = classified(tmp_path, NO_SESSION, match="update-outside-session")
    assert (made.verdict, made.slug) == ("bad", "update-outside-session")
    assert "requires an open begin_weight_update session" in made.reason


def test_exit_codes_of_128_and_more_stop(tmp_path: Path) -> None:
    with pytest.raises(StopRequested, match="exit code 200"):
        classified(tmp_path, "import sys; sys.exit(200)")
