"""Whether torch_memory_saver holds an engine's CUDA graphs, so that their memory can be released and resumed.

SGLang puts what a captured graph allocates under the tag "cuda_graph" only if SGLANG_MEMORY_SAVER_CUDA_GRAPH is set
where its schedulers capture (FullCudaGraphBackend in srt/model_executor/runner_backend, until 0.5.13 CudaGraphRunner).
Otherwise a release of that tag frees nothing.
"""

from collections.abc import Mapping
from typing import Any

from harness.rollout.sglang_api import SGLangApi

VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
WITHOUT_GRAPHS = ("torch_native", "flex_attention")
"""Attention backends for which SGLang turns graphs off itself."""


def captures_graphs(arguments: Mapping[str, Any]) -> bool:
    """Return whether an engine with these arguments captures CUDA graphs of decoding on a GPU."""
    config = arguments.get("cuda_graph_config")
    decode = config.get("decode", {}) if isinstance(config, Mapping) else {}
    backends = (decode.get("backend"), arguments.get("cuda_graph_backend_decode"))
    is_off = arguments.get("disable_cuda_graph") or arguments.get("disable_decode_cuda_graph") or "disabled" in backends
    return not is_off and arguments.get("attention_backend") not in WITHOUT_GRAPHS


def captures_prefill(arguments: Mapping[str, Any]) -> bool:
    """Return whether an engine with these arguments may capture CUDA graphs of prefill on a GPU."""
    config = arguments.get("cuda_graph_config")
    prefill = config.get("prefill", {}) if isinstance(config, Mapping) else {}
    backends = (prefill.get("backend"), arguments.get("cuda_graph_backend_prefill"))
    return not (arguments.get("disable_prefill_cuda_graph") or "disabled" in backends)


def can_hold_graphs(api: SGLangApi, arguments: Mapping[str, Any]) -> bool:
    """Return whether an engine with these arguments captures graphs and starts with them in the memory saver.

    With graphs of prefill it does not start: "Breakable CUDA graph is not compatible with memory saver mode".
    """
    return (
        api.graphs_in_memory_saver
        and bool(arguments.get("enable_memory_saver"))
        and captures_graphs(arguments)
        and not (api.breakable_graphs and captures_prefill(arguments))
    )


def variables_of_graphs(
    api: SGLangApi, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variable that puts the graphs of an engine on a GPU into the memory saver, where that works.

    A value that the user has set stays: 0 keeps the graphs where they are.
    """
    return {VARIABLE: "1"} if can_hold_graphs(api, arguments) and VARIABLE not in environment else {}


def holds_graphs(api: SGLangApi, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Return whether the memory saver holds the graphs of an engine on a GPU that starts in this environment."""
    value = {**environment, **variables_of_graphs(api, arguments, environment)}.get(VARIABLE) or ""
    return can_hold_graphs(api, arguments) and value.lower() in ("1", "true")
