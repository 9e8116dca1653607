"""Lines that look like a failure, whatever it is: exceptions, crashes, complaints of a logger."""

import re
from collections.abc import Set
from dataclasses import dataclass, field

from harness.failures.log_lines import Line
from harness.failures.patterns import Pattern

PARTS = (b"Error", b"Exception", b"[E")
WORDS = frozenset(
    b"traceback error fatal failed killed oom segmentation terminate dumped panic panicked sigkill sigsegv sigabrt sigbus"
    b" signal crit alert emerg critical assert exited exception failure".split()
)
"""Each such line has one of the words (in any case), or one of the parts."""
TRACEBACK_LINES = 400
"""After "Traceback" every line is read until its exception is found, but no more than these."""
KEPT = 50

_EXCEPTION = re.compile(
    r"(?:[a-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Failure|Expired|Interrupt|Refused|Failed|Arrive|Died)|SystemExit)\b(?:\(|:|$)"
)
_LAST_OF_TRACEBACK = re.compile(r"[A-Za-z_][\w.]*(?::\s|$)")
_CRASH = re.compile(
    r"Fatal Python error|Segmentation fault|terminate called|core dumped|^Killed$|Out of memory: Killed|oom-?kill"
    r"|CUDA error:|\bpanic: |panicked at|\bSIG(?:KILL|SEGV|ABRT|BUS)\b|signal 9\b|INTERNAL ASSERT FAILED|FIRST FAILURE:"
)
_COMPLAINT = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|FAILED)\b|\[(?:error|crit|alert|emerg|fatal)\]|(?:^|\s)[Ee]rror:|\bfatal: |exited with code [1-9]"
    r"|\b[A-Z]\w*(?:Error|Exception): "
)
_TORCH_ERROR = re.compile(r"\[E\d{3,4} \d\d:\d\d:\d\d")
_WITHIN = ("", " ", "\t", "|", "+", "^")
"""With what a line of a traceback begins that is not its last."""
_TRACEBACK = "Traceback (most recent call last)"
_IGNORED = "Exception ignored in"

_Suspect = tuple[Line, frozenset[Pattern]]


@dataclass(slots=True)
class Suspicion:
    """Of one file."""

    _exceptions: list[_Suspect] = field(default_factory=list)
    _complaints: list[_Suspect] = field(default_factory=list)
    _open: dict[str, Line] = field(default_factory=dict)
    """Processes in a traceback -> line at which it began."""
    _cut: list[Line] = field(default_factory=list)
    """Tracebacks whose exception never came."""
    _ignored: set[str] = field(default_factory=set)
    """Processes whose next exception Python ignored."""

    def awaits(self, number: int) -> bool:
        """Whether the line of this number may be the last of a traceback."""
        for source, began in list(self._open.items()):
            if number - began.number >= TRACEBACK_LINES:
                self._cut.append(self._open.pop(source))
        return bool(self._open)

    def look(self, line: Line, matched: frozenset[Pattern]) -> None:
        """Keep it if it looks like a failure; `matched` are the patterns that know it."""
        if _TRACEBACK in line.text:
            self._open[line.source] = line
        elif _IGNORED in line.text:
            self._ignored.add(line.source)
        elif self._is_exception(line):
            if line.source in self._ignored:
                self._ignored.remove(line.source)
            else:
                _keep(self._exceptions, line, matched)
        elif _CRASH.search(line.text):
            _keep(self._exceptions, line, matched)
        elif _COMPLAINT.search(line.text) or _TORCH_ERROR.search(line.whole):
            _keep(self._complaints, line, matched)

    def first_exception(self, explained: Set[Pattern]) -> Line | None:
        """The first exception or crash that none of these patterns knows."""
        return next((line for line, matched in self._exceptions if not matched & explained), None)

    def first_complaint(self, explained: Set[Pattern]) -> Line | None:
        """The first complaint of which that is true, or traceback without an end."""
        complaint = next((line for line, matched in self._complaints if not matched & explained), None)
        lines = [*self._cut, *self._open.values(), *([complaint] if complaint else [])]
        return min(lines, key=lambda line: line.number, default=None)

    def _is_exception(self, line: Line) -> bool:
        source = line.source if line.source in self._open else next(iter(self._open), None)
        if source is not None and (source == line.source or not line.source) and line.text[:1] not in _WITHIN:
            del self._open[source]
            return bool(_EXCEPTION.match(line.text) or _LAST_OF_TRACEBACK.match(line.text))
        return bool(_EXCEPTION.match(line.text))


def _keep(suspects: list[_Suspect], line: Line, matched: frozenset[Pattern]) -> None:
    if (matched and len(suspects) < KEPT) or (not matched and all(known for _, known in suspects)):
        suspects.append((line, matched))
