"""Under torchrun an engine's own process group waits for a store that no process serves.

With torchrun's TORCHELASTIC_USE_AGENT_STORE=True, torch makes every rank a client of any store, a private one too.
"""

import datetime
import os
import subprocess
import sys

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import free_port

CASE = Case(
    broken="TORCHELASTIC_USE_AGENT_STORE stays in the environment, as torchrun sets it",
    healthy="it is taken out first",
    signature=(r"client socket has timed out after \d+ ?ms while trying to connect",),
    timeout_seconds=90,
)
TIMEOUT = datetime.timedelta(seconds=4)


def program(broken: bool) -> None:
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
        command = [*torchrun, "--rdzv-endpoint=localhost:0", *sys.argv, str(free_port())]
        sys.exit(subprocess.run(command).returncode)
    import torch.distributed as dist

    print("TORCHELASTIC_USE_AGENT_STORE =", os.environ["TORCHELASTIC_USE_AGENT_STORE"])
    if not broken:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    rank, port = int(os.environ["RANK"]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=TIMEOUT)
    dist.barrier()
    print(f"rank {rank}: the engine's group is up", flush=True)
