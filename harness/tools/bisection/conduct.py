"""The bisect from first resolution to answer: installs in the background, one run at a time, state after every verdict."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from harness.tools.bisection import judge, measure, measured, search
from harness.tools.bisection.answer import Answer, answer_of, next_for_cause, second_cause
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.confidence import Again, next_again
from harness.tools.bisection.environment import Environment, Provider
from harness.tools.bisection.patience import Patience
from harness.tools.bisection.prepare import Preparation
from harness.tools.bisection.question import WrongQuestion
from harness.tools.bisection.search import Verdict
from harness.tools.bisection.show import Show
from harness.tools.bisection.state import Attempt, Record, State
from harness.tools.bisection.store import Pause, Unreachable
from harness.tools.bisection.uv import Unavailable

RESOLVERS = 8
RETRIES, RETRY_PAUSE_SECONDS = 2, 5.0
SHOWS = 0.95
LEAST_LIMIT_SECONDS, LIMIT_TIMES = 600.0, 10.0
MOST_MOVES = 5
"""Runs that end in a skip before an end is given up."""


@dataclass
class Conductor:
    """Runs what is left of a bisect."""

    state: State
    folder: Path
    provider: Provider
    show: Show
    lock: int
    """Descriptor of the folder's lock, which whatever runs for it holds too."""
    no_gpu: bool
    _preparation: Preparation = field(init=False)
    _patience: Patience = field(init=False)
    _since: float = 0.0
    _verifying: Verdict | None = None
    """The end that is being verified."""

    def run(self) -> Answer:
        """Raises WrongQuestion, Pause, judge.Stop, OSError, KeyboardInterrupt; the state is saved whatever is raised."""
        self._since = time.monotonic()
        self._patience = Patience(self.state.question.network_waits, self.show)
        self._preparation = Preparation(
            self.state, self.folder, self.provider, self.show, self.lock, self.no_gpu, self._patience
        )
        try:
            self._resolve()
            self._verify_ends()
            self._search()
            self._confirm()
            self._second_look()
            self._second_cause()
            self._confirm()
            return answer_of(self.state)
        finally:
            self._save()
            self._preparation.close()

    def _resolve(self) -> None:
        """Whether each candidate can be installed, before anything runs; the ends are installed meanwhile."""
        state, started = self.state, time.monotonic()
        ends = [each for each, _ in self._ends()]
        others = [index for index in range(len(state.candidates)) if index not in ends]
        todo = [i for i in (*ends, *others) if i not in state.closed_indices and i not in state.verdicts]
        if state.resolved:
            return
        while unreached := self._resolve_these(todo, ends):
            if len(unreached) < len(todo):
                self._patience.restart()
            self._patience.wait(next(iter(unreached.values())))
            todo = list(unreached)
        self._patience.restart()
        state.resolved = True
        state.resolving_seconds = time.monotonic() - started
        self._save()
        closed = len(state.closed)
        which = f"{closed} of which cannot be installed:" if closed else "all of which can be installed"
        self.show.say(f"{len(state.candidates)} candidates, {which}")
        for name, sentence in state.closed.items():
            self.show.say(f"  {name}: {sentence}")

    def _resolve_these(self, todo: list[int], ends: list[int]) -> dict[int, Unreachable]:
        """Return those for which no index answered."""
        unreached = {}
        pool = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolve")
        pending = {i: pool.submit(self.provider.resolve, self.state.candidates[i]) for i in todo}
        try:
            for done, (index, future) in enumerate(pending.items()):
                self.show.phase(f"resolving: {done} of {len(pending)}")
                try:
                    self._wait(future)
                    self._preparation.begin([index] if index in ends else [])
                except Unavailable as problem:
                    self._close(index, f"cannot be installed: {problem}")
                except Unreachable as problem:
                    unreached[index] = problem
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return unreached

    def _verify_ends(self) -> None:
        """The good end first, which a number is compared with."""
        order = self._ends()
        for index, expected in order:
            others = [each for each, _ in order if each not in self.state.verdicts]
            middle = search.next_candidate({order[0][0]: "good", order[1][0]: "bad"}, self.state.closed_indices)
            self._preparation.begin([index, *others, *([middle] if middle is not None else [])])
            self._verifying = expected
            self._check_end(self._outermost(index), index, expected)
            if expected == "good" and not self.state.question.has_own_timeout and (limit := self._limit()):
                self.show.say(f"from now on a run that takes more than {limit:.0f} s counts as hanging (--timeout)")
        self._verifying = None

    def _outermost(self, end: int) -> int:
        """Judge the end; where it cannot be judged here, the next ones inwards, for what lies beyond has no say then."""
        step = 1 if end == 0 else -1
        moved = 0
        for index in range(end, len(self.state.candidates) - 1 - end, step):
            if index not in self.state.verdicts and index not in self.state.closed_indices:
                self._test(index)
            if index in self.state.closed_indices:
                continue
            if self.state.verdicts[index] != "skip" or moved == MOST_MOVES:
                return index
            moved += 1
        return end

    def _ends(self) -> list[tuple[int, Verdict]]:
        """What must be good, and then what must be bad."""
        last = len(self.state.candidates) - 1
        return [(last, "good"), (0, "bad")] if self.state.question.options.find_fix else [(0, "good"), (last, "bad")]

    def _check_end(self, index: int, asked: int, expected: Verdict) -> None:
        """asked: the end as it was given; index: the one that is judged in its place."""
        candidate, given = self.state.candidates[index], self.state.candidates[asked]
        if candidate.name in self.state.closed:
            raise WrongQuestion(f"the {expected} end {candidate.shown} {self.state.closed[candidate.name]}")
        record = self.state.record(index)
        if record.verdict == expected:
            if index != asked:
                self.show.say(
                    f"the {expected} end {given.shown} cannot be judged here: {candidate.shown} takes its place"
                )
            return
        log = self.folder / record.attempts[-1].log if record.attempts else self.folder
        said = {
            "good": f"is good as well ({record.reason}){self._too_rare()}",
            "bad": f"is bad already: {record.reason}",
            "skip": f"could not be judged: {record.reason}",
            "other": f"fails, but with another failure than the one looked for: {record.reason}",
        }[record.verdict]
        place = ""
        if index != asked:
            why = self.state.closed.get(given.name) or self.state.record(asked).reason
            place = f", in place of {given.shown} ({why.rstrip('.')}),"
        raise WrongQuestion(f"the {expected} end {candidate.shown}{place} {said.rstrip('.')}; its output is in {log}.")

    def _too_rare(self) -> str:
        """Why a bad end may be good."""
        repeat = self.state.question.options.repeat
        if self.state.question.kind == "metric":
            return ""
        shows = 1 - (1 - SHOWS) ** (1 / repeat)
        return (
            f", or it fails too rarely for --repeat {repeat}, which with {SHOWS:.0%} shows only what fails in {shows:.0%} of its"
            " runs or more"
        )

    def _search(self) -> None:
        while (index := search.next_candidate(self.state.verdicts, self.state.closed_indices)) is not None:
            self._preparation.begin([index, *search.next_two(self.state.verdicts, index, self.state.closed_indices)])
            self._test(index)

    def _confirm(self) -> None:
        """With --repeat: run again what the answer rests on."""
        while (again := next_again(self.state)) is not None:
            self._run_again(again)
            self._search()

    def _run_again(self, again: Again) -> None:
        candidate, record = self.state.candidates[again.index], self.state.record(again.index)
        self.show.table(self.state, f"{candidate.shown}: its environment")
        failures = 0
        try:
            environment = self._preparation.obtain(again.index)
        except Unavailable as problem:
            raise Pause(f"{candidate.shown} cannot be run again: {problem}") from problem
        try:
            for _ in range(again.runs):
                made = self._once(candidate, environment, f", once more, run {len(record.attempts) + 1}")
                record.attempts.append(made)
                record.verdict, record.reason = self._together(record.attempts)
                failures += made.verdict != "good"
                if failures == again.failures:
                    break
        finally:
            self._preparation.release(again.index, environment)
        self._save()
        self.show.verdict(record, candidate, self._steps())

    def _second_look(self) -> None:
        """Run what the bound leaves, and what --second-look adds, where nothing was run yet: another edge may be there."""
        extra = self.state.question.options.second_look
        edges = search.edges(self.state.verdicts)
        while len(edges) == 1:
            skips = sum(verdict not in search.DECIDED for verdict in self.state.verdicts.values())
            left = search.most_runs(len(self.state.candidates), skips) + extra - len(self.state.records)
            found = search.stretches(
                len(self.state.candidates), self.state.verdicts, self.state.closed_indices, edges[0]
            )
            if left <= 0 or not found:
                return
            self.show.say(f"a second look, for another edge: {left} more")
            self._test(found[0][len(found[0]) // 2])
            edges = search.edges(self.state.verdicts)
        self._search()

    def _second_cause(self) -> None:
        """Where the bad end fails otherwise than the candidate at the edge, find where its own failure begins."""
        said = False
        while cause := second_cause(self.state):
            if (index := next_for_cause(self.state, cause)) is None:
                return
            if not said:
                self.show.say(
                    "the bad end fails otherwise than the candidate at the edge: looking for where that begins"
                )
            said = True
            self._test(index)
            self._search()  # where it was good, there are new edges

    def _test(self, index: int) -> None:
        """Give the candidate a verdict, or close it."""
        candidate = self.state.candidates[index]
        waited = time.monotonic()
        try:
            self.show.table(self.state, f"{candidate.shown}: its environment")
            environment = self._preparation.obtain(index)
        except Unavailable as problem:
            return self._cannot_run(index, str(problem))
        seconds = time.monotonic() - waited
        try:
            record = self._judged(index, environment)
            obstacle = self._preparation.probe(index, environment) if self._may_not_import(record) else ""
        finally:
            self._preparation.release(index, environment)
        if obstacle:
            return self._cannot_run(index, obstacle)
        record.waited_seconds = seconds
        self.state.records.append(record)
        self._save()
        self._preparation.drop()
        self.show.verdict(record, candidate, self._steps())

    def _judged(self, index: int, environment: Environment) -> Record:
        candidate, question = self.state.candidates[index], self.state.question
        attempts: list[Attempt] = []
        for number in range(1, question.options.repeat + 1):
            again = f", run {number} of {question.options.repeat}" if question.options.repeat > 1 else ""
            made = self._once(candidate, environment, again)
            attempts.append(made)
            decided = made.verdict != "good" and question.kind != "metric"
            if decided and not (
                self._verifying == "bad" and made.verdict == "bad"
            ):  # the bad end tells how often it fails
                break
        verdict, reason = self._together(attempts)
        return Record(
            name=candidate.name,
            verdict=verdict,
            reason=reason,
            attempts=attempts,
            freeze=environment.freeze,
            python=environment.python,
            paths=environment.paths,
        )

    def _once(self, candidate: Candidate, environment: Environment, again: str) -> Attempt:
        """One run that counts."""
        made = self._attempt(candidate, environment, again)
        if made.unwatched:
            self.show.say(f"{candidate.shown}: once more, as the process that watches it was killed")
            made = self._attempt(candidate, environment, again)
        for _ in range(RETRIES):
            if not judge.may_pass(made):
                break
            self.show.say(f"{candidate.shown}: once more, as this may be the machine's: {made.failure}")
            time.sleep(RETRY_PAUSE_SECONDS)
            made = self._attempt(candidate, environment, again)
        return made

    def _attempt(self, candidate: Candidate, environment: Environment, again: str) -> Attempt:
        folder = self._attempt_folder(candidate.name)
        if not again or again.startswith(", run 1 of"):
            self.show.start(f"{candidate.shown}: running; its output is in {folder / judge.LOG}")
        made = judge.attempt(
            self.state.question,
            environment,
            folder,
            no_gpu=self.no_gpu,
            variables={"BISECT_PACKAGE": self.state.question.options.package, "BISECT_CANDIDATE": candidate.name},
            lock=self.lock,
            reference=measured.reference(self.state),
            limit=self._limit(),
            beat=self._beating(f"{candidate.shown}: running{again}"),
        )
        made.log = str(Path(made.log).relative_to(self.folder))
        return made

    def _limit(self) -> float:
        """Of a run, in seconds; 0 for none. What hangs is the commonest failure, and must not stop a night."""
        question, good = self.state.question, self.state.end("good")
        if question.has_own_timeout:
            return question.timeout
        if good is None or self.state.verdicts[good] != "good" or not (ran := self.state.record(good).attempts):
            return 0.0
        return max(LEAST_LIMIT_SECONDS, LIMIT_TIMES * max(attempt.seconds for attempt in ran))

    def _together(self, attempts: list[Attempt]) -> tuple[Verdict, str]:
        """A bad run makes it bad; of a number the runs' median is judged."""
        question = self.state.question
        numbers = [attempt.value for attempt in attempts if attempt.value is not None]
        if question.kind == "metric" and len(numbers) == len(attempts) > 1:
            middle = median(numbers)
            is_bad = measure.is_bad(question.options, middle, question.ratio, measured.reference(self.state))
            return (
                "bad" if is_bad else "good",
                f"{question.options.metric} = {middle:.6g}, the median of {len(numbers)} runs",
            )
        failed = [attempt for attempt in attempts if attempt.verdict == "bad"]
        chosen = next(iter(failed), None) or next((each for each in attempts if each.verdict != "good"), attempts[0])
        reason = chosen.reason
        if question.options.repeat > 1:
            reason += f" ({len(failed)} of {len(attempts)} runs bad)"
        return chosen.verdict, reason

    def _may_not_import(self, record: Record) -> bool:
        """Whether it failed without a sign that the package could be imported at all."""
        decisive = record.decisive
        failed = record.verdict in ("bad", "other") and decisive is not None
        return failed and decisive is not None and not decisive.imported and decisive.value is None

    def _cannot_run(self, index: int, problem: str) -> None:
        self._close(index, problem)
        self.show.say(f"{self.state.candidates[index].shown}: skipped, {problem}")
        self._save()

    def _wait(self, future: "Future[None]") -> None:
        """Until it has ended, the table kept alive meanwhile."""
        while True:
            try:
                return future.result(timeout=0.5)
            except NotYet:
                self.show.beat()

    def _close(self, index: int, sentence: str) -> None:
        self.state.closed[self.state.candidates[index].name] = sentence

    def _attempt_folder(self, name: str) -> Path:
        """A new one: what a killed run left is kept beside it."""
        runs = self.folder / "runs" / name
        number = sum(1 for _ in runs.glob("*")) + 1 if runs.exists() else 1
        return runs / str(number)

    def _beating(self, phase: str) -> Callable[[], None]:
        self.show.table(self.state, phase)
        return self.show.beat

    def _steps(self) -> int | None:
        """In the worst case; None until both ends are known."""
        edges = search.edges(self.state.verdicts)
        if not edges:
            return None
        return sum(
            search.steps_left(len(search.unknown(e, self.state.verdicts, self.state.closed_indices))) for e in edges
        )

    def _save(self) -> None:
        now = time.monotonic()
        self.state.wall_seconds += now - self._since
        self._since = now
        self.state.save(self.folder)
