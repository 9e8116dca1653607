"""The end of all that a run has on this host: ranks, what they started, torchrun where it stays, and files in /dev/shm."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.rollout import scratch
from harness.runtime.errors import say
from harness.runtime.processes import end_processes, is_alive
from harness.tools.watchdog.late_report import SECONDS as REPORT_SECONDS
from harness.tools.watchdog.late_report import report_failed_run
from harness.tools.watchdog.launcher import Launcher, Wait
from harness.tools.watchdog.processes import Descendants
from harness.tools.watchdog.shared_memory import SharedMemory
from harness.tools.watchdog.verdict import Verdict

LEAVE_SECONDS = 2.0
"""From the order to leave to SIGKILL."""
WRITE_SECONDS = 1.0
"""How long a terminal, or a pipe that is full, may keep the verdict: it waits for a reader that may never come."""
KEEP_SECONDS = 3.0
"""The same of the run's folder, once all is ended: a mount may be dead."""


@dataclass(slots=True)
class Ending:
    """What must go; it waits for no screen and no folder."""

    name: str
    """Of the watchdog, which all that a rank starts has in its environment."""
    host: str
    launcher: Launcher
    wait: Wait
    descendants: Descendants = field(default_factory=Descendants)
    shared: SharedMemory = field(default_factory=SharedMemory)
    _folder_answers: bool = True
    _screen: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "screen"))
    _folder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "folder"))

    def say(self, text: str, screen: int = 2) -> Future[None]:
        """Write to this descriptor, on a thread."""
        return self._screen.submit(say, text, screen)

    def end_all(self, ranks: Iterable[psutil.Process], all_gone: Callable[[], bool]) -> None:
        """Give ranks the time to leave, and end what is left."""
        ranks = list(ranks)
        self.look([each.pid for each in ranks if is_alive(each)])
        self.wait(all_gone, LEAVE_SECONDS)
        self.look([each.pid for each in ranks if is_alive(each)])
        self.descendants.look_for_orphans(self.name)
        stubborn = {each.pid: each for each in ranks if is_alive(each)}
        end_processes(stubborn | self.descendants.known, patience_seconds=0)
        self.remove_files()
        self.launcher.end(self.host, self.say, self.wait)

    def remove_files(self) -> None:
        """Once all are ended: what they left in /dev/shm and in their folders for temporary files."""
        self.shared.remove()
        scratch.remove(self.name)

    def look(self, ranks: Iterable[int]) -> None:
        """Note what these ranks (pids) started, and the memory that all of them map."""
        ranks = list(ranks)
        self.descendants.look(ranks)
        self.look_at_memory(ranks)

    def look_at_memory(self, ranks: Iterable[int]) -> None:
        """The latter alone."""
        self.shared.look([*ranks, *self.descendants.known])

    def end_and_tell(
        self, verdict: Verdict, screen: int, ranks: Iterable[psutil.Process], all_gone: Callable[[], bool]
    ) -> None:
        """Say the verdict, end all, and say it again on screen, torchrun's, where anything was written in between; keep it.

        Nothing that blocks, the folder or the screen, keeps anything alive.
        """
        ranks = list(ranks)
        torchrun_speaks = self.launcher.is_torchrun and self.launcher.lives()
        quiet = not any(map(is_alive, [*ranks, *self.descendants.known.values()]))
        in_time(self._folder.submit(verdict.look_at_folder), WRITE_SECONDS)
        in_time(self.say(verdict.text()), WRITE_SECONDS)
        written = self.launcher.bytes_written()
        kept = self._folder.submit(verdict.keep)
        self.end_all(ranks, all_gone)
        if torchrun_speaks and not (quiet and self.launcher.wrote_nothing_since(written)):
            in_time(self.say(verdict.text(), screen), WRITE_SECONDS)
        self._folder_answers = in_time(kept, KEEP_SECONDS)
        if not self._folder_answers:
            self.say(f"warning: the run directory does not answer: {verdict.folder}\n")
        in_time(self.say(""), WRITE_SECONDS)  # after all that was said before

    def report(self, folder: Path) -> None:
        """Write the reports of a run that failed, where its folder answers."""
        if self._folder_answers:
            in_time(self._folder.submit(report_failed_run, folder), REPORT_SECONDS + KEEP_SECONDS)


def in_time(work: Future[Any], seconds: float) -> bool:
    """Whether it was done within this time."""
    with suppress(NotInTimeError):
        work.result(seconds)
        return True
    return False
