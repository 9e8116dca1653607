"""What SGLang's loaders do to tensors on a GPU, on a machine without one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, types
import torch
from harness.rollout.sglang_api.absent_hardware import AssumedGpu, mxfp4_of_gpu

AssumedGpu().answer()
print(torch.empty(2, device="meta").cuda().device, torch.cuda.get_device_capability())
quantization, mxfp4 = types.ModuleType("q"), types.ModuleType("m")
quantization.QUANTIZATION_METHODS, mxfp4.Mxfp4Config, mxfp4.has_triton_kernels = {"fp8": 1}, "config", False
sys.modules["sglang.srt.layers.quantization"], sys.modules["sglang.srt.layers.quantization.mxfp4"] = quantization, mxfp4
mxfp4_of_gpu()
print(quantization.QUANTIZATION_METHODS, mxfp4.has_triton_kernels)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which answers itself")
def test_a_loader_may_move_tensors_to_the_gpu_and_a_release_may_know_mxfp4_on_gpus_alone() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["meta (9, 0)", "{'fp8': 1, 'mxfp4': 'config'} True"]
