"""Lines that look like a failure, whatever it is: exceptions with their tracebacks, crashes, complaints of a logger."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.tools.diagnose.log_lines import Line
from harness.tools.diagnose.patterns import Pattern

WORDS = frozenset(
    b"traceback error fatal failed killed oom segmentation terminate dumped panic panicked sigkill sigsegv sigabrt sigbus"
    b" signal crit alert emerg critical assert exited exception failure aborted bus unable invalid cannot refused warn recent".split()
)
"""Each line that looks like a failure has one of the words (in any case), or a part: see may_fail."""
TRACEBACK_LINES = 400
"""After "Traceback" every line is read until its exception is found, but no more than these."""
MESSAGE_LINES = 12
"""So many lines after an exception's own may be of its message."""
KEPT = 200
"""Failures of one file that are kept from its start, and as many from its end."""

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
_IS_HANDLED = re.compile(r"expected|fall(?:ing)? ?back|ignor|skipp|retry|instead|disabled|optional", re.IGNORECASE)
"""How a program says that it does without what it failed to do."""
_TORCH_ERROR = re.compile(r"\[E\d{3,4} \d\d:\d\d:\d\d|\[E [^\]]*?\w\.(?:cpp|cc|cu|hpp|h):\d+\]")
_MILD = re.compile(r"(?<!NCCL )\b(?:WARNING|WARN|INFO|DEBUG)\b|\b[A-Z]?\w*Warning: |\[[WI]\d{3,4} \d\d:")
"""What loggers and Python say of a line that is no failure."""
_WORDS_OF_FAILURE = re.compile(
    r"error|fail|exception|fatal|assert|abort|refus|invalid|unable|cannot|can't|timed? ?out|not found|denied|exceed|no such"
    r"|died|unsafe|must|missing|not supported|disabled|unbalanced|mismatch|undefined|blocked",
    re.IGNORECASE,
)
_WITHIN = ("", " ", "\t", "|", "+", "^")
"""With what a line of a traceback begins that is not its last."""
_TRACEBACK = "Traceback (most recent call last)"
_IGNORED = "Exception ignored in"
_FRAME = re.compile(r'^\s*File "([^"]+)"')


def may_fail(raw: bytes, words: Sequence[bytes]) -> bool:
    """Whether a line of these words, in lower case, may look like a failure, or be of a traceback. It is asked of each line."""
    return not WORDS.isdisjoint(words) or b"Error" in raw or b"Exception" in raw or b"[E" in raw or b'File "' in raw


@dataclass(slots=True)
class Trouble:
    """A failure that the log shows, whatever it is."""

    line: Line
    """What says it: of a traceback its last."""
    kind: Kind
    begins: int
    """Number of the line at which its traceback begins."""
    has_header: bool = False
    """Whether its traceback has its first line; of a quoted one only frames may be left."""
    packages: set[str] = field(default_factory=set)
    """Folders in the paths of its traceback's frames."""
    matched: set[Pattern] = field(default_factory=set)
    """What knows a line of it."""
    own: frozenset[Pattern] = frozenset()
    """What knows the line that says it."""

    @property
    def ends(self) -> int:
        """Number of the last line that may be of its message."""
        return self.line.number + (MESSAGE_LINES if self.kind != "complaint" else 0)

    def has(self, line: Line) -> bool:
        """Whether the line is of its traceback or of its message."""
        if line.index != self.line.index or not self.begins <= line.number <= self.ends:
            return False
        if line.number <= self.line.number:
            return same_process(line, self.line)
        return line.source == self.line.source and _has_prefix(line) == _has_prefix(self.line)


def _has_prefix(line: Line) -> bool:
    return line.text != line.whole


def same_process(line: Line, other: Line) -> bool:
    """Whether their prefixes allow it. Some lines of a process lack one: SGLang's stands on the first of a traceback only."""
    return line.source.startswith(other.source) or other.source.startswith(line.source)


def is_warning(line: Line) -> bool:
    """Whether its logger says that it is no failure, so that healthy runs may print it."""
    return bool(_MILD.search(line.whole))


def is_complaint(line: Line) -> bool:
    """Whether it has a word of failure."""
    return bool(_WORDS_OF_FAILURE.search(line.text))


@dataclass(slots=True)
class Suspicion:
    """What looks like a failure in one file."""

    _first: list[Trouble] = field(default_factory=list)
    _last: deque[Trouble] = field(default_factory=lambda: deque(maxlen=KEPT))
    _open: dict[str, Trouble] = field(default_factory=dict)
    """Processes in a traceback -> what is known of it."""
    _cut: list[Trouble] = field(default_factory=list)
    """Tracebacks whose exception never came."""
    _ignored: set[str] = field(default_factory=set)
    """Processes whose next exception Python ignored."""
    _latest: Trouble | None = None
    _message_ends: int = 0
    """Number of the last line that may be of an exception's message."""

    def awaits(self, number: int) -> bool:
        """Whether the line of this number may be of a traceback, or of an exception's message."""
        for source, began in list(self._open.items()):
            if number - began.begins >= TRACEBACK_LINES:
                self._cut.append(self._open.pop(source))
        return bool(self._open) or number <= self._message_ends

    def look(self, line: Line, matched: frozenset[Pattern]) -> None:
        """Keep it if it looks like a failure; `matched` are the patterns that know it."""
        if _TRACEBACK in line.text:
            self._open[line.source] = Trouble(line, "complaint", line.number, has_header=True, matched=set(matched))
        elif frame := _FRAME.match(line.text):
            inside = self._of(line) or self._open.setdefault(line.source, Trouble(line, "complaint", line.number))
            inside.packages.update(frame.group(1).replace("\\", "/").split("/"))
            inside.matched |= matched
        elif _IGNORED in line.text:
            self._ignored.add(line.source)
        else:
            self._look_outside(line, matched)

    def troubles(self) -> list[Trouble]:
        """In the order of their lines; of very many the first and the last."""
        cut = [each for each in [*self._cut, *self._open.values()] if each.has_header]
        kept = [*self._first, *self._last, *cut]
        return sorted(kept, key=lambda each: each.line.number)

    def _look_outside(self, line: Line, matched: frozenset[Pattern]) -> None:
        inside = self._of(line)
        kind = self._kind(line, inside)
        if kind is None:
            last = inside or (self._latest if self._latest and self._latest.has(line) else None)
            if last:
                last.matched |= matched
        elif kind == "exception" and inside:
            self._open = {source: each for source, each in self._open.items() if each is not inside}
            self._keep(
                Trouble(
                    line, kind, inside.begins, inside.has_header, inside.packages, inside.matched | matched, matched
                )
            )
        else:
            self._keep(Trouble(line, kind, line.number, matched=set(matched), own=matched))

    def _of(self, line: Line) -> Trouble | None:
        """The open traceback to which the line belongs."""
        return next((each for source, each in self._open.items() if source.startswith(line.source)), None)

    @staticmethod
    def _kind(line: Line, inside: Trouble | None) -> Kind | None:
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

    def _keep(self, trouble: Trouble) -> None:
        if trouble.kind == "exception" and trouble.line.source in self._ignored:
            self._ignored.remove(trouble.line.source)
            return
        self._latest = trouble
        self._message_ends = max(self._message_ends, trouble.ends)
        if len(self._first) < KEPT:
            self._first.append(trouble)
        else:
            self._last.append(trouble)
