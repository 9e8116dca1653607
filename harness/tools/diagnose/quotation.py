"""What verl prints of prompts and answers: a model may quote any failure."""

import re

from harness.runtime.tracebacks import LogLine

QUOTED_LINES = 500
"""A quotation that has not ended after so many lines was cut off in the log."""
_KEYS_OF_QUOTATION = ("response", "ground_truth")  # after "[prompt]"
_KEY_OF_REWARD = re.compile(r"\[([a-z_]{3,20})\](?: |$)")


class Quotation:
    """What a model was asked and what it answered, which verl prints in several lines: its tracebacks are not the run's."""

    def __init__(self) -> None:
        self._began: dict[str, int] = {}  # process -> number of the line with which its quotation begins

    @property
    def is_open(self) -> bool:
        """Whether a line without the word "prompt" may be quoted."""
        return bool(self._began)

    def has(self, line: LogLine) -> bool:
        """Return whether the line is quoted. The next line with another key, as "[score]", ends a quotation."""
        began, key = self._began.pop(line.process, -QUOTED_LINES), _KEY_OF_REWARD.match(line.text)
        if key and key[1] == "prompt":
            began = line.number
        elif (key and key[1] not in _KEYS_OF_QUOTATION) or line.number - began >= QUOTED_LINES:
            return False
        self._began[line.process] = began
        return True
