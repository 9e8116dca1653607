"""Nothing listens at the master's address that a rank has.

A closed port stands for a firewall that rejects.
"""

import datetime
import os

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import free_port, run_ranks

CASE = Case(
    broken="rank 1 has another MASTER_PORT than rank 0",
    healthy="both have the same",
    signature=(r"client socket has timed out after \d+ ?ms|timed out after \d+ ?(s|ms|seconds)",),
    failure="multinode-tp-init-timeout",
)
TIMEOUT = datetime.timedelta(seconds=2)


def program(broken: bool) -> None:
    closed = free_port()

    def work(rank: int) -> None:
        import torch.distributed as dist

        if broken and rank == 1:
            os.environ["MASTER_PORT"] = str(closed)
        dist.init_process_group("gloo", timeout=TIMEOUT)
        print(f"rank {rank}: the group is up", flush=True)

    run_ranks(work)
