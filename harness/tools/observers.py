"""The observers of every run that the launch scripts start, in the order in which a run calls them."""

import os
from pathlib import Path

from harness.config.schema import Config
from harness.observer import Observer, RunContext
from harness.runtime.errors import say
from harness.tools.agreement import Agreement
from harness.tools.environment_file import EnvironmentFile
from harness.tools.hosts.phase_gate import PHASE_SOCKET, EmulatedHost
from harness.tools.picture import PlacementPicture
from harness.tools.trackers.trackers import TrackerWriter
from harness.tools.watchdog.client import WatchdogObserver
from harness.tools.watchdog.ending import write_reports

REPORT_SECONDS = 60.0  # how long the reports may take; the run has passed by then


class ReportWriter(Observer):
    """Has rank 0 write the reports of a run that passed. The watchdog writes those of a run that failed."""

    folder: Path | None = None

    def met(self, run: RunContext) -> None:
        if run.world.rank == 0:
            self.folder, self.say = run.folder, run.events.say

    def passed(self) -> None:
        if self.folder:
            self.say(f"report: {self.folder}/report.html")

    def finished(self, code: int) -> None:
        """Write the reports in another process: whatever happens there, the run has passed."""
        if self.folder and code == 0 and (problem := write_reports(self.folder, REPORT_SECONDS)):
            say(f"no report: {problem}")


def standard_observers(config: Config) -> list[Observer]:
    """Return the observers that write and show, the watchdog, and those for injected faults and emulated hosts, if any.

    Their order matters at the start of a phase. LateRank comes before the watchdog, which must not know of the phase
    yet. Other faults come after it, so that a rank that is about to be killed has reported its phase.
    """
    watchdog = WatchdogObserver()
    path = os.environ.get(PHASE_SOCKET)
    emulated = [EmulatedHost(path, watchdog.flush)] if path else []
    trackers = [TrackerWriter(config.trackers.names)] if config.trackers.names else []
    writers = [PlacementPicture(), EnvironmentFile(), ReportWriter(), *trackers]
    if not config.run.inject:
        return [*writers, watchdog, *emulated, Agreement()]
    from harness.tools.inject import Injector, LateRank

    injector = Injector(watchdog.flush)
    return [*writers, LateRank(injector), watchdog, *emulated, injector, Agreement()]
