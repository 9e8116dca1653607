"""Range and cross-field validation of a config: what the types of its fields do not say."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from string import Formatter
from typing import Literal

from harness.config.layers import ConfigError, nearest, shown
from harness.config.schema import TINY_MODELS, Config, Updates
from harness.runtime.phases import PHASES
from harness.task.rewards import HANDED_IN, REWARDS, is_reward

Rule = tuple[bool, str, str]
"""Whether it is kept, the key, and what to say: "must ...", or why it cannot work and what to use."""

_AT_LEAST_1 = (
    "dp tp pp steps prompts_per_step responses_per_prompt max_response_tokens max_prompt_tokens bucket_size_mib kl_horizon"
    " minibatch_size microbatch_size ppo_epochs"
)
_AT_LEAST_0 = (
    "seed rows weight_decay entropy_coefficient value_clip kl_coefficient kl_target warmup_steps critic_warmup"
    " importance_cap epochs every keep validation.temperature tokens_per_microbatch"
)
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("at least 1", lambda value: value >= 1, _AT_LEAST_1),
    ("above 0", lambda value: value > 0, "timeout_seconds learning_rate max_grad_norm clip_low clip_high"),
    ("0 or more", lambda value: value >= 0, _AT_LEAST_0),
    ("between 0 and 1", lambda value: 0 <= value <= 1, "gamma lam warmup_ratio"),
    ("below 1", lambda value: value < 1, "clip_low"),
    ("above 0 and at most 1", lambda value: 0 < value <= 1, "top_p"),
    ("0 (off) or above 1", lambda value: value == 0 or value > 1, "dual_clip"),
    ("between 1024 and 60000", lambda value: 1024 <= value <= 60000, "base_port"),
    ("at least 3 (hosts send heartbeats once a second)", lambda value: value >= 3, "heartbeat_timeout"),
    # Below, and with top_k 1, SGLang samples greedily and reports log-probs at temperature 1.
    ("at least 1e-06 (greedy responses teach nothing)", lambda value: value >= 1e-6, "rollout.temperature"),
    ("-1 (all tokens) or at least 2 (1 is greedy)", lambda value: value == -1 or value >= 2, "top_k"),
)
"""What is allowed, and the keys: of whatever section, where none is named."""

DERIVED_ENGINE_ARGUMENTS = {
    "model.name": "model_path",
    "model.dtype": "dtype",
    "engine.device": "device",
    "parallel.tp": "tp_size",
    "parallel.pp": "pp_size",
    "torchrun's --nnodes": "nnodes node_rank",
    "engine.base_port": "dist_init_addr nccl_port port",
    "CUDA_VISIBLE_DEVICES": "base_gpu_id gpu_id_step",
    "run.seed": "random_seed",
    "engine.initial_weights": "load_format",
}
"""What the harness derives arguments of sglang.Engine from, and these arguments."""

QUANTIZED = (
    "a quantized engine takes quantized tensors with their scales, and the trainer has neither, or keeps parameters of other"
    " shapes, which no later load fits"
)


def check(config: Config) -> None:
    """Raise ConfigError, one sentence, for the first value or combination that cannot work."""
    for rules in (_values, _batches, _rollout, _algorithm, _optimizers, _engine, _updates, _memory):
        _require(config, rules(config))
    if config.engine.device != "auto":
        check_transport(config, config.engine.device)


def check_transport(
    config: Config, device: Literal["cpu", "cuda"], environment: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError where weights cannot travel, on that device, the way the config asks for.

    Apart from `check`, since engine.device = "auto" is known only once a rank runs.
    """
    _require(config, _transport(config, device, expandable_segments(environment)))


def expandable_segments(environment: Mapping[str, str]) -> str:
    """Return the setting, NAME=VALUE, by which torch's allocator makes memory that CUDA IPC cannot share; "" for none."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environment.get(name, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            return f"{name}={value}"
    return ""


def warnings(config: Config) -> list[str]:
    """Return a sentence for each setting that runs and does not do what its name promises."""
    found, algorithm = [], config.algorithm
    if config.model.master_dtype == "bfloat16":
        found.append(
            'model.master_dtype = "bfloat16": parameters, gradients and AdamW\'s moments are rounded to 8 bits at every'
            " step, so that most of an update below about 2**-8 of a weight is lost, and the second moment never decays;"
            ' use "float32" to learn.'
        )
    if algorithm.kl_placement == "loss" and algorithm.estimator in ("k1", "abs"):
        what = "has an expected gradient of zero" if algorithm.estimator == "k1" else "has not the gradient of the KL"
        found.append(
            f'algorithm.kl_estimator = "{algorithm.estimator}" with kl_placement = "loss" {what}, and does not hold the policy'
            ' near the reference; use "k3" (the default), or "k2", "k1+" or "k3+", whose gradient is that of the KL.'
        )
    return found


def _require(config: Config, rules: Iterator[Rule]) -> None:
    for kept, key, text in rules:
        if not kept:
            section, name, *inner = key.split(".", 2)
            value = getattr(getattr(config, section), name)
            value = shown(value[inner[0]] if inner else value)
            must = text.startswith("must ")
            raise ConfigError(f"{key} {text}, got {value}." if must else f"{key} = {value} cannot work: {text}.")


def _values(config: Config) -> Iterator[Rule]:
    for section in fields(config):
        values = getattr(config, section.name)
        for words, is_in, names in RANGES:
            for key in names.split():
                only, _, name = key.rpartition(".")
                if only in ("", section.name) and hasattr(values, name):
                    yield is_in(getattr(values, name)), f"{section.name}.{name}", f"must be {words}"
    no_colon = "must have no colon, which SGLang does not take in the name of a model's folder"
    yield ":" not in config.run.dir, "run.dir", no_colon
    for phase, seconds in config.run.phase_timeouts.items():
        key = f"run.phase_timeouts.{phase}"
        hint = nearest(phase, PHASES, f"the phases are {', '.join(PHASES)}")
        yield phase in PHASES, key, f"there is no phase {phase}; {hint}"
        yield type(seconds) in (int, float) and seconds > 0, key, "must be a number of seconds above 0"
    latest = (
        "there is nothing to look through; set checkpoint.folder to that of the earlier runs, or give a folder step-N"
    )
    half = "half a run (rollout.load, rollout.only) has not both engine and learner, and neither saves nor resumes; leave it out"
    for key in ("every", "resume"):
        yield config.rollout.has_both or not getattr(config.checkpoint, key), f"checkpoint.{key}", half
    is_known = config.checkpoint.resume != "latest" or config.checkpoint.folder != ""
    yield is_known, "checkpoint.resume", latest
    found = set()
    with suppress(ValueError):  # a lone brace
        found = {part[1:] for part in Formatter().parse(config.task.template) if part[1] is not None}
    only = "must have the field {question} and no other ({{ and }} are literal braces)"
    yield found == {("question", "", None)}, "task.template", only
    yield len(config.task.source) > 0, "task.source", "must name at least one source"
    named = f"must be one of {', '.join((*REWARDS, *HANDED_IN))}, or your own as module:function or FILE.py:function"
    yield is_reward(config.task.reward), "task.reward", named


def _batches(config: Config) -> Iterator[Rule]:
    """Every rank must have the same number of sequences, and room for the longest: FSDP's collectives run once for each."""
    parallel, key = config.parallel, "rollout.prompts_per_step"
    prompts, responses = config.rollout.prompts_per_step, config.rollout.responses_per_prompt
    yield prompts % parallel.dp == 0, key, f"must be a multiple of parallel.dp = {parallel.dp}"
    ranks, each = parallel.tp * parallel.pp, prompts // parallel.dp * responses
    engine = f"each engine's {each} responses must be a multiple of its parallel.tp x parallel.pp = {ranks} ranks"
    yield each % ranks == 0, key, engine
    step = f"{prompts * responses} sequences (rollout.prompts_per_step x rollout.responses_per_prompt)"
    longest = config.task.max_prompt_tokens + config.rollout.max_response_tokens
    whole = f"must be 0 (off) or at least task.max_prompt_tokens + rollout.max_response_tokens = {longest}"
    for section in ("actor", "critic") if config.algorithm.has_critic else ("actor",):
        budget = getattr(config, section).tokens_per_microbatch
        yield budget == 0 or budget >= longest, f"{section}.tokens_per_microbatch", whole
        key, size = f"{section}.minibatch_size", getattr(config, section).minibatch_size
        yield size % (parallel.dp * ranks) == 0, key, f"must be a multiple of the {parallel.dp * ranks} ranks"
        yield prompts * responses % size == 0, key, f"must divide the step's {step}"


def _rollout(config: Config) -> Iterator[Rule]:
    rollout = config.rollout
    ignored = "SGLang heeds no token that would end a response with rollout.ignore_eos = true; leave one of the two out"
    yield not (rollout.stop_token_ids and rollout.ignore_eos), "rollout.stop_token_ids", ignored
    yield min(rollout.stop_token_ids, default=0) >= 0, "rollout.stop_token_ids", "must be token ids of 0 or more"
    yield "" not in rollout.stop, "rollout.stop", "must be strings of at least one character"
    blind = (
        "SGLang finds stop strings by the tokenizer that engine.args.skip_tokenizer_init = true leaves out; drop that"
    )
    yield not (rollout.stop and config.engine.args.get("skip_tokenizer_init")), "rollout.stop", blind
    apart = "rollout.load runs without an engine; leave one of the two out"
    yield not (rollout.load and rollout.only), "rollout.only", apart
    yield not (rollout.load and rollout.save), "rollout.save", "what rollout.load reads is saved already; leave one out"
    validation, none = config.validation, "there is no validation set; give validation.source"
    yield bool(validation.source) or not validation.every, "validation.every", none
    yield bool(validation.source) or not validation.before_train, "validation.before_train", none
    alone = "rollout.load runs without an engine to answer; leave one of the two out"
    yield not (validation.source and rollout.load), "validation.source", alone
    has_checkpoint = config.model.weights == "checkpoint" or not rollout.only
    nothing = 'model.weights = "random" leaves the engine nothing to load; use "checkpoint"'
    yield has_checkpoint, "rollout.only", nothing


def _algorithm(config: Config) -> Iterator[Rule]:
    algorithm, key = config.algorithm, "rollout.responses_per_prompt"
    fixed = 'only algorithm.kl_placement = "reward" adapts; set it, or algorithm.kl_target = 0'
    yield algorithm.kl_target == 0 or algorithm.kl_placement == "reward", "algorithm.kl_target", fixed
    group = f'must be at least 2 for algorithm.advantage = "{algorithm.advantage}", which compares the responses of one prompt'
    yield algorithm.has_critic or config.rollout.responses_per_prompt >= 2, key, group
    missing = f'algorithm.advantage = "{algorithm.advantage}" has no critic, so that nothing would learn; use 0'
    yield algorithm.has_critic or algorithm.critic_warmup == 0, "algorithm.critic_warmup", missing


def _optimizers(config: Config) -> Iterator[Rule]:
    for section in ("actor", "critic"):
        updates: Updates = getattr(config, section)
        yield all(0 <= beta < 1 for beta in updates.betas), f"{section}.betas", "must be at least 0 and below 1"
        one = f"{section}.warmup_steps = {updates.warmup_steps} is given too; give one of the two"
        yield not (updates.warmup_ratio and updates.warmup_steps), f"{section}.warmup_ratio", one
        warms = updates.schedule != "constant" or not (updates.warmup_ratio or updates.warmup_steps)
        why = 'transformers\' constant schedule ignores a warm-up; use "constant_with_warmup"'
        yield warms, f"{section}.schedule", why


def _engine(config: Config) -> Iterator[Rule]:
    model, parallel, arguments, transport = config.model, config.parallel, config.engine.args, config.weights.transport
    key = "engine.args.preferred_sampling_params"
    added = (
        "SGLang would change log-probs by penalties that the trainer computes without; set [rollout], and leave it out"
    )
    yield not arguments.get("preferred_sampling_params"), key, added
    for key, names in DERIVED_ENGINE_ARGUMENTS.items():
        for name in names.split():
            yield name not in arguments, f"engine.args.{name}", f"the harness derives it from {key}; set that"
    if model.overrides and model.name not in TINY_MODELS:
        only = f'only the tiny models ({", ".join(TINY_MODELS)}) have overrides, and model.name = "{model.name}"'
        yield False, f"model.overrides.{next(iter(model.overrides))}", only
    narrow = 'model.dtype = "float32" would compute with weights that are rounded already; use "float32"'
    yield model.dtype == "bfloat16" or model.master_dtype == "float32", "model.master_dtype", narrow
    no_float32 = 'flash attention has no float32; use model.dtype = "bfloat16", or "auto"'
    yield model.attention != "flash_attention_2" or model.dtype == "bfloat16", "model.attention", no_float32
    nothing = 'model.weights = "random" saves no checkpoint; use engine.initial_weights = "dummy"'
    is_saved = model.weights == "checkpoint" or config.engine.initial_weights == "dummy"
    yield is_saved, "engine.initial_weights", nothing
    if config.engine.implementation == "sglang":
        own, instead = "sglang's own VerlEngine", 'or engine.implementation = "harness"'
        flat = f"{own} has no pipeline parallelism; use parallel.pp = 1 {instead}"
        yield parallel.pp == 1, "engine.implementation", flat
        takes = f'{own} takes named tensors only; use weights.transport = "tensor"'
        yield transport in ("auto", "tensor"), "weights.transport", takes
        yield parallel.colocate, "parallel.colocate", f"{own} runs on its trainer's GPU; use true, {instead}"
    stages = (
        "sglang gives every pipeline stage the same ranks of an update group; use parallel.pp = 1 or another transport"
    )
    yield transport != "distributed" or parallel.pp == 1, "weights.transport", stages


def _updates(config: Config) -> Iterator[Rule]:
    """Refuse an engine that no sync can reach: quantized, replicated, or with a draft model beside the one that is trained."""
    arguments = config.engine.args
    for argument in ("quantization", "torchao_config"):
        yield not arguments.get(argument), f"engine.args.{argument}", f"{QUANTIZED}; leave it out"
    replicas = "SGLang updates no weights of data-parallel replicas; use parallel.dp, or enable_dp_attention too"
    alone = arguments.get("dp_size") in (None, 1) or bool(arguments.get("enable_dp_attention"))
    yield alone, "engine.args.dp_size", replicas
    counts = "takes every GPU that an engine sees for its own, and engines see all of a host (pull); leave it out"
    yield not arguments.get("enable_mscclpp"), "engine.args.enable_mscclpp", f"mscclpp {counts}"
    backend = arguments.get("moe_a2a_backend")
    yield backend != "flashinfer", "engine.args.moe_a2a_backend", f'"flashinfer" {counts}'
    draft = str(arguments.get("speculative_algorithm") or "").upper()
    if draft not in ("", "NGRAM", "UNO"):  # these load no second model
        why = f"SGLang calls a weight loader for the draft model of speculative_algorithm = {draft} too, and one trainer feeds one"
        use = f'{why}; use "bucket", "tensor" or "disk"'
        yield config.weights.transport != "pull", "weights.transport", use
        yield config.weights.verify == "off", "weights.verify", f'{why}, so that nothing can be compared; use "off"'


def _memory(config: Config) -> Iterator[Rule]:
    """Offload only what there is."""
    algorithm = config.algorithm
    absent = {
        "critic": "" if algorithm.has_critic else f'algorithm.advantage = "{algorithm.advantage}" has no critic',
        "reference": 'algorithm.kl_placement = "none" has no reference' * (algorithm.kl_placement == "none"),
    }
    for name in ("offload_parameters", "offload_gradients", "offload_optimizer"):
        for model, reason in absent.items():
            kept = not reason or model not in getattr(config.memory, name)
            yield kept, f"memory.{name}", f"{reason}; leave {model} out"


def _transport(config: Config, device: Literal["cpu", "cuda"], expandable: str) -> Iterator[Rule]:
    transport, colocate = config.weights.transport, config.parallel.colocate
    yield colocate or device == "cuda", "parallel.colocate", "on the CPU there are no GPUs to separate; use true"
    if device == "cuda":
        shared = "NCCL refuses two ranks on one GPU; use parallel.colocate = false, or another transport"
        yield transport != "distributed" or not colocate, "weights.transport", shared
        apart = (
            'with parallel.colocate = false the engine cannot open the trainer\'s memory; use "distributed" or "disk"'
        )
        yield transport in ("auto", "distributed", "disk") or colocate, "weights.transport", apart
        why = f"{expandable} makes memory that no scheduler can open (CUDA IPC); take expandable_segments out of it"
        yield transport != "pull" or not expandable, "weights.transport", why
        yield config.weights.verify not in ("bytes", "full") or not expandable, "weights.verify", why
