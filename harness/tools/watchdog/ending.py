"""The end of everything that a run has on this host: ranks, what they started, torchrun if it stays, temporary files.

Processes end first; telling comes second. A screen or a run directory that blocks (a full pipe, a dead mount) delays
the end by seconds at most, because whatever may block runs on a thread that is left behind.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.runtime import scratch
from harness.runtime.background import in_background
from harness.runtime.errors import STANDARD_ERROR, say
from harness.runtime.files import replace_file
from harness.runtime.processes import SharedFiles, end_processes, is_alive
from harness.tools.watchdog.channel import WatchdogSettings
from harness.tools.watchdog.host_processes import Descendants
from harness.tools.watchdog.verdict import RunVerdict

LEAVE_SECONDS = 2.0  # from the order to exit to SIGKILL
WRITE_SECONDS = 1.0  # how long a screen may block
KEEP_SECONDS = 3.0  # how long the run directory may block
REPORT_SECONDS = 5.0  # reports take seconds on a busy machine; everything must be gone within 15
TORCHRUN_SECONDS = (
    8.0  # torchrun may stay so long after its ranks; if its store was on a lost host, it stays for minutes
)
TERMINATE_SECONDS = 1.0  # from SIGTERM to SIGKILL
NO_REPORT = "no-report.txt"
ROOT = Path(__file__).resolve().parents[3]

Wait = Callable[[Callable[[], bool], float], None]
"""Return once the condition holds, or after so many seconds."""


def in_time(work: Callable[[], Any], seconds: float) -> bool:
    """Do the work on a thread, and return whether it was done within this time."""
    with suppress(NotInTimeError):
        in_background(work, "in time").result(seconds)
        return True
    return False


@dataclass(slots=True)
class HostCleanup:
    """What must be ended on this host, and how."""

    settings: WatchdogSettings
    launcher: psutil.Process
    wait: Wait
    descendants: Descendants = field(default_factory=Descendants)
    shared: SharedFiles = field(default_factory=SharedFiles)
    _folder_answers: bool = True

    def say(self, text: str, screen: int = STANDARD_ERROR) -> None:
        """Write to this descriptor, which may block for WRITE_SECONDS."""
        in_time(lambda: say(text, screen), WRITE_SECONDS)

    def end_and_report(
        self, verdict: RunVerdict, screen: int, ranks: Sequence[psutil.Process], all_gone: Callable[[], bool]
    ) -> None:
        """Print the verdict, end everything, and print it again on torchrun's screen, below torchrun's report.

        Twice, because Slurm and Kubernetes end this process together with torchrun: then only the first one is seen.
        """
        torchrun_reports = self.settings.is_torchrun and is_alive(self.launcher)
        self.say(verdict.text())
        self._end_all(ranks, all_gone)
        if torchrun_reports:
            self.say(verdict.text(), screen)
        self._folder_answers = in_time(verdict.keep, KEEP_SECONDS)
        if not self._folder_answers:
            self.say(f"warning: the run directory does not answer: {verdict.folder}\n")

    def _end_all(self, ranks: Sequence[psutil.Process], all_gone: Callable[[], bool]) -> None:
        """Give ranks the time to exit, and end what is left."""

        def alive() -> dict[int, psutil.Process]:
            left = {each.pid: each for each in ranks if is_alive(each)}
            self.descendants.look(left)
            self.shared.look([*left, *self.descendants.known])
            return left

        alive()
        self.wait(all_gone, LEAVE_SECONDS)
        stubborn = alive()
        self.descendants.look_for_orphans(self.settings.name)
        end_processes(stubborn | self.descendants.known)
        self.remove_files()
        if self.settings.is_torchrun:
            self._end_torchrun()

    def _end_torchrun(self) -> None:
        """Give torchrun the time to report and exit; end it if it stays."""
        self.wait(lambda: not is_alive(self.launcher), TORCHRUN_SECONDS)
        if is_alive(self.launcher) and not any(map(is_alive, self.launcher.children())):
            host, pid = self.settings.host, self.launcher.pid
            self.say(
                f"torchrun on {host} (pid {pid}) is still there {TORCHRUN_SECONDS:g} s after its ranks: ending it\n"
            )
            with suppress(psutil.NoSuchProcess):
                self.launcher.terminate()  # it removes its temporary files then
            self.wait(lambda: not is_alive(self.launcher), TERMINATE_SECONDS)
            end_processes({pid: self.launcher})

    def remove_files(self) -> None:
        """Remove what the processes left in /dev/shm and in their temporary folders, once all have ended."""
        self.shared.remove()
        scratch.remove_run_folders(self.settings.name)

    def write_reports(self, folder: Path) -> None:
        """Write the reports of a run that failed, if its run directory answers."""
        if self._folder_answers:
            in_time(lambda: report_failed_run(folder), REPORT_SECONDS + KEEP_SECONDS)


def report_failed_run(folder: Path, seconds: float = REPORT_SECONDS) -> None:
    """Write report.md and report.html of a run directory that has a config.

    In a process, because a report can fail too. An error goes to no-report.txt: the verdict must stay last on the
    screen.
    """
    if not (folder / "config.toml").is_file():
        return
    command = [sys.executable, str(ROOT / "launch" / "report.py"), str(folder)]
    # Not a rank: with this variable it would print an error again below torchrun's report.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, env=environment, timeout=seconds, **pipes)
        problem = (done.stderr or f"launch/report.py ended with {done.returncode}\n") if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}\n"
    if problem:
        with suppress(OSError):  # a full disk
            replace_file(folder / NO_REPORT, f"{problem}`python launch/report.py {folder}` writes the reports.\n")
