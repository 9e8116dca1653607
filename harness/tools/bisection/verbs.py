"""What launch/bisect_versions.py does: begin or resume a bisect, and go on from the release to the commit."""

import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import IO, Any

from harness.config.layers import ConfigError
from harness.runtime.errors import report_user_error
from harness.tools.bisection.answer import EXIT_CODES, Answer
from harness.tools.bisection.bisect_report import write_report
from harness.tools.bisection.bisection import Bisection, Progress
from harness.tools.bisection.candidates import commit_of, find_candidates, settle
from harness.tools.bisection.installation import provider_of
from harness.tools.bisection.question import SCRIPT, Options, Pause, Question, WrongQuestion, ask
from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import STATE, State, latest_folder, load_state, lock_folder
from harness.tools.command_line import read_known_options, read_options
from harness.tools.environments import has_gpu

FOLDER = Path("bisects")
COMMITS_FOLDER = "commits"
"""The folder of the bisect over commits, inside the folder of the bisect over releases."""
PAUSED, INTERRUPTED = 4, 130


def main(arguments: list[str], description: str) -> int:
    """Run the command line; return the exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    words, command = arguments[:split], arguments[split + 1 :]
    try:
        if words[:1] == ["--resume"]:
            rest = words[1:]
            folder = Path(rest.pop(0)) if rest and not rest[0].startswith("--") else latest_folder(FOLDER)
            options = read_options(Options, SCRIPT, description, rest)
            return _bisect(load_state(folder), folder, options.then_git)
        return begin(_read_options(words, description), command)
    except (WrongQuestion, ConfigError) as error:
        return report_user_error(error, rank=0)
    except Pause as error:
        report_user_error(error, rank=0)
        return PAUSED


def _read_options(words: Sequence[str], description: str) -> Options:
    options, rest = read_known_options(Options, SCRIPT, description, words)
    if rest and not rest[0].startswith("-"):
        raise WrongQuestion(f"put -- before {rest[0]}: {SCRIPT} OPTIONS -- {join(rest)}")
    return read_options(Options, SCRIPT, description, words) if rest else options


def begin(options: Options, words: Sequence[str]) -> int:
    """Start a new bisect. Raises WrongQuestion, Pause."""
    question = settle(ask(options, words, Path.cwd()))
    state = State(question=question, candidates=find_candidates(question))
    folder = Path(options.dir or FOLDER / f"{datetime.now():%Y%m%d-%H%M%S}-{question.options.package}")
    if (folder / STATE).exists():
        raise WrongQuestion(
            f"--dir {folder} holds a bisect; continue it with --resume {folder}, or give another folder."
        )
    return _bisect(state, folder, question.options.then_git)


def _bisect(state: State, folder: Path, then_git: str) -> int:
    """Run it, and then, if a checkout is given, the bisect over the commits between the two releases found."""
    folder, checkout = folder.absolute(), then_git or state.question.options.then_git
    with closing(_lock(folder)) as lock:
        if (folder / STATE).exists():
            state = load_state(folder)  # a killed bisect may have written a verdict while we waited for its lock
        found = _run_to_answer(state, folder, lock.fileno())
    if isinstance(found, int):
        return found
    if found.kind != "found" or state.question.options.git:
        return EXIT_CODES[found.kind]
    if not checkout:
        print(f"to find the commit: python3 {SCRIPT} --resume {folder} --then-git CHECKOUT", flush=True)
        return EXIT_CODES[found.kind]
    inner = folder / COMMITS_FOLDER
    try:
        question = _question_of_commits(state, found.edges[0], Path(checkout).expanduser().resolve(), inner)
        candidates = find_candidates(question)
    except WrongQuestion as error:
        print(f"The commit was not found: {error} The cause may be a dependency or the build.", flush=True)
        return EXIT_CODES[found.kind]
    print("\nnow the commits between the two releases", flush=True)
    return _bisect(State(question=question, candidates=candidates), inner, "")


def _lock(folder: Path) -> IO[str]:
    try:
        return lock_folder(folder)
    except OSError as error:
        raise WrongQuestion(f"the folder {folder} cannot be written: {error.strerror}.") from error


def _question_of_commits(state: State, edge: Edge, checkout: Path, folder: Path) -> Question:
    """Ask for the commits between the tags of the edge's two releases, over the packages that the bad one ran with.

    Raises WrongQuestion.
    """
    options, sides = state.question.options, (edge.before, edge.after)
    older, newer = (commit_of(checkout, state.candidates[i].name) for i in sides)
    bad = next(state.record(i) for i in sides if state.verdicts[i] == "bad")
    unset = ("then_git", "environments", "wheels", "only_package", "hold")
    changes: dict[str, Any] = {name: getattr(Options, name) for name in unset}
    changes |= {"git": str(checkout), "python": bad.environment.python, "dir": str(folder)}
    changes["good"], changes["bad"] = (newer, older) if options.find_fix else (older, newer)
    return settle(replace(state.question, options=replace(options, **changes)))


def _run_to_answer(state: State, folder: Path, lock: int) -> Answer | int:
    """Run the bisect and write its report. If it is stopped, say how to continue, and return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress = Progress()
    try:
        provider = provider_of(state.question, folder, no_gpu := not has_gpu())
        state.save(folder)
        ends = f"{state.candidates[0].label} to {state.candidates[-1].label}"
        progress.say(f"{len(state.candidates)} candidates from {ends}; state in {folder}")
        for yanked in [candidate.label for candidate in state.candidates if candidate.yanked]:
            progress.say(f"{yanked} was yanked by its publisher; it is run because it was asked for")
        answer = Bisection(state, folder, provider, progress, lock, no_gpu).run()
        print(f"\n{write_report(state, answer, folder)}\nreport: {folder / 'report.md'}", flush=True)
        return answer
    except KeyboardInterrupt:
        why, code = "interrupted", INTERRUPTED
    except Pause as error:
        why, code = f"paused: {error}", PAUSED
    except OSError as error:
        why, code = f"paused: {folder} cannot be used: {error.strerror or error}.", PAUSED
    kept = f"{len(state.records)} verdicts are kept; continue with: python3 {SCRIPT} --resume {folder}"
    print(f"{why}\n{kept}", file=sys.stderr, flush=True)
    return code
