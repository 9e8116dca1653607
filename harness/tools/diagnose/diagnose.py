"""Which known failure a log shows, offline: the line that is the best candidate for the cause, not the loudest one.

Every symptom of the log (symptoms.py) is a candidate, known to the catalogue or not. The best one is a fault that the
run was told to have ("deliberate"), and then, in this order:
1. an error that the catalogue knows for sure, the earliest of several; then one that looks like an entry;
2. an exception or a crash that nobody knows: then the answer is "unknown"; or a sentence that means the same in every
   program, in a log that shows no more than that: then the earlier of the two;
3. a line that the catalogue knows and that is no error by itself, such as a warning or a report of how a process ended;
4. a consequence, such as a lost connection: what caused it is not in the log, or not known;
5. an exception that is usually a consequence, such as a refused connection, or an error line, that nobody knows:
   "unknown" as well.

What was survived is no candidate: a failure that the catalogue knows does not count if an unknown exception of rank 2
ended the log more than NEAR_LINES after the last failure of its burst, or after steps that went well. It is then only
"seen as well". A failure after which steps went well, or the run ended well, comes after those without.

A failure is known if an error of its context that only this failure prints ("cause") shows it, or one that it usually
prints ("likely") together with everything that the entry's conditions ask for. Otherwise it is unknown, and only looks like
an entry: from a traceback without any frame of SGLang or of a trainer; by a line that is no error; by a consequence; by a
sentence outside of its entry's context; and after an unknown exception, which may have led to it.

An entry counts only in its context: the log must show SGLang, or a trainer, as the entry asks; a traceback with frames
of another engine is out of context. A sentence of which the name is true in every program ("elsewhere", or an entry
without a context) counts outside of it as well. An entry does not count where a line speaks against it ("excludes").
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from harness.tools.diagnose.entries import OF_SGLANG, CatalogueEntry, Pattern, Role, Signature, catalogue, surroundings
from harness.tools.diagnose.log_lines import is_of_a_run
from harness.tools.diagnose.progress import has_zone, seconds_of
from harness.tools.diagnose.symptoms import IS_HANDLED, LAST_LINES, MILD, NEAR_LINES, LogFacts, Symptom, read_facts
from harness.tools.diagnose.tracebacks import Frame, LogLine

Verdict = Literal["known", "unknown", "no failure"]

OF_A_RUN = ("engine", "rl", "trainer", "rollout", "harness")
"""The contexts of a run of this harness, whose logs need not show them."""
DELIBERATE, KNOWN, LOOKS_LIKE, UNKNOWN_ERROR, NO_ERROR, CONSEQUENCE = range(6)
"""Ranks of candidates, the best first; UNKNOWN_ERROR is that of exceptions and crashes that the catalogue does not
know, and of sentences outside of their entry's context."""
_WORDS_OF_FAILURE = re.compile(
    r"error|fail|exception|fatal|assert|abort|refus|invalid|unable|cannot|can't|timed? ?out|not found|denied|exceed|no such"
    r"|died|unsafe|must|missing|not supported|disabled|unbalanced|mismatch|undefined|blocked",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class CatalogueMatch:
    """An entry that the log shows."""

    entry: CatalogueEntry
    is_known: bool
    """Whether it is the failure for sure; otherwise the failure only looks like it."""
    evidence: tuple[tuple[Signature, LogLine], ...]
    """The lines that show it, each once; the one that names it comes first."""

    @property
    def line(self) -> LogLine:
        return self.evidence[0][1]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What some logs show."""

    verdict: Verdict
    finding: CatalogueMatch | None
    """The entry that it is, or that it looks like."""
    others: tuple[CatalogueMatch, ...]
    """Other known failures that they show, causes before consequences."""
    suspicious: LogLine | None
    """The first line that looks like a failure and is not known; with a finding only if it stands before that."""
    calls: tuple[Frame, ...] = ()
    """Those of the traceback whose exception is suspicious, if the failure is unknown."""
    ending: LogLine | None = None
    """The last failure, unless a line above says the same."""
    doubts: tuple[LogLine, ...] = ()
    """If nothing was recognized as a failure, the last lines that have words of it."""
    last: tuple[LogLine, ...] = ()
    """If nothing was recognized as a failure, the last lines of all."""
    went_on: LogLine | None = None
    """What shows that the run went on after the failure; None if nothing does."""


def diagnose(files: Sequence[str], contexts: Collection[str] = ()) -> Diagnosis:
    """Read the files, in the order in which a cause is looked for. Raise OSError.

    contexts: names of surroundings.toml that are known without the files.
    """
    facts = read_facts(files)
    shown = facts.contexts | {*contexts, *(OF_A_RUN if any(map(is_of_a_run, files)) else ())}
    if "engine" not in shown and any(each in facts.lines for each in surroundings().other_engines):
        shown.discard("rollout")
    elif "trainer" in shown:
        shown.add(OF_SGLANG)
    facts.contexts = shown
    return _Ranking(facts).diagnosis()


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A symptom that an entry of the catalogue explains."""

    entry: CatalogueEntry
    symptom: Symptom
    signature: Signature
    line: LogLine
    is_known: bool
    rank: int
    is_outside: bool
    """Whether it counts for its sentence alone, since nothing shows the entry's context."""


class _Ranking:
    """Ranks everything that may be the cause."""

    def __init__(self, facts: LogFacts) -> None:
        self.facts = facts
        self.key = _order([*(symptom.line for symptom in facts.symptoms), *facts.doubts])
        self.by_pattern: dict[Pattern, list[Symptom]] = {}
        for symptom in facts.symptoms:
            for pattern in symptom.matched:
                self.by_pattern.setdefault(pattern, []).append(symptom)
        self.failures = [each for each in facts.symptoms if each.kind != "line"]
        found = [candidate for entry in catalogue().values() for candidate in self._candidates(entry)]
        explained = {each.signature.pattern for each in found}
        self.unknown = [
            each
            for each in self.failures
            if each.own.isdisjoint(surroundings().wrappers) and explained.isdisjoint(each.matched)
        ]
        self.errors = [
            each for each in self.unknown if each.is_error and each.own.isdisjoint(surroundings().consequences)
        ]
        self.candidates: dict[str, _Candidate] = {}  # the best one of each entry, the best of all first
        for each in sorted(found, key=self._badness):
            self.candidates.setdefault(each.entry.slug, each)

    def diagnosis(self) -> Diagnosis:
        error = self._first([each for each in self.errors if not self._ran_on(each)]) or self._first(self.errors)
        best = next(iter(self.candidates.values()), None)
        if best and not self._was_survived(best) and (error is None or self._is_better(best, error)):
            return self._diagnosed(best, error)
        first = error or self._first(self.unknown) or self._first(self.failures)
        others = self._others(None)
        if first is None:
            return Diagnosis("no failure", None, others, None, doubts=self._doubts(), last=tuple(self.facts.last))
        went_on = self.facts.went_on_after(first.line)
        calls = tuple(first.traceback.frames) if first.traceback else ()
        return Diagnosis("unknown", None, others, first.line, calls, self._ending([first.line]), went_on=went_on)

    def _badness(self, candidate: _Candidate) -> tuple[Any, ...]:
        """Return a sort key. Of one line, the entry whose context the log shows comes before the general one."""
        survived = self._was_survived(candidate), self._ran_on(candidate.symptom)
        return *survived, candidate.rank, self.key(candidate.line), candidate.is_outside

    def _is_better(self, candidate: _Candidate, error: Symptom) -> bool:
        """Return whether the candidate, and not an unknown exception, is the likelier cause."""
        is_earlier = candidate.rank == UNKNOWN_ERROR and self.key(candidate.line) < self.key(error.line)
        return candidate.rank < UNKNOWN_ERROR or is_earlier

    def _doubts(self) -> tuple[LogLine, ...]:
        """Return the lines that may tell of a failure: those with words of it, and what other programs' failures
        print.
        """
        telling = {
            s.pattern for entry in catalogue().values() for s in entry.signatures if s.role in ("cause", "likely")
        }
        known = [each.line for each in self.facts.symptoms if not telling.isdisjoint(each.own)]
        return tuple(sorted({*self.facts.doubts, *known[-LAST_LINES:]}, key=self.key))

    def _diagnosed(self, chosen: _Candidate, error: Symptom | None) -> Diagnosis:
        is_known = chosen.is_known and not any(self._led_to(each, chosen) for each in self.errors)
        match = self._match(chosen, is_known)
        suspicious = self._before(chosen, error)
        shown = [line for _, line in match.evidence] + ([suspicious] if suspicious else [])
        others, ending = self._others(chosen), self._ending(shown)
        went_on = self.facts.went_on_after(chosen.line)
        verdict: Verdict = "known" if is_known else "unknown"
        return Diagnosis(verdict, match, others, suspicious, ending=ending, went_on=went_on)

    def _before(self, chosen: _Candidate, error: Symptom | None) -> LogLine | None:
        """Return an unknown line before the candidate that may have caused it: of a consequence, any error line."""
        lines = [each for each in self.unknown if each.is_error or each.traceback is None]
        first = self._first(lines) if chosen.entry.consequence else error
        return first.line if first and self._is_before(first.line, chosen.line) else None

    def _is_before(self, line: LogLine, other: LogLine) -> bool:
        """Return whether a line stands before the other, and is not later by its own clock: some logs begin with the
        end.
        """
        stamp, others = seconds_of(line), seconds_of(other)
        is_later = stamp is not None and others is not None and stamp > others
        return self.key(line) < self.key(other) and not is_later

    def _others(self, chosen: _Candidate | None) -> tuple[CatalogueMatch, ...]:
        others = [each for each in self.candidates.values() if chosen is None or each.line != chosen.line]
        others.sort(key=lambda each: (each.entry.consequence, self.key(each.line)))
        return tuple(self._match(each, is_known=False) for each in others)

    def _candidates(self, entry: CatalogueEntry) -> Iterator[_Candidate]:
        """Yield all symptoms that the entry explains, unless a line speaks against it."""
        if any(each.role == "excludes" and self._lines(entry, each) for each in entry.signatures):
            return
        for signature in entry.signatures:
            if signature.role in ("cause", "likely"):
                for symptom, line in self._lines(entry, signature):
                    yield self._candidate(entry, signature, symptom, line)

    def _candidate(self, entry: CatalogueEntry, signature: Signature, symptom: Symptom, line: LogLine) -> _Candidate:
        is_mild = _is_mild(signature, symptom, line)
        is_report = line is symptom.line and not symptom.own.isdisjoint(surroundings().wrappers)
        is_outside = not signature.anywhere and not self._is_in_context(entry, signature, symptom)
        is_strange = is_outside or (not signature.anywhere and _is_of_strangers(entry, symptom))
        has_all = bool(entry.conditions) and all(pattern in self.facts.lines for pattern in entry.conditions)
        is_known = not (entry.consequence or is_mild or is_strange) and (signature.role == "cause" or has_all)
        if entry.deliberate:
            rank = DELIBERATE
        elif entry.consequence:
            rank = CONSEQUENCE
        elif is_mild or (signature.role == "likely" and (is_report or not symptom.is_error)):
            rank = NO_ERROR
        elif is_outside:
            rank = UNKNOWN_ERROR
        else:
            rank = KNOWN if is_known else LOOKS_LIKE
        return _Candidate(entry, symptom, signature, line, is_known, rank, is_outside)

    def _lines(self, entry: CatalogueEntry, signature: Signature) -> list[tuple[Symptom, LogLine]]:
        """Return the symptoms with a line that shows the signature, in the entry's context if that matters."""
        return [
            (symptom, line)
            for symptom in self.by_pattern.get(signature.pattern, ())
            if (line := symptom.matched[signature.pattern])
            and (signature.near is None or self._is_near(symptom, line, signature.near))
            and self._counts(entry, signature, symptom, line)
        ]

    def _counts(self, entry: CatalogueEntry, signature: Signature, symptom: Symptom, line: LogLine) -> bool:
        """Return whether the line may name the entry: in its context, or where its name is true in every program."""
        if signature.anywhere or self._is_in_context(entry, signature, symptom):
            return True
        is_handled = not symptom.is_error and IS_HANDLED.search(line.text)
        return bool(signature.elsewhere or not entry.context) and not is_handled

    def _is_near(self, symptom: Symptom, line: LogLine, near: Pattern) -> bool:
        """Return whether the pattern is in the same traceback, or, if there is none, not far from the line."""
        if symptom.has_whole_traceback:
            return near in symptom.matched
        lines = [each for each in self.facts.lines.get(near, ()) if each.file == line.file]
        for other in lines[bisect_left(lines, line.number - NEAR_LINES, key=lambda each: each.number) :]:
            if other.number > line.number + NEAR_LINES:
                break
            if line.process.startswith(other.process) or other.process.startswith(line.process):
                return True
        return False

    def _is_in_context(self, entry: CatalogueEntry, signature: Signature, symptom: Symptom) -> bool:
        packages = symptom.packages
        if signature.role == "likely" and _is_of_strangers(entry, symptom):
            return False
        if "sglang" in packages and {"engine", OF_SGLANG} & set(entry.context):
            return True
        if packages & set(surroundings().other_engine_packages):
            return "distributed" in entry.context
        return not self.facts.contexts.isdisjoint(entry.context)

    def _match(self, candidate: _Candidate, is_known: bool) -> CatalogueMatch:
        """Return the entry with the first line of each of its signatures, the candidate's own before all."""
        entry, shown = candidate.entry, {candidate.line: candidate.signature}
        for signature in sorted(entry.signatures, key=lambda each: get_args(Role).index(each.role)):
            lines = [line for _, line in self._lines(entry, signature)]
            first = min(lines, key=self.key, default=None)
            if first and first.text not in {each.text for each in shown}:
                shown[first] = signature
        evidence = tuple((signature, line) for line, signature in shown.items())
        return CatalogueMatch(entry, is_known, evidence)

    def _was_survived(self, candidate: _Candidate) -> bool:
        """Return whether an unknown exception ended the file, long after it or after steps that went well.

        A fault that was asked for may come long after the line that asks for it.
        """
        ran_on = self._ran_on(candidate.symptom)
        return not candidate.entry.deliberate and any(
            each.file == candidate.symptom.file
            and (each.burst - candidate.line.number > NEAR_LINES or (ran_on and not self._ran_on(each)))
            for each in self.errors
        )

    def _ran_on(self, symptom: Symptom) -> bool:
        """Return whether it looks like a failure, and the run went on after it."""
        return symptom.kind != "line" and self.facts.went_on_after(symptom.line) is not None

    def _led_to(self, unknown: Symptom, candidate: _Candidate) -> bool:
        """Return whether an unknown exception came before it, in the same burst of failures."""
        own, line = candidate.symptom, candidate.line
        is_before = unknown.file == own.file and own.burst <= unknown.line.number < line.number
        return is_before and unknown is not own

    def _first(self, symptoms: Iterable[Symptom]) -> Symptom | None:
        return min(symptoms, key=lambda each: self.key(each.line), default=None)

    def _ending(self, shown: Sequence[LogLine]) -> LogLine | None:
        """Return the last exception or crash, else the last error line, unless it is shown already.

        One that only reports another failure counts if there is no other.
        """
        own = [each for each in self.failures if each.own.isdisjoint(surroundings().wrappers)]
        worse = [each for each in own if each.is_error]
        last = next((some[-1] for some in (worse, own, self.failures) if some), None)
        if last is None or any(last.has(line) or line.text == last.line.text for line in shown):
            return None
        return last.line


def _is_mild(signature: Signature, symptom: Symptom, line: LogLine) -> bool:
    """Return whether the line does not say that anything failed: a warning, or no complaint at all."""
    if symptom.is_error and (symptom.packages or line is symptom.line):
        return False
    complains = signature.role == "cause" or _WORDS_OF_FAILURE.search(line.text)
    return bool(MILD.search(line.whole)) or not complains


def _is_of_strangers(entry: CatalogueEntry, symptom: Symptom) -> bool:
    """Return whether it is a traceback in which neither an engine nor a trainer has a frame."""
    if not symptom.has_whole_traceback or "distributed" in entry.context:
        return False
    return not symptom.packages & {"sglang", "harness", *surroundings().trainer_packages}


def _order(lines: Sequence[LogLine]) -> Callable[[LogLine], tuple[float, int, int]]:
    """Return a sort key: time if all lines have one, else file and line; within a file always the line."""
    files = {file: index for index, file in enumerate(dict.fromkeys(line.file for line in lines))}
    has_clock = len(files) > 1 and all(seconds_of(line) is not None for line in lines)
    has_clock &= len(set(map(has_zone, lines))) == 1  # or nobody knows which of two stamps is earlier
    return lambda line: (seconds_of(line) or 0.0 if has_clock else 0.0, files[line.file], line.number)
