"""What the processes do that tests fork: say what they are, or end in some way. Imports nothing heavy."""

import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def say(descriptor: int, what: Any) -> None:
    os.write(descriptor, json.dumps(what).encode())
    os.close(descriptor)


def report(argument: bytes, descriptors: Sequence[int]) -> None:
    say(
        descriptors[0],
        {
            "argument": argument.decode(),
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "temporary": tempfile.gettempdir(),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
            "modules": [name for name in sys.modules if name.startswith("cheap")],
            "random": random.random(),
            "numpy": float(sys.modules["numpy"].random.rand()) if "numpy" in sys.modules else None,
        },
    )


def use_streams(argument: bytes, descriptors: Sequence[int]) -> None:
    print(f"out {sys.stdin.read()}")
    print("error", file=sys.stderr)


def exit_with(argument: bytes, descriptors: Sequence[int]) -> None:
    sys.exit(int(argument))


def fail(argument: bytes, descriptors: Sequence[int]) -> None:
    raise ArithmeticError(argument.decode())


def wait(argument: bytes, descriptors: Sequence[int]) -> None:
    """Say the pid, and wait to be ended."""
    if descriptors:
        os.write(descriptors[0], str(os.getpid()).encode())
    time.sleep(600)


def set_title(argument: bytes, descriptors: Sequence[int]) -> None:
    from setproctitle import setproctitle

    setproctitle(argument.decode())
    say(descriptors[0], [Path("/proc/self", name).read_text().split("\0") for name in ("cmdline", "environ")])


def end_by_sigterm(argument: bytes, descriptors: Sequence[int]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def meaning(name: str, value: str | None) -> object:
    return (value or "0").lower() in ("1", "true") if name == "SWITCH" else value


def fork_in_turn(argument: bytes, descriptors: Sequence[int]) -> None:
    """Fork a server, and a process by it; say what the two processes are."""
    from harness.runtime.fork_server import ForkServer, Task

    server = ForkServer.here()
    reading, writing = os.pipe()
    pid = server.fork(Task(f"{__name__}:report", argument), [0, 1, 2, writing])
    os.close(writing)
    with open(reading) as answer:
        grandchild = json.load(answer)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    say(descriptors[0], {"pid": os.getpid(), "server": server.pid, "code": code, "grandchild": grandchild})


def import_module_of(argument: bytes, descriptors: Sequence[int]) -> None:
    say(descriptors[0], [import_module(argument.decode()).__file__, len(threading.enumerate())])
