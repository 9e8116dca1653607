"""What launch/bisect_versions.py does: begin, go on, look, replay, judge one run. Each returns the exit code."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import NoReturn

from harness.runtime.errors import CANNOT_RUN_HERE
from harness.tools.bisection import command, judge, onward, report, setting, story, summary
from harness.tools.bisection.answer import EXIT_CODES, Answer
from harness.tools.bisection.conduct import Conductor
from harness.tools.bisection.environment import Environment, own_version
from harness.tools.bisection.question import Options, Question, WrongQuestion, ask, check_judgement
from harness.tools.bisection.registry import NoNetwork
from harness.tools.bisection.show import Show, left
from harness.tools.bisection.state import FOLDER_MODE, Record, State, latest, load, lock, new_folder, owner
from harness.tools.bisection.store import Pause, default_root
from harness.tools.environments import has_gpu

FOLDER = "bisects"
JUDGED_KEPT = 20
"""Folders of `judge` whose run was not good."""
PAUSED, INTERRUPTED, MISTAKE = 4, 130, 2


def begin(options: Options, words: Sequence[str], taken: Sequence[Record] = ()) -> int:
    """A new bisect. taken: verdicts that hold without a run. Raises WrongQuestion, NoNetwork."""
    question = _asked(options, words)
    command.check(question)
    state = _new(question)
    names = {candidate.name for candidate in state.candidates}
    state.records = [record for record in taken if record.name in names]
    ends = f"{state.candidates[0].shown} to {state.candidates[-1].shown}"
    for record in taken:
        if record.name not in names:
            print(f"{record.verdict} {record.name} is left out: it is no candidate from {ends}", flush=True)
    folder = Path(options.dir) if options.dir else new_folder(Path(FOLDER), question.options.package)
    if (folder / "state.json").exists():
        raise WrongQuestion(f"--dir {folder} holds a bisect; go on with --resume {folder}, or give another folder.")
    return _go(state, folder)


def resume(given: Sequence[str], options: Options | None, words: Sequence[str]) -> int:
    """Go on: with the folder given, else the latest bisect; with a question, the latest one of that question."""
    if given:
        folder = Path(given[0])
    elif options and options.dir:
        folder = Path(options.dir)
    else:
        digest = _asked(options, words).digest() if options and (options.good or words) else None
        folder = latest(Path(FOLDER), digest)
    state = load(folder)
    if options and (options.good or words) and _asked(options, words).digest() != state.question.digest():
        raise WrongQuestion(
            f"{folder} asks another question: {join(['launch/bisect_versions.py', *state.question.words()])}"
        )
    then_git = (options.then_git or options.git) if options and not (options.good or words) else ""
    if then_git and not Path(then_git).expanduser().is_dir():
        raise WrongQuestion(f"--then-git {then_git} is no folder; give one that is there.")
    return _go(state, folder, str(Path(then_git).expanduser().resolve()) if then_git else "")


def _asked(options: Options, words: Sequence[str]) -> Question:
    return setting.settle(ask(options, words, Path.cwd()))


def _new(question: Question) -> State:
    """A bisect of which nothing is known."""
    return State(
        question=question,
        candidates=setting.candidates(question),
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        script=command.digest(question),
    )


def status(words: Sequence[str]) -> int:
    folder = _folder([word for word in words if word != "--json"], "status")
    state = load(folder)
    print(summary.as_json(state, owner(folder)) if "--json" in words else story.status(state, folder))
    return 0


def log(words: Sequence[str]) -> int:
    print(story.log(load(_folder(words, "log"))), end="")
    return 0


def replay(words: Sequence[str]) -> int:
    """Begin anew with the verdicts of a log, some of them perhaps edited away."""
    if len(words) != 1 or not Path(words[0]).is_file():
        raise WrongQuestion(f"replay {' '.join(words)}: give the file that `launch/bisect_versions.py log` printed.")
    question, taken = story.read_log(Path(words[0]))
    options = question.options
    options.dir = ""
    os.chdir(question.folder)
    return begin(options, question.command, taken)


def judge_here(options: Options, words: Sequence[str]) -> int:
    """One run with this Python, as the script of `git bisect run`: 0 good, 1 bad, 125 for what must be skipped."""
    check_judgement(options)
    if not words:
        raise WrongQuestion(
            "there is nothing to run; give a command after --, such as: judge -- launch/ppo.py CONFIG.toml."
        )
    if options.worse:
        raise WrongQuestion("--worse compares with the good end, which one run does not have; give --above or --below.")
    question = Question(options=options, command=tuple(words), folder=str(Path.cwd()))
    command.check(question)
    paths = tuple(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)
    freeze = {"sglang": own_version("sglang")} if own_version("sglang") else {}
    environment = Environment(python=sys.executable, paths=paths, freeze=freeze)
    try:
        folder = _judged_folder()
    except OSError as error:
        print(f"error: {error.filename} cannot be written: {error.strerror}; set XDG_CACHE_HOME.", file=sys.stderr)
        return judge.FIRST_STOPPING_CODE
    worst = "good"
    for number in range(options.repeat):
        try:
            with (folder / "lock").open("w") as held:
                made = judge.attempt(
                    question,
                    environment,
                    folder / str(number),
                    no_gpu=not has_gpu(),
                    variables={},
                    lock=held.fileno(),
                    reference=None,
                    limit=question.timeout,
                    beat=lambda: None,
                )
        except judge.Stop as error:
            print(f"error: {error}", file=sys.stderr)
            return judge.FIRST_STOPPING_CODE
        log = "" if made.verdict == "good" else f"; {made.log}"  # what is good is not kept
        print(f"{made.verdict.upper()}: {made.reason} ({made.seconds:.1f} s{log})", flush=True)
        worst = made.verdict
        if worst != "good":
            break
    if worst == "good":
        shutil.rmtree(folder)
    return {"good": 0, "bad": 1}.get(worst, CANNOT_RUN_HERE)


def _judged_folder() -> Path:
    """A new one in the user's cache, closed to others; the oldest of those beside it go. Raises OSError."""
    root = default_root().with_name("harness-bisect-judge")
    root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    for old in sorted(root.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)[JUDGED_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{datetime.now():%Y%m%d-%H%M%S}-", dir=root))


def _go(state: State, folder: Path, then_git: str = "") -> int:
    """Conduct it, and where that is asked for, that of the commits between the two releases found."""
    folder = folder.absolute()
    state, found = _conduct(state, folder)
    checkout = then_git or state.question.options.then_git
    if found.kind != "found" or state.question.options.git:
        return EXIT_CODES[found.kind]
    if not checkout:
        print(f"on to the commit: python launch/bisect_versions.py --resume {folder} --then-git CHECKOUT", flush=True)
        return EXIT_CODES[found.kind]
    try:
        question = onward.question_of(state, found.edges[0], Path(checkout), folder)
        print("\non to the commits", flush=True)
        inner = Path(question.options.dir)
        return _go(load(inner) if (inner / "state.json").exists() else _new(question), inner)
    except WrongQuestion as error:
        print(
            f"The commit was not found: {error} What is not in the code may be in a dependency or a build.", flush=True
        )
        return EXIT_CODES[found.kind]


def _conduct(state: State, folder: Path) -> tuple[State, Answer]:
    """To the answer, and whatever happens say how to go on."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        held = lock(folder)
    except OSError as error:
        raise WrongQuestion(f"the folder {folder} cannot be written: {error.strerror}.") from error
    with closing(held):
        if (folder / "state.json").exists():
            state = load(folder)  # a killed bisect may have written a verdict while its lock was waited for
        no_gpu = not has_gpu()
        show = Show()
        try:
            provider = setting.provider(state.question, folder, no_gpu)
            state.answer = {}
            state.save(folder)
            _introduce(state, folder, show)
            found = Conductor(state, folder, provider, show, held.fileno(), no_gpu).run()
            show.close()
            state.answer = summary.told(state, found)
            state.save(folder)
            text = report.write(state, found, folder)
            print(f"\n{text}\nreport: {folder / 'report.md'} and report.html", flush=True)
            return state, found
        except WrongQuestion as error:
            show.close()
            if state.records:  # else nothing was run: the question is to be asked otherwise
                state.answer = summary.refused(str(error))
                state.save(folder)
            raise
        except KeyboardInterrupt:
            show.close()
            _stopped("interrupted", folder, INTERRUPTED)
        except (Pause, NoNetwork, judge.Stop) as error:
            show.close()
            _stopped(f"paused: {error}", folder, PAUSED)
        except OSError as error:
            show.close()
            _stopped(f"paused: {folder} cannot be used: {error.strerror or error}.", folder, PAUSED)
        finally:
            show.close()


def _introduce(state: State, folder: Path, show: Show) -> None:
    question, count = state.question, len(state.candidates)
    show.say(f"{count} candidates from {state.candidates[0].shown} to {state.candidates[-1].shown}; state in {folder}")
    if not question.options.environments:
        show.say(setting.store_of(question.options).shown())
    for candidate in state.candidates:
        if candidate.yanked:
            show.say(f"{candidate.shown} was yanked by its publisher; it is run as it was asked for")
    if state.records:
        show.say(f"{len(state.records)} verdicts are known; {left(state)}")
    if state.script and state.script != command.digest(question):
        show.say("the script is not the one that the first verdicts came from; start anew if they may differ")


def _stopped(why: str, folder: Path, code: int) -> NoReturn:
    """Ends the process: installs on other threads end with it, as their wardens' pipes close."""
    try:
        kept = f"{len(load(folder).records)} verdicts are kept"
    except WrongQuestion:
        kept = "nothing is kept yet"
    sys.stdout.flush()
    print(f"{why}\n{kept}; go on with: python launch/bisect_versions.py --resume {folder}", file=sys.stderr, flush=True)
    os._exit(code)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _folder(words: Sequence[str], verb: str) -> Path:
    if len(words) > 1:
        raise WrongQuestion(f"{verb} takes one folder at most, but was given {' '.join(words)}.")
    return Path(words[0]) if words else latest(Path(FOLDER))
