"""The KV cache of one token on one engine rank, as SGLang's own configurator of its memory pools counts it.

Layers differ: some keep every token, some only those in a sliding window, some a state of fixed size in place of
tokens. SGLang's `pool_configurator` decides by its own config of the model, and asks its ModelRunner, which needs a
GPU. Here it is given a stand-in for that: the facts about one rank. A release or a model that asks for more is answered
by "not known".
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from harness.rollout.sglang_api.probe import installed

KINDS = {"auto": None, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""Kind of kv_cache_dtype -> the cache's dtype; None: that of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCache:
    """What SGLang's pools take for one token on one rank, in bytes. unknown: why that is not known; empty if it is."""

    full: int = 0
    """Of the layers that keep every token."""
    window: int = 0
    """Of the layers that keep a sliding window of tokens, which have a pool of their own."""
    window_ratio: float = 1.0
    """How many tokens that pool has, for each token of the other one (SGLang's swa_full_tokens_ratio)."""
    state_ratio: float = 0.0
    """What states of linear attention or Mamba take, in multiples of the KV cache (SGLang's
    mamba_full_memory_ratio)."""
    unknown: str = ""

    def token_bytes(self, window_ratio: float | None = None) -> int:
        """Return the bytes that a token takes of both pools. window_ratio: in place of SGLang's own."""
        if not self.full:
            return self.window  # SGLang applies the ratio only where there are two pools
        return self.full + round((window_ratio or self.window_ratio) * self.window)


def kv_caches(model: Any, model_config: Any, server_arguments: Any, resolved: Any) -> dict[str, KvCache]:
    """Return the KV cache for each of KINDS. model: of one rank, in whose process its groups are published.

    model_config, server_arguments: SGLang's. resolved: the server arguments with the values that SGLang decided on.
    """
    found = {}
    for kind, dtype in KINDS.items():
        try:
            found[kind] = _counted(model, model_config, server_arguments, resolved, dtype or model_config.dtype)
        except Exception as error:  # whatever SGLang raises, or asks its ModelRunner for: it is the reason
            found[kind] = KvCache(unknown=f"{type(error).__name__}: {error}")
    return found


def _counted(model: Any, model_config: Any, server_arguments: Any, resolved: Any, dtype: torch.dtype) -> KvCache:
    pools = importlib.import_module("sglang.srt.model_executor.pool_configurator")
    linear = _linear_config(pools, model_config)
    runner = _runner(model, model_config, server_arguments, resolved, dtype, linear)
    sizes = vars(pools.create_memory_pool_configurator(runner))
    ratio = _state_ratio(resolved) if linear is not None else 0.0
    if "_swa_per_token" in sizes:
        if linear is not None:
            return KvCache(unknown="the model has both sliding windows and states of linear attention")
        return KvCache(
            full=int(sizes["_full_per_token"] * sizes["_full_layers_num"]),
            window=int(sizes["_swa_per_token"] * sizes["_swa_layers_num"]),
            window_ratio=float(sizes["_swa_full_tokens_ratio"]),
        )
    if "_cell_size" not in sizes:
        return KvCache(unknown="SGLang has pools of several kinds for it")
    return KvCache(full=int(sizes["_cell_size"]), state_ratio=ratio)


def _linear_config(pools: Any, model_config: Any) -> Any:
    """Return SGLang's config of a model with states of linear attention or Mamba; None for any other model."""
    if hasattr(pools, "mambaish_config"):
        return pools.mambaish_config(model_config)
    configs = (model_config.hf_config, model_config.hf_text_config)  # an older release decides in its ModelRunner
    return next((each for each in configs if hasattr(type(each), "full_attention_layer_ids")), None)


def _state_ratio(resolved: Any) -> float:
    """Return SGLang's mamba_full_memory_ratio, where the release keeps the value that it decided on."""
    if installed("sglang").find_function("get_schedule", "srt/runtime_context.py"):
        resolved = importlib.import_module("sglang.srt.runtime_context").get_schedule()
    return float(resolved.mamba_full_memory_ratio)


def _runner(
    model: Any, model_config: Any, server_arguments: Any, resolved: Any, dtype: torch.dtype, linear: Any
) -> SimpleNamespace:
    """Return what SGLang's configurators ask a ModelRunner, or since 0.5.14 a KVCacheConfigurator, for."""
    architecture = importlib.import_module("sglang.srt.configs.model_config").AttentionArch
    algorithm = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
    layers = _layers(model, model_config)
    groups = resolved.dp_size if resolved.enable_dp_attention else 1
    return SimpleNamespace(
        **layers, layer_info=SimpleNamespace(**layers), model=model, model_config=model_config,
        model_dtype=model_config.dtype, server_args=server_arguments, kv_cache_dtype=dtype, kv_cache_dtype_str="auto",
        mambaish_config=linear, is_draft_worker=False, spec_algorithm=algorithm.from_string(None),
        use_mla_backend=model_config.attention_arch == architecture.MLA, is_hybrid_swa=model_config.is_hybrid_swa,
        sliding_window_size=getattr(model_config, "sliding_window_size", None), page_size=256, device="cuda",
        enable_hisparse=False, fused_entry_bytes=lambda pool: None, pp_size=resolved.pp_size, attn_dp_size=groups,
        ps=SimpleNamespace(pp_size=resolved.pp_size, attn_dp_size=groups),
    )  # fmt: skip


def _layers(model: Any, model_config: Any) -> Mapping[str, Any]:
    """Return which layers a rank has, as SGLang's ModelRunner finds it. Restricts the lists of model_config to them."""
    count = max(model_config.num_hidden_layers, model_config.num_attention_layers)
    start, end = getattr(model, "start_layer", 0), getattr(model, "end_layer", count)
    loops = int(getattr(model_config.hf_config, "loop_num", getattr(model_config.hf_config, "num_loops", 1)) or 1)
    found: dict[str, Any] = {"start_layer": start, "end_layer": end, "num_effective_layers": (end - start) * loops}
    for kind in ("full_attention_layer_ids", "swa_attention_layer_ids"):
        if getattr(model_config, kind, None) is not None:
            found[kind] = [layer for layer in getattr(model_config, kind) if start <= layer < end]
            setattr(model_config, kind, found[kind])  # where releases until 0.5.17 look
    return found
