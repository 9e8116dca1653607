"""The report of a run that failed."""

import resource
import shutil
import signal
from pathlib import Path

import pytest

from harness.tools.watchdog.ending import NO_REPORT, report_failed_run
from tests.tools.report.fake_run import fake_run


def test_a_run_that_failed_is_reported(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    report_failed_run(folder, seconds=120)
    assert (folder / "report.md").is_file() and (folder / "report.html").is_file()
    assert not (folder / NO_REPORT).exists()


def test_a_report_that_fails_leaves_its_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = fake_run(tmp_path / "run", 2)
    report_failed_run(folder, seconds=0.001)
    text = (folder / NO_REPORT).read_text()
    assert text.startswith("TimeoutExpired: ") and text.endswith(
        f"`python launch/report.py {folder}` writes the reports.\n"
    )
    (folder / "config.toml").write_text("[model")
    report_failed_run(folder, seconds=120)
    assert "config.toml" in (folder / NO_REPORT).read_text().splitlines()[0]
    assert capfd.readouterr() == ("", "")


def test_the_reason_is_whole_or_not_there_and_no_link_is_followed(tmp_path: Path) -> None:
    folder, precious = fake_run(tmp_path / "run", 2), tmp_path / "precious"
    precious.write_text("mine")
    (folder / NO_REPORT).symlink_to(precious)
    report_failed_run(folder, seconds=0.001)
    assert precious.read_text() == "mine" and not (folder / NO_REPORT).is_symlink()
    (folder / NO_REPORT).write_text("an earlier reason")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))  # as on a disk that is almost full
    try:
        report_failed_run(folder, seconds=0.001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (folder / NO_REPORT).read_text() == "an earlier reason" and not list(folder.glob(".*.part"))


def test_a_run_without_a_config_has_no_report(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    (folder / "config.toml").unlink()
    before = sorted(folder.iterdir())
    report_failed_run(folder)
    assert sorted(folder.iterdir()) == before
    shutil.rmtree(folder)
    report_failed_run(folder)
