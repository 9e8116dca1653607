"""Generating takes longer than the timeout of the group in which the other ranks wait.

TP rank 0 generates, and the others wait for its answer in a collective: 30 minutes by default, here 2 s.
"""

import datetime
import time

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_ranks

CASE = Case(
    broken="generating takes 5 s, the timeout is 2 s",
    healthy="generating takes 0.5 s",
    signature=(r"[Tt]imed out waiting 2000ms for recv operation to complete",),
)


def program(broken: bool) -> None:
    def work(rank: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
        answers = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
        answer = [None]
        if rank == 0:
            time.sleep(5 if broken else 0.5)
        dist.broadcast_object_list(answer, src=0, group=answers)
        print(f"rank {rank}: has the answers", flush=True)

    run_ranks(work)
