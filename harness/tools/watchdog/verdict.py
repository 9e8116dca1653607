"""The watchdog's word on a run that failed, on the screen and in the run's folder."""

import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from harness.tools.watchdog.explain import Explanation
from harness.tools.watchdog.failure import Failure, first
from harness.tools.watchdog.late_report import will_have_report
from harness.tools.watchdog.stacks import Asked, Stack, gpu_memory, look, said
from harness.tools.watchdog.stuck import said_still, still
from harness.tools.watchdog.telling import View, tell

STANDARD_ERROR = 2


@dataclass(slots=True)
class Verdict:
    """Of one host."""

    host: str
    folder: Path | None
    """The run's; None before the ranks have met."""
    failures: list[Failure]
    view: View
    explanation: Explanation = field(init=False)
    stacks: dict[str, Stack] = field(default_factory=dict)
    gpus: str = ""
    engine: list[str] = field(default_factory=list)
    """What is to be said of the engine's processes."""
    report_follows: bool = False
    """Known once look_at_folder has been called."""
    _collected: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.explanation = Explanation(self.cause, self.folder)

    @property
    def cause(self) -> Failure:
        """The first failure."""
        return first(self.failures)

    def collect(self, asked: Sequence[Asked], descendants: Mapping[int, psutil.Process]) -> None:
        """Begin to take the stacks of ranks and of what they started, and look at the GPUs."""

        def work() -> None:
            idle = still(descendants)
            found = look([*asked, *_named(descendants)])
            self.gpus = gpu_memory()
            self.engine = said_still(idle, descendants, found)
            self.stacks = {stack.name: stack for stack in found}
            self._collected.set()

        threading.Thread(target=work, name="stacks", daemon=True).start()

    @property
    def has_collected(self) -> bool:
        """Whether that is done."""
        return self._collected.is_set()

    def look_at_folder(self) -> None:
        """See whether the run's folder has enough for a report; may block as long as the folder does."""
        self.report_follows = self.folder is not None and will_have_report(self.folder)

    def text(self) -> str:
        """All that is known now, for the screen."""
        return "\n".join([*self.lines(), f"  so says the watchdog of {self.host}, and ends what is left there"]) + "\n"

    def lines(self) -> list[str]:
        """What is said."""
        ranks = {int(name[4:]): stack for name, stack in self.stacks.items() if re.fullmatch(r"rank\d+", name)}
        waiting = {rank: stack.waits for rank, stack in ranks.items() if stack.frames}
        explanation = said(ranks)
        if self.stacks and self.folder:
            explanation.append(f"all stacks: {self.folder}/stacks-{self.host}-*.txt")
        explanation += [*self.engine, *self.explanation.lines]
        lines = tell(self.failures, replace(self.view, waiting=waiting), explanation)
        if self.folder:
            soon = ", with report.md in a moment" if self.report_follows else ""
            lines.append(f"  run directory{soon}: {self.folder}")
        return lines

    def keep(self) -> None:
        """Write it to the run's folder; may block as long as the folder does."""
        if not self.folder:
            return
        kept = {"host": self.host, "code": self.cause.code, "said": self.lines(), "slug": self.explanation.slug}
        kept |= {"first": self.cause.as_json(), "failures": [each.as_json() for each in self.failures]}
        kept["places"] = {rank: str(place) for rank, place in self.view.places.items()}
        files = {f"stacks-{self.host}-{name}.txt": stack.text for name, stack in self.stacks.items()}
        files |= {f"gpus-{self.host}.txt": self.gpus} if self.gpus else {}
        with suppress(OSError):  # a folder that went with its host, or a full disk: it has been said
            (self.folder / f"failure-{self.host}.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
            for name, text in files.items():
                (self.folder / name).write_text(text, encoding="utf-8")


def stderr_of(pid: int) -> int:
    """A descriptor of that process's standard error, which torchrun may have turned away from its ranks' (--tee); ours where
    it is the same, or cannot be had."""
    theirs = Path(f"/proc/{pid}/fd/{STANDARD_ERROR}")
    with suppress(OSError):
        if not os.path.samestat(theirs.stat(), os.fstat(STANDARD_ERROR)):
            return os.open(theirs, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    return STANDARD_ERROR


def _named(descendants: Mapping[int, psutil.Process]) -> list[Asked]:
    asked = []
    for pid, process in descendants.items():
        with suppress(psutil.NoSuchProcess):
            name = re.sub(r"\W+", "-", process.name()).strip("-")
            asked.append(Asked(name=f"{name}-{pid}", pid=pid))
    return asked
