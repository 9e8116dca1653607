"""Find the failures in a log, known or not: exceptions with their tracebacks, crashes, complaints of a logger."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.tools.diagnose.entries import Pattern
from harness.tools.diagnose.log_lines import LogLine

WORDS = frozenset(
    b"traceback error fatal failed killed oom segmentation terminate dumped panic panicked sigkill sigsegv sigabrt sigbus"
    b" signal crit alert emerg critical assert exited exception failure aborted bus unable invalid cannot refused warn recent".split()
)
"""Each line that looks like a failure has one of the words (in any case), or a part: see may_fail."""
TRACEBACK_LINES = 400  # that are read at most after "Traceback" until its exception is found
MESSAGE_LINES = 12  # so many lines after an exception's own may be of its message
KEPT_FAILURES = 200  # of one file that are kept from its start, and as many from its end

Kind = Literal["exception", "crash", "complaint"]

_EXCEPTION = re.compile(
    r"(?:[a-z_]\w*\.)*(?:[A-Z]\w*(?:(?:Error|Exception)(?:_\w+)?|Failure|Expired|Interrupt|Refused|Failed|Arrive|Died)|Exception|SystemExit)\b(?:\(|:|$)"
)
_LAST_OF_TRACEBACK = re.compile(r"[A-Za-z_][\w.]*(?::\s|$)")
_CRASH = re.compile(
    r"Fatal Python error|Segmentation fault|terminate called|core dumped|^Killed$|Out of memory: Killed|oom-?kill"
    r"|CUDA error:|\bpanic: |panicked at|\bSIG(?:KILL|SEGV|ABRT|BUS)\b|signal 9\b|INTERNAL ASSERT FAILED|FIRST FAILURE:"
    r"|^Aborted$|^Bus error|line \d+: +\d+ (?:Aborted|Killed|Bus error|Terminated)\b"
)
_COMPLAINT = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|FAILED)\b|\[(?:error|crit|alert|emerg|fatal)\]|(?:^|\s)[Ee]rror:|\bfatal: |exited with code [1-9]"
    r"|\b[A-Z]\w*(?:Error|Exception): |\bWatchdog caught collective operation timeout|\bException raised from throw\w*Error"
    r"|\bNCCL WARN .*(?:closed|fail|error|refused|timed? ?out)|^(?:Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\)"
)
_MAY_BE_COMPLAINT = re.compile(r"(?:^|[:\]] )(?:(?:Failed|Unable|Cannot) to |Invalid \w+[:=])")
_IS_HANDLED = re.compile(
    r"expected|fall(?:ing)? ?back|ignor|skipp|retry|instead|disabled|optional", re.IGNORECASE
)  # it continues
_TORCH_ERROR = re.compile(r"\[E\d{3,4} \d\d:\d\d:\d\d|\[E [^\]]*?\w\.(?:cpp|cc|cu|hpp|h):\d+\]")
_MILD = re.compile(r"(?<!NCCL )\b(?:WARNING|WARN|INFO|DEBUG)\b|\b[A-Z]?\w*Warning: |\[[WI]\d{3,4} \d\d:")  # no failure
_WORDS_OF_FAILURE = re.compile(
    r"error|fail|exception|fatal|assert|abort|refus|invalid|unable|cannot|can't|timed? ?out|not found|denied|exceed|no such"
    r"|died|unsafe|must|missing|not supported|disabled|unbalanced|mismatch|undefined|blocked",
    re.IGNORECASE,
)
_WITHIN = ("", " ", "\t", "|", "+", "^")  # first characters of a traceback's lines, its last excepted
_TRACEBACK = "Traceback (most recent call last)"
_IGNORED = "Exception ignored in"
_FRAME = re.compile(r'^\s*File "([^"]+)"')


def may_fail(raw: bytes, words: Sequence[bytes]) -> bool:
    """Return whether a line of these words, in lower case, may look like a failure or be of a traceback. Must be fast."""
    return not WORDS.isdisjoint(words) or b"Error" in raw or b"Exception" in raw or b"[E" in raw or b'File "' in raw


@dataclass(slots=True)
class LoggedFailure:
    """A failure that the log shows, known or not."""

    line: LogLine  # what says it: the last of a traceback
    kind: Kind
    begins: int  # number of the line at which its traceback begins
    has_header: bool = False  # whether its traceback has its first line; a quoted one may have frames only
    packages: set[str] = field(default_factory=set)  # folders in the paths of its traceback's frames
    matched: set[Pattern] = field(default_factory=set)  # patterns that match one of its lines
    own: frozenset[Pattern] = frozenset()  # patterns that match the line that says it

    @property
    def ends(self) -> int:
        """Return the number of the last line that may be of its message."""
        return self.line.number + (MESSAGE_LINES if self.kind != "complaint" else 0)

    def has(self, line: LogLine) -> bool:
        """Return whether the line is of its traceback or of its message."""
        if line.index != self.line.index or not self.begins <= line.number <= self.ends:
            return False
        if line.number <= self.line.number:
            return same_process(line, self.line)
        has_prefix, own_prefix = line.text != line.whole, self.line.text != self.line.whole
        return line.source == self.line.source and has_prefix == own_prefix


def same_process(line: LogLine, other: LogLine) -> bool:
    """Return whether their prefixes allow it; a line may lack one: SGLang's stands on a traceback's first alone."""
    return line.source.startswith(other.source) or other.source.startswith(line.source)


def is_warning(line: LogLine) -> bool:
    """Return whether its logger marks it as no failure, so that healthy runs may print it."""
    return bool(_MILD.search(line.whole))


def is_complaint(line: LogLine) -> bool:
    return bool(_WORDS_OF_FAILURE.search(line.text))


@dataclass(slots=True)
class FailureScanner:
    """Collects what looks like a failure in one file."""

    _first: list[LoggedFailure] = field(default_factory=list)
    _last: deque[LoggedFailure] = field(default_factory=lambda: deque(maxlen=KEPT_FAILURES))
    _open: dict[str, LoggedFailure] = field(default_factory=dict)  # by process: its traceback that has not ended
    _cut: list[LoggedFailure] = field(default_factory=list)  # tracebacks whose exception never came
    _ignored: set[str] = field(default_factory=set)  # processes whose next exception Python ignored
    _latest: LoggedFailure | None = None
    _message_ends: int = 0  # number of the last line that may be of an exception's message

    def awaits(self, number: int) -> bool:
        """Return whether the line of this number may be of a traceback, or of an exception's message."""
        for source, began in list(self._open.items()):
            if number - began.begins >= TRACEBACK_LINES:
                self._cut.append(self._open.pop(source))
        return bool(self._open) or number <= self._message_ends

    def look(self, line: LogLine, matched: frozenset[Pattern]) -> None:
        """Keep the line if it looks like a failure. matched: the patterns that match it."""
        if _TRACEBACK in line.text:
            self._open[line.source] = LoggedFailure(line, "complaint", line.number, True, matched=set(matched))
        elif frame := _FRAME.match(line.text):
            inside = self._traceback_of(line)
            inside = inside or self._open.setdefault(line.source, LoggedFailure(line, "complaint", line.number))
            inside.packages.update(frame.group(1).replace("\\", "/").split("/"))
            inside.matched |= matched
        elif _IGNORED in line.text:
            self._ignored.add(line.source)
        else:
            self._look_outside(line, matched)

    def failures(self) -> list[LoggedFailure]:
        """Return them in the order of their lines; of very many the first and the last."""
        cut = [each for each in [*self._cut, *self._open.values()] if each.has_header]
        return sorted([*self._first, *self._last, *cut], key=lambda each: each.line.number)

    def _look_outside(self, line: LogLine, matched: frozenset[Pattern]) -> None:
        inside = self._traceback_of(line)
        kind = _kind(line, inside)
        if kind is None:
            last = inside or (self._latest if self._latest and self._latest.has(line) else None)
            if last:
                last.matched |= matched
        elif kind == "exception" and inside:
            self._open = {source: each for source, each in self._open.items() if each is not inside}
            known = inside.matched | matched
            self._keep(LoggedFailure(line, kind, inside.begins, inside.has_header, inside.packages, known, own=matched))
        else:
            self._keep(LoggedFailure(line, kind, line.number, matched=set(matched), own=matched))

    def _traceback_of(self, line: LogLine) -> LoggedFailure | None:
        return next((each for source, each in self._open.items() if source.startswith(line.source)), None)

    def _keep(self, failure: LoggedFailure) -> None:
        if failure.kind == "exception" and failure.line.source in self._ignored:
            self._ignored.remove(failure.line.source)
            return
        self._latest = failure
        self._message_ends = max(self._message_ends, failure.ends)
        (self._first if len(self._first) < KEPT_FAILURES else self._last).append(failure)


def _kind(line: LogLine, inside: LoggedFailure | None) -> Kind | None:
    is_last = inside and inside.has_header and line.text[:1] not in _WITHIN and not _MILD.search(line.whole)
    if (is_last and _LAST_OF_TRACEBACK.match(line.text)) or _EXCEPTION.match(line.text):
        return "exception"
    if _CRASH.search(line.text):
        return "crash"
    if _COMPLAINT.search(line.text) or _TORCH_ERROR.search(line.whole):
        return "complaint"
    if _MAY_BE_COMPLAINT.search(line.text) and not (_MILD.search(line.whole) or _IS_HANDLED.search(line.text)):
        return "complaint"
    return None
