"""Work on a thread of its own, whose end and failure are waited for as a Future."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from traceback import clear_frames
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> "Future[T]":
    """Run work() on a daemon thread, which does not hold up an exit when its collectives can never end."""
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            clear_frames(error.__traceback__)  # what they hold must go when the caller lets go of it
            future.set_exception(error)

    threading.Thread(target=target, name=name, daemon=True).start()
    return future
