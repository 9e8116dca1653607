"""What a bisect is asked: the two ends, what moves, what counts as bad, and the command that is run for each
candidate.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from harness.cluster.mesh import ParallelDims
from harness.config.mistakes import ConfigError
from harness.tools.command_line import parse
from harness.tools.environments import REPOSITORY
from harness.tools.trial.trial import Signature

SCRIPT = "launch/bisect_versions.py"
AUTO = "auto"
TORCHRUN_JOBS = tuple(REPOSITORY / "launch" / name for name in ("ppo.py", "sync.py"))
"""Started by torchrun with the ranks of their config."""
TORCHRUN = REPOSITORY / "launch" / "torchrun.py"
"""A torchrun whose ranks start in less time."""
PYTHON_PROGRAMS = ("pytest", "sglang")
"""Programs that candidates may have, even if this machine's PATH does not."""
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(kw_only=True)
class Options:
    """Put the command after --. A script runs with the candidate's Python, and BISECT_CANDIDATE names the candidate.

    --resume [FOLDER] continues a bisect that was stopped, by default the newest one in bisects/. It takes no command,
    and of the options below --then-git alone.
    """

    good: str = ""
    """The end that works: a version, or a commit with --git. It is older than --bad, unless --find-fix is given."""
    bad: str = ""
    """The end that fails."""
    find_fix: bool = False
    """Find the first good release: --bad is then the older end."""
    package: str = ""
    """The package whose versions are tried, such as torch. Default: sglang; with --git, what its pyproject.toml
    names."""
    git: str = ""
    """Bisect the first-parent commits of this local checkout, over the packages of this Python. Nothing is built.
    If the package is not in its top folder, python/ or src/, give the folder that holds it, such as CHECKOUT/libs.
    If the older end is on a side branch, merged or not, the bisect starts where that branch began."""
    then_git: str = ""
    """After the release is found, bisect the commits between the two releases' tags in this checkout of the package."""
    environments: str = ""
    """A folder with an environment or a site-packages folder for each version, whose name is the version. Needs no
    network."""
    wheels: str = ""
    """Install only from the wheels in this folder. Needs no network."""
    hold: tuple[str, ...] = ()
    """Requirements that all candidates share, such as sglang==0.5.23 if --package is another one."""
    python: str = ""
    """Python to use: a version such as 3.12, or a path. Default: this one, or another one if a release does not allow
    it."""
    match: str = ""
    """Only this failure is bad: a name of launch/diagnose.py, or a regular expression for a line of the log."""
    hang: bool = False
    """Only a run that takes longer than --timeout is bad."""
    repeat: int = 1
    """For a failure that comes and goes: run each candidate up to this many times. One bad run makes it bad."""
    confirm: int = 400
    """With --repeat: the most extra runs to spend until the answer is 95 % sure."""
    timeout: str = AUTO
    """After how long a run counts as hanging: 90s, 10m or 2h. Default: 10 times the good end's, at least 10m; 0:
    never."""
    dir: str = ""
    """Where state, logs and report are kept. Default: a new folder in bisects/."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options, the command that is run, and the folder in which it is run."""

    options: Options
    command: tuple[str, ...]
    folder: str

    @property
    def signature(self) -> Signature:
        return Signature(match=self.options.match, hang=self.options.hang)

    @property
    def takes_any(self) -> bool:
        """Whether any failure is bad."""
        return self.signature == Signature()

    @property
    def runs_sglang(self) -> bool:
        """Whether the bisect is about SGLang, so that without a GPU the command needs SGLang's CPU mode.

        Any other command runs as the user would run it, even if SGLang happens to be installed.
        """
        named = (self.options.package, *(re.split(r"[^\w.-]", each)[0] for each in self.options.hold))
        script = script_of(self)
        return "sglang" in named or (script is not None and script.is_relative_to(REPOSITORY / "launch"))

    def words(self) -> list[str]:
        """Return the arguments of launch/bisect_versions.py that ask this question."""
        words = []
        for name, value in asdict(self.options).items():
            if value != getattr(Options, name):
                words += [_flag(name), *([] if value is True else value if isinstance(value, tuple) else [str(value)])]
        return [*words, "--", *self.command]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_if(wrong: object, sentence: str) -> None:
    if wrong:
        raise ConfigError(sentence)


def existing_folder(option: str, given: str) -> str:
    """Return the folder that an option names as an absolute path. Raises ConfigError."""
    folder = Path(given).expanduser()
    _refuse_if(not folder.is_dir(), f"{option} must be an existing folder, got {folder}.")
    return str(folder.resolve())


def parse_seconds(text: str) -> float:
    """Return the seconds of "90", "90s", "10m" or "2h"; 0 for "auto". Raises ConfigError."""
    if text == AUTO:
        return 0.0
    if not (match := _SECONDS.fullmatch(text.strip())):
        raise ConfigError(f"--timeout: a time must be seconds, 90s, 10m or 2h, got {text!r}.")
    return float(match[1]) * _UNITS[match[2]]


def ask(options: Options, command: Sequence[str], folder: Path) -> Question:
    """Check what can be checked without looking at versions. Raises ConfigError."""
    for name in ("good", "bad"):
        _refuse_if(not getattr(options, name), f"--{name} is missing; give both ends: --good 0.5.20 --bad 0.5.23.")
    sources = [name for name in ("git", "environments", "wheels") if getattr(options, name)]
    _refuse_if(len(sources) > 1, f"{' and '.join(map(_flag, sources))} cannot go together; give one of them.")
    _refuse_if(options.then_git and options.git, "--then-git is for releases, and --git bisects commits; give one.")
    for name in (*sources, *(["then_git"] if options.then_git else [])):
        setattr(options, name, existing_folder(_flag(name), getattr(options, name)))
    for name, least in (("repeat", 1), ("confirm", 0)):
        value = getattr(options, name)
        _refuse_if(value < least, f"{_flag(name)} must be {least} or more, got {value}.")
    _refuse_if(options.match and options.hang, "--match and --hang cannot both decide; give one of them.")
    _refuse_if(not parse_seconds(options.timeout) and options.hang, "--hang needs --timeout, such as --timeout 10m.")
    try:
        re.compile(options.match)
    except re.error as error:
        wrong = f"--match must be a name of launch/diagnose.py or a regular expression, got {options.match!r}: {error}."
        raise ConfigError(wrong) from error
    question = Question(options=options, command=tuple(command), folder=str(folder))
    _check_command(question)
    return question


def _check_command(question: Question) -> None:
    command = question.command
    _refuse_if(not command, "there is nothing to run; give a command after --, such as: -- launch/ppo.py CONFIG.toml.")
    script, first = script_of(question), command[0]
    if script in TORCHRUN_JOBS:
        try:
            _ranks(command[1:])
        except ValueError as error:
            raise ConfigError(f"the script's own arguments are wrong: {error}") from error
    elif script is None and not (first in ("torchrun", *PYTHON_PROGRAMS) or is_python(first) or shutil.which(first)):
        file = Path(question.folder) / first
        _refuse_if(file.is_dir(), f"{first} is a folder; give a script.")
        remedy = f"is not executable; make it so with chmod +x {first}, or give: -- bash {first}"
        raise ConfigError(f"{first} {remedy}." if file.is_file() else f"there is no command {first}.")


def script_of(question: Question) -> Path | None:
    """Return the Python script that the command runs, if it runs one.

    Raises ConfigError if the file does not exist.
    """
    first, *rest = question.command
    named = first if first.endswith(".py") else ""
    if is_python(Path(first).name) and rest and not rest[0].startswith("-"):
        named = rest[0]
    if not named:
        return None
    for folder in (Path(question.folder), REPOSITORY):
        if (folder / named).is_file():
            return (folder / named).resolve()
    raise ConfigError(f"there is no script {named}.")


def command_of(question: Question, python: str, folder: Path) -> list[str]:
    """Return what is run. python: the candidate's; folder: for the run directory of a job of launch/."""
    script = script_of(question)
    first, *rest = question.command
    if script in TORCHRUN_JOBS:
        # By its own name, which may not resolve, a host would look for itself for minutes.
        meet = ["--standalone", "--local-addr=127.0.0.1"]
        torchrun = [python, str(TORCHRUN), *meet, f"--nproc-per-node={_ranks(rest)}"]
        own = [] if any(word.startswith("--run.dir") for word in rest) else ["--run.dir", str(folder / "run")]
        return [*torchrun, str(script), *rest, *own]
    if script is not None:
        return [python, str(script), *(rest if first.endswith(".py") else rest[1:])]
    if first == "torchrun":
        return [python, "-P", "-m", "torch.distributed.run", *rest]
    return [python if is_python(Path(first).name) else first, *rest]


def is_of_this_repository(question: Question) -> bool:
    """Return whether the command runs a script of this checkout, which imports harness."""
    script = script_of(question)
    return script is not None and any(
        script.is_relative_to(REPOSITORY / each) for each in ("launch", "harness", "tests")
    )


def _ranks(words: Sequence[str]) -> int:
    mesh = []
    for before, word in zip(["", *words], words, strict=False):
        is_value = before.startswith("--parallel.") and "=" not in before
        if is_value or word.endswith(".toml") or word.startswith("--parallel."):
            mesh.append(word)
    return ParallelDims.of(parse(mesh).config.parallel).world_size


def is_torchrun(question: Question) -> bool:
    """Return whether the command itself is torchrun, which reports the exit code of the rank that failed first."""
    first, *rest = question.command
    script = script_of(question)
    if script is not None:
        return script == TORCHRUN or script in TORCHRUN_JOBS
    modules = ("torch.distributed.run", "torch.distributed.launch")
    names_it = any(before == "-m" and word in modules for before, word in pairwise(rest))
    return Path(first).name == "torchrun" or (is_python(Path(first).name) and names_it)


def is_python(word: str) -> bool:
    """Return whether a program's name is Python's, such as python3.12."""
    return word.rstrip("0123456789.") == "python"
