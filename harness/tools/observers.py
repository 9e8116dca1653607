"""The observers of every run that the launch scripts start, in the order in which a run calls them."""

import os

from harness.config.schema import Config
from harness.runtime.observer import Observer
from harness.tools.hosts.phase_gate import PHASE_SOCKET, EmulatedHost
from harness.tools.report.report_writer import ReportWriter
from harness.tools.watchdog.client import WatchdogObserver


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
