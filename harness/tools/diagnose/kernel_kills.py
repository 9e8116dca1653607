"""Read the kernel's out-of-memory lines: which processes it killed, and whether they are the run's."""

import re
from collections.abc import Sequence

from harness.tools.diagnose.entries import surroundings
from harness.tools.diagnose.tracebacks import LogLine

VICTIM = re.compile(
    r"Kill(?:ed)? process (?P<pid>\d+),? \((?P<name>[^)]{0,64})\)|reaped process (?P<reaped>\d+) \((?P<of>[^)]{0,64})\)"
    r"|oom-kill:constraint=.{0,2000}?\btask=(?P<task>.{0,64}?),pid=(?P<of_task>\d+)"
    r"|(?<!\S)(?P<asked>\S{1,64}) invoked oom-killer\b"
)
"""The kernel's sentences about a process that it killed for want of memory; "asked" is only the one that asked for
some."""
_PID = re.compile(r"\b(?:pid\W{0,3}|[Pp]rocess )(\d+)\b")


def deaths_of_others(lines: Sequence[LogLine]) -> set[LogLine]:
    """Return those of the lines in which the kernel speaks of another program's death.

    A process may be the run's by its name, or because a line that is not the kernel's names its pid.
    """
    victims = {line: found for line in lines if (found := VICTIM.search(line.text))}
    of_run = {pid for line in lines if line not in victims for pid in _PID.findall(line.whole)}
    with_victims = {line.file for line, found in victims.items() if not found["asked"]}
    return {
        line
        for line, found in victims.items()
        if (found["asked"] and line.file in with_victims) or not _may_be_of_run(found, of_run)
    }


def _may_be_of_run(found: re.Match[str], of_run: set[str]) -> bool:
    name = found["name"] or found["of"] or found["task"] or found["asked"] or ""
    pid = found["pid"] or found["reaped"] or found["of_task"]
    return not name or pid in of_run or any(each.regex.search(name) for each in surroundings().programs)
