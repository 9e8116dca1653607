"""A SGLang plugin (entry point group sglang.srt.plugins): a draft model (EAGLE, NEXTN) with
attention_backend="torch_native".

SGLang's EAGLE worker knows CPUs, with the attention of AMX and kernels of sgl_kernel. The kernels stand in
sgl_kernel/speculative.py; here is what torch_native lacks for a chain of one draft (speculative_num_steps = 1, topk =
1):

- Verifying and drafting attend to the tokens in the cache and, causally, to the new ones: what torch_native's prefill does,
  once it knows how many are in the cache. It is the draft's backend for its prefill too.
- set_embed_and_head of DeepSeek's classes synchronizes CUDA whatever the device.
- On a CPU SGLang commits the target's likeliest token whatever the temperature, because there are sampling kernels for GPUs
  alone. A rollout needs sampling, so stand-ins for these kernels (top-k and top-p included) take their place.

SGLang logs an error raised here, and continues; SGLangFacts.why_no_drafts_on_cpu says which releases lack something.
"""

from typing import Any
from unittest.mock import patch


def register() -> None:
    """Patch what is named above; ImportError or AttributeError on a SGLang that lacks a name."""
    from sgl_kernel import speculative as kernels
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory
    from sglang.srt.utils import is_cpu

    if not is_cpu() or not hasattr(eagle_utils, "_verify_uses_greedy"):
        return  # a draft model is refused with a release that cannot be given a sampler
    replaced = {
        (TorchNativeAttnBackend, "forward_extend"): _told_of_prefixes(TorchNativeAttnBackend.forward_extend),
        (DraftBackendFactory, "create_draft_extend_backend"): lambda factory: None,  # then the worker keeps its own
        (DeepseekV2ForCausalLM, "set_embed_and_head"): _without_cuda(DeepseekV2ForCausalLM.set_embed_and_head),
        (eagle_utils, "_verify_uses_greedy"): _only_if_all_are_greedy,
        (eagle_utils, "tree_speculative_sampling_target_only"): kernels.tree_speculative_sampling_target_only,
        (eagle_utils, "top_k_renorm_prob"): kernels.top_k_renorm_prob,
        (eagle_utils, "top_p_renorm_prob"): kernels.top_p_renorm_prob,
    }
    for owner, name in replaced:
        getattr(owner, name)  # all of them or none
    for (owner, name), function in replaced.items():
        setattr(owner, name, function)


def _told_of_prefixes(forward_extend: Any) -> Any:
    """Return torch_native's forward_extend, for batches that verify drafts too: SGLang gives these no prefix
    lengths.
    """

    def extended(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        if not forward_batch.forward_mode.is_target_verify():
            return forward_extend(backend, q, k, v, layer, forward_batch, save_kv_cache)
        prefixes = forward_batch.seq_lens
        drafts = prefixes.new_full(prefixes.shape, forward_batch.spec_info.draft_token_num)
        known = {"extend_prefix_lens": prefixes, "extend_seq_lens": drafts, "seq_lens": prefixes + drafts}
        with patch.multiple(forward_batch, **known):
            return forward_extend(backend, q, k, v, layer, forward_batch, save_kv_cache)

    return extended


def _without_cuda(set_embed_and_head: Any) -> Any:
    """Return the method without its calls of torch.cuda, which raise on a build of torch for CPUs."""
    import torch

    def shared(model: Any, embed: Any, head: Any) -> None:
        with patch.multiple(torch.cuda, empty_cache=lambda: None, synchronize=lambda: None):
            set_embed_and_head(model, embed, head)

    return shared


def _only_if_all_are_greedy(*, is_all_greedy: bool, **other_devices: bool) -> bool:
    return is_all_greedy
