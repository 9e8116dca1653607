"""How a command of launch/ ends as a process."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

READER_GONE = 141
"""What a shell says of a program that SIGPIPE ended, such as `yes` in `yes | head`."""


def exit_with(main: Callable[..., int], *arguments: object) -> NoReturn:
    """Call it, and end this process with what it returns; without a traceback where nobody reads on, as in `... | head`."""
    try:
        try:
            code: int | str | None = main(*arguments)
        except SystemExit as end:  # of argparse's --help
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more as it ends
        code = READER_GONE
    sys.exit(code)
