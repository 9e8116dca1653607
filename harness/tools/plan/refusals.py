"""Why a model cannot be served on a mesh, or cannot hold a prompt and its response: known from config.json alone.

--check, --dry-run, the quickstart and the launch all ask here. Rules as of sglang 0.5.20, for any architecture whose config
names its sizes as most do; a size that is not there is not judged.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from harness.config.schema import Config

CPU_PADS = "SGLang refuses it on CUDA; its CPU mode pads the model (--engine.device cpu)"


class _Sizes:
    """Whole numbers of a config by name, those of a multi-modal model's language part; None for a missing one."""

    def __init__(self, fields: Mapping[str, Any], shape: Mapping[str, Any] | None = None) -> None:
        """shape: model.overrides, whose keys are the user's own."""
        self.shape = shape or {}
        inner = fields.get("text_config")
        self.fields: Mapping[str, Any] = {**fields, **inner} if isinstance(inner, Mapping) else fields

    def __getitem__(self, names: str) -> int | None:
        """Return the first of these names, separated by spaces, that is above 0."""
        values = (self.fields.get(name) for name in names.split())
        return next((value for value in values if type(value) is int and value > 0), None)

    def key(self, name: str) -> str:
        """Return the name as the user wrote it, if the user did."""
        return f"model.overrides.{name}" if name in self.shape else f"the model's {name}"


def refusals(fields: Mapping[str, Any], config: Config, device: Literal["cpu", "cuda"]) -> Iterator[str]:
    """Yield a sentence for each reason why this model cannot be served on this mesh. fields: of its config.json."""
    sizes, parallel = _Sizes(fields, config.model.overrides), config.parallel
    layers = sizes["num_hidden_layers"]
    if layers is not None and layers < parallel.pp:
        yield f"parallel.pp = {parallel.pp} is more than the model's {layers} layers."
    yield from _inconsistent(sizes)
    yield from _experts(sizes, config, device)
    if device == "cuda":
        yield from _uneven(sizes, parallel.tp)
    yield from _too_long(sizes, config)


def padded(fields: Mapping[str, Any], config: Config) -> list[str]:
    """Return a sentence for each size that SGLang's CPU mode pads, and CUDA would refuse."""
    return list(_uneven(_Sizes(fields), config.parallel.tp))


def context_length(fields: Mapping[str, Any]) -> int | None:
    """Return the tokens that the model has positions for, as SGLang derives them, None if its config does not say."""
    sizes = _Sizes(fields)
    length = sizes["max_sequence_length seq_length max_seq_len model_max_length max_position_embeddings"]
    rope = sizes.fields.get("rope_scaling") or sizes.fields.get("rope_parameters") or {}
    if length is None or "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3":
        return length
    return int(rope.get("factor", 1) * length)


def _uneven(sizes: _Sizes, tp: int) -> Iterator[str]:
    heads, kv_heads, width = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["intermediate_size"]
    is_mla = sizes["kv_lora_rank"] is not None
    if heads is not None and heads % tp:
        yield f"parallel.tp = {tp} does not divide the model's {heads} attention heads: {CPU_PADS}."
    if kv_heads is not None and not is_mla and kv_heads % tp and tp % kv_heads:
        yield (f"parallel.tp = {tp} and the model's {kv_heads} key-value heads: one must divide the other; {CPU_PADS}.")
    if width is not None and width % tp:
        yield f"parallel.tp = {tp} does not divide the model's intermediate size {width}: {CPU_PADS}."


def _inconsistent(sizes: _Sizes) -> Iterator[str]:
    """Yield sizes of which no attention can be made, on any device."""
    heads, kv_heads, hidden = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["hidden_size"]
    is_mla = sizes["kv_lora_rank"] is not None
    if heads is None or is_mla:
        return
    if kv_heads is not None and heads % kv_heads:
        yield f"{sizes.key('num_attention_heads')} = {heads} is not a multiple of num_key_value_heads = {kv_heads}."
    if hidden is not None and sizes["head_dim"] is None and hidden % heads:
        yield f"{sizes.key('num_attention_heads')} = {heads} does not divide hidden_size = {hidden}."


def _experts(sizes: _Sizes, config: Config, device: Literal["cpu", "cuda"]) -> Iterator[str]:
    experts = sizes["n_routed_experts num_local_experts num_experts"]
    chosen, width = sizes["num_experts_per_tok"], sizes["moe_intermediate_size"]
    if experts is None:
        return
    if chosen is not None and chosen > experts:
        yield f"{sizes.key('num_experts_per_tok')} = {chosen} is more than the model's {experts} experts."
    groups = sizes["n_group"]
    if groups is not None and experts % groups:
        yield f"{sizes.key('n_group')} = {groups} does not divide the model's {experts} experts."
    tp, arguments = config.parallel.tp, config.engine.args
    ranks = arguments.get("ep_size") or arguments.get("expert_parallel_size") or 1
    if type(ranks) is not int:
        return  # SGLang reports it
    if tp % ranks or experts % ranks:
        yield f"engine.args.ep_size = {ranks} must divide parallel.tp = {tp} and the model's {experts} experts."
    elif device == "cuda" and width is not None and width % (tp // ranks):
        yield (
            f"an expert's intermediate size {width} does not divide over {tp // ranks} ranks (parallel.tp /"
            f" engine.args.ep_size): {CPU_PADS}."
        )


def _too_long(sizes: _Sizes, config: Config) -> Iterator[str]:
    asked = config.engine.args.get("context_length")
    context = asked if type(asked) is int else context_length(sizes.fields)
    prompt, response = config.task.max_prompt_tokens, config.rollout.max_response_tokens
    if context is not None and prompt + response > context:
        source = "engine.args.context_length" if type(asked) is int else "the model's context"
        yield (
            f"task.max_prompt_tokens = {prompt} and rollout.max_response_tokens = {response} are {prompt + response}"
            f" tokens, and {source} is {context}: lower one of them."
        )
