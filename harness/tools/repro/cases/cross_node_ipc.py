"""A tensor of rank 0 handed to a rank of another host as a handle: handles name memory of the host that made them. Each
host must hand its own to the engine's ranks on it."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from harness.tools.repro import variant
from harness.tools.repro.case import Case

CASE = Case(
    title="a payload of rank 0 does not open on another host",
    needs="hosts",
    broken="rank 0's payload for the ranks of both hosts",
    healthy="each host's rank opens its own payload",
    signature=(r"rank 1: RuntimeError: unable to open shared memory object",),
)
LAUNCHER = Path(__file__).resolve().parents[4] / "launch" / "hosts.py"


def program(broken: bool) -> None:
    if "RANK" in os.environ:
        hand_over(broken)
        return
    hosts = ["--hosts", "2", "--ranks-per-host", "1", "--patience", "3"]
    sys.exit(subprocess.run([sys.executable, str(LAUNCHER), *hosts, "--", __file__, sys.argv[1]]).returncode)


def hand_over(broken: bool) -> None:
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
        try:
            print("rank 1 has", receive(deserialize, payloads[0 if broken else 1]), flush=True)
        except Exception as error:
            print(f"rank 1: {type(error).__name__}: {error}", flush=True)
            raise
    dist.barrier()


def receive(deserialize: object, payload: bytes | None) -> object:
    """Opened in another process, as a scheduler does: the maker's own would not need the handle."""
    with multiprocessing.get_context("fork").Pool(1) as scheduler:
        return scheduler.apply(deserialize, (payload,)).tolist()  # type: ignore[arg-type]


if __name__ == "__main__":
    variant.main(program)
