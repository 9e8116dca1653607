"""All checks of a job: pure functions of what the ranks reported.

FAULTS and WARNINGS list every problem that the doctor looks for, with its remedy, in the order in which problems are
printed. Causes come before consequences, because a reader fixes the first one and runs the doctor again. The functions
below find the problems.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import host_name, place
from harness.config.engine_rules import expandable_segments
from harness.config.schema import Config
from harness.runtime import GIB, MIB
from harness.runtime.ranks import ranks_by, ranks_in_words, values_in_words
from harness.tools.doctor.links import Backend, RankLinks
from harness.tools.doctor.rank_facts import RankFacts
from harness.tools.environment_file import NOT_INSTALLED

SHARED_MEMORY_BYTES, SHARED_MEMORY_PER_RANK = 64 * MIB, 128 * MIB
"""NCCL's buffers and an engine's queues; a container's default of 64 MiB is too little for either."""
DESCRIPTORS, DESCRIPTORS_PER_RANK = 256, 8
"""Each rank's gloo and NCCL groups connect it to every other rank."""
FOLDER_BYTES = 64 * MIB
BALANCE = 0.9
"""SGLang refuses an engine whose fullest GPU has less than this share of the emptiest one's free memory."""
OCCUPIED_BYTES = 2 * GIB
"""GPU memory that is used before a run: more than a driver takes."""
SLOW_BANDWIDTH = {"gloo": 10e6, "nccl": 100e6}
"""Bytes a second of an all-reduce, below which a run is not worth starting."""
PER_RANK = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Placement handles the first; torchrun sets the second, and an engine never inherits it."""
PER_HOST = (
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX",
    "NCCL_TOPO_FILE",
)  # fmt: skip
"""Variables that may differ between hosts, but not between the ranks of one host."""
ONLY_LOGS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS")

FAULTS = {
    "configs": "start every host with the same files and overrides",
    "routes": "give torchrun's --master-addr or --rdzv-endpoint a name or address that this host resolves and routes to",
    "routes/interface": "set network.interface or GLOO_SOCKET_IFNAME to an existing interface, or neither",
    "routes/loopback": "start torchrun with the master's address on the network (Debian's /etc/hosts has 127.0.1.1 for the"
    " host's own name: give the address instead of the name), or set network.interface",
    "routes/same": "give each host a different address on the network between them, or set network.interface",
    "needed_packages": "install the environment of configs/environments that fits this CUDA, on every host",
    "versions": "install one environment on all hosts (configs/environments), and start torchrun from it",
    "environment": "export one value on every host before torchrun, or unset it everywhere",
    "expandable_segments": "take expandable_segments out of it",
    "preload": "unset LD_PRELOAD before torchrun",
    "devices": "give every host GPUs that torch can use, or set engine.device",
    "devices/unused": "install the torch that fits the driver (configs/environments), or set engine.device = cpu",
    "own_gpus": "make CUDA_VISIBLE_DEVICES list distinct GPUs for the ranks and torchruns of a host",
    "locations": "give every rank its own GPU with --nproc-per-node and CUDA_VISIBLE_DEVICES",
    "locations/placement": "change the mesh or parallel.rank_order, or how the ranks are spread over the hosts",
    "occupied": "end what is left over from earlier runs (nvidia-smi shows the processes, those of other containers only"
    " outside of them), or leave this GPU out of CUDA_VISIBLE_DEVICES",
    "balance": "free the fuller ones; nvidia-smi shows which processes hold their memory",
    "limits": "raise it before torchrun: ulimit -n 65536",
    "shared_memory": "start the container with --ipc=host or --shm-size=16g, or remove what earlier runs left there",
    "folders": "set it to a folder that this user may write, with room",
    "ports": "choose another engine.base_port, or end the processes that hold these ports",
    "inputs": "copy it to the same path on every host, or put it on a file system that all of them mount",
    "reached": "let the two hosts talk on all ports (engines, gloo and NCCL choose theirs), and see that the address is the"
    " second's on the network between them",
    "silent": "look at what this rank printed: it has died, it hangs in the driver, or its host was cut off",
    "all_reduced/gloo": "see that these hosts reach one another on all ports, over the interface of GLOO_SOCKET_IFNAME",
    "all_reduced/nccl": "run it again with NCCL_DEBUG=INFO; then with NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 or"
    " NCCL_IB_DISABLE=1 on every host to see which transport fails (InfiniBand needs ulimit -l unlimited)",
    "missing": "look at what torchrun printed on its host: the rank died at its start, or its host does not reach MASTER_ADDR",
}
WARNINGS = {
    "slow": "see that the fastest interface between these hosts is in use, and that nothing else uses it",
}
ORDER = {key: position for position, key in enumerate((*FAULTS, *WARNINGS))}
"""A key is the name of a check and, after a slash, which of its problems."""

Found = Iterator[tuple[str, Sequence[int], str]]
"""Key, ranks (none: everywhere), and what is wrong with them."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that will (fault) or may (warning) make a run fail. ranks: those it concerns; empty: all."""

    check: str
    fault: bool
    ranks: tuple[int, ...]
    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Facts and measurements of all ranks, by rank."""

    config: Config
    dims: ParallelDims
    facts: tuple[RankFacts, ...]
    links: tuple[RankLinks | None, ...]
    """None for a rank whose measurements did not come."""

    @cached_property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Host identity -> its ranks, in the order of first ranks."""
        return ranks_by({each.rank: each.host for each in self.facts})

    @cached_property
    def by_rank(self) -> list[tuple[RankFacts, RankLinks]]:
        """Facts and measurements of every rank; empty measurements where none came."""
        pairs = zip(self.facts, self.links, strict=True)
        return [(facts, links or RankLinks(rank=facts.rank)) for facts, links in pairs]

    @cached_property
    def by_host(self) -> list[tuple[RankFacts, RankLinks, tuple[int, ...]]]:
        """Those of each host's first rank, for what all of its ranks see, and its ranks."""
        return [(*self.by_rank[ranks[0]], ranks) for ranks in self.hosts.values()]

    @property
    def on_gpu(self) -> bool:
        return any(each.device == "cuda" for each in self.facts)


def problems_of(view: Examination) -> list[Problem]:
    """Return all problems, in the order of FAULTS and WARNINGS; equal ones of several ranks as one."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for key, ranks, what in (each for find in (_network, _software, _gpus, _host, _links) for each in find(view)):
        found[key, what].extend(ranks)
    ordered = sorted(found.items(), key=lambda item: ORDER[item[0][0]])
    return [_problem(key, ranks, what) for (key, what), ranks in ordered]


def missing(ranks: Sequence[int], world_size: int, seconds: float) -> Problem:
    """Return the only problem of a job whose ranks did not all come: nothing between them can be measured."""
    return _problem("missing", (), f"{ranks_in_words(ranks)} of {world_size} never came (waited {seconds:.0f} s)")


def _problem(key: str, ranks: Iterable[int], what: str) -> Problem:
    remedy, places = (FAULTS | WARNINGS)[key], tuple(sorted(set(ranks)))
    return Problem(check=key.partition("/")[0], fault=key in FAULTS, ranks=places, what=what, remedy=remedy)


def _network(view: Examination) -> Found:
    """Check that each host has a route to the master, and an address by which others reach it."""
    for ranks, values in differences({each.rank: each.config[:8] for each in view.facts}):
        yield "configs", ranks, f"the resolved config differs: {values}"
    # Boot id and network namespace: hosts that are emulated without namespaces share both.
    machines = [each.host.partition("/")[2] for each in view.facts]
    for facts, links, ranks in view.by_host:
        if facts.route is None:
            yield "routes", ranks, f"there is no route to MASTER_ADDR: {facts.master}"
        if links.address_error:
            yield "routes/interface", ranks, links.address_error
        if links.address and len(set(machines)) > 1 and ipaddress.ip_address(links.address.address).is_loopback:
            what = f"its address for {len(view.hosts) - 1} other hosts is {links.address.address}, which means itself on each"
            yield "routes/loopback", ranks, f"{what} of them ({links.address.why})"
    addresses = {facts.rank: links.address.address for facts, links in view.by_rank if links.address}
    for address, ranks in ranks_by(addresses).items():
        if not ipaddress.ip_address(address).is_loopback and len({machines[rank] for rank in ranks}) > 1:
            yield "routes/same", ranks, f"several hosts have the same address {address}"


def _software(view: Examination) -> Found:
    """Check that all ranks have what they need, run the same versions and have no variables that are traps."""
    for name in sorted({name for each in view.facts for name in each.versions}):
        for ranks, values in differences({each.rank: each.versions.get(name) for each in view.facts}):
            yield "versions", ranks, f"{name} differs: {values}"
    for name in sorted({name for each in view.facts for name in each.environment}.difference(PER_RANK, ONLY_LOGS)):
        for group in view.hosts.values() if name in PER_HOST else [range(len(view.facts))]:
            for ranks, values in differences({rank: view.facts[rank].environment.get(name) for rank in group}):
                yield "environment", ranks, f"{name} differs: {values}"
    for facts in view.facts:
        here, on_gpu = (facts.rank,), facts.device == "cuda"
        # Without torch_memory_saver, releasing an engine's memory frees nothing.
        for name in ("sglang", "transformers", *(["torch_memory_saver"] if on_gpu else [])):
            if facts.versions.get(name) == NOT_INSTALLED:
                yield "needed_packages", here, f"{name} is not installed in this rank's Python"
        setting = expandable_segments(facts.environment)
        if on_gpu and setting:
            why = "torch_memory_saver does not work with expandable segments, nor does CUDA IPC everywhere"
            yield "expandable_segments", here, f"{setting}: {why}"
        if on_gpu and "torch_memory_saver" in facts.preload:
            yield (
                "preload",
                here,
                f"LD_PRELOAD={facts.preload}: torch_memory_saver sets this variable, in the engine alone",
            )


def _gpus(view: Examination) -> Found:
    """Check that no two ranks share a GPU, and that the GPUs of an engine have about as much free memory."""
    for ranks, values in differences({each.rank: each.device for each in view.facts if not each.problem}):
        yield "devices", ranks, f"the ranks' devices differ: {values}"
    for uuid, ranks in ranks_by({each.rank: each.gpu.uuid for each in view.facts if each.gpu}).items():
        if len(ranks) > 1:
            yield "own_gpus", ranks, f"{ranks_in_words(ranks)} are all on GPU {uuid}"
    for dp in range(view.dims.dp):
        free = {rank: gpu.free for rank in view.dims.engine_ranks(dp) if (gpu := view.facts[rank].gpu)}
        if full := [rank for rank in free if free[rank] < BALANCE * max(free.values())]:
            what = f"engine {dp}: from {min(free.values()) / GIB:.1f} to {max(free.values()) / GIB:.1f} GiB are free on its GPUs"
            yield "balance", full, f"{what} (SGLang: The memory capacity is unbalanced)"
    for facts in view.facts:
        here, gpu = (facts.rank,), facts.gpu
        if facts.problem:
            yield "locations", here, facts.problem.rstrip(".")
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")
        unused = facts.device == "cpu" and facts.gpu_devices and not facts.problem and not hidden
        if unused and view.config.engine.device == "auto":
            yield "devices/unused", here, f"the host has {facts.gpu_devices} GPUs, but {facts.gpu_reason}"
        if gpu is None:
            continue
        if gpu.total - gpu.free > OCCUPIED_BYTES:
            yield "occupied", here, f"{(gpu.total - gpu.free) / GIB:.1f} GiB of this rank's GPU are in use already"
    if not any(each.problem for each in view.facts):
        try:
            place(view.dims, [each.location for each in view.facts if each.location], "cuda" if view.on_gpu else "cpu")
        except ValueError as error:
            yield "locations/placement", (), str(error)


def _host(view: Examination) -> Found:
    """Check the limits, memory, folders and ports of each host."""
    files = DESCRIPTORS + DESCRIPTORS_PER_RANK * len(view.facts)
    for facts, links in view.by_rank:
        here, ranks = (facts.rank,), view.hosts[facts.host]
        needed = SHARED_MEMORY_BYTES + SHARED_MEMORY_PER_RANK * len(ranks)
        if facts.shared_memory < needed:
            room = f"{facts.shared_memory // MIB} MiB can be written to /dev/shm"
            yield "shared_memory", ranks, f"{room}; {len(ranks)} ranks need {needed // MIB}"
        for name, free in facts.folders.items():
            if free < FOLDER_BYTES:
                yield "folders", here, f"{name}: {free // MIB} MiB can be written there"
        if 0 <= facts.open_files < files:
            allowed = f"{facts.open_files} open files are allowed (ulimit -n)"
            yield "limits", here, f"{allowed}; {len(view.facts)} ranks need {files} in each"
        if links.ports_error:
            yield "ports", here, links.ports_error
    for what in sorted({what for each in view.facts for what in each.absent}):
        absent = [each.rank for each in view.facts if what in each.absent]
        local = what.partition(" = ")[2].startswith(("/", ".", "~"))
        if local or len(absent) < len(view.facts):  # a hub id does not exist on any host
            yield "inputs", absent, f"{what} is not there"


def _links(view: Examination) -> Found:
    """Check that hosts reach one another's leased ports over TCP, and that no all-reduce failed or is slow."""
    for facts, links in view.by_rank:
        for reach in links.reaches:
            if reach.error:
                here, there = host_name(facts.host), host_name(view.facts[reach.to].host)
                what = f"{here} does not reach {there} at {reach.address} port {reach.port}: {reach.error}"
                yield "reached", (facts.rank,), what
        for each in links.collectives:
            if each.error:
                yield f"all_reduced/{each.backend}", (facts.rank,), f"{each.backend} all-reduce: {each.error}"
    if silent := [rank for rank, links in enumerate(view.links) if links is None]:
        yield "silent", silent, "nothing came back from the measurements between ranks"
    for backend, bandwidth in bandwidths(view).items():
        if bandwidth < SLOW_BANDWIDTH[backend]:
            yield "slow", (), f"{backend} all-reduce is slow: {bandwidth / 1e6:.1f} MB/s"


def bandwidths(view: Examination) -> dict[Backend, float]:
    """Return backend -> bandwidth of its all-reduce, on the rank where it took longest."""
    found: dict[Backend, float] = {}
    for _, links in view.by_rank:
        for each in links.collectives:
            if not each.error:
                found[each.backend] = min(each.bandwidth, found.get(each.backend, each.bandwidth))
    return found


def differences(values: Mapping[int, object]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the ranks that differ from most (at a tie, from the first), and all values in words, unless all agree."""
    groups = ranks_by(values)
    if len(groups) > 1:
        most = max(groups.values(), key=len)
        yield tuple(rank for ranks in groups.values() if ranks is not most for rank in ranks), values_in_words(values)
