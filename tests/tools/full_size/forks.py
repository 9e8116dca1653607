"""launch/full_size.py and functions that ask SGLang's classes, each in a fork of one process that has imported SGLang."""

import atexit
import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from harness.runtime.fork_server import ForkServer, Task

REPOSITORY = Path(__file__).resolve().parents[3]
IMPORTED = "tests.tools.full_size.imported"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
"""That of the server and of each fork: a server serves one environment."""


@cache
def server() -> ForkServer:
    """Return the server of this process, which ends with it."""
    found = ForkServer.start([IMPORTED], ENVIRONMENT)
    atexit.register(found.close)
    return found


def forked(function: str, words: list[Any]) -> subprocess.CompletedProcess[str]:
    """Call a function of imported.py with these words in a fork; return how it ended, and what it printed."""
    task = Task(
        f"{IMPORTED}:{function}",
        json.dumps(words, default=str).encode(),
        ENVIRONMENT,
        folder=str(REPOSITORY),
        ends_with_parent=True,
    )
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
        pid = server().fork(task, [each.fileno() for each in (nothing, out, err)])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for each in (out, err):
            each.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def full_size(*words: object) -> subprocess.CompletedProcess[str]:
    """Do what launch/full_size.py does with these words."""
    return forked("run_script", list(map(str, words)))


def answer_of(function: str, *arguments: object) -> Any:
    """Return what MODULE:FUNCTION returns. Paths reach it as text."""
    done = forked("answer", [function, *arguments])
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
