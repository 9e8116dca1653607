"""Give each engine on a host its own block of ports.

SGLang picks ports at random. The trainer seeds every rank alike, so two engines on one host would pick the same port
and could even join each other's process group. Here each block of ports belongs to one process at a time.
"""

import errno
import socket
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

PORTS_PER_ENGINE = 32
"""Ports of one block. SGLang uses more than the three that it is given. With DP attention it uses 6 or more right after
dist_init_port (in some releases one for each DP rank) and dist_init_port + 13. The gRPC sidecar listens on port + 1.
The last port is the lease."""

_GRID = 30000
"""All blocks are aligned to this port, so that blocks of runs with different base ports cannot overlap."""

_LOWEST, _HIGHEST = 1024, 65535


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """The ports that sglang.Engine is given. The ports between them are free for what SGLang opens in addition.

    update_group_port: where the trainer waits for the engine when weights are broadcast.
    """

    port: int
    nccl_port: int
    dist_init_port: int
    update_group_port: int


def planned_ports(base_port: int, index_on_host: int) -> EnginePorts:
    """Return the ports of block number index_on_host, counted from the first block that starts at or above base_port.

    Raise ValueError if base_port is outside 1024..65535, or if the block ends above 65535.
    """
    if not _LOWEST <= base_port <= _HIGHEST:
        raise ValueError(f"engine.base_port must be {_LOWEST} to {_HIGHEST}, got {base_port}")
    first = base_port + (_GRID - base_port) % PORTS_PER_ENGINE + index_on_host * PORTS_PER_ENGINE
    if first + PORTS_PER_ENGINE - 1 > _HIGHEST:
        raise ValueError(
            f"engine.base_port = {base_port} is too high: engine {index_on_host} of the host needs"
            f" {PORTS_PER_ENGINE} ports up to {_HIGHEST}; choose a lower base port"
        )
    return EnginePorts(first, first + 4, first + 8, first + 28)


class PortLease(AbstractContextManager["PortLease"]):
    """A block of ports on this host, held until close() or until this process ends.

    It is the first block from base_port upwards whose ports are all free. The lease is a socket that is bound to the
    last port of the block. So exactly the processes that share the ports see it, whatever folders they see, nobody can
    deny a block without using its ports, and the kernel drops it when its owner dies. Raise ValueError for a bad
    base_port, and OSError (EADDRINUSE) if no block is free.
    """

    def __init__(self, base_port: int) -> None:
        self.ports = planned_ports(base_port, 0)
        while True:
            *others, last = range(self.ports.port, self.ports.port + PORTS_PER_ENGINE)
            self._held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            if _binds(self._held, ("0.0.0.0", last)) and all(map(_is_free, others)):
                return
            self._held.close()
            try:
                self.ports = planned_ports(last + 1, 0)
            except ValueError:
                raise OSError(
                    errno.EADDRINUSE,
                    f"engine.base_port = {base_port} has no {PORTS_PER_ENGINE} free ports in a block above it on this host;"
                    " choose a lower one, or end the processes that use them",
                ) from None

    def close(self) -> None:
        """Give the block back. A second call does nothing."""
        self._held.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_free(port: int) -> bool:
    """Return whether a listener could bind the port on every IPv4 and IPv6 address of this host."""
    # Without SO_REUSEADDR, because that would hide a socket that is bound but does not listen yet.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if not _binds(probe, ("0.0.0.0", port)):
            return False
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        return _binds(probe, ("::", port))
    return True  # no IPv6 on this host


def _binds(probe: socket.socket, address: tuple[str, int]) -> bool:
    try:
        probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True
