"""What connects the ranks: TCP between hosts, and an all-reduce of every group. Each has a deadline."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from harness.cluster.mesh import ParallelDims
from harness.cluster.network import HostAddress
from harness.cluster.ports import EnginePorts, PortLease
from harness.tools.doctor.job_store import JobStore, left, within

Backend = Literal["gloo", "nccl"]

CONNECT_SECONDS = 3.0
COLLECTIVE_SECONDS: dict[Backend, float] = {"gloo": 4.0, "nccl": 8.0}
ROUNDS = 3
BUFFER_BYTES: dict[Backend, int] = {"gloo": 4 << 20, "nccl": 64 << 20}
"""So small that even a link that counts as slow carries it five times within COLLECTIVE_SECONDS."""
UNTRIED = "not tried: the groups before it used up the time"


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP connection to a leased port of another rank's host, or why there is none."""

    to: int
    address: str
    port: int
    error: str = ""


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces of one group. bandwidth: bytes a second through each rank's link, 2 (n - 1) / n times those
    reduced.
    """

    backend: Backend
    group: str
    ranks: tuple[int, ...]
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


def groups_of(dims: ParallelDims, hosts: Iterable[Sequence[int]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups that a run uses, by kind; hosts: the ranks of each host.

    engine: the ranks of each engine. hosts: the first rank of each host. world: all ranks. A kind is left out if its
    groups have one rank each, or are those of an earlier kind.
    """
    kinds = {
        "engine": tuple(dims.engine_ranks(dp) for dp in range(dims.dp)),
        "hosts": (tuple(ranks[0] for ranks in hosts),),
        "world": (tuple(range(dims.world_size)),),
    }
    chosen: dict[frozenset[frozenset[int]], str] = {}
    for kind, groups in kinds.items():
        if len(groups[0]) > 1:
            chosen.setdefault(frozenset(map(frozenset, groups)), kind)
    return {kind: kinds[kind] for kind in chosen.values()}


@contextmanager
def open_port(base_port: int, name: str) -> Iterator[EnginePorts]:
    """Lease a block of ports as an engine does, and send `name` to all who connect to its dist_init_port.

    Raise OSError if no block is free or the port cannot be listened on.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with PortLease(base_port) as lease:
        address = ("", lease.ports.dist_init_port)
        with socket.create_server(address, family=family, dualstack_ipv6=dual, backlog=128) as listener:
            threading.Thread(target=_answer, args=(listener, name.encode()), daemon=True).start()
            yield lease.ports


def _answer(listener: socket.socket, name: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed: the doctor is done
        with contextlib.suppress(OSError), connection:
            connection.sendall(name + b"\n")


def reach_all(targets: Sequence[tuple[int, str, int]], seconds: float) -> tuple[Reach, ...]:
    """Connect to all (rank, address, port) at once; the other side must answer with its rank."""
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return tuple(pool.map(partial(_reach, seconds), targets))


def _reach(seconds: float, target: tuple[int, str, int]) -> Reach:
    rank, address, port = target
    try:
        with socket.create_connection((address, port), seconds) as connection, connection.makefile() as lines:
            answer = lines.readline().strip()
        error = "" if answer == str(rank) else f"{answer or 'something else'} answered in its place"
    except TimeoutError:
        error = f"no answer within {seconds:.0f} s"
    except (OSError, UnicodeDecodeError) as failed:
        error = getattr(failed, "strerror", None) or str(failed)
    return Reach(to=rank, address=address, port=port, error=error)


def all_reduces(
    connection: Callable[[], JobStore],
    rank: int,
    groups: Mapping[str, Sequence[tuple[int, ...]]],
    device: torch.device | None,
    end: float,
) -> tuple[Collective, ...]:
    """Measure this rank's group of each kind by gloo, and by NCCL if there is a device; a call of all ranks.

    It uses a separate connection, in a thread that may be left behind. Ranks wait for one another before each kind, so
    that one broken group does not make the next one late.
    """
    backends: tuple[Backend, ...] = ("gloo", "nccl") if device else ("gloo",)
    results = [
        Collective(
            backend=backend, group=kind, ranks=next((group for group in found if rank in group), ()), error=UNTRIED
        )
        for backend, (kind, found) in itertools.product(backends, groups.items())
    ]

    def measure() -> None:
        store = connection()
        for index, of in enumerate(results):
            store.barrier(f"all_reduce/{of.backend}/{of.group}", left(end, COLLECTIVE_SECONDS["gloo"] + 1))
            if of.ranks and time.monotonic() < end:
                seconds = left(end, COLLECTIVE_SECONDS[of.backend])
                try:
                    results[index] = within(seconds + 1, partial(_all_reduce, store, of, seconds, device))
                except (RuntimeError, TimeoutError) as error:
                    results[index] = replace(of, error=first_line(error))

    with contextlib.suppress(OSError, RuntimeError):  # what could not be measured stays untried
        within(left(end), measure)
    return tuple(each for each in results if each.ranks)


def _all_reduce(store: JobStore, of: Collective, seconds: float, device: torch.device | None) -> Collective:
    """Measure the bandwidth, best of several rounds. Raise RuntimeError if a sum comes out wrong."""
    position, size = of.ranks.index(store.rank), len(of.ranks)
    # Groups of one kind are disjoint, so their first ranks distinguish them.
    meeting = dist.PrefixStore(f"{of.backend}/{of.group}/{of.ranks[0]}", store.store)
    group: Any  # the stubs lack ProcessGroupNCCL in some torch, and the collectives of both
    if of.backend == "gloo" or device is None:
        device = torch.device("cpu")
        group = dist.ProcessGroupGloo(meeting, position, size, timedelta(seconds=seconds))
    else:
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(minutes=10)  # its watchdog aborts the process; `within` is what ends a wait here
        group = dist.ProcessGroupNCCL(meeting, position, size, options)

    def timed(tensor: torch.Tensor) -> float:
        began = time.monotonic()
        group.allreduce([tensor]).wait()
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        return time.monotonic() - began

    word = torch.tensor([float(position)], dtype=torch.float64, device=device)
    timed(word)
    if word.item() != size * (size - 1) / 2:
        raise RuntimeError(f"the sum of 0 to {size - 1} came out as {word.item():g}")
    buffer = torch.zeros(BUFFER_BYTES[of.backend] // 4, device=device)
    timed(buffer)
    fastest = min(timed(buffer) for _ in range(ROUNDS))
    moved = 2 * (size - 1) / size * BUFFER_BYTES[of.backend]
    return replace(of, bandwidth=moved / fastest, error="")


def first_line(error: BaseException) -> str:
    """Return the error without torch's position in its own source."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line.partition("] ")[2] if line.startswith("[/") and "] " in line else line
