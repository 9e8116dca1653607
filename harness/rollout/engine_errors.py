"""The errors of an engine. Light: the watchdog imports it without torch."""


class EngineFailed(RuntimeError):
    """The engine did not start, died, or failed a call. The message names the rank and the first error in its log."""


class SchedulerFailed(EngineFailed):
    """A scheduler is alive, and answered that its part of a call failed."""


class PeerGone(ConnectionError):
    """The scheduler at the other end of a connection has died, or has given up."""


def in_one_line(error: BaseException) -> str:
    """Return an exception in one line, for the other ranks."""
    return str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"
