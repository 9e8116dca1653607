"""Rank 0 is killed inside gather_object, as SGLang's SIGQUIT handler does to a rank whose scheduler died. What the other
rank says then is the same whatever killed it, and proves nothing about the cause."""

import os
import signal
import time

from harness.tools.repro import ranks, variant
from harness.tools.repro.case import Case

CASE = Case(
    title="a rank that is killed shows on the others as a closed connection only",
    needs="cpu",
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

    ranks.start(work)


if __name__ == "__main__":
    variant.main(program)
