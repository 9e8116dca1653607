"""The doctor on real GPUs."""

import json

import pytest
import torch

from tests.tools.doctor.test_examine import torchrun

pytestmark = pytest.mark.gpu


def test_gpus_are_reported_reached_and_opened() -> None:
    ranks = torch.cuda.device_count()
    run = torchrun(ranks, "launch/doctor.py", "--json")
    found = json.loads(run.stdout)
    assert run.returncode == 0 and found["verdict"] == "OK", found["findings"]
    uuids = [each["gpu"]["uuid"] for each in found["ranks"]]
    assert len(set(uuids)) == ranks and all(uuid.startswith("GPU-") for uuid in uuids)
    assert [each["ipc"]["uuid"] for each in found["links"]] == uuids
    for each in found["ranks"]:
        assert not each["gpu_reason"] and len(each["gpu"]["nvlink"]) >= ranks - 1
        assert 0 < each["gpu"]["free"] <= each["gpu"]["total"]
    if ranks > 1:
        nccl = [one for each in found["links"] for one in each["collectives"] if one["backend"] == "nccl"]
        assert len(nccl) >= ranks and all(one["bandwidth"] > 1e9 and not one["error"] for one in nccl)


def test_expandable_segments_are_a_fault() -> None:
    run = torchrun(1, "launch/doctor.py", "--json", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    faults = {each["check"] for each in json.loads(run.stdout)["findings"] if each["fault"]}
    assert run.returncode == 1 and "expandable_segments" in faults


def test_memory_that_someone_else_holds_is_a_fault() -> None:
    held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda:0")
    run = torchrun(1, "launch/doctor.py", "--json")
    assert held.numel() and run.returncode == 1
    faults = {each["check"] for each in json.loads(run.stdout)["findings"] if each["fault"]}
    assert "occupied" in faults


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_ranks_on_one_gpu_are_a_fault_without_a_hang() -> None:
    run = torchrun(2, "launch/doctor.py", "--json", CUDA_VISIBLE_DEVICES="0")
    faults = [each["check"] for each in json.loads(run.stdout)["findings"] if each["fault"]]
    assert run.returncode == 1 and "own_gpus" in faults
