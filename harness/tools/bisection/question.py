"""What a bisect was asked: the two ends, what moves, what counts as bad, and the command that is run for each candidate."""

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from harness.cluster.mesh import ParallelDims
from harness.tools.command_line import parse
from harness.tools.environments import REPOSITORY

Kind = Literal["failure", "match", "hang", "metric"]
SCRIPT = "launch/bisect_versions.py"
AUTO = "auto"
TORCHRUN_JOBS = tuple(REPOSITORY / "launch" / name for name in ("ppo.py", "sync.py"))
"""Run by torchrun, and write metrics into --run.dir."""
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(kw_only=True)
class Options:
    """A question; its answer is the first bad release, and what changed with it."""

    good: str = ""
    """An end that works: a version, or with --git a commit. Older than --bad, unless --find-fix."""
    bad: str = ""
    """An end that does not."""
    find_fix: bool = False
    """The other way round: --bad is the older end, and the first good release is looked for."""
    package: str = ""
    """What moves: torch, flashinfer-python, or any other; by default sglang, with --git what its pyproject.toml names."""
    git: str = ""
    """A local git checkout whose first-parent commits are the candidates, laid over this Python's packages."""
    then_git: str = ""
    """A checkout of the package, with its tags: once the release is found, the commits between the two tags are bisected."""
    environments: str = ""
    """A folder with one environment or site-packages folder for each version, made before: no network is needed."""
    wheels: str = ""
    """A folder of wheels, from which alone everything is installed: no network is needed."""
    pre_releases: bool = False
    """Release candidates too. Post-releases always are candidates, yanked releases only as an end."""
    only_package: bool = False
    """Install each candidate alone, without its dependencies, laid over this Python's packages: seconds, not minutes."""
    hold: tuple[str, ...] = ()
    """Requirements that all candidates share; by default, if another package moves, this Python's sglang; `none`."""
    python: str = ""
    """Python of the environments, such as 3.12. Without it, this one where a release allows it, else the nearest."""
    today: bool = False
    """Resolve with what is published today, not with what was when the release was."""
    match: str = ""
    """Only this failure is bad, a slug of launch/diagnose.py or a regular expression of a log's line; others are skipped."""
    hang: bool = False
    """Only running past --timeout counts as bad."""
    metric: str = ""
    """A number decides, not a failure: the name of one in metrics.jsonl, or that the script prints as NAME = 0.1."""
    above: float | None = None
    """With --metric: its largest value is bad above this."""
    below: float | None = None
    """With --metric: its smallest value is bad below this."""
    worse: str = ""
    """With --metric: its median is bad above this many times the good end's, such as 1.3x."""
    repeat: int = 1
    """Run each candidate up to this often; one bad run makes it bad. For a failure that comes and goes."""
    confidence: float = 0.95
    """With --repeat: how sure the answer must be. The bad end, for its rate, and the last good one are run again until then."""
    confirm: int = 400
    """With --repeat: the most runs that this may take; if they are not enough, the answer is "probably" and the exit code 1."""
    timeout: str = AUTO
    """Seconds, 10m, or 2h, after which a run hangs; by default 10 times the good end's, at least 10 minutes; 0: never."""
    probe: str = "auto"
    """Python code without which a candidate that fails is skipped, not bad; by default `import PACKAGE`. `none`: no probe."""
    second_look: int = 0
    """Runs, beyond those that find an edge, that look for a second one elsewhere."""
    dir: str = ""
    """Where state, logs and report are kept; by default a new folder of bisects/."""
    store: str = ""
    """Where environments are kept; by default harness-bisect in XDG_CACHE_HOME or ~/.cache."""
    store_gib: float = 60.0
    """The store's limit; what was used least recently goes first."""


class WrongQuestion(ValueError):
    """What is asked cannot be answered; one sentence."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options, the command that is run, and the folder in which it is run."""

    options: Options
    command: tuple[str, ...]
    folder: str

    @property
    def kind(self) -> Kind:
        options = self.options
        return "match" if options.match else "hang" if options.hang else "metric" if options.metric else "failure"

    @property
    def ratio(self) -> float | None:
        return float(self.options.worse.rstrip("x")) if self.options.worse else None

    def words(self) -> list[str]:
        """Return the arguments of launch/bisect_versions.py that ask it."""
        words = []
        for name, value in asdict(self.options).items():
            if value != getattr(Options, name):
                words += [_flag(name), *([] if value is True else value if isinstance(value, tuple) else [str(value)])]
        return [*words, "--", *self.command]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_if(wrong: object, sentence: str) -> None:
    if wrong:
        raise WrongQuestion(sentence)


def parse_seconds(text: str) -> float:
    """Return the seconds of "90", "90s", "10m" or "2h"; 0 for "auto". Raises WrongQuestion."""
    if text == AUTO:
        return 0.0
    if not (match := _SECONDS.fullmatch(text.strip())):
        raise WrongQuestion(f"--timeout: a time must be seconds, 90s, 10m or 2h, got {text!r}.")
    return float(match[1]) * _UNITS[match[2]]


def ask(options: Options, command: Sequence[str], folder: Path) -> Question:
    """Check what can be checked without looking at versions. Raises WrongQuestion."""
    for name in ("good", "bad"):
        _refuse_if(not getattr(options, name), f"--{name} is missing; give both ends: --good 0.5.9 --bad 0.5.23.")
    sources = [name for name in ("git", "environments", "wheels") if getattr(options, name)]
    _refuse_if(len(sources) > 1, f"{' and '.join(map(_flag, sources))} cannot go together; give one of them.")
    alone = options.only_package and (options.hold or options.git or options.environments)
    _refuse_if(alone, "--only-package holds all else as it is: it cannot go with --hold, --git or --environments.")
    _refuse_if(
        options.then_git and options.git, "--then-git is for releases: with --git, commits are bisected already."
    )
    for name in (*sources, *(["then_git"] if options.then_git else [])):
        given = Path(getattr(options, name)).expanduser()
        _refuse_if(not given.is_dir(), f"{_flag(name)} must be an existing folder, got {given}.")
        setattr(options, name, str(given.resolve()))
    for name, least in (("repeat", 1), ("second_look", 0), ("confirm", 0)):
        value = getattr(options, name)
        _refuse_if(value < least, f"{_flag(name)} must be {least} or more, got {value}.")
    sure = 0.5 <= options.confidence <= 0.999
    _refuse_if(not sure, f"--confidence must be from 0.5 to 0.999, got {options.confidence}.")
    _refuse_if(options.store_gib <= 0, f"--store-gib must be above 0, got {options.store_gib}.")
    return check_run(Question(options=options, command=tuple(command), folder=str(folder)))


def check_run(question: Question) -> Question:
    """Return the question if it has a command that can be run, and one thing decides what is bad. Raises WrongQuestion."""
    options, command = question.options, question.command
    _refuse_if(not command, "there is nothing to run; give a command after --, such as: -- launch/ppo.py CONFIG.toml.")
    chosen = [f"--{name}" for name in ("match", "hang", "metric") if getattr(options, name)]
    _refuse_if(len(chosen) > 1, f"{' and '.join(chosen)} cannot both decide; give one of them.")
    limits = [f"--{name}" for name in ("above", "below", "worse") if getattr(options, name) not in (None, "")]
    wanted = f"--metric {options.metric} needs one of --above, --below and --worse"
    _refuse_if(options.metric and len(limits) != 1, f"{wanted}, got {' and '.join(limits) or 'none'}.")
    _refuse_if(limits and not options.metric, f"{' and '.join(limits)} needs --metric NAME.")
    ratio = 0.0
    with suppress(ValueError):
        ratio = float(options.worse.rstrip("x"))
    _refuse_if(options.worse and not ratio > 0, f"--worse must be a ratio above 0, such as 1.3x, got {options.worse}.")
    _refuse_if(not parse_seconds(options.timeout) and options.hang, "--hang needs --timeout, such as --timeout 10m.")
    try:
        re.compile(options.match)
    except re.error as error:
        wrong = f"--match must be a known slug or a regular expression, got {options.match!r}: {error}."
        raise WrongQuestion(wrong) from error
    script, first = script_of(question), command[0]
    if script in TORCHRUN_JOBS:
        try:
            _ranks(command[1:])
        except ValueError as error:
            raise WrongQuestion(f"the script's own arguments are wrong: {error}") from error
    elif script is None and not (first in ("torchrun", "pytest", "sglang") or _is_python(first) or shutil.which(first)):
        is_file = (Path(question.folder) / first).is_file()
        remedy = f"is not executable; make it so with chmod +x {first}, or give: -- bash {first}"
        raise WrongQuestion(f"{first} {remedy}" if is_file else f"the command {first} is not there.")
    return question


def script_of(question: Question) -> Path | None:
    """Return the Python script that the command runs, if it runs one. Raises WrongQuestion if it is not there."""
    first, *rest = question.command
    named = first if first.endswith(".py") else ""
    if _is_python(Path(first).name) and rest and not rest[0].startswith("-"):
        named = rest[0]
    if not named:
        return None
    for folder in (Path(question.folder), REPOSITORY):
        if (folder / named).is_file():
            return (folder / named).resolve()
    raise WrongQuestion(f"the script {named} is not there.")


def command_of(question: Question, python: str, folder: Path) -> list[str]:
    """Return what is run. python: the environment's; folder: of this run, for what it leaves."""
    script = script_of(question)
    first, *rest = question.command
    if script in TORCHRUN_JOBS:
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_ranks(rest)}"]
        own = [] if any(word.startswith("--run.dir") for word in rest) else ["--run.dir", str(folder / "run")]
        return [*torchrun, str(script), *rest, *own]
    if script is not None:
        return [python, str(script), *(rest if first.endswith(".py") else rest[1:])]
    if first == "torchrun":
        return [python, "-m", "torch.distributed.run", *rest]
    return [python if _is_python(first) else first, *rest]


def is_of_this_repository(question: Question) -> bool:
    """Return whether the script is one of this checkout, which imports harness and needs what it needs."""
    script = script_of(question)
    return script is not None and script.is_relative_to(REPOSITORY)


def _ranks(words: Sequence[str]) -> int:
    mesh = []
    for before, word in zip(["", *words], words, strict=False):
        is_value = before.startswith("--parallel.") and "=" not in before
        if is_value or word.endswith(".toml") or word.startswith("--parallel."):
            mesh.append(word)
    return ParallelDims.of(parse(mesh).config.parallel).world_size


def _is_python(word: str) -> bool:
    return word.rstrip("0123456789.") == "python"
