"""Commands that show a candidate's verdict again, without this program where that is possible."""

import os
from pathlib import Path
from shlex import join, quote

from harness.tools.bisection import registry
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.command import command_of
from harness.tools.bisection.environment import Environment
from harness.tools.bisection.state import Record, State

_COUNTED = (
    "PYTHONPATH",
    "SGLANG_USE_CPU_ENGINE",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_DISABLE",
    "SGLANG_NCCL_SO_PATH",
)


def freeze_file(folder: Path, name: str) -> Path:
    """Of a candidate's environment: package==version of all that it had."""
    return folder / "environments" / f"{name}.txt"


def write_freeze(folder: Path, record: Record) -> None:
    file = freeze_file(folder, record.name)
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{package}=={version}\n" for package, version in record.freeze.items()))


def commands(state: State, record: Record, candidate: Candidate, folder: Path, no_gpu: bool) -> list[str]:
    """A line each, for a shell."""
    question, options = state.question, state.question.options
    place = f"/tmp/{options.package}-{candidate.name[:12]}"
    python, paths, made = record.python, list(record.paths), []
    sources = ["--no-index", "--find-links", options.wheels] if options.wheels else registry.sources()
    if options.git:
        made = [f"git -C {quote(options.git)} worktree add --detach {place} {candidate.name}"]
        paths = [each.replace(each.partition("/files")[0] + "/files", place) for each in paths]
    elif options.only_package:
        words = ["uv", "pip", "install", "--no-deps", "--target", place, "--python", python, *sources]
        made, paths = [join([*words, f"{options.package}=={candidate.name}"])], [place]
    elif not options.environments:
        own = ".".join(Path(python).resolve().name.removeprefix("python").split(".")[:2]) or "3"
        python = f"{place}/bin/python"
        pins = str(freeze_file(folder, candidate.name))
        made = [
            f"uv venv --python {own} {place}",
            join(["uv", "pip", "install", "--no-deps", "--python", python, *sources, "-r", pins]),
        ]
    variables = Environment(python=python, paths=tuple(paths), freeze=record.freeze).variables(no_gpu)
    told = {
        name: variables[name] for name in _COUNTED if variables.get(name) and variables[name] != os.environ.get(name)
    }
    words = command_of(question, python, Path("/tmp"))
    return [
        *made,
        " ".join([f"cd {quote(question.folder)} &&", *(f"{k}={quote(v)}" for k, v in told.items()), join(words)]),
    ]
