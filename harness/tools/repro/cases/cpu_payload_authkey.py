"""A payload in host memory opens only in a process with the sender's authkey.

The receiver asks the sender's process for the memory, and each rank of torchrun draws an authkey of its own.
"""

import multiprocessing
import os

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_ranks

CASE = Case(
    broken="each rank has an authkey of its own, as processes of torchrun do",
    healthy="all ranks have one authkey",
    signature=(r"AuthenticationError: digest (sent|received) was",),
)


def program(broken: bool) -> None:
    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist

        from harness.rollout.sglang_api import deserialize, serialize

        multiprocessing.current_process().authkey = os.urandom(32) if broken else b"one for all"
        dist.init_process_group("gloo")
        weight = torch.arange(6.0)
        payload = [serialize(weight) if rank == 0 else None]
        dist.broadcast_object_list(payload, src=0)
        if rank == 1 and payload[0]:
            print("rank 1 has", deserialize(payload[0]).tolist(), flush=True)
        dist.barrier()

    run_ranks(work)
