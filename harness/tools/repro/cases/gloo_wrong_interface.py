"""GLOO_SOCKET_IFNAME names an interface that this host lacks.

It does if one value is set for all hosts.
"""

import os

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_ranks

CASE = Case(
    broken="GLOO_SOCKET_IFNAME=absent0",
    healthy="GLOO_SOCKET_IFNAME=lo",
    signature=(r"Unable to find address for: absent0",),
    failure="multinode-tp-init-timeout",
)


def program(broken: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "absent0" if broken else "lo"

    def work(rank: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
        print(f"rank {rank}: the group is up", flush=True)

    run_ranks(work)
