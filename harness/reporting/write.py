"""Write report.md and report.html of a run directory, from its files alone."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from harness.export.subject import read_subject
from harness.reporting.issue import issue, known_failure, own_sections
from harness.reporting.page import page, read_metrics

SECONDS = 10.0
"""How long the watchdog lets a report of a failed run take."""
_ROOT = Path(__file__).resolve().parents[2]


def write_reports(folder: Path) -> tuple[Path, Path]:
    """The paths of both. Raises ConfigError where the folder is no run directory, OSError where it cannot be written."""
    subject = read_subject([str(folder)])
    finding = known_failure(subject)
    written = folder / "report.md", folder / "report.html"
    texts = issue(subject, finding, own_sections(written[0])), page(subject, finding, read_metrics(folder))
    for file, text in zip(written, texts, strict=True):
        part = file.with_name(f".{file.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    return written


def report_failed_run(folder: Path, seconds: float = SECONDS) -> str:
    """For a watchdog, once it has told the verdict: both reports, written by a process that is killed when it takes too
    long. One sentence on what came of it; raises nothing."""
    command = [sys.executable, str(_ROOT / "launch" / "report.py"), str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"no report: {type(error).__name__}; python launch/report.py {folder} makes one"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return said[-1] if said else f"no report: launch/report.py ended with {done.returncode}"


def write_reports_of_passed_run(folder: Path) -> None:
    """For rank 0 of a run that passed: a report must not fail it."""
    with suppress(OSError):
        write_reports(folder)
