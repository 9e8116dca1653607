"""Which of a run's engine.args SGLang is given here: those that may change how it builds, cuts or names its weights.

What matters only while an engine runs is left out. Much of it SGLang refuses, or answers otherwise, where there is no
GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config.draft_rules import sends_mtp_layer
from harness.runtime.errors import UnsupportedEnvironment

GROUPS = {
    "memory": "mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size"
    " max_prefill_tokens prefill_max_requests page_size swa_full_tokens_ratio disable_hybrid_swa_memory disable_radix_cache"
    " enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup enable_hierarchical_cache"
    " kv_cache_dtype",
    # launch/full_size.py names SGLang an attention backend itself.
    "kernels": "attention_backend prefill_attention_backend decode_attention_backend sampling_backend grammar_backend",
    "schedule": "disable_overlap_schedule disable_chunked_prefix_cache enable_mixed_chunk num_continuous_decode_steps"
    " scheduler_recv_interval stream_interval pp_max_micro_batch_size pp_async_batch_depth load_balance_method sleep_on_idle",
    "graphs": "disable_cuda_graph disable_cuda_graph_padding disable_prefill_cuda_graph disable_decode_cuda_graph"
    " disable_piecewise_cuda_graph enable_piecewise_cuda_graph enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph"
    " enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs",
    "collectives": "disable_custom_all_reduce enable_nccl_nvls enable_symm_mem enable_torch_symm_mem enable_p2p_check"
    " pre_warm_nccl enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion"
    " flashinfer_allreduce_fusion_backend dist_timeout",
    "server": "skip_tokenizer_init skip_server_warmup warmups host api_key served_model_name chat_template reasoning_parser"
    " tool_call_parser watchdog_timeout soft_watchdog_timeout preferred_sampling_params enable_custom_logit_processor"
    " enable_return_routed_experts enable_return_hidden_states",
    "logs": "show_time_cost decode_log_interval crash_dump_folder enable_trace enable_metrics enable_mfu_metrics"
    " kv_events_config",
}
WHILE_IT_RUNS = frozenset(name for names in GROUPS.values() for name in names.split())
"""Arguments that change no weights."""
BEGIN_WHILE_IT_RUNS = (
    "cuda_graph_", "disaggregation_", "grpc_", "hicache_", "http2_", "kv_canary", "log_", "otlp_", "prefill_delayer_",
    "radix_", "schedule_", "ssl_", "tokenizer_", "triton_attention_", "weight_loader_",
)  # fmt: skip
"""How the names of further such arguments begin."""
BESIDE_THE_CLASS = ("cpu_offload_gb", "enable_lora", "max_loaded_loras", "max_lora_rank", "max_loras_per_batch")
BEGIN_BESIDE_THE_CLASS = ("lora_", "offload_")
"""Arguments that change what a GPU holds, but not what SGLang's class of the model builds."""
REDUNDANT = "SGLang would place experts by its own table, which is not built here, so their weights cannot be followed"
UNKNOWN_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "ep_num_redundant_experts": ((None, 0), REDUNDANT),
    "init_expert_location": ((None, "trivial"), REDUNDANT),
}
"""Argument -> the values with which it changes nothing, and why others cannot be answered."""


@dataclass(frozen=True, kw_only=True)
class PassedOn:
    """A run's engine.args, divided."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """What SGLang is given."""
    while_it_runs: tuple[str, ...] = ()
    """Names of those that matter only while an engine runs."""
    not_counted: tuple[str, ...] = ()
    """Names of those that change what a GPU holds in a way that is not known here."""

    def as_lines(self) -> list[str]:
        """Return a sentence on each kind of arguments that SGLang is not given."""
        lines = []
        if self.while_it_runs:
            lines.append(f"not given to SGLang, as they change no weights: engine.args {', '.join(self.while_it_runs)}")
        if self.not_counted:
            names = ", ".join(self.not_counted)
            lines.append(f"not taken into account, though a GPU may hold more or less with them: engine.args {names}")
        return lines


def divided(arguments: Mapping[str, Any]) -> PassedOn:
    """Divide engine.args. Raise UnsupportedEnvironment for one whose weights cannot be followed here."""
    for name, (harmless, why) in UNKNOWN_HERE.items():
        if arguments.get(name) not in harmless:
            raise UnsupportedEnvironment(
                f"engine.args.{name} = {arguments[name]!r} cannot be answered: {why}; remove it to ask without it"
            )
    not_counted = [name for name in arguments if _is_beside(name, arguments)]
    rest = [name for name in arguments if name not in not_counted]
    runs = [name for name in rest if name in WHILE_IT_RUNS or name.startswith(BEGIN_WHILE_IT_RUNS)]
    return PassedOn(
        arguments={name: arguments[name] for name in rest if name not in runs},
        while_it_runs=tuple(runs),
        not_counted=tuple(not_counted),
    )


def _is_beside(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether an argument changes what a GPU holds beside the model's class, such as a draft of another
    checkpoint.
    """
    if name.startswith("speculative_"):
        return not sends_mtp_layer(arguments)
    return name in BESIDE_THE_CLASS or name.startswith(BEGIN_BESIDE_THE_CLASS)
