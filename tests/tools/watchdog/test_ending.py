"""The end of torchrun, as real processes that work or sleep in its place, and the report of a run that failed."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.tools.watchdog import ending
from harness.tools.watchdog.ending import NO_REPORT, end_torchrun, report_failed_run
from tests.tools.report.fake_run import fake_run

WORKS = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nraise SystemExit(3)\n"
SLEEPS = "import time\ntime.sleep(60)\n"


def wait(until: Callable[[], bool], seconds: float) -> None:
    given_up = time.monotonic() + seconds
    while not until() and time.monotonic() < given_up:
        time.sleep(0.02)


def test_torchrun_is_waited_for_while_it_works_and_ended_if_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "IDLE_SECONDS", 1.0)
    said: list[str] = []
    works = subprocess.Popen([sys.executable, "-S", "-c", WORKS])
    end_torchrun(psutil.Process(works.pid), "host0", said.append, wait)
    assert works.wait(0) == 3
    assert said == []
    sleeps = subprocess.Popen([sys.executable, "-S", "-c", SLEEPS])
    end_torchrun(psutil.Process(sleeps.pid), "host0", said.append, wait)
    assert not psutil.pid_exists(sleeps.pid)
    assert len(said) == 1 and said[0].startswith("torchrun on host0 (pid ")


def test_a_run_that_failed_is_reported(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    report_failed_run(folder)
    assert (folder / "report.md").is_file() and (folder / "report.html").is_file()
    assert not (folder / NO_REPORT).exists()


def test_the_folder_says_what_went_wrong_with_its_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = fake_run(tmp_path / "run", 2)
    report_failed_run(folder, seconds=0.001)
    text = (folder / NO_REPORT).read_text()
    assert text.startswith("TimeoutExpired: ") and text.endswith(
        f"`python launch/report.py {folder}` makes the reports.\n"
    )
    (folder / "config.toml").write_text("[model")
    report_failed_run(folder)
    assert "config.toml" in (folder / NO_REPORT).read_text().splitlines()[0]
    assert capfd.readouterr() == ("", "")


def test_a_run_without_a_config_has_no_report(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    (folder / "config.toml").unlink()
    before = sorted(folder.iterdir())
    report_failed_run(folder)
    assert sorted(folder.iterdir()) == before
    shutil.rmtree(folder)
    report_failed_run(folder)
