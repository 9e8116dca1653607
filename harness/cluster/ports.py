"""Ports for engines that share a host: planned without looking, leased for real.

SGLang picks missing ports at random, after the trainer has seeded every rank alike, so engines of one host meet on
one port, and may even join each other's process group. Here a block of ports belongs to one process at a time.
"""

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

PORTS_PER_ENGINE = 32
"""Ports of one block. SGLang takes more than the three it is told: with DP attention 6 and more right after
dist_init_port (one for each DP rank in some versions) and dist_init_port + 13; the gRPC sidecar listens on port + 1."""

_GRID = 30000
"""Every block starts a whole number of blocks from here, so that runs with different base ports cannot overlap."""

_LOWEST, _HIGHEST = 1024, 65535
_NCCL_OFFSET, _DIST_INIT_OFFSET, _UPDATE_GROUP_OFFSET = 4, 8, 28


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """The ports that sglang.Engine is told; each leads free ports up to the next, within one block.

    update_group_port: where the trainer waits for the engine when weights are broadcast.
    """

    port: int
    nccl_port: int
    dist_init_port: int
    update_group_port: int


def planned_ports(base_port: int, index_on_host: int) -> EnginePorts:
    """Ports of the index_on_host-th block at or above base_port (rounded up to the next block's start).

    Raises ValueError for a base_port outside 1024..65535 and for a block that goes past 65535.
    """
    if not _LOWEST <= base_port <= _HIGHEST:
        raise ValueError(f"engine.base_port = {base_port} is no unprivileged port: it must be {_LOWEST} to {_HIGHEST}")
    first = base_port + (_GRID - base_port) % PORTS_PER_ENGINE + index_on_host * PORTS_PER_ENGINE
    if first + PORTS_PER_ENGINE - 1 > _HIGHEST:
        raise ValueError(
            f"engine.base_port = {base_port} leaves no {PORTS_PER_ENGINE} ports up to {_HIGHEST} for engine "
            f"{index_on_host} of its host: choose a lower one"
        )
    return EnginePorts(first, first + _NCCL_OFFSET, first + _DIST_INIT_OFFSET, first + _UPDATE_GROUP_OFFSET)


class PortLease:
    """One block of ports on this host, for as long as this process lives or until close().

    Walks up from the block planned for (base_port, index_on_host) to the first that no other lease holds and whose
    ports are all free. The lease is a name among the Unix sockets of the host's network (Linux's abstract ones): seen by
    exactly those who share the ports, whatever folders they see, and dropped by the kernel when the holder dies.
    Raises ValueError for a bad base_port, OSError (EADDRINUSE) where no block is free.
    """

    def __init__(self, base_port: int, index_on_host: int = 0) -> None:
        for ports in _blocks(base_port, index_on_host):
            held = _hold(ports.port)
            if held is None:
                continue
            if all(_is_free(port) for port in range(ports.port, ports.port + PORTS_PER_ENGINE)):
                self.ports = ports
                self._held = held
                return
            held.close()
        raise OSError(
            errno.EADDRINUSE,
            f"engine.base_port = {base_port} has no block of {PORTS_PER_ENGINE} free ports above it on this host: "
            "choose a lower one, or end the processes that hold them",
        )

    def close(self) -> None:
        """Gives the block back; a second call does nothing."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _blocks(base_port: int, index_on_host: int) -> Iterator[EnginePorts]:
    ports = planned_ports(base_port, index_on_host)
    yield ports
    for first in range(ports.port + PORTS_PER_ENGINE, _HIGHEST + 2 - PORTS_PER_ENGINE, PORTS_PER_ENGINE):
        yield planned_ports(first, 0)


def _hold(first_port: int) -> socket.socket | None:
    """What holds the block, or None if another process does."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0sglang-rl-harness-ports-{first_port}")
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return held


def _is_free(port: int) -> bool:
    """Whether a listener could bind the port on every IPv4 and IPv6 address of this host."""
    return _binds(socket.AF_INET, "0.0.0.0", port) and _binds(socket.AF_INET6, "::", port)


def _binds(family: socket.AddressFamily, address: str, port: int) -> bool:
    # No SO_REUSEADDR: with it, a socket that is bound but does not listen yet would go unseen.
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        if family == socket.AF_INET6 and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            return True  # no IPv6 on this host, so nothing of it can be taken
        raise
    return True
