import json
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from harness.cluster import world
from harness.cluster.placement import RankLocation
from harness.cluster.world import Launch, WorldError, check_devices, choose_device
from harness.tools.repro.local_ranks import free_port

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_launch_reads_what_torchrun_says() -> None:
    assert Launch.from_environment(TORCHRUN) == Launch(rank=1, world_size=4, local_rank=1, local_world_size=2)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_without_torchrun_the_error_names_the_variable_and_the_command(missing: str) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(WorldError, match=rf"^{missing} is not in the environment; start this with torchrun"):
        Launch.from_environment(environment)


def test_host_identity_has_three_parts_and_launch_hosts_names_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hostname, boot, namespace = world.host_identity().split("/")
    assert hostname == socket.gethostname() and len(boot) == 8 and namespace.startswith("net:[")
    monkeypatch.setenv("HARNESS_HOST", "host1")
    assert world.host_identity() == f"host1/{boot}/{namespace}"


def test_only_variables_that_change_behaviour_are_compared_between_ranks() -> None:
    environment = {"NCCL_DEBUG": "INFO", "HOME": "mine", "SGLANG_IS_IN_CI": "1", "MY_CUDA_THING": "x"}
    assert world.behaviour(environment) == {"NCCL_DEBUG": "INFO", "SGLANG_IS_IN_CI": "1"}


@pytest.mark.parametrize(("device", "gpu"), [("cpu", None), ("cuda:1", 3)])
def test_the_gpu_of_an_engine_rank_is_as_far_from_its_trainers_as_the_location_says(
    device: str, gpu: int | None
) -> None:
    locations = tuple(
        RankLocation(rank=rank, host="a", local_rank=rank, visible=None, engine_offset=2) for rank in range(2)
    )
    ranks = {"rank": 1, "world_size": 2, "local_rank": 1, "host": "a", "locations": locations}
    assert world.World(device=torch.device(device), **ranks).engine_gpu == gpu


@pytest.mark.parametrize(("second", "names"), [("a", ["a-rank0", "a-rank0", "a-rank2"]), ("b", ["a", "a", "b"])])
def test_two_launchers_of_one_host_have_two_names(second: str, names: list[str]) -> None:
    """By which each keeps its own verdict in the run directory."""
    hosts = [("a/1/net", 0), ("a/1/net", 1), (f"{second}/1/net", 0)]
    places = tuple(
        RankLocation(rank=rank, host=host, local_rank=local, visible=None) for rank, (host, local) in enumerate(hosts)
    )
    made = {"world_size": 3, "device": torch.device("cpu"), "locations": places}
    worlds = [world.World(rank=rank, local_rank=local, host=host, **made) for rank, (host, local) in enumerate(hosts)]
    assert [each.launcher for each in worlds] == names


def test_without_gpus_auto_is_the_cpu_and_what_needs_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    launch = Launch.from_environment(TORCHRUN)
    for wanted in ("cpu", "auto"):
        assert choose_device(wanted, launch) == torch.device("cpu")
        with pytest.raises(WorldError, match=r"parallel.colocate = false but rank 1 has no GPU to use; set it to"):
            choose_device(wanted, launch, colocate=False)
    with pytest.raises(WorldError, match=r'engine\.device = "cuda" but rank 1 sees no GPU; set engine\.device = "cpu"'):
        choose_device("cuda", launch)


def test_a_host_without_a_gpu_among_others_is_named_on_every_rank() -> None:
    store = dist.HashStore()
    for rank, device in ((0, "cuda"), (1, "cpu")):
        store.set(f"device/{rank}", json.dumps([device, f"host{rank}"]))
    for rank, device in ((0, "cuda"), (1, "cpu")):
        with pytest.raises(
            WorldError, match="^rank 1 on host1 finds no GPU that works, and rank 0 on host0 does: mend"
        ):
            check_devices(store, rank, 2, device, f"host{rank}/x/y")
    check_devices(dist.HashStore(), 0, 1, "cpu", "host0/x/y")


def test_an_exit_is_an_exit_although_what_was_printed_cannot_be_written() -> None:
    code = "from harness.runtime.processes import hard_exit; print('x' * 99); hard_exit(7)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=full, timeout=120)
    assert done.returncode == 7


def test_apart_needs_two_visible_gpus_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of GPUs is made up; choosing looks at nothing else of them."""
    launch = Launch.from_environment(TORCHRUN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert own_engine_offsets(monkeypatch) == (2, 0, 0)
    assert choose_device("auto", launch, colocate=False) == torch.device("cuda", 1)
    for count in (1, 3):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(
            ValueError, match=rf"rank 1 .* sees {count} GPUs .*, but parallel.colocate = false needs 4,"
        ):
            choose_device("cuda", launch, colocate=False)


def own_engine_offsets(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """engine_offset of this rank's location: separate, colocated, and separate on the CPU, where it means nothing."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cases: list[tuple[bool, bool]] = [(False, False), (False, True), (True, False)]
    return tuple(world.own_location(on_cpu=on_cpu, colocate=colocate).engine_offset for on_cpu, colocate in cases)


def test_open_world_gathers_locations_and_closes_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **launch}.items():
        monkeypatch.setenv(name, value)
    host = world.host_identity()
    with world.open_world(Launch.from_environment(launch), torch.device("cpu"), timeout_seconds=30) as found:
        assert (found.rank, found.host, found.hosts) == (0, host, (host,))
        assert [(each.rank, each.local_rank) for each in found.locations] == [(0, 0)]
    assert not dist.is_initialized()
