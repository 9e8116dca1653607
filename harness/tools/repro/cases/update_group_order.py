"""The group over which weights are broadcast: the engine's init_weights_update_group returns when all have joined, the
trainer's rank 0 among them. A trainer that calls it and joins afterwards waits for itself. Rank 1 stands for the engine."""

import datetime

from harness.tools.repro import ranks, variant
from harness.tools.repro.case import Case

CASE = Case(
    title="the trainer waits for the engine's answer that it has joined the update group, before it joins itself",
    needs="cpu",
    broken="the trainer joins after the engine has answered",
    healthy="the trainer joins, and then asks for the answer",
    signature=(r"wait timeout after \d+ ?ms, keys: /(default_pg/)?answer",),
    failure="update-group-hang",
)
ANSWER = datetime.timedelta(seconds=2)


def program(broken: bool) -> None:
    port = ranks.free_port()

    def work(rank: int) -> None:
        import torch.distributed as dist

        calls = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)  # what trainer and engine talk over
        if rank == 0 and broken:
            calls.wait(["answer"], ANSWER)
        dist.init_process_group("gloo", timeout=3 * ANSWER)
        calls.set("answer", "joined") if rank == 1 else calls.wait(["answer"], ANSWER)
        dist.barrier()
        print(f"rank {rank}: the update group is up", flush=True)

    ranks.start(work)


if __name__ == "__main__":
    variant.main(program)
