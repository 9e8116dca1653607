"""The tests, from a bare Python 3.11 or newer.

    python3 launch/run_tests.py [pytest's arguments]

Makes the environment where it is not there (harness/tools/environments.py), tests included, and becomes `python -m pytest -q
tests` with the arguments passed on; paths among them replace `tests`. Tests marked long, and where there is no GPU those
marked gpu, are left out unless -m says otherwise. Exit code: pytest's own; 125: the environment cannot be made here.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, installed or not

from harness.tools import environments


def pytest_arguments(given: list[str], gpu: bool) -> list[str]:
    """pytest's arguments: those given, after the defaults that they do not replace."""
    paths = any(
        (environments.REPOSITORY / argument.partition("::")[0]).exists() for argument in given if argument[0] != "-"
    )
    marked = any(argument.startswith("-m") for argument in given)
    chosen = "not long" if gpu else "not long and not gpu"
    return ["-q", *([] if paths else ["tests"]), *([] if marked else ["-m", chosen]), *given]


def main(arguments: list[str]) -> int:
    """Does not return once pytest has taken this process's place."""
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\npytest's own arguments: .venv/bin/python -m pytest --help")
        return 0
    try:
        python = environments.ensure(tests=True)
    except environments.Unusable as problem:
        print(f"environment: {problem}", file=sys.stderr)
        return problem.exit_code
    os.chdir(environments.REPOSITORY)
    command = [str(python), "-m", "pytest", *pytest_arguments(arguments, environments.has_gpu())]
    print(f"+ {shlex.join(command)}", flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
