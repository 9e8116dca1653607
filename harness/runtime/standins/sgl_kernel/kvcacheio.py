"""Moves KV cache between GPU and host: imported at start until 0.5.12, for the hierarchical cache."""

from . import stand_in

WAYS = (
    "all_layer", "all_layer_direct_lf_pf", "all_layer_lf_pf", "all_layer_lf_ph", "all_layer_mla", "all_layer_mla_lf_pf",
    "direct", "per_layer", "per_layer_direct_pf_lf", "per_layer_mla", "per_layer_mla_pf_lf", "per_layer_pf_lf",
    "per_layer_ph_lf",
)  # fmt: skip
globals().update({f"transfer_kv_{way}": stand_in(f"kvcacheio.transfer_kv_{way}") for way in WAYS})
