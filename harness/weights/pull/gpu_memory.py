"""CUDA IPC by the driver's own calls: whole allocations, opened under the device that reads them.

torch's own sharing is of no use here. It holds the allocation until the reader gives it back, and an offload of the
trainer's parameters must not wait for that. It also opens the memory under the owner's device, which costs a CUDA
context there.
"""

import ctypes
from dataclasses import dataclass

LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class CudaCallFailed(RuntimeError):
    """A call of the CUDA driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the current device, as another process can open it."""

    base: int
    """Address in the process that exports it."""
    nbytes: int
    handle: bytes


def export_allocation(address: int) -> Allocation:
    """Return the allocation that holds this address of the current device. Raise CudaCallFailed."""
    base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    driver = _driver()
    found = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address))
    _check(found, "cuMemGetAddressRange")
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), base), "cuIpcGetMemHandle")
    return Allocation(base.value, nbytes.value, bytes(handle.reserved))


def open_allocation(handle: bytes) -> int:
    """Return the address at which the current device reaches another process's allocation. Raise CudaCallFailed."""
    address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
    driver = _driver()
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    _check(driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, LAZY_PEER_ACCESS), "cuIpcOpenMemHandle")
    return address.value


def close_allocation(address: int) -> None:
    """Give back what `open_allocation` returned. Raise CudaCallFailed."""
    _check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address)), "cuIpcCloseMemHandle")


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, call: str) -> None:
    if code == 0:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    raise CudaCallFailed(f"{call} failed: {(name.value or b'unknown').decode()} ({code})")
