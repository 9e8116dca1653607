"""The tests, from a bare Python 3.11 or newer.

    python3 launch/run_tests.py [--fast | --all] [pytest's arguments]

Makes the environment if there is none (harness/tools/environments.py), with what the tests need, and becomes `python -m
pytest -n 3 --dist loadfile --no-loadscope-reorder` with the arguments. There are three lanes. --fast leaves out every
test that is slow or starts a process, for a run before each commit. The default has, of each room, those engine tests
too that would catch what the room is for. --all has every test, and says at its end how each room did; `--all -m long`
runs what the default leaves out. Tests marked gpu are skipped where there is no GPU. Exit codes: pytest's; 125 the
environment cannot be made here.
"""

import os
import shlex
import sys

import _checkout

_checkout.use()

from harness.tools.environments import Unusable, ensure


def main(arguments: list[str]) -> int:
    """Return only if something is wrong: pytest takes this process's place."""
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\npytest's own arguments: .venv/bin/python -m pytest --help")
        return 0
    try:
        python = str(ensure(tests=True))
    except Unusable as problem:
        print(f"error: {problem}.", file=sys.stderr)
        return problem.exit_code
    # Three at a time, because many tests wait. One worker for each file, because an engine started for a file's tests
    # serves them all. Files start in the order of tests/conftest.py.
    command = [python, "-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    if "--fast" in arguments:
        command += ["-m", "not slow and not long and not gpu"]
    elif "--all" in arguments:
        command += ["-m", ""]
    command += arguments
    print(f"+ {shlex.join(command)}", flush=True)
    os.chdir(_checkout.CHECKOUT)
    os.execv(python, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
