"""The observers of every run that the launch scripts start, in the order in which a run calls them."""

import os
import subprocess
import sys
from pathlib import Path

from harness.config.schema import Config
from harness.runtime.observer import Observer, RunContext
from harness.tools.hosts.phase_gate import PHASE_SOCKET, EmulatedHost
from harness.tools.watchdog.client import WatchdogObserver

REPORT_SECONDS = 60.0  # how long the reports may take; the run has passed by then


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
            path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "harness.tools.report.write_reports", str(self.folder)]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, timeout=REPORT_SECONDS, check=False)


def standard_observers(config: Config) -> list[Observer]:
    """Return the reports, the watchdog, and what was asked for: faults of emulated hosts, and injected faults.

    A late rank comes before the watchdog, which must not know yet of the phase; the others after it, so that a rank that is
    about to be killed has reported its phase.
    """
    watchdog = WatchdogObserver()
    path = os.environ.get(PHASE_SOCKET)
    emulated = [EmulatedHost(path, watchdog.flush)] if path else []
    if not config.run.inject:
        return [ReportWriter(), watchdog, *emulated]
    from harness.tools.inject import Injector, LateRank

    injector = Injector(watchdog.injected)
    return [ReportWriter(), LateRank(injector), watchdog, *emulated, injector]
