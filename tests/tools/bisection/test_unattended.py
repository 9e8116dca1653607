"""What is left alone for a night: it ends when it has answered, shows that it lives, and says where everything is."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.runtime.events import current_work
from harness.tools.trial.environment import Environment
from harness.tools.trial.indexes import Candidate
from harness.tools.trial.trial import Outcome, Trial
from tests.tools.bisection.bisecting import Bench
from tests.tools.bisection.planned import Anything, bisection_of, candidate_of, failed, new_state, passed

LOUD = "import moving\nfor i in range(400): print('line', i)\nmoving.work()\n"
LATER = "import atexit\natexit.register(lambda: print('later\\n' * 300))\n"


def test_what_is_being_done_is_known_and_a_run_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[tuple[str, float]] = []

    def note() -> None:
        work = current_work()
        assert work
        works.append((work.what, work.every))

    def make(provider: Anything, candidate: Candidate) -> Environment:
        note()
        return Environment(python="python", freeze={"moving": candidate.name})

    def run(trial: Trial) -> Outcome:
        note()
        return passed() if candidate_of(trial) == "1.0" else failed("off")

    monkeypatch.setattr(Anything, "make", make)
    bisection_of(new_state(2), run, monkeypatch).run()
    runs = [
        (f"{name}: {doing}", every) for name in ("1.0", "1.1") for doing, every in (("installing", 0), ("run 1", 60))
    ]
    assert works[:4] == runs


@pytest.mark.parametrize(
    ("timeout", "seconds", "limit"),
    [("auto", 100.0, 1000.0), ("auto", 1.0, 600.0), ("0", 9.0, 0.0), ("90s", 9.0, 90.0)],
)
def test_a_limit_follows_from_the_good_end(
    monkeypatch: pytest.MonkeyPatch, timeout: str, seconds: float, limit: float
) -> None:
    limits = []

    def run(trial: Trial) -> Outcome:
        limits.append(trial.limit)
        return replace(passed() if candidate_of(trial) == "1.0" else failed("off"), seconds=seconds)

    bisection_of(new_state(2, timeout=timeout), run, monkeypatch).run()
    assert limits == [0.0 if timeout == "auto" else limit, limit]


KILLS = "import os; os.kill(os.getppid(), 9); import time; time.sleep(60)"


def test_the_failure_is_shown_without_secrets_and_a_candidate_that_kills_what_watches_it_is_skipped(
    tmp_path: Path,
) -> None:
    bench, secret = Bench(tmp_path), "hf_" + "x" * 24
    broken = f"{LATER}def work(): raise ValueError('in the middle {secret}')"
    run = bench.over_sites(["def work(): pass", KILLS, broken], LOUD)
    assert run.returncode == 1, run.stdout + run.stderr
    report, found = bench.report(), tmp_path / "found"
    assert "ValueError: in the middle [redacted " in report.split("## First failure")[1].split("## ")[0]
    assert "runs/1.2/1/log.txt" in report and report.count("later") <= 10
    assert "1.2: running; its output is in " in run.stdout and "(--timeout)" in run.stdout
    assert "runs/1.2/1/log.txt" in next(line for line in run.stdout.splitlines() if "] BAD" in line)
    assert "SKIP  1.1: it kills the process that watches it" in run.stdout and "cannot be used" not in run.stderr
    assert bench.ran().count("1.1") == 2
    assert secret not in run.stdout + report
    assert [(found / name).stat().st_mode & 0o777 for name in (".", "runs/1.0/1")] == [0o700, 0o700]
    assert [each["verdict"] for each in bench.state()["records"]] == ["good", "bad", "skip"]
