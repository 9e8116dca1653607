"""What observers do at the end of a run that has passed must not make it one that failed."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.tools import observers
from harness.tools.observers import ReportWriter


def writer_of(folder: Path, rank: int = 0) -> ReportWriter:
    writer = ReportWriter()
    run: Any = SimpleNamespace(
        world=SimpleNamespace(rank=rank), folder=folder, events=SimpleNamespace(say=lambda text: None)
    )
    writer.met(run)
    return writer


def test_a_report_that_takes_too_long_leaves_the_run_passed_and_says_how_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(observers, "REPORT_SECONDS", 0.01)
    writer_of(tmp_path).finished(0)
    said = capfd.readouterr().err
    assert "no report" in said and f"launch/report.py {tmp_path}" in said


def test_a_machine_that_starts_no_process_leaves_the_run_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "run", refuse)
    writer_of(tmp_path).finished(0)
    assert "Cannot allocate memory" in capfd.readouterr().err


@pytest.mark.parametrize(("rank", "code"), [(0, 1), (1, 0)])
def test_a_run_that_failed_and_other_ranks_write_none(
    rank: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a report was started"))
    writer_of(tmp_path, rank).finished(code)
