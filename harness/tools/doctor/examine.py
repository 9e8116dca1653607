"""One examination of a job, rank by rank: meet, report facts, measure links, report them, judge.

Every wait has an end.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from msgspec.structs import replace

from harness.cluster import network
from harness.cluster.mesh import ParallelDims
from harness.cluster.world import Launch
from harness.config.schema import Config
from harness.runtime.ranks import ranks_by
from harness.tools.doctor import links
from harness.tools.doctor.checks import Examination, Problem, missing, problems_of
from harness.tools.doctor.doctor_text import as_text
from harness.tools.doctor.job_store import Absent, JobStore, connect, left, within
from harness.tools.doctor.rank_facts import RankFacts, collect

OK, FAULTS = 0, 1

# Deadlines in seconds after this process began: the store is reached, all facts are in, all measurements are in, rank 0
# has printed the result.
MEET, FACTS, LINKS, VERDICT = 8.0, 11.0, 20.0, 22.0
SPREAD = 2.0
"""By how much the starts of ranks may differ: the others wait for rank 0 this much longer than rank 0 waits for
them."""
LEAVE_SECONDS = 2.0
READY = 5.0
"""Seconds that the ranks wait for each other before the first all-reduce; then those that came begin."""


def examine(config: Config, launch: Launch, environment: Mapping[str, str]) -> int:
    """Examine the job, and print the result on rank 0. Return 0, or 1 if there are faults, on every rank.

    Raise ValueError if the mesh has another size than the world.
    """
    began = time.monotonic()
    dims = ParallelDims.of(config.parallel)
    dims.validate(launch.world_size)
    try:
        doctor = _Doctor(config, dims, launch, environment, began)
        # torch's store keeps its timeouts only while its server answers, but a host that is cut off must end too.
        return within(left(began + VERDICT + 2 * SPREAD), doctor.run)
    except (OSError, dist.DistError) as error:
        at = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        print(f"rank {launch.rank}: no answer from the store at {at}: {links.first_line(error)}", file=sys.stderr)
        return FAULTS


@dataclass
class _Doctor:
    """One rank's part of an examination."""

    config: Config
    dims: ParallelDims
    launch: Launch
    environment: Mapping[str, str]
    began: float
    members: list[RankFacts] = field(default_factory=list)
    """What every rank must know about every other one, once all have come."""

    def __post_init__(self) -> None:
        self.rank = self.launch.rank
        self.store = self._connect(MEET, serve=self.rank == 0)

    def _connect(self, seconds: float = links.CONNECT_SECONDS, serve: bool = False) -> JobStore:
        return JobStore(connect(self.environment, seconds, serve), self.rank, self.launch.world_size)

    @property
    def hosts(self) -> list[tuple[int, ...]]:
        """The ranks of each host."""
        return list(ranks_by({each.rank: each.host for each in self.members}).values())

    def run(self) -> int:
        """Examine; rank 0 prints the result."""
        facts_end, links_end = self.began + FACTS, self.began + LINKS
        try:
            mine = within(left(facts_end), lambda: collect(self.config, self.launch, self.environment))
        except TimeoutError:
            why = f"looking at this host took over {FACTS:.0f} s; a driver or a file system hangs"
            print(f"rank {self.rank}: {why}", file=sys.stderr)
            return FAULTS
        except (OSError, RuntimeError) as error:  # of a broken driver, or of a file system
            print(f"rank {self.rank}: this host cannot be looked at: {links.first_line(error)}", file=sys.stderr)
            return FAULTS
        gathered = self.store.gather("facts", mine, left(facts_end), RankFacts)
        facts = tuple(each for each in gathered if each)
        if self.rank == 0:
            absent = [rank for rank, each in enumerate(gathered) if each is None]
            slim = [replace(each, versions={}, environment={}) for each in facts]
            self.store.put("members", [] if absent else slim)
            if absent:
                return self._judge(None, [missing(absent, self.launch.world_size, FACTS)])
        with contextlib.suppress(Absent):
            self.members = self.store.get("members", left(facts_end + SPREAD), list[RankFacts])
        if len(self.members) != self.launch.world_size:
            return self._await_verdict()
        measured = self.store.gather("links", self._measure(mine, links_end), left(links_end + SPREAD), links.RankLinks)
        if self.rank != 0:
            return self._await_verdict()
        view = Examination(config=self.config, dims=self.dims, facts=facts, links=tuple(measured))
        return self._judge(view, problems_of(view))

    def _judge(self, view: Examination | None, problems: list[Problem]) -> int:
        """Print on rank 0 before other ranks end: torchrun ends all ranks at the first exit that is not 0."""
        print(as_text(view, problems, time.monotonic() - self.began), flush=True)
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
            code = self.store.get("verdict", left(self.began + VERDICT + SPREAD), int)
            self.store.store.add("left", 1)
        except (Absent, dist.DistError) as error:
            print(f"rank {self.rank}: no verdict from rank 0: {error}", file=sys.stderr, flush=True)
            return FAULTS
        return code

    def _measure(self, facts: RankFacts, end: float) -> links.RankLinks:
        """Return what this rank measures, in time."""
        found = links.RankLinks(rank=self.rank)
        if facts.route is not None:
            self._choose_address(facts, facts.route, found)
        device = None if facts.gpu_index is None else torch.device("cuda", facts.gpu_index)
        ready = time.monotonic() + left(end, READY)
        leaders = [ranks[0] for ranks in self.hosts]
        with contextlib.ExitStack() as stack:
            if self.rank in leaders:
                self._reach_other_hosts(leaders, ready, found, stack)
            self.store.barrier("ready", left(ready))
            uuids = {each.gpu.uuid for each in self.members if each.gpu}
            alone = device if len(uuids) == len(self.members) else None  # NCCL refuses two ranks on one GPU
            if self.launch.world_size > 1:
                found.collectives = links.all_reduces(self._connect, alone, end)
            # Ports stay open until the last rank has looked.
            self.store.barrier("measured", left(end, links.CONNECT_SECONDS))
        return found

    def _reach_other_hosts(
        self, leaders: list[int], ready: float, found: links.RankLinks, stack: contextlib.ExitStack
    ) -> None:
        """Open a port on this host as an engine does, and connect to those of the other hosts."""
        listening = "", 0
        try:
            ports = stack.enter_context(links.open_port(self.config.engine.base_port))
            found.ports = ports.port
            listening = found.address.address if found.address else "", ports.dist_init_port
        except OSError as error:
            found.ports_error = error.strerror or str(error)
        self.store.put(f"port/{self.rank}", listening)
        targets = []
        for other in set(leaders) - {self.rank}:
            with contextlib.suppress(Absent):  # its silence is a problem in itself
                address, port = self.store.get(f"port/{other}", left(ready), tuple[str, int])
                targets += [(other, address, port)] * bool(address)
        found.reaches = links.reach_all(targets, left(ready, links.CONNECT_SECONDS))

    def _choose_address(self, facts: RankFacts, route: str, found: links.RankLinks) -> None:
        """Choose the host's address as a run does; with several hosts, set gloo's and NCCL's variables as a run
        does.
        """
        reached = dict.fromkeys(each.master for each in self.members if each.host != facts.host and each.route)
        variable = self.environment.get(network.INTERFACE_VARIABLE, "")
        wanted, interfaces = self.config.network.interface, network.own_interfaces()
        try:
            found.address = network.choose(wanted, variable, interfaces, route, list(reached))
        except network.NetworkError as error:
            found.address_error = str(error)
            return
        if len(self.hosts) > 1:
            os.environ.update(network.variables(found.address, self.environment))
