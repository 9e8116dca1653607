"""UNIX time that advances evenly: setting the machine's clock during a run moves no event of it."""

import time

_AT_ZERO = time.time() - time.monotonic()
"""UNIX seconds at the zero of time.monotonic(), as this process has seen it first."""


def now() -> float:
    """Return UNIX seconds."""
    return _AT_ZERO + time.monotonic()
