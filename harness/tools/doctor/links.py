"""What is between ranks: clocks, sockets, folders that hosts share, and all-reduces of every group, each with a deadline."""

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from harness.cluster.network import HostAddress
from harness.cluster.ports import EnginePorts, PortLease
from harness.tools.doctor.meeting import Absent, Deadline, Meeting, within

Backend = Literal["gloo", "nccl"]
Group = Any
"""dist.ProcessGroupGloo or dist.ProcessGroupNCCL. The second is not in every torch, and their stubs lack collectives."""

CLOCK_ROUNDS = 7
CONNECT_SECONDS = 3.0
COLLECTIVE_SECONDS = 4.0
LATENCY_ROUNDS = 10
BANDWIDTH_ROUNDS = 3
SMALL_BYTES, LARGE_BYTES = 1 << 20, 16 << 20
NCCL_LARGE_BYTES = 128 << 20
SLOW_SECONDS = 0.05
"""A link that takes this long for SMALL_BYTES is measured with those alone."""
FOLDER_SECONDS = 2.0
"""How long a network file system may take to show another host's file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """This host's clock minus rank 0's, in seconds, and by how much the measurement can be off: half a round trip."""

    offset: float
    uncertainty: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """A TCP connection to a leased port of another rank's host: seconds it took, or why there is none."""

    to: int
    address: str
    port: int
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All-reduces of one group. bandwidth: bytes a second through each rank's link, 2 (n - 1) / n times those reduced."""

    backend: Backend
    group: str
    ranks: tuple[int, ...]
    latency: float = 0.0
    """Seconds for 8 bytes, the best of several."""
    bandwidth: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ipc:
    """Whether a child with the engine's CUDA_VISIBLE_DEVICES opened this rank's handle, and on which GPU it found itself."""

    visible: str
    uuid: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLinks:
    """What one rank measured. ports: first port of its leased block, None where it leases none."""

    rank: int
    address: HostAddress | None = None
    """How the other hosts reach this one, as a run would agree on it."""
    address_error: str = ""
    ports: int | None = None
    ports_error: str = ""
    clock: Clock | None = None
    reaches: tuple[Reach, ...] = ()
    collectives: tuple[Collective, ...] = ()
    ipc: Ipc | None = None
    sees_folder: bool | None = None
    """Whether a file that rank 0 made in the run's folder is here too; None: this rank did not look."""
    folder_error: str = ""


def clock_of_host(meeting: Meeting, hosts: Sequence[int], deadline: Deadline) -> Clock | None:
    """Of a host's first rank against rank 0's; hosts: those ranks, rank 0 first. None where the answer did not come.

    Cristian's algorithm over the store: the round trip that took least time bounds the error.
    """
    if meeting.rank == 0:
        for rank in hosts[1:]:
            for number in range(CLOCK_ROUNDS):
                try:
                    meeting.get(f"clock/{rank}/{number}/ask", deadline.left(CONNECT_SECONDS), bool)
                except Absent:
                    break  # this host is not there; the others are
                meeting.put(f"clock/{rank}/{number}/tell", time.time())
        return Clock(offset=0.0, uncertainty=0.0)
    best: Clock | None = None
    for number in range(CLOCK_ROUNDS):
        sent, began = time.time(), time.monotonic()
        meeting.put(f"clock/{meeting.rank}/{number}/ask", True)
        try:
            theirs = meeting.get(f"clock/{meeting.rank}/{number}/tell", deadline.left(), float)
        except Absent:
            return best
        trip = time.monotonic() - began
        if number == 0:
            continue  # rank 0 may have been with another host
        found = Clock(offset=sent + trip / 2 - theirs, uncertainty=trip / 2)
        best = min(best or found, found, key=lambda each: each.uncertainty)
    return best


@contextmanager
def open_port(base_port: int, name: str) -> Iterator[EnginePorts]:
    """A leased block as an engine takes one, with a listener on its dist_init_port that says `name` to whoever connects.

    Raises OSError where no block is free or the port cannot be listened on.
    """
    with PortLease(base_port) as lease, contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        listener = socket.create_server(
            ("", lease.ports.dist_init_port),
            family=family,
            dualstack_ipv6=family == socket.AF_INET6,
            backlog=128,
        )
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


def reach_all(targets: Sequence[tuple[int, str, int, str]], seconds: float) -> tuple[Reach, ...]:
    """Connect to all (rank, address, port, name) at once; the other side must say the name."""

    async def everything() -> list[Reach]:
        return await asyncio.gather(*(_reach(*target, seconds) for target in targets))

    return tuple(asyncio.run(everything()))


async def _reach(rank: int, address: str, port: int, name: str, seconds: float) -> Reach:
    reach, began = Reach(to=rank, address=address, port=port), time.monotonic()
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), seconds)
        try:
            told = (await asyncio.wait_for(reader.readline(), seconds)).decode(errors="replace").strip()
        finally:
            writer.close()
    except TimeoutError:
        return replace(reach, error=f"no answer within {seconds:.0f} s")
    except OSError as error:
        return replace(reach, error=error.strerror or str(error))
    if told != name:
        return replace(reach, error=f"{told or 'something else'} answered in its place")
    return replace(reach, seconds=time.monotonic() - began)


def nearest_folder(path: str) -> Path:
    """The folder itself, or the nearest above it that is there."""
    folder = Path(path).absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


@contextmanager
def token_in(path: str) -> Iterator[str]:
    """A file in the run's folder for as long as other hosts look for it. Raises OSError where none can be made."""
    with tempfile.NamedTemporaryFile(dir=nearest_folder(path), prefix=".harness-doctor-") as file:
        yield file.name


def sees(token: str) -> bool:
    end = time.monotonic() + FOLDER_SECONDS
    while time.monotonic() < end:
        os.listdir(nearest_folder(str(Path(token).parent)))  # makes NFS look again
        if Path(token).exists():
            return True
        time.sleep(0.1)
    return False


def all_reduces(
    meeting: Meeting,
    groups: Mapping[str, tuple[int, ...]],
    kinds: Sequence[str],
    device: torch.device | None,
    deadline: Deadline,
    found: list[Collective],
) -> None:
    """Fill `found`: gloo, and NCCL where there is a device, for this rank's group of each of the kinds.

    All ranks call it with the same kinds; groups has those to which this rank belongs. Ranks wait for one another before
    each kind, so that one broken group does not make the next one late.
    """
    backends: tuple[Backend, ...] = ("gloo",) if device is None else ("gloo", "nccl")
    for backend in backends:
        for kind in kinds:
            meeting.barrier(f"all_reduce/{backend}/{kind}", deadline.left(COLLECTIVE_SECONDS + 1))
            if kind not in groups:
                continue
            result = Collective(backend=backend, group=kind, ranks=groups[kind])
            if deadline.past:
                found.append(replace(result, error="not tried: those before it used up the time"))
                continue
            measure = _gloo if backend == "gloo" else _nccl
            seconds = deadline.left(COLLECTIVE_SECONDS if backend == "gloo" else 2 * COLLECTIVE_SECONDS)
            try:
                found.append(within(seconds + 1, _bind(measure, meeting, result, seconds, device)))
            except (RuntimeError, TimeoutError) as error:
                found.append(replace(result, error=_first_line(error)))


Measure = Callable[[Meeting, Collective, float, torch.device | None], Collective]


def _bind(
    measure: Measure, meeting: Meeting, result: Collective, seconds: float, device: torch.device | None
) -> Callable[[], Collective]:
    return lambda: measure(meeting, result, seconds, device)


def _gloo(meeting: Meeting, result: Collective, seconds: float, device: torch.device | None) -> Collective:
    position, timeout = result.ranks.index(meeting.rank), timedelta(seconds=seconds)
    group = dist.ProcessGroupGloo(_store(meeting, result), position, len(result.ranks), timeout)
    return _measured(group, result, position, torch.device("cpu"), LARGE_BYTES)


def _nccl(meeting: Meeting, result: Collective, seconds: float, device: torch.device | None) -> Collective:
    assert device is not None
    torch.cuda.set_device(device)
    position = result.ranks.index(meeting.rank)
    options = dist.ProcessGroupNCCL.Options()
    # Its watchdog aborts the process; `within` is what ends a wait here.
    options._timeout = timedelta(minutes=10)
    group = dist.ProcessGroupNCCL(_store(meeting, result), position, len(result.ranks), options)
    return _measured(group, result, position, device, NCCL_LARGE_BYTES)


def _store(meeting: Meeting, result: Collective) -> dist.Store:
    """One for each group: groups of one kind are disjoint, so their first ranks tell them apart."""
    return dist.PrefixStore(f"{result.backend}/{result.group}/{result.ranks[0]}", meeting.store)


def _measured(
    group: Group,
    result: Collective,
    position: int,
    device: torch.device,
    large_bytes: int,
) -> Collective:
    """Latency and bandwidth, best of several. Raises RuntimeError where a sum comes out wrong."""
    size = len(result.ranks)
    word = torch.tensor([float(position)], dtype=torch.float64, device=device)
    _timed(group, word)
    if word.item() != size * (size - 1) / 2:
        raise RuntimeError(f"the sum of 0 to {size - 1} came out as {word.item():g}")
    latency = min(_timed(group, word) for _ in range(LATENCY_ROUNDS))
    small = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device).view(torch.float32)
    _timed(group, small)
    slow = torch.tensor([_timed(group, small)], dtype=torch.float64, device=device)
    _timed(group, slow)  # the same on every rank: all go on with one size
    buffer = small
    if slow.item() / size < SLOW_SECONDS:
        buffer = torch.zeros(large_bytes, dtype=torch.uint8, device=device).view(torch.float32)
        _timed(group, buffer)
    seconds = min(_timed(group, buffer) for _ in range(BANDWIDTH_ROUNDS))
    moved = 2 * (size - 1) / size * buffer.numel() * buffer.element_size()
    return replace(result, latency=latency, bandwidth=moved / seconds)


def _timed(group: Group, tensor: torch.Tensor) -> float:
    began = time.monotonic()
    group.allreduce([tensor]).wait()
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.monotonic() - began


def _first_line(error: BaseException) -> str:
    """Without torch's position in its own source."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line.partition("] ")[2] if line.startswith("[/") and "] " in line else line
