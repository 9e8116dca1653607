"""The report as an observer of a run: report.md and report.html once the job has passed."""

from contextlib import suppress
from typing import Any

from harness.runtime.observer import Observer, RunContext
from harness.runtime.run_record import RunRecord
from harness.tools.report.run_report import PassedRun
from harness.tools.report.write import write_reports


class ReportWriter(Observer):
    """Write the reports of a run that passed, on rank 0. Those of a run that failed are the watchdog's."""

    def __init__(self) -> None:
        self.run: RunContext | None = None
        self.record: RunRecord | None = None

    def met(self, run: RunContext) -> None:
        self.run = run

    def built(self, name: str, part: Any) -> None:
        if name == "record":
            self.record = part

    def passed(self) -> None:
        """Write report.md from the record, where the job has one, and both reports from the run's files."""
        if self.run is None or self.run.world.rank:
            return
        if self.record:
            text = PassedRun(self.run, self.record).markdown()
            (self.run.folder / "report.md").write_text(text, encoding="utf-8")
        with suppress(OSError, ValueError):  # a report must not fail a run that passed
            _, page = write_reports(self.run.folder)
            self.run.events.say(f"report: {page}")
