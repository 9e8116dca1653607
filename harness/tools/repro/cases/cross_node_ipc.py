"""A payload of rank 0 does not open on another host.

Handles name memory of the host that made them: each host must give its own to the engine's ranks on it.
"""

import multiprocessing
import os

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_on_two_hosts

CASE = Case(
    needs="hosts",
    broken="rank 0's payload for the ranks of both hosts",
    healthy="each host's rank opens its own payload",
    signature=(r"rank 1: RuntimeError: unable to open shared memory object",),
)


def program(broken: bool) -> None:
    if "RANK" not in os.environ:
        run_on_two_hosts()
    import torch
    import torch.distributed as dist
    import torch.multiprocessing

    from harness.rollout.sglang_api import deserialize, serialize

    # The other strategy goes through a socket in the file system, which emulated hosts share and real ones do not.
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.arange(6.0)
    payloads: list[bytes | None] = [None, None]
    dist.all_gather_object(payloads, serialize(weight))
    if rank == 1:
        try:  # in another process, as a scheduler does: the sender's own would not need the handle
            with multiprocessing.get_context("fork").Pool(1) as scheduler:
                print("rank 1 has", scheduler.apply(deserialize, (payloads[0 if broken else 1],)).tolist(), flush=True)
        except Exception as error:
            print(f"rank 1: {type(error).__name__}: {error}", flush=True)
            raise
    dist.barrier()
