"""What a log shows of failures: its tracebacks, crashes and error lines, and lines that the catalogue knows.

A log may have gigabytes and a failure may have a million consequences. So lines are searched only if they have a word
of failure or all words of a known line, and of symptoms that differ in numbers only the first and the last are kept; of
very many, those of one kind.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from harness.tools.diagnose.entries import TABLE, Pattern, catalogue, surroundings
from harness.tools.diagnose.log_lines import raw_lines
from harness.tools.diagnose.progress import LONGEST_STEP, WORDS_OF_PROGRESS, Progress
from harness.tools.diagnose.tracebacks import LogLine, Traceback, TracebackReader, exception_name, log_line

Kind = Literal["exception", "crash", "complaint", "line"]
"""How a symptom looks: an exception, a death below Python, an error line, or a line that only the catalogue knows."""

NEAR_LINES = 200
"""Failures so many lines apart are not of one burst: what failed first was survived."""
MESSAGE_LINES = 12
"""So many lines after an exception may be of its message."""
CODE_LINES = 3
"""So many lines after a line of code its exception may stand: the markers of Python stand between."""
LINES_APART = 50
"""Of lines of one process that match the same pattern, the next one that is kept is so many lines away."""
MOST_TEXTS = 1000
"""After so many symptoms of a file, those that begin alike up to the first colon count as the same."""
LAST_LINES = 3  # of the log, and so many of the lines with words of failure

WORDS = frozenset(
    b"traceback error fatal failed fails failure failing killed oom segmentation terminate terminated dumped panic"
    b" panicked sigkill sigsegv sigabrt sigbus signal crit alert emerg critical assert exited exit exitcode exception"
    b" aborted abort bus unable invalid cannot refused denied unreachable crashed crash died dead timeout timed hang stuck"
    b" broken corrupt corrupted warn recent xid oomkilled giving fault exceptions crashes mismatch could couldn missing"
    b" unrecognized unsupported incompatible undefined rejected unexpected unexpectedly raise __terminate such lost not"
    b" bad 400".split()
)
"""Each line that looks like a failure has one of these words (in any case), or a part that _may_fail looks for."""

_CRASH = re.compile(
    r"Fatal Python error|Segmentation fault|terminate called|core dumped|^Killed$|Out of memory: Killed|oom-?kill"
    r"|CUDA error:|\bpanic: |panicked at|\bSIG(?:KILL|SEGV|ABRT|BUS)\b|signal 9\b|INTERNAL ASSERT FAILED|FIRST FAILURE:"
    r"|^Aborted$|\bAssertion (?:[`'].+ failed\b|failed: |error \(?\S+:\d+)|^Bus error|line \d+: +\d+ (?:Aborted|Killed|Bus error|Terminated)\b"
)
_COMPLAINT = re.compile(
    r"\b(?:ERROR\b|FATAL\b|CRITICAL\b|FAILED\b|fatal: |exited with code [1-9]|exit(?:ed with)? ?(?:code|status)\W{1,3}-?[1-9]"
    r"|exitcode ?: -?[1-9]|[A-Z]\w*(?:Error|Exception): |nccl[A-Z]\w*Error\b|[Cc]uda (?:error|failure)\b|NVRM: Xid\b|OOMKilled\b(?!\"?: ?false)"
    r"|oom_kill event|killed (?:due to|because of) .*memory|watchdog timeout \(|Watchdog caught collective operation timeout"
    r"|Exception raised from throw\w*Error|NCCL WARN .{0,300}(?:closed|fail|error|refused|timed? ?out))"
    r"|/(?:update_weight\w*|(?:begin|end)_weight_update|(?:init|send)_weights_\w+|load_lora_adapter\w*) HTTP/\S+ 400\b"
    r"|(?<!\S)[Ee]rror:|\[(?:error|crit|alert|emerg|fatal)\]|^(?:Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\)"
)
_LEVEL = re.compile(r"\b(?:ERROR|FATAL|CRITICAL|FAILED)\b")  # in the prefix
_FAILS = (
    r"(?:[Ff]ailed|[Ff]ailure|[Cc]rashed|[Tt]imed out|[Rr]efused|[Dd]enied|[Uu]nreachable|[Aa]borted|[Kk]illed|[Dd]ied"
    r"|[Tt]erminated|out of memory|giving up|[Uu]nable to|[Cc]annot|is dead|exception)"
)
_MAY_BE_COMPLAINT = re.compile(
    rf"(?:^|[:\]] )(?:(?:Failed|Unable|Cannot) to |Invalid \w+[:=])|\b{_FAILS} ?:|\b[Ee]rror (?:in|while|during|code|fetching)\b"
)
# The line says that the program goes on without what failed, or tries again.
IS_HANDLED = re.compile(
    r"expected|fall(?:ing)? ?back|ignor|skipp|silence|to avoid|retr(?:y|ies)|instead|disabled|optional|\bno error|\b[01]\.\d+ ?$",
    re.IGNORECASE,
)
_WORDS_OF_FAILURE = re.compile(
    r"""(?<![\w=./-])(?<!=['"])(?:fail(?:ed|s|ure|ures|ing)?|errors?|exceptions?|crash(?:e[sd])?|timed ?out|timeout|time-out|refused|denied|unreachable"""
    r"|abort(?:ed)?|killed|died|dead|hang|stuck|broken|corrupt(?:ed)?|terminated|unable|invalid|cannot|could ?n[o']t|out of memory"
    r"|mismatch|missing|unrecognized|unsupported|incompatible|undefined|rejected|lost|unexpected(?:ly)?|giving up"
    r"|no such (?:file|device|process|host|option|operator|module)"
    r"|bad request|not (?:found|loaded|supported|available|exist|allowed|permitted|implemented|reachable|respond\w*|connect\w*|compiled|initialized|defined))"
    r"(?![\w=/-]|\.[\w/]|\w*\W{1,2}[\d\[{])"
    r"|\b(?-i:(?:[A-Z]\w*)?(?:Error|Exception))\b(?!=)|\b(?-i:[A-Z]+_ERROR_[A-Z])|\bNCCL WARN\b|\b__terminate\b",
    re.IGNORECASE,
)
"""Words of failure in a sentence; those of settings and counters, such as "timeout=300" and "errors: 0", do not
count."""
_TORCH_ERROR = re.compile(r"\[E\d{3,4} \d\d:\d\d:\d\d|\[E [^\]]*?\w\.(?:cpp|cc|cu|hpp|h):\d+\]")
# A logger says that the line is no failure: healthy runs print such lines too.
MILD = re.compile(r"(?<!NCCL )\b(?:WARNING|WARN|INFO|DEBUG)\b|\b[A-Z]?\w*Warning: |\[[WI]\d{3,4} \d\d:")
_RANKS = re.compile(r"(?:^| )(?:TP|DP|PP|EP)\d+(?: |$)")  # in the prefix of SGLang's schedulers
_VICTIM = re.compile(
    r"Kill(?:ed)? process (?P<pid>\d+),? \((?P<name>[^)]{0,64})\)|reaped process (?P<reaped>\d+) \((?P<of>[^)]{0,64})\)"
    r"|oom-kill:constraint=.{0,2000}?\btask=(?P<task>.{0,64}?),pid=(?P<of_task>\d+)"
    r"|(?<!\S)(?P<asked>\S{1,64}) invoked oom-killer\b"
)
"""The kernel's sentences about a process that it killed for want of memory; "asked" is only the one that asked for
some."""
_PID = re.compile(r"\b(?:pid\W{0,3}|[Pp]rocess )(\d+)\b")
_INSTALLED = re.compile(
    r"(?:.*/)?(?:(?:site|dist)-packages|lib(?:64)?/python3(?:\.\d+)?(?!/(?:site|dist)-packages/))/([^/]+)"
)
_SOURCE_OF_SGLANG = re.compile(
    r"(?:^|/)(?:python/sglang/|bin/sglang$|sglang/(?:srt|lang|cli|jit_kernel|kernels|multimodal_gen)/)"
)


@dataclass(slots=True)
class Symptom:
    """One thing that a log shows: a traceback with its message, a crash, an error line, or a line of the catalogue."""

    line: LogLine
    """The line that says it; of a traceback the one with the exception."""
    kind: Kind
    file: int
    """Which of the files that are read, from 0."""
    traceback: Traceback | None = None
    matched: dict[Pattern, LogLine] = field(default_factory=dict)
    """Patterns of the catalogue that its lines match, each with the first such line."""
    own: frozenset[Pattern] = frozenset()
    """The patterns that `line` itself matches."""
    burst: int = 0
    """Number of the line with which its burst of failures begins: of those without a pause of NEAR_LINES."""

    @property
    def is_error(self) -> bool:
        return self.kind in ("exception", "crash")

    @property
    def begins(self) -> int:
        return self.traceback.begins if self.traceback else self.line.number

    @property
    def ends(self) -> int:
        """The number of the last line that may be of its message."""
        return self.line.number + (MESSAGE_LINES if self.is_error else 0)

    @property
    def packages(self) -> set[str]:
        """The packages of its frames."""
        frames = self.traceback.frames if self.traceback else []
        return {package for frame in frames for package in packages_of(frame.file)}

    @property
    def has_whole_traceback(self) -> bool:
        found = self.traceback
        return found is not None and found.has_header and found.last is not None and bool(found.frames)

    def has(self, line: LogLine) -> bool:
        """Return whether the line is of its traceback or of its message."""
        is_inside = line.file == self.line.file and self.begins <= line.number <= self.line.number
        return is_inside or line in self.matched.values() or self.may_have_in_message(line)

    def may_have_in_message(self, line: LogLine) -> bool:
        """Return whether a line after its own may be of its message."""
        if line.file != self.line.file or not self.line.number < line.number <= self.ends:
            return False
        has_prefix, own_prefix = line.text != line.whole, self.line.text != self.line.whole
        return line.process == self.line.process and has_prefix == own_prefix


def packages_of(file: str) -> set[str]:
    """Return the package of an installed file, else all folders above it; "sglang" only for SGLang's own source.

    An environment, or a folder of the user's own code, may be called sglang too.
    """
    path = file.replace("\\", "/")
    if installed := _INSTALLED.match(path):
        return {installed[1]}
    return {*path.split("/")} - (set() if _SOURCE_OF_SGLANG.search(path) else {"sglang"})


@dataclass(slots=True)
class LogFacts:
    """What several files show together."""

    symptoms: list[Symptom] = field(default_factory=list)
    """File by file, in the order of their lines."""
    lines: dict[Pattern, list[LogLine]] = field(default_factory=dict)
    """Lines that match each pattern of the catalogue, also those that are in no symptom; of several close ones the
    first."""
    contexts: set[str] = field(default_factory=set)
    """The contexts of surroundings.toml that the files show."""
    doubts: list[LogLine] = field(default_factory=list)
    """The last lines of each file that have words of failure and no form that is known."""
    last: list[LogLine] = field(default_factory=list)
    """The last lines of the last file that has any, without empty ones."""
    progress: list[Progress] = field(default_factory=list)
    """Of each file."""

    def went_on_after(self, line: LogLine) -> LogLine | None:
        """Return a line that shows that the run went on after this one; None if nothing does."""
        return next(filter(None, (each.after(line) for each in self.progress)), None)

    def set_others_aside(self) -> None:
        """Take the kernel's sentences about the deaths of other programs for no failures of the run."""
        others = _deaths_of_others([each.line for each in self.symptoms])
        self.symptoms = [each for each in self.symptoms if each.line not in others]
        self.doubts += sorted(others, key=lambda line: line.number)[-LAST_LINES:]


def read_facts(files: Sequence[str]) -> LogFacts:
    """Read the files. Raise OSError."""
    facts, index, seen = LogFacts(), _index(), set[Pattern]()
    for position, file in enumerate(files):
        scanner, kept, progress = _Scanner(position), dict[tuple[Pattern, str], int](), Progress()
        last = deque[tuple[int, bytes]](maxlen=LAST_LINES)
        for number, raw in raw_lines(file):
            words = set(raw.translate(TABLE).split())
            if words:
                last.append((number, raw))
            patterns = [
                each
                for word in words & index.by_word.keys()
                for each in index.by_word[word]
                if each.words <= words and each not in seen
            ]
            may_fail = _may_fail(raw, words)
            if not WORDS_OF_PROGRESS.isdisjoint(words) and progress.may_read(raw, words):
                progress.read(_line_of(number, raw[:LONGEST_STEP], file), lambda each: _kind(each) is not None)
            if not (patterns or may_fail or scanner.awaits(number)):
                continue
            line = _line_of(number, raw, file)
            matched = frozenset(
                each for each in patterns if each.regex.search(line.whole if each in index.in_prefixes else line.text)
            )
            for pattern in matched:
                if number - kept.get((pattern, line.process), -LINES_APART) >= LINES_APART:
                    kept[pattern, line.process] = number
                    facts.lines.setdefault(pattern, []).append(line)
            seen |= matched & index.once
            if _RANKS.search(line.process):
                facts.contexts.add("engine")
            scanner.read(line, matched, may_fail)
        facts.symptoms += scanner.symptoms()
        facts.progress.append(progress)
        facts.doubts += scanner.doubts
        facts.last = [_line_of(number, raw, file) for number, raw in last] or facts.last
    shown = {
        name for name, patterns in surroundings().contexts.items() if any(each in facts.lines for each in patterns)
    }
    facts.contexts |= shown
    facts.set_others_aside()
    return facts


def _line_of(number: int, raw: bytes, file: str) -> LogLine:
    return log_line(number, raw.decode("utf-8", errors="replace"), file)


def _may_fail(raw: bytes, words: Set[bytes]) -> bool:
    """Return quickly whether a line of these words, in lower case, may look like a failure or be of a traceback."""
    is_said = not WORDS.isdisjoint(words) or b"Error" in raw or b"_ERROR_" in raw or b"Exception" in raw
    return is_said or b"[E" in raw or b'File "' in raw


@dataclass(frozen=True, slots=True)
class _Index:
    """All patterns of the catalogue, arranged for the search."""

    by_word: Mapping[bytes, Sequence[Pattern]]
    in_prefixes: Set[Pattern]  # those that prefixes may show as well
    once: Set[Pattern]  # those of which one line is enough; some of them match every line


@cache
def _index() -> _Index:
    around, entries = surroundings(), catalogue().values()
    placed = {each for entry in entries for s in entry.signatures for each in (s.pattern, s.near) if each}
    contexts = {each for patterns in around.contexts.values() for each in patterns}
    in_prefixes = contexts.union(around.other_engines, *(entry.conditions for entry in entries))
    by_word: dict[bytes, list[Pattern]] = {}
    for pattern in placed.union(in_prefixes, around.harmless, around.wrappers, around.consequences):
        by_word.setdefault(pattern.word, []).append(pattern)
    return _Index(by_word, in_prefixes, in_prefixes - placed)


@cache
def _signature_patterns() -> Set[Pattern]:
    return {signature.pattern for entry in catalogue().values() for signature in entry.signatures}


class _Scanner:
    """Collects the symptoms of one file."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._reader = TracebackReader()
        self._inside: dict[int, dict[Pattern, LogLine]] = {}  # what the lines of open tracebacks match, by id()
        self._first: dict[tuple[object, ...], Symptom] = {}
        self._last: dict[tuple[object, ...], Symptom] = {}
        self.doubts = deque[LogLine](maxlen=LAST_LINES)
        self._pending: list[Symptom] = []  # the latest ones, whose messages may go on
        self._burst = 0  # number of the first line of the latest burst of failures
        self._failed_until = -NEAR_LINES  # number of its last line

    def awaits(self, number: int) -> bool:
        """Return whether the line of this number may be of a traceback, or of an exception's message."""
        return self._reader.is_waiting or any(number <= each.ends for each in self._pending)

    def read(self, line: LogLine, matched: frozenset[Pattern], may_fail: bool) -> None:
        """Look at one line, at the patterns that match it, and at whether it has words of failure at all."""
        self._keep(before=line.number)
        ended = self._reader.read(line)
        for each in ended:
            self._add_traceback(each, line, matched)
        owner = self._reader.owner
        if owner and owner not in ended:
            place = self._inside.setdefault(id(owner), {})
            for pattern in matched:
                place.setdefault(pattern, line)
        elif not owner and matched.isdisjoint(surroundings().harmless):
            self._look(line, matched, may_fail)

    def symptoms(self) -> list[Symptom]:
        """Return them in the order of their lines, at the end of the file."""
        for ended in self._reader.close():
            self._add_traceback(ended, None, frozenset())
        self._keep()
        found: dict[LogLine, Symptom] = {}  # a line may be known as an exception's only after it was looked at
        for each in sorted((*self._first.values(), *self._last.values()), key=lambda each: each.traceback is None):
            same = found.setdefault(each.line, each)
            same.matched |= each.matched
            same.own |= each.own
        return sorted(found.values(), key=lambda each: each.line.number)

    def _look(self, line: LogLine, matched: frozenset[Pattern], may_fail: bool) -> None:
        kind = _kind(line)
        earlier = next((each for each in reversed(self._pending) if each.may_have_in_message(line)), None)
        if kind is None and earlier and not _VICTIM.search(line.text):
            for pattern in matched:
                earlier.matched.setdefault(pattern, line)
        elif kind or not matched.isdisjoint(_signature_patterns()):
            self._add(Symptom(line, kind or "line", self._file, matched=dict.fromkeys(matched, line), own=matched))
        if kind is None and may_fail and _WORDS_OF_FAILURE.search(line.text):
            self.doubts.append(line)

    def _add_traceback(self, found: Traceback, line: LogLine | None, matched: frozenset[Pattern]) -> None:
        inside = self._inside.pop(id(found), {})
        last = found.last or found.first
        own = matched if last is line else frozenset(each for each, at in inside.items() if at is last)
        opening = {each for each, at in inside.items() if at is found.first}
        if found.is_ignored or not (own | opening).isdisjoint(surroundings().harmless):
            return
        if not (found.last or found.has_header):
            self.doubts.append(replace(last, whole=f"{last.whole} ... {found.lines[-1].strip()}"))
            return
        # A stack that a program only printed, such as after a timeout, says less than the sentence that explains it.
        kind: Kind = "complaint" if not found.last else "crash" if found.is_crash else "exception"
        self._add(Symptom(last, kind, self._file, found, dict.fromkeys(own, last) | inside, own))

    def _add(self, symptom: Symptom) -> None:
        if self._pending and _is_code_of(self._pending[-1], symptom):
            symptom.matched = self._pending.pop().matched | symptom.matched
        symptom.burst = self._burst if symptom.begins - self._failed_until <= NEAR_LINES else symptom.begins
        if symptom.kind != "line":
            self._burst = symptom.burst
            self._failed_until = max(self._failed_until, symptom.line.number)
        self._pending.append(symptom)

    def _keep(self, before: int | None = None) -> None:
        """Keep the pending symptoms whose messages end before this line; all of them by default."""
        while self._pending and (before is None or self._pending[0].ends + CODE_LINES < before):
            each = self._pending.pop(0)
            text = re.sub(r"\d+", "#", each.line.text)
            if len(self._first) >= MOST_TEXTS:
                text = text.partition(":")[0]
            key = (each.burst, each.kind, text, frozenset(each.matched), frozenset(each.packages))
            self._first.setdefault(key, each)
            self._last[key] = each


def _is_code_of(earlier: Symptom, symptom: Symptom) -> bool:
    """Return whether the earlier line is the code that raised an exception, in a quotation without the frames."""
    is_bare = symptom.kind == "exception" and symptom.traceback is None
    is_code = earlier.kind == "line" and earlier.line.text[:1] in (" ", "\t")
    return is_bare and is_code and symptom.line.number - earlier.line.number <= CODE_LINES


def _kind(line: LogLine) -> Kind | None:
    """Return how a line outside of tracebacks looks; None if not like a failure."""
    if exception_name(line.text):
        return "exception"
    if _CRASH.search(line.text):
        return "crash"
    prefix = line.whole[: len(line.whole) - len(line.text)]
    if _LEVEL.search(prefix) and line.text.strip():
        return "complaint"
    may = _MAY_BE_COMPLAINT.search(line.text) and not (MILD.search(line.whole) or IS_HANDLED.search(line.text))
    return "complaint" if may or _COMPLAINT.search(line.text) or _TORCH_ERROR.search(line.whole) else None


def _deaths_of_others(lines: Sequence[LogLine]) -> set[LogLine]:
    """Return those of the lines in which the kernel speaks of another program's death.

    A process may be the run's by its name, or because a line that is not the kernel's names its pid.
    """
    victims = {line: found for line in lines if (found := _VICTIM.search(line.text))}
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
