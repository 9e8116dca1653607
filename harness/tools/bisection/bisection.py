"""A bisect from its command line to its answer: one install and one run at a time, with the state saved after every
run.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from shlex import join

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from harness.config.mistakes import ConfigError
from harness.runtime import redact
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.runtime.events import working
from harness.runtime.installed import as_typed
from harness.tools.bisection.bisect_report import (
    EXIT_CODES,
    Answer,
    answer_of,
    edge_to_confirm,
    next_for_cause,
    write_report,
)
from harness.tools.bisection.candidates import (
    Commits,
    Provider,
    check_checkout,
    commit_of,
    find_candidates,
    provider_of,
    python_of,
    settle,
)
from harness.tools.bisection.confidence import Rerun, last_good, next_rerun
from harness.tools.bisection.imported import import_failure, imported_by
from harness.tools.bisection.question import (
    AUTO,
    SCRIPT,
    Options,
    Question,
    ask,
    command_of,
    existing_folder,
    is_of_this_repository,
    is_torchrun,
    parse_seconds,
)
from harness.tools.bisection.search import Edge, find_edges, next_candidate, untested
from harness.tools.bisection.state import STATE, Record, State, latest_folder, load_state, lock_folder
from harness.tools.command_line import read_known_options, read_options
from harness.tools.environments import has_gpu
from harness.tools.run_tree import run_tree
from harness.tools.trial.environment import Environment, python_version
from harness.tools.trial.indexes import Candidate, Pause
from harness.tools.trial.trial import Outcome, Trial, Verdict, run_trial

FOLDER = Path("bisects")
COMMITS_FOLDER = "commits"
"""The folder of the bisect over commits, inside the folder of the bisect over releases."""
PAUSED, INTERRUPTED, FIRST_STOPPING_CODE = 4, 130, 128
LEAST_LIMIT_SECONDS, LIMIT_TIMES = 600.0, 10.0
LINE_SECONDS = 60.0
"""Between two signs of life while the command runs, whose output is elsewhere."""


def main(arguments: list[str], description: str) -> int:
    """Run the command line; return the exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    words, command = arguments[:split], arguments[split + 1 :]
    try:
        if "--resume" in words:
            at = words.index("--resume")
            rest = words[:at] + words[at + 1 :]
            named = len(rest) > at and not rest[at].startswith("--")
            folder = Path(rest.pop(at)) if named else latest_folder(FOLDER)
            options = read_options(Options, SCRIPT, description, rest)
            _refuse_another_question(options, command)
            return resume(folder, options.then_git)
        return begin(_read_options(words, description), command)
    except ConfigError as error:
        return _report(error)
    except Pause as error:
        _report(error)
        return PAUSED


def _report(error: Exception) -> int:
    """Print the error's sentence without secrets; return the exit code of a user's mistake."""
    return report_user_error(ConfigError(redact.text(str(error))), rank=0)


def _read_options(words: Sequence[str], description: str) -> Options:
    options, rest = read_known_options(Options, SCRIPT, description, words)
    if rest and not rest[0].startswith("-"):
        raise ConfigError(f"put -- before {rest[0]}: {SCRIPT} OPTIONS -- {join(rest)}")
    return read_options(Options, SCRIPT, description, words) if rest else options


def _refuse_another_question(options: Options, command: Sequence[str]) -> None:
    """Raise ConfigError if --resume comes with more than --then-git."""
    extra = Question(options=replace(options, then_git=""), command=tuple(command), folder="").words()
    if extra != ["--"]:
        kept = "a resumed bisect keeps its question, and only --then-git can be added"
        given = join(extra).removesuffix(" --")
        raise ConfigError(f"{given} cannot go with --resume: {kept}; leave it out, or start a new bisect.")


def resume(folder: Path, then_git: str) -> int:
    """Go on with the bisect in a folder. Raises ConfigError, Pause."""
    state, inner = load_state(folder), folder / COMMITS_FOLDER
    if then_git and state.question.options.git:
        raise ConfigError(f"--then-git is for releases, and the bisect in {folder} is one of commits; leave it out.")
    checkout = _checkout(then_git)
    if checkout and (inner / STATE).exists() and (kept := load_state(inner).question.options.git) != checkout:
        remedy = f"give --then-git {kept}, or move that folder away"
        raise ConfigError(f"{inner} holds a bisect of {kept}, got --then-git {checkout}; {remedy}.")
    return _bisect(state, folder, checkout)


def _checkout(given: str) -> str:
    """Return the absolute path of the checkout that --then-git names, or "" if it is not given.

    Raises ConfigError.
    """
    if not given:
        return ""
    folder = existing_folder("--then-git", given)
    check_checkout("--then-git", Path(folder))
    return folder


def begin(options: Options, words: Sequence[str]) -> int:
    """Start a new bisect. Raises ConfigError, Pause."""
    question = settle(ask(options, words, Path.cwd()))
    _checkout(question.options.then_git)
    state = State(question=question, candidates=find_candidates(question))
    folder = Path(options.dir or FOLDER / f"{datetime.now():%Y%m%d-%H%M%S}-{question.options.package}")
    if (folder / STATE).exists():
        raise ConfigError(f"--dir {folder} holds a bisect; continue it with --resume {folder}, or give another folder.")
    return _bisect(state, folder, question.options.then_git)


def _bisect(state: State, folder: Path, then_git: str) -> int:
    """Run it, and then, if a checkout is given, the bisect over the commits between the two releases found."""
    folder, checkout = folder.absolute(), then_git or state.question.options.then_git
    with closing(lock_folder(folder)) as lock:
        if (folder / STATE).exists():
            state = load_state(folder)  # a killed bisect may have written a verdict while we waited for its lock
        found = _run_to_answer(state, folder, lock.fileno())
    if isinstance(found, int):
        return found
    if found.kind != "found" or state.question.options.git:
        return EXIT_CODES[found.kind]
    if not checkout:
        print(as_typed(f"to find the commit: python3 {SCRIPT} --resume {folder} --then-git CHECKOUT"), flush=True)
        return EXIT_CODES[found.kind]
    inner = folder / COMMITS_FOLDER
    try:
        question = _question_of_commits(state, found.edges[0], Path(checkout), inner)
        candidates = find_candidates(question)
    except ConfigError as error:
        print(f"The commit was not found: {error} The cause may be a dependency or the build.", flush=True)
        return EXIT_CODES[found.kind]
    print("\nnow the commits between the two releases", flush=True)
    return _bisect(State(question=question, candidates=candidates), inner, "")


def _question_of_commits(state: State, edge: Edge, checkout: Path, folder: Path) -> Question:
    """Ask for the commits between the tags of the edge's two releases, over the packages that the bad one ran with.

    --hold stays: its packages are among those, and if sglang is one of them the command still needs SGLang's CPU mode.
    Raises ConfigError.
    """
    options, sides = state.question.options, (edge.before, edge.after)
    older, newer = (commit_of(checkout, state.candidates[i].name) for i in sides)
    bad = next(state.record(i) for i in sides if state.verdicts[i] == "bad")
    changes = {name: getattr(Options, name) for name in ("then_git", "environments", "wheels")}
    changes |= {"git": str(checkout), "python": bad.environment.python, "dir": str(folder)}
    changes["good"], changes["bad"] = (newer, older) if options.find_fix else (older, newer)
    return settle(replace(state.question, options=replace(options, **changes)))


def _keep_python(state: State) -> None:
    """Note the Python of a new bisect: verdicts of two Pythons would differ as if the candidate made the difference.

    Raises ConfigError if it does not start, Pause.
    """
    state.python = state.python or python_of(state.question.options)
    try:
        python_version(state.python)
    except UnsupportedEnvironment as error:
        remedy = "start a new bisect, with --python if it needs another one"
        raise ConfigError(f"{str(error).rstrip('.')}; {remedy}.") from error


def _run_to_answer(state: State, folder: Path, lock: int) -> Answer | int:
    """Run the bisect and write its report. If it is stopped, say how to continue, and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    progress = Progress()
    try:
        _keep_python(state)
        provider = provider_of(state.question, folder, no_gpu := not has_gpu(), state.python)
        state.save(folder)
        ends = f"{state.candidates[0].label} to {state.candidates[-1].label}"
        progress.say(f"{len(state.candidates)} candidates from {ends}; state in {folder}")
        for yanked in [candidate.label for candidate in state.candidates if candidate.yanked]:
            progress.say(f"{yanked} was yanked by its publisher; it is run because it was asked for")
        with working("bisecting", progress):
            answer = Bisection(state, folder, provider, progress, lock, no_gpu).run()
        print(f"\n{write_report(state, answer, folder)}\nreport: {folder / 'report.md'}", flush=True)
        return answer
    except KeyboardInterrupt:
        why, code = "interrupted", INTERRUPTED
    except Pause as error:
        why, code = redact.text(f"paused: {error}"), PAUSED
    except OSError as error:
        why, code = f"paused: {folder} cannot be used: {error.strerror or error}.", PAUSED
    kept = f"{len(state.records)} verdicts are kept; continue with: python3 {SCRIPT} --resume {folder}"
    print(as_typed(f"{why}\n{kept}"), file=sys.stderr, flush=True)
    return code


# The loop.


@dataclass
class Progress:
    """Prints what happens, with the time since the start; the voice of working()."""

    started: float = field(default_factory=time.monotonic)
    spoke: float = 0.0

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:7.1f} s] {redact.text(text)}", flush=True)
        self.spoke = time.monotonic()


def describe_left(state: State) -> str:
    """Return how much is left to do."""
    edges = find_edges(state.verdicts)
    if not edges:
        return f"{len(state.candidates)} candidates; the two ends are verified first"
    left = [len(untested(edge, state.verdicts)) for edge in edges]
    steps = sum(count.bit_length() for count in left)
    if not steps:
        return "no candidates left"
    return f"{sum(left)} candidate{'s' * (sum(left) > 1)} left, at most {steps} step{'s' * (steps > 1)}"


@dataclass
class Bisection:
    """Runs the rest of a bisect: all of a new one, or what a resumed one still needs."""

    state: State
    folder: Path
    provider: Provider
    progress: Progress
    lock: int
    """Descriptor of the folder's lock. Every process of a trial inherits it, so a resumed bisect waits for them."""
    no_gpu: bool

    def run(self) -> Answer:
        """Return the answer; the state is saved whatever is raised. Raises ConfigError, Pause, OSError."""
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
                elif state.reverted is None and (edge := edge_to_confirm(state)):
                    self._confirm(edge)
                else:
                    return answer_of(state)
        finally:
            self.state.save(self.folder)

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
        imported = f"; {record.imported}" if record.imported else ""
        raise ConfigError(redact.text(f"{end} {problem}{imported}{log}."))

    def _confirm(self, edge: Edge) -> None:
        """Run the newer end without the commit found; if that ends as the older end did, run the newer end again."""
        state, provider = self.state, self.provider
        assert isinstance(provider, Commits)
        commit, tip = state.candidates[edge.after], state.candidates[-1]
        without = Candidate(name=f"{tip.name[:12]}-without-{commit.name[:12]}")
        self.progress.say(f"to confirm it, {commit.name[:12]} is reverted on top of {tip.label}")
        try:
            environment = provider.make_reverted(commit, tip)
        except UnsupportedEnvironment as problem:
            state.reverted = _not_run(without, str(problem).rstrip("."))
        else:
            # As many as made the good neighbour's verdict sure: the bad one stopped at its first failure.
            runs, control = len(state.record(last_good(state, edge)).attempts), None
            reverted = self._judge(without, environment, runs)
            self._tell(reverted, without)
            if reverted.verdict == state.record(0).verdict:
                control = self._judge(tip, self._environment_again(tip), runs)
                self._tell(control, tip)
            state.reverted, state.control = reverted, control
        state.unfinished.clear()
        self.state.save(self.folder)

    def _run_again(self, rerun: Rerun) -> None:
        candidate, record, failures = self.state.candidates[rerun.index], self.state.record(rerun.index), 0
        record.environment = self._environment_again(candidate)
        for _ in range(rerun.runs):
            made = self._run(candidate, record.environment, len(record.attempts) + 1)
            record.attempts.append(made)
            record.verdict, record.reason = self._combine(record.attempts)
            self.state.save(self.folder)
            failures += made.verdict != "good"
            if failures == rerun.failures:
                break
        self._tell(record, candidate)

    def _test(self, index: int) -> None:
        """Install the candidate, run it, and keep its verdict."""
        candidate, question = self.state.candidates[index], self.state.question
        try:
            record = self._judge(candidate, self._environment(candidate), question.options.repeat)
        except UnsupportedEnvironment as problem:
            record = _not_run(candidate, f"cannot be installed: {problem}")
        self.state.records.append(record)
        self.state.unfinished.clear()
        self.state.save(self.folder)
        self._tell(record, candidate)

    def _judge(self, candidate: Candidate, environment: Environment, runs: int) -> Record:
        """Run it up to so many times, until it fails. Runs from before a bisect was resumed count."""
        attempts = self.state.unfinished.setdefault(candidate.name, [])
        while len(attempts) < runs and all(each.verdict == "good" for each in attempts):
            attempts.append(self._run(candidate, environment, len(attempts) + 1))
            self.state.save(self.folder)
        verdict, reason = self._combine(attempts)
        last = self._trial(self.folder / Path(attempts[-1].log).parent, candidate, environment)
        is_judged = verdict == "bad" and self.state.question.takes_any
        if is_judged and (why := import_failure(last, environment.python, self.lock)):
            verdict = "skip"
            reason = f"cannot run here, because it cannot be imported (--match counts that too): {why}"
        return Record(
            name=candidate.name,
            verdict=verdict,
            reason=reason,
            environment=environment,
            imported=imported_by(last, environment.python, self.state.question),
            attempts=attempts,
        )

    def _environment(self, candidate: Candidate) -> Environment:
        """Return the candidate's environment after a look at the installed version. Raises UnsupportedEnvironment, Pause."""
        options = self.state.question.options
        with working(f"{candidate.label}: installing"):
            environment = self.provider.make(candidate)
        seen = environment.freeze.get(canonicalize_name(options.package), "")
        # A commit's version says little, and a prepared folder may hold the bare module without its metadata.
        is_named = bool(seen) or not (options.git or options.environments)
        if is_named and not options.git and not _is_version(seen, candidate.name):
            raise UnsupportedEnvironment(f"its environment has {options.package} {seen} (PYTHONPATH may hide it).")
        return environment

    def _environment_again(self, candidate: Candidate) -> Environment:
        """Return the environment of a candidate that has run: the cache may have been deleted since. Raises Pause."""
        try:
            return self._environment(candidate)
        except UnsupportedEnvironment as problem:
            raise Pause(f"{candidate.label} has run, but cannot be installed again: {problem}") from problem

    def _run(self, candidate: Candidate, environment: Environment, number: int) -> Outcome:
        """Run the command. If the machine may be at fault in a failure, run it once more and return that second run."""
        made = self._run_once(candidate, environment, number)
        if made.may_pass:
            self.progress.say(f"{candidate.label}: once more, because this may pass: {made.reason}")
            made = self._run_once(candidate, environment, number)
        return made

    def _run_once(self, candidate: Candidate, environment: Environment, number: int) -> Outcome:
        runs = self.folder / "runs" / candidate.name
        folder = runs / str(sum(1 for _ in runs.glob("*")) + 1)  # what a killed run left is kept
        trial = self._trial(folder, candidate, environment)
        if number == 1:
            self.progress.say(f"{candidate.label}: running; its output is in {trial.log}")
        with working(f"{candidate.label}: run {number}", every=LINE_SECONDS):
            made = run_trial(trial, partial(run_tree, inherit=(self.lock,)))
        if made.code >= FIRST_STOPPING_CODE and not made.timed_out:
            raise Pause(f"the script asked to stop, with exit code {made.code}; its output is in {trial.log}.")
        made.log = str(trial.log.relative_to(self.folder))
        return made

    def _trial(self, folder: Path, candidate: Candidate, environment: Environment) -> Trial:
        question, python = self.state.question, environment.python
        variables = environment.variables(self.no_gpu and question.runs_sglang, is_of_this_repository(question))
        return Trial(
            command=command_of(question, python, folder),
            variables=variables | {"BISECT_CANDIDATE": candidate.name},
            cwd=question.folder,
            folder=folder,
            signature=question.signature,
            limit=self._limit(),
            package=question.options.package,
            own=(*environment.paths, str(Path(python).parent.parent)),
            is_torchrun=is_torchrun(question),
            no_gpu=self.no_gpu,
        )

    def _limit(self) -> float:
        """Return the most seconds of a run; 0 for none.

        By default a run that hangs must not stop an unattended bisect.
        """
        given, good_end = self.state.question.options.timeout, self.state.good_end
        if given != AUTO:
            return parse_seconds(given)
        if good_end not in self.state.verdicts:
            return 0.0
        return max(
            LEAST_LIMIT_SECONDS, LIMIT_TIMES * max(each.seconds for each in self.state.record(good_end).attempts)
        )

    def _combine(self, attempts: list[Outcome]) -> tuple[Verdict, str]:
        """Return the verdict of several runs: bad if one is bad."""
        failed = [attempt for attempt in attempts if attempt.verdict == "bad"]
        chosen = next((each for each in [*failed, *attempts] if each.verdict != "good"), attempts[0])
        share = f" ({len(failed)} of {len(attempts)} runs bad)" if self.state.question.options.repeat > 1 else ""
        return chosen.verdict, chosen.reason + share

    def _tell(self, record: Record, candidate: Candidate) -> None:
        log = f", {record.decisive.log}" if record.decisive and record.verdict != "good" else ""
        verdict = f"{record.verdict.upper():<5} {candidate.label}: {record.reason.rstrip('.')}"
        self.progress.say(f"{verdict} ({record.seconds:.1f} s{log}); {describe_left(self.state)}")
        if record.imported:
            self.progress.say(f"      {record.imported}")


def _not_run(candidate: Candidate, reason: str) -> Record:
    return Record(name=candidate.name, verdict="skip", reason=reason, environment=Environment(python=""))


def _is_version(seen: str, wanted: str) -> bool:
    """Return whether an installed version is the one wanted, in any build; metadata may hold anything."""
    try:
        return SpecifierSet(f"=={wanted}").contains(seen, prereleases=True)
    except InvalidVersion:
        return False
