"""Ranks for cases without torchrun: forked, so that torch is imported once, or one on each of two emulated hosts."""

import datetime
import errno
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from typing import Any, NoReturn

from harness.tools.environments import REPOSITORY

HOSTS_SCRIPT = str(REPOSITORY / "launch" / "hosts.py")
PATIENCE_SECONDS = 2.0
"""Time for the other ranks to fail too, once one has failed."""
PORTS = range(10_000, 20_000)
"""Below those that Linux gives to connections: a connection could take such a port before it is listened on. Below
those of engines, too."""


def run_ranks(work: Callable[[int], None], ranks: int = 2) -> NoReturn:
    """Run work(rank) in a process for each rank, and end this process, with 1 if any of them failed.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun does, and as by torchrun the others are killed
    soon after one has failed. A rank's exception is printed after its rank.
    """
    import torch.distributed  # noqa: F401 - once for all of them

    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=_run_rank, args=(work, rank)) for rank in range(ranks)]
    for process in running:
        process.start()
    failed = False
    while running and not failed:
        connection.wait([process.sentinel for process in running])
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
        print(f"rank {rank} failed: {''.join(traceback.format_exception_only(error))}", flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # without Python's teardown, in which a thread of gloo may abort


def run_on_two_hosts(*options: str) -> NoReturn:
    """Run this program again as one rank on each of two emulated hosts, and end this process with their exit code."""
    hosts = [sys.executable, HOSTS_SCRIPT, "--hosts", "2", "--ranks-per-host", "1", "--patience", "3", *options]
    sys.exit(subprocess.run([*hosts, "--", *sys.argv]).returncode)


def join_group(seconds: float = 20.0, **options: Any) -> None:
    """Join gloo's group of all ranks, and say so once all have."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds), **options)
    dist.barrier()
    print(f"rank {dist.get_rank()}: the group is up", flush=True)


def free_port() -> int:
    """Return a port that was free a moment ago. Raise OSError (EADDRINUSE) if none of many is free."""
    # From the system's randomness, as programs that are seeded alike would choose the same.
    for port in random.SystemRandom().choices(PORTS, k=100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(
        errno.EADDRINUSE, f"no port of {PORTS.start} to {PORTS.stop - 1} is free on this host; end what uses them"
    )
