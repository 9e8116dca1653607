"""All checks of a job: pure functions of what was examined.

FAULTS and WARNINGS list every problem that is looked for, with its remedy, in the order in which problems are printed:
causes before consequences, because a reader mends the first and runs again. The functions below them find the problems.
"""

import hashlib
import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EnginePlacement, RankLocation, host_name, place
from harness.cluster.ports import PORTS_PER_ENGINE, planned_ports
from harness.cluster.world import BEHAVIOUR_PREFIXES
from harness.config.schema import Config
from harness.runtime.units import GIB, MIB
from harness.tools.doctor.facts import NOT_INSTALLED, RankFacts
from harness.tools.doctor.links import Collective, RankLinks

T = TypeVar("T")

SKEW_SECONDS = 1.0
"""Above this, hosts' clocks do not tell which failure came first."""
SHARED_MEMORY_BYTES, SHARED_MEMORY_PER_RANK = 64 * MIB, 128 * MIB
"""NCCL's buffers and an engine's queues; a container's default of 64 MiB is too little for either."""
MEMORY_PER_RANK = 2 * GIB
DESCRIPTORS, DESCRIPTORS_PER_RANK = 256, 8
"""Each rank's gloo and NCCL groups connect it to every other rank."""
PROCESSES_PER_RANK = 512
TEMP_BYTES = 64 * MIB
BALANCE = 0.9
"""SGLang refuses an engine whose fullest GPU has less than this share of the emptiest one's free memory."""
OCCUPIED_BYTES = GIB
UNSEEN_BYTES = 2 * GIB
"""GPU memory used by no visible process: more than a driver takes. A container often hides others' processes."""
SLOW_LATENCY = 0.02
SLOW_BANDWIDTH = {"gloo": 10e6, "nccl": 100e6}
"""Bytes a second of a group's all-reduce, below which a run is not worth starting."""
SLOW_SHARE = 0.4
"""A group with less than this share of its kind's median bandwidth has a link that is worse than the others'."""
PER_RANK = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Placement handles the first; torchrun sets the second, and an engine never inherits it."""
PER_HOST = (
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX",
    "NCCL_TOPO_FILE", "UCX_NET_DEVICES", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that may differ between hosts, but not between ranks of one."""
ONLY_LOGS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS")
LONGEST = 120
"""Characters of a value that are shown."""
OLD_BALANCE = ("SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK")


FAULTS = {
    "configs": "start every host with the same files and overrides",
    "routes": "give torchrun's --master-addr or --rdzv-endpoint a name or address that this host resolves and routes to",
    "routes/interface": "set network.interface or GLOO_SOCKET_IFNAME to an existing interface, or neither",
    "routes/loopback": "start torchrun with the master's address on the network (Debian's /etc/hosts has 127.0.1.1 for the"
    " host's own name: give the address instead of the name), or set network.interface",
    "routes/same": "give each host an address of its own on the network between them, or set network.interface",
    "socket_interfaces": "set it to one of these on this host, or unset it",
    "host_ids": "unset it, or give each host its own",
    "clocks": "set the hosts' clocks by NTP (chronyc makestep)",
    "needed_packages": "install the environment of configs/environments that fits this CUDA, on every host",
    "versions": "install one environment on all hosts (configs/environments), and start torchrun from it",
    "environment": "export one value on every host before torchrun, or unset it everywhere",
    "expandable_segments": "take expandable_segments out of it",
    "preload": "unset LD_PRELOAD before torchrun",
    "devices": "give every host GPUs that torch can use, or set engine.device",
    "devices/unused": "install the torch that fits the driver (configs/environments), or set engine.device = cpu",
    "own_gpus": "make CUDA_VISIBLE_DEVICES list distinct GPUs for the ranks and torchruns of a host",
    "locations": "give every rank a GPU of its own with --nproc-per-node and CUDA_VISIBLE_DEVICES",
    "locations/placement": "",  # the error ends in its remedy
    "occupied": "end it by its pid if it is a leftover, or leave this GPU out of CUDA_VISIBLE_DEVICES",
    "occupied/unseen": "look with nvidia-smi outside the container, and end what is left over there",
    "balance": "free the fuller ones; nvidia-smi shows which processes hold their memory",
    "limits/files": "raise it before torchrun: ulimit -n 65536",
    "limits/locked": "raise it to unlimited before torchrun (in a container: --ulimit memlock=-1)",
    "shared_memory": "start the container with --ipc=host or --shm-size=16g, or remove what earlier runs left there",
    "temp_folder": "give all ranks of a host one TMPDIR",
    "temp_folder/room": "set TMPDIR to a local folder with room",
    "ports": "choose another engine.base_port, or end the processes that hold these ports",
    "folders": "set it to a folder that this user may write",
    "folders/unseen": "set it to a folder on a file system that all hosts mount at one path",
    "inputs": "copy it to the same path on every host, or put it on a file system that all of them mount",
    "reached": "let the two hosts talk on all ports (engines, gloo and NCCL choose theirs), and see that the address is the"
    " second's on the network between them",
    "silent": "look at what this rank printed; it died, hangs in the driver, or its host was cut off meanwhile",
    "all_reduced/gloo": "see that these hosts reach one another on all ports, over the interface of GLOO_SOCKET_IFNAME",
    "all_reduced/nccl": "run it again with NCCL_DEBUG=INFO; then with NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 or"
    " NCCL_IB_DISABLE=1 on every host to see which transport fails",
    "ipc": "in a container, allow it (--ipc=host, --cap-add=SYS_PTRACE); no expandable segments; or use"
    " weights.transport = disk",
    "ipc/gpu": "write CUDA_VISIBLE_DEVICES with UUIDs, the same way for all ranks of the host",
    "missing": "look at what torchrun printed on its host: the rank died at its start, or its host does not reach MASTER_ADDR",
}
WARNINGS = {
    "socket_interfaces/other": "make sure that all hosts reach one another over the chosen ones",
    "environment/other": FAULTS["environment"],
    "preload/other": FAULTS["preload"],
    "renamed_variables": "unset it: the harness sets what the installed sglang reads",
    "models": "use hosts of one kind, or size mem_fraction_static for the smallest",
    "nvlink/unknown": "install nvidia-ml-py, which SGLang depends on",
    "nvlink": "choose GPUs that NVLink connects (nvidia-smi topo -m), or expect slow collectives",
    "limits/processes": "raise it before torchrun with ulimit -u",
    "host_memory": "end what else runs on the host, or start fewer ranks on it",
    "ports/moved": "this alone is harmless, but look whether an engine was left behind (ss -ltnp)",
    "leftovers": "end them by their pids, unless they are another run's",
    "folders/logs": FAULTS["folders/unseen"],
    "slow": "see that the fastest interface between these hosts is in use, and that nothing else uses it",
}
ORDER = {key: position for position, key in enumerate((*FAULTS, *WARNINGS))}
"""A key is the name of a check and, after a slash, which of its problems."""

Found = Iterator[tuple[str, Sequence[int], str]]
"""Key, ranks (none: everywhere), and what is wrong with them."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that will (fault) or may (warning) make a run fail. ranks: where; empty: everywhere."""

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
        return ranks_by(each.host for each in self.facts)

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
    return [problem(key, ranks, what) for (key, what), ranks in ordered]


def problem(key: str, ranks: Iterable[int], what: str) -> Problem:
    """Return the problem of this key."""
    remedy = (FAULTS | WARNINGS)[key]
    if not remedy and ": " in what:
        what, _, remedy = what.rpartition(": ")
    check = key.partition("/")[0]
    return Problem(check=check, fault=key in FAULTS, ranks=tuple(sorted(set(ranks))), what=what, remedy=remedy)


def missing(ranks: Sequence[int], world_size: int, seconds: float) -> Problem:
    """Return the one problem of a job whose ranks did not all come, so that nothing between them can be measured."""
    names = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return problem("missing", (), f"rank {names} of {world_size} never came (waited {seconds:.0f} s)")


def _network(view: Examination) -> Found:
    """Check that each host has a route to the master, and an address and interfaces by which others reach it."""
    for ranks, values in differences({each.rank: each.config[:8] for each in view.facts}):
        yield "configs", ranks, f"the resolved config differs: {values}"
    apart = len({each.machine for each in view.facts}) > 1  # emulated hosts may share kernel and network
    addresses: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    ids: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for facts, links, ranks in view.by_host:
        if facts.network.route is None:
            yield "routes", ranks, f"there is no route to MASTER_ADDR: {facts.network.problem}"
        if links.address_error:
            yield "routes/interface", ranks, links.address_error
        if links.address and not _is_loopback(links.address.address):
            addresses[links.address.address][facts.machine] += ranks
        elif links.address and apart:
            what = f"its address for {len(view.hosts) - 1} other hosts is {links.address.address}, which means itself on each"
            yield "routes/loopback", ranks, f"{what} of them ({links.address.why})"
        if links.clock and abs(links.clock.offset) - links.clock.uncertainty > SKEW_SECONDS:
            how = f"{abs(links.clock.offset):.1f} s {'ahead of' if links.clock.offset > 0 else 'behind'} rank 0's"
            error = f"measured to {links.clock.uncertainty * 1000:.0f} ms; {SKEW_SECONDS:g} s is too much"
            yield "clocks", ranks, f"this clock is {how} ({error})"
        ids[facts.environment.get("NCCL_HOSTID", "")].append(ranks)
    for address, machines in addresses.items():
        if len(machines) > 1:
            what = f"{len(machines)} hosts have the same address {address}"
            yield "routes/same", [*chain.from_iterable(machines.values())], what
    for host_id, hosts in ids.items():
        if host_id and len(hosts) > 1:
            what = f"NCCL_HOSTID={host_id} is the same on {len(hosts)} hosts, which NCCL then takes for one"
            yield "host_ids", [*chain.from_iterable(hosts)], what
    for (facts, links), variable in product(view.by_rank, ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")):
        value = facts.environment.get(variable)
        usable = [each.name for each in facts.network.interfaces if each.up and each.addresses]
        chosen = [name for name in usable if value and _names(variable, value, name)]
        agreed = links.address.interface if links.address else ""
        if value and not chosen and not links.address_error:
            what = f"{variable}={value} names no interface that is up and has an address; there are"
            yield "socket_interfaces", (facts.rank,), f"{what} {', '.join(usable) or 'none'}"
        elif value and agreed and agreed not in chosen and len(view.hosts) > 1:
            what = f"{variable}={value} chooses {', '.join(chosen)}, but engines get the address of {agreed}"
            yield "socket_interfaces/other", (facts.rank,), what


def _names(variable: str, value: str, name: str) -> bool:
    """Return whether the variable names an interface. NCCL: prefixes, exact names after =, all others after ^; gloo: exact."""
    if variable != "NCCL_SOCKET_IFNAME":
        return name in value.split(",")
    exclude, words = value.startswith("^"), value.lstrip("^")
    exact, words = words.startswith("="), words.lstrip("=")
    matches = any(name == word or (not exact and name.startswith(word)) for word in words.split(","))
    return matches != exclude


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _software(view: Examination) -> Found:
    """Check that all ranks have what they need, run the same versions and have no variables that are traps."""
    for name in sorted({name for each in view.facts for name in each.versions}):
        for ranks, values in differences({each.rank: each.versions.get(name) for each in view.facts}):
            yield "versions", ranks, f"{name} differs: {values}"
    for name in sorted({name for each in view.facts for name in each.environment} - set(PER_RANK)):
        changes_behaviour = name.startswith(BEHAVIOUR_PREFIXES) and name not in ONLY_LOGS
        for group in view.hosts.values() if name in PER_HOST else [range(len(view.facts))]:
            for ranks, values in differences({rank: _value(view.facts[rank], name) for rank in group}):
                yield "environment" if changes_behaviour else "environment/other", ranks, f"{name} differs: {values}"
    for facts in view.facts:
        here, on_gpu = (facts.rank,), facts.device == "cuda"
        # Without torch_memory_saver, releasing an engine's memory frees nothing.
        for name in ("sglang", "transformers", *(["torch_memory_saver"] if on_gpu else [])):
            if facts.versions.get(name) == NOT_INSTALLED:
                yield "needed_packages", here, f"{name} is not installed in this rank's Python"
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            value = facts.environment.get(name, "")
            if on_gpu and "expandable_segments:true" in value.lower().replace(" ", ""):
                why = "torch_memory_saver does not work with expandable segments, nor does CUDA IPC everywhere"
                yield "expandable_segments", here, f"{name}={value}: {why}"
        preload = facts.environment.get("LD_PRELOAD", "")
        if on_gpu and "torch_memory_saver" in preload:
            yield "preload", here, f"LD_PRELOAD={preload}: the trainer would run under torch_memory_saver too"
        elif on_gpu and preload:
            why = "torch_memory_saver sets this variable of the engine, and fails beside anything else"
            yield "preload/other", here, f"LD_PRELOAD={preload}: {why} (TorchMemorySaver observes invalid LD_PRELOAD)"
        for name in OLD_BALANCE:
            if name in facts.environment:
                yield "renamed_variables", here, f"{name} is set, which sglang 0.5.7 to 0.5.17 read as the opposite"


def _value(facts: RankFacts, name: str) -> str | None:
    value = facts.environment.get(name)
    if value is None or len(value) <= LONGEST:
        return value
    return f"{value[:LONGEST]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:8]})"


def _gpus(view: Examination) -> Found:
    """Check that each rank has a GPU, alone, that an engine's are alike, and that the engine can open a rank's memory."""
    for ranks, values in differences({each.rank: each.device for each in view.facts if not each.problem}):
        yield "devices", ranks, f"the ranks' devices differ: {values}"
    for ranks, values in differences({each.rank: each.gpu.name for each in view.facts if each.gpu}):
        yield "models", ranks, f"the GPUs are of several kinds: {values}"
    by_uuid = ranks_by(each.gpu and each.gpu.uuid for each in view.facts)
    for uuid, ranks in by_uuid.items():
        if uuid and len(ranks) > 1:
            yield "own_gpus", ranks, f"{ranks_in_words(ranks)} are all on GPU {uuid}"
    for dp in range(view.dims.dp):
        free = {rank: gpu.free for rank in view.dims.engine_ranks(dp) if (gpu := view.facts[rank].gpu)}
        if full := [rank for rank in free if free[rank] < BALANCE * max(free.values())]:
            what = f"engine {dp}: from {min(free.values()) / GIB:.1f} to {max(free.values()) / GIB:.1f} GiB are free on its GPUs"
            yield "balance", full, f"{what} (SGLang: The memory capacity is unbalanced)"
    own = {(each.host, each.pid) for each in view.facts}
    for facts, links in view.by_rank:
        here, gpu = (facts.rank,), facts.gpu
        if facts.problem:
            yield "locations", here, facts.problem.rstrip(".")
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")
        unused = facts.device == "cpu" and facts.gpu_devices and not facts.problem and not hidden
        if unused and view.config.engine.device == "auto":
            yield "devices/unused", here, f"the host has {facts.gpu_devices} GPUs, but {facts.gpu_reason}"
        if gpu is None:
            continue
        for each in gpu.processes:
            heavy = each.used >= OCCUPIED_BYTES or each.name.startswith("sglang::")
            if heavy and (facts.host, each.pid) not in own:
                what = f"process {each.pid} ({each.name}) holds {each.used / GIB:.1f} GiB of this rank's GPU"
                yield "occupied", here, what
        unseen = gpu.total - gpu.free - sum(each.used for each in gpu.processes)
        if unseen > UNSEEN_BYTES:
            what = f"{unseen / GIB:.1f} GiB of this rank's GPU are used by processes that cannot be seen from here"
            yield "occupied/unseen", here, what
        if gpu.nvlink is None:
            yield "nvlink/unknown", here, f"NVLink between this GPU and others is not known, read by {gpu.told_by}"
        engine = view.dims.engine_ranks(view.dims.coordinates(facts.rank).dp)
        unlinked = [rank for uuid, linked in (gpu.nvlink or {}).items() if not linked for rank in by_uuid.get(uuid, ())]
        if apart := [rank for rank in unlinked if rank in engine]:
            what = "there is no NVLink between GPUs of one engine on one host: its all-reduces take PCIe"
            yield "nvlink", (facts.rank, *apart), what
        ipc = links.ipc
        if ipc and ipc.error:
            child = f"a child with CUDA_VISIBLE_DEVICES={ipc.visible}"
            yield "ipc", here, f"{child} cannot open this rank's memory: {ipc.error}"
        elif ipc and ipc.uuid != gpu.uuid:
            what = f"the engine's process would be on GPU {ipc.uuid}, its trainer on {gpu.uuid}"
            yield "ipc/gpu", here, f"{what} (CUDA_VISIBLE_DEVICES={ipc.visible})"
    error = placements(view.dims, [each.location for each in view.facts], view.on_gpu)[1]
    if error and not any(each.problem for each in view.facts):
        yield "locations/placement", (), error


def _host(view: Examination) -> Found:
    """Check limits, memory, folders and ports of each host, and what earlier runs left there."""
    crosses = view.config.weights.transport == "disk" or view.config.weights.verify == "full"
    key = "weights.folder" if crosses and view.config.weights.folder else "run.dir"
    for facts, links, ranks in view.by_host:
        needed, room = SHARED_MEMORY_BYTES + SHARED_MEMORY_PER_RANK * len(ranks), facts.shared_memory
        if not room.writable or room.free < needed:
            free = f"{room.free // MIB} of {room.total // MIB} MiB free" if room.writable else "no room (not writable)"
            yield "shared_memory", ranks, f"/dev/shm has {free}; {len(ranks)} ranks need {needed // MIB} MiB"
        if len({view.facts[rank].temp.identity for rank in ranks}) > 1:
            for odd, values in differences({rank: view.facts[rank].temp.path for rank in ranks}):
                what = "ranks of one host have different temp folders, so that a scheduler does not find its rank"
                yield "temp_folder", odd, f"{what}: {values}"
        if (free_memory := facts.memory[1]) < MEMORY_PER_RANK * len(ranks):
            what = f"{free_memory / GIB:.1f} GiB of host memory are free for {len(ranks)} ranks and their engines"
            yield "host_memory", ranks, what
        leased = {rank: ports for rank in ranks if (ports := view.by_rank[rank][1].ports) is not None}
        planned = [planned_ports(view.config.engine.base_port, index).port for index in range(len(leased))]
        if moved := {rank: port for rank, port in leased.items() if port not in planned}:
            lease = f"engines would lease the {PORTS_PER_ENGINE} from {', '.join(map(str, sorted(moved.values())))} on"
            yield "ports/moved", tuple(moved), f"ports from {planned[0]} on are taken; {lease}"
        if links.folder_error:
            yield "folders", ranks, f"{key} cannot be written: {links.folder_error}"
        elif links.sees_folder is False:
            why = "where checkpoints cross hosts" if crosses else "so its events and logs stay on this host"
            yield "folders/unseen" if crosses else "folders/logs", ranks, f"rank 0's {key} is not seen here, {why}"
    files = DESCRIPTORS + DESCRIPTORS_PER_RANK * len(view.facts)
    for facts, links in view.by_rank:
        here, ranks = (facts.rank,), view.hosts[facts.host]
        if not facts.temp.writable or facts.temp.free < TEMP_BYTES:
            why = "is full" if facts.temp.writable else "cannot be written"
            yield "temp_folder/room", here, f"{facts.temp.path} {why}"
        soft, hard = facts.limits["nofile"]
        if 0 <= soft < files:
            limit = f"ulimit -n, hard limit {'unlimited' if hard < 0 else hard}"
            what = f"{soft} open files are allowed ({limit}); {len(view.facts)} ranks need {files} in each"
            yield "limits/files", here, what
        allowed, needed = facts.limits["nproc"][0], PROCESSES_PER_RANK * len(ranks)
        if 0 <= allowed < needed:
            what = f"{allowed} processes and threads are allowed (ulimit -u); engines may want {needed}"
            yield "limits/processes", here, what
        locked = facts.limits["memlock"][0]
        if facts.infiniband and len(view.hosts) > 1 and facts.device == "cuda" and locked >= 0:
            what = f"only {locked // 1024} KiB can be locked (ulimit -l), and NCCL over InfiniBand locks its buffers"
            yield "limits/locked", here, what
        if links.ports_error:
            yield "ports", here, links.ports_error
        if facts.engines:
            names = ", ".join(f"{each.name} (pid {each.pid})" for each in facts.engines[:4])
            more = f" and {len(facts.engines) - 4} more" if len(facts.engines) > 4 else ""
            yield "leftovers", ranks, f"engines already run on this host: {names}{more}"
    for position, entry in enumerate(view.facts[0].inputs):
        absent = [each.rank for each in view.facts if not each.inputs[position].exists]
        local = Path(entry.path).is_absolute() or entry.path.startswith((".", "~"))
        if absent and (local or len(absent) < len(view.facts)):  # a hub id is on no host
            yield "inputs", absent, f"{entry.key} = {entry.path} is not there"


def _links(view: Examination) -> Found:
    """Check that hosts reach one another's leased ports over TCP, and that no group's all-reduce failed or is slow."""
    labels = host_labels(view)
    unreached: dict[tuple[str, str, str, str], list[tuple[int, int]]] = defaultdict(list)
    failed: dict[tuple[str, str, tuple[int, ...]], dict[int, str]] = defaultdict(dict)
    for facts, links in view.by_rank:
        for reach in links.reaches:
            if reach.error:
                there = labels[view.facts[reach.to].host]
                unreached[labels[facts.host], there, reach.address, reach.error].append((facts.rank, reach.port))
        for each in links.collectives:
            if each.error:
                failed[each.backend, each.group, each.ranks][facts.rank] = each.error
    for (here, there, address, error), tried in unreached.items():
        ports = ", ".join(map(str, sorted({port for _, port in tried})))
        what = f"{here} does not reach {there} at {address} port {ports}: {error}"
        yield "reached", [rank for rank, _ in tried], what
    if silent := [rank for rank, links in enumerate(view.links) if links is None]:
        yield "silent", silent, "nothing came back from the measurements between ranks"
    for (backend, kind, ranks), errors in failed.items():
        error = min(errors.values(), key=lambda text: text.startswith("not tried"))
        what = f"{backend} all-reduce of {kind} ({ranks_in_words(ranks)}): {error}"
        yield f"all_reduced/{backend}", tuple(errors), what
    for (backend, kind), groups in speeds(view).items():
        usual = median(each.bandwidth for each in groups)
        for each in groups:
            slow = f"{backend} all-reduce of {kind} is slow"
            if each.latency > SLOW_LATENCY or each.bandwidth < SLOW_BANDWIDTH[backend]:
                how = f"{each.latency * 1000:.1f} ms for 8 bytes, {each.bandwidth / 1e6:.1f} MB/s"
                yield "slow", each.ranks, f"{slow}: {how}"
            elif each.bandwidth < SLOW_SHARE * usual:
                how = f"{each.bandwidth / 1e9:.2f} GB/s, where {usual / 1e9:.2f} is usual for {kind} groups"
                yield "slow", each.ranks, f"{slow}: {how}"


def speeds(view: Examination) -> dict[tuple[str, str], list[Collective]]:
    """Return by (backend, kind) one measurement a group, its slowest rank's; failed ones are left out."""
    found: dict[tuple[str, str], dict[tuple[int, ...], Collective]] = defaultdict(dict)
    for _, links in view.by_rank:
        for each in links.collectives:
            groups = found[each.backend, each.group]
            if not each.error and (each.ranks not in groups or each.bandwidth < groups[each.ranks].bandwidth):
                groups[each.ranks] = each
    return {kind: list(groups.values()) for kind, groups in found.items() if groups}


def ranks_by(values: Iterable[T]) -> dict[T, tuple[int, ...]]:
    """Return the ranks that have each value, given every rank's, in the order of first ranks."""
    found: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return {value: tuple(ranks) for value, ranks in found.items()}


def placements(
    dims: ParallelDims, locations: Sequence[RankLocation | None], on_gpu: bool
) -> tuple[tuple[EnginePlacement, ...], str]:
    """Return where engines go, or nothing and why."""
    known = [location for location in locations if location is not None]
    if len(known) < len(locations):
        return (), "a rank has no GPU that it can use"
    try:
        return place(dims, known, "cuda" if on_gpu else "cpu"), ""
    except ValueError as error:
        return (), str(error)


def rank_spans(ranks: Iterable[int]) -> str:
    """Return "0-3, 8" for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-3, 8"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_spans(ranks)}"


def host_labels(view: Examination) -> dict[str, str]:
    """Return each host identity's hostname, numbered where several hosts share one."""
    names = {host: host_name(host) for host in view.hosts}
    count, seen = Counter(names.values()), Counter[str]()
    labels = {}
    for host, name in names.items():
        labels[host] = f"{name}#{seen[name]}" if count[name] > 1 else name
        seen[name] += 1
    return labels


def differences(values: Mapping[int, object]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the ranks that differ from most (at a tie, from the first), and all values in words, unless all agree."""
    groups: dict[object, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if len(groups) > 1:
        most = max(groups.values(), key=len)
        words = "; ".join(f"{_shown(value)} on {ranks_in_words(ranks)}" for value, ranks in groups.items())
        yield tuple(rank for ranks in groups.values() if ranks is not most for rank in ranks), words


def _shown(value: object) -> str:
    return "unset" if value is None else '""' if value == "" else str(value)
