"""MODULE:FUNCTION on a command line: a user's own function that yields (name, tensor), imported from the current folder."""

import importlib
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

FUNCTION = re.compile(r"(\w[\w.]*):([A-Za-z_][\w.]*)")


@contextmanager
def yielded_by(source: str) -> Iterator[Any]:
    """Call the function that MODULE:FUNCTION names, and give what it returns to the block.

    The current folder can be imported from until the block ends, as a generator imports while it runs. Whatever the
    user's code raises passes through.
    """
    module, _, path = source.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        yield found()
    finally:
        with suppress(ValueError):  # the module may have changed the path itself
            sys.path.remove("")


def words_of(error: BaseException) -> str:
    """Return what the user's code raised, and the line that did."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())  # an error of ours is one line
    return f"{type(error).__name__}: {said} ({last.filename}:{last.lineno})"
