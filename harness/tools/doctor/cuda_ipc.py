"""CUDA IPC as a weight sync needs it: a child that sees what this rank's engine will see opens a handle of its memory.

The child is `python cuda_ipc.py INDEX`, with the engine's CUDA_VISIBLE_DEVICES and nothing of torchrun's: it reads the
pickled handle from standard input and prints the UUID of its GPU. It cannot import harness.
"""

import os
import pickle
import subprocess
import sys
from typing import Any

import torch

BYTES = 1 << 20
PATTERN = 0x5A


class IpcChild:
    """A child process that opens memory of `device` as the index-th GPU that it sees. Raise RuntimeError without a handle."""

    def __init__(self, device: torch.device, index: int) -> None:
        torch.cuda.set_device(device)
        self._memory = torch.full((BYTES,), PATTERN, dtype=torch.uint8, device=device)  # lives as long as the child
        torch.cuda.synchronize(device)
        self._handle = self._memory.untyped_storage()._share_cuda_()[1:]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(index)], stdin=pipe, stdout=pipe, stderr=pipe
        )

    def uuid(self, seconds: float) -> str:
        """Return the UUID of the child's GPU. Raise TimeoutError, or RuntimeError if it cannot read the memory.

        Without a CUDA call of this process, which would wait for a collective that hangs.
        """
        try:
            output, errors = self._process.communicate(pickle.dumps(self._handle), timeout=seconds)
        except subprocess.TimeoutExpired as late:
            raise TimeoutError(f"the child did not answer within {seconds:.0f} s") from late
        if self._process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"the child ended with exit code {self._process.returncode}")
        return output.decode().strip()

    def end(self) -> None:
        """Kill the child if it still runs."""
        self._process.kill()
        self._process.wait()


def gpu_uuid(index: int) -> str:
    """Return a GPU's UUID as nvidia-smi -L prints it, without making a CUDA context."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _open_handle(index: int, handle: tuple[Any, ...]) -> str:
    """Read the other process's memory, in the child. Raise RuntimeError for other bytes than it wrote."""
    torch.cuda.set_device(index)
    storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
    seen = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)[:BYTES]
    if not bool((seen == PATTERN).all()):
        raise RuntimeError("the handle opened on memory that holds other bytes")
    return gpu_uuid(index)


if __name__ == "__main__":
    print(_open_handle(int(sys.argv[1]), pickle.load(sys.stdin.buffer)), flush=True)
    os._exit(0)  # before Python takes the shared memory apart
