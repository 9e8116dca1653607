"""An IPv6 address without brackets is no address for torch.distributed.

It reads tcp://fd77::1:29500, which SGLang makes of dist_init_addr, as host fd77 and port ":1:29500".
"""

import datetime

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import free_port

CASE = Case(
    broken="::1:PORT",
    healthy="[::1]:PORT",
    signature=(r"Port could not be cast to integer value as ':1:\d+'",),
)


def program(broken: bool) -> None:
    import torch.distributed as dist

    address = f"{'::1' if broken else '[::1]'}:{free_port()}"
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=0, world_size=1, timeout=datetime.timedelta(seconds=20)
    )
    print(f"a group of {dist.get_world_size()} at {address}")
