"""A host's own name resolves to 127.0.1.1, and gloo tells other hosts to connect there.

Debian's installer writes /etc/hosts that way.
"""

import datetime
import os

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_on_two_hosts

CASE = Case(
    needs="hosts",
    broken="/etc/hosts begins with 127.0.1.1 and the host's own name",
    healthy="/etc/hosts has the address that other hosts reach",
    signature=(r"connectFullMesh failed|Connection refused|Connect timeout|connect timeout",),
    failure="multinode-tp-init-timeout",
)


def program(broken: bool) -> None:
    if "RANK" not in os.environ:
        run_on_two_hosts(*["--debian-hosts"] * broken)
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
    dist.barrier()
    print(f"rank {dist.get_rank()}: the group is up", flush=True)
