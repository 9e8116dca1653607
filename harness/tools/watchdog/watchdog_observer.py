"""The watchdog as an observer of a run: the client in every rank, and what it needs of torch and of the cluster."""

import os
from pathlib import Path
from typing import Any

import torch

from harness.cluster.network import own_address
from harness.cluster.placement import host_name
from harness.cluster.world import Launch, all_gather, host_identity
from harness.config.schema import Config
from harness.runtime import scratch
from harness.runtime.observer import RunContext
from harness.runtime.phases import deadline
from harness.tools.watchdog.client import WatchdogClient, WatchdogSettings

FLIGHT_RECORDS = "2000"  # collectives that torch's flight recorder keeps


class WatchdogObserver(WatchdogClient):
    """Starts the watchdog of this host with its first rank, and reports this rank's phases and failures to it."""

    def launched(self, config: Config, launch: Launch) -> None:
        """Connect to the watchdog, whose name is that of the run's temporary folder on this host."""
        limits = config.run
        settings: WatchdogSettings = {
            "host": host_name(host_identity()),
            "world_size": launch.world_size,
            "local_world_size": launch.local_world_size,
            "idle_seconds": limits.timeout_seconds,
            "heartbeat_timeout": limits.heartbeat_timeout,
        }
        timeouts, otherwise = limits.phase_timeouts, limits.timeout_seconds
        self.connect(launch.rank, launch.local_rank, lambda phase: deadline(phase, timeouts, otherwise), settings)
        scratch.enter(self.own.watchdog)
        os.environ.setdefault(flight_recorder_variable(torch.__version__), FLIGHT_RECORDS)  # before any communicator

    def met(self, run: RunContext) -> None:
        """Let the watchdogs of all hosts find each other. A collective call of all ranks."""
        self.on_exit.append(run.events.close)
        if run.world.device.type == "cuda":
            self.on_deadline.append(lambda folder: dump_flight_records(folder, run.world.rank))
        self.meet(all_gather(self.at(own_address(os.environ))), run.folder)


def flight_recorder_variable(version: str) -> str:
    """Return the variable of FLIGHT_RECORDS in this torch; since 2.8 it warns of the older name, on every rank."""
    release = tuple(int(part) for part in version.split(".")[:2])
    return "TORCH_FR_BUFFER_SIZE" if release >= (2, 8) else "TORCH_NCCL_TRACE_BUFFER_SIZE"


def dump_flight_records(folder: Path, rank: int) -> None:
    """Write NCCL's last collectives on this rank, as torch keeps them: read by torch's `torchfrtrace`."""
    dump: Any = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # only in a torch built with NCCL
    if dump:
        (folder / f"flight-record-rank{rank}.pickle").write_bytes(dump())
