"""What is between ranks: clocks, sockets, folders that hosts share, and all-reduces of every group, each with a deadline."""

import contextlib
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from harness.cluster.mesh import ParallelDims
from harness.cluster.network import HostAddress
from harness.cluster.ports import EnginePorts, PortLease
from harness.tools.doctor.job_store import Absent, Deadline, JobStore, within

Backend = Literal["gloo", "nccl"]

CLOCK_ROUNDS = 7
CONNECT_SECONDS = 3.0
COLLECTIVE_SECONDS: dict[Backend, float] = {"gloo": 4.0, "nccl": 8.0}
LATENCY_ROUNDS = 10
BANDWIDTH_ROUNDS = 3
SMALL_BYTES = 1 << 20
LARGE_BYTES: dict[Backend, int] = {"gloo": 16 << 20, "nccl": 128 << 20}
SLOW_SECONDS = 0.05
"""A link that takes this long for SMALL_BYTES is measured with those alone."""
FOLDER_SECONDS = 2.0
"""How long a network file system may take to show another host's file."""


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """A host's clock minus rank 0's, in seconds, and by how much the measurement can be off: half a round trip."""

    offset: float
    uncertainty: float


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP connection to a leased port of another rank's host: seconds it took, or why there is none."""

    to: int
    address: str
    port: int
    seconds: float = 0.0
    error: str = ""


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces of one group. bandwidth: bytes a second through each rank's link, 2 (n - 1) / n times those reduced."""

    backend: Backend
    group: str
    ranks: tuple[int, ...]
    latency: float = 0.0
    """Seconds for 8 bytes, the best of several."""
    bandwidth: float = 0.0
    error: str = ""


class Ipc(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU on which a child with the engine's CUDA_VISIBLE_DEVICES opened this rank's handle, or why it could not."""

    visible: str
    uuid: str = ""
    error: str = ""


class RankLinks(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured. ports: first port of its leased block, None if it leases none."""

    rank: int
    address: HostAddress | None = None
    """How the other hosts reach this one, as a run would agree on it."""
    address_error: str = ""
    ports: int | None = None
    ports_error: str = ""
    clock: ClockOffset | None = None
    reaches: tuple[Reach, ...] = ()
    collectives: tuple[Collective, ...] = ()
    ipc: Ipc | None = None
    sees_folder: bool | None = None
    """Whether a file that rank 0 made in the run's folder is here too; None: this rank did not look."""
    folder_error: str = ""


def groups_of(dims: ParallelDims, hosts: Iterable[Sequence[int]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups whose links a run uses, by kind; hosts: the ranks of each host.

    engine (tp x pp), tp and pp if both are more than one rank, hosts (the first rank of each), world. A kind is left out
    if its groups are those of an earlier one, or of one rank each.
    """
    engines = tuple(dims.engine_ranks(dp) for dp in range(dims.dp))
    kinds = {
        "engine": engines,
        "tp": tuple(engine[at : at + dims.tp] for engine in engines for at in range(0, len(engine), dims.tp)),
        "pp": tuple(engine[index :: dims.tp] for engine in engines for index in range(dims.tp)),
        "hosts": (tuple(ranks[0] for ranks in hosts),),
        "world": (tuple(range(dims.world_size)),),
    }
    chosen: dict[str, tuple[tuple[int, ...], ...]] = {}
    for kind, groups in kinds.items():
        earlier = [set(map(frozenset, other)) for other in chosen.values()]
        if len(groups[0]) > 1 and set(map(frozenset, groups)) not in earlier:
            chosen[kind] = groups
    return chosen


def clock_of_host(store: JobStore, hosts: Sequence[int], deadline: Deadline) -> ClockOffset | None:
    """Compare the clocks of hosts' first ranks (rank 0 first) with rank 0's; return None if no answer came.

    Cristian's algorithm over the store: the round trip that took least time bounds the error.
    """
    if store.rank == 0:
        for rank in hosts[1:]:
            with contextlib.suppress(Absent):  # this host is not there; the others are
                for number in range(CLOCK_ROUNDS):
                    store.get(f"clock/{rank}/{number}/ask", deadline.left(CONNECT_SECONDS), bool)
                    store.put(f"clock/{rank}/{number}/tell", time.time())
        return ClockOffset(offset=0.0, uncertainty=0.0)
    best: ClockOffset | None = None
    for number in range(CLOCK_ROUNDS):
        sent, began = time.time(), time.monotonic()
        store.put(f"clock/{store.rank}/{number}/ask", True)
        try:
            theirs = store.get(f"clock/{store.rank}/{number}/tell", deadline.left(), float)
        except Absent:
            return best
        half = (time.monotonic() - began) / 2
        if number and (
            best is None or half < best.uncertainty
        ):  # in round 0 rank 0 may have been busy with another host
            best = ClockOffset(offset=sent + half - theirs, uncertainty=half)
    return best


@contextmanager
def open_port(base_port: int, name: str) -> Iterator[EnginePorts]:
    """Lease a block of ports as an engine does, and send `name` to all who connect to its dist_init_port.

    Raise OSError if no block is free or the port cannot be listened on.
    """
    with PortLease(base_port) as lease, contextlib.ExitStack() as stack:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        address = ("", lease.ports.dist_init_port)
        listener = socket.create_server(address, family=family, dualstack_ipv6=dual, backlog=128)
        stack.callback(listener.close)
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
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), seconds) as connection, connection.makefile() as lines:
            answer = lines.readline().strip()
    except TimeoutError:
        return Reach(to=rank, address=address, port=port, error=f"no answer within {seconds:.0f} s")
    except (OSError, UnicodeDecodeError) as error:
        return Reach(to=rank, address=address, port=port, error=getattr(error, "strerror", None) or str(error))
    if answer != str(rank):
        return Reach(to=rank, address=address, port=port, error=f"{answer or 'something else'} answered in its place")
    return Reach(to=rank, address=address, port=port, seconds=time.monotonic() - began)


def _nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())


@contextmanager
def token_in(path: str) -> Iterator[str]:
    """Make a file in the run's folder for other hosts to look for. Raise OSError if none can be made."""
    with tempfile.NamedTemporaryFile(dir=_nearest_folder(Path(path)), prefix=".harness-doctor-") as file:
        yield file.name


def sees(token: str) -> bool:
    """Return whether the file of another host is seen here."""
    end = time.monotonic() + FOLDER_SECONDS
    while time.monotonic() < end:
        os.listdir(_nearest_folder(Path(token).parent))  # makes NFS look again
        if Path(token).exists():
            return True
        time.sleep(0.1)
    return False


Results = dict[tuple[Backend, str], Collective]
"""By backend and kind of group."""


def untried(groups: Mapping[str, tuple[int, ...]], device: torch.device | None) -> Results:
    """Return the all-reduces to measure, for this rank's group of each kind: gloo, and NCCL if there is a device."""
    backends: tuple[Backend, ...] = ("gloo",) if device is None else ("gloo", "nccl")
    error = "not tried: those before it used up the time"
    return {
        (backend, kind): Collective(backend=backend, group=kind, ranks=ranks, error=error)
        for backend in backends
        for kind, ranks in groups.items()
    }


def all_reduces(
    store: JobStore, kinds: Sequence[str], device: torch.device | None, deadline: Deadline, results: Results
) -> None:
    """Replace the results that are untried, in a call of all ranks with the same kinds.

    Ranks wait for one another before each kind, so that one broken group does not make the next one late.
    """
    backends: tuple[Backend, ...] = ("gloo",) if device is None else ("gloo", "nccl")
    for backend, kind in itertools.product(backends, kinds):
        store.barrier(f"all_reduce/{backend}/{kind}", deadline.left(COLLECTIVE_SECONDS["gloo"] + 1))
        group = results.get((backend, kind))
        if group is None or deadline.past:
            continue
        seconds = deadline.left(COLLECTIVE_SECONDS[backend])
        try:
            results[backend, kind] = within(seconds + 1, partial(_all_reduce, store, group, seconds, device))
        except (RuntimeError, TimeoutError) as error:
            results[backend, kind] = replace(group, error=_first_line(error))


def _all_reduce(store: JobStore, of: Collective, seconds: float, device: torch.device | None) -> Collective:
    """Measure latency and bandwidth, best of several. Raise RuntimeError if a sum comes out wrong."""
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
    latency = min(timed(word) for _ in range(LATENCY_ROUNDS))
    buffer = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device).view(torch.float32)
    timed(buffer)
    small = torch.tensor([timed(buffer)], dtype=torch.float64, device=device)
    timed(small)  # the same on every rank, so that all choose one size
    if small.item() / size < SLOW_SECONDS:
        buffer = torch.zeros(LARGE_BYTES[of.backend], dtype=torch.uint8, device=device).view(torch.float32)
        timed(buffer)
    seconds = min(timed(buffer) for _ in range(BANDWIDTH_ROUNDS))
    moved = 2 * (size - 1) / size * buffer.numel() * buffer.element_size()
    return replace(of, latency=latency, bandwidth=moved / seconds, error="")


def _first_line(error: BaseException) -> str:
    """Return the error without torch's position in its own source."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line.partition("] ")[2] if line.startswith("[/") and "] " in line else line
