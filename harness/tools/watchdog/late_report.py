"""The reports of a run that failed: written once its ranks are gone, by a process of its own, since a report may fail too."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SECONDS = 5.0
"""How long they may take: seconds on a busy machine, at 64 ranks too; all of a run must be gone within 15."""
NO_REPORT = "no-report.txt"
_ROOT = Path(__file__).resolve().parents[3]


def will_have_report(folder: Path) -> bool:
    """Whether there is enough of a run for one: it may have failed before it wrote its config."""
    return (folder / "config.toml").is_file()


def report_failed_run(folder: Path, seconds: float = SECONDS) -> None:
    """For the watchdog of the first host, after its verdict: report.md and report.html of the run directory. What goes
    wrong with them is said in its no-report.txt, since the verdict stays the last on the screen.

    Nothing where will_have_report says no. Raises nothing, and leaves no process.
    """
    if not will_have_report(folder):
        return
    command = [sys.executable, str(_ROOT / "launch" / "report.py"), str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL
        )
        ended = f"launch/report.py ended with {done.returncode}\n"
        problem = (done.stderr or ended) if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}\n"
    if problem:
        with suppress(OSError):  # a disk that is full, of which the verdict was
            (folder / NO_REPORT).write_text(f"{problem}`python launch/report.py {folder}` makes the reports.\n")
