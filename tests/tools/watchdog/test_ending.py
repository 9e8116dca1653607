"""The report of a run that failed."""

from pathlib import Path

import pytest

from harness.tools.watchdog.ending import NO_REPORT, report_failed_run
from tests.tools.report.fake_run import fake_run


def test_a_run_that_failed_is_reported_or_says_why_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = fake_run(tmp_path / "run", 2)
    before, config = sorted(folder.iterdir()), (folder / "config.toml").read_text()
    (folder / "config.toml").unlink()
    report_failed_run(folder)
    assert sorted(folder.iterdir()) == [each for each in before if each.name != "config.toml"]
    (folder / "config.toml").write_text(config)
    report_failed_run(folder, seconds=120)
    assert (folder / "report.md").is_file() and (folder / "report.html").is_file()
    assert not (folder / NO_REPORT).exists()
    report_failed_run(folder, seconds=0.001)
    text = (folder / NO_REPORT).read_text()
    assert text.startswith("TimeoutExpired: ") and text.endswith(f"launch/report.py {folder}` writes the reports.\n")
    (folder / "config.toml").write_text("[model")
    report_failed_run(folder, seconds=120)
    assert "config.toml" in (folder / NO_REPORT).read_text().splitlines()[0]
    assert capfd.readouterr() == ("", "")
