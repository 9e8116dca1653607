"""What launch/hosts.py will do, decided before anything starts: names, addresses, GPUs, variables, command lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.hosts import harms
from harness.tools.hosts.harms import AtPhase, Conditions, Harm
from harness.tools.hosts.host import HostSpec, Interface
from harness.tools.hosts.phase_client import PHASE_SOCKET

Network = Literal["ipv4", "ipv6", "both"]
Isolation = Literal["namespaces", "processes", "auto"]
Rendezvous = Literal["c10d", "static"]
Master = Literal["address", "hostname"]

MOST_HOSTS = 250
MTU_RANGE = (1280, 65535)
"""The least that IPv6 allows, and the most that a packet's length field does."""
MASTER_PORT = 29500


@dataclass(kw_only=True)
class Options:
    """Emulated hosts on this machine; after -- the script and its arguments, which torchrun runs in each."""

    hosts: int = 2
    """How many; they are called host0, host1, ..."""
    gpus_per_host: int = 0
    """GPUs that each host sees; 0 hides them all."""
    ranks_per_host: int = 0
    """torchrun's --nproc-per-node; 0 means one for each GPU of the host with fewest, or one where there are none."""
    cuda_visible_devices: tuple[str, ...] = ()
    """Given once for each host, such as 0,1 and then 3,2; else the visible GPUs are split in order."""
    isolation: Isolation = "auto"
    """namespaces: own network, hostname, boot id, /proc and /dev/shm, which takes root. processes: loopback only. auto: what this machine allows."""
    network: Network = "ipv4"
    """Which addresses the hosts have."""
    ipv6: bool = False
    """The same as --network ipv6."""
    rendezvous: Rendezvous = "c10d"
    """How torchrun's agents meet: --rdzv-backend=c10d, or --node-rank and --master-addr."""
    master: Master = "address"
    """How torchrun is told where host0 is."""
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
    """Hosts whose link is cut, and when: host1@sync, host1@sync:1 (phase and step) or host1@12s."""
    kill: tuple[str, ...] = ()
    """Hosts that lose power, and when, as for --cut: first silence, then every process gone at once."""
    skew: tuple[str, ...] = ()
    """Hosts whose clock is wrong, by how much: host1=+90s."""
    patience: float = 30.0
    """Seconds that the other hosts get to end by themselves once one has failed, or was killed."""


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host to be."""

    index: int
    addresses: tuple[str, ...]
    """On the network that joins the hosts."""
    interfaces: tuple[Interface, ...]
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None leaves it alone."""
    skew_seconds: float = 0.0

    @property
    def name(self) -> str:
        """host0, host1, ..."""
        return host_name(self.index)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All of it."""

    options: Options
    namespaces: bool
    network: Network
    hosts: tuple[HostPlan, ...]
    ranks_per_host: int
    conditions: Conditions
    harms: tuple[Harm, ...]
    script: tuple[str, ...] = field(default=())
    """Path and arguments."""

    @property
    def knocks(self) -> bool:
        """Whether anything is to happen at a phase."""
        return any(isinstance(harm.when, AtPhase) for harm in self.harms)


def host_name(index: int) -> str:
    """host0, host1, ..."""
    return f"host{index}"


def make_plan(options: Options, script: Sequence[str], refusal: str, visible: Sequence[str]) -> Plan:
    """Raises ValueError with one sentence for a mistake, UnsupportedEnvironment where this machine does not allow it.

    refusal: why there may be no namespaces, or "". visible: the GPUs there are, as CUDA_VISIBLE_DEVICES names them.
    """
    _check(options)
    if not script:
        raise ValueError("there is nothing to run; give a script after --, as in -- launch/ppo.py CONFIG.toml.")
    if not Path(script[0]).is_file():
        raise ValueError(f'the script "{script[0]}" is not there; give the path of a Python file after --.')
    names = [host_name(index) for index in range(options.hosts)]
    happen = (
        *(harms.harm("cut", text, names) for text in options.cut),
        *(harms.harm("kill", text, names) for text in options.kill),
    )
    skews = dict(harms.skew(text, names) for text in options.skew)
    conditions = Conditions(
        latency=harms.duration("--latency", options.latency) if options.latency else 0.0,
        loss=harms.fraction("--loss", options.loss) if options.loss else 0.0,
        bandwidth=harms.rate("--bandwidth", options.bandwidth) if options.bandwidth else 0.0,
        seed=options.seed,
    )
    if options.isolation == "namespaces" and refusal:
        raise UnsupportedEnvironment(
            f"--isolation = namespaces cannot be had here ({refusal}); it takes root and /dev/net/tun."
        )
    namespaces = options.isolation != "processes" and not refusal
    if not namespaces:
        _check_without_namespaces(options, refusal)
    network: Network = "ipv6" if options.ipv6 else options.network
    split = split_gpus(options, visible)
    return Plan(
        options=options,
        namespaces=namespaces,
        network=network,
        hosts=tuple(
            HostPlan(
                index=index,
                addresses=host_addresses(index, network, namespaces),
                interfaces=interfaces(index, options.interfaces, network) if namespaces else (),
                visible=split[index],
                skew_seconds=skews.get(names[index], 0.0),
            )
            for index in range(options.hosts)
        ),
        ranks_per_host=options.ranks_per_host or options.gpus_per_host or _least_gpus(split),
        conditions=conditions,
        harms=happen,
        script=tuple(script),
    )


def _check(options: Options) -> None:
    if not 1 <= options.hosts <= MOST_HOSTS:
        raise ValueError(f"--hosts = {options.hosts} must be 1 to {MOST_HOSTS}.")
    for name, value, least in (
        ("gpus-per-host", options.gpus_per_host, 0),
        ("ranks-per-host", options.ranks_per_host, 0),
        ("interfaces", options.interfaces, 1),
        ("patience", options.patience, 0),
    ):
        if value < least:
            raise ValueError(f"--{name} = {value} must be at least {least}.")
    if not MTU_RANGE[0] <= options.mtu <= MTU_RANGE[1]:
        raise ValueError(f"--mtu = {options.mtu} must be {MTU_RANGE[0]} to {MTU_RANGE[1]}.")
    if options.interfaces > 8:
        raise ValueError(f"--interfaces = {options.interfaces} must be at most 8.")
    if options.ipv6 and options.network == "both":
        raise ValueError("--ipv6 means --network ipv6, but --network = both; give one of the two.")


def _check_without_namespaces(options: Options, refusal: str) -> None:
    """What takes namespaces is refused, not left out in silence."""
    asked = [
        name
        for name, value in (
            ("--latency", options.latency), ("--loss", options.loss), ("--bandwidth", options.bandwidth),
            ("--cut", options.cut), ("--debian-hosts", options.debian_hosts), ("--interfaces", options.interfaces > 1),
        )
        if value
    ]  # fmt: skip
    if asked and refusal:
        raise UnsupportedEnvironment(f"{asked[0]} needs hosts in namespaces, which this machine refuses ({refusal}).")
    if asked:
        raise ValueError(f"{asked[0]} needs hosts in namespaces; leave --isolation processes out.")


def split_gpus(options: Options, visible: Sequence[str]) -> tuple[str | None, ...]:
    """CUDA_VISIBLE_DEVICES of each host; None where there are no GPUs to hide. Raises ValueError."""
    count = options.gpus_per_host
    if options.cuda_visible_devices:
        _check_lists(options, visible)
        return options.cuda_visible_devices
    if options.hosts * count > len(visible):
        raise ValueError(
            f"{options.hosts} hosts of {count} GPUs need {options.hosts * count}, but {len(visible)} are visible here;"
            " give fewer --hosts or --gpus-per-host."
        )
    if not visible:
        return (None,) * options.hosts
    return tuple(",".join(visible[index * count : (index + 1) * count]) for index in range(options.hosts))


def _least_gpus(split: Sequence[str | None]) -> int:
    """GPUs of the host that has fewest; 1 where there are none, as a host has one rank at least."""
    return max(1, min(len(visible.split(",")) if visible else 0 for visible in split))


def _check_lists(options: Options, visible: Sequence[str]) -> None:
    lists = options.cuda_visible_devices
    if len(lists) != options.hosts:
        raise ValueError(f"--cuda-visible-devices has {len(lists)} lists for {options.hosts} hosts; give one for each.")
    owners: dict[str, str] = {}
    for index, text in enumerate(lists):
        names = text.split(",")
        if len(names) < options.gpus_per_host:
            raise ValueError(
                f'--cuda-visible-devices = "{text}" of {host_name(index)} has {len(names)} GPUs,'
                f" but --gpus-per-host = {options.gpus_per_host}; give it at least as many."
            )
        for name in names:
            if name not in visible:
                raise ValueError(
                    f'--cuda-visible-devices = "{text}" of {host_name(index)} names GPU "{name}";'
                    f" visible here are {', '.join(visible) or 'none'}."
                )
            if name in owners:
                raise ValueError(
                    f'--cuda-visible-devices gives GPU "{name}" to {owners[name]} and again to {host_name(index)};'
                    " give each GPU once."
                )
            owners[name] = host_name(index)


def host_addresses(index: int, network: Network, namespaces: bool) -> tuple[str, ...]:
    """IPv4 before IPv6. Without namespaces: loopback, of which IPv6 has only one for all."""
    four = f"10.77.0.{index + 1}" if namespaces else f"127.0.0.{index + 1}"
    six = f"fd77::{index + 1:x}" if namespaces else "::1"
    return {"ipv4": (four,), "ipv6": (six,), "both": (four, six)}[network]


def interfaces(index: int, count: int, network: Network) -> tuple[Interface, ...]:
    """eth0, eth1, ...: the last is the network that joins the hosts (77), the decoys before it are networks of their own."""
    return tuple(
        Interface(
            name=f"eth{number}",
            addresses=tuple(
                address
                for address in (f"10.{77 + away}.0.{index + 1}/24", f"fd{77 + away}::{index + 1:x}/64")
                if network == "both" or (":" in address) == (network == "ipv6")
            ),
        )
        for number, away in enumerate(reversed(range(count)))
    )


def hosts_file(plan: Plan, own: HostPlan) -> str:
    """What /etc/hosts says on one host."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    if plan.options.debian_hosts:
        lines.insert(0, f"127.0.1.1 {own.name}")
    lines += [f"{address} {host.name}" for host in plan.hosts for address in host.addresses]
    return "\n".join(lines) + "\n"


def torchrun(plan: Plan, host: HostPlan, python: str, port: int) -> tuple[str, ...]:
    """The command line of one host's torchrun."""
    options = plan.options
    first = plan.hosts[0]
    master = first.name if options.master == "hostname" and plan.namespaces else first.addresses[0]
    command = [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={options.hosts}",
        f"--nproc-per-node={plan.ranks_per_host}",
    ]
    if options.rendezvous == "c10d":
        endpoint = f"[{master}]:{port}" if ":" in master else f"{master}:{port}"
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=hosts"]
    else:
        command += [f"--node-rank={host.index}", f"--master-addr={master}", f"--master-port={port}"]
    if not plan.namespaces:
        command.append(f"--local-addr={host.addresses[0]}")  # or the machine's own name, which may lead nowhere
    return (*command, *plan.script)


def environment(plan: Plan, host: HostPlan, folder: Path, current: Mapping[str, str]) -> dict[str, str]:
    """Variables that a host's torchrun gets beside the launcher's own."""
    changes = {"TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    if "OMP_NUM_THREADS" not in current:
        changes["OMP_NUM_THREADS"] = "1"  # torchrun's own default, without its warning
    if host.visible is not None:
        changes["CUDA_VISIBLE_DEVICES"] = host.visible
    if not plan.namespaces:
        changes |= {"HARNESS_HOST": host.name, "NCCL_HOSTID": host.name}
    if plan.knocks:
        changes[PHASE_SOCKET] = str(folder / "phase_client")
    return changes


def host_spec(
    plan: Plan,
    host: HostPlan,
    folder: Path,
    working_folder: Path,
    boot_id: str,
    command: tuple[str, ...],
    changes: dict[str, str],
) -> HostSpec:
    """What the host's process is told."""
    return HostSpec(
        name=host.name,
        namespaces=plan.namespaces,
        boot_id=boot_id,
        interfaces=host.interfaces,
        mtu=plan.options.mtu,
        ipv6=plan.network != "ipv4",
        folder=str(folder),
        command=command,
        environment=changes,
        working_folder=str(working_folder),
    )
