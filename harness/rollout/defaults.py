"""The arguments of sglang.Engine that a preset sets, by device.

A user's engine.args replace them one by one. Those that a release does not have are dropped
(sglang_api.check_arguments), so the old and the new name of a switch may both stand here.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

Preset = Literal["reproducible", "sglang"]

_COMMON: dict[str, Any] = {
    # Do not run code from a model's folder unless the user asks for it.
    "trust_remote_code": False,
    # SGLang's default, "error", hides why a scheduler died; "info" prints hundreds of lines.
    "log_level": "warning",
}

_CPU = {
    "device": "cpu",
    # The only attention backend in pure torch. The others need kernels, and PyPI has no CPU build of them.
    "attention_backend": "torch_native",
    # The only sampling backend in pure torch.
    "sampling_backend": "pytorch",
    # Without this the scheduler compiles the model.
    "disable_cuda_graph": True,
    # Until 0.5.13 piecewise capture has another switch. On CPU it would die: torch.cpu has no graph_pool_handle.
    "disable_piecewise_cuda_graph": True,
    # Size of the KV cache, in tokens. Enough for the tiny tasks. Without it SGLang takes a share of the host's memory.
    "max_total_tokens": 2048,
    # A scheduler that polls for requests takes cores from the trainers: on two cores a step of the quickstart takes 0.5
    # s with this, 0.9 s without.
    "sleep_on_idle": True,
    # A share of the host's memory. One laptop may hold several engines and trainers.
    "mem_fraction_static": 0.1,
}

_CUDA = {
    # Compiles its kernels for any GPU. FlashInfer and FA3 need wheels that match torch and CUDA.
    "attention_backend": "triton",
    # This sampler obeys a seed; FlashInfer's does not.
    "sampling_backend": "pytorch",
    # Capturing takes a minute and gigabytes. That is too much for three short steps.
    "disable_cuda_graph": True,
    # Piecewise capture takes 8 to 60 s. The first switch is the one until 0.5.13, the second the one from 0.5.14 on.
    "disable_piecewise_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    # Since about 0.5.12 SGLang turns this fusion on for MoE models on Hopper with tp > 1, and compiles it with nvcc at
    # the first start. On an H200 with 0.5.17 it was still compiling after 150 s.
    "enforce_disable_flashinfer_allreduce_fusion": True,
}

_SHARED_GPU = {
    "device": "cuda",
    # Without the memory saver release and resume do nothing.
    "enable_memory_saver": True,
    # A share of the GPU memory that is free at start. The trainer's model, gradients and Adam states need the rest.
    "mem_fraction_static": 0.4,
}


def engine_defaults(device: Literal["cpu", "cuda"], preset: Preset = "reproducible") -> dict[str, Any]:
    """Return engine arguments that do not depend on the run's shape. Raises ValueError for another device.

    preset: "sglang" leaves attention and sampling backends, CUDA graphs and fusions on a GPU to SGLang, as when it
    serves. What the trainer on the same GPU needs stays: the memory saver and the memory fraction. On CPU nothing else
    works.
    """
    by_device = {"cpu": _CPU, "cuda": _SHARED_GPU if preset == "sglang" else _CUDA | _SHARED_GPU}
    if device not in by_device:
        raise ValueError(f"device must be one of {', '.join(by_device)}, got {device}.")
    return _COMMON | by_device[device]


def without_models_code(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return these engine arguments with an empty auto_map in place of the model's, unless trust_remote_code is true.

    trust_remote_code = False is not enough. If SGLang has no class for the architecture, or cannot import it on this
    machine, or is asked for transformers' class (model_impl, TransformersForCausalLM), it imports what auto_map names,
    whoever wrote it (resolve_transformers_arch, srt/model_loader/utils.py; srt/models/transformers.py). This holds for
    a draft model too.
    """
    if arguments.get("trust_remote_code"):
        return dict(arguments)
    fields = json.loads(arguments.get("json_model_override_args") or "{}") | {"auto_map": {}}
    return {**arguments, "json_model_override_args": json.dumps(fields)}
