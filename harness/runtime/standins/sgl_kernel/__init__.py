"""An import-only stand-in for sgl_kernel, of which no CPU build is published.

SGLang's CPU mode imports these names, for speculative decoding and for moving KV-cache slots, and calls none of them
with attention_backend="torch_native" and no speculative decoding. Called, they raise; any other name is an ImportError.
"""

from ._stand_in import stand_in

assign_draft_cache_locs_contiguous_cpu = stand_in("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = stand_in("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = stand_in("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = stand_in("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = stand_in("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = stand_in("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = stand_in("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = stand_in("verify_tree_greedy_cpu")
