"""Faults of hosts: address, interfaces, clocks, limits, memory, folders, and what is left of earlier runs."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harness.cluster.ports import PORTS_PER_ENGINE, planned_ports
from harness.tools.doctor.examination import GIB, MIB, Examination, Finding, differences, named_ranks, placements
from harness.tools.doctor.facts import RankFacts, is_loopback

SKEW_SECONDS = 1.0
"""Above this, whose failure came first cannot be read from the hosts' clocks."""
SHARED_MEMORY_BYTES, SHARED_MEMORY_PER_RANK = 64 * MIB, 128 * MIB
"""NCCL's buffers and an engine's queues; a container's default of 64 MiB is too little for any of them."""
MEMORY_PER_RANK = 2 * GIB
DESCRIPTORS, DESCRIPTORS_PER_RANK = 256, 8
"""Each rank's gloo and NCCL groups connect it to every other rank."""
PROCESSES_PER_RANK = 512
TEMP_BYTES = 64 * MIB


def routes(view: Examination) -> Iterator[Finding]:
    """Each host has a route to the master, and an address that the others can reach: none of loopback, none that another has."""
    machines: dict[str, set[str]] = {}
    for facts in view.first_on_host:
        links, ranks = view.links[facts.rank], view.on_host(facts)
        if facts.network.route is None:
            yield Finding(
                check="routes",
                fault=True,
                ranks=ranks,
                what=f"there is no route to MASTER_ADDR: {facts.network.problem}",
                remedy="give torchrun's --master-addr or --rdzv-endpoint a name or address that this host resolves and routes to",
            )
        elif links and links.address_error:
            yield Finding(
                check="routes",
                fault=True,
                ranks=ranks,
                what=links.address_error,
                remedy="set network.interface or GLOO_SOCKET_IFNAME to one that is there, or neither",
            )
        elif links and links.address:
            machines.setdefault(links.address.address, set()).add(facts.machine)
            if view.apart and is_loopback(links.address.address):
                yield Finding(
                    check="routes",
                    fault=True,
                    ranks=ranks,
                    what=f"its address for {len(view.hosts) - 1} other hosts is {links.address.address}, which is itself to"
                    f" each of them ({links.address.why})",
                    remedy="start torchrun with the master's address on the network (Debian's /etc/hosts has 127.0.1.1 for the"
                    " host's own name: give the address instead of the name), or set network.interface",
                )
    for address, found in machines.items():
        if len(found) > 1 and not is_loopback(address):
            ranks = tuple(each.rank for each in view.facts if view.address(each.rank) == address)
            yield Finding(
                check="routes",
                fault=True,
                ranks=ranks,
                what=f"{len(found)} hosts have the same address {address}",
                remedy="give each host an address of its own on the network between them, or set network.interface",
            )


def socket_interfaces(view: Examination) -> Iterator[Finding]:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name interfaces that are there, are up, and that other hosts are told of."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for facts in view.facts:
            value, links = facts.environment.get(variable), view.links[facts.rank]
            if not value or (links and links.address_error):
                continue
            told = links.address.interface if links and links.address else ""
            usable = [each.name for each in facts.network.interfaces if each.up and each.addresses]
            chosen = [name for name in usable if _names(variable, value, name)]
            if not chosen:
                yield Finding(
                    check="socket_interfaces",
                    fault=True,
                    ranks=(facts.rank,),
                    what=f"{variable}={value} names no interface that is up and has an address; there are"
                    f" {', '.join(usable) or 'none'}",
                    remedy=f"set it to {told or 'one of these'} on this host, or unset it",
                )
            elif told and told not in chosen and len(view.hosts) > 1:
                yield Finding(
                    check="socket_interfaces",
                    fault=False,
                    ranks=(facts.rank,),
                    what=f"{variable}={value}, but engines are told the address of {told}",
                    remedy=f"make sure that all hosts reach one another over {', '.join(chosen)}",
                )


def _names(variable: str, value: str, name: str) -> bool:
    """NCCL takes prefixes, exact names after =, and all others after ^; gloo takes exact names."""
    if variable != "NCCL_SOCKET_IFNAME":
        return name in value.split(",")
    exclude, words = value.startswith("^"), value.lstrip("^")
    exact, words = words.startswith("="), words.lstrip("=")
    matches = any(name == word or (not exact and name.startswith(word)) for word in words.split(","))
    return matches != exclude


def clocks(view: Examination) -> Iterator[Finding]:
    """Hosts' clocks agree: which failure came first is read from them."""
    for facts in view.first_on_host:
        links = view.links[facts.rank]
        if links is None or links.clock is None:
            continue
        ahead, by = links.clock.offset, abs(links.clock.offset)
        if by - links.clock.uncertainty > SKEW_SECONDS:
            yield Finding(
                check="clocks",
                fault=True,
                ranks=view.on_host(facts),
                what=f"this clock is {by:.1f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's"
                f" (measured to {links.clock.uncertainty * 1000:.0f} ms; {SKEW_SECONDS:g} s is too much)",
                remedy="set the hosts' clocks by NTP (chronyc makestep)",
            )


def shared_memory(view: Examination) -> Iterator[Finding]:
    """/dev/shm holds NCCL's buffers and the engines' queues."""
    for facts in view.first_on_host:
        ranks = view.on_host(facts)
        needed = SHARED_MEMORY_BYTES + SHARED_MEMORY_PER_RANK * len(ranks)
        if not facts.shared_memory.writable or facts.shared_memory.free < needed:
            free = f"{facts.shared_memory.free // MIB} of {facts.shared_memory.total // MIB} MiB free"
            yield Finding(
                check="shared_memory",
                fault=True,
                ranks=ranks,
                what=f"/dev/shm has {free if facts.shared_memory.writable else 'no room: it cannot be written'};"
                f" {len(ranks)} ranks need {needed // MIB} MiB",
                remedy="start the container with --ipc=host or --shm-size=16g, or remove what earlier runs left there",
            )


def temp_folder(view: Examination) -> Iterator[Finding]:
    """Ranks and schedulers of a host find each other through one temp folder, which must be theirs together and writable."""
    for facts in view.first_on_host:
        ranks = view.on_host(facts)
        different = differences({rank: view.facts[rank].temp.path for rank in ranks})
        if different and len({view.facts[rank].temp.identity for rank in ranks}) > 1:
            yield Finding(
                check="temp_folder",
                fault=True,
                ranks=different[1],
                what=f"ranks of one host have different temp folders, so that a scheduler does not find its rank: {different[0]}",
                remedy="give all ranks of a host one TMPDIR",
            )
        for rank in ranks:
            temp = view.facts[rank].temp
            if not temp.writable or temp.free < TEMP_BYTES:
                yield Finding(
                    check="temp_folder",
                    fault=True,
                    ranks=(rank,),
                    what=f"{temp.path} cannot be written" if not temp.writable else f"{temp.path} is full",
                    remedy="set TMPDIR to a local folder with room",
                )


def limits(view: Examination) -> Iterator[Finding]:
    """Open files for every connection, processes for every engine, and memory that RDMA can pin."""
    files = DESCRIPTORS + DESCRIPTORS_PER_RANK * len(view.facts)
    for facts in view.facts:
        nofile, nproc = facts.limits["nofile"], facts.limits["nproc"]
        if 0 <= nofile[0] < files:
            yield Finding(
                check="limits",
                fault=True,
                ranks=(facts.rank,),
                what=f"{nofile[0]} open files are allowed (ulimit -n); {len(view.facts)} ranks need {files} in each",
                remedy=f"raise it before torchrun: ulimit -n {max(files, 65536)} (the hard limit is {_limit(nofile[1])})",
            )
        needed = PROCESSES_PER_RANK * len(view.on_host(facts))
        if 0 <= nproc[0] < needed:
            yield Finding(
                check="limits",
                fault=False,
                ranks=(facts.rank,),
                what=f"{nproc[0]} processes and threads are allowed (ulimit -u); engines may want {needed}",
                remedy=f"raise it before torchrun: ulimit -u {needed}",
            )
        memlock = facts.limits["memlock"][0]
        if facts.infiniband and len(view.hosts) > 1 and facts.device == "cuda" and memlock >= 0:
            yield Finding(
                check="limits",
                fault=True,
                ranks=(facts.rank,),
                what=f"only {memlock // 1024} KiB can be locked (ulimit -l), and NCCL over InfiniBand locks its buffers",
                remedy="raise it to unlimited before torchrun (in a container: --ulimit memlock=-1)",
            )


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def host_memory(view: Examination) -> Iterator[Finding]:
    """Models are made and loaded in host memory."""
    for facts in view.first_on_host:
        ranks, available = view.on_host(facts), facts.memory[1]
        if available < MEMORY_PER_RANK * len(ranks):
            yield Finding(
                check="host_memory",
                fault=False,
                ranks=ranks,
                what=f"{available / GIB:.1f} GiB of host memory are free for {len(ranks)} ranks and their engines",
                remedy="end what else runs on the host, or start fewer ranks on it",
            )


def ports(view: Examination) -> Iterator[Finding]:
    """Each engine's block of ports is where the config puts it: whoever holds those may be an engine that was left behind."""
    for ranks in view.hosts.values():
        held = {rank: links for rank in ranks if (links := view.links[rank]) is not None}
        for rank, links in held.items():
            if links.ports_error:
                yield Finding(
                    check="ports",
                    fault=True,
                    ranks=(rank,),
                    what=links.ports_error,
                    remedy="choose another engine.base_port, or end the processes that hold these ports",
                )
        leased = sorted(links.ports for links in held.values() if links.ports is not None)
        planned = [planned_ports(view.config.engine.base_port, index).port for index in range(len(leased))]
        if moved := [port for port in leased if port not in planned]:
            yield Finding(
                check="ports",
                fault=False,
                ranks=tuple(rank for rank, links in held.items() if links.ports in moved),
                what=f"ports from {planned[0]} on are taken; engines would lease the {PORTS_PER_ENGINE} from"
                f" {', '.join(map(str, moved))} on",
                remedy="no harm by itself, but look whether an engine was left behind (ss -ltnp)",
            )


def leftovers(view: Examination) -> Iterator[Finding]:
    """sglang:: processes that were here before the run: ended runs leave them behind, with their memory and ports."""
    for facts in view.facts:
        if facts.engines:
            told = ", ".join(f"{each.name} (pid {each.pid})" for each in facts.engines[:4])
            more = f" and {len(facts.engines) - 4} more" if len(facts.engines) > 4 else ""
            yield Finding(
                check="leftovers",
                fault=False,
                ranks=view.on_host(facts),
                what=f"engines already run on this host: {told}{more}",
                remedy="end them by their pids, unless they are another run's",
            )


def folders(view: Examination) -> Iterator[Finding]:
    """The run's folder can be written, and all hosts see it where checkpoints cross hosts."""
    config = view.config
    crosses = config.weights.transport == "disk" or config.weights.verify == "full"
    key = "weights.folder" if crosses and config.weights.folder else "run.dir"
    for facts in view.first_on_host:
        links = view.links[facts.rank]
        if links is None:
            continue
        if links.folder_error:
            yield Finding(
                check="folders",
                fault=True,
                ranks=view.on_host(facts),
                what=f"{key} cannot be written: {links.folder_error}",
                remedy=f"set {key} to a folder that this user may write",
            )
        elif links.sees_folder is False:
            told = "where checkpoints cross hosts" if crosses else "so its events and logs stay on this host"
            yield Finding(
                check="folders",
                fault=crosses,
                ranks=view.on_host(facts),
                what=f"rank 0's {key} is not seen here, {told}",
                remedy=f"set {key} to a folder on a file system that all hosts mount at one path",
            )


def inputs(view: Examination) -> Iterator[Finding]:
    """Model and task are on every host, or on none (a hub id)."""
    for position, entry in enumerate(view.facts[0].inputs):
        absent = tuple(each.rank for each in view.facts if not each.inputs[position].exists)
        local = Path(entry.path).is_absolute() or entry.path.startswith((".", "~"))
        if absent and (local or len(absent) < len(view.facts)):
            yield Finding(
                check="inputs",
                fault=True,
                ranks=absent,
                what=f"{entry.key} = {entry.path} is not there",
                remedy="copy it to the same path on every host, or put it on a file system that all of them mount",
            )


def configs(view: Examination) -> Iterator[Finding]:
    """All ranks read one config; which host has which is said by digest."""
    if different := differences({each.rank: each.config[:8] for each in view.facts}):
        yield Finding(
            check="configs",
            fault=True,
            ranks=different[1],
            what=f"the resolved config differs: {different[0]}",
            remedy="start every host with the same files and overrides",
        )


def locations(view: Examination) -> Iterator[Finding]:
    """Ranks and GPUs lie so that SGLang can place an engine on them."""
    problems = [each for each in view.facts if each.problem]
    for facts in problems:
        yield _unseated(facts)
    error = placements(view.dims, [each.location for each in view.facts], view.on_gpu)[1]
    if error and not problems:
        what, _, remedy = error.rpartition(": ")
        yield Finding(check="locations", fault=True, ranks=(), what=what or error, remedy=remedy)


def _unseated(facts: RankFacts) -> Finding:
    return Finding(
        check="locations",
        fault=True,
        ranks=(facts.rank,),
        what=facts.problem.rstrip("."),
        remedy="give every rank a GPU of its own with --nproc-per-node and CUDA_VISIBLE_DEVICES",
    )


def host_ids(view: Examination) -> Iterator[Finding]:
    """NCCL takes ranks with one NCCL_HOSTID for one host, and tries shared memory and peer-to-peer between them."""
    values = {facts.host: facts.environment.get("NCCL_HOSTID") for facts in view.first_on_host}
    for value, count in Counter(each for each in values.values() if each).items():
        if count > 1:
            ranks = tuple(each.rank for each in view.facts if values[each.host] == value)
            yield Finding(
                check="host_ids",
                fault=True,
                ranks=ranks,
                what=f"NCCL_HOSTID={value} is the same on {count} hosts, which NCCL then takes for one",
                remedy=f"unset it, or give each host its own ({named_ranks(ranks)} share it)",
            )
