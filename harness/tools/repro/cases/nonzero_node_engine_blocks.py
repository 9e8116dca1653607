"""The constructor of an engine's second node never returns.

Every node but the first serves forever, unless a variable says otherwise.
"""

import datetime
import os
from typing import Any

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import free_port, run_ranks
from harness.tools.repro.tiny_engine import prepare_process, tiny_engine

CASE = Case(
    broken="SGLANG_BLOCK_NONZERO_RANK_CHILDREN is not set",
    healthy='it is "0"',
    signature=(r"wait timeout after \d+ ?ms, keys: /node 1 is up",),
    engine=True,
)
PATIENCE = datetime.timedelta(seconds=15)


def program(broken: bool) -> None:
    address, port = f"127.0.0.1:{free_port()}", free_port()
    os.environ.pop("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", None)
    if not broken:
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    prepare_process(ranks=2)

    def work(rank: int) -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=datetime.timedelta(seconds=280))
        node: dict[str, Any] = {"tp_size": 2, "nnodes": 2, "node_rank": rank, "dist_init_addr": address}
        with tiny_engine(**node):
            store.set(f"node {rank} is up", "")
            store.wait(["node 0 is up"])
            store.wait(["node 1 is up"], PATIENCE)
            store.set(f"node {rank} is done", "")
            store.wait(["node 0 is done", "node 1 is done"])

    run_ranks(work)
