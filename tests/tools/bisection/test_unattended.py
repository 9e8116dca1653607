"""What is left alone for a night: it ends when it has answered, shows that it lives, and says where everything is."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.runtime import events
from harness.runtime.events import current_work
from harness.tools.bisection.bisection import Progress
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.classify import Run, import_failure
from harness.tools.bisection.installation import Environment
from harness.tools.bisection.state import Attempt
from tests.tools.bisection.bisecting import Bench, bare_python
from tests.tools.bisection.planned import Anything, bisection_of, failed, new_state, passed

LOUD = "import moving\nfor i in range(400): print('line', i)\nmoving.work()\n"
LATER = "import atexit\natexit.register(lambda: print('later\\n' * 300))\n"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_lines_around_the_failure_and_where_its_log_is(bench: Bench) -> None:
    broken = f"{LATER}def work(): raise ValueError('in the middle')"
    run = bench.over_sites(["def work(): pass", broken], LOUD)
    assert run.returncode == 0, run.stdout + run.stderr
    report = bench.report()
    assert "ValueError: in the middle" in report.split("## First failure")[1].split("## ")[0]
    assert "runs/1.1/1/log.txt" in report and report.count("later") <= 10
    assert "1.1: running; its output is in " in run.stdout and "(--timeout)" in run.stdout
    verdict = next(line for line in run.stdout.splitlines() if "] BAD" in line)
    assert "runs/1.1/1/log.txt" in verdict


def test_what_is_being_done_is_known_and_a_run_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[tuple[str, float]] = []

    def note() -> None:
        work = current_work()
        assert work
        works.append((work.what, work.every))

    def make(provider: Anything, candidate: Candidate) -> Environment:
        note()
        return Environment(python="python", freeze={"moving": candidate.name})

    def run_once(run: Run) -> Attempt:
        note()
        return replace(passed() if run.candidate == "1.0" else failed("off"), log=str(run.folder / "log.txt"))

    monkeypatch.setattr(Anything, "make", make)
    bisection_of(new_state(2), run_once, monkeypatch).run()
    runs = [
        (f"{name}: {doing}", every) for name in ("1.0", "1.1") for doing, every in (("installing", 0), ("run 1", 60))
    ]
    assert works[:4] == runs


def test_the_import_of_what_failed_is_told_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_SECONDS", 0.1)
    bench, told = Bench(tmp_path), tmp_path / "told"
    sites = bench.sites(["", f"import os, time\nwhile not os.path.exists({str(told)!r}): time.sleep(0.02)"])

    class Screen(Progress):
        def say(self, text: str) -> None:
            if "1.1: importing moving" in text:
                told.touch()

    with (tmp_path / "lock").open("w") as lock, events.working("bisecting", Screen()):
        run = Run(
            question=new_state(2).question,
            environment=Environment(python=bare_python(), paths=(str(sites / "1.1"),)),
            folder=tmp_path,
            candidate="1.1",
            no_gpu=True,
            lock=lock.fileno(),
        )
        assert import_failure(run) == ""
    assert told.exists()


@pytest.mark.parametrize(
    ("timeout", "seconds", "limit"),
    [("auto", 100.0, 1000.0), ("auto", 1.0, 600.0), ("0", 9.0, 0.0), ("90s", 9.0, 90.0)],
)
def test_a_limit_follows_from_the_good_end(
    monkeypatch: pytest.MonkeyPatch, timeout: str, seconds: float, limit: float
) -> None:
    limits = []

    def run_once(run: Run) -> Attempt:
        limits.append(run.limit)
        made = passed() if run.candidate == "1.0" else failed("off")
        return replace(made, log=str(run.folder / "log.txt"), seconds=seconds)

    bisection_of(new_state(2, timeout=timeout), run_once, monkeypatch).run()
    assert limits == [0.0 if timeout == "auto" else limit, limit]


KILLS = "import os; os.kill(os.getppid(), 9); import time; time.sleep(60)"


def test_a_candidate_that_kills_what_watches_it_is_skipped(bench: Bench) -> None:
    secret = "hf_" + "x" * 24
    script = "import moving\nif hasattr(moving, 'secret'): raise ValueError(moving.secret)"
    run = bench.over_sites(["", KILLS, f"secret = '{secret}'"], script)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "SKIP  1.1: it kills the process that watches it" in run.stdout and "cannot be used" not in run.stderr
    assert bench.ran().count("1.1") == 2
    found = bench.folder / "found"
    assert secret not in run.stdout + bench.report() and "[redacted " in bench.report()
    assert [(found / name).stat().st_mode & 0o777 for name in (".", "runs/1.0/1")] == [0o700, 0o700]
    assert [each["verdict"] for each in bench.state()["records"]] == ["good", "bad", "skip"]
