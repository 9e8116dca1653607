"""Classes of public reports that had a wrong answer, or none: each with the answer that helps."""

import json
from pathlib import Path

import pytest

from harness.tools.diagnose.diagnose import Diagnosis, diagnose
from harness.tools.diagnose.diagnosis_text import as_text

PACKAGES = "/opt/venv/lib/python3.12/site-packages"


def diagnosed(folder: Path, text: str) -> Diagnosis:
    (folder / "a.log").write_text(text, encoding="utf-8")
    return diagnose([str(folder / "a.log")])


def name(found: Diagnosis) -> str:
    return (
        f"{found.finding.entry.slug} {'known' if found.finding.is_known else 'like'}"
        if found.finding
        else found.verdict
    )


def said(found: Diagnosis) -> str:
    return " ".join(as_text(found).split())


def raised(exception: str, *calls: str) -> str:
    """Return a traceback. calls: each FILE FUNCTION, the deepest last."""
    frames = (f'  File "{file}", line 7, in {function}\n' for file, function in map(str.split, calls))
    return f"Traceback (most recent call last):\n{''.join(frames)}{exception}\n"


IN_SCHEDULER = f"{PACKAGES}/sglang/srt/managers/scheduler.py run_scheduler_process"
IN_LOADER = f"{PACKAGES}/sglang/srt/models/qwen3.py load_weights"
BLOCKS = "ValueError: {} = {} is not divisible by weight quantization block_n = {}."
SHARE, EXPERTS = "Weight output_partition_size", "The output_size of gate's and up's weight"


@pytest.mark.parametrize("block", [128, 64, 32])
def test_a_share_below_the_block_names_no_failure_for_sure(block: int, tmp_path: Path) -> None:
    def answer(what: str, share: int) -> Diagnosis:
        return diagnosed(tmp_path, raised(BLOCKS.format(what, share, block), IN_SCHEDULER))

    for share in (block // 16, block // 2, block - 1):
        found = answer(SHARE, share)
        assert name(found) == "unknown" and "--tp 1" in said(found) and "modules_to_not_convert" in said(found)
        assert name(answer(EXPERTS, share)) == "fp8-block-tp like"
    for share in (block + block // 2, block * 4 + 1, block * 100 + 1):
        assert name(answer(SHARE, share)) == name(answer(EXPERTS, share)) == "fp8-block-tp known"


OF_TRAINERS = (
    "/opt/slime/slime/backends/megatron_utils/actor.py update_weights",
    "/opt/miles/miles/backends/sglang_utils/sglang_engine.py update_weights_from_tensor",
    "/opt/verl/verl/workers/sharding_manager/fsdp_sglang.py update_weights",
    "/opt/mbridge/mbridge/core/bridge.py load_weights",
    f"{PACKAGES}/sglang/srt/entrypoints/engine.py update_weights_from_tensor",
)
OF_ENGINES = {
    "RuntimeError: CUDA error: an illegal memory access was encountered": "ima-second-step",
    "torch.AcceleratorError: CUDA error: invalid argument": "ima-second-step",
    "IndexError: list index out of range": "pp-update",
    "RuntimeError: The size of tensor a (4) must match the size of tensor b (8)": "wrong-shape-sent",
}


@pytest.mark.parametrize("exception", OF_ENGINES)
def test_a_method_of_the_trainer_is_not_the_engines(exception: str, tmp_path: Path) -> None:
    of_engine = f"{PACKAGES}/sglang/srt/model_executor/model_runner.py update_weights_from_tensor"
    found = diagnosed(tmp_path, f"slime sglang\n{raised(exception, IN_SCHEDULER, of_engine)}")
    assert name(found).startswith(OF_ENGINES[exception])
    for call in OF_TRAINERS:
        assert name(diagnosed(tmp_path, f"slime sglang\n{raised(exception, OF_TRAINERS[0], call)}")) == "unknown"


@pytest.mark.parametrize("call", ["update_weights_from_tensor", "update_weights_from_disk", "load_lora_adapter"])
def test_an_update_that_was_refused_is_the_failure(call: str, tmp_path: Path) -> None:
    line = 'INFO:     10.0.0.2:43020 - "POST /{} HTTP/1.1" 400 Bad Request'
    steps = "step 10 loss 0.02\nstep 20 loss 0.02\n"
    found = diagnosed(tmp_path, f"loss 1.0\n{line.format(call)}\n{steps}")
    assert found.verdict == "unknown" and found.suspicious and found.suspicious.number == 2
    assert "error_message" in said(found)
    other = diagnosed(tmp_path, f"loss 1.0\n{line.format('generate')}\n{steps}")
    assert other.verdict == "no failure" and "in doubt: " in as_text(other)


@pytest.mark.parametrize("sentence", ["Update of engine 3 {}.", "engine 3 {}. Next", "(engine 3 {}.)", "{}..."])
@pytest.mark.parametrize("word", ["failed", "crashed", "timed out", "aborted"])
def test_a_sentence_may_end_after_a_word_of_failure(sentence: str, word: str, tmp_path: Path) -> None:
    assert "in doubt: " in as_text(diagnosed(tmp_path, f"step 1\n{sentence.format(word)}\n"))


def test_a_name_with_a_word_of_failure_is_no_doubt(tmp_path: Path) -> None:
    text = "writing to failed.json, out/failed.d/, failed=0, crashed-pods: 0\n"
    assert "in doubt: " not in as_text(diagnosed(tmp_path, text))


ASSERTION = "/pytorch/aten/src/ATen/native/cuda/X.cu:109: k: block: [0,0,0] Assertion `0 <= index && index < n` failed."


def test_an_assertion_of_a_kernel_comes_before_the_error_that_follows(tmp_path: Path) -> None:
    late = raised("torch.AcceleratorError: CUDA error: device-side assert triggered", IN_SCHEDULER)
    for text in (ASSERTION, f"{ASSERTION}\n{late}", f"{late}{ASSERTION}\n"):
        found = diagnosed(tmp_path, text)
        assert found.suspicious and found.suspicious.whole == ASSERTION
        assert "condition" in said(found) and "CUDA_LAUNCH_BLOCKING" not in said(found)


OF_DEEP_GEMM = (
    'Assertion failed: /x/deep_gemm/include/deep_gemm/comm/barrier.cuh:45, condition: false and "Grid sync timeout"'
)
"""As quoted in sglang#30399: what a kernel prints before it traps, after which every call of CUDA fails with 719."""


@pytest.mark.parametrize(
    "assertion",
    [
        OF_DEEP_GEMM,
        "Failed: Assertion error csrc/jit_kernels/impls/smxx_layout.hpp:136 'mn % 4 == 0'",
        "RuntimeError: Assertion error (csrc/jit/kernel_runtime.hpp:45): exit_code == 0",
    ],
)
@pytest.mark.parametrize(
    "late",
    [
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA driver error (csrc/jit/handle.hpp:137): 719 (CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure)",
    ],
)
def test_an_assertion_of_a_library_is_the_first_failure(assertion: str, late: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, f"{assertion}\n" * 3 + raised(late, IN_SCHEDULER))
    assert found.suspicious and found.suspicious.whole == assertion and found.suspicious.number == 1
    assert found.ending and found.ending.text == late
    assert "condition" in said(found) and "CUDA_LAUNCH_BLOCKING" not in said(found)


@pytest.mark.parametrize(
    "exception",
    [
        "NotImplementedError: Unsupported parameter name: decoder.layers.0.post_self_attn_layernorm.weight",  # slime#1780
        "ValueError: Unknown parameter name: module.module.language_model.embedding.word_embeddings.weight",  # miles#735
        "Exception: Unknown tensor name decoder.layers.0.mixer.in_proj.layer_norm_weight",  # Megatron-LM#1336
    ],
)
def test_a_name_that_a_converter_does_not_know_points_to_the_exporters_names(exception: str, tmp_path: Path) -> None:
    answer = said(diagnosed(tmp_path, raised(exception, "/slime/slime_plugins/mbridge/glm4moe.py _name_mapping")))
    assert "full_size.py MODEL --tp N --names" in answer and "logs of all ranks" not in answer


OVERSIZED = (
    "RuntimeError: start (0) + length (4096) exceeds dimension size (1408).",
    "RuntimeError: start (4096) + length (4096) exceeds dimension size (5632).",
    "IndexError: start out of range (expected to be in range of [-1408, 1408], but got 12288)",
)


@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v4"])
@pytest.mark.parametrize("exception", OVERSIZED)
def test_an_oversized_expert_is_marlins_only_in_deepseek_v4(model: str, exception: str, tmp_path: Path) -> None:
    loader = f"{PACKAGES}/sglang/srt/models/{model}.py load_weights"
    expert = f"{PACKAGES}/sglang/srt/layers/moe/fused_moe_triton/layer.py _load_w13"
    named = name(diagnosed(tmp_path, raised(exception, IN_SCHEDULER, loader, expert)))
    is_marlins = model == "deepseek_v4" and "start (0)" not in exception  # rank 0 begins at 0 whatever is wrong
    assert ("marlin-padded-shards" in named) is is_marlins


@pytest.mark.parametrize(
    "exception",
    [
        "KeyError: 'model.layers.0.mlp.w'",
        "AssertionError: tp",
        "RuntimeError: shape '[2, 3]' is invalid",
        "AssertionError",
    ],
)
def test_an_unknown_error_of_the_loader_points_to_full_size(exception: str, tmp_path: Path) -> None:
    assert "full_size.py" in said(diagnosed(tmp_path, raised(exception, IN_SCHEDULER, IN_LOADER)))
    own = raised(exception, "/opt/mbridge/mbridge/core/bridge.py load_weights")
    assert "full_size.py" not in said(diagnosed(tmp_path, f"sglang verl\n{own}"))


@pytest.mark.parametrize(
    "exception",
    [
        "TypeError: _launch_subprocesses() missing 3 required positional arguments: 'a', 'b', and 'c'",
        "TypeError: UpdateWeightsFromTensorReqInput.__init__() got an unexpected keyword argument 'x'",
        "AttributeError: 'Engine' object has no attribute 'server_args'",
        "ValueError: not enough values to unpack (expected 4, got 3)",
        "ValueError: too many values to unpack (expected 3)",
    ],
)
def test_a_call_across_releases_points_to_the_bisect(exception: str, tmp_path: Path) -> None:
    in_verl = "/opt/verl/verl/workers/rollout/sglang_rollout/sglang_rollout.py __init__"
    for call in (in_verl, IN_SCHEDULER):
        assert "bisect_versions.py" in said(diagnosed(tmp_path, raised(exception, call)))
    if "Engine" not in exception and "sglang" not in exception and "ReqInput" not in exception:
        mine = raised(exception.replace("_launch_subprocesses", "f"), "/app/reward.py score")
        assert "bisect_versions.py" not in said(diagnosed(tmp_path, f"sglang verl\n{mine}"))


SAVER = "[torch_memory_saver.cpp] {} file=csrc/core.cpp func={} line=104\n"
INVALID = "torch.AcceleratorError: CUDA error: invalid argument"
TRAINER = "(MegatronTrainRayActor pid=12) "
BESIDE_A_TRAINER = {
    SAVER.format("CUresult error: 1 (invalid argument) ", "free"): "tms-free-while-paused known",
    TRAINER + SAVER.format("cudaError error: 1 (invalid argument) ", "pause"): "tms-trainer-pause-fails known",
    raised(
        INVALID, OF_TRAINERS[0], "/x/torch/multiprocessing/reductions.py reduce_tensor"
    ): "tms-memory-not-exported like",
    raised(
        INVALID,
        "/opt/miles/miles/backends/megatron_utils/actor.py update_weights",
        "/x/torch/distributed/distributed_c10d.py all_gather_object",
        "/x/torch/distributed/distributed_c10d.py _object_to_tensor",
    ): "offloaded-trainer-collective like",
    'INFO: 10.0.0.1:5 - "POST /resume_memory_occupation HTTP/1.1" 200 OK\n'
    + raised("RuntimeError: CUDA error: misaligned address", IN_SCHEDULER): "graph-memory-lost-in-pause like",
    f"{TRAINER}Timer wake_up start\n{TRAINER}n:1:2 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address\n": (
        "paused-memory-of-a-network like"
    ),
}


@pytest.mark.parametrize("text", BESIDE_A_TRAINER, ids=BESIDE_A_TRAINER.values())
def test_the_memory_saver_beside_an_offloaded_trainer(text: str, tmp_path: Path) -> None:
    assert name(diagnosed(tmp_path, text)) == BESIDE_A_TRAINER[text]


def test_cuda_errors_without_a_memory_saver_get_none_of_its_names(tmp_path: Path) -> None:
    own = "/app/model.py forward"
    for text in (
        raised(INVALID, own, "/x/torch/multiprocessing/reductions.py reduce_tensor"),
        raised("RuntimeError: CUDA error: misaligned address", own),
        f"sglang\n{raised('RuntimeError: CUDA error: misaligned address', IN_SCHEDULER)}",
        "n:1:2 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address\n",
        f"{TRAINER}n:1:2 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address\n",
    ):
        assert name(diagnosed(tmp_path, text)) == "unknown"


KILLED = "FIRST FAILURE: rank 1 on vm was killed by SIGKILL in sync of step 1\n"
EVENT = {"time": 1.0, "rank": 1, "host": "vm", "event": "injected", "fault": "kill@sync:1:1"}


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(EVENT),
        "python3 launch/ppo.py a.toml --inject kill@sync:1:1",
        'run.inject = ["kill@sync:1:1"]',
        "rank 1 FAILED: InjectedFault: exception@sync:1:1 was asked for",
        "kill@sync:1:1 was injected on purpose",
    ],
)
def test_an_injected_fault_is_called_so(line: str, tmp_path: Path) -> None:
    known = "AssertionError: param_data.shape=torch.Size([4]) loaded_weight.shape=torch.Size([8])"
    of_engine = f"{PACKAGES}/sglang/srt/model_executor/model_runner.py update_weights_from_tensor"
    for text in (
        f"{line}\n{KILLED}",
        f"{KILLED}{line}\n",
        f"{line}\n" + "step\n" * 400 + KILLED,
        f"{raised(known, of_engine)}{line}\n",
    ):
        found = diagnosed(tmp_path, text)
        assert name(found).startswith("injected-fault") and "dmesg" not in said(found)
    assert name(diagnosed(tmp_path, KILLED)) == "unknown"
