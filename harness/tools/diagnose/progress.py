"""When the lines of logs were written, and what shows that a run went on: steps that went well, and a good end."""

import re
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from datetime import datetime

from harness.tools.diagnose.tracebacks import LogLine

STEPS_AFTER = 2
"""So many steps after a failure show that the run survived it."""
LONGEST_STEP = 1000
"""Characters of a line in which the number of a step is looked for."""
_STEP = re.compile(
    r"(?:^|[^\w=./-])(?:(?:global|training|train)[_ ])?(?:step|iteration|iter|rollout)['\"]?(?: ?[:=#] ?| )(\d{1,9})\b(?=.{0,300}?[:= ]-?\d)",
    re.IGNORECASE,
)
"""What a trainer prints after a step: its number and metrics."""
_SUCCESS = re.compile(
    r"^PASSED: \d|^Job '[\w-]+' succeeded\b|\b(?:Process finished|command terminated|(?:script|job|run|training) (?:exited|finished|ended)) with"
    r" (?:exit )?(?:code|status) 0\b|^(?:final )?exit[ _](?:code|status)\W{1,3}0\s*$",
    re.IGNORECASE,
)
"""What says that a whole run, and not one process of it, ended well."""
_WORDS_OF_SUCCESS = frozenset(b"passed succeeded exit exit_code exit_status exited finished ended terminated".split())
WORDS_OF_PROGRESS = _WORDS_OF_SUCCESS | frozenset(
    b"step global_step training_step train_step iteration iter rollout".split()
)
_NUMBER_OF_STEP = re.compile(rb"(?i:step|iteration|iter|rollout)['\"]?(?: ?[:=#] ?| )(\d{1,9})\b")


_STAMP = re.compile(r"(\d{4}[-/]\d\d[-/]\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?(Z\b|[-+][01]\d:?\d\d\b)?")


def is_after(line: LogLine, other: LogLine) -> bool:
    """Return whether a line was written after the other; of lines of two files, whether their clocks show it."""
    if line.file == other.file:
        return line.number > other.number
    stamp, others = seconds_of(line), seconds_of(other)
    return stamp is not None and others is not None and has_zone(line) == has_zone(other) and stamp > others


def has_zone(line: LogLine) -> bool:
    """Return whether the time of the line's stamp is given with its time zone."""
    stamp = _STAMP.search(line.whole[:200])
    return bool(stamp and stamp[4])


def seconds_of(line: LogLine) -> float | None:
    """Return the time of the line's stamp in UNIX seconds, if that has a date; without a zone it is in this host's."""
    stamp = _STAMP.search(line.whole[:200])
    if stamp is None:
        return None
    day, clock, fraction, zone = stamp.groups()
    try:
        whole = datetime.fromisoformat(f"{day.replace('/', '-')}T{clock}{zone or ''}")
        return whole.timestamp() + float(f"0.{fraction or 0}")
    except ValueError:  # a stamp of a day that there is not
        return None


@dataclass(slots=True)
class Progress:
    """The end of what a log shows of steps that went well."""

    most: int = -1
    """The largest number of a step."""
    steps: deque[LogLine] = field(default_factory=lambda: deque(maxlen=STEPS_AFTER))
    """The last lines whose step number was the largest so far."""
    success: LogLine | None = None
    """The last line that says that the run ended well."""

    def may_read(self, raw: bytes, words: Set[bytes]) -> bool:
        """Return quickly whether a line of these words, in lower case, may have a larger number or the end of a run."""
        if not _WORDS_OF_SUCCESS.isdisjoint(words):
            return True
        return any(int(number) > self.most for number in _NUMBER_OF_STEP.findall(raw[:LONGEST_STEP]))

    def read(self, line: LogLine, fails: Callable[[LogLine], bool]) -> None:
        """Look at one line. fails: tells whether a line looks like a failure."""
        if _SUCCESS.search(line.text):
            self.success = line
        elif (step := _STEP.search(line.text)) and int(step[1]) > self.most and not fails(line):
            self.most = int(step[1])
            self.steps.append(line)

    def after(self, line: LogLine) -> LogLine | None:
        """Return the line that shows that the run went on after this one; None if nothing does.

        One step proves nothing: other ranks may still have printed the one in which the first rank failed.
        """
        if self.success and is_after(self.success, line):
            return self.success
        return self.steps[-1] if len(self.steps) == STEPS_AFTER and is_after(self.steps[0], line) else None
