"""Ranks that differ in NCCL_CUMEM_ENABLE cannot gather.

sglang.Engine sets it to 0 on the rank that builds it. NCCL reads it when a communicator is made, usually later, so that the
ranks offer each other different kinds of memory.
"""

import datetime
import os

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_ranks

CASE = Case(
    needs="several_gpus",
    broken="NCCL_CUMEM_ENABLE=0 on rank 0, as the engine's start leaves it, and 1 on rank 1",
    healthy="NCCL_CUMEM_ENABLE=0 on both ranks",
    signature=(r"ncclUnhandledCudaError|[Cc]uda failure.*invalid argument|ncclInternalError|ncclSystemError",),
    timeout_seconds=90,
)


def program(broken: bool) -> None:
    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist

        os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast memory outlives a process that is killed on some machines
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=30))
        os.environ["NCCL_CUMEM_ENABLE"] = str(int(broken and rank == 1))
        dist.barrier(dist.new_group([0, 1], backend="gloo"))
        gathered = torch.empty(2 << 20, device="cuda")
        dist.all_gather_into_tensor(gathered, torch.full((1 << 20,), float(rank), device="cuda"))
        torch.cuda.synchronize()
        print(f"rank {rank}: gathered {gathered.mean().item()}", flush=True)
        dist.destroy_process_group()

    run_ranks(work)
