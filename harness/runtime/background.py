"""Run a function on a new thread and get its result or failure as a Future."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from traceback import clear_frames
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> "Future[T]":
    """Run work() on a daemon thread: a collective that never ends then does not keep the process from exiting."""
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            clear_frames(error.__traceback__)  # otherwise its frames keep the work's tensors alive
            future.set_exception(error)

    threading.Thread(target=target, name=name, daemon=True).start()
    return future
