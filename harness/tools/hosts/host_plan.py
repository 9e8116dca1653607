"""What launch/hosts.py will do, decided before anything starts: names, addresses, GPUs, variables, command lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.hosts.host_faults import HostFault, LinkConditions, host_fault, quantity, skew
from harness.tools.hosts.phase_gate import PHASE_SOCKET

MASTER_PORT = 29500
RANGES = {
    "hosts": (1, 250),
    "gpus-per-host": (0, 64),
    "ranks-per-host": (0, 1024),
    "interfaces": (1, 8),
    "mtu": (1280, 65535),  # the least that IPv6 allows, and the most that a packet's length field does
    "patience": (0, 86400),
}
"""Option -> least and largest value."""


@dataclass(kw_only=True)
class HostsOptions:
    """Emulated hosts on this machine; after -- the script and its arguments, which torchrun runs in each."""

    hosts: int = 2
    """How many; they are called host0, host1, ..."""
    gpus_per_host: int = 0
    """GPUs that each host sees; 0 hides them all."""
    ranks_per_host: int = 0
    """torchrun's --nproc-per-node; 0 means one for each GPU of the host with fewest, or one if there are none."""
    cuda_visible_devices: tuple[str, ...] = ()
    """Given once for each host, such as 0,1 and then 3,2; else the visible GPUs are split in order."""
    isolation: Literal["namespaces", "processes", "auto"] = "auto"
    """namespaces: own network, hostname, boot id, /proc and /dev/shm, which takes root. processes: loopback only. auto: what this machine allows."""
    network: Literal["ipv4", "ipv6", "both"] = "ipv4"
    """Which addresses the hosts have."""
    rendezvous: Literal["c10d", "static"] = "c10d"
    """How torchrun's agents meet: --rdzv-backend=c10d, or --node-rank and --master-addr."""
    master: Literal["address", "hostname"] = "address"
    """How host0 is named to torchrun."""
    interfaces: int = 1
    """Interfaces of each host; the last joins the hosts, those before it are decoys that lead nowhere."""
    mtu: int = 65000
    """Bytes of the largest packet; real Ethernet has 1500 or 9000."""
    debian_hosts: bool = False
    """Each host's /etc/hosts begins with 127.0.1.1 and its own name, as Debian's does: a known cause of failures."""
    latency: str = ""
    """Time that each packet takes from host to host, one way, such as 20ms."""
    loss: str = ""
    """Share of packets lost between hosts, such as 1%."""
    bandwidth: str = ""
    """What each host's link carries, each way, such as 1gbit."""
    seed: int = 0
    """Chooses which packets are lost."""
    cut: tuple[str, ...] = ()
    """Hosts to cut from the network: host1@sync, host1@sync:1 (phase and step) or host1@12s."""
    kill: tuple[str, ...] = ()
    """Hosts to power off (HOST@PHASE, HOST@PHASE:STEP or HOST@SECONDS): cuts the link, then kills all processes."""
    skew: tuple[str, ...] = ()
    """Hosts whose clock is wrong, by how much: host1=+90s."""
    patience: float = 30.0
    """Seconds that the other hosts get to end once one has failed or was killed."""


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host to be."""

    index: int
    interfaces: dict[str, tuple[str, ...]]
    """Name -> addresses with prefix; the last one's are on the network that joins the hosts."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None leaves it alone."""
    skew_seconds: float = 0.0

    @property
    def name(self) -> str:
        """host0, host1, ..."""
        return f"host{self.index}"

    @property
    def addresses(self) -> tuple[str, ...]:
        """On the network that joins the hosts."""
        return tuple(each.partition("/")[0] for each in list(self.interfaces.values())[-1])


@dataclass(frozen=True, kw_only=True)
class EmulationPlan:
    """All hosts, and what happens to them."""

    options: HostsOptions
    namespaces: bool
    hosts: tuple[HostPlan, ...]
    ranks_per_host: int
    conditions: LinkConditions
    faults: tuple[HostFault, ...]
    script: tuple[str, ...] = ()
    """Path and arguments."""

    @property
    def reports_phases(self) -> bool:
        """Whether anything is to happen at a phase."""
        return any(fault.phase for fault in self.faults)


def make_plan(options: HostsOptions, script: Sequence[str], refusal: str, visible: Sequence[str]) -> EmulationPlan:
    """Return the plan. Raise ValueError for a mistake, UnsupportedEnvironment if this machine does not allow it.

    refusal: why there may be no namespaces, or "". visible: the GPUs there are, as CUDA_VISIBLE_DEVICES names them.
    """
    for name, (least, most) in RANGES.items():
        value = getattr(options, name.replace("-", "_"))
        if not least <= value <= most:
            raise ValueError(f"--{name} must be {least} to {most}, got {value}.")
    if not script:
        raise ValueError("there is nothing to run; give a script after --, as in -- launch/ppo.py CONFIG.toml.")
    if not Path(script[0]).is_file():
        raise ValueError(f'the script after -- must be the path of a Python file, got "{script[0]}".')
    names = [f"host{index}" for index in range(options.hosts)]
    cuts = [host_fault("cut", text, names) for text in options.cut]
    kills = [host_fault("kill", text, names) for text in options.kill]
    skews = dict(skew(text, names) for text in options.skew)
    asked = {"latency": options.latency, "loss": options.loss, "bandwidth": options.bandwidth}
    limits = {name: quantity(f"--{name}", text) for name, text in asked.items() if text}
    if options.isolation == "namespaces" and refusal:
        raise UnsupportedEnvironment(
            f"--isolation namespaces needs root and /dev/net/tun, which this machine refuses ({refusal})."
        )
    namespaces = options.isolation != "processes" and not refusal
    if not namespaces:
        _check_without_namespaces(options, refusal)
    split = split_gpus(options, visible)
    return EmulationPlan(
        options=options,
        namespaces=namespaces,
        hosts=tuple(
            HostPlan(
                index=index,
                interfaces=interfaces(index, options, namespaces),
                visible=split[index],
                skew_seconds=skews.get(name, 0.0),
            )
            for index, name in enumerate(names)
        ),
        ranks_per_host=options.ranks_per_host or max(1, min(len(each.split(",")) if each else 0 for each in split)),
        conditions=LinkConditions(**limits, seed=options.seed),
        faults=(*cuts, *kills),
        script=tuple(script),
    )


def _check_without_namespaces(options: HostsOptions, refusal: str) -> None:
    """Refuse what needs namespaces."""
    needing = {
        "--latency": options.latency, "--loss": options.loss, "--bandwidth": options.bandwidth, "--cut": options.cut,
        "--debian-hosts": options.debian_hosts, "--interfaces": options.interfaces > 1,
    }  # fmt: skip
    for name, asked in needing.items():
        if asked and refusal:
            raise UnsupportedEnvironment(f"{name} needs hosts in namespaces, which this machine refuses ({refusal}).")
        if asked:
            raise ValueError(f"{name} needs hosts in namespaces; leave --isolation processes out.")


def split_gpus(options: HostsOptions, visible: Sequence[str]) -> tuple[str | None, ...]:
    """Return CUDA_VISIBLE_DEVICES of each host; None if there are no GPUs to hide. Raise ValueError."""
    count, lists, option = options.gpus_per_host, options.cuda_visible_devices, "--cuda-visible-devices"
    if not lists:
        if options.hosts * count > len(visible):
            raise ValueError(
                f"{options.hosts} hosts of {count} GPUs need {options.hosts * count}, but {len(visible)} are visible here;"
                " give fewer --hosts or --gpus-per-host."
            )
        starts = range(0, options.hosts * count, count) if count else [0] * options.hosts
        return tuple(",".join(visible[at : at + count]) if visible else None for at in starts)
    if len(lists) != options.hosts:
        raise ValueError(f"{option} must be given once for each of {options.hosts} hosts, got {len(lists)} lists.")
    names = [name for text in lists for name in text.split(",")]
    for name in names:
        if name not in visible or names.count(name) > 1:
            there = ", ".join(visible) or "none"
            raise ValueError(f'{option} must name each visible GPU ({there}) at most once, got "{name}" in {lists}.')
    return lists


def interfaces(index: int, options: HostsOptions, namespaces: bool) -> dict[str, tuple[str, ...]]:
    """Return eth0, eth1, ...: the last is on the network that joins the hosts (77), the decoys on networks of their own.

    Without namespaces: loopback, of which IPv6 has only one address for all.
    """
    found: dict[str, tuple[str, ...]] = {"lo": (f"127.0.0.{index + 1}", "::1")}
    if namespaces:
        networks = range(76 + options.interfaces, 76, -1)
        both = [(f"10.{number}.0.{index + 1}/24", f"fd{number}::{index + 1:x}/64") for number in networks]
        found = {f"eth{number}": pair for number, pair in enumerate(both)}
    wanted = {"ipv4": slice(0, 1), "ipv6": slice(1, 2), "both": slice(0, 2)}[options.network]
    return {name: pair[wanted] for name, pair in found.items()}


def hosts_file(plan: EmulationPlan, own: HostPlan) -> str:
    """Return /etc/hosts of one host."""
    lines = [f"127.0.1.1 {own.name}"] if plan.options.debian_hosts else []
    lines += ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {host.name}" for host in plan.hosts for address in host.addresses]
    return "\n".join(lines) + "\n"


def torchrun(plan: EmulationPlan, host: HostPlan, python: str, port: int) -> tuple[str, ...]:
    """Return the command line of one host's torchrun."""
    options, first = plan.options, plan.hosts[0]
    master = first.name if options.master == "hostname" and plan.namespaces else first.addresses[0]
    command = [python, "-m", "torch.distributed.run"]
    command += [f"--nnodes={options.hosts}", f"--nproc-per-node={plan.ranks_per_host}"]
    if options.rendezvous == "c10d":
        endpoint = f"[{master}]:{port}" if ":" in master else f"{master}:{port}"
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=hosts"]
    else:
        command += [f"--node-rank={host.index}", f"--master-addr={master}", f"--master-port={port}"]
    if not plan.namespaces:
        command.append(f"--local-addr={host.addresses[0]}")  # or the machine's own name, which may lead nowhere
    return (*command, *plan.script)


def environment(plan: EmulationPlan, host: HostPlan, folder: Path, current: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a host's torchrun that differ from the launcher's."""
    changes = {"TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    if "OMP_NUM_THREADS" not in current:
        changes["OMP_NUM_THREADS"] = "1"  # torchrun's own default, without its warning
    if host.visible is not None:
        changes["CUDA_VISIBLE_DEVICES"] = host.visible
    if not plan.namespaces:
        changes |= {"HARNESS_HOST": host.name, "NCCL_HOSTID": host.name}
    if plan.reports_phases:
        changes[PHASE_SOCKET] = str(folder / "phases")
    return changes
