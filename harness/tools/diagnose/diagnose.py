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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from harness.tools.diagnose.entries import (
    OF_SGLANG,
    TABLE,
    CatalogueEntry,
    Pattern,
    Signature,
    catalogue,
    surroundings,
)
from harness.tools.diagnose.log_lines import LogLine, is_of_a_run, parse_line, raw_lines
from harness.tools.diagnose.scanner import (
    FailureScanner,
    LoggedFailure,
    is_complaint,
    is_warning,
    may_fail,
    same_process,
)

Confidence = Literal["high", "medium", "low"]
LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")

NEAR_LINES = 200
HEADLINE_LINES = 3
KEPT_MATCHES = 100  # of one pattern in one file; the earliest ones decide

OF_A_RUN = ("engine", "rl", "trainer", "rollout", "harness")
"""The contexts of a run of this harness, which its logs need not show."""
_RANKS = re.compile(r"(?:^| )(?:TP|DP|PP|EP)\d+(?: |$)")  # in the prefix of SGLang's schedulers

Matches = dict[Pattern, list[LogLine]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that matched a signature."""

    line: LogLine
    role: str
    pattern: Pattern


@dataclass(frozen=True, slots=True)
class CatalogueMatch:
    """An entry that the log shows."""

    entry: CatalogueEntry
    confidence: Confidence
    evidence: tuple[Evidence, ...]  # the first line of each signature; the one that names the failure comes first
    is_mild: bool = False  # whether the line that names it is a warning, or no complaint at all

    @property
    def line(self) -> LogLine:
        return self.evidence[0].line


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What some logs show."""

    verdict: Literal["diagnosed", "unknown", "no failure"]
    finding: CatalogueMatch | None
    others: tuple[CatalogueMatch, ...]  # other known failures that it shows, causes before consequences
    suspicious: LogLine | None
    """The first line that looks like a failure and is not known; with a finding only if it stands before that."""
    ending: LogLine | None = None  # the last failure that the log shows, unless a line above says the same


def diagnose(files: Sequence[str], contexts: Collection[str] = ()) -> Diagnosis:
    """Read the files, in the order in which a cause is looked for; contexts are known without them. Raise OSError."""
    by_word = {word: list(patterns) for word, patterns in _by_word().items()}
    anywhere, once = _seen_anywhere(), _seen_anywhere() - _placed()
    known = set(by_word)
    matches: Matches = {}
    failures: list[LoggedFailure] = []
    has_ranks = False
    for index, file in enumerate(files):
        scanner = FailureScanner()
        kept: dict[Pattern, int] = {}
        for number, raw in raw_lines(file):
            words = raw.translate(TABLE).split()
            is_suspicious = may_fail(raw, words)
            if not is_suspicious and known.isdisjoint(words) and not scanner.awaits(number):
                continue
            present = set(words)
            patterns = [pattern for word in present & known for pattern in by_word[word] if pattern.words <= present]
            if not patterns and not is_suspicious and not scanner.awaits(number):
                continue
            line = parse_line(file, index, number, raw)
            has_ranks = has_ranks or bool(_RANKS.search(line.source))
            found = frozenset(
                pattern
                for pattern in patterns
                if pattern.regex.search(line.whole if pattern in anywhere else line.text)
            )
            for pattern in found:
                kept[pattern] = kept.get(pattern, 0) + 1
                if kept[pattern] <= KEPT_MATCHES:
                    matches.setdefault(pattern, []).append(line)
            for pattern in found & once:  # once is enough, and some stand in every line
                by_word[pattern.word].remove(pattern)
                if not by_word[pattern.word]:
                    known.remove(pattern.word)
            scanner.look(line, found)
        failures += scanner.failures()
    given = {*contexts, *(OF_A_RUN if any(map(is_of_a_run, files)) else ()), *(("engine",) if has_ranks else ())}
    return _Log(matches, failures, frozenset(_shown_contexts(matches) | given)).diagnosis()


def _shown_contexts(matches: Matches) -> set[str]:
    around = surroundings()
    shown = {name for name, patterns in around.contexts.items() if any(each in matches for each in patterns)}
    if "engine" not in shown and any(each in matches for each in around.other_engines):
        return shown - {"rollout"}
    return shown | ({OF_SGLANG} if "trainer" in shown else set())


@cache
def _by_word() -> Mapping[bytes, Sequence[Pattern]]:
    around = surroundings()
    made: dict[bytes, list[Pattern]] = {}
    for pattern in dict.fromkeys([*_placed(), *_seen_anywhere(), *around.harmless, *around.wrappers]):
        made.setdefault(pattern.word, []).append(pattern)
    return made


@cache
def _placed() -> frozenset[Pattern]:
    """Return the patterns for which it matters in which lines they stand."""
    signatures = [signature for entry in catalogue().values() for signature in entry.signatures]
    return frozenset(pattern for signature in signatures for pattern in (signature.pattern, signature.near) if pattern)


@cache
def _seen_anywhere() -> frozenset[Pattern]:
    """Return the patterns for which it matters whether the log has them, in prefixes too."""
    around = surroundings()
    contexts = {pattern for context in around.contexts.values() for pattern in context}
    conditions = {pattern for entry in catalogue().values() for pattern in entry.conditions or ()}
    return frozenset(contexts | conditions | set(around.other_engines))


@dataclass(frozen=True, slots=True)
class _Log:
    """What was found in the files."""

    matches: Matches
    failures: Sequence[LoggedFailure]  # file by file, in the order of their lines
    contexts: frozenset[str]  # names of surroundings.toml that it shows, or that are known without it

    def diagnosis(self) -> Diagnosis:
        findings = [finding for entry in catalogue().values() if (finding := self._finding(entry))]
        found = self._weighed(findings)
        shown = [found.suspicious, *([each.line for each in found.finding.evidence] if found.finding else [])]
        ending = self._ending()
        if ending is None or any(line and (ending.has(line) or line.text == ending.line.text) for line in shown):
            return found
        return replace(found, ending=ending.line)

    def _weighed(self, findings: list[CatalogueMatch]) -> Diagnosis:
        around = surroundings()
        explained = {each.pattern for finding in findings for each in finding.evidence if each.role != "hint"}
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
        inside = self._inside(finding.line)
        led = any(
            self._is_followed(each.line, finding.line) and not _is_headline(each.line, finding.line)
            for each in exceptions
            if each is not inside
        )
        return replace(finding, confidence="low") if led else finding

    def _other_end(self, finding: CatalogueMatch, exceptions: Sequence[LoggedFailure]) -> bool:
        """Return whether an unknown exception ended what the finding did not."""
        line, inside = finding.line, self._inside(finding.line)
        after = [each.line for each in exceptions if each.line.index == line.index and each is not inside]
        if finding.is_mild or (finding.evidence[0].role == "likely" and not inside):
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
        around = surroundings()
        real = [each for each in self.failures if each.own.isdisjoint(around.harmless)]
        own = [each for each in real if each.own.isdisjoint(around.wrappers)]
        worse = [each for each in own if each.kind != "complaint"]
        return next((some[-1] for some in (worse, own, real) if some), None)

    def _finding(self, entry: CatalogueEntry) -> CatalogueMatch | None:
        """Return the entry, if the log shows it."""
        first = {
            signature: line for signature in entry.signatures if (line := self._first_match(signature, entry.context))
        }
        roles = {signature.role for signature in first}
        if "excludes" in roles or not roles & {"cause", "likely"}:
            return None
        key, ranks = _order(list(first.values())), {"cause": 0, "likely": 1, "hint": 4}

        def rank(item: tuple[Signature, LogLine]) -> tuple[int, object]:
            signature, line = item
            mild = signature.role != "hint" and self._is_mild(line, signature.role)
            return ranks[signature.role] + 2 * mild, key(line)

        found = sorted(first.items(), key=rank)
        evidence = tuple(Evidence(line, signature.role, signature.pattern) for signature, line in found)
        names, line = found[0]
        return CatalogueMatch(entry, self._confidence(entry, names, line), evidence, self._is_mild(line, names.role))

    def _confidence(self, entry: CatalogueEntry, names: Signature, line: LogLine) -> Confidence:
        if entry.consequence or self._is_mild(line, names.role):
            return "low"
        if not names.anywhere and self._is_of_strangers(line, entry.context):
            return "low"
        has_all = all(pattern in self.matches for pattern in entry.conditions or ())
        if names.role == "cause":
            return "high" if entry.conditions is not None and has_all else "medium"
        return "medium" if entry.conditions and has_all else "low"

    def _first_match(self, signature: Signature, context: Sequence[str]) -> LogLine | None:
        if not (lines := self.matches.get(signature.pattern)):
            return None
        near = self.matches.get(signature.near, []) if signature.near else None
        harmless = {line for pattern in surroundings().harmless for line in self.matches.get(pattern, [])}
        for line in lines:
            if line in harmless or (near is not None and not any(self._is_near(line, other) for other in near)):
                continue
            strangers = signature.role == "likely" and self._is_of_strangers(line, context)
            if signature.anywhere or (self._in_context(line, context) and not strangers):
                return line
        return None

    def _is_near(self, line: LogLine, other: LogLine) -> bool:
        """Return whether they are of one traceback, or, if the line has none of its own, not far apart."""
        if line.index != other.index or not same_process(line, other):
            return False
        inside = self._inside(line)
        if inside and inside.has_header and inside.packages:
            return inside.begins <= other.number <= inside.ends
        return abs(line.number - other.number) <= NEAR_LINES

    def _inside(self, line: LogLine) -> LoggedFailure | None:
        """Return the exception or crash to which the line belongs."""
        around = [each for each in self.failures if each.kind != "complaint" and each.has(line)]
        return next((each for each in around if each.line.number == line.number), around[0] if around else None)

    def _is_mild(self, line: LogLine, role: str) -> bool:
        inside = self._inside(line)
        if inside and (inside.packages or inside.line.number == line.number):
            return False
        return is_warning(line) or (role != "cause" and not is_complaint(line))

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
