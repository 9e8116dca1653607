"""A bisect from resolution to answer: installs in the background, one run at a time, the state saved after every verdict."""

import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.runtime import redact
from harness.tools.bisection import search
from harness.tools.bisection.answer import Answer, answer_of, next_for_cause, reference, second_cause
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.causes import module_of
from harness.tools.bisection.classify import LOG, describe_code, find_failure, is_bad, limit_of, run_once
from harness.tools.bisection.confidence import Rerun, next_rerun
from harness.tools.bisection.installation import PROBE, Environment, Provider, Unavailable
from harness.tools.bisection.question import AUTO, WrongQuestion, parse_seconds
from harness.tools.bisection.search import DECIDED, Verdict, find_edges, next_candidate
from harness.tools.bisection.state import FOLDER_MODE, Attempt, Record, State
from harness.tools.bisection.store import Unreachable
from harness.tools.process_tree import run_tree

T = TypeVar("T")
RESOLVERS, INSTALLS = 8, 2
NETWORK_WAITS = (60.0, 300.0, 900.0)
"""Before each new attempt if an index does not answer; then the bisect pauses."""
RETRY_PAUSE_SECONDS = 5.0
PROBE_SECONDS = 300.0
LEAST_LIMIT_SECONDS, LIMIT_TIMES = 600.0, 10.0
MOST_ENDS = 6
"""Candidates that are tried, from the end inwards, before an end that cannot be classified is given up."""
LINE_SECONDS = 60.0
"""Between two signs of life if there is no terminal."""


@dataclass
class Progress:
    """Standard output."""

    state: State | None = None
    started: float = field(default_factory=time.monotonic)
    _status: Any = None
    _phase: str = ""
    _phase_since: float = 0.0
    _last_line: float = 0.0
    """When a line last named the phase."""

    def __post_init__(self) -> None:
        if sys.stdout.isatty():
            from rich.console import Console

            self._status = Console().status("")
            self._status.start()

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.started:7.1f} s] {redact.text(text)}"
        if self._status:
            self._status.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def phase(self, text: str) -> None:
        if text != self._phase:
            self._phase, self._phase_since = text, time.monotonic()
            self._last_line = self._phase_since
        self.beat()

    def beat(self) -> None:
        now = time.monotonic()
        line = f"{self._phase} ({now - self._phase_since:.0f} s)"
        if self._status:
            from rich.text import Text

            self._status.update(Text(f"{line}; {describe_left(self.state)}" if self.state else line))
        elif self._phase and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self.say(line)

    def verdict(self, record: Record, candidate: Candidate) -> None:
        log = f", {record.decisive.log}" if record.decisive and record.verdict != "good" else ""
        left = f"; {describe_left(self.state)}" if self.state else ""
        self.say(
            f"{record.verdict.upper():<5} {candidate.label}: {record.reason.rstrip('.')} ({record.seconds:.1f} s{log}){left}"
        )

    def close(self) -> None:
        if self._status:
            self._status.stop()
            self._status = None


def describe_left(state: State) -> str:
    edges = find_edges(state.verdicts)
    if not edges:
        return f"{len(state.candidates) - len(state.closed)} candidates; the ends are verified first"
    left = [len(search.untested(edge, state.verdicts, state.closed_indices)) for edge in edges]
    steps = sum(map(search.steps_left, left))
    ran = [record.seconds + record.waited_seconds for record in state.records if record.attempts]
    minutes = f", about {steps * median(ran) / 60:.1f} min" if ran else ""
    return f"{sum(left)} candidates left, at most {steps} {'step' if steps == 1 else 'steps'}{minutes}"


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
    _since: float = field(default_factory=time.monotonic)
    _installs: dict[int, "Future[Environment]"] = field(default_factory=dict)
    _executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(INSTALLS, "install"))

    def run(self) -> Answer:
        """Return the answer; the state is saved whatever is raised."""
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
        ends = [index for index, _ in self._ends()]
        pool = ThreadPoolExecutor(RESOLVERS, "resolve")
        try:
            pending = {
                index: pool.submit(self._patiently, self.provider.resolve, state.candidates[index])
                for index in dict.fromkeys([*ends, *range(len(state.candidates))])
                if index not in state.verdicts
            }
            for done, (index, future) in enumerate(pending.items()):
                self.progress.phase(f"resolving: {done} of {len(pending)}")
                try:
                    self._result(future)
                    self._install_ahead([index] if index in ends else [])
                except Unavailable as problem:
                    state.closed[state.candidates[index].name] = f"cannot be installed: {problem}"
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        state.resolved, state.resolving_seconds = True, time.monotonic() - started
        self._save()
        self.progress.say(f"{len(state.closed)} of {len(state.candidates)} candidates cannot be installed")
        for name, sentence in state.closed.items():
            self.progress.say(f"  {name}: {sentence}")

    def _ends(self) -> list[tuple[int, Verdict]]:
        """Return what must be good, which a number is compared with, and then what must be bad."""
        last = len(self.state.candidates) - 1
        return [(last, "good"), (0, "bad")] if self.state.question.options.find_fix else [(0, "good"), (last, "bad")]

    def _verify_ends(self) -> None:
        middle = next_candidate(dict(self._ends()), self.state.closed_indices)
        self._install_ahead([*(index for index, _ in self._ends()), *([middle] if middle is not None else [])])
        for index, expected in self._ends():
            self._check_end(self._outermost(index), index, expected)
            if expected == "good" and self.state.question.options.timeout == AUTO and (limit := self._limit()):
                self.progress.say(f"from now on a run that takes more than {limit:.0f} s counts as hanging (--timeout)")

    def _outermost(self, end: int) -> int:
        """Test the end; if it cannot be classified here, move inwards to the first candidate that can."""
        inwards = range(end, len(self.state.candidates) - 1 - end, 1 if end == 0 else -1)
        for index in [each for each in inwards if each not in self.state.closed_indices][:MOST_ENDS]:
            if index not in self.state.verdicts:
                self._test(index)
            if self.state.verdicts.get(index, "skip") != "skip":
                return index
        return end

    def _check_end(self, index: int, asked: int, expected: Verdict) -> None:
        state, candidate, given = self.state, self.state.candidates[index], self.state.candidates[asked]
        if candidate.name in state.closed:
            raise WrongQuestion(f"the {expected} end {candidate.label} {state.closed[candidate.name]}")
        record, end = state.record(index), f"the {expected} end {candidate.label}"
        if index != asked:
            why = state.closed.get(given.name) or state.record(asked).reason
            end += f", in place of {given.label} ({why.rstrip('.')}),"
        problem = {
            "good": f"is good as well ({record.reason}), or it fails too rarely for --repeat {state.question.options.repeat}",
            "bad": f"is bad already: {record.reason}",
            "skip": f"could not be classified: {record.reason}",
            "other": f"fails, but with another failure than the one looked for: {record.reason}",
        }[record.verdict].rstrip(".")
        if record.verdict != expected:
            log = self.folder / record.attempts[-1].log if record.attempts else self.folder
            raise WrongQuestion(f"{end} {problem}; its output is in {log}.")
        if index != asked:
            self.progress.say(f"{end} is {expected}")

    def _search(self) -> None:
        while (index := next_candidate(self.state.verdicts, self.state.closed_indices)) is not None:
            self._install_ahead([index, *search.next_two(self.state.verdicts, index, self.state.closed_indices)])
            self._test(index)

    def _confirm(self) -> None:
        """With --repeat, run again what the answer rests on."""
        while (rerun := next_rerun(self.state)) is not None:
            self._run_again(rerun)
            self._search()

    def _run_again(self, rerun: Rerun) -> None:
        candidate, record = self.state.candidates[rerun.index], self.state.record(rerun.index)
        environment, failures = self._obtain(rerun.index), 0
        try:
            for _ in range(rerun.runs):
                made = self._run(rerun.index, environment, len(record.attempts) + 1)
                record.attempts.append(made)
                record.verdict, record.reason = self._combine(record.attempts)
                failures += made.verdict != "good"
                if failures == rerun.failures:
                    break
        finally:
            self._release(rerun.index, environment)
        self._save()
        self.progress.verdict(record, candidate)

    def _second_look(self) -> None:
        """Run what the bound leaves, and what --second-look adds, where nothing was run yet: another edge may be there."""
        state, count = self.state, len(self.state.candidates)
        while len(edges := find_edges(state.verdicts)) == 1:
            skips = sum(verdict not in DECIDED for verdict in state.verdicts.values())
            left = search.steps_left(count - 1) + 2 + skips + state.question.options.second_look - len(state.records)
            stretch = search.longest_unrun(count, state.verdicts, state.closed_indices, edges[0])
            if left <= 0 or not stretch:
                return
            self.progress.say(f"a second look, for another edge: {left} more")
            self._test(stretch[len(stretch) // 2])
        self._search()

    def _second_cause(self) -> None:
        """If the bad end fails otherwise than the candidate at the edge, find where its own failure begins."""
        while (cause := second_cause(self.state)) and (index := next_for_cause(self.state, cause)) is not None:
            self.progress.say(
                "the bad end fails otherwise than the candidate at the edge: looking for where that begins"
            )
            self._test(index)
            self._search()  # if it was good, there are new edges

    def _test(self, index: int) -> None:
        candidate, started = self.state.candidates[index], time.monotonic()
        try:
            environment = self._obtain(index)
            waited = time.monotonic() - started
            try:
                attempts: list[Attempt] = []
                for number in range(1, self.state.question.options.repeat + 1):
                    attempts.append(self._run(index, environment, number))
                    if attempts[-1].verdict != "good" and self.state.question.kind != "metric":
                        break
                verdict, reason = self._combine(attempts)
                record = Record(
                    name=candidate.name, verdict=verdict, reason=reason, attempts=attempts, waited_seconds=waited
                )
                record.freeze, record.python, record.paths = environment.freeze, environment.python, environment.paths
                self._probe(record, environment)
            finally:
                self._release(index, environment)
        except Unavailable as problem:
            self.state.closed[candidate.name] = str(problem)
            self._save()
            self.progress.say(f"{candidate.label}: skipped, {problem}")
            return
        self.state.records.append(record)
        self._save()
        self._drop_installs()
        self.progress.verdict(record, candidate)

    def _run(self, index: int, environment: Environment, number: int) -> Attempt:
        """Return one run that counts: again, if its supervisor was killed or the machine may be at fault."""
        made = self._run_once(index, environment, number)
        if made.may_pass:
            self.progress.say(f"{self.state.candidates[index].label}: once more, as this may pass: {made.reason}")
            time.sleep(RETRY_PAUSE_SECONDS)
            made = self._run_once(index, environment, number)
        return made

    def _run_once(self, index: int, environment: Environment, number: int) -> Attempt:
        candidate = self.state.candidates[index]
        runs = self.folder / "runs" / candidate.name
        folder = runs / str(sum(1 for _ in runs.glob("*")) + 1)  # what a killed run left is kept beside it
        if number == 1:
            self.progress.say(f"{candidate.label}: running; its output is in {folder / LOG}")
        self.progress.phase(f"{candidate.label}: run {number}")
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
            bad = is_bad(options, middle, limit_of(options, question.ratio, reference(self.state)))
            return "bad" if bad else "good", f"{options.metric} = {middle:.6g}, the median of {len(numbers)} runs"
        failed = [attempt for attempt in attempts if attempt.verdict == "bad"]
        chosen = next((each for each in [*failed, *attempts] if each.verdict != "good"), attempts[0])
        share = f" ({len(failed)} of {len(attempts)} runs bad)" if options.repeat > 1 else ""
        return chosen.verdict, chosen.reason + share

    def _probe(self, record: Record, environment: Environment) -> None:
        """Raise Unavailable if it failed without a sign that the package can be imported, and cannot."""
        made, options = record.decisive, self.state.question.options
        failed = record.verdict in ("bad", "other") and made and not made.imported and made.value is None
        if not failed or options.probe == "none":
            return
        probe = [PROBE, canonicalize_name(options.package), module_of(options.package)]
        log = self.folder / "probes" / f"{record.name}.log"
        log.parent.mkdir(FOLDER_MODE, exist_ok=True)
        with log.open("wb") as output:
            ended = run_tree(
                [environment.python, "-c", *(probe if options.probe == AUTO else [options.probe])],
                output=output,
                env=environment.variables(self.no_gpu),
                cwd="/",
                timeout=PROBE_SECONDS,
                inherit=(self.lock,),
                tick=self.progress.beat,
            )
        if ended.code or ended.timed_out:
            reason = find_failure(log, log.parent / "none", ended.code).text or describe_code(ended.code)
            raise Unavailable(f"cannot run here, the probe fails: {reason} (--probe none goes without)")

    def _save(self) -> None:
        now = time.monotonic()
        self.state.wall_seconds += now - self._since
        self._since = now
        self.state.save(self.folder)

    # Environments: made in the background of runs, released when no run can need them.

    def _install_ahead(self, indices: Iterable[int]) -> None:
        """Begin to make what is run next; not while a run is measured."""
        for index in indices if self.state.question.kind != "metric" else ():
            if index not in self.state.closed_indices and index not in self.state.verdicts:
                self._install(index)

    def _install(self, index: int) -> "Future[Environment]":
        if index not in self._installs:
            candidate = self.state.candidates[index]
            self._installs[index] = self._executor.submit(self._patiently, self._make, candidate)
        return self._installs[index]

    def _make(self, candidate: Candidate) -> Environment:
        """Return the candidate's environment, on a thread of the executor. Raises Unavailable, Pause."""
        options = self.state.question.options
        try:
            environment = self.provider.make(candidate)
            seen = environment.freeze.get(canonicalize_name(options.package), "")
            if (
                not options.git
                and (seen or not options.environments)
                and Version(seen or "0") != Version(candidate.name)
            ):
                raise Unavailable(f"its environment has {options.package} {seen} (PYTHONPATH may hide it).")
        except Unavailable as problem:
            raise Unavailable(f"cannot be installed: {problem}") from problem
        return environment

    def _patiently(self, ask: Callable[[Candidate], T], candidate: Candidate) -> T:
        """Ask on a thread; while an index cannot be reached again, each time after a longer wait."""
        for pause in NETWORK_WAITS:
            try:
                return ask(candidate)
            except Unreachable as problem:
                self.progress.say(f"{candidate.label}: {problem} Trying again in {pause:.0f} s")
                time.sleep(pause)
        return ask(candidate)

    def _obtain(self, index: int) -> Environment:
        self.progress.phase(f"{self.state.candidates[index].label}: its environment")
        return self._result(self._install(index))

    def _release(self, index: int, environment: Environment) -> None:
        self._installs.pop(index, None)
        self.provider.release(environment)

    def _drop_installs(self) -> None:
        """Let go of environments that no run can need any more."""
        wanted = {0, len(self.state.candidates) - 1}
        for edge in find_edges(self.state.verdicts):
            wanted |= set(search.untested(edge, self.state.verdicts, self.state.closed_indices))
        for index in self._installs.keys() - wanted if len(self.state.records) > 1 else ():
            future = self._installs[index]
            if future.cancel():
                del self._installs[index]
            elif future.done() and not future.exception():
                self._release(index, future.result())

    def _result(self, future: "Future[T]") -> T:
        """Wait until it has ended, and keep the table alive meanwhile."""
        while wait([future], timeout=0.5).not_done:
            self.progress.beat()
        return future.result()
