"""The front of everything that touches sglang.

No other package of the harness imports sglang, and this one only in functions.
"""
# ruff: noqa: F401

from harness.rollout.sglang_api.engine_arguments import UnknownEngineArgument, check_arguments
from harness.rollout.sglang_api.engine_calls import (
    EngineRefused,
    build_engine,
    build_own_verl_engine,
    cancel_shutdown_at_exit,
    check_result,
    check_weights,
    close,
    destroy_weights_update_group,
    flush_cache,
    for_another_thread,
    generate,
    import_engine,
    init_weights_update_group,
    memory_arguments,
    open_update_group,
    release_memory_occupation,
    remove_signal_handlers,
    resume_memory_occupation,
    start_loop,
    unlink_shared_memory,
    update_group_ends_in_barrier,
    update_session,
    update_weights_from_disk,
    update_weights_from_distributed,
    update_weights_from_tensor,
)
from harness.rollout.sglang_api.engine_environment import common_environment, memory_imbalance_environment
from harness.rollout.sglang_api.payload import (
    deserialize,
    flattened_bucket,
    local_serialized_tensor,
    patch_reductions,
    serialize,
    serialize_by_value,
    tensors_of_bucket,
)
from harness.rollout.sglang_api.probe import SGLangApi, probe
from harness.rollout.sglang_api.source import SourceTree
