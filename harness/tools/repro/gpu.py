"""What cases on a GPU share: memory that something else holds, and payloads between processes that see different GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.tools.repro import ranks

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
MIB = 1 << 20


def free_bytes(gpu: int = 0) -> int:
    """As the driver says; the first call makes this process's CUDA context there."""
    import torch

    torch.cuda.synchronize(gpu)
    return int(torch.cuda.mem_get_info(gpu)[0])


def filler(size: int, gpu: int = 0) -> torch.Tensor:
    """That many bytes."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


def visible() -> list[str]:
    """What this process may use, as CUDA_VISIBLE_DEVICES names it; call it before CUDA is used, which reads it once."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    return [each.strip() for each in given.split(",") if each.strip()]


def hand_over(sender_sees: str, receiver_sees: str, patched: bool) -> None:
    """A tensor of the sender's first GPU, opened by the receiver. Ends this process, with 1 if it did not arrive.

    patched: handles name GPUs by UUID, on both sides, as SGLang's schedulers always do.
    """

    def work(rank: int) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = receiver_sees if rank == 0 else sender_sees
        import torch
        import torch.distributed as dist

        from harness.rollout import sglang_api

        if patched:
            sglang_api.patch_reductions(sglang_api.probe())
        dist.init_process_group("gloo")
        weight = torch.arange(6.0, device="cuda:0")
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (sglang_api.serialize(weight), gpu_uuid(weight)))
        if rank == 0:
            opened = sglang_api.deserialize(told[1][0])
            sent_from, opened_on = told[1][1], gpu_uuid(opened)
            print(f"sent from GPU {sent_from}, opened on {opened_on}", flush=True)
            if sent_from != opened_on:
                print("WRONG GPU: the handle was opened on another than it was sent from", flush=True)
            print("it holds", opened.tolist(), flush=True)
        dist.barrier()  # the sender's memory must live until then

    ranks.start(work)


def gpu_uuid(tensor: torch.Tensor) -> str:
    """Of the GPU that a tensor says it is on."""
    import torch

    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def nccl_ranks(prepare: Callable[[int], None]) -> None:
    """Two ranks of a GPU each gather a tensor over NCCL, after prepare(rank). Ends this process."""

    def work(rank: int) -> None:
        import datetime

        import torch
        import torch.distributed as dist

        os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast memory outlives a process that is killed on some machines
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=30))
        prepare(rank)
        dist.barrier(dist.new_group([0, 1], backend="gloo"))
        gathered = torch.empty(2 << 20, device="cuda")
        dist.all_gather_into_tensor(gathered, torch.full((1 << 20,), float(rank), device="cuda"))
        torch.cuda.synchronize()
        print(f"rank {rank}: gathered {gathered.mean().item()}", flush=True)
        dist.destroy_process_group()

    ranks.start(work)
