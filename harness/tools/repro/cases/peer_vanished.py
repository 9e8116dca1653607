"""A rank that is killed shows on the others as a closed connection only.

Whatever killed it, the error is the same, and says nothing about the cause.
"""

import os
import signal
import time

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_ranks

CASE = Case(
    broken="rank 0 is killed by SIGKILL before it takes part",
    healthy="it takes part",
    signature=(r"Connection closed by peer|Connection reset by peer",),
)


def program(broken: bool) -> None:
    def work(rank: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if broken and rank == 0:
            time.sleep(0.5)  # rank 1 is waiting for it by then
            os.kill(os.getpid(), signal.SIGKILL)
        gathered: list[object] | None = [None, None] if rank == 0 else None
        dist.gather_object(b"x" * 1_000_000, gathered, dst=0)
        dist.barrier()
        print(f"rank {rank}: gathered", flush=True)

    run_ranks(work)
