"""What launch/bisect_versions.py does: begin, resume, status, log, replay, judge. Each returns the exit code."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import Any, get_args

import msgspec

from harness.config.layers import ConfigError
from harness.runtime.errors import CANNOT_RUN_HERE, report_user_error
from harness.tools.bisection.answer import EXIT_CODES, Answer, answer_of, as_dict, candidate_rows, sentences
from harness.tools.bisection.bisect_report import write_reports
from harness.tools.bisection.bisection import Bisection, Progress, describe_left
from harness.tools.bisection.candidates import commit_of, find_candidates, fork_point, settle
from harness.tools.bisection.classify import FIRST_STOPPING_CODE, StopRequested, run_once
from harness.tools.bisection.installation import Environment, Unavailable, provider_of, store_of
from harness.tools.bisection.question import SCRIPT, Options, Question, WrongQuestion, ask, check_run, parse_seconds
from harness.tools.bisection.search import Edge, Verdict
from harness.tools.bisection.state import STATE, Record, State, latest_folder, load_state, lock_folder, owner_of
from harness.tools.bisection.store import Pause, default_root
from harness.tools.command_line import read_options
from harness.tools.environments import has_gpu
from harness.tools.process_tree import SupervisorKilled

FOLDER = Path("bisects")
COMMITS_FOLDER = "commits"
"""Of the bisect over commits, in that over releases."""
PAUSED, INTERRUPTED = 4, 130
_START = "start"


def main(arguments: list[str], description: str) -> int:
    code = dispatch(arguments, description)
    if threading.active_count() > 1:  # installs that no answer needs any more: they end with this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def dispatch(arguments: list[str], description: str) -> int:
    """Run the verb of a command line; installs on threads may outlive it."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    words, command = arguments[:split], arguments[split + 1 :]
    try:
        match words:
            case ["status" | "log" as verb, *rest] if len(rest) < 2:
                folder = Path(rest[0]) if rest else latest_folder(FOLDER)
                return status(folder) if verb == "status" else log(folder)
            case ["replay", file]:
                return replay(Path(file))
            case ["judge", *rest]:
                return judge_once(read_options(Options, SCRIPT, description, rest), command)
            case ["--resume", *rest]:
                folder = Path(rest.pop(0)) if rest and not rest[0].startswith("--") else latest_folder(FOLDER)
                options = read_options(Options, SCRIPT, description, rest)
                return _bisect(load_state(folder), folder, options.then_git)
        return begin(read_options(Options, SCRIPT, description, words), command)
    except (WrongQuestion, ConfigError) as error:
        return report_user_error(error, rank=0)
    except Pause as error:
        report_user_error(error, rank=0)
        return PAUSED


def begin(options: Options, words: Sequence[str], taken: Sequence[Record] = ()) -> int:
    """Start a new bisect. taken: verdicts that hold without a run. Raises WrongQuestion, Pause."""
    question = settle(ask(options, words, Path.cwd()))
    state = State(question=question, candidates=find_candidates(question))
    names = {candidate.name for candidate in state.candidates}
    for record in taken:
        if record.name in names:
            state.records.append(record)
        else:
            print(f"{record.verdict} {record.name} is left out: it is no candidate of this bisect", flush=True)
    folder = Path(options.dir or FOLDER / f"{datetime.now():%Y%m%d-%H%M%S}-{question.options.package}")
    if (folder / STATE).exists():
        raise WrongQuestion(f"--dir {folder} holds a bisect; continue with --resume {folder}, or give another folder.")
    return _bisect(state, folder, question.options.then_git)


def status(folder: Path) -> int:
    state = load_state(folder)
    print(join([SCRIPT, *state.question.words()]), end="\n\n")
    rows = candidate_rows(state)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:3]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    answer = answer_of(state)
    lines = sentences(state, answer) if answer.kind != "open" else state.answer.get("sentences", [])
    if not lines and (process := owner_of(folder)):
        since, run = max(((run.stat().st_mtime, run) for run in folder.glob("runs/*/*")), default=(time.time(), folder))
        newest = f"its newest run is {run.parent.name}, since {time.time() - since:.0f} s, with its output in {run}"
        lines = [describe_left(state), f"process {process} is running it; {newest}"]
    print("", *(lines or [describe_left(state), f"continue with: python {SCRIPT} --resume {folder}"]), sep="\n")
    return 0


def log(folder: Path) -> int:
    """Print the question and a line for each verdict, in their order: a line may be changed before a replay."""
    state = load_state(folder)
    print(f"# A bisect's verdicts, oldest first. `{SCRIPT} replay FILE` begins anew with those that are left here.")
    print(f"{_START} {json.dumps(asdict(state.question))}")
    for record in state.records:
        print(f"{record.verdict} {record.name}  # {record.reason}")
    return 0


def replay(file: Path) -> int:
    if not file.is_file():
        raise WrongQuestion(f"replay {file}: give the file that `{SCRIPT} log` printed.")
    question, records = None, []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        verdict, _, rest = line.partition(" ")
        name, _, reason = rest.partition("  # ")
        try:
            if verdict == _START:
                question = msgspec.json.decode(rest, type=Question)
            elif line.strip() and not line.startswith("#"):
                checked: Verdict = msgspec.convert(verdict, Verdict)
                records.append(Record(name=name.strip(), verdict=checked, reason=reason or "replayed", replayed=True))
        except msgspec.DecodeError as error:
            known = f"{_START}, {', '.join(get_args(Verdict))}"
            wrong = f"{file}:{number} begins with {verdict!r}; it must be a line of {known}: {error}."
            raise WrongQuestion(wrong) from error
    if question is None:
        raise WrongQuestion(f"{file} has no line that begins with {_START!r}; give the output of `{SCRIPT} log`.")
    os.chdir(question.folder)
    return begin(replace(question.options, dir=""), question.command, records)


def judge_once(options: Options, words: Sequence[str]) -> int:
    """Run once with this Python, as the script of `git bisect run`: 0 good, 1 bad, 125 for what must be skipped."""
    if options.worse:
        raise WrongQuestion("--worse compares with the good end, which one run does not have; give --above or --below.")
    options.package = options.package or "sglang"
    question = check_run(Question(options=options, command=tuple(words), folder=str(Path.cwd())))
    folder = default_root().with_name("harness-bisect-judge")
    try:
        with closing(lock_folder(folder)) as lock:
            shutil.rmtree(folder / "runs", ignore_errors=True)
            for number in range(1, options.repeat + 1):
                made = run_once(
                    question,
                    Environment(python=sys.executable).with_freeze(),
                    folder / "runs" / str(number),
                    no_gpu=not has_gpu(),
                    lock=lock.fileno(),
                    limit=parse_seconds(options.timeout),
                )
                print(f"{made.verdict.upper()}: {made.reason} ({made.seconds:.1f} s; {made.log})", flush=True)
                if made.verdict != "good":
                    return 1 if made.verdict == "bad" else CANNOT_RUN_HERE
    except (StopRequested, WrongQuestion, OSError) as error:  # nothing that is the commit's
        print(f"error: {error}", file=sys.stderr)
        return FIRST_STOPPING_CODE
    return 0


def _bisect(state: State, folder: Path, then_git: str) -> int:
    """Run it, and then, if a checkout is given, the bisect over the commits between the two releases found."""
    folder, checkout = folder.absolute(), then_git or state.question.options.then_git
    state, answer = _run_to_answer(state, folder)
    if answer.kind != "found" or state.question.options.git:
        return EXIT_CODES[answer.kind]
    if not checkout:
        print(f"on to the commit: python {SCRIPT} --resume {folder} --then-git CHECKOUT", flush=True)
        return EXIT_CODES[answer.kind]
    inner = folder / COMMITS_FOLDER
    try:
        question = _question_of_commits(state, answer.edges[0], Path(checkout).expanduser().resolve(), inner)
        print("\non to the commits", flush=True)
        return _bisect(State(question=question, candidates=find_candidates(question)), inner, "")
    except WrongQuestion as error:
        print(
            f"The commit was not found: {error} It may not be in the code, but in a dependency or a build.", flush=True
        )
        return EXIT_CODES[answer.kind]


def _question_of_commits(state: State, edge: Edge, checkout: Path, folder: Path) -> Question:
    """Ask for the commits between the tags of the edge's two releases, over the packages that the bad one ran with.

    A tag that lies on a branch gives way to where the branch began. Raises WrongQuestion.
    """
    options, sides = state.question.options, (edge.before, edge.after)
    before, after = (commit_of(checkout, state.candidates[i].name) for i in sides)
    older = fork_point(checkout, before, after)
    bad = next(state.record(i) for i in sides if state.verdicts[i] == "bad")
    unset = ("then_git", "environments", "wheels", "only_package", "hold", "second_look")
    changes: dict[str, Any] = {name: getattr(Options, name) for name in unset}
    changes |= {"git": str(checkout), "python": bad.python, "dir": str(folder)}
    changes["good"], changes["bad"] = (after, older) if options.find_fix else (older, after)
    return replace(state.question, options=replace(options, **changes))


def _run_to_answer(state: State, folder: Path) -> tuple[State, Answer]:
    """Run the bisect and write its report; if it is stopped, say how to continue, and end the process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        lock = lock_folder(folder)
    except OSError as error:
        raise WrongQuestion(f"the folder {folder} cannot be written: {error.strerror}.") from error
    with closing(lock):
        if (folder / STATE).exists():
            state = load_state(folder)  # a killed bisect may have written a verdict while its lock was waited for
        with closing(Progress(state)) as progress:
            try:
                provider = provider_of(state.question, folder, no_gpu := not has_gpu())
                state.answer = {}
                state.save(folder)
                ends = f"{state.candidates[0].label} to {state.candidates[-1].label}"
                progress.say(f"{len(state.candidates)} candidates from {ends}; state in {folder}")
                progress.say(store_of(state.question.options).describe())
                for yanked in [candidate.label for candidate in state.candidates if candidate.yanked]:
                    progress.say(f"{yanked} was yanked by its publisher; it is run as it was asked for")
                answer = Bisection(state, folder, provider, progress, lock.fileno(), no_gpu).run()
                progress.close()
                state.answer = as_dict(state, answer)
                state.save(folder)
                text = write_reports(state, answer, folder)
                print(f"\n{text}\nreport: {folder / 'report.md'} and report.html", flush=True)
                return state, answer
            except WrongQuestion as error:
                if state.records:  # else nothing was run: the question is to be asked otherwise
                    state.answer = {"kind": "refused", "exit_code": 2, "edges": [], "sentences": [str(error)]}
                    state.save(folder)
                raise
            except KeyboardInterrupt:
                why, code = "interrupted", INTERRUPTED
            except (Pause, StopRequested, Unavailable, SupervisorKilled) as error:
                why, code = f"paused: {error}", PAUSED
            except OSError as error:
                why, code = f"paused: {folder} cannot be used: {error.strerror or error}.", PAUSED
        sys.stdout.flush()
        kept = f"{len(state.records)} verdicts are kept; continue with: python {SCRIPT} --resume {folder}"
        print(f"{why}\n{kept}", file=sys.stderr, flush=True)
        os._exit(code)  # installs on other threads end with it, as their supervisors' pipes close
