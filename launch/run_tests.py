"""The tests, from a bare Python 3.11 or newer.

    python3 launch/run_tests.py [pytest's arguments]

Makes the environment where it is missing (harness/tools/environments.py), tests included, and becomes `python -m pytest
-n 3 --dist loadfile` with the arguments passed on. Tests marked long, and without a GPU those marked gpu, are left out;
`-m long` runs the long ones. Exit code: pytest's; 125: the environment cannot be made here.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Return only where something is wrong: pytest takes this process's place."""
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\npytest's own arguments: .venv/bin/python -m pytest --help")
        return 0
    os.chdir(CHECKOUT)
    making = [sys.executable, "harness/tools/environments.py", "--tests"]
    made = subprocess.run(making, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        return made.returncode
    # Three at a time, as many of them wait; a file to one worker: an engine started for a file's tests serves them all.
    command = [made.stdout.strip(), "-m", "pytest", "-n", "3", "--dist", "loadfile", *arguments]
    print(f"+ {shlex.join(command)}", flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
