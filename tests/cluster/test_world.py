import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.cluster import world
from harness.cluster.placement import RankLocation
from harness.cluster.world import Launch, WorldError, check_devices, choose_device
from harness.tools.repro.local_ranks import free_port
from tests.cluster.gloo import on_ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_launch_reads_what_torchrun_says() -> None:
    assert Launch.from_environment(TORCHRUN) == Launch(rank=1, world_size=4, local_rank=1, local_world_size=2)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_without_torchrun_the_error_names_the_variable_and_the_command(missing: str) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(WorldError, match=rf"^{missing} is not in the environment; start this with torchrun"):
        Launch.from_environment(environment)


def test_host_identity_is_stable_and_has_three_parts() -> None:
    hostname, boot, namespace = world.host_identity().split("/")
    assert world.host_identity() == f"{hostname}/{boot}/{namespace}"
    assert hostname == socket.gethostname() and len(boot) == 8 and namespace.startswith("net:[")


def _identity(rank: int) -> tuple[str, list[int]]:
    return world.host_identity(), world.all_gather(rank)


def test_processes_of_one_host_have_one_identity(tmp_path: Path) -> None:
    assert on_ranks(_identity, 2, tmp_path) == [(world.host_identity(), [0, 1])] * 2


def test_launch_hosts_names_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    real = world.host_identity()
    monkeypatch.setenv("HARNESS_HOST", "host1")
    assert world.host_identity() == "/".join(["host1", *real.split("/")[1:]])


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


def test_the_cpu_is_chosen_where_it_is_wanted() -> None:
    assert choose_device("cpu", Launch.from_environment(TORCHRUN)) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_auto_is_the_cpu_and_cuda_an_error() -> None:
    launch = Launch.from_environment(TORCHRUN)
    assert choose_device("auto", launch) == torch.device("cpu")
    with pytest.raises(WorldError, match=r'engine\.device = "cuda" but rank 1 sees no GPU; set engine\.device = "cpu"'):
        choose_device("cuda", launch)


@pytest.mark.parametrize("wanted", ["cpu", "auto"])
def test_apart_needs_gpus(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WorldError, match=r"parallel.colocate = false but rank 1 has no GPU to use; set it to"):
        choose_device(wanted, Launch.from_environment(TORCHRUN), colocate=False)


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


@pytest.mark.parametrize("stream", ["/dev/full", "closed"])
def test_an_exit_is_an_exit_although_what_was_printed_cannot_be_written(stream: str) -> None:
    code = "from harness.runtime.processes import hard_exit; print('x' * 99); hard_exit(7)"
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            stdout=full if stream == "/dev/full" else writing,
            timeout=120,
        )
    os.close(writing)
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


def own_engine_offsets(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """engine_offset of this rank's location: separate, colocated, and separate on the CPU, where it means nothing."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return (
        world.own_location(on_cpu=False, colocate=False).engine_offset,
        world.own_location(on_cpu=False).engine_offset,
        world.own_location(on_cpu=True, colocate=False).engine_offset,
    )


def _open(rank: int, ranks: int) -> tuple[int, str, tuple[str, ...], list[int], list[int]]:
    """open_world as torchrun's rank would, on a group of its own beside the one of the helper."""
    launch = Launch(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    world.dist.destroy_process_group()
    try:
        with world.open_world(launch, torch.device("cpu"), timeout_seconds=30) as found:
            locations = found.locations
            answer = (
                found.rank,
                found.host,
                found.hosts,
                [s.rank for s in locations],
                [s.local_rank for s in locations],
            )
        assert not world.dist.is_initialized()
    finally:
        world.dist.init_process_group("gloo", store=world.dist.HashStore(), rank=0, world_size=1)
    return answer


def test_open_world_gathers_locations_and_closes_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    host = world.host_identity()
    assert on_ranks(_open, 1, tmp_path, 1) == [(0, host, (host,), [0], [0])]
