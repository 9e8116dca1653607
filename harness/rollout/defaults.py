"""The harness's defaults for sglang.Engine, by device. A user's engine.args replace them one by one; those that a
release does not know are dropped (sglang_api.check_arguments), so new and old names of one switch stand side by
side.
"""

from typing import Any, Literal

Defaults = Literal["harness", "sglang"]

_COMMON: dict[str, Any] = {
    # Code from a model's folder runs only where the user asks for it.
    "trust_remote_code": False,
    # The Engine's own default is "error", which hides why a scheduler died; "info" prints hundreds of lines.
    "log_level": "warning",
}

_CPU = {
    "device": "cpu",
    # The one attention backend in pure torch; the others need kernels that no CPU build on PyPI has.
    "attention_backend": "torch_native",
    # The same for sampling.
    "sampling_backend": "pytorch",
    # There are no graphs on CPU; without this the scheduler compiles the model.
    "disable_cuda_graph": True,
    # Piecewise capture has a switch of its own until 0.5.13, where it dies on CPU: torch.cpu has no graph_pool_handle.
    "disable_piecewise_cuda_graph": True,
    # Tokens of KV cache. Enough for the tiny tasks, and it bounds memory where mem_fraction_static is a share of host
    # RAM.
    "max_total_tokens": 2048,
    # Schedulers that poll for requests take the cores that the trainers beside them need: a step of the quickstart takes
    # 0.5 s with this on two cores, 0.9 s without.
    "sleep_on_idle": True,
    # Share of host memory; several engines and trainers live on one laptop.
    "mem_fraction_static": 0.1,
}

_CUDA = {
    # Compiles its kernels for every GPU; FlashInfer and FA3 need wheels matched to torch and CUDA.
    "attention_backend": "triton",
    # The sampler that honours a seed; FlashInfer's does not.
    "sampling_backend": "pytorch",
    # Capture takes a minute and gigabytes, for three short steps.
    "disable_cuda_graph": True,
    # The same for piecewise capture (8-60 s): its switch until 0.5.13, and from 0.5.14 on.
    "disable_piecewise_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    # Since 0.5.12 or so MoE models on Hopper switch this fusion on by themselves for tp > 1, and compile it with nvcc for
    # minutes at every first start. Measured on H200 with 0.5.17: still compiling after 150 s.
    "enforce_disable_flashinfer_allreduce_fusion": True,
}

_SHARED_GPU = {
    "device": "cuda",
    # Without it release and resume do nothing.
    "enable_memory_saver": True,
    # Share of the GPU memory free at start. The trainer's model, gradients and Adam states live on the same GPU.
    "mem_fraction_static": 0.4,
}


def engine_defaults(device: Literal["cpu", "cuda"], whose: Defaults = "harness") -> dict[str, Any]:
    """Return engine arguments that do not depend on the run's shape. Raises ValueError for another device.

    whose: "sglang" leaves attention and sampling backend, CUDA graphs and fusions on a GPU to SGLang, as it serves; what the
    trainer beside the engine needs, memory saver and fraction, stays. SGLang's CPU mode has no other than these.
    """
    by_device = {"cpu": _CPU, "cuda": _SHARED_GPU if whose == "sglang" else _CUDA | _SHARED_GPU}
    if device not in by_device:
        raise ValueError(f"device must be one of {', '.join(by_device)}, got {device}.")
    return _COMMON | by_device[device]
