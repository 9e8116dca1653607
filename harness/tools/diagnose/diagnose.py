"""Which known failure a log shows, offline: the first cause, not the loudest line.

An entry is looked for only in its context (an exception with frames of another engine, and none of SGLang's, is out of it),
and not if a line speaks against it ("excludes"). Its confidence:
- high: a "cause" line that is an error, and all of the entry's conditions.
- medium: a "cause" line that is an error; or a "likely" one with all of the conditions, of which there is at least one.
- low: any other "likely" or "cause" line; a "cause" line of a traceback in which neither SGLang nor a trainer has a frame.
Hints alone name nothing, nor do "likely" lines of such a traceback. It is low too if an unknown exception before it led to it.

A cause is connected to the end: an unknown exception that came after it, when no failure had shown for NEAR_LINES, or after
a line that is not an error, is another failure, and the entry was only "seen as well". A consequence is at most low, and is
named only if the log has neither a cause nor an unknown exception. Of several causes the earliest in time wins (in order of
lines, if the files have no clock in common); one of low confidence only if there is no other.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from harness.tools.diagnose.entries import OF_SGLANG, TABLE, CatalogueEntry, Pattern, Signature, catalogue, surroundings
from harness.tools.diagnose.log_lines import LogLine, is_of_a_run, parse_line, raw_lines

Confidence = Literal["low", "medium", "high"]
Kind = Literal["exception", "crash", "complaint"]

NEAR_LINES = 200
HEADLINE_LINES = 3
KEPT_MATCHES = 100  # of one pattern in one file; the earliest ones decide

OF_A_RUN = ("engine", "rl", "trainer", "rollout", "harness")
"""The contexts of a run of this harness, which its logs need not show."""
_RANKS = re.compile(r"(?:^| )(?:TP|DP|PP|EP)\d+(?: |$)")  # in the prefix of SGLang's schedulers

WORDS = frozenset(
    b"traceback error fatal failed killed oom segmentation terminate dumped panic panicked sigkill sigsegv sigabrt sigbus"
    b" signal crit alert emerg critical assert exited exception failure aborted bus unable invalid cannot refused warn recent".split()
)
"""Each line that looks like a failure has one of the words (in any case), or a part: see _may_fail."""
TRACEBACK_LINES = 400  # that are read at most after "Traceback" until its exception is found
MESSAGE_LINES = 12  # so many lines after an exception's own may be of its message
KEPT_FAILURES = 200  # of one file that are kept from its start, and as many from its end

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
_TORCH_ERROR = re.compile(r"\[E\d{3,4} \d\d:\d\d:\d\d|\[E [^\]]*?\w\.(?:cpp|cc|cu|hpp|h):\d+\]")
# A logger marks the line as no failure, so that healthy runs may print it.
_MILD = re.compile(r"(?<!NCCL )\b(?:WARNING|WARN|INFO|DEBUG)\b|\b[A-Z]?\w*Warning: |\[[WI]\d{3,4} \d\d:")
_WORDS_OF_FAILURE = re.compile(
    r"error|fail|exception|fatal|assert|abort|refus|invalid|unable|cannot|can't|timed? ?out|not found|denied|exceed|no such"
    r"|died|unsafe|must|missing|not supported|disabled|unbalanced|mismatch|undefined|blocked",
    re.IGNORECASE,
)
_WITHIN = ("", " ", "\t", "|", "+", "^")  # first characters of a traceback's lines, its last excepted
_TRACEBACK = "Traceback (most recent call last)"
_IGNORED = "Exception ignored in"
_FRAME = re.compile(r'^\s*File "([^"]+)"')

Matches = dict[Pattern, list[LogLine]]


@dataclass(frozen=True, slots=True)
class CatalogueMatch:
    """An entry that the log shows."""

    entry: CatalogueEntry
    confidence: Confidence
    evidence: tuple[tuple[Signature, LogLine], ...]  # first line of each signature; the one that names it comes first
    is_mild: bool = False  # whether the line that names it is a warning, or no complaint at all

    @property
    def line(self) -> LogLine:
        return self.evidence[0][1]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What some logs show."""

    verdict: Literal["diagnosed", "unknown", "no failure"]
    finding: CatalogueMatch | None
    others: tuple[CatalogueMatch, ...]  # other known failures that it shows, causes before consequences
    suspicious: LogLine | None
    """The first line that looks like a failure and is not known; beside a finding only if it stands before that."""
    ending: LogLine | None = None  # the last failure that the log shows, unless a line above says the same


def _may_fail(raw: bytes, words: Set[bytes]) -> bool:
    """Return whether a line of these words, in lower case, may look like a failure or be of a traceback. Must be fast."""
    return not WORDS.isdisjoint(words) or b"Error" in raw or b"Exception" in raw or b"[E" in raw or b'File "' in raw


@dataclass(slots=True)
class LoggedFailure:
    """A failure that the log shows, known or not."""

    line: LogLine  # what says it: the last of a traceback
    kind: Kind
    begins: int  # number of the line at which its traceback begins
    has_header: bool = False  # its traceback has its first line; a quoted one may have frames only
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
            return _same_process(line, self.line)
        has_prefix, own_prefix = line.text != line.whole, self.line.text != self.line.whole
        return line.source == self.line.source and has_prefix == own_prefix


def _same_process(line: LogLine, other: LogLine) -> bool:
    """Return whether their prefixes allow it; a line may lack one: SGLang's stands on a traceback's first alone."""
    return line.source.startswith(other.source) or other.source.startswith(line.source)


@dataclass(slots=True)
class _FailureScanner:
    """Collects what looks like a failure in one file."""

    _first: list[LoggedFailure] = field(default_factory=list)
    _last: deque[LoggedFailure] = field(default_factory=lambda: deque(maxlen=KEPT_FAILURES))
    _open: dict[str, LoggedFailure] = field(default_factory=dict)  # by process: its traceback that has not ended
    _ignored: set[str] = field(default_factory=set)  # processes whose next exception Python ignored
    _latest: LoggedFailure | None = None
    _message_ends: int = 0  # number of the last line that may be of an exception's message

    def awaits(self, number: int) -> bool:
        """Return whether the line of this number may be of a traceback, or of an exception's message."""
        for source, each in list(self._open.items()):
            if number - each.begins >= TRACEBACK_LINES and self._open.pop(source).has_header:
                self._first.append(each)
        return bool(self._open) or number <= self._message_ends

    def look(self, line: LogLine, matched: frozenset[Pattern]) -> None:
        """Keep the line if it looks like a failure. matched: the patterns that match it."""
        inside = next((each for source, each in self._open.items() if source.startswith(line.source)), None)
        if _TRACEBACK in line.text:
            self._open[line.source] = LoggedFailure(line, "complaint", line.number, True, matched=set(matched))
        elif frame := _FRAME.match(line.text):
            inside = inside or self._open.setdefault(line.source, LoggedFailure(line, "complaint", line.number))
            inside.packages.update(frame.group(1).replace("\\", "/").split("/"))
            inside.matched |= matched
        elif _IGNORED in line.text:
            self._ignored.add(line.source)
        elif (kind := _kind(line, inside)) is None:
            if last := inside or (self._latest if self._latest and self._latest.has(line) else None):
                last.matched |= matched
        elif kind != "exception" or not inside:
            self._keep(LoggedFailure(line, kind, line.number, matched=set(matched), own=matched))
        else:
            self._open = {source: each for source, each in self._open.items() if each is not inside}
            self._keep(replace(inside, line=line, kind=kind, matched=inside.matched | matched, own=matched))

    def failures(self) -> list[LoggedFailure]:
        """Return them in the order of their lines."""
        every = [*self._first, *self._last, *(each for each in self._open.values() if each.has_header)]
        return sorted(every, key=lambda each: each.line.number)

    def _keep(self, failure: LoggedFailure) -> None:
        if failure.kind == "exception" and failure.line.source in self._ignored:
            self._ignored.remove(failure.line.source)
            return
        self._latest = failure
        self._message_ends = max(self._message_ends, failure.ends)
        (self._first if len(self._first) < KEPT_FAILURES else self._last).append(failure)


def _kind(line: LogLine, inside: LoggedFailure | None) -> Kind | None:
    mild = _MILD.search(line.whole)
    is_last = inside and inside.has_header and line.text[:1] not in _WITHIN and not mild
    if (is_last and _LAST_OF_TRACEBACK.match(line.text)) or _EXCEPTION.match(line.text):
        return "exception"
    if _CRASH.search(line.text):
        return "crash"
    may = _MAY_BE_COMPLAINT.search(line.text) and not (mild or _IS_HANDLED.search(line.text))
    return "complaint" if may or _COMPLAINT.search(line.text) or _TORCH_ERROR.search(line.whole) else None


def diagnose(files: Sequence[str], contexts: Collection[str] = ()) -> Diagnosis:
    """Read the files, in the order in which a cause is looked for; contexts are known without them. Raise OSError."""
    all_patterns, anywhere, once = _patterns()
    by_word = {word: list(patterns) for word, patterns in all_patterns.items()}
    matches: Matches = {}
    failures: list[LoggedFailure] = []
    shown = {*contexts, *(OF_A_RUN if any(map(is_of_a_run, files)) else ())}
    for index, file in enumerate(files):
        scanner, kept = _FailureScanner(), Counter[Pattern]()
        for number, raw in raw_lines(file):
            words = set(raw.translate(TABLE).split())
            patterns = [each for word in words & by_word.keys() for each in by_word[word] if each.words <= words]
            if not (patterns or _may_fail(raw, words) or scanner.awaits(number)):
                continue
            line = parse_line(file, index, number, raw)
            if _RANKS.search(line.source):
                shown.add("engine")
            found = frozenset(
                each for each in patterns if each.regex.search(line.whole if each in anywhere else line.text)
            )
            for pattern in found:
                kept[pattern] += 1
                if kept[pattern] <= KEPT_MATCHES:
                    matches.setdefault(pattern, []).append(line)
            for pattern in found & once:  # some stand in every line
                by_word[pattern.word].remove(pattern)
            scanner.look(line, found)
        failures += scanner.failures()
    return _Log(matches, failures, frozenset(_shown_contexts(matches) | shown)).diagnosis()


def _shown_contexts(matches: Matches) -> set[str]:
    around = surroundings()
    shown = {name for name, patterns in around.contexts.items() if any(each in matches for each in patterns)}
    if "engine" not in shown and any(each in matches for each in around.other_engines):
        return shown - {"rollout"}
    return shown | ({OF_SGLANG} if "trainer" in shown else set())


@cache
def _patterns() -> tuple[Mapping[bytes, Sequence[Pattern]], frozenset[Pattern], frozenset[Pattern]]:
    """Return the patterns by word, those that may stand in prefixes too, and those of which one match is enough."""
    around, entries = surroundings(), catalogue().values()
    placed = {each for entry in entries for s in entry.signatures for each in (s.pattern, s.near) if each}
    contexts = {each for patterns in around.contexts.values() for each in patterns}
    anywhere = contexts.union(around.other_engines, *(entry.conditions or () for entry in entries))
    by_word: dict[bytes, list[Pattern]] = {}
    for pattern in placed.union(anywhere, around.harmless, around.wrappers):
        by_word.setdefault(pattern.word, []).append(pattern)
    return by_word, frozenset(anywhere), frozenset(anywhere - placed)


@dataclass(frozen=True, slots=True)
class _Log:
    """What was found in the files."""

    matches: Matches
    failures: Sequence[LoggedFailure]  # file by file, in the order of their lines
    contexts: frozenset[str]  # names of surroundings.toml that it shows, or that are known without it

    def diagnosis(self) -> Diagnosis:
        found, ending = self._weighed(), self._ending()
        shown = [found.suspicious, *(line for _, line in (found.finding.evidence if found.finding else ()))]
        if ending is None or any(line and (ending.has(line) or line.text == ending.line.text) for line in shown):
            return found
        return replace(found, ending=ending.line)

    def _weighed(self) -> Diagnosis:
        around = surroundings()
        findings = [finding for entry in catalogue().values() if (finding := self._finding(entry))]
        explained = {
            signature.pattern for each in findings for signature, _ in each.evidence if signature.role != "hint"
        }
        known = [*around.harmless, *around.wrappers]
        unknown = [each for each in self.failures if not each.matched & explained and each.own.isdisjoint(known)]
        exceptions = [each for each in unknown if each.kind != "complaint"]
        key = _order([each.line for each in findings] + [each.line for each in exceptions])
        findings.sort(key=lambda each: (each.entry.consequence, key(each.line)))
        causes = [each for each in findings if not each.entry.consequence and not self._other_end(each, exceptions)]
        first = min((each.line for each in exceptions), key=key, default=None)
        if causes:
            causes = [self._lowered(each, exceptions) for each in causes]
            chosen = next((each for each in causes if each.confidence != "low"), causes[0])
        elif first is None and findings and findings[0].entry.consequence:
            chosen = findings[0]
        else:
            complaints = [each for each in self.failures if each.own.isdisjoint([*explained, *around.harmless])]
            line = first or _earliest([each for each in unknown if each.kind == "complaint"]) or _earliest(complaints)
            lowered = tuple(replace(each, confidence="low") for each in findings)
            return Diagnosis("unknown" if line else "no failure", None, lowered, line)
        others = tuple(each for each in findings if each.entry is not chosen.entry)
        if first is None or key(first) > key(chosen.line) or _is_headline(first, chosen.line):
            first = None
        return Diagnosis("diagnosed", chosen, others, first)

    def _lowered(self, finding: CatalogueMatch, exceptions: Sequence[LoggedFailure]) -> CatalogueMatch:
        """Return it with low confidence if an unknown exception came before, and led to it."""
        line, inside = finding.line, self._inside(finding.line)
        before = [each.line for each in exceptions if each is not inside and not _is_headline(each.line, line)]
        led = any(self._is_followed(each, line) for each in before)
        return replace(finding, confidence="low") if led else finding

    def _other_end(self, finding: CatalogueMatch, exceptions: Sequence[LoggedFailure]) -> bool:
        """Return whether an unknown exception ended what the finding did not."""
        line, inside = finding.line, self._inside(finding.line)
        after = [each.line for each in exceptions if each.line.index == line.index and each is not inside]
        if finding.is_mild or (finding.evidence[0][0].role == "likely" and not inside):
            own = 0 if finding.is_mild else HEADLINE_LINES  # a line of code stands before its exception
            return any(each.number > line.number + own for each in after)
        return any(each.number > line.number and not self._is_followed(line, each) for each in after)

    def _is_followed(self, line: LogLine, later: LogLine) -> bool:
        """Return whether failures lead from one line of a file to a later one without a pause of NEAR_LINES."""
        if line.index != later.index or line.number >= later.number:
            return False
        end = line.number
        for each in self.failures:
            if each.line.index == line.index and line.number <= each.line.number <= later.number:
                if each.begins - end > NEAR_LINES:
                    return False
                end = max(end, each.line.number)
        return later.number - end <= NEAR_LINES

    def _ending(self) -> LoggedFailure | None:
        """Return the last failure of the last file with one; exceptions before complaints, and both before wrappers."""
        real = [each for each in self.failures if each.own.isdisjoint(surroundings().harmless)]
        own = [each for each in real if each.own.isdisjoint(surroundings().wrappers)]
        worse = [each for each in own if each.kind != "complaint"]
        return next((some[-1] for some in (worse, own, real) if some), None)

    def _finding(self, entry: CatalogueEntry) -> CatalogueMatch | None:
        """Return the entry, if the log shows it."""
        first = {each: line for each in entry.signatures if (line := self._first_match(each, entry.context))}
        roles = {signature.role for signature in first}
        if "excludes" in roles or not roles & {"cause", "likely"}:
            return None
        key, ranks = _order(list(first.values())), {"cause": 0, "likely": 1, "hint": 4}

        def rank(item: tuple[Signature, LogLine]) -> tuple[int, object]:
            signature, line = item
            return ranks[signature.role] + 2 * self._is_mild(signature, line), key(line)

        evidence = tuple(sorted(first.items(), key=rank))
        names, line = evidence[0]
        is_mild = self._is_mild(names, line)
        return CatalogueMatch(entry, self._confidence(entry, names, line, is_mild), evidence, is_mild)

    def _confidence(self, entry: CatalogueEntry, names: Signature, line: LogLine, is_mild: bool) -> Confidence:
        strangers = not names.anywhere and self._is_of_strangers(line, entry.context)
        if entry.consequence or is_mild or strangers:
            return "low"
        has_all = all(pattern in self.matches for pattern in entry.conditions or ())
        if names.role == "cause":
            return "high" if entry.conditions is not None and has_all else "medium"
        return "medium" if entry.conditions and has_all else "low"

    def _first_match(self, signature: Signature, context: Sequence[str]) -> LogLine | None:
        near = self.matches.get(signature.near, []) if signature.near else None
        harmless = {line for pattern in surroundings().harmless for line in self.matches.get(pattern, [])}
        for line in self.matches.get(signature.pattern, []):
            if line in harmless or (near is not None and not any(self._is_near(line, other) for other in near)):
                continue
            strangers = signature.role == "likely" and self._is_of_strangers(line, context)
            if signature.anywhere or (self._in_context(line, context) and not strangers):
                return line
        return None

    def _is_near(self, line: LogLine, other: LogLine) -> bool:
        """Return whether they are of one traceback, or, if the line has none of its own, not far apart."""
        if line.index != other.index or not _same_process(line, other):
            return False
        inside = self._inside(line)
        if inside and inside.has_header and inside.packages:
            return inside.begins <= other.number <= inside.ends
        return abs(line.number - other.number) <= NEAR_LINES

    def _inside(self, line: LogLine) -> LoggedFailure | None:
        """Return the exception or crash to which the line belongs."""
        around = [each for each in self.failures if each.kind != "complaint" and each.has(line)]
        return min(around, key=lambda each: each.line.number != line.number, default=None)

    def _is_mild(self, signature: Signature, line: LogLine) -> bool:
        inside = self._inside(line)
        if signature.role == "hint" or (inside and (inside.packages or inside.line.number == line.number)):
            return False
        complains = signature.role == "cause" or _WORDS_OF_FAILURE.search(line.text)
        return bool(_MILD.search(line.whole)) or not complains

    def _in_context(self, line: LogLine, names: Sequence[str]) -> bool:
        """Return whether the log is of one of these contexts, and the line's exception not of another engine."""
        inside = self._inside(line)
        if inside and "sglang" in inside.packages and {"engine", OF_SGLANG} & set(names):
            return True
        if inside and inside.packages & set(surroundings().other_engine_packages):
            return "distributed" in names
        return not self.contexts.isdisjoint(names)

    def _is_of_strangers(self, line: LogLine, names: Sequence[str]) -> bool:
        """Return whether its exception has a traceback in which neither an engine nor a trainer has a frame."""
        inside = self._inside(line)
        if not inside or not inside.has_header or not inside.packages or "distributed" in names:
            return False
        return not inside.packages & {"sglang", "harness", *surroundings().trainer_packages}


def _earliest(failures: Sequence[LoggedFailure]) -> LogLine | None:
    lines = [each.line for each in failures]
    return min(lines, key=_order(lines), default=None)


def _order(lines: Sequence[LogLine]) -> Callable[[LogLine], tuple[float, int, int]]:
    """Return a sort key: time if all have one, else file and line; within a file always the line."""
    has_clock = len({line.index for line in lines}) > 1 and all(line.time is not None for line in lines)
    return lambda line: (line.time or 0.0 if has_clock else 0.0, line.index, line.number)


def _is_headline(exception: LogLine, line: LogLine) -> bool:
    """Return whether the line is the message of that exception, whose own line has none."""
    apart = line.number - exception.number
    return exception.text.endswith("Error:") and line.index == exception.index and apart <= HEADLINE_LINES
