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
from harness.runtime import redact
from harness.runtime.errors import report_user_error
from harness.tools.bisection.answer import EXIT_CODES, Answer
from harness.tools.bisection.bisect_report import write_report
from harness.tools.bisection.bisection import Bisection, Progress
from harness.tools.bisection.candidates import check_checkout, commit_of, find_candidates, settle
from harness.tools.bisection.installation import Unavailable, provider_of, python_of, python_version
from harness.tools.bisection.question import SCRIPT, Options, Pause, Question, WrongQuestion, ask, existing_folder
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
        if "--resume" in words:
            at = words.index("--resume")
            rest = words[:at] + words[at + 1 :]
            named = len(rest) > at and not rest[at].startswith("--")
            folder = Path(rest.pop(at)) if named else latest_folder(FOLDER)
            options = read_options(Options, SCRIPT, description, rest)
            _refuse_another_question(rest, command)
            return resume(folder, options.then_git)
        return begin(_read_options(words, description), command)
    except (WrongQuestion, ConfigError) as error:
        return _report(error)
    except Pause as error:
        _report(error)
        return PAUSED


def _report(error: Exception) -> int:
    """Print the error's sentence without secrets; return the exit code of a user's mistake."""
    return report_user_error(WrongQuestion(redact.text(str(error))), rank=0)


def _read_options(words: Sequence[str], description: str) -> Options:
    options, rest = read_known_options(Options, SCRIPT, description, words)
    if rest and not rest[0].startswith("-"):
        raise WrongQuestion(f"put -- before {rest[0]}: {SCRIPT} OPTIONS -- {join(rest)}")
    return read_options(Options, SCRIPT, description, words) if rest else options


def _refuse_another_question(words: Sequence[str], command: Sequence[str]) -> None:
    """Raise WrongQuestion if --resume comes with more than --then-git. words: the command line without --resume FOLDER."""
    named = [option for word in words if (option := word.partition("=")[0]).startswith("--") and option != "--then-git"]
    extra = named[0] if named else f"the command {join(command)}" if command else ""
    if extra:
        kept = "a resumed bisect keeps its question, and only --then-git can be added"
        raise WrongQuestion(f"{extra} cannot go with --resume: {kept}; leave it out, or start a new bisect.")


def resume(folder: Path, then_git: str) -> int:
    """Go on with the bisect in a folder. Raises WrongQuestion, Pause."""
    state, inner = load_state(folder), folder / COMMITS_FOLDER
    if then_git and state.question.options.git:
        raise WrongQuestion(f"--then-git is for releases, and the bisect in {folder} is one of commits; leave it out.")
    checkout = _checkout(then_git)
    if checkout and (inner / STATE).exists() and (kept := load_state(inner).question.options.git) != checkout:
        remedy = f"give --then-git {kept}, or move that folder away"
        raise WrongQuestion(f"{inner} holds a bisect of {kept}, got --then-git {checkout}; {remedy}.")
    return _bisect(state, folder, checkout)


def _checkout(given: str) -> str:
    """Return the absolute path of the checkout that --then-git names, or "" if it is not given. Raises WrongQuestion."""
    if not given:
        return ""
    folder = existing_folder("--then-git", given)
    check_checkout("--then-git", Path(folder))
    return folder


def begin(options: Options, words: Sequence[str]) -> int:
    """Start a new bisect. Raises WrongQuestion, Pause."""
    question = settle(ask(options, words, Path.cwd()))
    _checkout(question.options.then_git)
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
        question = _question_of_commits(state, found.edges[0], Path(checkout), inner)
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

    --hold stays: its packages are among those, and if sglang is one of them the command still needs SGLang's CPU mode.
    Raises WrongQuestion.
    """
    options, sides = state.question.options, (edge.before, edge.after)
    older, newer = (commit_of(checkout, state.candidates[i].name) for i in sides)
    bad = next(state.record(i) for i in sides if state.verdicts[i] == "bad")
    unset = ("then_git", "environments", "wheels", "only_package")
    changes: dict[str, Any] = {name: getattr(Options, name) for name in unset}
    changes |= {"git": str(checkout), "python": bad.environment.python, "dir": str(folder)}
    changes["good"], changes["bad"] = (newer, older) if options.find_fix else (older, newer)
    return settle(replace(state.question, options=replace(options, **changes)))


def _keep_python(state: State, folder: Path) -> None:
    """Note the Python of a new bisect; check that of a resumed one. Raises WrongQuestion, Pause.

    Verdicts from two Pythons would be compared as if the candidate made the difference.
    """
    python = state.python or python_of(state.question.options)
    try:
        version = python_version(python)
    except Unavailable as error:
        raise WrongQuestion(
            f"{str(error).rstrip('.')}; start a new bisect, with --python if it needs another one."
        ) from error
    if not state.python:
        state.python, state.python_version = python, version
    elif version != state.python_version:
        began = f"the bisect in {folder} began with Python {state.python_version} of {python}"
        raise WrongQuestion(f"{began}, which is now {version}; start a new bisect.")


def _run_to_answer(state: State, folder: Path, lock: int) -> Answer | int:
    """Run the bisect and write its report. If it is stopped, say how to continue, and return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress = Progress()
    try:
        _keep_python(state, folder)
        provider = provider_of(state.question, folder, no_gpu := not has_gpu(), state.python)
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
        why, code = redact.text(f"paused: {error}"), PAUSED
    except OSError as error:
        why, code = f"paused: {folder} cannot be used: {error.strerror or error}.", PAUSED
    kept = f"{len(state.records)} verdicts are kept; continue with: python3 {SCRIPT} --resume {folder}"
    print(f"{why}\n{kept}", file=sys.stderr, flush=True)
    return code
