"""What cases on GPUs share: memory that something else holds, and ranks that see different GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from harness.tools.repro.local_ranks import run_ranks

if TYPE_CHECKING:
    import torch


def free_bytes(gpu: int = 0) -> int:
    """Return what the driver has; the first call makes this process's CUDA context there."""
    import torch

    torch.cuda.synchronize(gpu)
    return int(torch.cuda.mem_get_info(gpu)[0])


def allocate(size: int, gpu: int = 0) -> torch.Tensor:
    """Return a tensor of that many bytes."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


def two_gpus() -> list[str]:
    """Return two GPUs as CUDA_VISIBLE_DEVICES names them; to be called before CUDA reads it."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    return [each.strip() for each in given.split(",") if each.strip()][:2]


def hand_over(sender_sees: str, receiver_sees: str, by_uuid: bool) -> None:
    """Open a tensor of the sender's first GPU in the receiver, and end this process, with 1 if it did not arrive.

    by_uuid: handles name GPUs by UUID, as in SGLang's schedulers.
    """

    def work(rank: int) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = receiver_sees if rank == 0 else sender_sees
        import torch
        import torch.distributed as dist

        from harness.rollout import sglang_api

        if by_uuid:
            sglang_api.patch_reductions(sglang_api.probe())
        dist.init_process_group("gloo")
        weight = torch.arange(6.0, device="cuda:0")
        handles: list[Any] = [None, None]
        dist.all_gather_object(handles, (sglang_api.serialize(weight), gpu_uuid(weight)))
        if rank == 0:
            payload, sent_from = handles[1]
            opened = sglang_api.deserialize(payload)
            print(f"sent from GPU {sent_from}, opened on {gpu_uuid(opened)}", flush=True)
            if sent_from != gpu_uuid(opened):
                print("WRONG GPU: the handle was opened on another than it was sent from", flush=True)
            print("it holds", opened.tolist(), flush=True)
        dist.barrier()  # the sender's memory must live until then

    run_ranks(work)


def gpu_uuid(tensor: torch.Tensor) -> str:
    """Return the UUID of the GPU that a tensor says it is on."""
    import torch

    return str(torch.cuda.get_device_properties(tensor.device).uuid)
