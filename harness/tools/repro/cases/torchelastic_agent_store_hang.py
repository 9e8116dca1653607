"""Two ranks of torchrun open a second process group on a port of their own, as SGLang's schedulers do.

torchrun exports TORCHELASTIC_USE_AGENT_STORE=True, and torch then makes every rank a client of whichever store it is told:
nobody serves the private port.
"""

import datetime
import os
import subprocess
import sys

from harness.tools.repro import ranks, variant
from harness.tools.repro.case import Case

CASE = Case(
    title="under torchrun an engine's own process group waits for a store that nobody serves",
    needs="cpu",
    broken="TORCHELASTIC_USE_AGENT_STORE stays in the environment, as torchrun sets it",
    healthy="it is taken out first",
    signature=(r"client socket has timed out after \d+ ?ms while trying to connect",),
    seconds=90,
)
TIMEOUT = datetime.timedelta(seconds=4)


def program(broken: bool) -> None:
    if "RANK" in os.environ:
        engine_child(broken, sys.argv[2])
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    itself = [__file__, sys.argv[1], str(ranks.free_port())]
    sys.exit(subprocess.run([*torchrun, *place, *itself]).returncode)


def engine_child(broken: bool, port: str) -> None:
    import torch.distributed as dist

    print("TORCHELASTIC_USE_AGENT_STORE =", os.environ["TORCHELASTIC_USE_AGENT_STORE"])
    if not broken:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=TIMEOUT)
    dist.barrier()
    print(f"rank {rank}: the engine's group is up", flush=True)


if __name__ == "__main__":
    variant.main(program)
