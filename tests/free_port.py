"""A port for tests that must name one before what listens on it has started."""

import socket


def free_port() -> int:
    """Return a TCP port of this host that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
