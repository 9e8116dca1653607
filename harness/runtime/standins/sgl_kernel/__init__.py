"""An import-only stand-in for sgl_kernel, of which no CPU build is published.

SGLang's CPU mode imports these names, for speculative decoding and for moving KV-cache slots, and calls none of them
with attention_backend="torch_native" and no speculative decoding. Called, they raise; any other name is an ImportError.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def stand_in(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError for a name of sgl_kernel, such as kvcacheio.transfer_kv_direct."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: this is an import-only stand-in, no CPU build of sgl_kernel is published"
        )

    return call


NAMES = (
    "assign_draft_cache_locs_contiguous_cpu", "assign_extend_cache_locs_cpu", "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu", "copy_all_layer_kv_cache_cpu", "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu", "verify_tree_greedy_cpu",
)  # fmt: skip
globals().update({name: stand_in(name) for name in NAMES})
