"""A bisect from its ends to its answer: one install and one run at a time, with the state saved after every run."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.runtime import redact
from harness.tools.bisection.answer import Answer, answer_of, edge_to_confirm, next_for_cause
from harness.tools.bisection.candidates import Candidate, CannotRevert, is_build_of
from harness.tools.bisection.classify import LOG, Run, import_failure, run_once
from harness.tools.bisection.confidence import Rerun, last_good, next_rerun
from harness.tools.bisection.imported import AnotherWouldRun, check_command
from harness.tools.bisection.installation import Commits, Environment, Provider, Unavailable
from harness.tools.bisection.question import AUTO, Pause, WrongQuestion, parse_seconds
from harness.tools.bisection.search import Edge, Verdict, find_edges, next_candidate, untested
from harness.tools.bisection.state import Attempt, Confirmation, Record, State

LEAST_LIMIT_SECONDS, LIMIT_TIMES = 600.0, 10.0
LINE_SECONDS = 60.0
"""Between two signs of life while a candidate is installed or runs."""


@dataclass
class Progress:
    """Prints what happens, with the time since the start."""

    started: float = field(default_factory=time.monotonic)
    _doing: str = ""
    _since: float = 0.0
    _last_line: float = 0.0

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:7.1f} s] {redact.text(text)}", flush=True)
        self._last_line = time.monotonic()

    def begin(self, doing: str) -> None:
        """Name what beat() reports on from now on."""
        self._doing, self._since = doing, time.monotonic()

    def beat(self) -> None:
        """Give a sign of life if nothing was printed for a while."""
        now = time.monotonic()
        if now - max(self._last_line, self._since) >= LINE_SECONDS:
            self.say(f"{self._doing} ({now - self._since:.0f} s so far)")


def describe_left(state: State) -> str:
    """Return how much is left to do."""
    edges = find_edges(state.verdicts)
    if not edges:
        return f"{len(state.candidates)} candidates; the two ends are verified first"
    left = [len(untested(edge, state.verdicts)) for edge in edges]
    steps = sum(count.bit_length() for count in left)
    ran = [record.seconds for record in state.records if record.attempts]
    if not steps:
        return "no candidates left"
    minutes = f", about {steps * median(ran) / 60:.0f} min" if ran and steps * median(ran) > 30 else ""
    return f"{sum(left)} candidate{'s' * (sum(left) > 1)} left, at most {steps} step{'s' * (steps > 1)}{minutes}"


def _is_version(seen: str, wanted: str) -> bool:
    """Return whether an installed version is the one wanted; metadata may hold anything, such as "unknown"."""
    try:
        return is_build_of(Version(seen), Version(wanted))
    except InvalidVersion:
        return False


@dataclass
class Bisection:
    """Runs the rest of a bisect: all of a new one, or what a resumed one still needs."""

    state: State
    folder: Path
    provider: Provider
    progress: Progress
    lock: int
    """Descriptor of the folder's lock; see Run.lock."""
    no_gpu: bool
    _since: float = field(default_factory=time.monotonic)

    def run(self) -> Answer:
        """Return the answer; the state is saved whatever is raised. Raises WrongQuestion, Pause, OSError."""
        state = self.state
        try:
            self._verify_ends()
            while True:
                if (index := next_candidate(state.verdicts)) is not None:
                    self._test(index)
                elif rerun := next_rerun(state):
                    self._run_again(rerun)
                elif (index := next_for_cause(state)) is not None:
                    self.progress.say(
                        "the bad end fails in another way than the first bad candidate: looking for where"
                    )
                    self._test(index)
                elif state.confirmation is None and (edge := edge_to_confirm(state)):
                    self._confirm(edge)
                else:
                    return answer_of(state)
        finally:
            self._save()

    def _verify_ends(self) -> None:
        """Test what must be good, from which --timeout follows, and then what must be bad."""
        for index in (self.state.good_end, self.state.bad_end):
            if index not in self.state.verdicts:
                self._test(index)
            self._check_end(index)
            if index == self.state.good_end and self.state.question.options.timeout == AUTO:
                limit = f"{self._limit():.0f} s"
                self.progress.say(f"from now on a run that takes more than {limit} counts as hanging (--timeout)")

    def _check_end(self, index: int) -> None:
        state, candidate = self.state, self.state.candidates[index]
        expected = "good" if index == state.good_end else "bad"
        end = f"the {expected} end {candidate.label}"
        record, repeat = state.record(index), state.question.options.repeat
        if record.verdict == expected:
            return
        problem = {
            "good": f"is not bad: {record.reason}; if it fails rarely, give more than --repeat {repeat}",
            "bad": f"is bad already: {record.reason}",
            "skip": f"could not be classified: {record.reason.rstrip('.')}; give another end",
            "other": f"fails, but not with the failure looked for: {record.reason}",
        }[record.verdict].rstrip(".")
        log = f"; its output is in {self.folder / record.attempts[-1].log}" if record.attempts else ""
        raise WrongQuestion(redact.text(f"{end} {problem}{log}."))

    def _confirm(self, edge: Edge) -> None:
        """Run the newer end without the commit found; if that ends as the older end did, run the newer end again."""
        state, provider = self.state, self.provider
        assert isinstance(provider, Commits)
        commit, tip = state.candidates[edge.after], state.candidates[-1]
        without = Candidate(name=f"{tip.name[:12]}-without-{commit.name[:12]}")
        self.progress.say(f"to confirm it, {commit.name[:12]} is reverted on top of {tip.label}")
        confirmation = Confirmation()
        try:
            environment = provider.make_reverted(commit, tip)
        except (CannotRevert, Unavailable) as problem:
            confirmation.problem = str(problem).rstrip(".")
        else:
            # As many as made the good neighbour's verdict sure: the bad one stopped at its first failure.
            runs = len(state.record(last_good(state, edge)).attempts)
            confirmation.reverted = self._judge(without, environment, runs)
            self._tell(confirmation.reverted, without)
            if confirmation.reverted.verdict == state.record(0).verdict:
                confirmation.control = self._judge(tip, self._environment_again(tip), runs)
                self._tell(confirmation.control, tip)
        state.confirmation = confirmation
        state.unfinished.clear()
        self._save()

    def _run_again(self, rerun: Rerun) -> None:
        candidate, record, failures = self.state.candidates[rerun.index], self.state.record(rerun.index), 0
        record.environment = self._environment_again(candidate)
        for _ in range(rerun.runs):
            made = self._run(candidate, record.environment, len(record.attempts) + 1)
            record.attempts.append(made)
            record.verdict, record.reason = self._combine(record.attempts)
            self._save()
            failures += made.verdict != "good"
            if failures == rerun.failures:
                break
        self._tell(record, candidate)

    def _test(self, index: int) -> None:
        """Install the candidate, run it, and keep its verdict.

        Raises WrongQuestion if the command would run something other than an end; such a candidate in between is skipped.
        """
        candidate, question = self.state.candidates[index], self.state.question
        self.progress.begin(f"{candidate.label}: installing")
        skipped = Record(name=candidate.name, verdict="skip", reason="", environment=Environment(python=""))
        try:
            environment = self._environment(candidate)
            check_command(question, environment, self.no_gpu and question.runs_sglang)
            record = self._judge(candidate, environment, question.options.repeat)
        except Unavailable as problem:
            record = replace(skipped, reason=f"cannot be installed: {problem}")
        except AnotherWouldRun as problem:
            reason = f"would not be tested: {problem}"
            if index in (self.state.good_end, self.state.bad_end):
                end = "good" if index == self.state.good_end else "bad"
                raise WrongQuestion(f"the {end} end {candidate.label} {reason}") from problem
            record = replace(skipped, reason=reason)
        self.state.records.append(record)
        self.state.unfinished.clear()
        self._save()
        self._tell(record, candidate)

    def _judge(self, candidate: Candidate, environment: Environment, runs: int) -> Record:
        """Run it up to so many times, until it fails. Runs from before a bisect was resumed count."""
        attempts = self.state.unfinished.setdefault(candidate.name, [])
        while len(attempts) < runs and all(each.verdict == "good" for each in attempts):
            attempts.append(self._run(candidate, environment, len(attempts) + 1))
            self._save()
        verdict, reason = self._combine(attempts)
        if verdict == "bad" and self.state.question.kind == "failure":
            run = self._run_in(self.folder / Path(attempts[-1].log).parent, candidate, environment)
            if why := import_failure(run, self.progress.beat):
                verdict, reason = (
                    "skip",
                    f"cannot run here, because it cannot be imported (--match counts that too): {why}",
                )
        return Record(name=candidate.name, verdict=verdict, reason=reason, attempts=attempts, environment=environment)

    def _environment(self, candidate: Candidate) -> Environment:
        """Return the candidate's environment after a look at the installed version. Raises Unavailable, Pause."""
        options, environment = self.state.question.options, self.provider.make(candidate)
        seen = environment.freeze.get(canonicalize_name(options.package), "")
        # A commit's version says little, and a prepared folder may hold the bare module without its metadata.
        if not options.git and (seen or not options.environments) and not _is_version(seen, candidate.name):
            raise Unavailable(f"its environment has {options.package} {seen} (PYTHONPATH may hide it).")
        return environment

    def _environment_again(self, candidate: Candidate) -> Environment:
        """Return the environment of a candidate that has run: the cache may have been deleted since. Raises Pause."""
        try:
            return self._environment(candidate)
        except Unavailable as problem:
            raise Pause(f"{candidate.label} has run, but cannot be installed again: {problem}") from problem

    def _run(self, candidate: Candidate, environment: Environment, number: int) -> Attempt:
        """Run the command. If the machine may be at fault in a failure, run it once more and return that second run."""
        made = self._run_once(candidate, environment, number)
        if made.may_pass:
            self.progress.say(f"{candidate.label}: once more, because this may pass: {made.reason}")
            made = self._run_once(candidate, environment, number)
        return made

    def _run_once(self, candidate: Candidate, environment: Environment, number: int) -> Attempt:
        runs = self.folder / "runs" / candidate.name
        folder = runs / str(sum(1 for _ in runs.glob("*")) + 1)  # what a killed run left is kept
        if number == 1:
            self.progress.say(f"{candidate.label}: running; its output is in {folder / LOG}")
        self.progress.begin(f"{candidate.label}: run {number}")
        made = run_once(self._run_in(folder, candidate, environment), self.progress.beat)
        made.log = str(Path(made.log).relative_to(self.folder))
        return made

    def _run_in(self, folder: Path, candidate: Candidate, environment: Environment) -> Run:
        return Run(
            question=self.state.question,
            environment=environment,
            folder=folder,
            candidate=candidate.name,
            no_gpu=self.no_gpu,
            lock=self.lock,
            limit=self._limit(),
        )

    def _limit(self) -> float:
        """Return the most seconds of a run; 0 for none. By default a run that hangs must not stop an unattended bisect."""
        given, good_end = self.state.question.options.timeout, self.state.good_end
        if given != AUTO:
            return parse_seconds(given)
        if good_end not in self.state.verdicts:
            return 0.0
        return max(
            LEAST_LIMIT_SECONDS, LIMIT_TIMES * max(each.seconds for each in self.state.record(good_end).attempts)
        )

    def _combine(self, attempts: list[Attempt]) -> tuple[Verdict, str]:
        """Return the verdict of several runs: bad if one is bad."""
        failed = [attempt for attempt in attempts if attempt.verdict == "bad"]
        chosen = next((each for each in [*failed, *attempts] if each.verdict != "good"), attempts[0])
        share = f" ({len(failed)} of {len(attempts)} runs bad)" if self.state.question.options.repeat > 1 else ""
        return chosen.verdict, chosen.reason + share

    def _tell(self, record: Record, candidate: Candidate) -> None:
        log = f", {record.decisive.log}" if record.decisive and record.verdict != "good" else ""
        verdict = f"{record.verdict.upper():<5} {candidate.label}: {record.reason.rstrip('.')}"
        self.progress.say(f"{verdict} ({record.seconds:.1f} s{log}); {describe_left(self.state)}")

    def _save(self) -> None:
        now = time.monotonic()
        self.state.wall_seconds += now - self._since
        self._since = now
        self.state.save(self.folder)
