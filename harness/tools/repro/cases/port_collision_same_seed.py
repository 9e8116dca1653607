"""Two engines that draw their port from one seed meet on one port.

A trainer seeds Python's global generator alike on every rank. One server loses, or rank 0 of one engine forms a group with
rank 1 of the other.
"""

import datetime
import random

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_ranks

CASE = Case(
    broken="random.seed(42) on every rank, as the trainer wants it",
    healthy="each engine draws from a generator of its own",
    signature=(r"EADDRINUSE|address already in use|WRONG GROUP",),
)
TIMEOUT = datetime.timedelta(seconds=6)


def program(broken: bool) -> None:
    base = random.SystemRandom().randrange(20000, 28000)

    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist

        engine, tp_rank = divmod(rank, 2)
        draw = random.Random(42 if broken else 42 + engine)
        port = base + draw.randint(100, 1000)
        print(f"engine {engine}: port {port}", flush=True)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=tp_rank, world_size=2, timeout=TIMEOUT
        )
        engines = torch.tensor([engine])
        dist.all_reduce(engines)
        if engines.item() != 2 * engine:
            print(f"WRONG GROUP: engine {engine} rank {tp_rank} met a rank of another engine", flush=True)
        dist.barrier()

    run_ranks(work, 4)
