"""What one rank reports of itself: its host, network, limits, versions, environment and GPU.

What cannot be read is reported with the reason, never left out. A GPU is read through NVML (nvidia-ml-py, which SGLang
depends on), else through torch, which sees its memory but neither its processes nor NVLink.
"""

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from harness.cluster.network import route_to_master
from harness.cluster.placement import RankLocation
from harness.cluster.world import BEHAVIOUR_PREFIXES, Launch, choose_device, host_identity, own_location
from harness.config.layers import digest
from harness.config.schema import Config
from harness.runtime import redact
from harness.tools.doctor.cuda_ipc import gpu_uuid

PACKAGES = (
    "torch", "sglang", "torch_memory_saver", "transformers", "sglang-kernel", "sgl-kernel", "flashinfer-python",
    "triton", "accelerate", "safetensors", "numpy",
)  # fmt: skip
NOT_INSTALLED = "not installed"

COMPARED = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "PATH")
"""Variables that decide which code runs, or what it reads, beside those of BEHAVIOUR_PREFIXES."""
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


class NetworkInterface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface of this host."""

    name: str
    up: bool
    addresses: tuple[str, ...]
    """IPv4 and IPv6, without scope."""


class HostNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A host's network, before the hosts agree on addresses (cluster/network.py)."""

    route: str | None
    """Own address on the route to MASTER_ADDR; None: there is none."""
    master: str | None
    """What MASTER_ADDR resolves to here."""
    problem: str
    """Why there is no route."""
    interfaces: tuple[NetworkInterface, ...]


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a file system. identity: device and inode of the folder, the same for all who see the same one."""

    path: str
    total: int = 0
    free: int = 0
    identity: tuple[int, int] = (0, 0)
    writable: bool = False


class ConfigInput(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that the config names."""

    key: str
    path: str
    exists: bool


class NamedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process, and the GPU memory that it holds in bytes; 0 if that is not known."""

    pid: int
    name: str
    used: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU before this process uses it. Sizes in bytes."""

    uuid: str
    name: str
    total: int
    free: int
    processes: tuple[NamedProcess, ...]
    nvlink: Mapping[str, bool] | None = None
    """UUID of each other GPU of this host -> whether NVLink connects them; None: not known, see `told_by`."""
    told_by: str = "NVML"


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. host is host_identity's; machine: whether two hosts really share kernel and network."""

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
    network: HostNetwork
    shared_memory: Space
    temp: Space
    limits: Mapping[str, tuple[int, int]]
    """Soft and hard; -1 is unlimited."""
    memory: tuple[int, int]
    """Host memory in bytes: total, available."""
    cores: int
    infiniband: bool
    engines: tuple[NamedProcess, ...]
    """sglang:: processes that were here before this run; its bytes are 0."""
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    inputs: tuple[ConfigInput, ...]


def collect(config: Config, launch: Launch, environment: Mapping[str, str]) -> RankFacts:
    """Return all of the above, without a collective, and without a CUDA context before the GPU is read."""
    location, device, problem = location_and_device(config, launch)
    gpu, gpu_reason = look_at_gpu(device)
    memory = psutil.virtual_memory()
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
        network=host_network(environment),
        shared_memory=space("/dev/shm"),
        temp=space(tempfile.gettempdir()),
        limits={name: resource.getrlimit(number) for name, number in LIMITS.items()},
        memory=(memory.total, memory.available),
        cores=len(os.sched_getaffinity(0)),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        engines=engine_processes(),
        versions=versions(),
        environment={name: redact.variable(name, environment[name]) for name in sorted(environment) if matters(name)},
        inputs=inputs(config),
    )


def location_and_device(config: Config, launch: Launch) -> tuple[RankLocation | None, torch.device | None, str]:
    """Return what a run of this config would choose, and its error if it cannot."""
    colocate = config.parallel.colocate
    try:
        device = choose_device(config.engine.device, launch, colocate)
        return own_location(device.type == "cpu", colocate), device, ""
    except ValueError as error:
        return None, None, str(error)


def machine() -> str:
    """Return boot id and network namespace: hosts emulated without namespaces share both."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def host_network(environment: Mapping[str, str]) -> HostNetwork:
    """Return this host's interfaces, and its route to MASTER_ADDR."""
    states = psutil.net_if_stats()
    inet = (socket.AF_INET, socket.AF_INET6)
    interfaces = tuple(
        NetworkInterface(
            name=name,
            up=name in states and states[name].isup,
            addresses=tuple(each.address.partition("%")[0] for each in addresses if each.family in inet),
        )
        for name, addresses in psutil.net_if_addrs().items()
    )
    try:
        route, master = route_to_master(environment)
    except OSError as error:
        return HostNetwork(route=None, master=None, problem=str(error), interfaces=interfaces)
    return HostNetwork(route=route, master=master, problem="", interfaces=interfaces)


def space(path: str) -> Space:
    """Return the room in a folder. It is writable if a file can be made: a read-only mount shows in no permission bit."""
    try:
        usage, status = shutil.disk_usage(path), os.stat(path)
    except OSError:
        return Space(path=path)
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix="harness-doctor-"):
            writable = True
    except OSError:
        writable = False
    identity = status.st_dev, status.st_ino
    return Space(path=path, total=usage.total, free=usage.free, identity=identity, writable=writable)


def engine_processes() -> tuple[NamedProcess, ...]:
    """Return the processes named sglang::..., as SGLang's schedulers and detokenizers call themselves."""
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        name = next(iter(process.info["cmdline"] or ()), "") or process.info["name"] or ""
        if name.startswith("sglang::"):
            found.append(NamedProcess(pid=process.info["pid"], name=name.split()[0], used=0))
    return tuple(found)


def versions() -> dict[str, str]:
    """Return the versions of Python, packages (by metadata: importing SGLang takes 17 s), CUDA, NCCL and the driver."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = NOT_INSTALLED
    on_gpu = torch.cuda.is_available()
    found["cuda"] = torch.version.cuda or "none"
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none"
    try:
        with nvml() as library:
            newest = library.nvmlSystemGetCudaDriverVersion_v2()
            found["driver"] = _text(library.nvmlSystemGetDriverVersion())
            found["driver's cuda"] = f"{newest // 1000}.{newest % 1000 // 10}"
    except (ImportError, RuntimeError):
        found["driver"] = "unknown without nvidia-ml-py" if on_gpu else "none"
    return found


def matters(name: str) -> bool:
    """Return whether a variable is compared between ranks."""
    return name in COMPARED or name.startswith(COMPARED_PREFIXES)


def inputs(config: Config) -> tuple[ConfigInput, ...]:
    """Return the config's files; a hub id looks like one that does not exist."""
    named = {"model.name": config.model.name, "task.source": config.task.source}
    return tuple(
        ConfigInput(key=key, path=path, exists=Path(path).exists()) for key, path in named.items() if "/" in path
    )


def look_at_gpu(device: torch.device | None) -> tuple[Gpu | None, str]:
    """Return the GPU of a trainer on `device`, or None and why."""
    if device is None or device.type == "cpu":
        if torch.version.cuda is None:
            return None, "this torch is built without CUDA"
        return None, "the config wants the CPU" if torch.cuda.is_available() else "torch finds no usable GPU"
    uuid = gpu_uuid(device.index)
    try:
        with nvml() as library:
            return _gpu_by_nvml(library, uuid), ""
    except (ImportError, RuntimeError) as error:
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return Gpu(uuid=uuid, name=name, total=total, free=free, processes=(), told_by=f"torch alone ({error})"), ""


@contextmanager
def nvml() -> Iterator[Any]:
    """Open NVML. Raise ImportError without nvidia-ml-py, RuntimeError if NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error


def _gpu_by_nvml(library: Any, uuid: str) -> Gpu:
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
    others = {_text(library.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    own = others.pop(uuid, None) or library.nvmlDeviceGetHandleByUUID(uuid)  # a MIG device is in no list
    memory, nvlink = library.nvmlDeviceGetMemoryInfo(own), library.NVML_P2P_CAPS_INDEX_NVLINK
    return Gpu(
        uuid=uuid,
        name=_text(library.nvmlDeviceGetName(own)),
        total=int(memory.total),
        free=int(memory.free),
        processes=tuple(
            NamedProcess(pid=each.pid, name=_process_name(each.pid), used=int(each.usedGpuMemory or 0))
            for each in library.nvmlDeviceGetComputeRunningProcesses(own)
        ),
        nvlink={
            other: bool(library.nvmlDeviceGetP2PStatus(own, there, nvlink) == library.NVML_P2P_STATUS_OK)
            for other, there in others.items()
        },
    )


def _process_name(pid: int) -> str:
    """Return the name; NVML counts pids outside the container, where they may mean no process here."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "not visible from here"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
