"""Ranks for cases that need no torchrun of their own: forked, so that torch is imported once; or on two emulated hosts."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

HOSTS_SCRIPT = str(Path(__file__).resolve().parents[3] / "launch" / "hosts.py")
ERROR_LINES = 10
PATIENCE_SECONDS = 2.0
"""Time for the other ranks to fail too, once one has failed."""
POLL_SECONDS = 0.5


def run_ranks(work: Callable[[int], None], ranks: int = 2) -> NoReturn:
    """Run work(rank) in a process for each rank, and end this process, with 1 if any of them failed.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun does, and as by torchrun the others are killed soon
    after one has failed. A rank's exception is printed after its rank.
    """
    import torch.distributed  # noqa: F401 - once for all of them

    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=_run_rank, args=(work, rank)) for rank in range(ranks)]
    for process in running:
        process.start()
    failed = False
    while running and not failed:
        connection.wait([process.sentinel for process in running], POLL_SECONDS)
        failed = any(process.exitcode for process in running)
        running = [process for process in running if process.exitcode is None]
    deadline = time.monotonic() + PATIENCE_SECONDS
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
    sys.exit(int(failed))


def _run_rank(work: Callable[[int], None], rank: int) -> None:
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


def run_on_two_hosts(*options: str) -> NoReturn:
    """Run this program again as one rank on each of two emulated hosts, and end this process with their exit code."""
    hosts = [sys.executable, HOSTS_SCRIPT, "--hosts", "2", "--ranks-per-host", "1", "--patience", "3", *options]
    sys.exit(subprocess.run([*hosts, "--", *sys.argv]).returncode)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
