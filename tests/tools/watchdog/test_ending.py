"""The report of a run that failed."""

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
    assert text.startswith("TimeoutExpired: ") and text.endswith(f"launch/report.py {folder}` writes the reports.\n")
    (folder / "config.toml").write_text("[model")
    report_failed_run(folder, seconds=120)
    assert "config.toml" in (folder / NO_REPORT).read_text().splitlines()[0]
    assert capfd.readouterr() == ("", "")


def test_a_run_without_a_config_has_no_report(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    (folder / "config.toml").unlink()
    before = sorted(folder.iterdir())
    report_failed_run(folder)
    assert sorted(folder.iterdir()) == before
