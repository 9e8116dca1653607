"""An engine call between two full_tensor() gathers, on one rank only, blocks both.

Its answer waits for the other rank, which is already in the gather of the next tensor.
"""

import datetime

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_ranks

CASE = Case(
    broken="the engine is called between two gathers",
    healthy="all is gathered, then the engine is called",
    signature=(r"[Tt]imed out waiting \d+ms for (send|recv) operation to complete",),
)
TIMEOUT = datetime.timedelta(seconds=4)


def program(broken: bool) -> None:
    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        dist.init_process_group("gloo", timeout=TIMEOUT)
        engine = dist.new_group([0, 1], timeout=TIMEOUT)  # the engine's ranks; its call returns when both have it
        mesh = init_device_mesh("cpu", (2,))
        for _ in range(3):
            shards = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
            shards.full_tensor()
            if broken and rank == 0:
                dist.barrier(engine)
        dist.barrier(engine)
        print(f"rank {rank}: all tensors are with the engine", flush=True)

    run_ranks(work)
