"""One examination of a job, rank by rank: meet, report facts, measure links, report them, judge. Every wait has an end."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from harness.cluster import network
from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EnginePlacement, RankLocation
from harness.cluster.world import TORCHRUN_PREFIX, TORCHRUN_VARIABLES, Launch
from harness.config.schema import Config
from harness.tools.doctor.checks import Examination, Problem, missing, placements, problems_of, ranks_by
from harness.tools.doctor.cuda_ipc import IpcChild
from harness.tools.doctor.doctor_text import as_json, as_text
from harness.tools.doctor.facts import RankFacts, collect
from harness.tools.doctor.job_store import Absent, Deadline, JobStore, connect, within
from harness.tools.doctor.links import (
    CONNECT_SECONDS,
    Collective,
    Ipc,
    RankLinks,
    all_reduces,
    clock_of_host,
    groups_of,
    open_port,
    reach_all,
    sees,
    token_in,
    untried,
)

OK, FAULTS = 0, 1

# Seconds after this process began: by then it has met, all have reported facts, all have measured, rank 0 has judged.
MEET, FACTS, LINKS, VERDICT = 8.0, 11.0, 20.0, 22.0
SPREAD = 2.0
"""By how much ranks may begin apart: others wait for rank 0 so much longer than rank 0 for them."""
LEAVE_SECONDS = 2.0
READY = 5.0
"""Seconds from the roster to the first all-reduce, if a rank does not come to it: those that came begin it together."""

AsText = Callable[[Examination | None, list[Problem], float], str]
"""as_text or as_json."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank must know of every other to measure what is between them."""

    location: RankLocation | None
    host: str
    device: str
    master: str | None
    uuid: str | None


def examine(config: Config, launch: Launch, environment: Mapping[str, str], json: bool = False) -> int:
    """Examine the job, and print the result on rank 0. Return 0, or 1 if there are faults, on every rank.

    Raise ValueError if the mesh has another size than the world.
    """
    began = time.monotonic()
    dims = ParallelDims.of(config.parallel)
    dims.validate(launch.world_size)
    try:
        store = JobStore(connect(environment, MEET, serve=launch.rank == 0), launch.rank, launch.world_size)
        doctor = Doctor(config=config, dims=dims, launch=launch, environment=environment, store=store, began=began)
        # Torch's store keeps to its timeouts only while its server answers; a host that is cut off must end too.
        return within(doctor.until(VERDICT + 2 * SPREAD).left(), lambda: doctor.run(as_json if json else as_text))
    except (OSError, dist.DistError) as error:
        at = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        reason = next(iter(str(error).splitlines()), "")
        print(f"rank {launch.rank}: no answer from the store at {at}: {reason}", file=sys.stderr)
        return FAULTS


@dataclass(kw_only=True)
class Doctor:
    """One rank's part of an examination."""

    config: Config
    dims: ParallelDims
    launch: Launch
    environment: Mapping[str, str]
    store: JobStore
    began: float
    members: list[Member] = field(default_factory=list)
    """Of every rank, once all have come."""

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def leaders(self) -> list[int]:
        """The first rank of each host."""
        return [ranks[0] for ranks in ranks_by(each.host for each in self.members).values()]

    @property
    def device(self) -> torch.device | None:
        """The GPU that choose_device picks: the only visible one, else the local rank's; None on the CPU."""
        location = self.members[self.rank].location
        if location is None or not location.gpu_count:
            return None
        return torch.device("cuda", 0 if location.gpu_count == 1 else location.local_rank)

    def until(self, seconds: float) -> Deadline:
        """Return the deadline so many seconds after this process began."""
        return Deadline(self.began + seconds)

    def run(self, text: AsText) -> int:
        """Examine; rank 0 prints what `text` makes of it."""
        try:
            mine = within(self.until(FACTS).left(), lambda: collect(self.config, self.launch, self.environment))
        except TimeoutError:
            why = f"looking at this host took over {FACTS:.0f} s; a driver or a file system hangs"
            print(f"rank {self.rank}: {why}", file=sys.stderr)
            return FAULTS
        gathered = self.store.gather("facts", mine, self.until(FACTS).left(), RankFacts)
        facts = tuple(each for each in gathered if each)
        if self.rank == 0:
            absent = [rank for rank, each in enumerate(gathered) if each is None]
            self.store.put("members", [] if absent else [_member(each) for each in facts])
            if absent:
                return self._judge(None, [missing(absent, self.launch.world_size, FACTS)], text)
        with contextlib.suppress(Absent):
            self.members = self.store.get("members", self.until(FACTS + SPREAD).left(), list[Member])
        if len(self.members) != self.launch.world_size:
            return self._await_verdict()
        links = self.measure(mine)
        measured = self.store.gather("links", links, self.until(LINKS + SPREAD).left(), RankLinks)
        if self.rank != 0:
            return self._await_verdict()
        view = Examination(config=self.config, dims=self.dims, facts=facts, links=tuple(measured))
        return self._judge(view, problems_of(view), text)

    def _judge(self, view: Examination | None, problems: list[Problem], text: AsText) -> int:
        """Print on rank 0 before other ranks end: torchrun ends all ranks at the first exit that is not 0."""
        print(text(view, problems, time.monotonic() - self.began), flush=True)
        code = FAULTS if any(each.fault for each in problems) else OK
        self.store.put("verdict", code)
        # The store may end with this process: let the others read it.
        end = time.monotonic() + LEAVE_SECONDS
        while self.store.store.add("left", 0) < self.launch.world_size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        return code

    def _await_verdict(self) -> int:
        """Return rank 0's verdict, on any other rank."""
        try:
            code = self.store.get("verdict", self.until(VERDICT + SPREAD).left(), int)
            self.store.store.add("left", 1)
        except (Absent, dist.DistError) as error:
            print(f"rank {self.rank}: no verdict from rank 0: {error}", file=sys.stderr, flush=True)
            return FAULTS
        return code

    def measure(self, facts: RankFacts) -> RankLinks:
        """Return what this rank measures, never later than LINKS."""
        engines, _ = placements(self.dims, [each.location for each in self.members], self.members[0].device == "cuda")
        links = self._address(facts)
        ready = Deadline.after(self.until(LINKS).left(READY))
        with contextlib.ExitStack() as stack:
            child = self._ipc_child(engines)  # it imports torch meanwhile
            if isinstance(child, IpcChild):
                stack.callback(child.end)
            leads = self.rank in self.leaders
            holds_ports = leads or any(node.builder == self.rank for engine in engines for node in engine.nodes)
            if holds_ports:
                listening = "", 0
                try:
                    ports = stack.enter_context(open_port(self.config.engine.base_port, str(self.rank)))
                    links = replace(links, ports=ports.port)
                    listening = links.address.address if links.address else "", ports.dist_init_port
                except OSError as error:
                    links = replace(links, ports_error=error.strerror or str(error))
                self.store.put(f"port/{self.rank}", listening)
            if leads:
                links = replace(links, clock=clock_of_host(self.store, self.leaders, ready))
                links = self._folder(links, stack, ready)
            if holds_ports:
                targets = self._targets(engines, ready)
                links = replace(links, reaches=reach_all(targets, max(1.0, ready.left(CONNECT_SECONDS))))
            self.store.barrier("ready", ready.left())
            links = replace(links, collectives=self._collectives())
            links = replace(links, ipc=self._ipc(child) if isinstance(child, IpcChild) else child)
            # Ports stay open and the token stays in its folder until the last rank has looked.
            self.store.barrier("measured", self.until(LINKS).left(CONNECT_SECONDS))
        return links

    def _address(self, facts: RankFacts) -> RankLinks:
        """Choose the host's address as a run does; with several hosts, set gloo's and NCCL's variables as a run does."""
        if facts.network.route is None:
            return RankLinks(rank=self.rank)
        reached = dict.fromkeys(each.master for each in self.members if each.host != facts.host and each.master)
        variable = self.environment.get(network.INTERFACE_VARIABLE, "")
        wanted, interfaces = self.config.network.interface, network.own_interfaces()
        try:
            own = network.choose(wanted, variable, interfaces, facts.network.route, list(reached))
        except network.NetworkError as error:
            return RankLinks(rank=self.rank, address_error=str(error))
        if len(self.leaders) > 1:
            os.environ.update(network.variables(own, self.environment))
        return RankLinks(rank=self.rank, address=own)

    def _targets(self, engines: tuple[EnginePlacement, ...], ready: Deadline) -> list[tuple[int, str, int]]:
        """Return what this rank must reach: the head of its engine, and a host's first rank those of all other hosts."""
        here = self.members[self.rank].host
        wanted = set(self.leaders) if self.rank in self.leaders else set()
        wanted |= {each.nodes[0].builder for each in engines if any(node.builder == self.rank for node in each.nodes)}
        targets = []
        for other in sorted(each for each in wanted if self.members[each].host != here):
            with contextlib.suppress(Absent):  # its silence is a problem in itself
                address, port = self.store.get(f"port/{other}", ready.left(), tuple[str, int])
                if address and port:
                    targets.append((other, address, port))
        return targets

    def _folder(self, links: RankLinks, stack: contextlib.ExitStack, ready: Deadline) -> RankLinks:
        """Make a file where the run will write, on rank 0; look for it on the other hosts."""
        path = self.config.weights.folder or self.config.run.dir or "runs"
        if self.rank == 0:
            try:
                self.store.put("token", stack.enter_context(token_in(path)))
            except OSError as error:
                self.store.put("token", "")
                return replace(links, folder_error=f"{path}: {error.strerror}")
            return replace(links, sees_folder=True)
        try:
            token = self.store.get("token", ready.left(), str)
        except Absent:
            return links
        return replace(links, sees_folder=sees(token)) if token else links

    def _collectives(self) -> tuple[Collective, ...]:
        """Measure all-reduces on a connection of their own, in a thread that may be left behind."""
        groups = groups_of(self.dims, ranks_by(each.host for each in self.members).values())
        mine = {kind: group for kind, found in groups.items() for group in found if self.rank in group}
        uuids = [each.uuid for each in self.members]
        usable = all(uuids) and len(set(uuids)) == len(uuids)  # NCCL refuses two ranks on one GPU
        device = self.device if usable else None
        results, deadline = untried(mine, device), self.until(LINKS)
        with contextlib.suppress(OSError, RuntimeError):  # what could not be measured stays untried
            store = JobStore(connect(self.environment, CONNECT_SECONDS), self.rank, self.launch.world_size)
            within(deadline.left(), lambda: all_reduces(store, list(groups), device, deadline, results))
        return tuple(results.values())

    def _ipc_child(self, engines: tuple[EnginePlacement, ...]) -> IpcChild | Ipc | None:
        """Start a child that sees what this rank's engine will see; None if their processes share no GPU."""
        node = next((node for engine in engines for node in engine.nodes if self.rank in node.ranks), None)
        if node is None or node.visible_devices is None or self.device is None or not self.config.parallel.colocate:
            return None
        visible, index = ",".join(node.visible_devices), node.base_gpu_id + node.ranks.index(self.rank)
        inherited = {
            name: value
            for name, value in self.environment.items()
            if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIX)
        }
        try:
            return IpcChild(self.device, index, visible, inherited)
        except RuntimeError as error:
            return Ipc(visible=visible, error=str(error).splitlines()[0])

    def _ipc(self, child: IpcChild) -> Ipc:
        try:
            return Ipc(visible=child.visible, uuid=child.uuid(self.until(LINKS).left()))
        except (RuntimeError, TimeoutError) as error:
            return Ipc(visible=child.visible, error=str(error))


def _member(facts: RankFacts) -> Member:
    uuid = facts.gpu.uuid if facts.gpu else None
    return Member(location=facts.location, host=facts.host, device=facts.device, master=facts.network.master, uuid=uuid)
