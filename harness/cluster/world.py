"""Ranks, hosts, the default process group, and the environment for child processes."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from harness.cluster import network
from harness.cluster.network import HostAddress
from harness.cluster.placement import RankLocation, engine_gpu_of, host_name, parse_visible
from harness.runtime import redact

BEHAVIOUR_PREFIXES = ("NCCL_", "CUDA_", "SGLANG_", "SGL_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "MKL_")


class WorldError(ValueError):
    """A process was not started as a rank, or the ranks do not agree. Exit code 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The place of a process among all ranks, while the default process group is open."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    """Identity of the host: hostname, boot id and network namespace."""
    device: torch.device
    locations: tuple[RankLocation, ...]
    """Every rank's location, by rank."""
    addresses: Mapping[str, HostAddress] = field(default_factory=dict)
    """The address of each host for the other hosts, by host."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Distinct hosts, in the order of their first ranks."""
        return tuple(dict.fromkeys(location.host for location in self.locations))

    @property
    def launcher(self) -> str:
        """The launcher of this rank, for people: its host, with its first rank if the host has several launchers."""
        first = self.rank - self.local_rank
        here = [location for location in self.locations if location.host == self.host and location.local_rank == 0]
        return host_name(self.host) + (f"-rank{first}" if len(here) > 1 else "")

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """The kind of device that trainer and engine run on."""
        return "cpu" if self.device.type == "cpu" else "cuda"

    @property
    def engine_gpu(self) -> int | None:
        """Visible index of the GPU that this rank's engine rank runs on; None on the CPU."""
        return None if self.device.index is None else self.device.index + self.locations[self.rank].engine_offset


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The variables that torchrun sets for this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """The number of ranks that torchrun started on this host."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Launch":
        """Read torchrun's variables. Raise WorldError if torchrun did not start this process."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in names if name not in environment]
        if missing:
            raise WorldError(
                f"{missing[0]} is not in the environment; start this with"
                " torchrun --nnodes=1 --nproc-per-node=2 SCRIPT [ARGUMENTS]."
            )
        return cls(**{name.lower(): int(environment[name]) for name in names})


def host_identity() -> str:
    """Return hostname, boot id and network namespace. Two containers or namespaces of one machine are two hosts.

    HARNESS_HOST replaces the hostname. launch/hosts.py sets it to emulate hosts without namespaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{os.environ.get('HARNESS_HOST') or socket.gethostname()}/{boot[:8]}/{os.readlink('/proc/self/ns/net')}"


def own_location(on_cpu: bool, colocate: bool = True) -> RankLocation:
    """Return this rank's location, on the CPU without GPUs. Needs torchrun's environment.

    colocate: whether engine ranks run on their trainer rank's GPU (parallel.colocate).
    """
    launch = Launch.from_environment(os.environ)
    return RankLocation(
        rank=launch.rank,
        host=host_identity(),
        local_rank=launch.local_rank,
        visible=None if on_cpu else parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES")),
        gpu_count=None if on_cpu else torch.cuda.device_count(),
        engine_offset=launch.local_world_size if not colocate and not on_cpu else 0,
    )


def choose_device(wanted: str, launch: Launch, colocate: bool = True) -> torch.device:
    """Choose the device of this rank's trainer for engine.device = wanted.

    colocate: see own_location. Raise ValueError if too few GPUs are visible.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if not colocate:
            raise WorldError(f"parallel.colocate = false but rank {launch.rank} has no GPU to use; set it to true.")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise WorldError(f'engine.device = "{wanted}" but rank {launch.rank} sees no GPU; set engine.device = "cpu".')
    engine_gpu_of(own_location(False, colocate))
    return torch.device(
        "cuda", 0 if count == 1 else launch.local_rank
    )  # if it is 1, a wrapper gave each rank its own GPU


@contextmanager
def open_world(
    launch: Launch, device: torch.device, timeout_seconds: float, colocate: bool = True, interface: str = ""
) -> Iterator[World]:
    """Open the default process group (gloo, on CUDA also NCCL), and destroy it at the end.

    colocate: see own_location. interface: network.interface, see network.choose. On several hosts, this process's
    environment gets the variables that make gloo, NCCL and SGLang use the chosen interfaces. Raise NetworkError if an
    interface does not fit, and TimeoutError if ranks are missing.
    """
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    location = own_location(device.type == "cpu", colocate)
    check_devices(dist.PrefixStore("harness-device", store), rank, world_size, device.type, location.host)
    addresses = network.agree(dist.PrefixStore("harness-network", store), rank, world_size, location.host, interface)
    if len(addresses) > 1:
        os.environ.update(network.variables(addresses[location.host], os.environ))
    group_store = dist.PrefixStore("harness-world", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield World(
            rank=launch.rank,
            world_size=launch.world_size,
            local_rank=launch.local_rank,
            host=location.host,
            device=device,
            locations=tuple(all_gather(location)),
            addresses=addresses,
        )
    finally:
        dist.destroy_process_group()


def check_devices(store: dist.Store, rank: int, world_size: int, device: str, host: str) -> None:
    """Raise WorldError on every rank if some have a GPU and others not: their communicators would not fit together.

    store: open on every rank and used for nothing else. A collective call of all ranks, before any communicator.
    """
    store.set(f"device/{rank}", json.dumps([device, host_name(host)]))
    first: dict[str, str] = {}
    for other, value in enumerate(network.of_all(store, "device", world_size)):
        kind, where = json.loads(value)
        first.setdefault(kind, f"rank {other} on {where}")
    if len(first) > 1:
        raise WorldError(
            f"{first['cpu']} finds no GPU that works, and {first['cuda']} does: mend the first one's GPUs, or set"
            ' engine.device = "cpu"'
        )


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank of the group. They must be picklable."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def behaviour(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how torch, NCCL, CUDA or SGLang behave, with secrets redacted."""
    return redact.values(
        {name: environment[name] for name in sorted(environment) if name.startswith(BEHAVIOUR_PREFIXES)}
    )
