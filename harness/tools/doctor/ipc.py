"""CUDA IPC as a weight sync needs it: a handle of this rank's memory, opened by a child that sees what its engine will see.

The child is `python ipc.py INDEX`, with the engine's CUDA_VISIBLE_DEVICES and nothing of torchrun's; the pickled handle comes
on its standard input, and it answers with one JSON line.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

BYTES = 1 << 20
PATTERN = 0x5A


def start(
    device: torch.device, index: int, environment: Mapping[str, str]
) -> tuple["subprocess.Popen[bytes]", Callable[[float], dict[str, Any]]]:
    """A child that opens a handle of memory on `device` as its index-th GPU, and a function that waits for its answer.

    The function raises TimeoutError, and RuntimeError where the child failed. Here RuntimeError where no handle is made.
    """
    torch.cuda.set_device(device)
    tensor = torch.full((BYTES,), PATTERN, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    handle = tensor.untyped_storage()._share_cuda_()
    child = subprocess.Popen(
        [sys.executable, "-P", __file__, str(index)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
    )

    def answer(seconds: float) -> dict[str, Any]:
        try:
            told, errors = child.communicate(pickle.dumps(handle[1:]), timeout=seconds)
        except subprocess.TimeoutExpired as late:
            child.kill()
            child.wait()
            raise TimeoutError(f"the child did not answer within {seconds:.0f} s") from late
        assert tensor is not None  # the memory lives until the child has read it
        if child.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"the child ended with exit code {child.returncode}")
        return dict(json.loads(told))

    return child, answer


def open_handle(index: int, handle: tuple[Any, ...]) -> dict[str, Any]:
    """In the child: read the other process's memory. Raises RuntimeError for other bytes than it wrote."""
    torch.cuda.set_device(index)
    storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
    seen = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)[:BYTES]
    if not bool((seen == PATTERN).all()):
        raise RuntimeError("the handle opened on memory that holds other bytes")
    return {"uuid": str(torch.cuda.get_device_properties(index).uuid)}


if __name__ == "__main__":
    print(json.dumps(open_handle(int(sys.argv[1]), pickle.load(sys.stdin.buffer))), flush=True)
    os._exit(0)  # before Python takes the shared memory apart
