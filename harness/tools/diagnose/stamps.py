"""The times that stand in the lines of logs."""

import re
from datetime import datetime

from harness.tools.diagnose.tracebacks import LogLine

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
