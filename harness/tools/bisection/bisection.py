"""A bisect from resolution to answer: installs in the background, one run at a time, the state saved after every verdict."""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

from harness.tools.bisection.answer import Answer, answer_of, next_for_cause, second_cause
from harness.tools.bisection.classify import LOG, describe_code, find_failure, may_pass, run_once
from harness.tools.bisection.confidence import Rerun, next_rerun
from harness.tools.bisection.installation import Environment, Provider, Unavailable, name_of
from harness.tools.bisection.measurement import is_bad, reference
from harness.tools.bisection.progress import Progress
from harness.tools.bisection.question import AUTO, WrongQuestion, parse_seconds
from harness.tools.bisection.search import (
    DECIDED,
    Verdict,
    find_edges,
    most_runs,
    next_candidate,
    next_two,
    steps_left,
    unrun_stretches,
    untested,
)
from harness.tools.bisection.state import FOLDER_MODE, Attempt, Record, State
from harness.tools.bisection.store import Pause, Unreachable
from harness.tools.process_tree import run_tree

T = TypeVar("T")
RESOLVERS = 8
RETRIES, RETRY_PAUSE_SECONDS = 2, 5.0
SHOWS = 0.95
PROBE_SECONDS = 300.0
LEAST_LIMIT_SECONDS, LIMIT_TIMES = 600.0, 10.0
MOST_MOVES = 5
"""Runs that end in a skip before an end is given up."""


@dataclass
class Bisection:
    """Runs what is left of a bisect."""

    state: State
    folder: Path
    provider: Provider
    progress: Progress
    lock: int
    """Descriptor of the folder's lock, which all that runs for the bisect inherits."""
    no_gpu: bool
    _since: float = 0.0
    _waits_used: int = 0
    _verifying: Verdict | None = None
    """The end that is being verified."""
    _installs: dict[int, "Future[Environment]"] = field(default_factory=dict)
    _executor: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(max(1, self.state.question.options.installs), thread_name_prefix="install")

    def run(self) -> Answer:
        """Return the answer; the state is saved whatever is raised.

        Raises WrongQuestion, Pause, StopRequested, SupervisorKilled, OSError, KeyboardInterrupt.
        """
        self._since = time.monotonic()
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
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _resolve(self) -> None:
        """Find out whether each candidate can be installed, before anything runs; the ends are installed meanwhile."""
        state, started = self.state, time.monotonic()
        if state.resolved:
            return
        order = dict.fromkeys([*(each for each, _ in self._ends()), *range(len(state.candidates))])
        todo = [index for index in order if index not in state.closed_indices and index not in state.verdicts]
        while unreached := self._resolve_these(todo):
            if len(unreached) < len(todo):
                self._waits_used = 0
            self._wait_for_network(next(iter(unreached.values())))
            todo = list(unreached)
        self._waits_used = 0
        state.resolved = True
        state.resolving_seconds = time.monotonic() - started
        self._save()
        closed = len(state.closed)
        which = f"{closed} of which cannot be installed:" if closed else "all of which can be installed"
        self.progress.say(f"{len(state.candidates)} candidates, {which}")
        for name, sentence in state.closed.items():
            self.progress.say(f"  {name}: {sentence}")

    def _resolve_these(self, todo: list[int]) -> dict[int, Unreachable]:
        unreached = {}
        ends = [index for index, _ in self._ends()]
        pool = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolve")
        pending = {i: pool.submit(self.provider.resolve, self.state.candidates[i]) for i in todo}
        try:
            for done, (index, future) in enumerate(pending.items()):
                self.progress.phase(f"resolving: {done} of {len(pending)}")
                try:
                    self._result(future)
                    self._install_ahead([index] if index in ends else [])
                except Unavailable as problem:
                    self.state.closed[self.state.candidates[index].name] = f"cannot be installed: {problem}"
                except Unreachable as problem:
                    unreached[index] = problem
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return unreached

    def _ends(self) -> list[tuple[int, Verdict]]:
        """Return what must be good, which a number is compared with, and then what must be bad."""
        last = len(self.state.candidates) - 1
        return [(last, "good"), (0, "bad")] if self.state.question.options.find_fix else [(0, "good"), (last, "bad")]

    def _verify_ends(self) -> None:
        order = self._ends()
        middle = next_candidate(dict(order), self.state.closed_indices)
        for index, expected in order:
            others = [each for each, _ in order if each not in self.state.verdicts]
            self._install_ahead([index, *others, *([middle] if middle is not None else [])])
            self._verifying = expected
            self._check_end(self._outermost(index), index, expected)
            if expected == "good" and self.state.question.options.timeout == AUTO and (limit := self._limit()):
                self.progress.say(f"from now on a run that takes more than {limit:.0f} s counts as hanging (--timeout)")
        self._verifying = None

    def _outermost(self, end: int) -> int:
        """Test the end; if it cannot be classified here, move inwards to the first candidate that can."""
        moved = 0
        for index in range(end, len(self.state.candidates) - 1 - end, 1 if end == 0 else -1):
            if index not in self.state.verdicts and index not in self.state.closed_indices:
                self._test(index)
            if index in self.state.closed_indices:
                continue
            if self.state.verdicts[index] != "skip" or moved == MOST_MOVES:
                return index
            moved += 1
        return end

    def _check_end(self, index: int, asked: int, expected: Verdict) -> None:
        """Check the verdict of an end. asked: the end as it was given; index: the one that is tested in its place."""
        state, candidate, given = self.state, self.state.candidates[index], self.state.candidates[asked]
        if candidate.name in state.closed:
            raise WrongQuestion(f"the {expected} end {candidate.label} {state.closed[candidate.name]}")
        record = state.record(index)
        if record.verdict == expected:
            if index != asked:
                self.progress.say(
                    f"the {expected} end {given.label} cannot be classified here: {candidate.label} takes its place"
                )
            return
        repeat, too_rarely = state.question.options.repeat, ""
        if state.question.kind != "metric":
            shown = 1 - (1 - SHOWS) ** (1 / repeat)
            too_rarely = (
                f", or it fails too rarely for --repeat {repeat}, which with {SHOWS:.0%} shows only what fails in {shown:.0%} of"
                " its runs or more"
            )
        problem = {
            "good": f"is good as well ({record.reason}){too_rarely}",
            "bad": f"is bad already: {record.reason}",
            "skip": f"could not be classified: {record.reason}",
            "other": f"fails, but with another failure than the one looked for: {record.reason}",
        }[record.verdict].rstrip(".")
        place = ""
        if index != asked:
            why = state.closed.get(given.name) or state.record(asked).reason
            place = f", in place of {given.label} ({why.rstrip('.')}),"
        log = self.folder / record.attempts[-1].log if record.attempts else self.folder
        raise WrongQuestion(f"the {expected} end {candidate.label}{place} {problem}; its output is in {log}.")

    def _search(self) -> None:
        while (index := next_candidate(self.state.verdicts, self.state.closed_indices)) is not None:
            self._install_ahead([index, *next_two(self.state.verdicts, index, self.state.closed_indices)])
            self._test(index)

    def _confirm(self) -> None:
        """With --repeat, run again what the answer rests on."""
        while (rerun := next_rerun(self.state)) is not None:
            self._run_again(rerun)
            self._search()

    def _run_again(self, rerun: Rerun) -> None:
        candidate, record = self.state.candidates[rerun.index], self.state.record(rerun.index)
        try:
            environment = self._obtain(rerun.index)
        except Unavailable as problem:
            raise Pause(f"{candidate.label} cannot be run again: {problem}") from problem
        failures = 0
        try:
            for _ in range(rerun.runs):
                made = self._run(rerun.index, environment, f", once more, run {len(record.attempts) + 1}")
                record.attempts.append(made)
                record.verdict, record.reason = self._combine(record.attempts)
                failures += made.verdict != "good"
                if failures == rerun.failures:
                    break
        finally:
            self._release(rerun.index, environment)
        self._save()
        self.progress.verdict(record, candidate, self._steps())

    def _second_look(self) -> None:
        """Run what the bound leaves, and what --second-look adds, where nothing was run yet: another edge may be there."""
        state = self.state
        count = len(state.candidates)
        while len(edges := find_edges(state.verdicts)) == 1:
            skips = sum(verdict not in DECIDED for verdict in state.verdicts.values())
            left = most_runs(count, skips) + state.question.options.second_look - len(state.records)
            found = unrun_stretches(count, state.verdicts, state.closed_indices, edges[0])
            if left <= 0 or not found:
                return
            self.progress.say(f"a second look, for another edge: {left} more")
            self._test(found[0][len(found[0]) // 2])
        self._search()

    def _second_cause(self) -> None:
        """If the bad end fails otherwise than the candidate at the edge, find where its own failure begins."""
        announced = False
        while cause := second_cause(self.state):
            if (index := next_for_cause(self.state, cause)) is None:
                return
            if not announced:
                self.progress.say(
                    "the bad end fails otherwise than the candidate at the edge: looking for where that begins"
                )
            announced = True
            self._test(index)
            self._search()  # if it was good, there are new edges

    def _test(self, index: int) -> None:
        """Give the candidate a verdict, or close it."""
        candidate = self.state.candidates[index]
        started = time.monotonic()
        try:
            environment = self._obtain(index)
            waited = time.monotonic() - started
            try:
                record = self._classified(index, environment)
                self._probe(record, environment)
            finally:
                self._release(index, environment)
        except Unavailable as problem:
            self.state.closed[candidate.name] = str(problem)
            self.progress.say(f"{candidate.label}: skipped, {problem}")
            self._save()
            return
        record.waited_seconds = waited
        self.state.records.append(record)
        self._save()
        self._drop_installs()
        self.progress.verdict(record, candidate, self._steps())

    def _classified(self, index: int, environment: Environment) -> Record:
        question, attempts = self.state.question, []
        repeat = question.options.repeat
        for number in range(1, repeat + 1):
            made = self._run(index, environment, f", run {number} of {repeat}" if repeat > 1 else "")
            attempts.append(made)
            for_its_rate = self._verifying == "bad" and made.verdict == "bad"
            if made.verdict != "good" and question.kind != "metric" and not for_its_rate:
                break
        verdict, reason = self._combine(attempts)
        return Record(
            name=self.state.candidates[index].name,
            verdict=verdict,
            reason=reason,
            attempts=attempts,
            freeze=environment.freeze,
            python=environment.python,
            paths=environment.paths,
        )

    def _run(self, index: int, environment: Environment, which: str) -> Attempt:
        """Return one run that counts: again, if the supervisor was killed or the machine may be at fault."""
        label = self.state.candidates[index].label
        made = self._run_once(index, environment, which)
        if made.unwatched:
            self.progress.say(f"{label}: once more, as the process that watches it was killed")
            made = self._run_once(index, environment, which)
        for _ in range(RETRIES):
            if not may_pass(made):
                break
            self.progress.say(f"{label}: once more, as this may be the machine's: {made.failure}")
            time.sleep(RETRY_PAUSE_SECONDS)
            made = self._run_once(index, environment, which)
        return made

    def _run_once(self, index: int, environment: Environment, which: str) -> Attempt:
        candidate = self.state.candidates[index]
        runs = self.folder / "runs" / candidate.name
        folder = runs / str(sum(1 for _ in runs.glob("*")) + 1)  # what a killed run left is kept beside it
        if not which or which.startswith(", run 1 of"):
            self.progress.start(f"{candidate.label}: running; its output is in {folder / LOG}")
        self.progress.phase(f"{candidate.label}: running{which}")
        made = run_once(
            self.state.question,
            environment,
            folder,
            no_gpu=self.no_gpu,
            lock=self.lock,
            candidate=candidate.name,
            reference=reference(self.state),
            limit=self._limit(),
            beat=self.progress.beat,
        )
        made.log = str(Path(made.log).relative_to(self.folder))
        return made

    def _limit(self) -> float:
        """Return that of a run, in seconds; 0 for none. Hangs are the commonest failure, and must not stop a night."""
        given, good = self.state.question.options.timeout, self.state.end("good")
        if given != AUTO:
            return parse_seconds(given)
        if good is None or self.state.verdicts[good] != "good" or not (ran := self.state.record(good).attempts):
            return 0.0
        return max(LEAST_LIMIT_SECONDS, LIMIT_TIMES * max(attempt.seconds for attempt in ran))

    def _combine(self, attempts: list[Attempt]) -> tuple[Verdict, str]:
        """Return the verdict of several runs: bad if one is; for a number their median's."""
        question, options = self.state.question, self.state.question.options
        numbers = [attempt.value for attempt in attempts if attempt.value is not None]
        if question.kind == "metric" and len(numbers) == len(attempts) > 1:
            middle = median(numbers)
            verdict: Verdict = "bad" if is_bad(options, middle, question.ratio, reference(self.state)) else "good"
            return verdict, f"{options.metric} = {middle:.6g}, the median of {len(numbers)} runs"
        failed = [attempt for attempt in attempts if attempt.verdict == "bad"]
        chosen = next((each for each in [*failed, *attempts] if each.verdict != "good"), attempts[0])
        share = f" ({len(failed)} of {len(attempts)} runs bad)" if options.repeat > 1 else ""
        return chosen.verdict, chosen.reason + share

    def _probe(self, record: Record, environment: Environment) -> None:
        """Raise Unavailable if it failed without a sign that the package can be imported, and cannot. Raises Pause."""
        made, options = record.decisive, self.state.question.options
        if record.verdict not in ("bad", "other") or made is None or made.imported or made.value is not None:
            return
        command = environment.probe(options.probe, options.package)
        if not command:
            return
        log = self.folder / "probes" / f"{record.name}.log"
        log.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        try:
            with log.open("wb") as output:
                ended = run_tree(
                    command,
                    output=output,
                    env=environment.variables(self.no_gpu),
                    cwd="/",
                    timeout=PROBE_SECONDS,
                    inherit=(self.lock,),
                    tick=self.progress.beat,
                )
        except OSError as error:
            raise Pause(f"the probe of {record.name} could not be run: {error}.") from error
        if ended.code or ended.timed_out:
            reason = find_failure(log, log.parent / "none", ended.code).text or describe_code(ended.code)
            raise Unavailable(f"cannot run here, the probe fails: {reason} (--probe none goes without)")

    def _steps(self) -> int | None:
        """Return the steps left in the worst case; None until both ends are known."""
        verdicts, closed = self.state.verdicts, self.state.closed_indices
        edges = find_edges(verdicts)
        return sum(steps_left(len(untested(edge, verdicts, closed))) for edge in edges) if edges else None

    def _save(self) -> None:
        now = time.monotonic()
        self.state.wall_seconds += now - self._since
        self._since = now
        self.state.save(self.folder)

    # Environments: made in the background of runs, released when no run can need them.

    def _install_ahead(self, indices: Iterable[int]) -> None:
        """Begin to make what is run next; not while a run is measured."""
        if self.state.question.installs_in_background:
            for index in indices:
                if index not in self.state.closed_indices and index not in self.state.verdicts:
                    self._install(index)

    def _install(self, index: int) -> "Future[Environment]":
        if index not in self._installs:
            self._installs[index] = self._executor.submit(self._make, index)
        return self._installs[index]

    def _make(self, index: int) -> Environment:
        """Return the candidate's environment, on a thread of the executor. Raises Unavailable, Pause."""
        candidate, options = self.state.candidates[index], self.state.question.options
        try:
            environment = self.provider.make(candidate)
            if not options.git and (not options.environments or name_of(options.package) in environment.freeze):
                environment.check_version(options.package, candidate.name)
        except Unavailable as problem:
            raise Unavailable(f"cannot be installed: {problem}") from problem
        self.state.installs[candidate.name] = environment.installed_seconds
        return environment

    def _obtain(self, index: int) -> Environment:
        """Return its environment, made now if it is not yet. Raises Unavailable, Pause."""
        self.progress.phase(f"{self.state.candidates[index].label}: its environment")
        while True:
            try:
                environment = self._result(self._install(index))
                self._waits_used = 0
                return environment
            except Unreachable as problem:
                del self._installs[index]
                self._wait_for_network(problem)

    def _release(self, index: int, environment: Environment) -> None:
        self._installs.pop(index, None)
        self.provider.release(environment)

    def _drop_installs(self) -> None:
        """Let go of environments that no run can need any more."""
        wanted = {0, len(self.state.candidates) - 1}
        for edge in find_edges(self.state.verdicts):
            wanted |= set(untested(edge, self.state.verdicts, self.state.closed_indices))
        for index, future in list(self._installs.items()):
            if index in wanted or len(self.state.records) <= 1:
                continue
            if future.cancel():
                del self._installs[index]
            elif future.done() and not future.exception():
                self._release(index, future.result())

    def _result(self, future: "Future[T]") -> T:
        """Wait until it has ended, and keep the table alive meanwhile."""
        while wait([future], timeout=0.5).not_done:
            self.progress.beat()
        return future.result()

    def _wait_for_network(self, problem: Unreachable) -> None:
        """Wait before what failed is tried again, longer each time in a row; raise the problem after the last time."""
        waits = self.state.question.network_waits
        if self._waits_used == len(waits):
            raise problem
        pause = waits[self._waits_used]
        self._waits_used += 1
        self.progress.say(f"{problem} Trying again in {pause:.0f} s ({self._waits_used} of {len(waits)} attempts)")
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            self.progress.beat()
            time.sleep(min(0.5, left))
