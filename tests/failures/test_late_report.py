from pathlib import Path

from harness.failures.late_report import report_failed_run
from tests.reporting.fake_run import fake_run


def test_a_watchdog_hears_one_sentence_of_what_went_wrong(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    assert report_failed_run(folder) == []
    assert (folder / "report.md").is_file() and (folder / "report.html").is_file()
    assert report_failed_run(folder, seconds=0.001)[0].startswith("no report: TimeoutExpired; python launch/report.py ")
    assert report_failed_run(tmp_path)[0].startswith("error: ")
