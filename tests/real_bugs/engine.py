"""Bugs of SGLang, planted in its schedulers. SGLang's code is not copied: each replaces one function of 0.5.23."""

import sys
from typing import Any

from tests.real_bugs.bug import acted, bug

V2 = "sglang.srt.models.deepseek_v2"
TOPK = "sglang.srt.layers.moe.topk"
DEEPSEEK, MOE = "model.name=deepseek_v3", "model.name=qwen3_moe"
MTP = {"config": "configs/cpu/mtp.toml"}
STALE = {"slugs": ("stale-copy-of-weights",)}


# Another model than the trainer's.


@bug(
    "S01", "sglang#2009", "a tied head is a tensor of its own, filled with a shard of the embedding's shard",
    "sglang.srt.models.llama:LlamaForCausalLM.__init__", "model.name=llama", "model.overrides.tie_word_embeddings=true",
    says="lm_head", slugs=("tied-embeddings",),
)  # fmt: skip
def head_of_its_own(init: Any, model: Any, config: Any, *arguments: Any, **named: Any) -> None:
    init(model, config, *arguments, **named)
    embedding = model.model.embed_tokens
    model.lm_head = head = type(embedding)(config.vocab_size, config.hidden_size)
    load, rows = embedding.weight.weight_loader, len(embedding.weight) // embedding.tp_size
    first = embedding.shard_indices.org_vocab_start_index // embedding.tp_size

    def load_both(weight: Any, loaded: Any) -> None:
        load(weight, loaded)
        head.weight.data[:rows].copy_(weight.data[first:][:rows])
        acted()

    embedding.weight.weight_loader = load_both


@bug(
    "S03", "sglang#14745", "rope_theta in rope_parameters is not read, so that the default base is used",
    "sglang.srt.models.qwen2:get_rope_config",
    'model.overrides.rope_parameters={rope_type = "default", rope_theta = 1e6}',
)  # fmt: skip
def default_rope_base(read: Any, config: Any) -> tuple[Any, Any]:
    base, scaling = read(config)
    if base != 10000:
        acted()
    return 10000, scaling


@bug(
    "S10", "sglang#10440", "the router uses a copy of the correction bias from before it was loaded",
    f"{TOPK}:TopK.__init__", DEEPSEEK,
)  # fmt: skip
def bias_from_before_the_load(init: Any, topk: Any, *arguments: Any, **named: Any) -> None:
    if named.get("correction_bias") is not None:
        named["correction_bias"] = named["correction_bias"].detach().clone().zero_()
        acted()
    init(topk, *arguments, **named)


@bug("S11", "sglang#31449", "routed_scaling_factor is left out", f"{V2}:DeepseekV2MoE.__init__", DEEPSEEK)
def no_scaling_factor(init: Any, block: Any, *arguments: Any, **named: Any) -> None:
    init(block, *arguments, **named)
    block.routed_scaling_factor = 1.0
    acted()


@bug(
    "S15", "sglang#32430", "gate and up projections of the experts are loaded in the wrong order",
    "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE._load_w13", MOE,
)  # fmt: skip
def up_before_gate(load: Any, experts: Any, *arguments: Any, shard_id: str, **named: Any) -> None:
    load(experts, *arguments, shard_id={"w1": "w3", "w3": "w1"}[shard_id], **named)
    acted()


@bug(
    "S16", "sglang#29783", "the router of a float32 model multiplies in bfloat16",
    f"{V2}:MoEGate.forward", DEEPSEEK,
)  # fmt: skip
def router_in_bfloat16(forward: Any, gate: Any, hidden: Any, *_: Any, **__: Any) -> Any:
    acted()
    return (hidden.bfloat16() @ gate.weight.bfloat16().T).float()


@bug(
    "S17", "sglang#29729", "the cosines and sines of a float32 model are kept in bfloat16",
    "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding._compute_cos_sin_cache",
)  # fmt: skip
def rope_in_bfloat16(compute: Any, rope: Any) -> Any:
    acted()
    return compute(rope).bfloat16().float()


@bug(
    "N05", "AReaL#940", "the experts' weights are applied to their input instead of their output",
    "sglang.srt.layers.moe.fused_moe_native:moe_forward_native", MOE,
)  # fmt: skip
def scores_before_experts(forward: Any, layer: Any, x: Any, chosen: Any, config: Any) -> Any:
    acted()
    weights, ids = chosen.topk_weights, chosen.topk_ids
    ones = weights.new_ones(len(x), 1)
    return sum(
        forward(layer, x * weights[:, [k]].to(x), chosen._replace(topk_weights=ones, topk_ids=ids[:, [k]]), config)
        for k in range(ids.shape[1])
    )


# Another log-prob, record or version reported than is true.


@bug(
    "S02", "sglang#2664", "output log-probs are made without the temperature",
    "sglang.srt.layers.sampler:Sampler.forward", "rollout.temperature=0.7", says="reported are log-probs at temperature 1",
    slugs=("log-prob-mismatch",),
)  # fmt: skip
def log_probs_without_temperature(forward: Any, sampler: Any, out: Any, info: Any, *rest: Any, **named: Any) -> Any:
    acted()
    return forward(sampler, out, info, *rest, **named | {"logprob_logits": out.next_token_logits * info.temperatures})


@bug(
    "S04", "sglang#1795", "the log-prob of the decode step before is reported",
    "sglang.srt.layers.logprob_processor:OutputLogprobProcessor.compute_logprobs",
)  # fmt: skip
def log_probs_one_step_late(compute: Any, processor: Any, *arguments: Any) -> Any:
    result = compute(processor, *arguments)
    before, processor.before = getattr(processor, "before", None), result.token_logprobs
    if before is not None and before.shape == result.token_logprobs.shape:
        result.token_logprobs = before
        acted()
    return result


@bug(
    "S14", "miles#586", "the engine does not record the version of its weights",
    "sglang.srt.managers.scheduler:Scheduler.record_weight_version_change", says="did not record the version",
)  # fmt: skip
def version_not_recorded(record: Any, scheduler: Any, new_version: Any) -> None:
    acted()


@bug(
    "S23", "sglang#23885", "the experts of the prefill are reported as all zero",
    "sglang.srt.state_capturer.base:BaseTopkCapturer.on_forward_end", MOE, "rollout.routing=record",
    says="record of experts is wrong",
)  # fmt: skip
def no_experts_of_the_prefill(end: Any, capturer: Any, **named: Any) -> Any:
    if named["forward_batch"].forward_mode.is_extend():
        capturer.device_cache.buffer.zero_()
        acted()
    return end(capturer, **named)


# Something old in use after an update.


@bug(
    "S13", "RLinf#96", "flush_cache answers success and keeps the prefixes",
    "sglang.srt.managers.scheduler:Scheduler.flush_cache", says="prefix cache", slugs=("cache-not-flushed",),
)  # fmt: skip
def nothing_flushed(flush: Any, *_: Any, **__: Any) -> bool:
    acted()
    return True


@bug(
    "S24", "sglang#35883 (class)", "the router computes with a copy of its correction bias, which nothing trains",
    f"{TOPK}:TopK.forward_native", DEEPSEEK, says="correction_bias", **STALE,
)  # fmt: skip
def bias_kept_in_a_copy(forward: Any, topk: Any, *arguments: Any, **named: Any) -> Any:
    config = topk.topk_config
    if config._correction_bias_dtype_cache is None:
        config.correction_bias = config._correction_bias_dtype_cache = config.correction_bias.detach().clone()
    acted()
    return forward(topk, *arguments, **named)


def with_weight(forward: Any, module: Any, weight: Any, arguments: Any, named: Any) -> Any:
    """Compute with another weight than the module's own."""
    own, module.weight.data = module.weight.data, weight
    try:
        acted()
        return forward(module, *arguments, **named)
    finally:
        module.weight.data = own


def kept_copies(module: str) -> dict[int, Any]:
    """Return a dict of that module, which a bug keeps copies in."""
    return vars(sys.modules[module]).setdefault("_KEPT", {})


@bug(
    "S25", "sglang#35883", "the router computes with a copy of its weight, kept in a dict of its own module",
    f"{V2}:MoEGate.forward", DEEPSEEK, "actor.learning_rate=1e-6", says=r"gate\.weight", **STALE,
)  # fmt: skip
def router_kept_in_a_copy(forward: Any, gate: Any, *arguments: Any, **named: Any) -> Any:
    weight = kept_copies(V2).setdefault(id(gate), gate.weight.detach().clone())
    return with_weight(forward, gate, weight, arguments, named)


@bug(
    "S25b", "sglang#35883 (class)", "the same, kept in a dict of another module",
    f"{V2}:MoEGate.forward", DEEPSEEK, "actor.learning_rate=1e-6", says=r"gate\.weight|stale-copy|is old", **STALE,
)  # fmt: skip
def router_kept_elsewhere(forward: Any, gate: Any, *arguments: Any, **named: Any) -> Any:
    weight = kept_copies("sglang.srt.layers.moe.utils").setdefault(id(gate), gate.weight.detach().clone())
    return with_weight(forward, gate, weight, arguments, named)


@bug(
    "N07", "sglang#6265", "w_kc is derived from kv_b_proj at the first load, and never again",
    "sglang.srt.models.deepseek_common.deepseek_weight_loader:DeepseekV2WeightLoaderMixin.post_load_weights",
    DEEPSEEK, "engine.initial_weights=checkpoint", "model.dtype=bfloat16", "actor.learning_rate=1e-6",
    says="w_kc", slugs=("dsv3-absorbed-stale", "stale-copy-of-weights"),
)  # fmt: skip
def derived_once(derive: Any, model: Any, *arguments: Any, **named: Any) -> None:
    kept = [(each, each.w_kc) for each in model.modules() if getattr(each, "w_kc", None) is not None]
    for attention, _ in kept:
        attention.w_kc = None
    derive(model, *arguments, **named)
    for attention, w_kc in kept:
        attention.w_kc = w_kc
        acted()


@bug(
    "N10", "miles#890", "a pull is not followed by what derives tensors",
    "harness.weights.pull.puller:Puller.pull", DEEPSEEK, "weights.transport=pull",
    says="w_kc|w_vc", slugs=("dsv3-absorbed-stale",),
)  # fmt: skip
def nothing_derived_after_a_pull(pull: Any, puller: Any, *arguments: Any) -> None:
    puller.model.post_load_weights = lambda *_, **__: acted()
    try:
        pull(puller, *arguments)
    finally:
        del puller.model.post_load_weights


@bug(
    "N14", "none", "healthy: a router keeps a clone of its first weight for debugging, and never computes with it",
    f"{V2}:MoEGate.forward", DEEPSEEK, expected="passes",
)  # fmt: skip
def unused_clone(forward: Any, gate: Any, *arguments: Any, **named: Any) -> Any:
    if not hasattr(gate, "first_weight"):
        gate.first_weight = gate.weight.detach().clone()
        acted()
    return forward(gate, *arguments, **named)


# A draft model that updates do not reach.


@bug(
    "S08", "sglang#7415", "no update call reaches the draft model",
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager._select_runners",
    says="draft", slugs=("mtp-draft-stale",), **MTP,
)  # fmt: skip
def target_alone(select: Any, manager: Any, *arguments: Any) -> Any:
    acted()
    return [(role, runner) for role, runner in select(manager, *arguments) if role == "target"]


@bug(
    "S26", "sglang#7415", "buckets do not reach the draft model, other calls do",
    "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater._update_weights_from_flattened_bucket",
    says="draft", slugs=("mtp-draft-stale",), **MTP,
)  # fmt: skip
def no_buckets_for_the_draft(update: Any, updater: Any, *arguments: Any, **named: Any) -> Any:
    if type(updater.get_model()).__name__.endswith("NextN"):
        acted()
        return True, "Success"
    return update(updater, *arguments, **named)
