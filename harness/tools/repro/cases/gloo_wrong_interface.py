"""GLOO_SOCKET_IFNAME names an interface of another host, as it does when one value is set for all of them."""

import os

from harness.tools.repro import ranks, variant
from harness.tools.repro.case import Case

CASE = Case(
    title="GLOO_SOCKET_IFNAME names an interface that this host lacks",
    needs="cpu",
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

    ranks.start(work)


if __name__ == "__main__":
    variant.main(program)
