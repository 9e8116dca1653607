"""One rank's GPU, seen through NVML (nvidia-ml-py, which SGLang brings), else through nvidia-smi."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

SMI_SECONDS = 8.0
SMI_FIELDS = "uuid,name,memory.total,memory.free,driver_version"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process, and the GPU memory that it holds in bytes; 0 where that is not told."""

    pid: int
    name: str
    used: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU before this process uses it. Sizes in bytes."""

    uuid: str
    name: str
    total: int
    free: int
    processes: tuple[GpuProcess, ...]
    nvlink: Mapping[str, bool] | None = None
    """UUID of each other GPU of this host -> whether NVLink connects them; None: not known, see `told_by`."""
    told_by: str = "NVML"


@dataclass(slots=True)
class Nvml:
    """NVML's devices by UUID."""

    library: Any
    devices: dict[str, Any] = field(default_factory=dict)


def look_at_gpu(device: torch.device | None) -> tuple[Gpu | None, str]:
    """The GPU of a trainer on `device`, or None and why."""
    if device is None or device.type == "cpu":
        return None, without_gpu()
    uuid = uuid_of(device.index)
    try:
        with nvml() as found:
            return _by_nvml(found, uuid), ""
    except (ImportError, RuntimeError) as error:
        reason = str(error)
    try:
        return _by_smi(uuid, reason), ""
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        told_by = f"torch alone ({reason}; {error})"
        return Gpu(uuid=uuid, name=name, total=total, free=free, processes=(), told_by=told_by), ""


def without_gpu() -> str:
    """Why this rank runs on the CPU."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable GPU"
    return "the config wants the CPU"


def uuid_of(index: int) -> str:
    """As nvidia-smi -L prints it. Makes no CUDA context."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def driver_versions() -> dict[str, str]:
    """The driver, and the newest CUDA that it runs; "none" where there is none."""
    try:
        with nvml() as found:
            library = found.library
            number = library.nvmlSystemGetCudaDriverVersion_v2()
            return {
                "driver": _text(library.nvmlSystemGetDriverVersion()),
                "driver's cuda": f"{number // 1000}.{number % 1000 // 10}",
            }
    except (ImportError, RuntimeError):
        return {"driver": "none" if not torch.cuda.is_available() else "unknown without nvidia-ml-py"}


@contextmanager
def nvml() -> Iterator[Nvml]:
    """Raises ImportError without nvidia-ml-py, RuntimeError where NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            yield Nvml(pynvml, {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles})
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error


def _by_nvml(found: Nvml, uuid: str) -> Gpu:
    library = found.library
    handle = found.devices.get(uuid) or library.nvmlDeviceGetHandleByUUID(uuid)  # a MIG device is in no list
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        uuid=uuid,
        name=_text(library.nvmlDeviceGetName(handle)),
        total=int(memory.total),
        free=int(memory.free),
        processes=tuple(
            GpuProcess(pid=each.pid, name=process_name(each.pid), used=int(each.usedGpuMemory or 0))
            for each in library.nvmlDeviceGetComputeRunningProcesses(handle)
        ),
        nvlink={other: _linked(library, handle, there) for other, there in found.devices.items() if other != uuid},
    )


def _linked(library: Any, one: Any, other: Any) -> bool:
    status = library.nvmlDeviceGetP2PStatus(one, other, library.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == library.NVML_P2P_STATUS_OK)


def _by_smi(uuid: str, reason: str) -> Gpu:
    """Raises OSError without nvidia-smi, SubprocessError where it fails, ValueError where it says something else."""
    _, name, total, free, _ = _smi(uuid, f"--query-gpu={SMI_FIELDS}")[0]
    processes = [
        GpuProcess(pid=int(pid), name=process_name(int(pid)), used=int(used) << 20 if used.isdecimal() else 0)
        for pid, used in _smi(uuid, "--query-compute-apps=pid,used_memory")
    ]
    mebibyte = 1 << 20
    return Gpu(
        uuid=uuid,
        name=name,
        total=int(total) * mebibyte,
        free=int(free) * mebibyte,
        processes=tuple(processes),
        told_by=f"nvidia-smi ({reason}; NVLink was not looked at)",
    )


def _smi(uuid: str, query: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("there is no nvidia-smi")
    told = subprocess.run(
        [program, f"--id={uuid}", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=SMI_SECONDS,
        check=True,
    )
    return [[cell.strip() for cell in line.split(",")] for line in told.stdout.splitlines() if line.strip()]


def process_name(pid: int) -> str:
    """NVML counts pids outside the container, where they may be nobody's here."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "not visible from here"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
