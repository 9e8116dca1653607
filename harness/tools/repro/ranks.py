"""Ranks of one host for cases that need no torchrun of their own: forked, so that torch is imported once."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

ERROR_LINES = 10
PATIENCE_SECONDS = 2.0
"""What the other ranks get to speak once one has failed."""
POLL_SECONDS = 0.02


def start(work: Callable[[int], None], ranks: int = 2) -> None:
    """Run work(rank) in a process for each rank, and wait for all. Ends this process: with 1 if any of them failed.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun does, and as by torchrun the others are ended soon
    after one has failed. A rank's exception is printed after its rank.
    """
    import torch.distributed  # noqa: F401 - once for all of them

    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = {_fork(work, rank) for rank in range(ranks)}
    deadline = float("inf")
    failed = False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        running.discard(pid)
        if pid and os.waitstatus_to_exitcode(status) != 0 and not failed:
            failed, deadline = True, time.monotonic() + PATIENCE_SECONDS
        if time.monotonic() > deadline:
            for each in running:
                os.kill(each, signal.SIGKILL)
            deadline = float("inf")
        if not pid:
            time.sleep(POLL_SECONDS)
    sys.exit(int(failed))


def free_port() -> int:
    """Free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork(work: Callable[[int], None], rank: int) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = 0
    try:
        work(rank)
    except BaseException as error:
        last = "".join(traceback.format_exception_only(error)).strip().splitlines()[:ERROR_LINES]
        print(f"rank {rank} failed: " + "\n".join(last), flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # without Python's teardown, in which a thread of gloo may abort
