"""SIGTERM and SIGQUIT of the process that builds an engine: SGLang takes them for itself, and they are taken back."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TAKEN = (signal.SIGTERM, signal.SIGQUIT)
"""SGLang's handlers ignore the first and SIGKILL this process's whole tree on the second."""


@dataclass(frozen=True, slots=True)
class OwnHandlers:
    """The handlers of this process, as they were before an engine was built."""

    handlers: dict[signal.Signals, Any] = field(
        default_factory=lambda: {number: signal.getsignal(number) for number in TAKEN}
    )

    def restore(self, engine_serves: bool) -> None:
        """Set them again; while an engine serves, SIGQUIT is ignored, because ChildWatch reports what the scheduler that sent
        it died of. Raises ValueError in another thread than the main one."""
        for number, handler in self.handlers.items():
            signal.signal(number, ignore_signal if number == signal.SIGQUIT and engine_serves else handler)


@contextmanager
def sigquit_raises() -> Iterator[None]:
    """While open, a handler that is set for SIGQUIT is replaced by one that raises ChildProcessError in the main thread.

    For releases without custom_sigquit_handler (before 0.5.7): their handler SIGKILLs this process when a scheduler
    fails at start, without a word; without any handler they would wait for it for ever.
    """
    real = signal.signal

    def fail(signum: int, frame: object) -> None:
        raise ChildProcessError("a process of the engine asked its parent to end")

    def register(number: int, handler: Any) -> Any:
        return real(number, fail if number == signal.SIGQUIT else handler)

    signal.signal = register  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = real


def ignore_signal(signum: int, frame: object) -> None:
    """Handler for the SIGQUIT with which a failing scheduler asks its parent to die: ChildWatch reports it instead.

    At module level, because SGLang pickles the handler into its schedulers.
    """
