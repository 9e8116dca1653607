"""The command as a candidate's environment runs it."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.cluster.mesh import ParallelDims
from harness.config.cli import parse
from harness.tools.bisection.question import Question, WrongQuestion
from harness.tools.environments import REPOSITORY

JOBS = ("ppo.py", "sync.py")
"""Of launch/: run by torchrun, and write metrics into --run.dir."""


def script_of(question: Question) -> Path | None:
    """The command's Python script, where it is one. Raises WrongQuestion if it is not there."""
    words = question.command
    named = words[0] if words[0].endswith(".py") else ""
    if Path(words[0]).name.rstrip("0123456789.") == "python" and len(words) > 1 and not words[1].startswith("-"):
        named = words[1]
    if not named:
        return None
    for folder in (Path(question.folder), REPOSITORY):
        if (folder / named).is_file():
            return (folder / named).resolve()
    raise WrongQuestion(f"the script {named} is not there.")


def check(question: Question) -> None:
    """Raises WrongQuestion where the command cannot be run, whatever the candidate."""
    script = script_of(question)
    first = question.command[0]
    if (
        script is None
        and first not in ("torchrun", "pytest", "sglang")
        and not _is_python(first)
        and not shutil.which(first)
    ):
        if (Path(question.folder) / first).is_file():
            raise WrongQuestion(
                f"{first} is not executable; make it so with chmod +x {first}, or give: -- bash {first}"
            )
        raise WrongQuestion(f"the command {first} is not there.")
    if script is not None and is_job(script):
        try:
            ranks(question.command[1:])
        except ValueError as error:
            raise WrongQuestion(f"the script's own arguments are wrong: {error}") from error


def command_of(question: Question, python: str, folder: Path) -> list[str]:
    """What is run. python: the environment's; folder: of this run, for what it leaves."""
    script = script_of(question)
    first, *rest = question.command
    if script is not None and is_job(script):
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks(rest)}"]
        own = [] if any(word.startswith("--run.dir") for word in rest) else ["--run.dir", str(folder / "run")]
        return [*torchrun, str(script), *rest, *own]
    if script is not None:
        return [python, str(script), *(rest if first.endswith(".py") else rest[1:])]
    if _is_python(first):
        return [python, *rest]
    if first == "torchrun":
        return [python, "-m", "torch.distributed.run", *rest]
    return [first, *rest]


def is_job(script: Path) -> bool:
    """Whether it is one of our launch scripts that torchrun runs."""
    return script.parent == REPOSITORY / "launch" and script.name in JOBS


def is_own(script: Path | None) -> bool:
    """Whether it is a script of this repository, which needs what the harness needs."""
    return script is not None and script.is_relative_to(REPOSITORY)


def ranks(words: Sequence[str]) -> int:
    """Of the mesh that a job's arguments name. Raises ValueError."""
    mesh = [
        word
        for index, word in enumerate(words)
        if word.endswith(".toml")
        or word.startswith("--parallel.")
        or (words[index - 1 : index] and _is_mesh(words[index - 1]))
    ]
    dims = ParallelDims.of(parse(mesh).config.parallel)
    return dims.dp * dims.tp * dims.pp


def digest(question: Question) -> str:
    """sha256 of the script's content; "" where the command is none."""
    script = script_of(question)
    return hashlib.sha256(script.read_bytes()).hexdigest() if script else ""


def _is_mesh(word: str) -> bool:
    return word.startswith("--parallel.") and "=" not in word


def _is_python(word: str) -> bool:
    return word.rstrip("0123456789.") == "python"
