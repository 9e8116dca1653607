"""What is known of a first failure: its traceback where a scheduler had it, and the catalogue's entry that it matches."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.rollout.engine_log import ENDING_SIGNALS
from harness.rollout.processes import errors
from harness.tools.diagnose.diagnose import OF_A_RUN, Diagnosis, diagnose
from harness.tools.diagnose.diagnosis_text import in_brief
from harness.tools.diagnose.entries import catalogue
from harness.tools.watchdog.failure import Failure, shortened

SECONDS = 2.0
"""How long the verdict waits for an explanation."""
KINDS_WITH_A_TEXT = ("exception", "echo", "died", "deadline", "stopped")
READ_BYTES = 64 << 20
"""Of one engine's log, from its start: the first failure is what counts."""


@dataclass(slots=True)
class Explanation:
    """Looked for on a thread of its own, so that nothing waits for a disk that hangs."""

    failure: Failure
    folder: Path | None
    lines: list[str] = field(default_factory=list)
    slug: str | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> "Explanation":
        """Start to look."""
        threading.Thread(target=self._look, name="explanation", daemon=True).start()
        return self

    @property
    def is_there(self) -> bool:
        """Whether all is known that will be."""
        return self._done.is_set()

    def _look(self) -> None:
        lines: list[str] = []
        try:
            logs = sorted(self.folder.glob("engines/*.log")) if self.folder else []
            if "engine process" in self.failure.detail or "EngineFailed" in self.failure.detail:
                lines = self._scheduler(logs)
            found = self._diagnosis(logs)
            if found.finding:
                self.slug = found.finding.entry.slug
            lines += in_brief(found)
        except OSError as error:  # a disk that is full or gone is a way to fail
            lines.append(f"no explanation: {error}")
        finally:
            self.lines = lines
            self._done.set()

    def _scheduler(self, logs: Sequence[Path]) -> list[str]:
        """Of the logs of the engines: the traceback of the error that the failure tells of, else the first; none where the rank
        itself raised that error, whose traceback is shown."""
        trace = self.failure.trace
        if trace and trace[-1].removesuffix("...") in self.failure.detail:
            return []
        named = [log for log in logs if log.name in self.failure.detail]
        # What was ended from outside left no traceback: the one there is another's, which lost it.
        ended = any(f") died of {name}" in self.failure.detail for name in ENDING_SIGNALS)
        what = ", what followed" if ended else ""
        for log in named or logs:
            with log.open("rb") as stream:
                text = stream.read(READ_BYTES).decode(errors="replace")
            found = [each for each in errors(text) if each[0]]
            if found:
                lines, _ = next((each for each in found if each[1] in self.failure.detail), found[0])
                return [f"{log.name}{what}:", *(f"| {line}" for line in shortened("\n".join(lines)))]
        return []

    def _diagnosis(self, logs: Sequence[Path]) -> Diagnosis:
        """Of what the rank said, and of the engines' logs."""
        if self.failure.kind not in KINDS_WITH_A_TEXT:
            return Diagnosis("no failure", None, (), None)
        said = os.memfd_create("failure")  # no file: the disk may be full
        try:
            os.write(said, "\n".join([*self.failure.trace, self.failure.detail, ""]).encode())
            return diagnose([f"/proc/self/fd/{said}", *map(str, logs)], OF_A_RUN)
        finally:
            os.close(said)


def warm_up() -> None:
    """Read the catalogue aside, while it is not known yet whether there is a better cause."""

    def read() -> None:
        with suppress(OSError):  # it is read again, and told, when it is needed
            catalogue()

    threading.Thread(target=read, name="catalogue", daemon=True).start()
