"""Moves KV cache between GPU and host: imported at start until 0.5.12, for the hierarchical cache."""

from ._stand_in import stand_in

transfer_kv_all_layer = stand_in("kvcacheio.transfer_kv_all_layer")
transfer_kv_all_layer_direct_lf_pf = stand_in("kvcacheio.transfer_kv_all_layer_direct_lf_pf")
transfer_kv_all_layer_lf_pf = stand_in("kvcacheio.transfer_kv_all_layer_lf_pf")
transfer_kv_all_layer_lf_ph = stand_in("kvcacheio.transfer_kv_all_layer_lf_ph")
transfer_kv_all_layer_mla = stand_in("kvcacheio.transfer_kv_all_layer_mla")
transfer_kv_all_layer_mla_lf_pf = stand_in("kvcacheio.transfer_kv_all_layer_mla_lf_pf")
transfer_kv_direct = stand_in("kvcacheio.transfer_kv_direct")
transfer_kv_per_layer = stand_in("kvcacheio.transfer_kv_per_layer")
transfer_kv_per_layer_direct_pf_lf = stand_in("kvcacheio.transfer_kv_per_layer_direct_pf_lf")
transfer_kv_per_layer_mla = stand_in("kvcacheio.transfer_kv_per_layer_mla")
transfer_kv_per_layer_mla_pf_lf = stand_in("kvcacheio.transfer_kv_per_layer_mla_pf_lf")
transfer_kv_per_layer_pf_lf = stand_in("kvcacheio.transfer_kv_per_layer_pf_lf")
transfer_kv_per_layer_ph_lf = stand_in("kvcacheio.transfer_kv_per_layer_ph_lf")
