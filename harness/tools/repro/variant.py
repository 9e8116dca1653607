"""What the program of a case says to whoever runs it: which variant it is, and why it cannot be one here.

Exit code 125 with a line that begins with CANNOT: it cannot run here. Exit code 0 with one that begins with ABSENT: this
version has no such thing, so that the failure cannot happen. All else is the program's own affair.
"""

import sys
from collections.abc import Callable
from typing import NoReturn, get_args

from harness.runtime.errors import CANNOT_RUN_HERE, MISTAKE
from harness.tools.repro.case import Variant

CANNOT = "cannot run here: "
ABSENT = "not present in this version: "


def main(program: Callable[[bool], None]) -> None:
    """program(broken), after sys.argv[1]."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word not in get_args(Variant):
        print(f"error: variant = {word!r} must be broken or healthy", file=sys.stderr)
        sys.exit(MISTAKE)
    program(word == "broken")


def cannot_run_here(reason: str) -> NoReturn:
    """Ends this process."""
    print(CANNOT + reason, flush=True)
    sys.exit(CANNOT_RUN_HERE)


def not_present(reason: str) -> NoReturn:
    """Ends this process."""
    print(ABSENT + reason, flush=True)
    sys.exit(0)
