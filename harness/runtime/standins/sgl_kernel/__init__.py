"""A stand-in for sgl_kernel, of which no CPU build is published.

SGLang's CPU mode imports these names, for speculative decoding and for moving KV-cache slots. With attention_backend =
"torch_native" it calls none of them without a draft model. What a chain of drafts calls is in speculative.py, in plain
torch; the others raise when they are called, and any other name is an ImportError.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from .speculative import (
    assign_draft_cache_locs_contiguous_cpu as assign_draft_cache_locs_contiguous_cpu,
)
from .speculative import (
    assign_extend_cache_locs_cpu as assign_extend_cache_locs_cpu,
)
from .speculative import (
    assign_req_to_token_pool_cpu as assign_req_to_token_pool_cpu,
)
from .speculative import (
    build_tree_kernel_efficient_cpu as build_tree_kernel_efficient_cpu,
)
from .speculative import (
    fill_bonus_tokens_cpu as fill_bonus_tokens_cpu,
)
from .speculative import (
    verify_tree_greedy_cpu as verify_tree_greedy_cpu,
)


def stand_in(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError for a name of sgl_kernel, such as
    kvcacheio.transfer_kv_direct.
    """

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: this is an import-only stand-in, no CPU build of sgl_kernel is published"
        )

    return call


NAMES = ("copy_all_layer_kv_cache_cpu", "fill_accept_out_cache_loc_cpu")
globals().update({name: stand_in(name) for name in NAMES})
