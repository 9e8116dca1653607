"""What one rank reports about itself: its host, network, limits, versions, environment and GPU.

What cannot be read is reported with the reason. A GPU's used memory is what NVML says (nvidia-ml-py, on which SGLang
depends), because torch alone would need a CUDA context, which a full GPU does not give.
"""

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch.utils import collect_env

from harness.cluster.network import route_to_master
from harness.cluster.placement import RankLocation
from harness.cluster.world import Launch, behaviour, choose_device, host_identity, own_location
from harness.config.layers import digest
from harness.config.schema import Config, named_paths
from harness.tools.environment_file import package_versions


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU before this process uses it. Sizes in bytes."""

    uuid: str
    name: str
    total: int
    free: int


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. host is host_identity's."""

    rank: int
    host: str
    config: str
    """Digest of the config as this rank read it."""
    location: RankLocation | None
    device: str
    """cpu or cuda: where the trainer of this rank runs."""
    gpu_index: int | None
    problem: str
    """Why this rank cannot get the device that the config asks for."""
    gpu: Gpu | None
    gpu_reason: str
    """Why gpu is None, or read through torch."""
    gpu_devices: int
    """NVIDIA GPUs that the kernel shows, usable or not."""
    route: str | None
    """Own address on the route to MASTER_ADDR; None: there is none."""
    master: str
    """What MASTER_ADDR resolves to here; without a route, why there is none."""
    shared_memory: int
    """Bytes that can be written to /dev/shm."""
    folders: Mapping[str, int]
    """TMPDIR and the folder of the run, by the words that name it -> bytes that can be written to it."""
    open_files: int
    """How many files this process may have open; -1: any number."""
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    """The variables that change how torch, NCCL, CUDA or SGLang behave."""
    preload: str
    """LD_PRELOAD."""
    absent: tuple[str, ...]
    """The config's paths that do not exist here, as "model.name = PATH". A hub id looks like a path too."""


def collect(config: Config, launch: Launch, environment: Mapping[str, str]) -> RankFacts:
    """Return all of the above, without a collective, and without a CUDA context before the GPU is read."""
    colocate, problem = config.parallel.colocate, ""
    location = device = route = None
    try:
        route, master = route_to_master(environment)
    except OSError as error:
        master = str(error)
    try:
        device = choose_device(config.engine.device, launch, colocate)
        location = own_location(device.type == "cpu", colocate)
    except ValueError as error:  # as a run of this config would raise it
        problem = str(error)
    gpu, gpu_reason = look_at_gpu(device)
    folders = {"run.dir": "runs"} | dict(named_paths(config, "written"))
    paths = [
        (key, given.rpartition(":")[0] if key == "task.reward" else given) for key, given in named_paths(config, "read")
    ]
    return RankFacts(
        rank=launch.rank,
        host=host_identity(),
        config=digest(config),
        location=location,
        device="cpu" if device is None else device.type,
        gpu_index=None if device is None else device.index,
        problem=problem,
        gpu=gpu,
        gpu_reason=gpu_reason,
        gpu_devices=sum(1 for _ in Path("/dev").glob("nvidia[0-9]*")),
        route=route,
        master=master,
        shared_memory=room("/dev/shm"),
        folders={
            f"TMPDIR = {tempfile.gettempdir()}": room(tempfile.gettempdir()),
            **{f"{key} = {Path(given).absolute()}": room(_deepest(Path(given))) for key, given in folders.items()},
        },
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        versions=versions(),
        environment=behaviour(environment),
        preload=environment.get("LD_PRELOAD", ""),
        absent=tuple(f"{name} = {path}" for name, path in paths if "/" in path and not os.path.exists(path)),
    )


def _deepest(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists: where it would be made."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def room(folder: str | Path) -> int:
    """Return the bytes that can be written there; 0 if no file can be made: a read-only mount shows in no permission
    bit.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="harness-doctor-"):
            return shutil.disk_usage(folder).free
    except OSError:
        return 0


def versions() -> dict[str, str]:
    """Return the versions of Python, packages, CUDA, NCCL and the driver."""
    found = package_versions()
    found["cuda"] = torch.version.cuda or "none"
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    found["driver"] = collect_env.get_nvidia_driver_version(collect_env.run) or "none"
    return found


def look_at_gpu(device: torch.device | None) -> tuple[Gpu | None, str]:
    """Return the GPU of a trainer on `device`, or None, and what RankFacts.gpu_reason says."""
    if device is None or device.type == "cpu":
        if torch.version.cuda is None:
            return None, "this torch is built without CUDA"
        return None, "the config wants the CPU" if torch.cuda.is_available() else "torch finds no usable GPU"
    properties = torch.cuda.get_device_properties(device)
    free, total, reason = 0, properties.total_memory, ""
    try:
        free = total - torch.cuda.device_memory_used(device)
    except (ImportError, RuntimeError) as error:
        free, total = torch.cuda.mem_get_info(device)
        reason = str(error)
    uuid = str(properties.uuid)  # as nvidia-smi -L prints it
    return Gpu(
        uuid=uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}", name=properties.name, total=total, free=free
    ), reason
