"""What a log shows of a run that went on: steps that went well, and a good end."""

import re
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from harness.tools.diagnose.stamps import is_after
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
