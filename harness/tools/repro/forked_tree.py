"""run_tree() for a program whose imports a fork server has done: the program and its supervisor are
forked.
"""

import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import IO

from harness.runtime.fork_server import ForkedChild, ForkServer, Task, adopting_orphans, run_and_end
from harness.runtime.processes import descendants, end_processes
from harness.tools.run_tree import IGNORED_SIGNALS, Ended, SupervisorKilled, die_with_parent, run_supervised, supervise


def run_forked_tree(
    server: ForkServer,
    function: str,
    argument: bytes,
    *,
    output: IO[bytes],
    cwd: Path,
    env: Mapping[str, str],
    tick: Callable[[], None],
) -> Ended:
    """Fork a process that calls a function with the argument.

    Return once it has ended and everything it started is gone.

    function: MODULE:FUNCTION. Its process has a server for an engine. It sees what run_tree()'s command sees, but the
    kernel shows the server's environment for it. Raise SupervisorKilled, ServerGone.
    """
    before = descendants()

    def start(environment: Mapping[str, str], stdin: int, result: int) -> ForkedChild:
        words = pickle.dumps((function, argument))
        task = Task(f"{__name__}:supervise_fork", words, environment, folder=str(cwd))
        return ForkedChild(server.fork(task, [stdin, output.fileno(), output.fileno(), result]), result)

    with adopting_orphans():  # which is how we find them if the supervisor is killed
        try:
            return run_supervised(start, function, env, tick)
        except SupervisorKilled:
            left = descendants()
            end_processes({pid: left[pid] for pid in left.keys() - before.keys()})
            raise


def supervise_fork(words: bytes, descriptors: Sequence[int]) -> None:
    """Supervise a function's process, in the process that was forked for that."""
    (result,) = descriptors
    supervise(result, 0.0, 0.0, partial(_start, result, *pickle.loads(words)))
    os._exit(0)  # without the teardown of all that was imported


def _start(result: int, function: str, argument: bytes) -> int:
    """Fork the function's process and return its pid."""
    if pid := os.fork():
        return pid
    os.setsid()
    die_with_parent()
    os.close(result)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    ForkServer.hand_over([ForkServer.here()])
    run_and_end(resolve_name(function), argument)
