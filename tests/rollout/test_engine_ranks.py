"""Real gloo ranks: an engine that starts on some of its ranks and not on others; and which GPUs they may be on."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness.rollout import engine_ranks
from harness.rollout.engine import EngineFailed
from harness.rollout.engine_ranks import Group, check_devices, gather_failures
from harness.rollout.verl_engine import VerlEngine
from tests.cluster.gloo import on_ranks


def _group(rank: int) -> Group:
    everyone = dist.new_group([0, 1], backend="gloo")
    assert everyone is not None
    return Group(process_group=everyone, ranks=(0, 1), rank=rank, tp=2, pp=1)


def _one_waits_in_its_start(rank: int, folder: str) -> tuple[dict[int, str | None], str]:
    """Rank 0 is in SGLang's start, as it seems, until rank 1 has given up."""
    engine_ranks.ALONE_SECONDS = 0.3
    group, said = _group(rank), Path(folder) / "said"
    unfinished = Path(folder) / "unfinished"

    def give_up(message: str) -> None:
        unfinished.write_text(message)
        unfinished.rename(said)

    end = time.monotonic() + 60
    while rank == 0 and not said.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    failure = RuntimeError("no kernel image") if rank else None
    return gather_failures(group, failure, give_up), said.read_text()


def test_a_rank_whose_part_of_the_engine_failed_gives_up_while_the_others_wait_for_it(tmp_path: Path) -> None:
    for found, said in on_ranks(_one_waits_in_its_start, 2, tmp_path, str(tmp_path)):
        assert found == {0: None, 1: "RuntimeError: no kernel image"}
        assert said.startswith(
            "EngineFailed: engine start failed on rank 1: RuntimeError: no kernel image; the engine's other"
        )


def _all_come(rank: int) -> tuple[dict[int, str | None], bool]:
    found = gather_failures(_group(rank), ValueError(f"no {rank}"), print)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return found, any(not timer.finished.is_set() for timer in timers)


def test_ranks_that_fail_together_do_not_give_up(tmp_path: Path) -> None:
    found = on_ranks(_all_come, 2, tmp_path)
    assert found == [({0: "ValueError: no 0", 1: "ValueError: no 1"}, False)] * 2


def _without_ports(rank: int, folder: str) -> str:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        VerlEngine(mesh["tp"], log_dir=Path(folder), base_port=65530, model_path=folder, device="cpu")
    except EngineFailed as error:
        return str(error)
    return "no error"


def test_an_engine_that_gets_no_ports_fails_on_every_rank(tmp_path: Path) -> None:
    said = on_ranks(_without_ports, 2, tmp_path, str(tmp_path))
    assert said[0] == said[1]
    assert said[0].startswith("engine start failed on rank 0: ValueError: engine.base_port = 65530 is too high")


def test_shared_is_each_on_its_own_and_apart_on_no_trainers_gpu() -> None:
    for shared in ({0: "a", 1: "b"}, {1: "b"}, {}):
        check_devices(["a", "b"], shared, True)
    for apart in ({0: "c", 1: "d"}, {}):
        check_devices(["a", "b"], apart, False)
    with pytest.raises(ValueError, match=r"rank 1 runs on GPU a, but its trainer is on GPU b .* check CUDA_VIS"):
        check_devices(["a", "b"], {1: "a"}, True)
    with pytest.raises(ValueError, match=r"rank 0 runs on GPU b, but rank 1 trains there \(parallel\.colocate = false"):
        check_devices(["a", "b"], {0: "b"}, False)
    with pytest.raises(ValueError, match=r"rank 1 runs on GPU c, but so does the engine rank of rank 0"):
        check_devices(["a", "b"], {0: "c", 1: "c"}, False)
