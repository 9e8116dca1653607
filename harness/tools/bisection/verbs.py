"""What launch/bisect_versions.py does: begin, resume, status, log, replay, judge. Each returns the exit code."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import NoReturn

from harness.config.cli import read_options
from harness.config.layers import ConfigError
from harness.runtime.errors import CANNOT_RUN_HERE, report_user_error
from harness.tools.bisection.answer import (
    EXIT_CODES,
    Answer,
    answer_of,
    as_dict,
    candidate_rows,
    refused_answer,
    sentences,
    status_json,
)
from harness.tools.bisection.bisect_report import write_reports
from harness.tools.bisection.bisection import Bisection
from harness.tools.bisection.candidates import IndexUnreachable, commit_of_release, find_candidates, fork_point, settle
from harness.tools.bisection.classify import FIRST_STOPPING_CODE, StopRequested, run_once
from harness.tools.bisection.installation import Environment, own_version, provider_of, store_of
from harness.tools.bisection.progress import Progress, describe_left
from harness.tools.bisection.question import (
    SCRIPT,
    Options,
    Question,
    WrongQuestion,
    ask,
    check_command,
    check_criterion,
    parse_seconds,
    script_digest,
)
from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import (
    FOLDER_MODE,
    STATE,
    Record,
    State,
    latest_folder,
    load_state,
    lock_folder,
    new_folder,
    owner_of,
)
from harness.tools.bisection.store import Pause, default_root
from harness.tools.environments import has_gpu
from harness.tools.process_tree import SupervisorKilled

FOLDER = Path("bisects")
COMMITS_FOLDER = "commits"
"""Of the bisect over commits, in that over releases."""
JUDGED_KEPT = 20
"""Folders of `judge` that are kept: those whose run was not good."""
PAUSED, INTERRUPTED = 4, 130
_VERDICTS = ("good", "bad", "skip", "other")
_START = "start "


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

    def options(given: list[str]) -> Options:
        return read_options(Options, SCRIPT, description, given)

    try:
        match words:
            case ["status", *rest]:
                return status(rest)
            case ["log", *rest]:
                return log(rest)
            case ["replay", *rest]:
                return replay(rest)
            case ["judge", *rest]:
                return judge_once(options(rest), command)
        if "--resume" in words:
            at = words.index("--resume")
            folder = [word for word in words[at + 1 : at + 2] if not word.startswith("--")]
            rest = words[:at] + words[at + 1 + len(folder) :]
            return resume(folder, options(rest) if rest or command else None, command)
        return begin(options(words), command)
    except (WrongQuestion, ConfigError) as error:
        return report_user_error(error, rank=0)
    except IndexUnreachable as error:
        report_user_error(error, rank=0)
        return PAUSED


def begin(options: Options, words: Sequence[str], taken: Sequence[Record] = ()) -> int:
    """Start a new bisect. taken: verdicts that hold without a run. Raises WrongQuestion, IndexUnreachable."""
    question = settle(ask(options, words, Path.cwd()))
    check_command(question)
    state = _new_state(question)
    names = {candidate.name for candidate in state.candidates}
    state.records = [record for record in taken if record.name in names]
    ends = f"{state.candidates[0].label} to {state.candidates[-1].label}"
    for record in taken:
        if record.name not in names:
            print(f"{record.verdict} {record.name} is left out: it is no candidate from {ends}", flush=True)
    folder = Path(options.dir) if options.dir else new_folder(FOLDER, question.options.package)
    if (folder / STATE).exists():
        raise WrongQuestion(
            f"--dir {folder} holds a bisect; continue it with --resume {folder}, or give another folder."
        )
    return _bisect(state, folder)


def resume(given: Sequence[str], options: Options | None, words: Sequence[str]) -> int:
    """Continue the bisect of the folder given, else the latest one; with a question, the latest one of that question."""
    question = settle(ask(options, words, Path.cwd())) if options and (options.good or words) else None
    if given or (options and options.dir):
        folder = Path(given[0] if given else options.dir)  # type: ignore[union-attr]
    else:
        folder = latest_folder(FOLDER, question.digest() if question else None)
    state = load_state(folder)
    if question and question.digest() != state.question.digest():
        raise WrongQuestion(f"{folder} asks another question: {join([SCRIPT, *state.question.words()])}")
    then_git = (options.then_git or options.git) if options and not question else ""
    checkout = Path(then_git).expanduser().resolve() if then_git else None
    if checkout and not checkout.is_dir():
        raise WrongQuestion(f"--then-git must be an existing folder, got {then_git}.")
    return _bisect(state, folder, checkout)


def status(words: Sequence[str]) -> int:
    """Print a table, and the answer or what is left; with --json, the same for programs."""
    folder = _folder([word for word in words if word != "--json"], "status")
    state = load_state(folder)
    if "--json" in words:
        print(status_json(state, owner_of(folder)))
        return 0
    print(join([SCRIPT, *state.question.words()]), end="\n\n")
    rows = candidate_rows(state)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:3]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    answer = answer_of(state)
    lines = sentences(state, answer) if answer.kind != "open" else state.answer.get("sentences", [])
    print("", *(lines or [describe_left(state), _running(folder)]), sep="\n")
    return 0


def _running(folder: Path) -> str:
    """Return what a bisect that runs in the folder does now, or how to continue it."""
    process = owner_of(folder)
    if process is None:
        return f"continue with: python {SCRIPT} --resume {folder}"
    runs = sorted((run.stat().st_mtime, run) for run in folder.glob("runs/*/*"))
    if not runs:
        return f"process {process} is running it"
    since, run = runs[-1]
    return (
        f"process {process} is running it; its newest run is {run.parent.name}, since {time.time() - since:.0f} s, with its"
        f" output in {run}"
    )


def log(words: Sequence[str]) -> int:
    """Print the question and a line for each verdict, in their order: a line may be changed before a replay."""
    state = load_state(_folder(words, "log"))
    print(f"# A bisect's verdicts, oldest first. `{SCRIPT} replay FILE` begins anew with those that are left here.")
    print(_START + json.dumps(asdict(state.question)))
    for record in state.records:
        print(f"{record.verdict} {record.name}  # {record.reason}")
    return 0


def replay(words: Sequence[str]) -> int:
    if len(words) != 1 or not Path(words[0]).is_file():
        raise WrongQuestion(f"replay {' '.join(words)}: give the file that `{SCRIPT} log` printed.")
    question, taken = read_log(Path(words[0]))
    os.chdir(question.folder)
    return begin(replace(question.options, dir=""), question.command, taken)


def read_log(file: Path) -> tuple[Question, list[Record]]:
    question, records = None, []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        verdict, _, rest = line.partition(" ")
        if line.startswith(_START):
            try:
                question = Question.from_dict(json.loads(rest))
            except (ValueError, KeyError, TypeError) as error:
                raise WrongQuestion(f"{file}:{number} is not a question as `log` writes it: {error}.") from error
        elif verdict in _VERDICTS:
            name, _, reason = rest.partition("  # ")
            records.append(Record(name=name.strip(), verdict=verdict, reason=reason or "replayed", replayed=True))  # type: ignore[arg-type]
        else:
            raise WrongQuestion(
                f"{file}:{number} begins with {verdict!r}, but must begin with one of {', '.join(_VERDICTS)}."
            )
    if question is None:
        raise WrongQuestion(
            f"{file} has no line that begins with {_START.strip()!r}; give the output of `{SCRIPT} log`."
        )
    return question, records


def judge_once(options: Options, words: Sequence[str]) -> int:
    """Run once with this Python, as the script of `git bisect run`: 0 good, 1 bad, 125 for what must be skipped."""
    check_criterion(options)
    if not words:
        raise WrongQuestion(
            "there is nothing to run; give a command after --, such as: judge -- launch/ppo.py CONFIG.toml."
        )
    if options.worse:
        raise WrongQuestion("--worse compares with the good end, which one run does not have; give --above or --below.")
    question = Question(options=options, command=tuple(words), folder=str(Path.cwd()))
    check_command(question)
    paths = tuple(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)
    sglang = own_version("sglang")
    environment = Environment(python=sys.executable, paths=paths, freeze={"sglang": sglang} if sglang else {})
    try:
        folder = _judged_folder()
    except OSError as error:
        print(f"error: {error.filename} cannot be written: {error.strerror}; set XDG_CACHE_HOME.", file=sys.stderr)
        return FIRST_STOPPING_CODE
    with (folder / "lock").open("w") as lock:
        for number in range(options.repeat):
            try:
                made = run_once(
                    question,
                    environment,
                    folder / str(number),
                    no_gpu=not has_gpu(),
                    lock=lock.fileno(),
                    limit=parse_seconds(options.timeout),
                )
            except StopRequested as error:
                print(f"error: {error}", file=sys.stderr)
                return FIRST_STOPPING_CODE
            kept = "" if made.verdict == "good" else f"; {made.log}"
            print(f"{made.verdict.upper()}: {made.reason} ({made.seconds:.1f} s{kept})", flush=True)
            if made.verdict != "good":
                return 1 if made.verdict == "bad" else CANNOT_RUN_HERE
    shutil.rmtree(folder)
    return 0


def _judged_folder() -> Path:
    """Return a new one in the user's cache, closed to others, and remove the oldest of those beside it. Raises OSError."""
    root = default_root().with_name("harness-bisect-judge")
    root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    for old in sorted(root.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)[JUDGED_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{datetime.now():%Y%m%d-%H%M%S}-", dir=root))


def _new_state(question: Question) -> State:
    created = datetime.now().astimezone().isoformat(timespec="seconds")
    candidates = find_candidates(question)
    return State(question=question, candidates=candidates, created=created, script=script_digest(question))


def _bisect(state: State, folder: Path, checkout: Path | None = None) -> int:
    """Run it, and then, if a checkout is given, the bisect over the commits between the two releases found."""
    folder = folder.absolute()
    state, answer = _run_to_answer(state, folder)
    code = EXIT_CODES[answer.kind]
    if not checkout and state.question.options.then_git:
        checkout = Path(state.question.options.then_git)
    if answer.kind == "found" and not state.question.options.git:
        if not checkout:
            print(f"on to the commit: python {SCRIPT} --resume {folder} --then-git CHECKOUT", flush=True)
            return code
        try:
            question = _question_of_commits(state, answer.edges[0], checkout, folder)
            print("\non to the commits", flush=True)
            inner = folder / COMMITS_FOLDER
            return _bisect(load_state(inner) if (inner / STATE).exists() else _new_state(question), inner)
        except WrongQuestion as error:
            print(
                f"The commit was not found: {error} What is not in the code may be in a dependency or a build.",
                flush=True,
            )
    return code


def _question_of_commits(state: State, edge: Edge, checkout: Path, folder: Path) -> Question:
    """Ask for the commits between the tags of the edge's two releases, over the packages that the bad one ran with.

    A tag that lies on a branch gives way to where the branch began. Raises WrongQuestion.
    """
    options, sides = state.question.options, (edge.before, edge.after)
    before, after = (commit_of_release(checkout, options.package, state.candidates[i].name) for i in sides)
    older = fork_point(checkout, before, after)
    bad = next(state.record(i) for i in sides if state.verdicts[i] == "bad")
    moved = replace(
        options,
        git=str(checkout),
        then_git="",
        environments="",
        wheels="",
        only_package=False,
        hold=(),
        python=bad.python,
        good=after if options.find_fix else older,
        bad=older if options.find_fix else after,
        dir=str(folder / COMMITS_FOLDER),
        second_look=0,
    )
    return replace(state.question, options=moved)


def _run_to_answer(state: State, folder: Path) -> tuple[State, Answer]:
    """Run the bisect and write its report; if it is stopped, say how to continue, and end the process."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        lock = lock_folder(folder)
    except OSError as error:
        raise WrongQuestion(f"the folder {folder} cannot be written: {error.strerror}.") from error
    with closing(lock):
        if (folder / STATE).exists():
            state = load_state(folder)  # a killed bisect may have written a verdict while its lock was waited for
        no_gpu = not has_gpu()
        with closing(Progress(state)) as progress:
            try:
                provider = provider_of(state.question, folder, no_gpu)
                state.answer = {}
                state.save(folder)
                _introduce(state, folder, progress)
                answer = Bisection(state, folder, provider, progress, lock.fileno(), no_gpu).run()
                progress.close()
                state.answer = as_dict(state, answer)
                state.save(folder)
                text = write_reports(state, answer, folder)
                print(f"\n{text}\nreport: {folder / 'report.md'} and report.html", flush=True)
                return state, answer
            except WrongQuestion as error:
                if state.records:  # else nothing was run: the question is to be asked otherwise
                    state.answer = refused_answer(str(error))
                    state.save(folder)
                raise
            except KeyboardInterrupt:
                why, code = "interrupted", INTERRUPTED
            except (Pause, IndexUnreachable, StopRequested, SupervisorKilled) as error:
                why, code = f"paused: {error}", PAUSED
            except OSError as error:
                why, code = f"paused: {folder} cannot be used: {error.strerror or error}.", PAUSED
        _stop(why, folder, code)


def _introduce(state: State, folder: Path, progress: Progress) -> None:
    count, ends = len(state.candidates), f"{state.candidates[0].label} to {state.candidates[-1].label}"
    progress.say(f"{count} candidates from {ends}; state in {folder}")
    if not state.question.options.environments:
        progress.say(store_of(state.question.options).describe())
    for candidate in state.candidates:
        if candidate.yanked:
            progress.say(f"{candidate.label} was yanked by its publisher; it is run as it was asked for")
    if state.records:
        progress.say(f"{len(state.records)} verdicts are known; {describe_left(state)}")
    if state.script and state.script != script_digest(state.question):
        progress.say("the script is not the one that the first verdicts came from; start anew if they may differ")


def _stop(why: str, folder: Path, code: int) -> NoReturn:
    """End the process: installs on other threads end with it, as their supervisors' pipes close."""
    try:
        kept = f"{len(load_state(folder).records)} verdicts are kept"
    except WrongQuestion:
        kept = "nothing is kept yet"
    sys.stdout.flush()
    print(f"{why}\n{kept}; continue with: python {SCRIPT} --resume {folder}", file=sys.stderr, flush=True)
    os._exit(code)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _folder(words: Sequence[str], verb: str) -> Path:
    if len(words) > 1:
        raise WrongQuestion(f"{verb} takes one folder at most, but was given {' '.join(words)}.")
    return Path(words[0]) if words else latest_folder(FOLDER)
