"""Rules that need the model's config.json: shapes that the mesh cannot divide, prompts that are too long.

They follow sglang 0.5.20 and work for any architecture that uses the common field names. A rule whose field is missing
is skipped.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.facts import Device, Facts
from harness.config.fp8_rules import fp8_model
from harness.config.layers import nearest
from harness.config.rules import QUANTIZED, BrokenRule
from harness.config.schema import TINY_MODELS, Config

CPU_PADS = "SGLang refuses it on CUDA, while its CPU mode pads the model (--engine.device cpu)"
EXPERTS = "n_routed_experts num_local_experts num_experts"
CONTEXT = "max_sequence_length seq_length max_seq_len model_max_length max_position_embeddings"
COUNTS = (
    "hidden_size intermediate_size vocab_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    " moe_intermediate_size num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok n_group"
)
"""Fields that must be whole numbers of at least 1."""
TABLES = ("quantization_config", "rope_parameters", "rope_scaling")
NO_CPU_BUILD = "of which no CPU build is published"
SPARSE = "for its sparse attention (DSA) SGLang asks torch.cuda which GPU there is, and has kernels for GPUs alone"
HYBRID = f"its class takes kernels of sgl_kernel when it is imported, {NO_CPU_BUILD}"
CPU_MODELS = {
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
    "gpt_oss": f"its attention sinks need a GPU backend (triton, fa3 and the like), or intel_amx in sgl_kernel, {NO_CPU_BUILD}",
    "lfm2_moe": f"its short convolutions need kernels of sgl_kernel.mamba, {NO_CPU_BUILD}",
    "minimax_m2": "its norm of queries and keys is a Triton kernel (rms_sumsq_serial), and Triton needs a GPU",
    "qwen2_moe": "its shared expert ends in a Triton kernel (fused_gate_sigmoid_mul_add), and Triton needs a GPU",
    "qwen3_5": HYBRID,
    "qwen3_5_moe": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": f"its linear attention needs kernels of FLA (on a GPU) or of sgl_kernel.mamba, {NO_CPU_BUILD}",
}
"""model_type -> why CPU mode cannot serve it."""


class _Sizes:
    """The whole numbers of a config by name; None for a missing one.

    For a multi-modal model: those of its language part.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        inner = fields.get("text_config")
        self.fields: Mapping[str, Any] = {**fields, **inner} if isinstance(inner, Mapping) else fields
        self.is_mla = self["kv_lora_rank"] is not None

    def __getitem__(self, names: str) -> int | None:
        """Return the first of these names, separated by spaces, that is above 0."""
        values = (self.fields.get(name) for name in names.split())
        return next((value for value in values if type(value) is int and value > 0), None)


def model_rules(config: Config, facts: Facts, device: Device | None) -> Iterator[BrokenRule]:
    """Yield what is wrong with the model, or with this mesh for it. Yield nothing if its config.json is unknown."""
    yield from _overrides(config, facts)
    if not facts.model:
        return
    sizes = _Sizes(facts.model)
    yield from _kind(config, facts, device)
    layers = sizes["num_hidden_layers"]
    if layers and layers < config.parallel.pp:
        yield BrokenRule("parallel.pp", f"the model has only {layers} layers; use at most {layers} pipeline stages")
    yield from _heads(sizes, config)
    yield from _experts(sizes, config, device)
    yield from fp8_model(config, sizes.fields, facts.sglang)
    if device == "cuda" and (why := _indivisible(sizes, config)):
        yield BrokenRule("parallel.tp", f"{why}; {CPU_PADS}")
    yield from _context(sizes, config)


def padding_warnings(config: Config, facts: Facts) -> Iterator[str]:
    """Yield a sentence if SGLang's CPU mode pads sizes that CUDA would refuse."""
    if why := _indivisible(_Sizes(facts.model or {}), config):
        yield f"parallel.tp = {config.parallel.tp}: {why}; {CPU_PADS}."


def _overrides(config: Config, facts: Facts) -> Iterator[BrokenRule]:
    for name, value in config.model.overrides.items() if config.model.name in TINY_MODELS else ():
        if name in COUNTS.split() and (type(value) is not int or value < 1):
            yield BrokenRule(f"model.overrides.{name}", "must be a whole number of at least 1")
        is_json = isinstance(value, str) and value.lstrip().startswith("{")
        if is_json or (name in TABLES and not isinstance(value, Mapping)):
            yield BrokenRule(
                f"model.overrides.{name}",
                """must be a table as TOML writes it, with = where JSON has a colon: '{rope_type = "default"}'""",
            )
        if facts.overridable is not None and name not in facts.overridable:
            hint = nearest(name, sorted(facts.overridable), "see its config class in transformers")
            yield BrokenRule(
                f"model.overrides.{name}", f"the config of {config.model.name} has no field {name}; {hint}"
            )


def _kind(config: Config, facts: Facts, device: Device | None) -> Iterator[BrokenRule]:
    fields = facts.model or {}
    kind = fields.get("model_type")
    quantization = fields.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method", "unknown")
        why = f"its checkpoint is quantized ({method}, says quantization_config in its config.json), and {QUANTIZED}"
        yield BrokenRule("model.name", f"{why}; use a checkpoint that is not quantized")
    if facts.model_types is not None and kind not in facts.model_types:
        hint = nearest(str(kind), facts.model_types, "give a model that it has, or install a newer transformers")
        what = f'model_type = "{kind}"' if kind else "no model_type"
        code = ", and the trainer runs no code of a model (auto_map)" if "auto_map" in fields else ""
        why = f"its config.json has {what}, for which the installed transformers has no causal language model{code}"
        yield BrokenRule("model.name", f"{why}; {hint}")
    if device == "cpu" and kind in CPU_MODELS:
        why = f"SGLang's CPU mode cannot serve a {kind} model: {CPU_MODELS[kind]}; use a GPU, or another model"
        yield BrokenRule("model.name", why, unsupported=True)
    if device == "cpu" and "kv_lora_rank" in fields and facts.sglang and not facts.sglang.serves_mla_on_cpu:
        why = f"sglang {facts.sglang.version} cannot serve an MLA model (DeepSeek) on the CPU; 0.5.12 and newer can"
        yield BrokenRule("model.name", why, unsupported=True)


def _heads(sizes: _Sizes, config: Config) -> Iterator[BrokenRule]:
    multiples = [(EXPERTS, "n_group")]
    if not sizes.is_mla:
        multiples.append(("num_attention_heads", "num_key_value_heads"))
        multiples += [] if sizes["head_dim"] else [("hidden_size", "num_attention_heads")]
    for names, divisor in multiples:
        size, by = sizes[names], sizes[divisor]
        if size and by and size % by:
            name = next(each for each in names.split() if sizes[each])
            overridden = [each for each in (name, divisor) if each in config.model.overrides]
            key = f"model.overrides.{overridden[0]}" if overridden else "model.name"
            yield BrokenRule(key, f"the model's {name} = {size} must be a multiple of its {divisor} = {by}")


def _indivisible(sizes: _Sizes, config: Config) -> str:
    """Return which sizes the tensor-parallel ranks cannot share equally; "" if they can share all."""
    tp, found = config.parallel.tp, []
    heads, kv_heads, width = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["intermediate_size"]
    if heads and heads % tp:
        found.append(f"the model's {heads} attention heads cannot be divided by it")
    if kv_heads and not sizes.is_mla and kv_heads % tp and tp % kv_heads:
        found.append(f"it must divide the model's {kv_heads} key-value heads, or be a multiple of them")
    if width and width % tp:
        found.append(f"the model's intermediate size {width} cannot be divided by it")
    return "; ".join(found)


def _experts(sizes: _Sizes, config: Config, device: Device | None) -> Iterator[BrokenRule]:
    experts, chosen, width = sizes[EXPERTS], sizes["num_experts_per_tok"], sizes["moe_intermediate_size"]
    if config.rollout.routing != "off" and not (experts and chosen):
        yield BrokenRule(
            "rollout.routing",
            'the model has no experts, or no num_experts_per_tok, which SGLang needs to report them; use "off"',
        )
    tp, arguments = config.parallel.tp, config.engine.args
    if experts and chosen and chosen > experts:
        key = next((each for each in config.model.overrides if each in ("num_experts_per_tok", *EXPERTS.split())), "")
        why = f"num_experts_per_tok = {chosen} is more than the model's {experts} experts"
        yield BrokenRule(f"model.overrides.{key}" if key else "model.name", why)
    name = next((each for each in ("ep_size", "expert_parallel_size") if arguments.get(each)), "")
    ranks = arguments.get(name, 1)
    if not experts or type(ranks) is not int:  # SGLang reports it
        return
    if tp % ranks or experts % ranks:
        yield BrokenRule(f"engine.args.{name}", f"must divide parallel.tp = {tp} and the model's {experts} experts")
    elif device == "cuda" and width and width % (tp // ranks):
        ways = f"{tp // ranks} ranks (parallel.tp / engine.args.ep_size)"
        yield BrokenRule(
            "parallel.tp", f"an expert's intermediate size {width} does not divide over {ways}; {CPU_PADS}"
        )


def _context(sizes: _Sizes, config: Config) -> Iterator[BrokenRule]:
    asked, context = config.engine.args.get("context_length"), sizes[CONTEXT]
    tables = (sizes.fields.get(name) for name in ("rope_scaling", "rope_parameters"))
    rope = next((each for each in tables if each and isinstance(each, Mapping)), {})
    source, factor = "the model's context", rope.get("factor", 1)
    if context and "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3":
        context = int(factor * context) if type(factor) in (int, float) else context  # as SGLang derives it
    if type(asked) is int and (context is None or asked <= context):
        source, context = "engine.args.context_length", asked
    prompt, response = config.task.max_prompt_tokens, config.rollout.max_response_tokens
    if context is not None and prompt + response > context:
        total = f"with task.max_prompt_tokens = {prompt} it is {prompt + response} tokens"
        yield BrokenRule("rollout.max_response_tokens", f"{total}, and {source} is {context}; lower one of the two")
