"""What the processes of tests/rollout/test_forked_processes.py do."""

import multiprocessing
import os
import sys
import threading
import time
from typing import Any


def answer(pipe: Any, *words: Any) -> None:
    """Send back what was passed and what this process is."""
    current, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    assert parent is not None
    what = {
        "words": words,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "name": current.name,
        "daemon": current.daemon,
        "parent lives": parent.is_alive(),
        "method": multiprocessing.get_start_method(),
        "key": bytes(current.authkey),
        "modules": [name for name in sys.modules if name.startswith("cheap")],
        "variable": os.environ.get("VARIABLE"),
        "path": sys.path,
    }
    pipe.send(what)


def serve(requests: Any, answers: Any) -> None:
    """Answer with the square of each number, until None comes."""
    for number in iter(requests.get, None):
        answers.put(number**2)


def use_locks(event: Any, lock: Any, counter: Any) -> None:
    with lock:
        counter.value += 1
    event.set()


def exit_with(code: int) -> None:
    sys.exit(code)


def fail() -> None:
    raise ArithmeticError("planted")


def wait(pipe: Any) -> None:
    pipe.send(os.getpid())
    time.sleep(600)


def end_in_a_thread(pipe: Any) -> None:
    """Return while a thread works on: the process ends with it."""
    threading.Thread(target=lambda: pipe.send(pipe.recv())).start()
