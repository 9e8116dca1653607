"""What launch/hosts.py will do, decided before anything starts: names, addresses, GPUs, variables, command lines,
faults.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.fault_spec import check_place
from harness.tools.hosts.phase_gate import HOST_FAULTS, PHASE_SOCKET

MASTER_PORT = 29500
TORCHRUN = Path(__file__).resolve().parents[3] / "launch" / "torchrun.py"
RANGES = {"hosts": (1, 250), "ranks-per-host": (0, 1024), "interfaces": (1, 8)}
"""Option -> least and largest value."""


@dataclass(kw_only=True)
class HostsOptions:
    """Emulated hosts on this machine, which share its visible GPUs evenly.

    The script and its arguments follow after --.
    """

    hosts: int = 2
    """Number of hosts; they are called host0, host1, ..."""
    ranks_per_host: int = 0
    """torchrun's --nproc-per-node; 0 means one for each GPU of a host, or one if there are none."""
    isolation: Literal["namespaces", "processes", "auto"] = "auto"
    """namespaces: each host has its own network, hostname, boot id, /proc and /dev/shm, which takes root. processes:
    all share the machine's loopback. auto: namespaces if this machine allows them."""
    network: Literal["ipv4", "ipv6", "both"] = "ipv4"
    """Which addresses the hosts have."""
    rendezvous: Literal["c10d", "static"] = "c10d"
    """How the torchruns find each other: --rdzv-backend=c10d, or --node-rank and --master-addr."""
    master: Literal["address", "hostname"] = "address"
    """What torchrun is given for host0."""
    interfaces: int = 1
    """Interfaces of each host; only the last one reaches the other hosts."""
    debian_hosts: bool = False
    """Each host's /etc/hosts begins with 127.0.1.1 and its own name, as Debian's does: a known cause of failures."""
    cut: tuple[str, ...] = ()
    """Hosts to cut from the network: host1@sync, host1@sync:1 (phase and step) or host1@12s."""
    kill: tuple[str, ...] = ()
    """Hosts to power off (HOST@PHASE, HOST@PHASE:STEP or HOST@SECONDS): cuts the link, then kills all processes."""
    patience: float = 30.0
    """Seconds that the other hosts get to end once one has failed or was killed."""


@dataclass(frozen=True, slots=True)
class HostFault:
    """One host loses its link (cut) or its power (kill), when its first rank begins a phase or after some seconds."""

    kind: Literal["cut", "kill"]
    host: str
    phase: str = ""
    step: int | None = None
    """None: whichever comes first."""
    seconds: float = 0.0
    """After torchrun was started in all hosts; without a phase."""

    def __str__(self) -> str:
        when = self.phase or f"{self.seconds:g}s"
        return f"{self.kind} {self.host}@{when}{'' if self.step is None else f':{self.step}'}"

    @property
    def when(self) -> str:
        """The time in words."""
        step = "" if self.step is None else f" of step {self.step}"
        return f"at {self.phase}{step}" if self.phase else f"{self.seconds:g} s after the start"


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host."""

    index: int
    interfaces: dict[str, tuple[str, ...]]
    """Name -> addresses with prefix; the last one's are on the network that joins the hosts."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None leaves it alone."""

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
    faults: tuple[HostFault, ...]
    script: tuple[str, ...] = ()
    """Path and arguments."""


def make_plan(options: HostsOptions, script: Sequence[str], refusal: str, visible: Sequence[str]) -> EmulationPlan:
    """Return the plan. Raise ValueError for a mistake, UnsupportedEnvironment if this machine does not allow it.

    refusal: why there may be no namespaces, or "". visible: the GPUs there are, as CUDA_VISIBLE_DEVICES names them.
    """
    for name, (least, most) in RANGES.items():
        value = getattr(options, name.replace("-", "_"))
        if not least <= value <= most:
            raise ValueError(f"--{name} must be {least} to {most}, got {value}.")
    if not script:
        raise ValueError("there is no script to run; give one after --, as in: -- launch/ppo.py CONFIG.toml")
    if not Path(script[0]).is_file():
        raise ValueError(f'the script after -- must be the path of a Python file, got "{script[0]}".')
    names = [f"host{index}" for index in range(options.hosts)]
    cuts = [host_fault("cut", text, names) for text in options.cut]
    kills = [host_fault("kill", text, names) for text in options.kill]
    if options.isolation == "namespaces" and refusal:
        raise UnsupportedEnvironment(
            f"--isolation namespaces needs root, and this machine refuses it ({refusal}); leave it out."
        )
    namespaces = options.isolation != "processes" and not refusal
    if not namespaces:
        wanted = {"cut": options.cut, "debian-hosts": options.debian_hosts, "interfaces": options.interfaces > 1}
        for name in (name for name, value in wanted.items() if value):
            if refusal:
                raise UnsupportedEnvironment(
                    f"--{name} needs hosts in namespaces, which this machine refuses ({refusal})."
                )
            raise ValueError(f"--{name} needs hosts in namespaces; leave --isolation processes out.")
    split = split_gpus(options.hosts, visible)
    return EmulationPlan(
        options=options,
        namespaces=namespaces,
        hosts=tuple(
            HostPlan(index=index, interfaces=interfaces(index, options, namespaces), visible=split[index])
            for index in range(options.hosts)
        ),
        ranks_per_host=options.ranks_per_host or max(1, len(visible) // options.hosts),
        faults=(*cuts, *kills),
        script=tuple(script),
    )


def visible_gpus() -> list[str]:
    """Return this machine's NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them, without importing torch."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or not devices:
        return [str(number) for number in range(len(devices))]
    return [name.strip() for name in given.split(",") if name.strip()]


def split_gpus(hosts: int, visible: Sequence[str]) -> tuple[str | None, ...]:
    """Return CUDA_VISIBLE_DEVICES of each host: an even share, in order. None if there are no GPUs to hide."""
    count = len(visible) // hosts
    return tuple(",".join(visible[n * count : (n + 1) * count]) if visible else None for n in range(hosts))


def interfaces(index: int, options: HostsOptions, namespaces: bool) -> dict[str, tuple[str, ...]]:
    """Return eth0, eth1, ...: the last is on the network that joins the hosts (77), each other on a network without
    hosts.

    Without namespaces return loopback; all hosts then share its one IPv6 address.
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


def torchrun(plan: EmulationPlan, host: HostPlan, port: int) -> tuple[str, ...]:
    """Return the command line of one host's torchrun."""
    options, first = plan.options, plan.hosts[0]
    master = first.name if options.master == "hostname" and plan.namespaces else first.addresses[0]
    command = [sys.executable, str(TORCHRUN)]
    command += [f"--nnodes={options.hosts}", f"--nproc-per-node={plan.ranks_per_host}"]
    if options.rendezvous == "c10d":
        endpoint = f"[{master}]:{port}" if ":" in master else f"{master}:{port}"
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=hosts"]
    else:
        command += [f"--node-rank={host.index}", f"--master-addr={master}", f"--master-port={port}"]
    if not plan.namespaces:
        command.append(f"--local-addr={host.addresses[0]}")  # or the machine's own name, which may lead nowhere
    return (*command, *plan.script)


def environment(plan: EmulationPlan, host: HostPlan, folder: Path) -> dict[str, str]:
    """Return the variables of a host's torchrun that differ from the launcher's."""
    changes = {"TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    if host.visible is not None:
        changes["CUDA_VISIBLE_DEVICES"] = host.visible
    if not plan.namespaces:
        changes |= {"HARNESS_HOST": host.name, "NCCL_HOSTID": host.name}
    if any(fault.phase for fault in plan.faults):
        changes[PHASE_SOCKET] = str(folder / "phases")
    if plan.faults:
        changes[HOST_FAULTS] = ", ".join(map(str, plan.faults))
    return changes


def host_fault(kind: Literal["cut", "kill"], text: str, hosts: Sequence[str]) -> HostFault:
    """Parse "host1@sync", "host1@sync:1" or "host1@12s". Raise ValueError that names the option."""
    host, _, when = text.partition("@")
    if host not in hosts:
        raise ValueError(f'--{kind} must name one of the hosts {", ".join(hosts)}, got "{text}".')
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)s", when):
        return HostFault(kind, host, seconds=float(match[1]))
    if match := re.fullmatch(r"([A-Za-z_]\w*)(?::(\d+))?", when):
        phase, step = match[1], None if match[2] is None else int(match[2])
        try:
            check_place("full-disk", phase, step)  # which is like it: any phase will do, once the ranks have met
        except ValueError as error:
            raise ValueError(f"--{kind} {text} cannot work: {error}.") from None
        return HostFault(kind, host, phase, step)
    raise ValueError(
        f"--{kind} must be {host}@PHASE, {host}@PHASE:STEP or {host}@SECONDSs, such as {host}@sync:1 or {host}@12s,"
        f' got "{text}".'
    )
