"""The report as an observer of a run: report.md and report.html once the job has passed."""

import os
import subprocess
import sys
from pathlib import Path

from harness.runtime.observer import Observer, RunContext

SECONDS = 60.0  # how long a report may take; the run has passed by then


class ReportWriter(Observer):
    """Have the reports of a run that passed written, by rank 0. Those of a run that failed are the watchdog's."""

    folder: Path | None = None

    def met(self, run: RunContext) -> None:
        if run.world.rank == 0:
            self.folder, self.say = run.folder, run.events.say

    def passed(self) -> None:
        if self.folder:
            self.say(f"report: {self.folder}/report.html")

    def finished(self, code: int) -> None:
        """Write the reports in a process of their own: whatever happens in it, the run has passed."""
        if self.folder and code == 0:
            path = os.pathsep.join([str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "harness.tools.report.write_reports", str(self.folder)]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, timeout=SECONDS, check=False)
