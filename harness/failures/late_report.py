"""The reports of a run that failed: written once its ranks are gone, by a process of its own, since a report may fail too."""

import subprocess
import sys
from pathlib import Path

SECONDS = 5.0
"""How long they may take: seconds on a busy machine, at 64 ranks too; all of a run must be gone within 15."""
_ROOT = Path(__file__).resolve().parents[2]


def report_failed_run(folder: Path, seconds: float = SECONDS) -> list[str]:
    """For the watchdog of the first host, after its verdict: report.md and report.html of the run directory. What went
    wrong with them: one line, or none. Raises nothing, and leaves no process."""
    command = [sys.executable, str(_ROOT / "launch" / "report.py"), str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [f"no report: {type(error).__name__}; python launch/report.py {folder} makes one"]
    if done.returncode == 0:
        return []
    return done.stderr.strip().splitlines()[-1:] or [f"no report: launch/report.py ended with {done.returncode}"]
