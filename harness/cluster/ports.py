"""Ports for engines that share a host: planned without looking, leased for real.

SGLang picks missing ports at random, after the trainer has seeded every rank alike, so engines of one host meet on
one port, and may even join each other's process group. Here a block of ports belongs to one process at a time.
"""

import errno
import socket
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

PORTS_PER_ENGINE = 32
"""Ports of one block. SGLang takes more than the three it is given: with DP attention 6 and more right after
dist_init_port (one for each DP rank in some versions) and dist_init_port + 13; the gRPC sidecar listens on port + 1."""

_GRID = 30000
"""Every block starts a whole number of blocks from here, so that runs with different base ports cannot overlap."""

_LOWEST, _HIGHEST = 1024, 65535


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """The ports that sglang.Engine is given; each leads free ports up to the next, within one block.

    update_group_port: where the trainer waits for the engine when weights are broadcast.
    """

    port: int
    nccl_port: int
    dist_init_port: int
    update_group_port: int


def planned_ports(base_port: int, index_on_host: int) -> EnginePorts:
    """Return the index_on_host-th block at or above base_port (rounded up to the next block's start).

    Raise ValueError for a base_port outside 1024..65535 and for a block that goes past 65535.
    """
    if not _LOWEST <= base_port <= _HIGHEST:
        raise ValueError(f"engine.base_port must be {_LOWEST} to {_HIGHEST}, got {base_port}")
    first = base_port + (_GRID - base_port) % PORTS_PER_ENGINE + index_on_host * PORTS_PER_ENGINE
    if first + PORTS_PER_ENGINE - 1 > _HIGHEST:
        raise ValueError(
            f"engine.base_port = {base_port} leaves no {PORTS_PER_ENGINE} ports up to {_HIGHEST} for engine "
            f"{index_on_host} of its host: choose a lower one"
        )
    return EnginePorts(first, first + 4, first + 8, first + 28)


class PortLease(AbstractContextManager["PortLease"]):
    """One block of ports on this host, for as long as this process lives or until close().

    Walks up from base_port to the first block that no other lease has and whose ports are all free. The lease is a name among the Unix sockets of the host's network (Linux's abstract ones): seen by
    exactly those who share the ports, whatever folders they see, and dropped by the kernel when its owner dies.
    Raises ValueError for a bad base_port, OSError (EADDRINUSE) where no block is free.
    """

    def __init__(self, base_port: int) -> None:
        self.ports = planned_ports(base_port, 0)
        while True:
            self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            block = range(self.ports.port, self.ports.port + PORTS_PER_ENGINE)
            if _binds(self._name, f"\0sglang-rl-harness-ports-{block.start}") and all(map(_is_free, block)):
                return
            self._name.close()
            try:
                self.ports = planned_ports(block.stop, 0)
            except ValueError:
                raise OSError(
                    errno.EADDRINUSE,
                    f"engine.base_port = {base_port} has no block of {PORTS_PER_ENGINE} free ports above it on this host: "
                    "choose a lower one, or end the processes that use them",
                ) from None

    def close(self) -> None:
        """Give the block back; a second call does nothing."""
        self._name.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_free(port: int) -> bool:
    """Return whether a listener could bind the port on every IPv4 and IPv6 address of this host."""
    # No SO_REUSEADDR: with it, a socket that is bound but does not listen yet would go unseen.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if not _binds(probe, ("0.0.0.0", port)):
            return False
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        return _binds(probe, ("::", port))
    return True  # no IPv6 on this host


def _binds(probe: socket.socket, address: str | tuple[str, int]) -> bool:
    try:
        probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True
