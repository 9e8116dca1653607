"""Everything of the reference that touches sglang, imported inside functions only."""
# ruff: noqa: F401

from harness.rollout.sglang_api.engine_calls import (
    EngineRefused,
    build_engine,
    call,
    close,
    deserialize,
    flattened_bucket,
    flush_cache,
    import_engine,
    local_serialized_tensor,
    open_update_group,
    patch_reductions,
    serialize,
    set_weight_version,
    start_loop,
    tensors_of_bucket,
    unlink_shared_memory,
    update_session,
    why_no_update,
)
from harness.rollout.sglang_api.engine_environment import common_environment, meaning, memory_imbalance_environment
from harness.rollout.sglang_api.probe import SGLangApi, SourceTree, UnknownEngineArgument, check_arguments, load, probe
