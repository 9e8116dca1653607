"""A SGLang plugin (entry point group sglang.srt.plugins): what attention_backend="torch_native" and its experts lack.

torch_native always attends to the latent KV cache, so MLA models (DeepSeek) must take the absorbed method for prefill
too; SGLang registers no method for it. DP attention asks the backend for the length of a padded sequence, and expert
parallelism marks the experts of other ranks with -1, which the native experts take for an index. Where both are on, the
experts' sum is scattered by NCCL; SGLang's own function for deterministic inference does it by an all-reduce. The
memory for routed experts (enable_return_routed_experts) is pinned, which needs a GPU. SGLang calls `register` in every
process of an engine, logs an error raised here, and continues: serves_mla_on_cpu in harness.rollout.sglang_api.probe is what
refuses a release without the registry.
"""

from typing import Any


def register() -> None:
    """Register absorbed MLA for torch_native, the padded length and the experts' mask; ImportError on a SGLang that
    lacks one of them.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)

    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1
    fused_moe_native.moe_forward_native = _without_absent_experts(fused_moe_native.moe_forward_native)

    from sglang.srt.state_capturer.base import BaseHostCache

    BaseHostCache.__init__ = _in_plain_memory

    from sglang.srt.distributed.parallel_state import GroupCoordinator

    if without_nccl := getattr(GroupCoordinator, "_deterministic_reduce_scatterv", None):  # not in older releases
        GroupCoordinator.reduce_scatterv = without_nccl


def _in_plain_memory(
    cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str, device: str = "cpu"
) -> None:
    """Make SGLang's cache of the experts that each token took, int32 [num_tokens, num_layers, topk_size], without
    pinning.
    """
    import torch

    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def _without_absent_experts(forward: Any) -> Any:
    """Return the native experts, with weight 0 for those that are on other ranks; the ranks' outputs are added up."""

    def masked(layer: Any, x: Any, topk_output: Any, moe_runner_config: Any) -> Any:
        absent = topk_output.topk_ids < 0
        if not absent.any():
            return forward(layer, x, topk_output, moe_runner_config)
        ids, weights = topk_output.topk_ids.clamp(min=0), topk_output.topk_weights.masked_fill(absent, 0)
        # One choice of every token at a time: the native experts count an expert once a token.
        columns = zip(ids.split(1, dim=1), weights.split(1, dim=1), strict=True)
        choices = [topk_output._replace(topk_ids=chosen, topk_weights=weight) for chosen, weight in columns]
        return sum(forward(layer, x, choice, moe_runner_config) for choice in choices)

    return masked
