"""Runs cells of the matrix of faults, several at a time: forked ranks of the product's own harness.run, with real gloo and
the real watchdog, under a stand-in for torchrun; no SGLang.

Arguments: a JSON file with cells (name, folder, words, and disk: options of a tmpfs for the folder, or ""), and one for
the results: exit code, seconds and output of each, and what was left of it.
"""

import json
import os
import signal
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from harness.run import run
from harness.runtime.observer import RunContext
from harness.runtime.phases import MEET, PHASES, RUN, STEP_PHASES
from harness.runtime.processes import is_alive
from harness.tools.command_line import parse
from harness.tools.hosts import kernel
from harness.tools.observers import standard_observers
from tests.free_port import free_port

RANKS, AT_ONCE = 2, 4
GIVEN_UP_SECONDS, LINGER_SECONDS = 60.0, 8.0  # a report of the failed run may take 5 s
LOOK_SECONDS = 0.1
"""How often torchrun looks after its ranks."""


def phases_only(context: RunContext) -> str:
    """A job of harness.run: every phase in order, with a collective at both ends, and a file in /dev/shm."""
    memory = shared_memory.SharedMemory(memory_name(os.getsid(0), context.world.rank), create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]
    time.sleep(1.2)  # until the watchdog has looked
    for step in range(context.config.run.steps):
        for name in PHASES:
            if name not in (MEET, RUN):
                with context.events.phase(name, step if name in STEP_PHASES else None):
                    dist.all_reduce(torch.ones(1))
                    dist.all_reduce(torch.ones(1))
    memory.unlink()
    return "PASSED: all phases"


def memory_name(session: int, rank: int) -> str:
    return f"harness-test-{session}-{rank}"


def be_rank(cell: dict[str, Any], rank: int, port: int) -> None:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)},
        **{"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"},
    }
    words = ["configs/cpu/quickstart.toml", "--run.dir", cell["folder"], *cell["words"]]
    config = parse(words).config
    os._exit(run(config, standard_observers(config), lambda: phases_only))


def agent(cell: dict[str, Any]) -> int:
    """As torchrun: starts the ranks, looks after them, ends all at the first that fails, whose exit code it returns."""
    ranks, port = [], free_port()
    for rank in range(RANKS):
        if not (pid := os.fork()):
            be_rank(cell, rank, port)
        ranks.append(pid)
    first = 0
    while ranks:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                if code and not first:
                    first = code
                    for other in ranks:
                        os.kill(other, signal.SIGTERM)
        time.sleep(LOOK_SECONDS)
    return first & 0xFF


def be_host(cell: dict[str, Any]) -> None:
    """In a session of its own, where a small disk can be had for it alone."""
    os.setsid()
    log = os.open(cell["folder"] + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.makedirs(cell["folder"])
    if cell["disk"]:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("none", cell["folder"], "tmpfs", 0, cell["disk"])
    os._exit(agent(cell))


def left_of(session: int) -> list[str]:
    """What lives of a session, or is the watchdog of it, a moment later; and files of its ranks in /dev/shm."""
    end = time.monotonic() + LINGER_SECONDS
    while True:
        found = [name for rank in range(RANKS) if Path("/dev/shm", name := memory_name(session, rank)).exists()]
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                if (os.getsid(process.pid) == session or f"-{session}-" in words) and is_alive(process):
                    found.append(words)
            except (psutil.Error, ProcessLookupError):
                continue  # it ended while we looked
        if not found or time.monotonic() > end:
            return found
        time.sleep(LOOK_SECONDS)


def main() -> None:
    waiting, results = json.loads(Path(sys.argv[1]).read_text()), {}
    running: dict[int, tuple[dict[str, Any], float]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            cell = waiting.pop(0)
            if not (pid := os.fork()):
                be_host(cell)
            running[pid] = (cell, time.monotonic())
        for pid, (cell, started) in list(running.items()):
            seconds = time.monotonic() - started
            if seconds > GIVEN_UP_SECONDS:
                os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                left = left_of(pid)
                said = Path(cell["folder"] + ".log").read_text(errors="replace")
                code = os.waitstatus_to_exitcode(status)
                results[cell["name"]] = {"code": code, "seconds": seconds, "left": left, "said": said}
        time.sleep(LOOK_SECONDS / 2)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
