"""The first failure that a run's log shows, and whether two failures have the same cause, judged by words and
places.
"""

import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.log_lines import lines_of, log_files
from harness.tools.diagnose.tracebacks import Frame, exception_name, tracebacks_in
from harness.tools.trial.environment import module_of

_LONGEST = 240
_NEAR_LINES = 5
"""A line so close to a traceback belongs to it, as does the name that torchrun or a logger gives to its exception."""
_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/(.+)")
_VARIABLE = re.compile(
    r"(?:[A-Za-z]:)?(?:[\w.~-]*/)+[\w.~+-]*"  # a path
    r"|0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b"
    r"|\btmp\w{6,}\b"
    r"|[\w.-]*\d[\w.-]*"  # a number, and whatever is spelled with one
)
_WORD = re.compile(r"[A-Za-z_][\w.]*|#")
_NAMED = ("ImportError", "ModuleNotFoundError", "AttributeError", "NameError")
"""Exceptions whose message names something, so that its digits count: a missing fp4 is not a missing fp8."""
_COMMON_FUNCTIONS = ("<module>", "__init__", "__call__", "forward", "main", "run", "wrapper", "_wrapper", "<lambda>")
_SPECIFIC_WORDS = 3
"""A message of so many words is unlikely to come from two functions of the same name by chance."""


@dataclass(frozen=True, kw_only=True)
class LogFailure:
    """How a run failed, by the first failure that its log shows."""

    kind: str = ""
    """The class of the exception, or how the run ended if there was none: "hang", or an exit code."""
    text: str = ""
    """The line that names the exception, else one that looks like a failure, else the last line."""
    slug: str = ""
    """Its name in the catalogue of launch/diagnose.py, if it is known there."""
    place: str = ""
    """FILE:FUNCTION of the deepest frame in the moved package, else of the deepest one; "" without a traceback."""
    source: str = ""
    """The line of code there."""
    line: int = 0
    """Number of the line in the run's log; 0 if it is in another file."""

    @property
    def words(self) -> tuple[str, ...]:
        """The words of its message; what varies from run to run is #."""
        message = self.text.partition(self.kind)[2] if exception_name(self.text) else self.text
        if self.kind not in _NAMED:
            message = _VARIABLE.sub("#", message)
        return tuple(word.rstrip(".") for word in _WORD.findall(re.sub(r"['\"`]", " ", message)))


def shorten(text: str) -> str:
    """Return the text on one line of a report."""
    return " ".join(text.split())[:_LONGEST]


def find_failure(log: Path, run: Path, code: int, package: str, own: tuple[str, ...] = ()) -> LogFailure:
    """Return the failure that launch/diagnose.py names or suspects. If there is none, return the log's last line.

    A signal that ended the run explains more than its last line, so the text is then "". own: folders that are left out
    of the text.
    """
    try:
        files = log_files([str(log), str(run)])
    except ValueError:  # only jobs of launch/ leave a run directory, and not if they fail early
        files = [str(log)]
    found = diagnose(files)
    line = found.finding.line if found.finding else found.suspicious
    if line is None:
        last = deque((each.text.strip() for each in lines_of(str(log)) if each.text.strip()), maxlen=1)
        text = f'its last line is "{shorten(last[0])}"' if last and code > 0 else ""
        return LogFailure(kind=f"exit code {code}", text=text)
    near = sorted(tracebacks_in(lines_of(line.file)), key=lambda each: each.begins)
    reach = range(line.number - _NEAR_LINES, line.number + _NEAR_LINES + 1)
    trace = next((t for t in near if t.begins <= reach[-1] and (not t.ends or reach[0] <= t.ends)), None)
    text = trace.exception if trace and trace.begins <= line.number < trace.ends and trace.exception else line.text
    frame = _own_frame(trace.frames[::-1] if trace else [], module_of(package))
    for folder in own:
        text = text.replace(f"{folder}/", "")
    return LogFailure(
        kind=exception_name(text) or f"exit code {code}",
        text=shorten(text),
        slug=found.finding.entry.slug if found.finding else "",
        place=f"{relative_file(frame.file, package)}:{frame.function}" if frame else "",
        source=frame.source if frame else "",
        line=line.number if line.file == str(log) else 0,
    )


def _own_frame(frames: list[Frame], module: str) -> Frame | None:
    """Return the deepest frame in the package's own code, else the deepest one. frames: the deepest first."""
    own = (each for each in frames if f"/{module}/" in each.file or each.file.endswith(f"/{module}.py"))
    return next(own, next(iter(frames), None))


def relative_file(file: str, package: str) -> str:
    """Return the part of a file's path that is the same in every environment, from the package's folder on."""
    module, parts = module_of(package), file.split("/")
    if module in parts[:-1]:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index(module) :])
    installed = _INSTALLED.fullmatch(file)
    return installed[1] if installed else parts[-1]


# Whether two failures are one.


def same_cause(one: LogFailure, other: LogFailure) -> bool:
    """Return whether both have the same message, numbers and paths aside, from the same place.

    If a place is not known, the message decides. If there is no message, as for a bare assert, the line of code
    decides.
    """
    specific = min(len(one.words), len(other.words)) >= _SPECIFIC_WORDS
    if one.slug and one.slug == other.slug:
        same_message = True
    elif not one.words and not other.words:
        same_message = (one.kind, one.source) == (other.kind, other.source)
    else:
        same_message = one.words == other.words and (one.kind == other.kind or specific)
    return same_message and _same_place(one, other, specific)


def _same_place(one: LogFailure, other: LogFailure, specific: bool) -> bool:
    if not one.place or not other.place or one.place == other.place:
        return True
    function, there = (each.place.rpartition(":")[2] for each in (one, other))
    return function == there and specific and function not in _COMMON_FUNCTIONS  # it moved to another file


def pattern_for(wanted: LogFailure, other: LogFailure) -> str:
    """Return a value for --match that finds `wanted` and not `other`; "" if their words are the same."""
    # Split at every sign that means more to a shell or to a regular expression.
    parts = re.split(r"[^\w .,:/=-]", _VARIABLE.sub("#", wanted.text))
    own = [part.strip() for part in parts if part.strip(" .,:") not in other.text]
    return wanted.slug or max(own, key=len, default="")
