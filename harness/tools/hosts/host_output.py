"""torchrun's report in its output: its own exit code is 1, whatever the rank's was."""

import re

_ROOT_CAUSE = "Root Cause (first observed failure)"
_EXIT_CODE = re.compile(r"\s*exitcode\s*:\s*(-?\d+)\b")


class RootCause:
    """The exit code of the rank that failed first, negative for a signal; None until its line was read."""

    code: int | None = None
    _follows = False

    def read(self, line: str) -> None:
        """Take one line of torchrun's output."""
        if _ROOT_CAUSE in line:
            self._follows = True
        elif self._follows and (match := _EXIT_CODE.match(line)):
            self.code, self._follows = int(match[1]), False
