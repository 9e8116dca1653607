"""How an engine fails."""


class EngineFailed(RuntimeError):
    """The engine did not start, died, or failed a call; says on which rank, and the first error of its log."""


class SchedulerFailed(EngineFailed):
    """A scheduler answered, at the end of its part of a call, that it failed; the engine's call ends too."""


class PeerGone(ConnectionError):
    """The other end of a connection between a rank and its scheduler was closed, or gave up."""
