"""What one rank says of itself: its host, network, limits, versions, environment and GPU.

Each small function looks at one thing; what cannot be looked at here is said with the reason, never left out.
"""

import ipaddress
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch

from harness.cluster.network import route_to_master
from harness.cluster.placement import RankLocation
from harness.cluster.world import BEHAVIOUR_PREFIXES, Launch, choose_device, host_identity, own_location
from harness.config.layers import digest
from harness.config.schema import Config
from harness.runtime import redact
from harness.tools.doctor.gpu import Gpu, GpuProcess, driver_versions, look_at_gpu

PACKAGES = (
    "torch", "sglang", "torch_memory_saver", "transformers", "sglang-kernel", "sgl-kernel", "flashinfer-python",
    "triton", "accelerate", "safetensors", "numpy",
)  # fmt: skip
NOT_INSTALLED = "not installed"

# Beside those of BEHAVIOUR_PREFIXES in cluster/world.py: what else decides which code runs, or what it reads.
COMPARED = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "PATH")
COMPARED_PREFIXES = (
    *BEHAVIOUR_PREFIXES, "TP_", "UCX_", "HF_", "TRANSFORMERS_", "TRITON_", "TORCHINDUCTOR_", "FLASHINFER_", "NVIDIA_",
    "NVSHMEM_", "TMS_",
)  # fmt: skip

LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """A network interface of this host."""

    name: str
    up: bool
    addresses: tuple[str, ...]
    """IPv4 and IPv6, without scope."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """How this host stands to the others, before the hosts agree on addresses (cluster/network.py)."""

    route: str | None
    """Own address on the route to MASTER_ADDR; None: there is none."""
    master: str | None
    """What MASTER_ADDR resolves to here."""
    problem: str
    """Why there is no route."""
    interfaces: tuple[Interface, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Bytes of a file system. identity: device and inode of the folder, the same for all who see the same one."""

    path: str
    total: int
    free: int
    identity: tuple[int, int]
    writable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A file or folder that the config names."""

    key: str
    path: str
    exists: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """One rank. host is host_identity's; machine tells whether two hosts really share kernel and network."""

    rank: int
    local_rank: int
    local_world_size: int
    pid: int
    host: str
    machine: str
    config: str
    """Digest of the config as this rank read it."""
    location: RankLocation | None
    device: str
    """cpu or cuda: where the trainer of this rank runs."""
    problem: str
    """Why there is no location or no device as the config wants it."""
    gpu: Gpu | None
    gpu_reason: str
    """Why gpu is None."""
    gpu_devices: int
    """NVIDIA GPUs that the kernel shows, usable or not."""
    network: Network
    shared_memory: Space
    temp: Space
    limits: Mapping[str, tuple[int, int]]
    """Soft and hard; -1 is unlimited."""
    memory: tuple[int, int]
    """Host memory in bytes: total, available."""
    cores: int
    infiniband: bool
    engines: tuple[GpuProcess, ...]
    """sglang:: processes that were here before this run; its bytes are 0."""
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    inputs: tuple[Input, ...]


def collect(config: Config, launch: Launch, environment: Mapping[str, str]) -> RankFacts:
    """All of the above, without a collective and without a CUDA context of this process before the GPU was looked at."""
    location, device, problem = where(config, launch)
    gpu, gpu_reason = look_at_gpu(device)
    return RankFacts(
        rank=launch.rank,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        pid=os.getpid(),
        host=host_identity(),
        machine=machine(),
        config=digest(config),
        location=location,
        device="cpu" if device is None else device.type,
        problem=problem,
        gpu=gpu,
        gpu_reason=gpu_reason,
        gpu_devices=sum(1 for _ in Path("/dev").glob("nvidia[0-9]*")),
        network=network(environment),
        shared_memory=space("/dev/shm"),
        temp=space(tempfile.gettempdir()),
        limits={name: resource.getrlimit(number) for name, number in LIMITS.items()},
        memory=(psutil.virtual_memory().total, psutil.virtual_memory().available),
        cores=len(os.sched_getaffinity(0)),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        engines=engine_processes(),
        versions=versions(),
        environment={name: redact.variable(name, environment[name]) for name in sorted(environment) if matters(name)},
        inputs=inputs(config),
    )


def where(config: Config, launch: Launch) -> tuple[RankLocation | None, torch.device | None, str]:
    """RankLocation and device as a run of this config would take them, and what it would say where it cannot."""
    colocate = config.parallel.colocate
    try:
        device = choose_device(config.engine.device, launch, colocate)
        return own_location(device.type == "cpu", colocate), device, ""
    except ValueError as error:
        return None, None, str(error)


def machine() -> str:
    """Boot id and network namespace: hosts emulated without namespaces share both."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def network(environment: Mapping[str, str]) -> Network:
    """This host's interfaces, and its way to MASTER_ADDR."""
    try:
        route, master = route_to_master(environment)
    except OSError as error:
        return Network(route=None, master=None, problem=str(error), interfaces=interfaces())
    return Network(route=route, master=master, problem="", interfaces=interfaces())


def interfaces() -> tuple[Interface, ...]:
    states = psutil.net_if_stats()
    return tuple(
        Interface(
            name=name,
            up=name in states and states[name].isup,
            addresses=tuple(
                each.address.partition("%")[0] for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)
            ),
        )
        for name, addresses in psutil.net_if_addrs().items()
    )


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def space(path: str) -> Space:
    """Writable is tried by making a file, since a read-only mount shows in no permission bit; without the folder all is 0."""
    try:
        usage, status = shutil.disk_usage(path), os.stat(path)
    except OSError:
        return Space(path=path, total=0, free=0, identity=(0, 0), writable=False)
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix="harness-doctor-"):
            writable = True
    except OSError:
        writable = False
    return Space(
        path=path, total=usage.total, free=usage.free, identity=(status.st_dev, status.st_ino), writable=writable
    )


def engine_processes() -> tuple[GpuProcess, ...]:
    """Processes named sglang::..., as its schedulers and detokenizers call themselves."""
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        name = next(iter(process.info["cmdline"] or ()), "") or process.info["name"] or ""
        if name.startswith("sglang::"):
            found.append(GpuProcess(pid=process.info["pid"], name=name.split()[0], used=0))
    return tuple(found)


def versions() -> dict[str, str]:
    """Of what runs: Python, packages by their metadata (importing SGLang takes 17 s), CUDA, NCCL and the driver."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = NOT_INSTALLED
    found["cuda"] = torch.version.cuda or "none"
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return found | driver_versions()


def matters(name: str) -> bool:
    """Whether a variable is compared between ranks."""
    return name in COMPARED or name.startswith(COMPARED_PREFIXES)


def inputs(config: Config) -> tuple[Input, ...]:
    """The config's files; a hub id is one that is nowhere, and has no folder of its first part."""
    named = {"model.name": config.model.name, "task.source": config.task.source}
    return tuple(Input(key=key, path=path, exists=Path(path).exists()) for key, path in named.items() if "/" in path)
