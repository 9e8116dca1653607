"""The trainer waits for the engine to join the update group before it joins the group itself.

init_weights_update_group returns when all have joined, the trainer's rank 0 among them. Rank 1 stands for the engine.
"""

import datetime

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import free_port, run_ranks

CASE = Case(
    broken="the trainer joins after the engine has answered",
    healthy="the trainer joins, and then asks for the answer",
    signature=(r"wait timeout after \d+ ?ms, keys: /(default_pg/)?answer",),
    failure="update-group-hang",
)
ANSWER = datetime.timedelta(seconds=2)


def program(broken: bool) -> None:
    port = free_port()

    def work(rank: int) -> None:
        import torch.distributed as dist

        calls = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)  # what trainer and engine talk over
        if rank == 0 and broken:
            calls.wait(["answer"], ANSWER)
        dist.init_process_group("gloo", timeout=3 * ANSWER)
        calls.set("answer", "joined") if rank == 1 else calls.wait(["answer"], ANSWER)
        dist.barrier()
        print(f"rank {rank}: the update group is up", flush=True)

    run_ranks(work)
