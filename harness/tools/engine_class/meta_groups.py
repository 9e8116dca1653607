"""The configuration and the process groups of one engine rank, set up as the installed release of SGLang sets them up.

Releases differ in what they publish, in what they read it from, and in the sizes that they want to be told. Each of
their functions is called with those of the known values that its own signature names.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from harness.rollout.sglang_api.probe import installed, load
from harness.runtime.errors import UnsupportedEnvironment

FAKE = {"backend": "fake", "dist_init_method": "fake://", "distributed_init_method": "fake://"}
"""What the groups are made of: torch's backend that sends nothing."""


def start_rank(server_arguments: Any, rank: int) -> Any:
    """Publish the configuration of one rank, build its groups, and return SGLang's config of the model.

    server_arguments: SGLang's ServerArgs. rank: in the engine, stage by stage. Raise UnsupportedEnvironment if a
    function of this release wants what is not known here.
    """
    _publish(server_arguments, rank)
    _initialize_kernels(server_arguments)
    _module("srt.distributed.parallel_state").set_custom_all_reduce(False)
    model_config = _module("srt.configs.model_config").ModelConfig.from_server_args(server_arguments)
    _build_groups(server_arguments, model_config, rank)
    return model_config


def call_with(function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    """Call a function of SGLang with those of the known values that it takes.

    Raise UnsupportedEnvironment if it has a parameter without a default whose value is not known.
    """
    accepted = inspect.signature(function).parameters
    unknown = [name for name, each in accepted.items() if each.default is each.empty and name not in known]
    if unknown:
        raise UnsupportedEnvironment(
            f"sglang {installed('sglang').version()}: {function.__name__} wants {' and '.join(unknown)}, which"
            " launch/full_size.py does not know"
        )
    return function(**{name: known[name] for name in accepted if name in known})


def _publish(server_arguments: Any, rank: int) -> None:
    """Make the server arguments those of this process, as the release's scheduler does when it starts."""
    known = {"server_args": server_arguments, "role": "scheduler"}
    if installed("sglang").find_function("publish", "srt/runtime_context.py"):
        context = _module("srt.runtime_context")
        if hasattr(context, "SpawnRanks"):
            known["ranks"] = call_with(context.SpawnRanks, {"world_rank": rank, "gpu_id": 0})
        call_with(context.publish, known)
        return
    load("srt/server_args.py", "set_global_server_args_for_scheduler")(server_arguments)


def _initialize_kernels(server_arguments: Any) -> None:
    """Choose the kernels of experts and of quantized products, as the release's scheduler does before it loads a
    model.
    """
    known = {"server_args": server_arguments}
    call_with(_module("srt.layers.moe").initialize_moe_config, known)
    for number in ("fp8", "fp4"):
        file, name = f"srt/layers/quantization/{number}_utils.py", f"initialize_{number}_gemm_config"
        if installed("sglang").find_function(name, file):
            call_with(load(file, name), known)


def _build_groups(server_arguments: Any, model_config: Any, rank: int) -> None:
    source, sizes = installed("sglang"), _sizes(server_arguments, rank)
    known = {"server_args": server_arguments, "model_config": model_config, "gpu_id": 0, **FAKE, **sizes}
    if source.find_function("_init_parallel_groups", "srt/distributed/bootstrap.py"):
        bootstrap = _module("srt.distributed.bootstrap")
        call_with(bootstrap._init_parallel_groups, known)
        if hasattr(bootstrap, "init_layer_runtime"):
            call_with(bootstrap.init_layer_runtime, known)
        return
    state = _module("srt.distributed.parallel_state")
    world = sizes["tp_size"] * sizes["pp_size"]
    call_with(state.init_distributed_environment, known | {"rank": rank, "world_size": world, "local_rank": 0})
    by_long_names = {
        "tensor_model_parallel_size": sizes["tp_size"],
        "pipeline_model_parallel_size": sizes["pp_size"],
        "expert_model_parallel_size": sizes["moe_ep_size"],
        "attention_data_parallel_size": sizes["attn_dp_size"],
        "attention_context_model_parallel_size": sizes["attn_cp_size"],
        "moe_data_model_parallel_size": sizes["moe_dp_size"],
        "decode_context_parallel_size": sizes["dcp_size"],
    }
    call_with(state.initialize_model_parallel, by_long_names | FAKE)
    call_with(_module("srt.layers.dp_attention").initialize_dp_attention, known)


def _sizes(server_arguments: Any, rank: int) -> dict[str, int]:
    """Return the sizes of the groups by the names that SGLang has for them, and the rank's place among stages."""
    resolved = resolved_arguments(server_arguments)
    tp, pp = resolved.tp_size, resolved.pp_size
    return {
        "tp_size": tp,
        "tp_rank": rank % tp,
        "pp_size": pp,
        "pp_rank": rank // tp,
        "attn_dp_size": resolved.dp_size if resolved.enable_dp_attention else 1,
        "attn_cp_size": getattr(resolved, "attn_cp_size", 1),
        "moe_ep_size": resolved.ep_size,
        "moe_dp_size": getattr(resolved, "moe_dp_size", 1),
        "dcp_size": getattr(resolved, "dcp_size", 1),
    }


def resolved_arguments(server_arguments: Any) -> Any:
    """Return the server arguments with the values that SGLang decided on, where a release keeps these apart."""
    file = "srt/arg_groups/overrides.py"
    if installed("sglang").find_function("resolving_view", file):
        return load(file, "resolving_view")(server_arguments)
    return server_arguments


def _module(name: str) -> Any:
    return importlib.import_module(f"sglang.{name}")
