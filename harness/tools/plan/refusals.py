"""Why a model cannot be served on a mesh, or cannot hold a prompt and its response: known from config.json alone.

--check, --dry-run, the quickstart and the launch all ask here. Rules as of sglang 0.5.20, for any architecture whose config
names its sizes as most do; a size that is not there is not judged.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from harness.config.schema import Config

CPU_PADS = "SGLang refuses it on CUDA; its CPU mode pads the model (--engine.device cpu)"
EXPERTS = "n_routed_experts num_local_experts num_experts"
CONTEXT = "max_sequence_length seq_length max_seq_len model_max_length max_position_embeddings"
CPU_MODELS = {
    "qwen2_moe": "its shared expert ends in a Triton kernel (fused_gate_sigmoid_mul_add), and Triton needs a GPU",
    "gpt_oss": "SGLang serves it with GPU attention backends only (triton, fa3, trtllm_mha and the like)",
    "qwen3_next": "SGLang keeps the state of its linear attention in a buffer that needs a GPU (FLA)",
}
"""model_type -> why CPU mode cannot serve it."""
CPU_ARGUMENTS = {
    "speculative_algorithm": ("", "SGLang's draft workers wait for CUDA streams"),
    "kv_cache_dtype": (
        "fp8",
        "SGLang's FP8 KV cache needs CPU kernels that the import-only stand-in for sgl_kernel does not have",
    ),
}
"""Engine argument -> how the values begin that CPU mode cannot serve, and why."""


class _Sizes:
    """Whole numbers of a config by name, those of a multi-modal model's language part; None for a missing one."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        inner = fields.get("text_config")
        self.fields: Mapping[str, Any] = {**fields, **inner} if isinstance(inner, Mapping) else fields
        self.is_mla = self["kv_lora_rank"] is not None

    def __getitem__(self, names: str) -> int | None:
        """Return the first of these names, separated by spaces, that is above 0."""
        values = (self.fields.get(name) for name in names.split())
        return next((value for value in values if type(value) is int and value > 0), None)


def refusals(fields: Mapping[str, Any], config: Config, device: Literal["cpu", "cuda"]) -> Iterator[str]:
    """Yield a sentence for each reason why this model cannot be served on this mesh. fields: of its config.json."""
    sizes, parallel = _Sizes(fields), config.parallel
    layers = sizes["num_hidden_layers"]
    if layers and layers < parallel.pp:
        yield f"parallel.pp = {parallel.pp} is more than the model's {layers} layers."
    multiples = [(EXPERTS, "n_group")]
    if not sizes.is_mla:
        multiples.append(("num_attention_heads", "num_key_value_heads"))
        multiples += [] if sizes["head_dim"] else [("hidden_size", "num_attention_heads")]
    for names, divisor in multiples:
        size, by = sizes[names], sizes[divisor]
        if size and by and size % by:
            given = [f"model.overrides.{name}" if name in config.model.overrides else name for name in (names, divisor)]
            yield f"{given[0].split()[0]} = {size} must be a multiple of {given[1]} = {by}."
    yield from _experts(sizes, config, device)
    if device == "cuda":
        yield from padded(fields, config)
    yield from _too_long(sizes, config)


def padded(fields: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield a sentence for each size that SGLang's CPU mode pads, and CUDA would refuse."""
    sizes, tp = _Sizes(fields), config.parallel.tp
    heads, kv_heads, width = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["intermediate_size"]
    if heads and heads % tp:
        yield f"parallel.tp = {tp} does not divide the model's {heads} attention heads: {CPU_PADS}."
    if kv_heads and not sizes.is_mla and kv_heads % tp and tp % kv_heads:
        yield f"parallel.tp = {tp} and the model's {kv_heads} key-value heads: one must divide the other; {CPU_PADS}."
    if width and width % tp:
        yield f"parallel.tp = {tp} does not divide the model's intermediate size {width}: {CPU_PADS}."


def cpu_refusals(model_type: str | None, engine_args: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each reason why CPU mode cannot serve this model with these engine arguments.

    model_type: as the model's config.json names it; None where it is not known yet.
    """
    if model_type in CPU_MODELS:
        yield (
            f"CPU mode cannot serve a model of model_type {model_type}: {CPU_MODELS[model_type]}; use a GPU, or another model."
        )
    for name, (beginning, reason) in CPU_ARGUMENTS.items():
        value = engine_args.get(name)
        if value and str(value).startswith(beginning):
            yield f"CPU mode cannot serve engine.args.{name} = {value!r}: {reason}; use a GPU, or leave it out."


def _experts(sizes: _Sizes, config: Config, device: Literal["cpu", "cuda"]) -> Iterator[str]:
    experts, chosen, width = sizes[EXPERTS], sizes["num_experts_per_tok"], sizes["moe_intermediate_size"]
    tp, arguments = config.parallel.tp, config.engine.args
    ranks = arguments.get("ep_size") or arguments.get("expert_parallel_size") or 1
    if experts and chosen and chosen > experts:
        yield f"num_experts_per_tok = {chosen} is more than the model's {experts} experts."
    if not experts or type(ranks) is not int:  # SGLang reports it
        return
    if tp % ranks or experts % ranks:
        yield f"engine.args.ep_size = {ranks} must divide parallel.tp = {tp} and the model's {experts} experts."
    elif device == "cuda" and width and width % (tp // ranks):
        ways = f"{tp // ranks} ranks (parallel.tp / engine.args.ep_size)"
        yield f"an expert's intermediate size {width} does not divide over {ways}: {CPU_PADS}."


def _too_long(sizes: _Sizes, config: Config) -> Iterator[str]:
    asked, context = config.engine.args.get("context_length"), sizes[CONTEXT]
    rope = sizes.fields.get("rope_scaling") or sizes.fields.get("rope_parameters") or {}
    source = "the model's context"
    if context and "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3":
        context = int(rope.get("factor", 1) * context)  # as SGLang derives it
    if type(asked) is int and (context is None or asked <= context):
        source, context = "engine.args.context_length", asked
    prompt, response = config.task.max_prompt_tokens, config.rollout.max_response_tokens
    if context is not None and prompt + response > context:
        yield (
            f"task.max_prompt_tokens = {prompt} and rollout.max_response_tokens = {response} are {prompt + response}"
            f" tokens, and {source} is {context}: lower one of them."
        )
