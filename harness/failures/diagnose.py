"""Which known failure a log shows, offline: the first cause, not the loudest line.

Confidence of an entry whose context the log shows, and against which no line speaks ("excludes"):
- high: a "cause" line.
- medium: a "likely" line and another one that is likely or a hint.
- low: a "likely" line alone. Hints alone name nothing.
A consequence is at most low, and is named only where the log has neither a cause nor an exception that nobody knows. One
level less where such an exception stands before the cause. Of several causes the earliest in time wins (in order of
lines, where the files have no clock in common); one of low confidence only where there is no other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.failures.entries import Entry, Signature, catalogue, surroundings
from harness.failures.log_lines import Line, raw_lines, read
from harness.failures.patterns import TABLE, Pattern
from harness.failures.suspicion import PARTS, WORDS, Suspicion

Confidence = Literal["high", "medium", "low"]
LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")
Verdict = Literal["diagnosed", "unknown", "no failure"]

NEAR_LINES = 200
HEADLINE_LINES = 3
KEPT = 100
"""Matches of one pattern in one file that are kept; the earliest ones decide."""

Matches = dict[Pattern, list[Line]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that matched a signature."""

    line: Line
    role: str


@dataclass(frozen=True, slots=True)
class Finding:
    """An entry that the log shows."""

    entry: Entry
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    """The first line of each signature; the one that names the failure comes first."""

    @property
    def line(self) -> Line:
        """Where it shows first."""
        return self.evidence[0].line


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What some logs show."""

    verdict: Verdict
    finding: Finding | None
    others: tuple[Finding, ...]
    """Other known failures that it shows, causes before consequences."""
    suspicious: Line | None
    """The first line that looks like a failure and that nothing known explains; with a finding only where it stands before it."""


def diagnose(files: Sequence[str]) -> Diagnosis:
    """Read the files, in the order in which a cause is looked for. Raises OSError."""
    by_word: dict[bytes, list[Pattern]] = {}
    for pattern in _patterns():
        by_word.setdefault(pattern.word, []).append(pattern)
    contexts = {pattern for each in surroundings().contexts.values() for pattern in each}
    known = set(by_word)
    matches: Matches = {}
    suspicions = []
    for index, file in enumerate(files):
        suspicion = Suspicion()
        kept: dict[Pattern, int] = {}
        for number, raw in raw_lines(file):
            words = raw.translate(TABLE).split()
            is_suspicious = not WORDS.isdisjoint(words) or any(part in raw for part in PARTS)
            if not is_suspicious and known.isdisjoint(words) and not suspicion.awaits(number):
                continue
            present = set(words)
            patterns = [pattern for word in present & known for pattern in by_word[word] if pattern.words <= present]
            if not patterns and not is_suspicious and not suspicion.awaits(number):
                continue
            line = read(file, index, number, raw)
            found = frozenset(
                pattern
                for pattern in patterns
                if pattern.regex.search(line.whole if pattern in contexts else line.text)
            )
            for pattern in found:
                kept[pattern] = kept.get(pattern, 0) + 1
                if kept[pattern] <= KEPT:
                    matches.setdefault(pattern, []).append(line)
            for pattern in found & contexts:  # once is enough, and some stand in every line
                by_word[pattern.word].remove(pattern)
                if not by_word[pattern.word]:
                    known.remove(pattern.word)
            suspicion.look(line, found)
        suspicions.append(suspicion)
    return _diagnosis(matches, suspicions)


def _patterns() -> Iterable[Pattern]:
    """All that are looked for, each once."""
    around = surroundings()
    signatures = [signature for entry in catalogue().values() for signature in entry.signatures]
    patterns = [
        *(pattern for signature in signatures for pattern in _of(signature)),
        *(pattern for context in around.contexts.values() for pattern in context),
        *around.harmless,
        *around.wrappers,
    ]
    return dict.fromkeys(patterns)


def _of(signature: Signature) -> list[Pattern]:
    return [signature.pattern, *([signature.near] if signature.near else [])]


def _diagnosis(matches: Matches, suspicions: Sequence[Suspicion]) -> Diagnosis:
    findings = [finding for entry in catalogue().values() if (finding := _finding(entry, matches))]
    explained = {pattern for each in findings for signature in each.entry.signatures for pattern in _of(signature)}
    explained |= set(surroundings().harmless)
    wrappers = [line for each in suspicions if (line := each.first_exception(explained))]
    explained |= set(surroundings().wrappers)
    exceptions = [line for each in suspicions if (line := each.first_exception(explained))]
    complaints = [line for each in suspicions if (line := each.first_complaint(explained))]
    key = _order([each.line for each in findings] + exceptions)
    findings.sort(key=lambda each: (each.entry.consequence, key(each.line), -LEVELS.index(each.confidence)))
    causes = [each for each in findings if not each.entry.consequence]
    exception = min(exceptions, key=key, default=None)
    if causes:
        chosen = next((each for each in causes if each.confidence != "low"), causes[0])
    elif findings and not exception:
        chosen = findings[0]
    else:
        suspicious = exception or _earliest(complaints) or _earliest(wrappers)
        return Diagnosis("unknown" if suspicious else "no failure", None, tuple(findings), suspicious)
    others = tuple(each for each in findings if each is not chosen)
    if exception is None or key(exception) > key(chosen.line) or _is_headline(exception, chosen.line):
        return Diagnosis("diagnosed", chosen, others, None)
    lowered = LEVELS[max(0, LEVELS.index(chosen.confidence) - 1)]
    return Diagnosis("diagnosed", replace(chosen, confidence=lowered), others, exception)


def _earliest(lines: Sequence[Line]) -> Line | None:
    return min(lines, key=_order(lines), default=None)


def _order(lines: Sequence[Line]) -> Callable[[Line], tuple[float, int, int]]:
    """By time where all have one, else by file and line; within a file always by line."""
    has_clock = len({line.index for line in lines}) > 1 and all(line.time is not None for line in lines)

    def key(line: Line) -> tuple[float, int, int]:
        return (line.time if has_clock and line.time is not None else 0.0, line.index, line.number)

    return key


def _is_headline(exception: Line, line: Line) -> bool:
    """Whether the line is the message of that exception, whose own line has none."""
    apart = line.number - exception.number
    return exception.text.endswith("Error:") and line.index == exception.index and apart <= HEADLINE_LINES


def _finding(entry: Entry, matches: Matches) -> Finding | None:
    """The entry, if the log shows it."""
    contexts = [pattern for name in entry.context for pattern in surroundings().contexts[name]]
    in_context = not contexts or any(pattern in matches for pattern in contexts)
    first = {
        signature: line
        for signature in entry.signatures
        if (in_context or signature.anywhere) and (line := _first_match(signature, matches))
    }
    roles = [signature.role for signature in first]
    places = {line.place for line in first.values()}
    if "excludes" in roles or not {"cause", "likely"} & set(roles):
        return None
    confidence: Confidence = "high" if "cause" in roles else "medium" if len(places) > 1 else "low"
    if entry.consequence:
        confidence = "low"
    names = "cause" if "cause" in roles else "likely"
    key = _order(list(first.values()))
    evidence = sorted(first.items(), key=lambda item: (item[0].role != names, key(item[1])))
    return Finding(entry, confidence, tuple(Evidence(line, signature.role) for signature, line in evidence))


def _first_match(signature: Signature, matches: Matches) -> Line | None:
    lines = matches.get(signature.pattern, [])
    near = matches.get(signature.near, []) if signature.near else None
    return next((line for line in lines if near is None or any(_is_near(line, other) for other in near)), None)


def _is_near(line: Line, other: Line) -> bool:
    # A prefix may be missing on some lines of a process: SGLang's stands on the first of a traceback only.
    same_process = line.source.startswith(other.source) or other.source.startswith(line.source)
    return line.index == other.index and same_process and abs(line.number - other.number) <= NEAR_LINES
