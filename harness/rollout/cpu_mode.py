"""SGLang's CPU mode: the environment that its engines need, and what it cannot serve. Imports nothing heavy."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.rollout.sglang_api import source
from harness.runtime.errors import UnsupportedEnvironment

# Both tables are of sglang 0.5.20.
MODELS = {
    "qwen2_moe": "its shared expert ends in a Triton kernel (fused_gate_sigmoid_mul_add), and Triton needs a GPU",
    "gpt_oss": "SGLang serves it with GPU attention backends only (triton, fa3, trtllm_mha and the like)",
    "qwen3_next": "SGLang keeps the state of its linear attention in a buffer that needs a GPU (FLA)",
}
"""model_type -> why CPU mode cannot serve it."""
ARGUMENTS = {
    "speculative_algorithm": ("", "SGLang's draft workers wait for CUDA streams"),
    "kv_cache_dtype": (
        "fp8",
        "SGLang's FP8 KV cache needs CPU kernels that the import-only stand-in for sgl_kernel does not have",
    ),
}
"""Engine argument -> how the values begin that CPU mode cannot serve, and why."""


def cpu_environment(ranks_on_host: int) -> dict[str, str]:
    """Return what SGLang's CPU mode reads from the environment, for `ranks_on_host` engine ranks on this host.

    The cores this process may use are split evenly and in order, one entry a rank ("0-3|4-7"); with more ranks than
    cores the ranks go round the cores, one core each. Engines of several stages or hosts: see cores_by_tp_rank.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks_on_host
    entries = [
        ",".join(map(str, cores[rank * share : (rank + 1) * share])) if share else str(cores[rank % len(cores)])
        for rank in range(ranks_on_host)
    ]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(entries),
        # With two threads MKL's first vector call, the rotary table's cos, races over which kernels suit the CPU: one
        # half may come out with 13 bits, for the life of the engine. Seen with torch 2.13: log-probs off by 5e-5.
        "OMP_NUM_THREADS": "1",
        # With tp > 1 SGLang compiles the masking of token ids by torch.compile, on the CPU with a C++ compiler: 5 to
        # 30 s at the first token of a fresh machine, for a few integer operations.
        "TORCHDYNAMO_DISABLE": "1",
        # Beside a torch that brings NCCL (its CUDA build) SGLang would open NCCL communicators on the CPU, and die. A
        # library that is not there turns that off, as it does beside a CPU build.
        "SGLANG_NCCL_SO_PATH": "absent-in-cpu-mode",
    }


def cores_by_tp_rank(entries: Sequence[str], tp_ranks: Sequence[int], tp: int) -> list[str]:
    """Return the entries for a SGLang that wants one for each TP rank of the engine: the cores of its stages here, or any.

    entries, tp_ranks: of each engine rank here.
    """
    here = list(zip(tp_ranks, entries, strict=True))
    return [
        ",".join(dict.fromkeys(cores for rank, cores in here if rank == tp_rank)) or entries[0] for tp_rank in range(tp)
    ]


def require_absorbed_mla() -> None:
    """Raise UnsupportedEnvironment unless the installed SGLang (0.5.12 or newer) can serve an MLA model (DeepSeek) on CPU.

    SGLang logs a plugin that fails and continues, and releases without plugins never ask for ours.
    """
    sglang = source.installed("sglang")
    if not all(map(sglang.has, ("srt/plugins/__init__.py", "srt/models/deepseek_common/attention_backend_handler.py"))):
        raise UnsupportedEnvironment(
            f"an MLA model (DeepSeek) cannot run on CPU with the sglang in {sglang.root}: it has no plugins or no"
            " attention registry for the absorbed method, which sglang 0.5.20 has"
        )


def cpu_refusals(model_type: str | None, engine_args: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each reason why CPU mode cannot serve this model with these engine arguments.

    model_type: as the model's config.json names it; None where it is not known yet.
    """
    if model_type in MODELS:
        yield (
            f"CPU mode cannot serve a model of model_type {model_type}: {MODELS[model_type]}; use a GPU, or another model."
        )
    for name, (beginning, reason) in ARGUMENTS.items():
        value = engine_args.get(name)
        if value and str(value).startswith(beginning):
            yield f"CPU mode cannot serve engine.args.{name} = {value!r}: {reason}; use a GPU, or leave it out."
