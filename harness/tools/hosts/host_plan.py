"""What launch/hosts.py will do, decided before anything starts: names, addresses, GPUs, variables, command lines, faults."""

import importlib.util
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.hosts.phase_gate import PHASE_SOCKET

MASTER_PORT = 29500
RANGES = {
    "hosts": (1, 250),
    "gpus-per-host": (0, 64),
    "ranks-per-host": (0, 1024),
    "interfaces": (1, 8),
    "patience": (0, 86400),
}
"""Option -> least and largest value."""
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Decimal, as tc's."""
QUANTITIES = {
    "--latency": (SECONDS, 0.0, math.inf, "a duration in us, ms, s or min, such as 20ms"),
    "--loss": ({"%": 0.01}, 0.0, 1.0, "a share of the packets, 0% to 100%"),
    "--bandwidth": (BITS, 1.0, math.inf, "a rate of at least 1bit in bit, kbit, mbit or gbit, such as 1gbit"),
}
"""Option -> units, least and largest value, and what it must be in words."""


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


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """How the router treats every packet between two hosts.

    latency: seconds, one way. loss: the chance of it, the same packets for one seed. bandwidth: bits a second that each
    host's link carries in each direction; 0 is no limit.
    """

    latency: float = 0.0
    loss: float = 0.0
    bandwidth: float = 0.0
    seed: int = 0


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

    @property
    def when(self) -> str:
        """The time in words."""
        step = "" if self.step is None else f" of step {self.step}"
        return f"at {self.phase}{step}" if self.phase else f"{self.seconds:g} s after the start"


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
    asked: dict[str, object] = {"latency": options.latency, "loss": options.loss, "bandwidth": options.bandwidth}
    limits = {name: quantity(f"--{name}", str(text)) for name, text in asked.items() if text}
    if options.isolation == "namespaces" and refusal:
        raise UnsupportedEnvironment(
            f"--isolation namespaces needs root and /dev/net/tun, which this machine refuses ({refusal})."
        )
    namespaces = options.isolation != "processes" and not refusal
    if not namespaces:
        asked |= {"cut": options.cut, "debian-hosts": options.debian_hosts, "interfaces": options.interfaces > 1}
        for name in (name for name, value in asked.items() if value):
            if refusal:
                raise UnsupportedEnvironment(
                    f"--{name} needs hosts in namespaces, which this machine refuses ({refusal})."
                )
            raise ValueError(f"--{name} needs hosts in namespaces; leave --isolation processes out.")
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


def torchrun(plan: EmulationPlan, host: HostPlan, port: int) -> tuple[str, ...]:
    """Return the command line of one host's torchrun."""
    options, first = plan.options, plan.hosts[0]
    master = first.name if options.master == "hostname" and plan.namespaces else first.addresses[0]
    command = [sys.executable, "-m", "torch.distributed.run"]
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
    changes["OMP_NUM_THREADS"] = current.get("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    if host.visible is not None:
        changes["CUDA_VISIBLE_DEVICES"] = host.visible
    if not plan.namespaces:
        changes |= {"HARNESS_HOST": host.name, "NCCL_HOSTID": host.name}
    if any(fault.phase for fault in plan.faults):
        changes[PHASE_SOCKET] = str(folder / "phases")
    if host.skew_seconds:
        changes |= skewed_clock(host.skew_seconds, current)
    return changes


def quantity(option: str, text: str) -> float:
    """Return the value of "20ms", "1%" or "1gbit" in seconds, as a fraction, in bits per second. Raise ValueError."""
    units, least, most, must_be = QUANTITIES[option]
    value = _with_unit(text, units)
    if value is None or not least <= value <= most:
        raise ValueError(f'{option} must be {must_be}, got "{text}".')
    return value


def _with_unit(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.lower())
    return float(match[1]) * units[match[2]] if match else None


def host_fault(kind: Literal["cut", "kill"], text: str, hosts: Sequence[str]) -> HostFault:
    """Parse "host1@sync", "host1@sync:1" or "host1@12s". Raise ValueError that names the option."""
    host, when = _of_host(f"--{kind}", text, "@", hosts)
    if (seconds := _with_unit(when, SECONDS)) is not None:
        return HostFault(kind, host, seconds=seconds)
    if match := re.fullmatch(r"([A-Za-z_]\w*)(?::(\d+))?", when):
        return HostFault(kind, host, match[1], None if match[2] is None else int(match[2]))
    raise ValueError(
        f"--{kind} must be {host}@PHASE, {host}@PHASE:STEP or {host}@SECONDSs, such as {host}@sync:1 or {host}@12s,"
        f' got "{text}".'
    )


def skew(text: str, hosts: Sequence[str]) -> tuple[str, float]:
    """Return host and seconds of "host1=+90s" or "host1=-5min". Raise ValueError that names the option."""
    host, offset = _of_host("--skew", text, "=", hosts)
    seconds = _with_unit(offset[1:], SECONDS)
    if seconds is None or offset[0] not in "+-":
        raise ValueError(f'--skew must have an offset with a sign, {host}=+90s or {host}=-90s, got "{text}".')
    return host, seconds if offset[0] == "+" else -seconds


def _of_host(option: str, text: str, separator: str, hosts: Sequence[str]) -> tuple[str, str]:
    host, _, rest = text.partition(separator)
    if host not in hosts:
        raise ValueError(f'{option} must name one of the hosts {", ".join(hosts)}, got "{text}".')
    return host, rest


def skewed_clock(seconds: float, current: Mapping[str, str]) -> dict[str, str]:
    """Return variables under which the real-time clock of a program and its children is off by this much.

    By libfaketime, because Linux has one real-time clock for all namespaces. Monotonic clocks, which timeouts and sleeps
    use, stay true, and so do the times of files. Raise UnsupportedEnvironment if libfaketime is not installed.
    """
    return {
        "LD_PRELOAD": ":".join([str(faketime_library()), *filter(None, [current.get("LD_PRELOAD")])]),
        "FAKETIME": f"{seconds:+g}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "FAKETIME_NO_CACHE": "1",
    }


def faketime_library() -> Path:
    """Return the path of libfaketime's shared object. Raise UnsupportedEnvironment if it is not installed."""
    spec = importlib.util.find_spec("libfaketime")
    folders = spec.submodule_search_locations if spec else None
    found = next((file for folder in folders or () for file in Path(folder).rglob("libfaketime.so.1")), None)
    if found is None:
        raise UnsupportedEnvironment(
            "--skew needs libfaketime.so.1 of the package libfaketime, which is not installed."
        )
    return found
