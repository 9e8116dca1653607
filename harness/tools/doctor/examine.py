"""One look at a job, rank by rank: meet, tell, measure, tell, judge. Every wait has an end."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from harness.cluster import network
from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EnginePlacement, RankLocation
from harness.cluster.world import TORCHRUN_PREFIX, TORCHRUN_VARIABLES, Launch
from harness.config.schema import Config
from harness.tools.doctor import ipc
from harness.tools.doctor.checks import findings, missing
from harness.tools.doctor.examination import Examination, Finding, groups_of, placements
from harness.tools.doctor.facts import RankFacts, collect
from harness.tools.doctor.links import (
    CONNECT_SECONDS,
    Backend,
    Collective,
    Ipc,
    RankLinks,
    all_reduces,
    clock_of_host,
    open_port,
    reach_all,
    sees,
    token_in,
)
from harness.tools.doctor.meeting import Absent, Deadline, Meeting, connect, within
from harness.tools.doctor.show import as_json, as_text

OK, FAULTS = 0, 1

# Seconds after this process began: by then it has met, all have told, all have measured, rank 0 has judged.
MEET, FACTS, LINKS, VERDICT = 8.0, 11.0, 20.0, 22.0
SPREAD = 2.0
"""By how much ranks may begin apart: others wait for rank 0 so much longer than rank 0 for them."""
LEAVE_SECONDS = 2.0
READY = 5.0
"""Seconds from the roster to the first all-reduce, where somebody does not come to it: all that came begin it together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """What every rank must know of every other to measure what is between them."""

    location: RankLocation | None
    host: str
    device: str
    master: str | None
    uuid: str | None


@dataclass(frozen=True, slots=True)
class Roster:
    """What rank 0 answers to the facts: a member for each rank; None where some did not come."""

    members: tuple[Member, ...] | None


@dataclass(frozen=True, slots=True)
class OpenPort:
    """Where a rank listens; address is None where its host has none, port where it leased none."""

    address: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """The file that rank 0 made where the run will write; None where it could not."""

    path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank's part."""

    config: Config
    dims: ParallelDims
    launch: Launch
    members: tuple[Member, ...]
    meeting: Meeting
    deadline: Deadline

    @property
    def hosts(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, member in enumerate(self.members):
            found.setdefault(member.host, []).append(rank)
        return found

    @property
    def leaders(self) -> list[int]:
        """The first rank of each host."""
        return [ranks[0] for ranks in self.hosts.values()]


def examine(config: Config, launch: Launch, environment: Mapping[str, str], json: bool = False) -> int:
    """Look, and on rank 0 print what was found. Returns 0, or 1 where there are faults, on every rank.

    Raises ValueError where the mesh has another size than the world.
    """
    began = time.monotonic()
    dims = ParallelDims.of(config.parallel)
    dims.validate(launch.world_size)
    try:
        meeting = Meeting(connect(environment, MEET, serve=launch.rank == 0), launch.rank, launch.world_size)
        # Torch's store keeps to its timeouts only while its server answers; a host that is cut off must end too.
        left = Deadline(began + VERDICT + 2 * SPREAD).left()
        return within(left, lambda: _examine(config, dims, launch, meeting, environment, json, began))
    except (OSError, dist.DistError) as error:
        at = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        reason = next(iter(str(error).splitlines()), "")
        print(f"rank {launch.rank}: no answer from the store at {at}: {reason}", file=sys.stderr)
        return FAULTS


def _examine(
    config: Config,
    dims: ParallelDims,
    launch: Launch,
    meeting: Meeting,
    environment: Mapping[str, str],
    json: bool,
    began: float,
) -> int:
    try:
        facts = within(Deadline(began + FACTS).left(), lambda: collect(config, launch, environment))
    except TimeoutError:
        print(
            f"rank {launch.rank}: looking at this host took over {FACTS:.0f} s; a driver or a file system hangs",
            file=sys.stderr,
        )
        return FAULTS
    told = meeting.gather("facts", facts, Deadline(began + FACTS).left(), RankFacts)
    if launch.rank == 0:
        absent = tuple(rank for rank, each in enumerate(told) if each is None)
        meeting.put("members", Roster(None if absent else tuple(_member(each) for each in told if each is not None)))
        if absent:
            return _judge(meeting, None, [missing(absent, launch.world_size, FACTS)], began, json)
    try:
        members = meeting.get("members", Deadline(began + FACTS + SPREAD).left(), Roster).members
    except Absent:
        return _verdict(meeting, began)
    if members is None:
        return _verdict(meeting, began)
    job = Job(
        config=config, dims=dims, launch=launch, members=members, meeting=meeting, deadline=Deadline(began + LINKS)
    )
    links = measure(job, facts, environment)
    measured = meeting.gather("links", links, Deadline(began + LINKS + SPREAD).left(), RankLinks)
    if launch.rank != 0:
        return _verdict(meeting, began)
    known = tuple(each for each in told if each is not None)  # all: rank 0 answered with the roster
    view = Examination(config=config, dims=dims, facts=known, links=tuple(measured))
    return _judge(meeting, view, findings(view), began, json)


def _member(facts: RankFacts) -> Member:
    uuid = facts.gpu.uuid if facts.gpu else None
    return Member(location=facts.location, host=facts.host, device=facts.device, master=facts.network.master, uuid=uuid)


def _judge(meeting: Meeting, view: Examination | None, found: list[Finding], began: float, json: bool) -> int:
    """Rank 0 speaks first: torchrun ends all ranks at the first exit that is not 0."""
    print((as_json if json else as_text)(view, found, time.monotonic() - began), flush=True)
    code = FAULTS if any(each.fault for each in found) else OK
    meeting.put("verdict", code)
    # The store may end with this process: let the others read it.
    end = time.monotonic() + LEAVE_SECONDS
    while meeting.store.add("left", 0) < meeting.world_size - 1 and time.monotonic() < end:
        time.sleep(0.05)
    return code


def _verdict(meeting: Meeting, began: float) -> int:
    """Any rank but 0: wait for what rank 0 says."""
    try:
        code = meeting.get("verdict", Deadline(began + VERDICT + SPREAD).left(), int)
        meeting.store.add("left", 1)
    except (Absent, dist.DistError) as error:
        print(f"rank {meeting.rank}: no verdict from rank 0: {error}", file=sys.stderr, flush=True)
        return FAULTS
    return code


def measure(job: Job, facts: RankFacts, environment: Mapping[str, str]) -> RankLinks:
    """What this rank measures, never longer than its deadline."""
    rank, meeting = job.launch.rank, job.meeting
    engines, _ = placements(job.dims, [each.location for each in job.members], job.members[0].device == "cuda")
    links = _address(job, facts, environment)
    ready = Deadline.after(job.deadline.left(READY))
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(_child(job, facts, engines, environment))
        holders = {node.builder for engine in engines for node in engine.nodes} | set(job.leaders)
        if rank in holders:
            try:
                ports = stack.enter_context(open_port(job.config.engine.base_port, str(rank)))
                links = replace(links, ports=ports.port)
                address = links.address.address if links.address else None
                meeting.put(f"port/{rank}", OpenPort(address, ports.dist_init_port))
            except OSError as error:
                links = replace(links, ports_error=error.strerror or str(error))
                meeting.put(f"port/{rank}", OpenPort())
        if rank in job.leaders:
            links = replace(links, clock=clock_of_host(meeting, job.leaders, ready))
            links = _folder(job, links, stack, ready)
        if rank in holders:
            links = replace(
                links, reaches=reach_all(_targets(job, engines, ready), max(1.0, ready.left(CONNECT_SECONDS)))
            )
        meeting.barrier("ready", ready.left())
        links = replace(links, collectives=_collectives(job, environment))
        links = replace(links, ipc=child())
        # Ports stay open and the token stays in its folder until the last rank has looked.
        meeting.barrier("measured", job.deadline.left(CONNECT_SECONDS))
    return links


def _address(job: Job, facts: RankFacts, environment: Mapping[str, str]) -> RankLinks:
    """As a run's hosts agree on their addresses; where there are several, gloo and NCCL are told as they are there."""
    rank, here = job.launch.rank, job.members[job.launch.rank]
    if facts.network.route is None:
        return RankLinks(rank=rank)
    reached = [each.master for each in job.members if each.host != here.host and each.master]
    variable = environment.get(network.INTERFACE_VARIABLE, "")
    try:
        own = network.choose(
            job.config.network.interface,
            variable,
            network.own_interfaces(),
            facts.network.route,
            list(dict.fromkeys(reached)),
        )
    except network.NetworkError as error:
        return RankLinks(rank=rank, address_error=str(error))
    if len(job.hosts) > 1:
        os.environ.update(network.variables(own, environment))
    return RankLinks(rank=rank, address=own)


def _targets(job: Job, engines: tuple[EnginePlacement, ...], ready: Deadline) -> list[tuple[int, str, int, str]]:
    """Whom this rank must reach: the head of its engine, and from each host's first rank that of every other host."""
    rank, here = job.launch.rank, job.members[job.launch.rank].host
    wanted = set(job.leaders) if rank in job.leaders else set()
    wanted |= {engine.nodes[0].builder for engine in engines if any(node.builder == rank for node in engine.nodes)}
    targets = []
    for other in sorted(each for each in wanted if job.members[each].host != here):
        with contextlib.suppress(Absent):  # its silence is a finding of its own
            where = job.meeting.get(f"port/{other}", ready.left(), OpenPort)
            if where.address is not None and where.port is not None:
                targets.append((other, where.address, where.port, str(other)))
    return targets


def _folder(job: Job, links: RankLinks, stack: contextlib.ExitStack, ready: Deadline) -> RankLinks:
    """Rank 0 makes a file where the run will write; the other hosts look for it."""
    path = job.config.weights.folder or job.config.run.dir or "runs"
    if job.launch.rank == 0:
        try:
            job.meeting.put("token", Token(stack.enter_context(token_in(path))))
        except OSError as error:
            job.meeting.put("token", Token(None))
            return replace(links, folder_error=f"{path}: {error.strerror}")
        return replace(links, sees_folder=True)
    try:
        token = job.meeting.get("token", ready.left(), Token).path
    except Absent:
        return links
    return links if token is None else replace(links, sees_folder=sees(token))


def _collectives(job: Job, environment: Mapping[str, str]) -> tuple[Collective, ...]:
    """On a connection of its own, in a thread that may be left behind."""
    groups = groups_of(job.dims, job.hosts.values())
    mine = {kind: group for kind, found in groups.items() for group in found if job.launch.rank in group}
    uuids = [each.uuid for each in job.members]
    usable = all(uuids) and len(set(uuids)) == len(uuids)  # NCCL refuses two ranks on one GPU
    index = _device_index(job.members[job.launch.rank].location)
    device = torch.device("cuda", index) if usable and index is not None else None
    found: list[Collective] = []
    with contextlib.suppress(OSError, RuntimeError):  # what is missing in `found` is told below
        store = connect(environment, CONNECT_SECONDS)
        meeting = Meeting(store, job.launch.rank, job.launch.world_size)
        seconds = job.deadline.left()
        within(seconds, lambda: all_reduces(meeting, mine, list(groups), device, job.deadline, found))
    done = {(each.backend, each.group) for each in tuple(found)}
    backends: tuple[Backend, ...] = ("gloo",) if device is None else ("gloo", "nccl")
    late = [
        Collective(backend=backend, group=kind, ranks=group, error="not tried: those before it used up the time")
        for backend in backends
        for kind, group in mine.items()
        if (backend, kind) not in done
    ]
    return (*tuple(found), *late)


def _device_index(location: RankLocation | None) -> int | None:
    """As choose_device: the only visible GPU, else the local rank's; None on the CPU."""
    if location is None or not location.gpu_count:
        return None
    return 0 if location.gpu_count == 1 else location.local_rank


@contextmanager
def _child(
    job: Job, facts: RankFacts, engines: tuple[EnginePlacement, ...], environment: Mapping[str, str]
) -> Iterator[Callable[[], Ipc | None]]:
    """Start the child that opens a handle, beside everything else; gives what waits for its answer."""
    rank = job.launch.rank
    node = next((node for engine in engines for node in engine.nodes if rank in node.ranks), None)
    index = _device_index(facts.location)
    if node is None or node.visible_devices is None or index is None or not job.config.parallel.colocate:
        yield lambda: None
        return
    visible = ",".join(node.visible_devices)
    own = {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIX)
    }
    try:
        position = node.base_gpu_id + node.ranks.index(rank)
        child, answer = ipc.start(torch.device("cuda", index), position, own | {"CUDA_VISIBLE_DEVICES": visible})
    except RuntimeError as error:
        failed = Ipc(visible=visible, error=str(error).splitlines()[0])
        yield lambda: failed
        return

    def wait() -> Ipc:
        try:
            told = answer(job.deadline.left())
        except (RuntimeError, TimeoutError) as error:
            return Ipc(visible=visible, error=str(error))
        uuid = told["uuid"]
        return Ipc(visible=visible, uuid=uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")

    try:
        yield wait
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
