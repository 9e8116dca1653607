"""The arguments and the environment that an engine is started with.

A user's engine.args replace a preset's arguments one by one. Those that a release does not have are dropped
(sglang_api.check_arguments), so the old and the new name of a switch may both stand here.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from harness.config.schema import Config
from harness.rollout import sglang_api
from harness.rollout.sglang_api import SGLangApi
from harness.runtime.standins.harness_cpu_mode import CPU_MODE

Device = Literal["cpu", "cuda"]
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

# torchrun sets these for its workers. An engine that inherits them behaves like a worker: with
# TORCHELASTIC_USE_AGENT_STORE, its rank 0 connects to a store that no process serves.
TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
)  # fmt: skip
TORCHRUN_PREFIX = "TORCHELASTIC_"

GRAPHS_IN_MEMORY_SAVER = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
WITHOUT_GRAPHS = ("torch_native", "flex_attention")
"""Attention backends for which SGLang turns graphs off itself."""


def engine_defaults(device: Device, preset: Preset = "reproducible") -> dict[str, Any]:
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


def variables_of_engine(device: Device) -> dict[str, str | None]:
    """Return the variables that every engine gets in addition to its rank's; None removes one."""
    changes: dict[str, str | None] = {
        # Processes are started by `python -c`, which would import from the current folder first.
        "PYTHONSAFEPATH": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": None,  # log-probs at the sampling temperature, as the trainer's
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # otherwise Engine(node_rank >= 1) never returns
        "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": None,  # otherwise a scheduler cannot open handles of other GPUs
        **sglang_api.memory_imbalance_environment(),
    }
    return changes | (CPU_MODE if device == "cpu" else {})


def variables_of_precision(config: Config, device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an engine of this precision needs and that the user has not set."""
    quantized = config.model.precision.quantized
    if quantized is None or device == "cpu":
        return {}
    return {name: value for name, value in quantized.variables.items() if name not in environment}


def cpu_environment(ranks_on_host: int) -> dict[str, str]:
    """Return the variables of SGLang's CPU mode for this number of engine ranks on this host.

    The cores that this process may use are split evenly and in order, with one entry per rank ("0,1|2,3"). If there are
    more ranks than cores, ranks share cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks_on_host
    entries = [
        ",".join(map(str, cores[rank * share : (rank + 1) * share])) if share else str(cores[rank % len(cores)])
        for rank in range(ranks_on_host)
    ]
    return CPU_MODE | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(entries)}


def cores_by_tp_rank(entries: Sequence[str], tp_ranks: Sequence[int], tp: int) -> list[str]:
    """Return SGLANG_CPU_OMP_THREADS_BIND's entries for a release before 0.5.19, which wants one for each TP rank.

    entries, tp_ranks: those of the engine ranks on this host. A TP rank with several stages here gets the cores of all
    of them. One without any gets the first entry, which nobody uses.
    """
    here = list(zip(tp_ranks, entries, strict=True))
    return [
        ",".join(dict.fromkeys(cores for rank, cores in here if rank == tp_rank)) or entries[0] for tp_rank in range(tp)
    ]


def engine_environment(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment without torchrun's variables and with `changes`; None removes a variable."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIX)
    }
    return {name: value for name, value in {**kept, **changes}.items() if value is not None}


@contextmanager
def child_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Remove torchrun's variables from os.environ and apply `changes` (None removes a variable), for an engine to
    inherit.

    At the end os.environ is exactly as before, even if the engine changed it.
    """
    before = dict(os.environ)
    try:
        _set_environment(engine_environment(before, changes))
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str]) -> None:
    """Change only the variables that differ, so that other threads never see an empty environment."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


def captures_graphs(arguments: Mapping[str, Any], stage: Literal["decode", "prefill"] = "decode") -> bool:
    """Return whether an engine with these arguments captures CUDA graphs of a stage on a GPU."""
    config = arguments.get("cuda_graph_config")
    of_stage = config.get(stage, {}) if isinstance(config, Mapping) else {}
    backends = (of_stage.get("backend"), arguments.get(f"cuda_graph_backend_{stage}"))
    is_off = arguments.get("disable_cuda_graph") or arguments.get(f"disable_{stage}_cuda_graph")
    return not is_off and "disabled" not in backends and arguments.get("attention_backend") not in WITHOUT_GRAPHS


def can_hold_graphs(api: SGLangApi, arguments: Mapping[str, Any]) -> bool:
    """Return whether an engine with these arguments captures graphs and starts with them in the memory saver.

    With graphs of prefill it does not start: "Breakable CUDA graph is not compatible with memory saver mode".
    """
    return (
        api.graphs_in_memory_saver
        and bool(arguments.get("enable_memory_saver"))
        and captures_graphs(arguments)
        and not (api.breakable_graphs and captures_graphs(arguments, "prefill"))
    )


def variables_of_graphs(
    api: SGLangApi, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variable that puts the graphs of an engine on a GPU into the memory saver, where that works.

    A value that the user has set stays: 0 keeps the graphs where they are.
    """
    return (
        {GRAPHS_IN_MEMORY_SAVER: "1"}
        if can_hold_graphs(api, arguments) and GRAPHS_IN_MEMORY_SAVER not in environment
        else {}
    )


def holds_graphs(api: SGLangApi, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Return whether the memory saver holds the graphs of an engine on a GPU that starts in this environment."""
    value = {**environment, **variables_of_graphs(api, arguments, environment)}.get(GRAPHS_IN_MEMORY_SAVER) or ""
    return can_hold_graphs(api, arguments) and value.lower() in ("1", "true")
