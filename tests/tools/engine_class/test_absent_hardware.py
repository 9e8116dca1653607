"""What SGLang's loaders do to tensors on a GPU, on a machine without one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.tools.engine_class.absent_hardware import is_for_hardware

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys, types
import torch
from harness.tools.engine_class.absent_hardware import AssumedGpu, mxfp4_of_gpu

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


REFUSING = """
def validate(size, platform_has_snapshots, _is_cuda):
    assert size != 1, "576 is not divisible by 128"
    if size == 2:
        raise ValueError("--moe-a2a-backend megamoe needs a CUDA SM90 GPU")
    assert platform_has_snapshots, "extra_buffer requires platform support for snapshots."
    if not _is_cuda:
        if size:
            raise ValueError("not here")
    prewarm(size)
"""


@pytest.mark.parametrize(
    ("arguments", "of_hardware"),
    [((1, False, False), False), ((2, True, True), True), ((3, False, True), True), ((3, True, False), True), ((3, True, True), True)],
)  # fmt: skip
def test_what_sglang_refuses_for_absent_hardware_is_told_from_what_it_refuses_of_a_model(
    arguments: tuple[int, bool, bool], of_hardware: bool, tmp_path: Path
) -> None:
    """By the words, by the condition that a line stands under, or by a function that is imported on a GPU alone."""
    file = tmp_path / "sglang" / "srt" / "hook.py"
    file.parent.mkdir(parents=True)
    file.write_text(REFUSING)
    module: dict[str, Any] = {}
    exec(compile(REFUSING, str(file), "exec"), module)
    with pytest.raises((AssertionError, ValueError, NameError)) as error:
        module["validate"](*arguments)
    assert is_for_hardware(error.value) == of_hardware
