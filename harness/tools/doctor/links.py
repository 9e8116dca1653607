"""What connects the ranks: TCP between hosts, and an all-reduce over all ranks. Each has a deadline."""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from harness.cluster.network import HostAddress
from harness.cluster.ports import EnginePorts, PortLease
from harness.tools.doctor.job_store import JobStore, left, within

Backend = Literal["gloo", "nccl"]

CONNECT_SECONDS = 3.0
COLLECTIVE_SECONDS: dict[Backend, float] = {"gloo": 4.0, "nccl": 8.0}
BUFFER_BYTES: dict[Backend, int] = {"gloo": 4 << 20, "nccl": 64 << 20}
"""So small that even a link that counts as slow carries it twice within COLLECTIVE_SECONDS."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP connection to a leased port of another rank's host, or why there is none."""

    to: int
    address: str
    port: int
    error: str = ""


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce over all ranks. bandwidth: bytes a second through this rank's link, 2 (n - 1) / n times those
    reduced.
    """

    backend: Backend
    bandwidth: float = 0.0
    error: str = ""


class RankLinks(msgspec.Struct, kw_only=True):
    """What one rank measured. ports: first port of the leased block; each host's first rank leases one."""

    rank: int
    address: HostAddress | None = None
    """How the other hosts reach this one, as a run would agree on it."""
    address_error: str = ""
    ports: int | None = None
    ports_error: str = ""
    reaches: tuple[Reach, ...] = ()
    collectives: tuple[Collective, ...] = ()


@contextmanager
def open_port(base_port: int) -> Iterator[EnginePorts]:
    """Lease a block of ports as an engine does, and let others connect to its dist_init_port.

    Raise OSError if no block is free or the port cannot be listened on.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with PortLease(base_port) as lease:
        address = ("", lease.ports.dist_init_port)
        # The kernel completes the connections of all other hosts at once; nobody accepts them.
        with socket.create_server(address, family=family, dualstack_ipv6=dual, backlog=4096):
            yield lease.ports


def reach_all(targets: Sequence[tuple[int, str, int]], seconds: float) -> tuple[Reach, ...]:
    """Connect to all (rank, address, port) at once."""
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return tuple(pool.map(partial(_reach, seconds), targets))


def _reach(seconds: float, target: tuple[int, str, int]) -> Reach:
    rank, address, port = target
    error = ""
    try:
        socket.create_connection((address, port), seconds).close()
    except TimeoutError:
        error = f"no answer within {seconds:.0f} s"
    except OSError as failed:
        error = failed.strerror or str(failed)
    return Reach(to=rank, address=address, port=port, error=error)


def all_reduces(connection: Callable[[], JobStore], device: torch.device | None, end: float) -> tuple[Collective, ...]:
    """Measure an all-reduce over all ranks by gloo, then by NCCL if there is a device; a call of all ranks.

    Each runs in a thread that may be left behind, and so with a connection of its own. The first failure ends it:
    what breaks gloo between hosts breaks NCCL too, and time would be short.
    """
    found = []
    backends: tuple[Backend, ...] = ("gloo", "nccl") if device else ("gloo",)
    for backend in backends:
        seconds = left(end, COLLECTIVE_SECONDS[backend])
        try:
            bandwidth = within(seconds + 1, partial(_all_reduce, connection, backend, device, seconds))
            found.append(Collective(backend=backend, bandwidth=bandwidth))
        except (OSError, RuntimeError) as error:
            found.append(Collective(backend=backend, error=first_line(error)))
            break
    return tuple(found)


def _all_reduce(
    connection: Callable[[], JobStore], backend: Backend, device: torch.device | None, seconds: float
) -> float:
    """Return the bandwidth of the second of two all-reduces. Raise RuntimeError if a sum comes out wrong."""
    store = connection()
    rank, size = store.rank, store.world_size
    meeting = dist.PrefixStore(backend, store.store)
    group: Any  # the stubs lack ProcessGroupNCCL in some torch, and the collectives of both
    if backend == "gloo" or device is None:
        device = torch.device("cpu")
        group = dist.ProcessGroupGloo(meeting, rank, size, timedelta(seconds=seconds))
    else:
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(minutes=10)  # its watchdog aborts the process; `within` is what ends a wait here
        group = dist.ProcessGroupNCCL(meeting, rank, size, options)
    took = 0.0
    for _ in range(2):  # the first one also connects
        buffer = torch.full((BUFFER_BYTES[backend] // 4,), float(rank), device=device)
        began = time.monotonic()
        group.allreduce([buffer]).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.monotonic() - began
        smallest, largest = (each.item() for each in buffer.aminmax())
        if not smallest == largest == size * (size - 1) / 2:
            raise RuntimeError(f"the sum of 0 to {size - 1} came out as {smallest:g} to {largest:g}")
    return 2 * (size - 1) / size * BUFFER_BYTES[backend] / took


def first_line(error: BaseException) -> str:
    """Return the error without torch's position in its own source."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line.partition("] ")[2] if line.startswith("[/") and "] " in line else line
