"""The doctor on real GPUs."""

import pytest
import torch

from tests.tools.doctor.test_examine import torchrun

pytestmark = pytest.mark.gpu


def test_gpus_are_reported_and_reached() -> None:
    ranks = torch.cuda.device_count()
    run = torchrun(ranks, "launch/doctor.py")
    assert run.returncode == 0, run.stdout
    assert f"{ranks} x NVIDIA" in run.stdout and run.stdout.splitlines()[-1].startswith("OK")
    assert ranks == 1 or "nccl all-reduce of all ranks" in run.stdout


def test_expandable_segments_are_a_fault() -> None:
    run = torchrun(1, "launch/doctor.py", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert run.returncode == 1 and "FAULT expandable_segments" in run.stdout


def test_memory_that_someone_else_holds_is_a_fault() -> None:
    held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda:0")
    run = torchrun(1, "launch/doctor.py")
    assert held.numel() and run.returncode == 1 and "FAULT occupied" in run.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_ranks_on_one_gpu_are_a_fault_without_a_hang() -> None:
    run = torchrun(2, "launch/doctor.py", CUDA_VISIBLE_DEVICES="0")
    assert run.returncode == 1 and "FAULT own_gpus" in run.stdout
